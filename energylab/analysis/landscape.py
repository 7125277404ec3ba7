r"""The hill under one query: a trained layer's conditional energy on a plane through the start of its path.

The variable lives on the sphere ‖z‖ = √D, so the plane is bent onto it. With orthonormal tangents a, b at z_0, the point
(α, β) is reached from z_0 by turning through ρ = √(α² + β²) radians along the great circle towards α a + β b:

    z(α, β) = cos ρ · z_0 + sin ρ · √D (α a + β b)/ρ

The distance of a point from the origin is thus how far z has turned since z_0. Points of the path need not lie on the
plane; each is shown where its projection onto span(z_0, a, b) lies, and ``inside`` says what share of its length that is.

Planes:
    trajectory   a and b are the first two principal directions of the path as it leaves z_0: the singular vectors of its
                 turns. Where it has one direction alone (T = 1), b is the leading eigenvector of the Riemannian Hessian
                 at z_0 orthogonal to it.
    hessian      the two leading eigenvectors, those of largest magnitude, of the Riemannian Hessian at z_0.
    random       two random tangents, orthonormal.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from energylab.analysis.bottom import descend_to_bottom
from energylab.analysis.curvature import at_one_point, eigenpairs
from energylab.analysis.inside import Advance, LayerInput, find_layer, ignore, require_fixed_history, tangential
from energylab.energies import ConditionalEnergy
from energylab.layers import EnergyLayer, norm
from energylab.layers.base import check_choice
from energylab.layers.descent import angle
from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior
from energylab.tasks.conditions import TEST_TASKS

PLANES = ("trajectory", "hessian", "random")
LARGEST_GRID = 2001
"""Points along a side: four million energies."""
CONTINUED = 1024
"""Steps up to which the path goes on."""
STILL = 1e-6
"""Radians: a continued path that turns by less in a step has converged."""
FURTHEST = 3.0
"""Radians that a map reaches from z_0: a little less than half a turn, where the great circles meet again."""
CUT_POINTS = 201
CUT_SPAN = 6.0
"""Multiples of the learned step to which a cut reaches at most."""


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """The energy around one query. All energies are less E(z_0); all angles are radians."""

    layer: str
    part: str
    task: int
    pair: int
    plane: str
    recursions: int
    """T."""
    axes: Tensor
    """a and b, unit vectors, (2, D)."""
    start: Tensor
    """x_0, (D,): the layer's input."""
    grid: pd.DataFrame
    """``alpha``, ``beta``, ``energy``: one row a point, β slowest."""
    path: pd.DataFrame
    """``kind``, ``step``, ``alpha``, ``beta``, ``energy``, ``inside``. The kinds: ``path`` (z_0 .. z_T), ``continued`` (z_T
    and on, see ``continue_path``), ``bottom`` (what L-BFGS finds from z_T), ``certified`` (z_0 after one step of the
    certified size, where that is finite and not 0)."""
    cuts: pd.DataFrame
    """``step`` (t), ``multiple`` (s), ``energy_change``: E(norm(x_t + s (x_{t+1} − x_t))) − E(z_t)."""
    best_multiples: tuple[float, ...]
    """For each step, the s at which that is smallest: above 1 the step undershoots, below it overshoots. Infinity where it
    falls for ever; 0 where no positive s lowers the energy."""
    certified_step_size: float
    """The largest η that is proven to descend; infinity where every one is, 0 where none is."""
    step_sizes: tuple[float, ...]
    """η of each step."""
    converged: bool
    """Whether the continued path came to rest."""
    stationary: bool
    """Whether L-BFGS reached a minimum, to ``energylab.analysis.bottom.STATIONARY``."""


@torch.no_grad()
def landscape(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    *,
    layer: str,
    position: int,
    plane: str = "trajectory",
    size: int = 101,
    task: int = 0,
    seed: int = 0,
    advance: Advance = ignore,
) -> Landscape:
    """The energy that the query token of pair ``position`` meets in ``layer``, on test task ``task``.

    Args:
        layer: its name, as ``block 0 attention``.
        position: counts pairs, 0 to num_points − 1.
        plane: ``trajectory``, ``hessian`` or ``random``.
        size: points along each side of the grid, 2 to 2001.
        seed: of the random plane.

    Raises ValueError for a model without CEM layers, a layer that does not exist (it says which do), a position out of
    range, another plane, or a layer with a refreshed history.
    """
    check_choice("plane", plane, PLANES)
    if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= LARGEST_GRID:
        raise ValueError(f"size: expected an integer from 2 to {LARGEST_GRID}, got {size!r}")
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < TEST_TASKS:
        raise ValueError(f"task: expected 0 to {TEST_TASKS - 1}, one of the test tasks, got {task!r}")
    one = find_layer(model, layer, prior, num_points, first_task=task)
    if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < num_points:
        raise ValueError(f"position: expected 0 to {num_points - 1}, a pair of the task, got {position!r}")
    require_fixed_history(one.layer)
    token = next(i for i, pair in enumerate(one.pairs) if pair == position and one.tokens[i] == "query")
    return _landscape(one, token, plane, size, task, seed, advance)


