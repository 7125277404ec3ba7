"""Update rules against their formulas; step sizes that are proven to descend; what a preconditioner undoes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energylab.energies import ConditionalEnergy
from energylab.layers import CEMMLP, Backtracking, CEMAttention, norm
from energylab.layers.descent import HeavyBall, Here, Nesterov, angle, norm_jacobian


def history(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 8, dtype=torch.float64)


def test_norm_and_its_jacobian():
    x = history(3, 4) * 0.01  # small, so that the 1e-6 matters
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    v = history(3, 4)
    _, expected = torch.func.jvp(norm, (x,), (v,))
    torch.testing.assert_close(norm_jacobian(x, v), expected, rtol=1e-10, atol=1e-12)


def test_angles_small_and_large():
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for expected in (1e-9, 1e-3, 1.0, math.pi - 1e-6):
        b = 3 * torch.tensor([math.cos(expected), math.sin(expected)], dtype=torch.float64)
        assert angle(a, b).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("rule", "beta"), [("heavy_ball", HeavyBall().momentum), ("nesterov", Nesterov().momentum)])
def test_momentum_by_its_recurrence(rule, beta):
    layer = CEMAttention(8, 2, recursions=4, update_rule=rule, step_size=0.25).double()
    h = history(2, 5)
    energy = layer.condition(h)
    x, v = h, torch.zeros_like(h)
    for _ in range(4):
        point = x + beta * v if rule == "nesterov" else x
        v = beta * v - 0.25 * energy.gradient(norm(point))
        x = x + v
    torch.testing.assert_close(layer(h), x, rtol=1e-12, atol=1e-12)


def test_no_momentum_is_the_gradient_rule():
    h, direction = history(2, 5), history(2, 5)
    step_size = torch.tensor(0.3, dtype=torch.float64)
    here = Here(h, direction, step_size, energy=None)
    x, velocity = HeavyBall(momentum=0.0).step(here, memory=history(2, 5))
    torch.testing.assert_close(x, h + 0.3 * direction)
    torch.testing.assert_close(velocity, 0.3 * direction)


@pytest.mark.parametrize(
    "make", [lambda **o: CEMMLP(8, 12, **o), lambda **o: CEMAttention(8, 2, **o)], ids=["mlp", "attention"]
)
@pytest.mark.parametrize("preconditioner", ["none", "diagonal_low_rank"])
def test_backtracking_never_climbs(make, preconditioner):
    layer = make(recursions=5, step_size=30.0, preconditioner=preconditioner, rank=4).double()
    for name, parameter in layer.named_parameters():
        if name != "step_size":
            torch.nn.init.normal_(parameter, std=0.7)
    h = history(4, 9)
    trace = layer.trace(h, update_rule=Backtracking())
    change = trace.energy.diff(dim=0)
    assert (change <= 1e-12 * trace.energy[:-1].abs()).all()
    assert (change < -1e-6).any()  # and it does move
    if isinstance(layer, CEMMLP) or preconditioner != "none":
        assert (layer.trace(h).energy.diff(dim=0) > 0).any()  # the same steps without it climb


def test_backtracking_accepts_what_armijo_accepts():
    """The accepted step satisfies the condition; twice the step does not, unless it is the first trial."""

    class Bowl(ConditionalEnergy):
        curvature = torch.logspace(0, 3, 8, dtype=torch.float64)

        def value(self, z):
            return (self.curvature * z.square()).sum(-1) / 2

        def force(self, z):
            return -self.curvature * z

        def hvp(self, z, v):
            return self.curvature * v

        def at(self, position):
            return self

    energy, rule = Bowl(), Backtracking(sufficient=0.3)
    x = history(1, 50)
    direction = energy.force(norm(x))
    first = torch.tensor(8.0, dtype=torch.float64)
    after, _ = rule.step(Here(x, direction, first, energy), None)
    steps = (after - x).norm(dim=-1) / direction.norm(dim=-1)
    slope = (energy.gradient(norm(x)) * norm_jacobian(x, direction)).sum(-1)
    start = energy.value(norm(x))

    def enough(step):
        return energy.value(norm(x + step[..., None] * direction)) <= start + 0.3 * step * slope

    assert (steps > 0).all()
    assert enough(steps).all()
    assert (~enough(2 * steps) | (steps > 7.9)).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    activation=st.sampled_from(["silu", "quadratic"]),
    recursions=st.integers(1, 6),
    share=st.floats(0.01, 1),
    scale=st.floats(-1, 1),
)
def test_certified_step_sizes_descend(seed, activation, recursions, share, scale):
    torch.manual_seed(seed)
    layer = CEMMLP(8, 12, recursions, activation=activation).double()
    with torch.no_grad():
        layer.weight.mul_(10**scale)
        layer.gate_weight.copy_(torch.randn_like(layer.gate_weight))
    h = history(2, 6) * 10 ** torch.empty(2, 6, 1, dtype=torch.float64).uniform_(-1, 1)
    certified = layer.certified_step_size(h)
    assert certified.shape == (2, 6)
    assert (certified > 0).all()
    for b in range(2):
        for i in range(6):
            step_size = share * certified[b, i] if certified[b, i].isfinite() else torch.tensor(1e3)
            with torch.no_grad():
                layer.step_size.copy_(step_size)
            energy = layer.trace(h[b : b + 1, i : i + 1]).energy
            assert (energy.diff(dim=0) <= 1e-12 * energy.abs().max()).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    repelling=st.integers(1, 3),
    diagonal=st.sampled_from(["none", "shared", "per_head"]),
    rotary=st.booleans(),
    recursions=st.integers(1, 6),
    share=st.floats(0.01, 1),
    scale=st.floats(-1, 1),
)
def test_certified_step_sizes_descend_where_heads_repel(seed, repelling, diagonal, rotary, recursions, share, scale):
    torch.manual_seed(seed)
    options = {"diagonal": diagonal, "rotary": rotary, "repelling_heads": repelling}
    layer = CEMAttention(12, 3, recursions, **options).double()
    with torch.no_grad():
        for weight in (layer.query_weight, layer.key_weight, layer.diagonal):
            if weight is not None:
                weight.copy_(torch.randn_like(weight) * 10 ** (scale / 2))
    h = torch.randn(1, 6, 12, dtype=torch.float64) * 10 ** torch.empty(1, 6, 1, dtype=torch.float64).uniform_(-1, 1)
    certified = layer.certified_step_size(h)[0]
    assert certified.isfinite().all()
    assert (certified > 0).all()
    for i, step_size in enumerate(share * certified):
        with torch.no_grad():
            layer.step_size.copy_(step_size)
        energy = layer.trace(h).energy[:, 0, i]
        assert (energy.diff() <= 1e-12 * energy.abs().max()).all()


def test_a_head_that_repels_may_climb():
    layer = CEMAttention(8, 2, 2, repelling_heads=1).double()
    h = history(20, 10)
    with torch.no_grad():
        layer.step_size.copy_(3000 * layer.certified_step_size(h).median())
    assert (layer.trace(h).energy.diff(dim=0) > 0).any()


def test_a_step_far_beyond_the_certified_one_climbs():
    layer = CEMMLP(8, 12, 2).double()
    h = history(20, 10)
    with torch.no_grad():
        layer.step_size.copy_(300 * layer.certified_step_size(h).median())
    assert (layer.trace(h).energy.diff(dim=0) > 0).any()


def test_what_is_certified():
    h = history(2, 3)
    assert (CEMAttention(8, 2, diagonal="shared", rotary=True).double().certified_step_size(h) == math.inf).all()
    for options in ({"preconditioner": "diagonal"}, {"history": "refreshed"}, {"update_rule": "nesterov"}):
        assert (CEMAttention(8, 2, **options).double().certified_step_size(h) == 0).all()
        assert (CEMMLP(8, 12, **options).double().certified_step_size(h) == 0).all()


def test_a_preconditioner_can_turn_every_step_uphill():
    """Even a positive definite P: what vᵀ Π P v loses to the radial part of v, no step size gives back."""
    layer = CEMAttention(8, 2, preconditioner="diagonal").double()
    h = history(1, 1)
    energy = layer.condition(h)
    z = norm(h)[0, 0]
    v = energy.force(norm(h))[0, 0]
    radial, tangent = z * (z @ v) / 8, v - z * (z @ v) / 8
    # P = diag(p): choose p so that tangentᵀ P (tangent + radial) is negative
    product = tangent * (tangent + radial)
    p = torch.where(product < 0, 100.0, 0.01).double()
    assert (tangent * p * v).sum() < 0
    with torch.no_grad():
        layer.preconditioner.diagonal.copy_(torch.log(torch.expm1(p)))
        layer.step_size.fill_(1e-9)
    assert (layer.trace(h).energy.diff(dim=0) > 0).all()


def test_input_is_checked_where_asked_for():
    layer = CEMAttention(8, 2).double()
    h = history(2, 3)
    torch.testing.assert_close(layer(h, check_finite=True), layer(h))
    h[1, 2, 0] = math.nan
    with pytest.raises(ValueError, match="h: expected finite values, got NaN or infinity at 1 of 6 positions"):
        layer(h, check_finite=True)


@pytest.mark.parametrize("shape", [(2, 8), (1, 2, 7), (1, 2, 3, 8)])
def test_input_of_another_shape_is_named(shape):
    with pytest.raises(ValueError, match=r"h: expected shape \(B, N, 8\), got \("):
        CEMMLP(8, 12)(torch.randn(shape))
