"""The element-wise kernel as a PyTorch operator, by its CPU reference; and who chooses it."""

import pytest
import torch

from energylab.layers import CEMMLP

elementwise = pytest.importorskip("energylab.kernels.elementwise", reason="needs triton")

LAYERS = {
    "plain": {},
    "quadratic, diagonal P": {"activation": "quadratic", "preconditioner": "diagonal"},
    "low-rank P": {"preconditioner": "diagonal_low_rank", "rank": 2},
    "positive P": {"preconditioner": "diagonal_low_rank_positive", "rank": 2},
}
every_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
ARGUMENTS = ("x", "gate", "weight", "step_sizes", "scale", "left", "right")


def make_layer(dtype: torch.dtype = torch.float64, **options) -> CEMMLP:
    layer = CEMMLP(8, 10, 3, **{"step_size": (0.4, 0.3, 0.2)} | options)
    for name, parameter in layer.named_parameters():
        if name != "step_size":
            torch.nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype)


@pytest.fixture
def on_cpu(monkeypatch):
    """Lets a layer choose the operator on the CPU, where it computes by its reference."""
    monkeypatch.setattr("energylab.layers.base.runs_on", lambda h: True)


def operands(options: dict) -> list[torch.Tensor | None]:
    """Leaves that ask for a gradient, as a layer with these options hands them to the operator."""
    layer = make_layer(**options)
    h = torch.randn(2, 3, 8, dtype=torch.float64)
    tensors = (h, layer.condition(h).gate_BNM, layer.weight, layer.step_size, *layer.preconditioner.parts())
    return [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in tensors]


@every_layer
def test_opcheck(options):
    activation = options.get("activation", "silu")
    torch.library.opcheck(
        elementwise.elementwise_descent, (*operands(options), activation, True, True, True, True, True)
    )
    torch.library.opcheck(
        elementwise.elementwise_descent, (*operands(options), activation, False, False, True, True, False)
    )


@every_layer
@pytest.mark.parametrize("final", [True, False])
def test_gradcheck(options, final):
    arguments = operands(options)
    leaves = [a for a in arguments if a is not None]

    def function(*values):
        values = iter(values)
        call = [None if a is None else next(values) for a in arguments]
        activation = options.get("activation", "silu")
        return elementwise.elementwise_descent(*call, activation, final, True, True, True, True)[:2]

    assert torch.autograd.gradcheck(function, leaves)


@every_layer
def test_a_layer_gives_the_same_as_the_reference_path(options, on_cpu):
    layer, reference = make_layer(**options), make_layer(backend="reference", **options)
    reference.load_state_dict(layer.state_dict())
    h = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for one in (layer, reference):
        output, energy = one.with_energy(h)
        loss = (output * h.detach().cos()).sum() + energy.square().mean()
        results.append((output, energy, *torch.autograd.grad(loss, (h, *one.parameters()))))
    for got, expected in zip(*results, strict=True):
        assert (got - expected).norm() <= 1e-12 * expected.norm()
    for name, expected in vars(reference.trace(h)).items():
        torch.testing.assert_close(getattr(layer.trace(h), name), expected)
    assert torch.equal(layer.trace(h).states[-1], layer(h))
    assert torch.equal(layer.trace(h).states[0], h)


def test_energies_are_computed_only_when_asked(on_cpu, monkeypatch):
    calls = []
    operator = elementwise.elementwise_descent

    def record(*arguments, **more):
        results = operator(*arguments, **more)
        calls.append([len(result) for result in results[1:]])
        return results

    monkeypatch.setattr(elementwise, "elementwise_descent", record)
    layer, h = make_layer(preconditioner="diagonal"), torch.randn(2, 5, 8, dtype=torch.float64)
    layer(h)
    layer.with_energy(h, final=False)
    layer.with_energy(h)
    with torch.no_grad():
        layer(h)
    layer.trace(h)
    # energies, states, forces: training keeps what its backward needs, evaluation nothing
    assert calls == [[0, 3, 3], [3, 3, 3], [4, 4, 3], [0, 0, 0], [4, 4, 3]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@every_layer
def test_compiles_without_a_graph_break(options, on_cpu):
    torch._dynamo.reset()
    layer = make_layer(torch.float32, **options)
    h = torch.randn(2, 7, 8, requires_grad=True)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        output = function(h)
        results.append((output, *torch.autograd.grad(output.square().sum(), (h, *layer.parameters()))))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_a_second_derivative_is_one_clear_error(on_cpu):
    layer = make_layer()
    h = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(layer(h).square().sum(), h, create_graph=True)
    with pytest.raises(RuntimeError, match=r'second derivative: .*use backend="reference"'):
        torch.autograd.grad(first.square().sum(), h)


def test_autocast_multiplies_in_its_dtype_and_keeps_the_state(on_cpu):
    layer = make_layer(torch.float32)
    h = torch.randn(2, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        output, energy = layer.with_energy(h)
    assert output.dtype == energy.dtype == torch.float32
    assert 0 < (output - layer(h)).norm() < 2e-2 * layer(h).norm()


def test_a_backward_without_states_is_named(on_cpu):
    arguments = operands({})
    output, *_ = elementwise.elementwise_descent(*arguments, "silu", False, False, False, False, True)
    with pytest.raises(RuntimeError, match="a backward needs save=True"):
        output.sum().backward()


def test_a_width_or_rank_without_a_configuration_is_named():
    cpu = torch.device("cpu")
    assert elementwise.why_not_shape(torch.bfloat16, cpu, 64, 8) is None
    assert "width 4096" in elementwise.why_not_shape(torch.float32, cpu, 4096, 0)
    assert "rank is 9" in elementwise.why_not_shape(torch.float32, cpu, 64, 9)


def test_tf32_follows_the_setting_of_pytorch():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for setting, expected in (("ieee", "ieee"), ("tf32", "tf32"), ("none", "ieee")):
            matmul.fp32_precision = setting
            assert elementwise.precision_of(torch.float32) == expected
            assert elementwise.precision_of(torch.bfloat16) == "ieee"
    finally:
        matmul.fp32_precision = before
