"""What is particular to attention: its limit, its descent, its parameters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from energylab.layers import CEMAttention, LlamaAttention, norm
from energylab.models import count_parameters

BACKENDS = ("reference", "torch")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", [None, 6])
def test_one_plain_step_is_attention_with_tied_weights(backend, head_dim):
    layer = CEMAttention(16, 4, head_dim=head_dim, step_size=1.0, backend=backend).double()
    h = torch.randn(3, 11, 16, dtype=torch.float64)
    u = norm(h)
    q = torch.einsum("bnd,hkd->bhnk", u, layer.query_weight)
    k = torch.einsum("bnd,hkd->bhnk", u, layer.key_weight)
    o = F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=1 / math.sqrt(layer.head_dim))
    expected = torch.einsum("bhnk,hkd->bnd", o, layer.query_weight)
    assert ((layer(h) - h - expected).norm() / expected.norm()).item() <= 1e-12


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    exponent=st.floats(-3, 3),
    diagonal=st.sampled_from(["none", "shared", "per_head"]),
    rotary=st.booleans(),
    recursions=st.integers(1, 8),
    length=st.integers(1, 12),
    scale=st.floats(-2, 1.5),
    backend=st.sampled_from(BACKENDS),
)
def test_every_step_size_descends(seed, exponent, diagonal, rotary, recursions, length, scale, backend):
    """E is concave, so it lies below its tangents, and normalising cannot turn z away from the step."""
    torch.manual_seed(seed)
    layer = CEMAttention(
        12, 3, recursions, diagonal=diagonal, rotary=rotary, step_size=10**exponent, backend=backend
    ).double()
    with torch.no_grad():
        for weight in (layer.query_weight, layer.key_weight, layer.diagonal):
            if weight is not None:
                weight.copy_(torch.randn_like(weight) * 10**scale)
    energy = layer.trace(torch.randn(2, length, 12, dtype=torch.float64)).energy
    rise = energy.diff(dim=0)
    scale_of_energy = energy[:-1].abs().clamp(min=layer.temperature * layer.heads)
    assert (rise <= 1e-12 * scale_of_energy).all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_head_that_repels_takes_from_a_token_what_another_would_add(backend):
    options = {"diagonal": "per_head", "backend": backend}
    h = torch.randn(2, 6, 12, dtype=torch.float64)
    mixed = CEMAttention(12, 3, repelling_heads=1, **options).double()
    torch.nn.init.normal_(mixed.diagonal)
    parts = []
    for heads in (slice(0, 2), slice(2, 3)):  # those that attract, that which repels
        part = CEMAttention(12, heads.stop - heads.start, head_dim=4, temperature=2.0, **options).double()
        with torch.no_grad():
            part.query_weight.copy_(mixed.query_weight[heads])
            part.key_weight.copy_(mixed.key_weight[heads])
            part.diagonal.copy_(mixed.diagonal[heads])
        parts.append(part)
    attracting, repelling = (part(h) - h for part in parts)
    torch.testing.assert_close(mixed(h) - h, attracting - repelling)
    energies = [part.energy(h, h) for part in parts]
    torch.testing.assert_close(mixed.energy(h, h), energies[0] - energies[1])
    assert mixed.state_dict().keys() == CEMAttention(12, 3, **options).state_dict().keys()


def test_a_negative_step_size_climbs():
    layer = CEMAttention(12, 3, 4, step_size=-0.1).double()
    assert (layer.trace(torch.randn(2, 6, 12, dtype=torch.float64)).energy.diff(dim=0) > 0).all()


def test_parameters_against_ordinary_attention():
    plain = count_parameters(CEMAttention(64, 4)) - 1  # the step size
    assert 2 * plain == count_parameters(LlamaAttention(64, 4)) - 64  # the gain of its norm
    assert count_parameters(CEMAttention(64, 4, diagonal="shared")) == plain + 1 + 64
    assert count_parameters(CEMAttention(64, 4, diagonal="per_head")) == plain + 1 + 4 * 64
    assert count_parameters(CEMAttention(64, 4, head_dim=32)) - 1 == 2 * plain
    assert count_parameters(CEMAttention(64, 4, recursions=8)) == plain + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 10, "heads": 4}, "heads: expected a divisor of the width 10"),
        ({"recursions": 0}, "recursions: expected an integer of at least 1, got 0"),
        ({"recursions": 1.5}, "recursions: expected an integer of at least 1, got 1.5"),
        ({"heads": 0}, "heads: expected an integer of at least 1, got 0"),
        ({"head_dim": 3, "rotary": True}, "head_dim: expected an even number for rotary positions, got 3"),
        ({"diagonal": "full"}, "diagonal: expected one of none, shared, per_head, got 'full'"),
        ({"temperature": 0.0}, "temperature: expected a positive number, got 0.0"),
        ({"preconditioner": "adam"}, "preconditioner: expected one of none, diagonal"),
        ({"preconditioner": "diagonal_low_rank", "rank": 9}, "rank: expected 1 to the width 8, got 9"),
        ({"step_size": (0.1, 0.2, 0.3)}, r"step_size: expected one finite number, or 1 of them"),
        ({"step_size": float("nan")}, "step_size: expected one finite number"),
        ({"update_rule": "newton"}, "update_rule: expected one of gradient, heavy_ball, nesterov, got 'newton'"),
        ({"repelling_heads": 3}, "repelling_heads: expected 0 to 2, the number of heads, got 3"),
        ({"repelling_heads": True}, "repelling_heads: expected 0 to 2, the number of heads, got True"),
        ({"history": "half"}, "history: expected one of fixed, refreshed, got 'half'"),
        ({"backend": "jax"}, "backend: expected one of auto, reference, torch, triton, got 'jax'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CEMAttention(**{"width": 8, "heads": 2, **options})
