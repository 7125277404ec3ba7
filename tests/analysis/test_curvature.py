"""Curvature on the sphere: products, ends of the spectrum and condition numbers, against dense Hessians and closed forms."""

import math

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian

from energylab.analysis import curvature as curvature_module
from energylab.analysis.curvature import (
    INDEFINITE,
    NotFound,
    curvature,
    eigenpairs,
    riemannian_hessian,
    spectrum,
    square_root,
)
from energylab.analysis.inside import layer_inputs
from energylab.energies import ElementwiseEnergy, Quadratic
from energylab.layers import CEMMLP, CEMAttention, norm
from energylab.layers.preconditioner import make_preconditioner
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior

D, B, N = 16, 2, 5
PRIOR = GaussianProcessPrior.preset("fixed")


def layers():
    options = {"backend": "reference", "recursions": 2}
    yield CEMAttention(D, heads=2, diagonal="shared", **options)
    yield CEMAttention(D, heads=2, diagonal="per_head", rotary=True, **options)
    yield CEMMLP(D, hidden=24, **options)
    yield CEMMLP(D, hidden=24, activation="quadratic", **options)


def dense(energy, z: torch.Tensor) -> torch.Tensor:
    """Π ∇²F(z) Π of F(x) = E(norm(x)), by autograd of autograd, (D, D).

    Far out, norm's epsilon is nothing; F does not change with |x|, so its second derivative goes as 1/|x|². On the tangent
    space it is the Riemannian Hessian.
    """
    far = 1e4
    found = hessian(lambda x: energy.value(norm(x)[None, None]).sum(), far * z) * far**2
    project = torch.eye(D, dtype=z.dtype) - torch.outer(z, z) / (z @ z)
    return project @ found @ project


def drawn(layer):
    """The layer's energy at one position of one task, and a point of its sphere."""
    h = torch.randn(B, N, D, dtype=torch.float64)
    layer.double().requires_grad_(False)
    if getattr(layer, "diagonal", None) is not None:
        layer.diagonal.normal_()
    return layer.condition(h[:1]).at(3), norm(100 * torch.randn(D, dtype=torch.float64))


@pytest.fixture(params=["all at once", "Lanczos"])
def _method(request, monkeypatch):
    if request.param == "Lanczos":
        monkeypatch.setattr("energylab.analysis.curvature.DENSE", 0)


@pytest.mark.usefixtures("_method")
@pytest.mark.parametrize("number", range(4))
def test_the_hessian_is_that_of_the_energy_on_the_sphere(number):
    energy, z = drawn(list(layers())[number])
    expected = dense(energy, z)
    found = riemannian_hessian(energy, z[None, None])(torch.eye(D, dtype=torch.float64)[None])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8 * expected.abs().max().item())
    values = torch.linalg.eigvalsh(expected).numpy()
    values = np.delete(values, np.abs(values).argmin())  # the one along z
    ends = spectrum(energy, z)
    assert ends.smallest == pytest.approx(values[0], rel=1e-7)
    assert ends.largest == pytest.approx(values[-1], rel=1e-7)


@pytest.mark.usefixtures("_method")
@pytest.mark.parametrize("kind", ["diagonal", "diagonal_low_rank_positive"])
def test_preconditioned_ends_are_those_of_the_product(kind):
    energy, z = drawn(next(layers()))
    preconditioner = make_preconditioner(kind, D, rank=2).double().requires_grad_(False)
    for parameter in preconditioner.parameters():
        parameter.normal_()
    root = square_root(preconditioner, D)
    matrix = preconditioner(torch.eye(D, dtype=torch.float64))
    torch.testing.assert_close(root @ root, matrix, rtol=1e-12, atol=1e-12)
    # P H and P^½ H P^½ have the same eigenvalues, one of which is the 0 along z
    values = torch.linalg.eigvals(matrix @ dense(energy, z)).real.numpy()
    values = np.sort(np.delete(values, np.abs(values).argmin()))
    ends = spectrum(energy, z, root)
    assert ends.smallest == pytest.approx(values[0], rel=1e-7)
    assert ends.largest == pytest.approx(values[-1], rel=1e-7)


@pytest.mark.usefixtures("_method")
def test_an_ellipsoid_has_the_curvature_of_the_books():
    """E = ½ Σ c_i z_i², by the quadratic energy of unit coordinates with gates −c: at √D e_1 the Hessian is c_i − c_1."""
    c = torch.linspace(1, 4, D, dtype=torch.float64)
    energy = ElementwiseEnergy(-c[None, None], torch.eye(D, dtype=torch.float64), Quadratic())
    z = math.sqrt(D) * torch.eye(D, dtype=torch.float64)[0]
    found = spectrum(energy, z)
    assert found.smallest == pytest.approx((c[1] - c[0]).item(), rel=1e-10)
    assert found.largest == pytest.approx((c[-1] - c[0]).item(), rel=1e-10)
    assert found.condition == pytest.approx(D - 1, rel=1e-9)
    # P = 1/(c_i − c_1), in all directions but the first, makes them all equal
    best = torch.cat([torch.ones(1, dtype=torch.float64), 1 / (c[1:] - c[0])]).sqrt().diag()
    assert spectrum(energy, z, best).condition == pytest.approx(1, rel=1e-9)
    opposite = spectrum(energy, math.sqrt(D) * torch.eye(D, dtype=torch.float64)[-1])  # the highest point
    assert opposite.largest == pytest.approx((c[-2] - c[-1]).item(), rel=1e-10)
    assert math.isnan(opposite.condition)