def _landscape(one: LayerInput, token: int, plane: str, size: int, task: int, seed: int, advance: Advance) -> Landscape:
    layer, energy = one.layer, one.energy(0, token)
    trained = layer.trace(one.h).states[:, 0, token]
    continued, converged = continue_path(layer, energy, trained[-1])
    bottom = descend_to_bottom(energy, norm(trained[-1])[None, None])
    certified = float(layer.certified_step_size(one.h)[0, token])

    z = norm(trained[0])
    axes = _axes(plane, energy, norm(trained), seed)
    points = {"path": norm(trained), "continued": continued, "bottom": bottom.z[0]}
    if 0 < certified < math.inf:
        direction = layer.preconditioner(energy.force(z[None, None]))[0, 0]
        points["certified"] = norm(trained[0] + certified * direction)[None]
    start_energy = energy.value(z[None, None]).item()
    frames = []
    for kind, where in points.items():
        coordinates, inside = project(z, axes, where)
        first = layer.recursions if kind in ("continued", "bottom") else 1 if kind == "certified" else 0
        frames.append(
            pd.DataFrame(
                {
                    "kind": kind,
                    "step": range(first, first + len(where)),
                    "alpha": coordinates[:, 0].numpy(),
                    "beta": coordinates[:, 1].numpy(),
                    "energy": (energy.value(where[None])[0] - start_energy).numpy(),
                    "inside": inside.numpy(),
                }
            )
        )
    path = pd.concat(frames, ignore_index=True)
    alpha, beta = (torch.linspace(low, high, size, dtype=z.dtype) for low, high in _window(path, plane))
    mesh = torch.cartesian_prod(beta, alpha).flip(-1)
    values = []
    for part in mesh.split(4096):
        advance(len(values) * 4096 / len(mesh))
        values.append(energy.value(on_sphere(z, axes, part)[None])[0])
    cuts, best = _cuts(energy, trained)
    return Landscape(
        layer=one.name,
        part=one.part,
        task=task,
        pair=one.pairs[token],
        plane=plane,
        recursions=layer.recursions,
        axes=axes,
        start=trained[0],
        grid=pd.DataFrame(
            {
                "alpha": mesh[:, 0].numpy(),
                "beta": mesh[:, 1].numpy(),
                "energy": (torch.cat(values) - start_energy).numpy(),
            }
        ),
        path=path,
        cuts=cuts,
        best_multiples=best,
        certified_step_size=certified,
        step_sizes=tuple(float(size) for size in layer.step_sizes(layer.recursions)),
        converged=converged,
        stationary=bool(bottom.stationary.item()),
    )


def on_sphere(z: Tensor, axes: Tensor, coordinates: Tensor) -> Tensor:
    """``z(α, β)`` for coordinates (S, 2), (S, D)."""
    radius = z.norm()
    turned = coordinates.norm(dim=-1, keepdim=True)
    # sin ρ / ρ, which is 1 at the origin
    return turned.cos() * z + torch.sinc(turned / math.pi) * radius * (coordinates @ axes)


