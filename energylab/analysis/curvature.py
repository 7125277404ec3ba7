r"""The curvature of a conditional energy on the sphere of ``norm``, and what a preconditioner makes of it.

On ‖z‖ = √D the energy's second derivative along a tangent v is that of the Riemannian Hessian

    H v = Π ( ∇²E − (∇E·z/D) I ) Π v ,        Π = I − z zᵀ/D ,

where the second term is the sphere's own bending. H maps the tangent space, of dimension D − 1, to itself; at a local
minimum its eigenvalues there are not negative, and the largest over the smallest, the condition number, is what makes
gradient steps slow. A step with a symmetric positive definite P behaves like a plain one on P^½ H P^½, which maps the
complement of P^{−½} z to itself. For an indefinite P there is no P^½, and nothing to report.

Eigenvalues come from products H v alone: of all basis vectors at once in a small space, by Lanczos (ARPACK) in a large one,
which may not find them: where the smallest lie close together beside a large one, it does not converge. That is then said.
Everything in float64.
Source of the Riemannian Hessian: Absil, Mahony, Sepulchre 2008, chapter 5.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd
import torch
from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh
from torch import Tensor

from energylab.analysis.bottom import descend_to_bottom
from energylab.analysis.inside import Advance, LayerInput, energy_layers, ignore, layer_inputs, part_of, tangential
from energylab.energies import ConditionalEnergy
from energylab.layers import norm
from energylab.layers.preconditioner import NoPreconditioner, Preconditioner
from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior

INDEFINITE = "P indefinite, undefined"
"""What is said in place of a condition number where P has an eigenvalue that is not positive."""


class NotFound(ValueError):
    """Lanczos did not converge to the eigenvalues."""


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """The two ends of the eigenvalues of a symmetric map; NaN, and a sentence that says why, where they were not found."""

    smallest: float
    largest: float
    problem: str = ""

    @classmethod
    def unknown(cls, problem: str) -> Self:
        return cls(smallest=math.nan, largest=math.nan, problem=problem)

    @property
    def condition(self) -> float:
        """Largest over smallest; NaN unless all are positive, as they are around a strict minimum."""
        return self.largest / self.smallest if self.smallest > 0 else math.nan


def riemannian_hessian(energy: ConditionalEnergy, z: Tensor) -> Callable[[Tensor], Tensor]:
    """``v ↦ Π(∇²E − (∇E·z/D) I)Π v`` at z, (B, N, D) on the sphere, for v that broadcasts with it."""
    radial = (energy.gradient(z) * z).sum(-1, keepdim=True) / z.square().sum(-1, keepdim=True)

    def apply(v: Tensor) -> Tensor:
        v = tangential(z, v)
        return tangential(z, energy.hvp(z, v) - radial * v)

    return apply


DENSE = 512
"""Dimensions up to which all eigenvalues at once are found sooner than a few by Lanczos, and surely."""
LANCZOS_VECTORS = 64
LANCZOS_RESTARTS = 100
"""With this many vectors each; SciPy's default, ten times the dimension, is minutes of work that rarely helps."""
LANCZOS_TOLERANCE = 1e-9
"""Of the residual, relative to the eigenvalue; the eigenvalue itself is more accurate than that where it stands alone."""


def eigenpairs(
    apply: Callable[[Tensor], Tensor], normals: Tensor, number: int, which: str
) -> tuple[np.ndarray, Tensor]:
    """Eigenvalues, (number,), and eigenvectors, (number, D), of a symmetric map of the complement of ``normals``.

    Args:
        apply: the map, from (S, D) to (S, D); what it does along the normals does not matter.
        normals: (m, D), linearly independent.
        which: ``LA``, the largest, or ``LM``, those of largest magnitude; they come first.

    Raises NotFound, a ValueError, where Lanczos does not converge.
    """
    basis = torch.linalg.qr(normals.mT, mode="complete").Q[:, len(normals) :]  # (D, D − m)
    size = basis.shape[1]

    def product(columns: np.ndarray) -> np.ndarray:
        vectors = torch.from_numpy(columns.reshape(size, -1).T.copy()) @ basis.mT
        return (apply(vectors) @ basis).mT.numpy()

    if size <= max(DENSE, number):
        matrix = product(np.eye(size))
        values, coordinates = np.linalg.eigh((matrix + matrix.T) / 2)
    else:
        shape = (size, size)
        operator = LinearOperator(shape, matvec=product, matmat=product, dtype=np.float64)  # pyright: ignore[reportCallIssue]
        start = np.random.default_rng(0).standard_normal(size)
        vectors = min(size, max(LANCZOS_VECTORS, 4 * number))
        options = {"v0": start, "ncv": vectors, "tol": LANCZOS_TOLERANCE, "maxiter": LANCZOS_RESTARTS}
        try:
            values, coordinates = eigsh(operator, number, which=which, **options)
        except ArpackError as error:  # ArpackNoConvergence is one
            raise NotFound(
                f"eigenvalues: Lanczos did not find the {which} {number} of {size} dimensions ({error})"
            ) from error
    first = np.argsort(-(np.abs(values) if which == "LM" else values))[:number]
    return values[first], (basis @ torch.from_numpy(coordinates[:, first].copy())).mT


