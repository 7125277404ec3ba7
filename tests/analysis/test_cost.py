"""Costs against PyTorch's own counter, and the ratios that the tied weights promise."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from energylab.analysis.cost import activation_bytes, llama_like, matched, parameters, training_flops
from energylab.models import InContextRegressor, ModelConfig, count_parameters
from energylab.training import loss_of

SMALL = {"width": 16, "hidden": 24, "heads": 2}
VARIANTS = {
    "CEM": {"diagonal": "none"},
    "shared": {"recursions": 3},
    "per head": {"diagonal": "per_head", "head_dim": 6, "recursions": 4},
    "refreshed": {"history": "refreshed", "recursions": 3},
    "preconditioned": {"preconditioner": "diagonal_low_rank", "rank": 3},
    "positive": {"preconditioner": "diagonal_low_rank_positive", "rank": 3, "mlp_recursions": 1},
    "attention alone": {"mlp": "none", "depth": 3},
    "looped": {"loops": 3, "recursions": 1},
    "gaussian, shifted, 3 inputs": {"head": "gaussian", "tokens": "shifted", "input_dim": 3},
    "Llama MLP": {"mlp": "llama"},
    "Llama": {"attention": "llama", "mlp": "llama"},
    "looped Llama": {"attention": "llama", "mlp": "llama", "loops": 2},
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


@every_variant
def test_operations_equal_those_that_pytorch_counts(options):
    config = ModelConfig(**SMALL, **options, backend="reference")
    batch, points = 2, 5
    model = InContextRegressor(config)
    x, y = torch.randn(batch, points, config.input_dim), torch.randn(batch, points)
    # fused attention has no formula of its own in the counter on every backend: count its products
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_of(model(x, y), y).backward()
    assert batch * training_flops(config, points) == counter.get_total_flops()


@every_variant
def test_parts_add_up(options):
    config = ModelConfig(**SMALL, **options)
    assert parameters(config).total == count_parameters(InContextRegressor(config))


@pytest.mark.parametrize("diagonal", ["none", "shared", "per_head"])
def test_tied_weights_are_half_and_two_thirds(diagonal):
    config = ModelConfig(diagonal=diagonal, preconditioner="diagonal", repelling_heads=2)
    cem, llama = parameters(config), parameters(llama_like(config))
    assert 2 * cem.attention_weights == llama.attention_weights
    assert 3 * cem.mlp_weights == 2 * llama.mlp_weights


def test_activations_grow_with_recursions_and_not_with_parameters():
    config = ModelConfig(**SMALL)
    one, two, four = (activation_bytes(dataclasses.replace(config, recursions=T), 6, 4) for T in (1, 2, 4))
    assert one < two < four
    assert four - two == pytest.approx(2 * (two - one), rel=0.05)
    assert activation_bytes(config, 6, 8) == pytest.approx(2 * activation_bytes(config, 6, 4), rel=0.05)


def test_matching():
    llama = ModelConfig(attention="llama", mlp="llama")
    cem = ModelConfig(recursions=1)
    same_parameters = matched(cem, parameters(llama).total, lambda c: parameters(c).total)
    assert parameters(same_parameters).total == pytest.approx(parameters(llama).total, rel=0.05)
    assert same_parameters.width > cem.width
    same_operations = matched(cem, training_flops(llama, 24), lambda c: training_flops(c, 24))
    assert training_flops(same_operations, 24) == pytest.approx(training_flops(llama, 24), rel=0.05)
