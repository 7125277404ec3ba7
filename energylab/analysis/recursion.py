"""Walking further than trained: what more or fewer recursions do at test time, and when a position has gone far enough.

T' steps in every CEM layer, with the trained weights and step size: each layer sees what the layers before it made of
theirs.

*Early exit*: a position of a layer stops after the first step that lowers its energy by less than a tolerance, at the x
which that step reached; it goes no further in this layer, and the history of others does not depend on it, since a layer's
history is fixed. A tolerance of infinity is T' = 1; one of minus infinity is T' = the most.
"""

import math
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from torch import Tensor

from energylab.analysis.evaluation import MODEL_BATCH, Totals
from energylab.analysis.inside import Advance, energy_layers, ignore, require_fixed_history
from energylab.layers import EnergyLayer, norm
from energylab.layers.base import check_positive
from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior
from energylab.tasks.conditions import condition

SWEEP_TASKS = 256
TOLERANCES = (300.0, 100.0, 50.0, 30.0, 10.0, 3.0, 1.0, 0.1)


@torch.no_grad()
def sweep(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    recursions: Sequence[int],
    tasks: int = SWEEP_TASKS,
    advance: Advance = ignore,
) -> pd.DataFrame:
    """Errors and falls in energy for each T' of ``recursions``, on the first test tasks: a row for each T'.

    Columns: ``recursions`` (T'); ``rmse`` and ``excess_mse``, as in `energylab.analysis.evaluation`, over all k;
    ``energy_change <layer>``, the mean over tasks and positions of E(z_T') − E(z_0), missing under a refreshed history.
    Raises ValueError for a model without CEM layers, or no T' of at least 1.
    """
    energy_layers(model)
    for number in recursions:
        check_positive("recursions", number)

    def walk(number: int) -> Callable[[EnergyLayer, Tensor], tuple[Tensor, dict[str, Tensor]]]:
        def through(layer: EnergyLayer, h: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            x = layer(h, recursions=number)
            if layer.history != "fixed":
                return x, {"energy_change": h.new_full(h.shape[:-1], math.nan)}
            energy = layer.condition(h)
            return x, {"energy_change": energy.value(norm(x)) - energy.value(norm(h))}

        return through

    rows = []
    for done, number in enumerate(recursions):
        advance(done / len(recursions))
        errors, layers = _run(model, prior, num_points, tasks, walk(number))
        changes = {f"energy_change {name}": means["energy_change"] for name, means in layers.items()}
        rows.append({"recursions": number, **errors, **changes})
    return pd.DataFrame(rows)


@torch.no_grad()
def early_exit(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    most: int,
    tolerances: Sequence[float] = TOLERANCES,
    tasks: int = SWEEP_TASKS,
    advance: Advance = ignore,
) -> pd.DataFrame:
    """Errors against steps spent, for each tolerance, at most ``most`` steps a layer: a row for each tolerance.

    Columns: ``tolerance``, in the units of the energies; ``steps``, the mean over layers, tasks and positions; ``steps
    <layer>``; ``rmse`` and ``excess_mse`` as in ``sweep``. Raises ValueError also for a refreshed history, where energies of
    different steps cannot be compared.
    """
    energy_layers(model)
    check_positive("most", most)
    for _, _, _, layer in model.path():
        if isinstance(layer, EnergyLayer):
            require_fixed_history(layer)

    def until(tolerance: float) -> Callable[[EnergyLayer, Tensor], tuple[Tensor, dict[str, Tensor]]]:
        def through(layer: EnergyLayer, h: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            trace = layer.trace(h, recursions=most)
            steps = steps_until_exit(trace.energy, tolerance)
            x = trace.states.gather(0, steps[None, ..., None].expand(1, *h.shape))[0]
            return x, {"steps": steps}

        return through

    rows = []
    for done, tolerance in enumerate(tolerances):
        advance(done / len(tolerances))
        errors, layers = _run(model, prior, num_points, tasks, until(tolerance))
        steps = {f"steps {name}": means["steps"] for name, means in layers.items()}
        rows.append({"tolerance": tolerance, "steps": sum(steps.values()) / len(steps), **errors, **steps})
    return pd.DataFrame(rows)


def steps_until_exit(energy: Tensor, tolerance: float) -> Tensor:
    """How many steps a position takes, 1 to T, from its energies (T+1, B, N): up to the first that falls by less than
    ``tolerance``.
    """
    falls = -energy.diff(dim=0)
    stops = falls < tolerance
    stops[-1] = True
    return stops.int().argmax(0) + 1


def _run(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    tasks: int,
    through: Callable[[EnergyLayer, Tensor], tuple[Tensor, dict[str, Tensor]]],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Errors over all k, and for each energy layer the means of what ``through`` says of it, from one pass."""
    weight = next(model.parameters())
    errors = Totals()
    layers: dict[str, Totals] = {}
    for batch in condition("in-prior", prior, num_points).batches(tasks):
        predictions = []
        for x, y in zip(batch.x.split(MODEL_BATCH), batch.y.split(MODEL_BATCH), strict=True):
            h = model.embed(x.to(weight), y.to(weight))
            for name, _, _, layer in model.path():
                if isinstance(layer, EnergyLayer):
                    h, said = through(layer, h)
                    layers.setdefault(name, Totals()).add(**said)
                else:
                    h = layer(h)
            output = model.read(h, num_points)
            predictions.append(output if isinstance(output, Tensor) else output[0])
        prediction = torch.cat(predictions).to("cpu", torch.float64)
        errors.add(rmse=(prediction - batch.y).square(), excess_mse=(prediction - batch.floor_mean).square())
    means = errors.means()
    return (
        {"rmse": means["rmse"].mean().sqrt().item(), "excess_mse": means["excess_mse"].mean().item()},
        {name: {key: value.mean().item() for key, value in totals.means().items()} for name, totals in layers.items()},
    )
