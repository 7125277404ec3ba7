"""What is proven of a trained layer's descent, what is true of it, and how far apart the two are."""

import math

import pandas as pd
import torch
from torch import Tensor

from energylab.layers import EnergyLayer, norm
from energylab.layers.preconditioner import NoPreconditioner
from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior
from energylab.tasks.conditions import TEST_SEED

FACTORS = tuple(2.0**n for n in range(0, 25))
"""Multiples of the certified step size that are tried, to see by how much it is too careful."""


@torch.no_grad()
def certify(model: InContextRegressor, prior: GaussianProcessPrior, num_points: int, tasks: int = 16) -> pd.DataFrame:
    """One row for each CEM layer, over all positions of so many fixed test tasks, in float64. See docs/descent.md.

    ``step_size`` is the learned η (the last, where every step has its own); ``certified`` the median of
    ``certified_step_size``, infinite or 0 where it is so for all positions; ``looseness`` the median over positions of the
    largest multiple of the certified step, in powers of 2, up to which all T steps descend (infinity where even 2^24 times
    it does; missing where nothing finite is certified);
    ``ever_rises`` the fraction of positions whose energy rises in any of the T steps;
    ``eigenvalue_min`` and ``eigenvalue_max`` those of P; ``small_steps_proven`` the fraction of
    positions where, at z_0, the force is tangential enough for every small step with this P to descend.
    """
    batch = prior.sample(tasks, num_points, seed=TEST_SEED, stream="test", dtype=torch.float64)
    wide = InContextRegressor(model.config).double()
    wide.load_state_dict(model.state_dict())
    h = wide.embed(batch.x, batch.y)
    rows = []
    for name, _, part, layer in wide.path():
        if isinstance(layer, EnergyLayer):
            rows.append({"layer": name, "part": part, "T": layer.recursions, **_certify(layer, h)})
        h = layer(h)
    return pd.DataFrame(rows)


def _certify(layer: EnergyLayer, h: Tensor) -> dict[str, float]:
    certified = layer.certified_step_size(h)
    finite = bool(certified.isfinite().all() and (certified > 0).all())
    matrix = layer.preconditioner(torch.eye(layer.width, dtype=torch.float64))
    low, high = torch.linalg.eigvalsh(matrix)[[0, -1]].tolist()
    return {
        "step_size": layer.step_size.flatten()[-1].item(),
        "certified": certified.median().item(),
        "looseness": _looseness(layer, h, certified) if finite else math.nan,
        "ever_rises": _rises(layer.trace(h).energy).double().mean().item(),
        "eigenvalue_min": low,
        "eigenvalue_max": high,
        "small_steps_proven": _small_steps_proven(layer, h, low, high),
    }


def _rises(energy: Tensor) -> Tensor:
    """Where the energy rises in any step by more than rounding, (B, N)."""
    return (energy.diff(dim=0) > 1e-12 * energy.abs().amax(0).clamp(min=1)).any(0)


def _looseness(layer: EnergyLayer, h: Tensor, certified: Tensor) -> float:
    energy = layer.condition(h)
    largest = torch.zeros_like(certified)
    descending = torch.ones_like(certified, dtype=torch.bool)
    for factor in FACTORS:
        x, before = h, energy.value(norm(h))
        for _ in range(layer.recursions):
            x = x + (factor * certified)[..., None] * energy.force(norm(x))
            after = energy.value(norm(x))
            descending &= after <= before + 1e-12 * before.abs()
            before = after
        if not descending.any():
            break
        largest = torch.where(descending, factor, largest)
    return torch.where(descending, math.inf, largest).median().item()


def _small_steps_proven(layer: EnergyLayer, h: Tensor, low: float, high: float) -> float:
    if isinstance(layer.preconditioner, NoPreconditioner):
        return 1.0
    if low <= 0:
        return 0.0
    z = norm(h)
    force = layer.condition(h).force(z)
    radial = z * (z * force).mean(-1, keepdim=True)
    ratio = (force - radial).norm(dim=-1) / radial.norm(dim=-1)
    return (ratio > (high - low) / (2 * low)).double().mean().item()
