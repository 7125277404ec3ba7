"""The one-step kernels as PyTorch operators, by their CPU reference; and who chooses them."""

import pytest
import torch

from energylab.energies import InteractionEnergy
from energylab.layers import CEMMLP, CEMAttention
from energylab.layers.base import EnergyLayer

interaction_step = pytest.importorskip("energylab.kernels.interaction_step", reason="needs triton")
elementwise_step = pytest.importorskip("energylab.kernels.elementwise_step", reason="needs triton")

LAYERS = {
    "plain": (CEMAttention, {}),
    "shared, rotary, heavy ball": (CEMAttention, {"diagonal": "shared", "rotary": True, "update_rule": "heavy_ball"}),
    "per head, low-rank P, refreshed": (
        CEMAttention,
        {"diagonal": "per_head", "preconditioner": "diagonal_low_rank", "rank": 4, "history": "refreshed"},
    ),
    "shared, a head repels": (CEMAttention, {"diagonal": "shared", "repelling_heads": 1}),
    "shared, independent": (CEMAttention, {"diagonal": "shared", "mask": "independent"}),
    "MLP": (CEMMLP, {"preconditioner": "diagonal_low_rank", "rank": 4}),
    "MLP, quadratic, refreshed, Nesterov": (
        CEMMLP,
        {"activation": "quadratic", "history": "refreshed", "update_rule": "nesterov"},
    ),
}
every_layer = pytest.mark.parametrize(("kind", "options"), LAYERS.values(), ids=LAYERS)


def make_layer(kind: type, dtype: torch.dtype = torch.float64, **options) -> EnergyLayer:
    layer = kind(8, 2 if kind is CEMAttention else 12, 3, **{"step_size": (0.4, 0.3, 0.2)} | options)
    for name, parameter in layer.named_parameters():
        if name != "step_size":
            torch.nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype)


@pytest.fixture
def by_step(monkeypatch):
    """Lets a layer choose the one-step operators on the CPU, where they compute by their reference."""
    monkeypatch.setattr("energylab.layers.base.runs_on", lambda h: True)
    for kind in (CEMAttention, CEMMLP):
        monkeypatch.setattr(kind, "_why_no_fused", lambda layer, h: "a test asks for steps")


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def operands(diagonal: str) -> list[torch.Tensor | None]:
    """q, k, a and u."""
    q, k = leaf(2, 5, 3, 4), leaf(2, 5, 3, 4)
    if diagonal == "none":
        return [q, k, None, None]
    return [q, k, leaf(2, 5, 1 if diagonal == "shared" else 3, 6), leaf(2, 5, 6)]


every_diagonal = pytest.mark.parametrize("diagonal", ["none", "shared", "per_head"])


@every_diagonal
@pytest.mark.parametrize("read_out", [True, False])
def test_attention_operator(diagonal, read_out):
    arguments = operands(diagonal)
    torch.library.opcheck(interaction_step.interaction_step, (*arguments, 0.7, "causal", read_out))

    def function(*values):
        values = [*values, *[None] * (4 - len(values))]
        found = interaction_step.interaction_step(*values, 0.7, "independent", read_out)
        return [one for one in found if one.numel()]

    assert torch.autograd.gradcheck(function, [x for x in arguments if x is not None])


@pytest.mark.parametrize("activation", ["silu", "quadratic"])
def test_mlp_operator(activation):
    arguments = (leaf(2, 3, 10), leaf(2, 3, 10), activation)
    torch.library.opcheck(elementwise_step.elementwise_step, arguments)
    assert torch.autograd.gradcheck(elementwise_step.elementwise_step, arguments)


@every_layer
def test_a_layer_gives_the_same_as_the_reference_path(kind, options, by_step):
    layer, reference = make_layer(kind, **options), make_layer(kind, backend="reference", **options)
    reference.load_state_dict(layer.state_dict())
    h = leaf(2, 7, 8)
    results = []
    for one in (layer, reference):
        output, energy = one.with_energy(h)
        loss = (output * h.detach().cos()).sum() + energy.square().mean()
        results.append((output, energy, *torch.autograd.grad(loss, (h, *one.parameters()))))
    for got, expected in zip(*results, strict=True):
        assert (got - expected).norm() <= 1e-12 * expected.norm()
    trace = layer.trace(h)
    for name, expected in vars(reference.trace(h)).items():
        torch.testing.assert_close(getattr(trace, name), expected)
    assert torch.equal(trace.states[-1], layer(h))
    assert torch.equal(trace.states[0], h)
    condition, expected = layer.condition(h), reference.condition(h)
    z, v = leaf(2, 7, 8), leaf(2, 7, 8)
    torch.testing.assert_close(condition.value(z), expected.value(z))
    torch.testing.assert_close(condition.hvp(z, v), expected.hvp(z, v))
    torch.testing.assert_close(condition.at(3).value(z[:, :2]), expected.at(3).value(z[:, :2]))


