"""The element-wise energy: its potential against quadrature and high precision, its force against autograd."""

import math

import mpmath
import pytest
import torch
from scipy.integrate import quad

from energylab.energies import ElementwiseEnergy, Quadratic, SiLU, silu_potential

ACTIVATIONS = [SiLU(), Quadratic()]


@pytest.mark.parametrize(
    ("a", "expected"),
    [
        (-30, 0.82246703342121),
        (-1, 0.17055734950244),
        (1e-3, 2.500833333292e-7),
        (0.3, 0.0247399396316),
        (2, 1.56240147337626),
        (21, 219.677532983257),
        (50, 1249.17753297),
    ],
)
def test_silu_potential_at_published_values(a, expected):
    assert silu_potential(torch.tensor(a, dtype=torch.float64)).item() == pytest.approx(expected, rel=5e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["silu", "quadratic"])
@pytest.mark.parametrize("a", [-25.0, -3.0, -0.36, -0.34, -1e-2, 0.0, 1e-2, 0.34, 0.36, 1.0, 8.0, 25.0])
def test_potential_is_the_integral_of_the_activation(activation, a):
    def integrand(s: float) -> float:
        return activation.activation(torch.tensor(s, dtype=torch.float64)).item()

    integral, _ = quad(integrand, 0, a, epsabs=1e-13, epsrel=1e-13, limit=200)
    potential = activation.potential(torch.tensor(a, dtype=torch.float64)).item()
    assert potential == pytest.approx(integral, rel=1e-11, abs=1e-15)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-14), (torch.float32, 1e-6)])
def test_silu_potential_is_exact_to_its_dtype(dtype, tolerance):
    points = torch.cat([torch.linspace(-60, 60, 241), torch.linspace(-1.1, 1.1, 221), torch.logspace(-8, -1, 22)])
    with mpmath.workdps(30):
        for a in points.to(dtype):
            exact = mpmath.mpf(a.item())
            reference = exact * mpmath.log1p(mpmath.exp(exact)) + mpmath.pi**2 / 12
            reference = mpmath.re(reference + mpmath.polylog(2, -mpmath.exp(exact)))
            assert abs(silu_potential(a).item() - reference) <= tolerance * abs(reference), a.item()


def test_the_float32_table_is_exact_between_its_points_and_where_it_ends():
    a = torch.cat([torch.linspace(-20, 20, 1_000_001), torch.logspace(-17, 0, 1001), -torch.logspace(-17, 0, 1001)])
    a = a[a != 0]
    assert silu_potential(torch.zeros(3)).tolist() == [0, 0, 0]
    for values in (a, 1.5 * a):  # within the table, and past its end, where one value sends all to the formula
        exact = silu_potential(values.double())
        assert ((silu_potential(values).double() - exact) / exact).abs().max() < 1e-6
    table = a[:600_000].view(2, 300, 1000)
    for view in (table.mT, table[0, 0, 0], table[:, 3]):  # any layout
        torch.testing.assert_close(silu_potential(view).double(), silu_potential(view.double()), rtol=1e-6, atol=0)
    assert silu_potential(torch.tensor([1.0, math.nan])).isnan().tolist() == [False, True]


def test_silu_potential_survives_the_ends_of_the_range():
    a = torch.tensor([-1e30, -1e4, 1e4, 1e15], dtype=torch.float64)
    expected = torch.tensor([math.pi**2 / 12, math.pi**2 / 12, 5e7 - math.pi**2 / 12, 5e29], dtype=torch.float64)
    torch.testing.assert_close(silu_potential(a), expected)


def test_silu_potential_differentiates_to_silu_and_again():
    a = torch.tensor([-40.0, -2.0, -0.1, 0.0, 0.2, 3.0, 40.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(silu_potential(a).sum(), a, create_graph=True)
    assert torch.equal(first, torch.nn.functional.silu(a))
    (second,) = torch.autograd.grad(first.sum(), a)
    torch.testing.assert_close(second, SiLU().slope(a))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["silu", "quadratic"])
def test_force_and_curvature_equal_autograd_of_the_value(activation):
    gate, weight = torch.randn(2, 5, 7, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    energy = ElementwiseEnergy(gate, weight, activation)
    z = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    v = torch.randn_like(z)
    (gradient,) = torch.autograd.grad(energy.value(z).sum(), z, create_graph=True)
    torch.testing.assert_close(energy.gradient(z), gradient, rtol=1e-12, atol=1e-13)
    (curvature,) = torch.autograd.grad((gradient * v).sum(), z)
    torch.testing.assert_close(energy.hvp(z, v), curvature, rtol=1e-12, atol=1e-13)
    alone = energy.at(3)
    torch.testing.assert_close(alone.value(z[:, 3:4]), energy.value(z)[:, 3:4])