@pytest.mark.usefixtures("_method")
def test_eigenvectors_are_orthonormal_tangents():
    matrix = torch.randn(D, D, dtype=torch.float64)
    matrix = matrix + matrix.mT
    normal = torch.randn(D, dtype=torch.float64)
    values, vectors = eigenpairs(lambda v: v @ matrix, normal[None], 2, "LM")
    unit = normal / normal.norm()
    project = torch.eye(D, dtype=torch.float64) - torch.outer(unit, unit)
    every = torch.linalg.eigvalsh(project @ matrix @ project)
    largest = every[every.abs().argsort(descending=True)[:2]]
    np.testing.assert_allclose(values, largest.numpy(), rtol=1e-9)
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(vectors @ normal, torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-10)
    for value, vector in zip(values, vectors, strict=True):
        torch.testing.assert_close(project @ matrix @ vector, value * vector, rtol=0, atol=1e-8)


def test_an_end_close_to_nothing_is_found():
    """A flat valley, with curvatures from 1e-3 to 1e3: on which Lanczos would not converge."""
    c = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-3, 3, 199, dtype=torch.float64)])
    energy = ElementwiseEnergy(-c[None, None], torch.eye(200, dtype=torch.float64), Quadratic())
    found = spectrum(energy, math.sqrt(200) * torch.eye(200, dtype=torch.float64)[0])
    assert found.largest == pytest.approx(1e3, rel=1e-9)
    assert found.smallest == pytest.approx(1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_lanczos_finds_the_ends_of_a_wide_layer(kind, monkeypatch):
    width = 600
    assert width > curvature_module.DENSE
    wide = CEMAttention(width, heads=4) if kind == "attention" else CEMMLP(width, hidden=64)
    wide.double().requires_grad_(False)
    h = torch.randn(1, N, width, dtype=torch.float64)
    energy, z = wide.condition(h).at(3), norm(100 * torch.randn(width, dtype=torch.float64))
    found = spectrum(energy, z)
    monkeypatch.setattr(curvature_module, "DENSE", width)
    expected = spectrum(energy, z)
    assert found.problem == expected.problem == ""
    assert found.smallest == pytest.approx(expected.smallest, abs=1e-6 * expected.largest)
    assert found.largest == pytest.approx(expected.largest, rel=1e-7)


def test_what_lanczos_does_not_find_is_said(monkeypatch):
    monkeypatch.setattr(curvature_module, "LANCZOS_RESTARTS", 1)
    width = 600
    c = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-3, 3, width - 1, dtype=torch.float64)])
    energy = ElementwiseEnergy(-c[None, None], torch.eye(width, dtype=torch.float64), Quadratic())
    z = math.sqrt(width) * torch.eye(width, dtype=torch.float64)[0]
    found = spectrum(energy, z)
    assert math.isnan(found.smallest)
    assert math.isnan(found.largest)
    assert math.isnan(found.condition)
    assert found.problem.startswith("eigenvalues: Lanczos did not find the LA 1 of 599 dimensions")
    with pytest.raises(NotFound, match="Lanczos did not find the LA 2 of 599"):
        eigenpairs(lambda v: -riemannian_hessian(energy, z[None, None])(v[None])[0], z[None], 2, "LA")


def test_an_indefinite_preconditioner_has_no_condition_number():
    model = InContextRegressor(
        ModelConfig(width=D, hidden=D, heads=2, depth=1, preconditioner="diagonal_low_rank", rank=2)
    )
    with torch.no_grad():
        model.layers[0].preconditioner.right.normal_(std=3)
    table = curvature(model, PRIOR, num_points=3, positions=2)
    attention, mlp = (table[table["part"] == part] for part in ("attention", "mlp"))
    assert set(attention["preconditioner"]) == {INDEFINITE}
    assert attention["preconditioned_largest"].isna().all()
    assert set(mlp["preconditioner"]) == {"positive definite"}  # P = I still, so nothing changes
    np.testing.assert_allclose(mlp["preconditioned_largest"], mlp["largest"], rtol=1e-6)


def test_the_table_follows_the_path_to_the_bottom():
    model = InContextRegressor(ModelConfig(width=D, hidden=D, heads=2, depth=1, recursions=2))
    table = curvature(model, PRIOR, num_points=4, positions=5)
    assert len(table) == 2 * 5 * 4  # layers, positions, and z_0, z_1, z_2 and the bottom
    (first, *_) = layer_inputs(model, PRIOR, 4, tasks=1)
    row = table[(table["layer"] == first.name) & (table["step"] == 1)].iloc[0]
    states = first.layer.trace(first.h).states
    position = 2 * row["pair"] + (row["token"] == "pair")
    expected = spectrum(first.energy(0, position), norm(states[1, 0, position]))
    assert row["largest"] == pytest.approx(expected.largest, rel=1e-9)
    bottom = table[table["at"] == "bottom"]
    assert (bottom["smallest"] > -1e-4 * bottom["largest"]).all()