def project(z: Tensor, axes: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """The (α, β), (S, 2), of points (S, D) on the sphere, and the share of their length that lies in span(z, a, b), (S,)."""
    unit = torch.nn.functional.normalize(points, dim=-1)
    along, across = unit @ (z / z.norm()), unit @ axes.mT
    distance = across.norm(dim=-1, keepdim=True)
    turned = torch.atan2(distance, along[:, None])
    coordinates = torch.where(distance > 0, turned / distance.clamp(min=1e-300), 0) * across
    return coordinates, torch.cat([along[:, None], across], dim=-1).norm(dim=-1)


def _axes(plane: str, energy: ConditionalEnergy, path: Tensor, seed: int) -> Tensor:
    z = path[0]
    hessian = at_one_point(energy, z)
    if plane == "random":
        draws = torch.randn(2, len(z), dtype=z.dtype, generator=torch.Generator().manual_seed(seed))
        axes = torch.linalg.qr(tangential(z, draws).mT).Q.mT
    elif plane == "hessian":
        _, axes = eigenpairs(hessian, z[None], 2, "LM")
    else:
        turns = _turns(path)
        _, strength, axes = torch.linalg.svd(turns, full_matrices=False)
        axes = axes[: min(2, int((strength > 1e-6 * strength.max()).sum()))]
        if len(axes) < 2:
            _, rest = eigenpairs(hessian, torch.cat([z[None], axes]), 2 - len(axes), "LM")
            axes = torch.cat([axes, rest])
    # signs are free: the end of the path lies to the right, and above
    return torch.where((path[-1] @ axes.mT < 0)[:, None], -axes, axes)


def _turns(path: Tensor) -> Tensor:
    """The tangents at z_0 along which z_1 .. z_T lie, as long as the angle in radians, (T, D)."""
    z, others = path[0], path[1:]
    tangent = torch.nn.functional.normalize(tangential(z, others), dim=-1)
    return tangent * angle(z.expand_as(others), others)[:, None]


def continue_path(layer: EnergyLayer, energy: ConditionalEnergy, x: Tensor) -> tuple[Tensor, bool]:
    """z from x, (D,), through more plain steps of the layer's last size until it stands ``STILL``, and whether it does.

    After each step x is put back to its length. The force has a part along z, and where that lengthens x with every step,
    the turns would otherwise shrink wherever z is, and the path would hardly come to rest.
    """
    step_size, length = layer.step_sizes(layer.recursions)[-1], x.norm()
    path = [norm(x)]
    for _ in range(CONTINUED):
        x = x + step_size * layer.preconditioner(energy.force(path[-1][None, None]))[0, 0]
        x = x * (length / x.norm())
        path.append(norm(x))
        if angle(path[-2], path[-1]) < STILL:
            return torch.stack(path), True
    return torch.stack(path), False


def _window(path: pd.DataFrame, plane: str) -> list[tuple[float, float]]:
    """Limits of α and β: a square that holds every point shown, with a margin."""
    points = path[["alpha", "beta"]].to_numpy()
    low, high = points.min(0), points.max(0)
    reach = float(np.hypot(*points.T).max())
    half = max(0.62 * float((high - low).max()), 0.35 * reach, 0.05)
    middle = (low + high) / 2
    return [
        (max(centre - half, -FURTHEST / math.sqrt(2)), min(centre + half, FURTHEST / math.sqrt(2))) for centre in middle
    ]


def _cuts(energy: ConditionalEnergy, states: Tensor) -> tuple[pd.DataFrame, tuple[float, ...]]:
    steps = states.diff(dim=0)

    def change(step: int, multiples: Tensor) -> Tensor:
        points = norm(states[step] + multiples[:, None] * steps[step])
        return energy.value(points[None])[0] - energy.value(norm(states[step])[None, None])[0]

    best = tuple(
        _best_multiple(lambda s, t=t: change(t, torch.as_tensor(s, dtype=states.dtype))) for t in range(len(steps))
    )
    finite = [s for s in best if s < CUT_SPAN]
    multiples = torch.linspace(
        0, min(CUT_SPAN, max(2.0, 1.4 * max(finite, default=CUT_SPAN))), CUT_POINTS, dtype=states.dtype
    )
    frames = [
        pd.DataFrame({"step": t, "multiple": multiples.numpy(), "energy_change": change(t, multiples).numpy()})
        for t in range(len(steps))
    ]
    return pd.concat(frames, ignore_index=True), best


def _best_multiple(change) -> float:
    """The s > 0 with the smallest ``change(s)``: a scan of six decades, then Brent's method between its neighbours."""
    scan = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 601)])
    values = change(scan).numpy()
    lowest = int(values.argmin())
    if lowest == len(scan) - 1:
        return math.inf
    if lowest == 0:
        return 0.0
    found = minimize_scalar(
        lambda s: change(np.array([s])).item(),
        bounds=(scan[lowest - 1], scan[lowest + 1]),
        method="bounded",
        options={"xatol": 1e-6 * scan[lowest]},
    )
    return float(found.x)
