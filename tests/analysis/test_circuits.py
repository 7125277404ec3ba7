"""QK and OV circuits: they must say what the layers do."""

import pytest
import torch

from energylab.analysis.circuits import _matrices, circuits
from energylab.layers import CEMAttention
from energylab.layers.descent import norm
from energylab.layers.llama import TIES, LlamaAttention
from energylab.models import InContextRegressor, ModelConfig


def attend(layer: torch.nn.Module, h: torch.Tensor) -> torch.Tensor:
    """The update of every position by the two matrices alone."""
    qk, ov = _matrices(layer)
    u = norm(h)
    logits = torch.einsum("bid,hde,bje->bhij", u, qk, u)
    visible = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhij,hde,bje->bid", weights, ov, u)


def randomise(layer: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.double().parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("diagonal", ["none", "shared", "per_head"])
@pytest.mark.parametrize("preconditioner", ["none", "diagonal", "diagonal_low_rank", "diagonal_low_rank_positive"])
def test_one_step_of_cem_attention(diagonal: str, preconditioner: str) -> None:
    options = {"diagonal": diagonal, "preconditioner": preconditioner, "temperature": 1.3}
    layer = randomise(CEMAttention(12, 3, repelling_heads=1, **options))
    h = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(attend(layer, h), layer(h) - h, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tie", TIES)
def test_llama_attention(tie: str) -> None:
    layer = randomise(LlamaAttention(12, 3, tie=tie))
    h = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(attend(layer, h), layer(h) - h, rtol=1e-10, atol=1e-10)


def test_a_gradient_step_moves_what_it_looks_for() -> None:
    tied = circuits(InContextRegressor(ModelConfig(width=16, recursions=2)))
    assert tied["alignment"].to_numpy() == pytest.approx(1, abs=1e-12)
    assert len(tied) == 2 * 4
    first = tied[tied["block"] == 0]
    # T steps of 1/T, and temperature sqrt(4)
    assert first["ov_x"].to_numpy() == pytest.approx(2 * first["qk_x"].to_numpy())
    assert tied.loc[tied["block"] == 1, ["qk_x", "ov_y"]].isna().all(axis=None)
    mixed = circuits(InContextRegressor(ModelConfig(width=16, repelling_heads=1)))
    assert mixed["alignment"].to_numpy() == pytest.approx([1, 1, 1, -1] * 2, abs=1e-12)
    free = circuits(InContextRegressor(ModelConfig(width=64, attention="llama")))
    assert free["alignment"].abs().max() < 0.1


def test_the_directions_are_those_of_the_tokens() -> None:
    model = InContextRegressor(
        ModelConfig(width=8, depth=1, heads=1, head_dim=8, input_dim=2, recursions=1, diagonal="none")
    )
    layer = model.layers[0]
    with torch.no_grad():
        model.read_in.weight.zero_()
        for feature, (place, size) in enumerate([(0, 2.0), (1, 0.5), (2, 3.0), (3, 1.0)]):
            model.read_in.weight[place, feature] = size
        layer.query_weight.copy_(torch.eye(8))
        layer.key_weight.copy_(torch.diag(torch.tensor([4.0, 2.0, -6.0, 9, 9, 9, 9, 9])))
    (head,) = circuits(model).itertuples()
    scale = 8**0.5
    assert (head.qk_x * scale, head.qk_y * scale) == pytest.approx((3, -6))
    assert (head.ov_x, head.ov_y) == pytest.approx((3, -6))
