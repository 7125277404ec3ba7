"""The error of a model on fixed test tasks: over the Bayes floor, over the predictor that knows the training prior only,
and beside simple references.

Write p for a model's prediction of y_k, m and v for the mean and variance of the floor, which knows the condition that
the tasks come from, and q for the mean of the `prior` predictor, which knows the training prior only.

| column | what | where it holds |
|---|---|---|
| `rmse`, `rmse_f` | √mean (p − y)², √mean (p − f)² | always |
| `excess_mse` | mean (p − m)², the expectation of mean (p − y)² − mean (y − m)² | always: m is the conditional mean |
| `excess_mse_over_prior` | mean (p − q)² | where q is the conditional mean too: same kernels, scales and noise |
| | mean (p − y)² − mean (q − y)² | elsewhere; negative where the model is the better one |
| `floor_rmse`, `floor_rmse_f` | √mean v, √mean (v − s²): expected | always |
| `<name>_rmse` | what `prior` and the predictors of `energylab.tasks.predictors.references` reach on y | always |
| `nll` | mean −log N(y; p, model's variance), nats | Gaussian head |
| `excess_nll` | mean KL(N(m, v) ‖ N(p, model's variance)), the expectation of `nll` less the floor's | Gaussian head |
| `floor_nll`, `prior_nll` | mean ½ log 2πe v: expected; mean −log density of `prior` | Gaussian head |

(p − m)² has the same expectation as a difference of squared errors and far less noise. (p − q)² has not, once q is no
conditional mean: it would also count what the model does better.

Means are over tasks, of squares, before any root; `pool` combines rows by the same rule.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from energylab.models import InContextRegressor
from energylab.tasks import Condition, GaussianProcessPrior
from energylab.tasks import condition as named_condition
from energylab.tasks.conditions import TEST_TASKS
from energylab.tasks.predictors import marginal, references

MODEL_BATCH = 32
"""Tasks that a model meets at once. Activations of more of them leave a CPU's cache: 512 take twice the time."""


