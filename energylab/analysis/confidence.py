"""Is a deep fall in energy a sign of confidence? Ranks of the fall against the error, and against what cannot be known.

For the query token of each pair k of each test task, and each layer, the fall is E(z_0) − E(z_T). Energies of different
positions cannot be compared, and errors fall with k for everybody; so ranks are taken among tasks at the same k, Spearman's
correlation is computed for each k, and averaged over k.

The tasks are divided into groups, each of which gives one value, and the interval is Student's t over these. It speaks of
other tasks for this model, not of other seeds.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from torch import Tensor

from energylab.analysis.inside import Advance, energy_layers, ignore, part_of
from energylab.analysis.statistics import student_t
from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior, condition
from energylab.tasks.conditions import TEST_TASKS

GROUPS = 16
TASKS = 1024
CONDITIONS = ("in-prior", "shifted-inputs", "double-noise", "short-lengthscale")
AGAINST = ("error", "floor variance")
"""|prediction − floor mean|, and the variance of the Bayes-optimal prediction of y."""


@torch.no_grad()
def fall_and_error(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    conditions: Sequence[str] = CONDITIONS,
    tasks: int = TASKS,
    advance: Advance = ignore,
) -> pd.DataFrame:
    """A row for each condition, layer and quantity of ``AGAINST``: ``n`` groups, ``mean``, ``low`` and ``high`` of the rank
    correlation with the fall.

    A negative correlation with the error says that the model is more often right where its energy falls deep. The first
    query (k = 0) has no pairs to look at and is left out. Raises ValueError for a model without CEM layers, a refreshed
    history, an unknown condition, or too few tasks for the groups.
    """
    energy_layers(model)
    if model.config.history != "fixed":
        raise ValueError(
            f"history: expected fixed, got {model.config.history}: each step then has an energy of its own"
        )
    if not 4 * GROUPS <= tasks <= TEST_TASKS:
        limit = f"least {4 * GROUPS}" if tasks < 4 * GROUPS else f"most {TEST_TASKS}"
        raise ValueError(f"tasks: expected at {limit}, got {tasks}")
    for name in conditions:
        condition(name, prior, num_points)  # before seconds of work, not after
    rows = []
    for done, name in enumerate(conditions):
        falls, against = _measure(model, prior, num_points, name, tasks, part_of(advance, done, len(conditions)))
        for layer, fall in falls.items():
            for what, values in against.items():
                found = student_t(
                    rank_correlation(one, other)
                    for one, other in zip(np.array_split(fall, GROUPS), np.array_split(values, GROUPS), strict=True)
                )
                rows.append({"condition": name, "layer": layer, "against": what} | vars(found))
    return pd.DataFrame(rows)


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's correlation down each column, ties at their mean rank, averaged over the columns."""
    ranks = [rankdata(values, axis=0) for values in (one, other)]
    centred = [values - values.mean(0) for values in ranks]
    products = (centred[0] * centred[1]).sum(0)
    return float((products / np.sqrt((centred[0] ** 2).sum(0) * (centred[1] ** 2).sum(0))).mean())


@torch.no_grad()
def _measure(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    name: str,
    tasks: int,
    advance: Advance = ignore,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The falls of each layer, and the quantities of ``AGAINST``, (tasks, N − 1) each."""
    test = condition(name, prior, num_points)
    weight = next(model.parameters())
    queries = model.layout.query_positions(test.num_points)[1:]
    falls: dict[str, list[Tensor]] = {}
    against: dict[str, list[Tensor]] = {what: [] for what in AGAINST}
    done = 0
    for batch in test.batches(tasks):
        for part in torch.arange(len(batch)).split(128):
            advance(done / tasks)
            done += len(part)
            x, y = batch.x[part].to(weight), batch.y[part].to(weight)
            for trace in model.trace(x, y):
                fall = (trace.energy[0] - trace.energy[-1])[:, queries]
                falls.setdefault(trace.name, []).append(fall.double().cpu())
            output = model(x, y)
            prediction = output if isinstance(output, Tensor) else output[0]
            error = (prediction.double().cpu() - batch.floor_mean[part]).abs()
            against["error"].append(error[:, 1:])
            against["floor variance"].append(batch.floor_variance[part][:, 1:])
    numpy = {key: torch.cat(parts).numpy() for key, parts in (falls | against).items()}
    return {key: numpy[key] for key in falls}, {key: numpy[key] for key in against}
