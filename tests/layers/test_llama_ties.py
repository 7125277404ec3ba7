"""Tied Llama attention: what is shared, and that both ties together are CEM attention's gradient step."""

import pytest
import torch

from energylab.layers import CEMAttention, LlamaAttention
from energylab.models import ModelConfig


@pytest.mark.parametrize(("tie", "matrices"), [("none", 4), ("key_value", 3), ("query_output", 3), ("both", 2)])
def test_parameters(tie: str, matrices: int) -> None:
    layer = LlamaAttention(width=12, heads=3, tie=tie)
    assert sum(parameter.numel() for parameter in layer.parameters()) == matrices * 12 * 12 + 12
    h = torch.randn(2, 5, 12)
    layer(h).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize("tie", ["key_value", "query_output", "both"])
def test_a_tie_is_the_untied_layer_with_equal_weights(tie: str) -> None:
    tied, free = (LlamaAttention(width=12, heads=3, tie=kind).double() for kind in (tie, "none"))
    weights = {name: value.clone() for name, value in tied.state_dict().items()}
    weights.setdefault("value_weight", weights["key_weight"])
    weights.setdefault("output_weight", weights["query_weight"])
    free.load_state_dict(weights)
    h = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(tied(h), free(h), rtol=1e-12, atol=1e-12)


def test_both_ties_are_a_gradient_step_of_cem_attention() -> None:
    llama = LlamaAttention(width=12, heads=3, tie="both").double()
    cem = CEMAttention(width=12, heads=3, step_size=1.0).double()
    with torch.no_grad():
        cem.query_weight.copy_(llama.query_weight)
        cem.key_weight.copy_(llama.key_weight)
    h = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(llama(h), cem(h), rtol=1e-12, atol=1e-12)


def test_bad_ties_are_named() -> None:
    with pytest.raises(ValueError, match=r"tie: expected one of none, key_value, query_output, both, got 'all'"):
        ModelConfig(attention="llama", tie="all")
    with pytest.raises(ValueError, match=r"tie: expected none, .*got 'both'"):
        ModelConfig(tie="both")
    with pytest.raises(ValueError, match=r"repelling_heads: expected 0, since only cem attention has them, got 1"):
        ModelConfig(attention="llama", repelling_heads=1)
