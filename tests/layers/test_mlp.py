import pytest
import torch
from torch.nn import functional as F

from energylab.layers import CEMMLP, LlamaMLP, norm
from energylab.models import count_parameters


def test_one_plain_step_is_a_gated_mlp_with_tied_weights():
    layer = CEMMLP(8, 12, step_size=0.75).double()
    h = torch.randn(2, 5, 8, dtype=torch.float64)
    u = norm(h)
    expected = h + layer.step_size * (F.silu(u @ layer.weight.T) * (u @ layer.gate_weight.T)) @ layer.weight
    torch.testing.assert_close(layer(h), expected, rtol=1e-12, atol=1e-12)


def test_the_gate_stays_that_of_the_input():
    """Under a fixed history the second step is that of the first step's energy, not of a new layer's."""
    layer = CEMMLP(8, 12, recursions=2, step_size=0.75).double()
    h = torch.randn(2, 5, 8, dtype=torch.float64)
    gate = norm(h) @ layer.gate_weight.T
    x = h
    for _ in range(2):
        x = x + layer.step_size * (F.silu(norm(x) @ layer.weight.T) * gate) @ layer.weight
    torch.testing.assert_close(layer(h), x, rtol=1e-12, atol=1e-12)


def test_two_thirds_of_the_parameters():
    assert 3 * (count_parameters(CEMMLP(64, 128)) - 1) == 2 * (count_parameters(LlamaMLP(64, 128)) - 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 0}, "hidden: expected an integer of at least 1, got 0"),
        ({"activation": "relu"}, "activation: expected one of silu, quadratic, got 'relu'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CEMMLP(**{"width": 8, "hidden": 12, **options})