def test_the_step_is_what_is_computed(by_step):
    """Or the test above would compare the reference path with itself."""
    h = leaf(1, 3, 8)
    assert isinstance(make_layer(CEMAttention).condition(h), interaction_step.InteractionByStep)
    assert isinstance(make_layer(CEMMLP).condition(h), elementwise_step.ElementwiseByStep)
    assert isinstance(make_layer(CEMAttention, backend="reference").condition(h), InteractionEnergy)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@every_layer
def test_compiles_without_a_graph_break(kind, options, by_step):
    torch._dynamo.reset()
    layer, h = make_layer(kind, **options), leaf(2, 7, 8)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        output = function(h)
        results.append((output, *torch.autograd.grad(output.square().sum(), (h, *layer.parameters()))))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("kind", [CEMAttention, CEMMLP])
def test_a_second_derivative_is_one_clear_error(kind, by_step):
    layer, h = make_layer(kind), leaf(1, 3, 8)
    (first,) = torch.autograd.grad(layer(h).square().sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match=r'second derivative: .*use backend="reference"'):
        torch.autograd.grad(first.square().sum(), h)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_layer
def test_half_precision_and_autocast(kind, options, dtype, by_step):
    """The state keeps its dtype; the error is that of products in the narrow one."""
    layer = make_layer(kind, torch.float32, **options)
    h = torch.randn(2, 7, 8)
    expected, expected_energy = layer.with_energy(h)
    with torch.autocast("cpu", dtype):
        output, energy = layer.with_energy(h)
    assert output.dtype == energy.dtype == torch.float32
    narrow_output, narrow_energy = layer.to(dtype).with_energy(h.to(dtype))
    assert narrow_output.dtype == narrow_energy.dtype == dtype
    for got in (output, narrow_output):
        assert 0 < (got - expected).norm() < 3e-2 * expected.norm()
    assert (energy - expected_energy).norm() < 3e-2 * expected_energy.norm()


def test_a_layer_says_what_computes_it(monkeypatch):
    h = torch.randn(1, 3, 8)
    words = make_layer(CEMAttention).kernel(h)
    assert words.startswith("torch: the tensor is on cpu")
    monkeypatch.setattr("energylab.layers.base.runs_on", lambda h: True)
    assert make_layer(CEMMLP).kernel(h) == "triton, one kernel for all steps"
    words = make_layer(CEMAttention, update_rule="nesterov").kernel(h)
    assert words == (
        "triton, kernels for one step: the fused kernel takes plain gradient steps, and the update rule is Nesterov"
    )
    one_head = CEMAttention(128, 1, head_dim=256).bfloat16()
    assert one_head.kernel(torch.randn(1, 3, 128).bfloat16()) == "triton, one kernel for all steps"
    wide = CEMAttention(512, 8)
    assert "kernels for one step: the table of configurations has no entry" in wide.kernel(torch.randn(1, 3, 512))
    large = CEMAttention(8, 1, head_dim=256)
    assert large.kernel(h) == "torch: the one-step kernel takes heads of rank up to 128, and head_dim is 256"
    with pytest.raises(ValueError, match=r"backend: triton cannot run this layer: .*rank up to 128"):
        CEMAttention(8, 1, head_dim=256, backend="triton")(h)
    assert make_layer(CEMAttention, backend="reference").kernel(h) == "reference"


def test_heads_share_tiles_evenly():
    heads = interaction_step.heads_of_a_tile
    assert heads(8, 64, torch.bfloat16, 1) == 8
    assert heads(12, 64, torch.bfloat16, 1) == 6
    assert heads(4, 16, torch.float32, 1) == 4
    assert heads(3, 16, torch.float32, 1) == 3
    assert heads(8, 16, torch.float32, 1) == 4
    assert heads(8, 128, torch.float32, 1) == 1
    assert heads(8, 16, torch.bfloat16, 2) == heads(8, 16, torch.bfloat16, 0) == 1
