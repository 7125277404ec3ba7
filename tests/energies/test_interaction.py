"""The interaction energy against its definition, written as loops, and against autograd of itself."""

import itertools
import math

import pytest
import torch

from energylab.energies import (
    InteractionEnergy,
    LowRankTerm,
    PerHeadDiagonalTerm,
    RotaryPositions,
    SharedDiagonalTerm,
    hidden_future,
)

B, N, D, H, K, TAU = 2, 5, 6, 3, 4, 1.7
SIGNS = (None, (1.0, -1.0, -1.0))
OPTIONS = list(itertools.product(("none", "shared", "per_head"), (False, True), SIGNS))


def draw(diagonal: str, rotary: bool, signs=None):
    u = torch.randn(B, N, D, dtype=torch.float64)
    query, key = torch.randn(2, H, K, D, dtype=torch.float64)
    turn = RotaryPositions(torch.arange(N), K, torch.float64) if rotary else None
    terms = [LowRankTerm(u, query, key, turn)]
    d = torch.zeros(H, D, dtype=torch.float64)
    if diagonal == "shared":
        shared = torch.randn(D, dtype=torch.float64)
        d, terms = shared.expand(H, D), [*terms, SharedDiagonalTerm(u, shared)]
    elif diagonal == "per_head":
        d = torch.randn(H, D, dtype=torch.float64)
        terms.append(PerHeadDiagonalTerm(u, d))
    sign = None if signs is None else torch.tensor(signs, dtype=torch.float64)
    return InteractionEnergy(tuple(terms), TAU, hidden_future(N, u.device), sign), u, query, key, d


def rotation(position: int) -> torch.Tensor:
    """R_i as a matrix, from the definition: coordinates c and c + K/2 turn by position · 10000^(−2c/K)."""
    matrix = torch.eye(K, dtype=torch.float64)
    for c in range(K // 2):
        angle = position * 10_000 ** (-2 * c / K)
        matrix[c, c] = matrix[c + K // 2, c + K // 2] = math.cos(angle)
        matrix[c, c + K // 2], matrix[c + K // 2, c] = -math.sin(angle), math.sin(angle)
    return matrix


@pytest.mark.parametrize(("diagonal", "rotary", "signs"), OPTIONS)
def test_value_and_force_equal_their_definition_as_loops(diagonal, rotary, signs):
    energy, u, query, key, d = draw(diagonal, rotary, signs)
    z = torch.randn(B, N, D, dtype=torch.float64)
    value, force = torch.zeros(B, N, dtype=torch.float64), torch.zeros(B, N, D, dtype=torch.float64)
    for b, i, k in itertools.product(range(B), range(N), range(H)):
        turned = [rotation(i).T @ rotation(j) if rotary else torch.eye(K, dtype=torch.float64) for j in range(i + 1)]
        keys = torch.stack([(d[k].diag() + query[k].T @ turned[j] @ key[k]) @ u[b, j] for j in range(i + 1)])
        logits = keys @ z[b, i] / TAU
        sign = 1.0 if signs is None else signs[k]
        value[b, i] -= sign * TAU * logits.exp().sum().log()
        force[b, i] += sign * (logits.exp() / logits.exp().sum()) @ keys
    torch.testing.assert_close(energy.value(z), value, rtol=1e-12, atol=0)
    torch.testing.assert_close(energy.force(z), force, rtol=1e-11, atol=1e-12)
    assert torch.equal(energy.gradient(z), -energy.force(z))


@pytest.mark.parametrize(("diagonal", "rotary", "signs"), OPTIONS)
def test_hessian_vector_product_equals_autograd(diagonal, rotary, signs):
    energy, *_ = draw(diagonal, rotary, signs)
    z = torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)
    v = torch.randn_like(z)
    (gradient,) = torch.autograd.grad(energy.value(z).sum(), z, create_graph=True)
    (expected,) = torch.autograd.grad((gradient * v).sum(), z)
    torch.testing.assert_close(energy.hvp(z, v), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("diagonal", "rotary", "signs"), OPTIONS)
def test_one_position_alone_is_the_same_energy(diagonal, rotary, signs):
    energy, *_ = draw(diagonal, rotary, signs)
    position, points = 3, 7
    cloud, v = torch.randn(2, B, points, D, dtype=torch.float64)
    alone = energy.at(position)
    for point in range(points):
        z, w = torch.zeros(2, B, N, D, dtype=torch.float64)
        z[:, position], w[:, position] = cloud[:, point], v[:, point]
        torch.testing.assert_close(alone.value(cloud)[:, point], energy.value(z)[:, position])
        torch.testing.assert_close(alone.gradient(cloud)[:, point], energy.gradient(z)[:, position])
        torch.testing.assert_close(alone.hvp(cloud, v)[:, point], energy.hvp(z, w)[:, position])


@pytest.mark.parametrize("position", [-1, N])
def test_a_position_out_of_range_is_named(position):
    energy, *_ = draw("none", False)
    with pytest.raises(ValueError, match=f"position: expected 0 to {N - 1}, got {position}"):
        energy.at(position)


def test_the_energy_is_concave():
    energy, *_ = draw("per_head", True)
    z, v = torch.randn(2, B, N, D, dtype=torch.float64)
    assert ((energy.hvp(z, v) * v).sum(-1) <= 1e-12).all()


def test_where_all_heads_repel_it_is_convex():
    energy, *_ = draw("per_head", True, (-1.0, -1.0, -1.0))
    z, v = torch.randn(2, B, N, D, dtype=torch.float64)
    assert ((energy.hvp(z, v) * v).sum(-1) >= -1e-12).all()
