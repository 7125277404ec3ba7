"""How descent emerges while a model learns: what its layers do on fixed tasks, and its weights, every so many steps.

The tasks are the first of the stream ``validation`` of root seed 0, for every run: no model trains on them, none is tested
on them, and records of different runs can be compared.
"""

import copy
from typing import Any, final

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior, TaskBatch
from energylab.tasks.conditions import TEST_SEED

VALIDATION_TASKS = 16

COLUMNS = (
    "step",
    "layer",
    "block",
    "part",
    "t",
    "token",
    "energy_change_mean",
    "energy_change_q25",
    "energy_change_median",
    "energy_change_q75",
    "fraction_rising",
    "gradient_norm_median",
    "tangential_norm_median",
)


@final
class Learning:
    """The records of one run.

    Args:
        steps: of the whole training.
        every: training steps between two records; 0 for none. The first is of the initial weights, the last of the final.
        snapshots: of the weights, at ``snapshot_steps(steps, snapshots)``; 0 for none.
    """

    def __init__(self, prior: GaussianProcessPrior, num_points: int, *, steps: int, every: int, snapshots: int):
        self.steps, self.every = steps, every
        self.snapshot_steps = snapshot_steps(steps, snapshots)
        self.batch = prior.sample(
            VALIDATION_TASKS, num_points, seed=TEST_SEED, stream="validation", dtype=torch.float64
        )
        self.rows: list[dict[str, Any]] = []
        self.snapshots: dict[str, Tensor] = {}
        """The weights by ``<step>/<name>``."""

    def observe(self, model: InContextRegressor, step: int) -> None:
        """Record a model as it is after so many steps, if a record is due. The model stays as it is, to the bit."""
        if self.every and (step % self.every == 0 or step == self.steps):
            self.rows += [{"step": step, **row} for row in measure(model, self.batch)]
        if step in self.snapshot_steps:
            for name, weight in model.state_dict().items():
                self.snapshots[f"{step}/{name}"] = weight.detach().cpu().clone()

    def table(self) -> pd.DataFrame:
        """A row for each (step, layer, t, token), see ``measure``; without rows for a model that has no CEM layer."""
        return pd.DataFrame(self.rows, columns=list(COLUMNS))

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [dict(row) for row in self.rows], "snapshots": dict(self.snapshots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.snapshots = [dict(row) for row in state["rows"]], dict(state["snapshots"])


def snapshot_steps(steps: int, number: int) -> tuple[int, ...]:
    """0, and ``number`` steps from 1 to the last that are logarithmically spaced, fewer where rounding joins some.

    >>> snapshot_steps(10_000, 5)
    (0, 1, 10, 100, 1000, 10000)
    """
    if not number:
        return ()
    return (0, *sorted({round(step) for step in np.geomspace(steps, 1, number)}))


@torch.no_grad()
def measure(model: InContextRegressor, batch: TaskBatch) -> list[dict[str, Any]]:
    """The descent of every CEM layer: a row for each layer, t = 0..T, and token kind, over all tasks and positions.

    Of E(z_t) − E(z_0) the mean and the quartiles; ``fraction_rising``, the share of positions whose energy rose in the step
    that led to t (missing at t = 0); the medians of ‖∇E(z_t)‖ and of its part along the sphere (missing at t = T).

    In float64, on a copy: late steps change the energy by less than float32 resolves. Under a refreshed history each step
    has an energy of its own, and their changes claim no descent.
    """
    wide = copy.deepcopy(model).double()
    device = next(wide.parameters()).device
    rows = []
    for trace in wide.trace(batch.x.to(device), batch.y.to(device)):
        missing = torch.full_like(trace.energy[:1], torch.nan)
        change = trace.energy - trace.energy[0]
        rising = torch.cat([missing, (trace.energy.diff(dim=0) > 0).to(missing)])
        slopes = [torch.cat([norms, missing]) for norms in (trace.gradient_norm, trace.tangential_norm)]
        for token in dict.fromkeys(trace.tokens):
            here = torch.tensor([kind == token for kind in trace.tokens], device=device)
            quartiles = np.quantile(_flat(change, here), (0.25, 0.5, 0.75), axis=1)
            columns = (
                _flat(change, here).mean(1),
                *quartiles,
                _flat(rising, here).mean(1),
                *(np.median(_flat(slope, here), axis=1) for slope in slopes),
            )
            for t, values in enumerate(zip(*columns, strict=True)):
                names = (trace.name, trace.block, trace.part, t, token)
                rows.append(dict(zip(COLUMNS[1:], (*names, *map(float, values)), strict=True)))
    return rows


def _flat(values: Tensor, here: Tensor) -> np.ndarray:
    """(T+1, B, N) at the positions that are ``here``, as (T+1, B·n)."""
    return values[:, :, here].flatten(1).cpu().numpy()