class Totals:
    """Sums over tasks, from which means over unequal batches follow; a mean of their means, or of their roots, would
    weigh a small batch like a large one.
    """

    def __init__(self) -> None:
        self.tasks = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, **values_BN: Tensor) -> None:
        """Count a batch: the same names every time, (B, N) each."""
        (tasks,) = {len(values) for values in values_BN.values()}
        self.tasks += tasks
        for name, values in values_BN.items():
            total = values.sum(0, dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def means(self) -> dict[str, Tensor]:
        """The mean of each over all tasks, (N,)."""
        return {name: total / self.tasks for name, total in self._sums.items()}


@torch.no_grad()
def evaluate(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    condition: str | Condition = "in-prior",
    tasks: int = TEST_TASKS,
) -> pd.DataFrame:
    """The table above: one row for each k = 0..N−1, the number of pairs that the prediction of y_k has seen.

    Args:
        model: trained on tasks from `prior` with `num_points` pairs.
        condition: a name of `energylab.tasks.CONDITIONS`, or any `Condition`; N is its number of points.
        tasks: the first so many of the condition's 4096.

    Besides the columns above there are `condition`, `condition_id` (the hash of the specification of its tasks), `k`, and
    `predictions`, the number of predictions in the row.

    Raises ValueError for an unknown condition, or for more tasks or points than there are.
    """
    test = named_condition(condition, prior, num_points) if isinstance(condition, str) else condition
    known = _known(test, prior, tasks)
    device = next(model.parameters()).device
    totals = Totals()
    for batch in test.batches(tasks):
        outputs = [
            model(x.to(device, torch.float32), y.to(device, torch.float32))
            for x, y in zip(batch.x.split(MODEL_BATCH), batch.y.split(MODEL_BATCH), strict=True)
        ]
        gaussian = not isinstance(outputs[0], Tensor)
        columns = zip(*outputs, strict=True) if gaussian else [outputs]
        prediction, *spread = (torch.cat(list(column)).to("cpu", torch.float64) for column in columns)
        errors = {
            "rmse": (prediction - batch.y).square(),
            "rmse_f": (prediction - batch.f).square(),
            "excess_mse": (prediction - batch.floor_mean).square(),
            "floor_rmse": batch.floor_variance,
            "floor_rmse_f": batch.floor_variance_f,
        }
        if known.prior_mean is not None:
            prior_mean = known.prior_mean[totals.tasks : totals.tasks + len(batch)]
            errors["excess_mse_over_prior"] = (prediction - prior_mean).square()
        if gaussian:
            errors |= _likelihoods(prediction, spread[0], batch.y, batch.floor_mean, batch.floor_variance)
        totals.add(**errors)
    means = totals.means() | known.squared_errors
    if known.prior_mean is None:
        means["excess_mse_over_prior"] = means["rmse"] - means["prior_rmse"]
    if "nll" in means:
        means["prior_nll"] = known.prior_nll
    return pd.DataFrame(
        {
            "condition": test.name,
            "condition_id": test.identity,
            "k": range(test.num_points),
            "predictions": tasks,
            **{name: (means[name].sqrt() if _is_root(name) else means[name]).numpy() for name in _ordered(means)},
        }
    )


def pool(table: pd.DataFrame, by: Sequence[str] = ("condition",)) -> pd.DataFrame:
    """Rows of tables of `evaluate` pooled: one row for each value of the columns `by`, such as all k of a condition.

    Rows count by their `predictions`, and an RMSE is the root of the pooled squared errors, so it does not matter how the
    tasks were divided into rows. Columns that are neither metrics nor in `by` are left out.
    """
    table = table.reset_index(drop=True)  # concatenated tables repeat theirs
    metrics = [str(name) for name in table if str(name).endswith(_METRICS)]
    roots = [name for name in metrics if _is_root(name)]
    squares = table[metrics].astype(float)
    squares[roots] = squares[roots] ** 2
    rows = []
    for key, group in table.groupby(list(by), sort=False, dropna=False, observed=True):
        assert isinstance(key, tuple)
        count = group["predictions"].to_numpy()
        # a product with NaN is NaN: a metric is missing where a part of it is
        means = count @ squares.loc[group.index].to_numpy() / count.sum()
        rows.append((*key, count.sum(), *means))
    pooled = pd.DataFrame(rows, columns=[*by, "predictions", *metrics]).astype({name: table[name].dtype for name in by})
    pooled[roots] = np.sqrt(pooled[roots])
    return pooled


_METRICS = ("rmse", "rmse_f", "excess_mse", "excess_mse_over_prior", "nll")


def _is_root(name: str) -> bool:
    return name.endswith(("rmse", "rmse_f"))


def _ordered(names: Mapping[str, Tensor]) -> list[str]:
    """The model's own columns first."""
    first = ["rmse", "rmse_f", "excess_mse", "excess_mse_over_prior", "nll", "excess_nll"]
    return [name for name in first if name in names] + [name for name in names if name not in first]


def _likelihoods(mean: Tensor, variance: Tensor, y: Tensor, floor_mean: Tensor, floor: Tensor) -> dict[str, Tensor]:
    """Negative log-likelihood of a Gaussian prediction, its expected excess over the floor's, and the floor's entropy."""
    log_ratio = (variance / floor).log()
    return {
        "nll": 0.5 * (variance.log() + (y - mean).square() / variance + math.log(2 * math.pi)),
        "excess_nll": 0.5 * (log_ratio + (floor + (floor_mean - mean).square()) / variance - 1),
        "floor_nll": 0.5 * (floor.log() + math.log(2 * math.pi) + 1),
    }


@dataclass(frozen=True)
class _Known:
    """What does not depend on the model."""

    squared_errors: dict[str, Tensor]
    """On y, of each reference, (N,), under the name of its column."""
    prior_nll: Tensor
    """(N,)."""
    prior_mean: Tensor | None
    """(tasks, N) where it is the conditional mean of the tested tasks."""


@functools.lru_cache(maxsize=16)  # the conditions of a study, which its runs share
def _known(test: Condition, prior: GaussianProcessPrior, tasks: int) -> _Known:
    totals, means = Totals(), []
    for batch in test.batches(tasks):
        predicted = marginal(batch.x, batch.y, prior)
        means.append(predicted.mean)
        totals.add(
            prior_rmse=(predicted.mean - batch.y).square(),
            prior_nll=-predicted.log_density,
            **{
                f"{name}_rmse": (predict(batch.x, batch.y) - batch.y).square()
                for name, predict in references(prior).items()
            },
        )
    errors = totals.means()
    return _Known(
        prior_nll=errors.pop("prior_nll"),
        squared_errors=errors,
        prior_mean=torch.cat(means) if _same_law(test.prior, prior) else None,
    )


def _same_law(one: GaussianProcessPrior, other: GaussianProcessPrior) -> bool:
    """Whether both have the same law of y given x: where the inputs lie, and how many, does not matter for that."""
    inputs = {key: getattr(other, key) for key in ("input_range", "input_layout", "max_points")}
    return dataclasses.replace(one, **inputs) == other
