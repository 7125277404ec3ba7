r"""How far above the bottom a layer stops.

The bottom is a local minimum of E on the sphere of ``norm``: that of x ↦ E(√D x/‖x‖) which L-BFGS (SciPy's; Liu and Nocedal
1989) reaches from z_T. Since that does not change along x, only across it, |x| grows with every step and takes the
gradient down with it without anything being gained; so L-BFGS is restarted now and then, with x rescaled to where it
started, and what counts as stationary is the tangential gradient ‖(I − z zᵀ/D)∇E(z)‖ on the sphere itself. The 1e-6 inside
``norm`` is left out: it lets E fall a little along x, which is no way to the bottom of anything.

Positions do not see each other, so all of them are minimised at once, as one sum: its minima are theirs. Those that are
stationary stand still from then on, and what is left after a few restarts goes on position by position.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize
from torch import Tensor

from energylab.analysis.inside import Advance, energy_layers, ignore, layer_inputs, tangential
from energylab.energies import ConditionalEnergy
from energylab.layers import norm
from energylab.layers.descent import angle
from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior

STATIONARY = 1e-5
"""The tangential gradient below which a point counts as a minimum's."""
POSITIONS = 256
TOGETHER, ALONE = 2, 20
"""Restarts with all positions in one sum, and then with one position of each sequence."""
ITERATIONS = 150
"""Of L-BFGS between restarts."""


@dataclass(frozen=True, kw_only=True)
class Bottom:
    """Where L-BFGS stopped, at every position."""

    z: Tensor
    """(B, N, D), on the sphere."""
    energy: Tensor
    """(B, N)."""
    tangential_norm: Tensor
    """(B, N)."""

    @property
    def stationary(self) -> Tensor:
        """Whether it is a minimum to ``STATIONARY``, (B, N)."""
        return self.tangential_norm < STATIONARY


@torch.no_grad()
def descend_to_bottom(energy: ConditionalEnergy, start: Tensor) -> Bottom:
    """A local minimum of E below ``start``, (B, N, D), on its sphere, at every position.

    Float64. Never raises the energy of a position. What did not become stationary within the restarts is returned as it
    is, with its tangential gradient.
    """
    z, moving = _restarted(energy, start, TOGETHER)
    for position in moving.any(0).nonzero()[:, 0].tolist():
        here = slice(position, position + 1)
        # the energy of one position may be given already, and sees all of its history
        alone = energy if z.shape[1] == 1 else energy.at(position)
        z[:, here], _ = _restarted(alone, z[:, here], ALONE)
    return Bottom(z=z, energy=energy.value(z), tangential_norm=_tangential_norm(energy, z))


def _restarted(energy: ConditionalEnergy, start: Tensor, restarts: int) -> tuple[Tensor, Tensor]:
    """z after so many restarts of L-BFGS, and where it still moves, (B, N)."""
    z = start.clone()
    for _ in range(restarts):
        moving = _tangential_norm(energy, z) >= STATIONARY
        if not moving.any():
            break
        lower = _lbfgs(energy, z, moving)
        better = energy.value(lower) <= energy.value(z)
        z = torch.where((moving & better)[..., None], lower, z)
    return z, _tangential_norm(energy, z) >= STATIONARY


def _tangential_norm(energy: ConditionalEnergy, z: Tensor) -> Tensor:
    return tangential(z, energy.force(z)).norm(dim=-1)


def _lbfgs(energy: ConditionalEnergy, start: Tensor, moving: Tensor) -> Tensor:
    """Where L-BFGS comes from ``start`` in some iterations, on the same sphere; only what is ``moving`` moves."""
    before = energy.value(start)
    radius = start.norm(dim=-1, keepdim=True)

    def point(flat: np.ndarray) -> tuple[Tensor, Tensor]:
        """z = radius · x/‖x‖, and radius/‖x‖."""
        x = start.clone()
        x[moving] = torch.from_numpy(flat).view(-1, start.shape[-1])
        scale = radius / x.norm(dim=-1, keepdim=True)
        return x * scale, scale

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        z, scale = point(flat)
        force, value = energy.force_and_value(z)
        gradient = -scale * tangential(z, force)
        return (value - before)[moving].sum().item(), gradient[moving].flatten().numpy()

    options = {"maxiter": ITERATIONS, "maxfun": 2 * ITERATIONS, "maxcor": 20, "ftol": 0.0, "gtol": 0.0}
    found = minimize(objective, start[moving].flatten().numpy(), jac=True, method="L-BFGS-B", options=options)
    return point(found.x)[0]


def gaps(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    positions: int = POSITIONS,
    advance: Advance = ignore,
) -> pd.DataFrame:
    """How far above the bottom each layer stops: a row for each layer and position, on at least so many positions.

    Columns: ``layer``, ``block``, ``part``, ``task``, ``token``, ``pair``; ``fall``, E(z_0) − E(z_T); ``gap``, E(z_T) less
    the energy at the bottom; ``distance``, the angle between z_T and the bottom, in radians; ``tangential_norm`` at the
    bottom, and whether it is ``stationary``. They are all positions of the first tasks of the test set.

    Under a refreshed history each step has an energy of its own, and such layers are left out.
    """
    length = len(model.layout.kinds(num_points)[0])
    frames = []
    layers = energy_layers(model)
    for done, one in enumerate(layer_inputs(model, prior, num_points, tasks=-(-positions // length))):
        advance(done / len(layers))
        if one.layer.history != "fixed":
            continue
        trace = one.layer.trace(one.h)
        end = norm(trace.states[-1])
        bottom = descend_to_bottom(one.layer.condition(one.h), end)
        task, position = np.indices(end.shape[:2])
        columns = {
            "fall": trace.energy[0] - trace.energy[-1],
            "gap": trace.energy[-1] - bottom.energy,
            "distance": angle(end, bottom.z),
            "tangential_norm": bottom.tangential_norm,
            "stationary": bottom.stationary,
        }
        frames.append(
            pd.DataFrame(
                {
                    "layer": one.name,
                    "block": one.block,
                    "part": one.part,
                    "task": task.ravel(),
                    "token": np.array(one.tokens)[position.ravel()],
                    "pair": np.array(one.pairs)[position.ravel()],
                    **{key: values.flatten().numpy() for key, values in columns.items()},
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(GAP_COLUMNS))


GAP_COLUMNS = (
    "layer",
    "block",
    "part",
    "task",
    "token",
    "pair",
    "fall",
    "gap",
    "distance",
    "tangential_norm",
    "stationary",
)