def at_one_point(energy: ConditionalEnergy, z: Tensor) -> Callable[[Tensor], Tensor]:
    """The Riemannian Hessian at z, (D,), of the energy of one position of one task, as a map of (S, D)."""
    apply = riemannian_hessian(energy, z[None, None])
    return lambda v: apply(v[None])[0]


def spectrum(energy: ConditionalEnergy, z: Tensor, root: Tensor | None = None) -> Spectrum:
    """The extreme eigenvalues of H at z, (D,), or, given a ``root`` P^½, of P^½ H P^½; ``unknown`` where Lanczos fails.

    Args:
        energy: of one position of one task (``layer.condition(h).at(position)``).
        root: (D, D), symmetric positive definite.
    """
    hessian = at_one_point(energy, z)
    apply, normal = hessian, z
    if root is not None:
        apply, normal = lambda v: hessian(v @ root) @ root, torch.linalg.solve(root, z)
    try:
        (largest,), _ = eigenpairs(apply, normal[None], 1, "LA")
        # Lanczos is accurate relative to what it looks for, and the smallest may be close to 0: so not that, but this
        (spread,), _ = eigenpairs(lambda v: largest * v - apply(v), normal[None], 1, "LA")
    except NotFound as error:
        return Spectrum.unknown(str(error))
    return Spectrum(smallest=float(largest - spread), largest=float(largest))


def square_root(preconditioner: Preconditioner, width: int) -> Tensor | None:
    """``P^½``, (D, D), or None where P is not positive definite."""
    values, vectors = torch.linalg.eigh(preconditioner(torch.eye(width, dtype=torch.float64)))
    return None if values[0] <= 0 else (vectors * values.sqrt()) @ vectors.mT


@torch.no_grad()
def curvature(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    positions: int = 32,
    advance: Advance = ignore,
) -> pd.DataFrame:
    """The Hessian's ends along the path and at the bottom: a row for each layer, position, and z_0 .. z_T and bottom.

    Columns: ``layer``, ``block``, ``part``, ``task``, ``token``, ``pair``; ``at`` (``step`` or ``bottom``), ``step`` (t; T
    at the bottom, which was reached from z_T); ``smallest``, ``largest``, ``condition`` of H; ``preconditioner`` (``I``,
    ``positive definite``, or ``INDEFINITE``); ``preconditioned_smallest``, ``preconditioned_largest``,
    ``preconditioned_condition`` of P^½ H P^½, missing unless P is positive definite and not I; ``problem``, a sentence
    where eigenvalues are missing because they were not found.

    Positions are spread over the first tasks of the test set. Layers with a refreshed history have no energy that their
    whole path shares, and are left out.
    """
    rows: list[dict] = []
    tasks = max(1, positions // 8)
    layers = energy_layers(model)
    for done, one in enumerate(layer_inputs(model, prior, num_points, tasks)):
        if one.layer.history == "fixed":
            rows += _curvature(one, positions, part_of(advance, done, len(layers)))
    return pd.DataFrame(rows)


def _curvature(one: LayerInput, positions: int, advance: Advance) -> list[dict]:
    trace = one.layer.trace(one.h)
    bottom = descend_to_bottom(one.layer.condition(one.h), norm(trace.states[-1])).z
    points = torch.cat([norm(trace.states), bottom[None]])
    plain = isinstance(one.layer.preconditioner, NoPreconditioner)
    root = None if plain else square_root(one.layer.preconditioner, one.layer.width)
    rows = []
    tasks, length = one.h.shape[:2]
    chosen = torch.linspace(0, tasks * length - 1, min(positions, tasks * length)).round().long().tolist()
    for done, (task, position) in enumerate(divmod(index, length) for index in chosen):
        advance(done / len(chosen))
        energy = one.energy(task, position)
        for step, z in enumerate(points[:, task, position]):
            found = spectrum(energy, z)
            row = {"layer": one.name, "block": one.block, "part": one.part, "task": task}
            row |= {"token": one.tokens[position], "pair": one.pairs[position]}
            row |= {"at": "step" if step < len(points) - 1 else "bottom", "step": min(step, one.layer.recursions)}
            row |= {"smallest": found.smallest, "largest": found.largest, "condition": found.condition}
            after = spectrum(energy, z, root) if root is not None else None
            row["preconditioner"] = "I" if plain else INDEFINITE if root is None else "positive definite"
            row["preconditioned_smallest"] = after.smallest if after else math.nan
            row["preconditioned_largest"] = after.largest if after else math.nan
            row["preconditioned_condition"] = after.condition if after else math.nan
            row["problem"] = found.problem or (after.problem if after else "")
            rows.append(row)
    return rows
