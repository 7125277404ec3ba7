"""The interaction kernel as a PyTorch operator, by its CPU reference; and who chooses it."""

import pytest
import torch

from energylab.kernels import available
from energylab.layers import CEMAttention, norm

interaction = pytest.importorskip("energylab.kernels.interaction", reason="needs triton")

LAYERS = {
    "plain": {},
    "shared, rotary, diagonal P": {"diagonal": "shared", "rotary": True, "preconditioner": "diagonal"},
    "per head, low-rank P": {"diagonal": "per_head", "preconditioner": "diagonal_low_rank", "rank": 2},
    "shared, rotary, a head repels": {"diagonal": "shared", "rotary": True, "repelling_heads": 1},
    "positive P, independent": {
        "diagonal": "shared",
        "preconditioner": "diagonal_low_rank_positive",
        "rank": 2,
        "mask": "independent",
    },
}
every_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)


def make_layer(dtype: torch.dtype = torch.float64, **options) -> CEMAttention:
    layer = CEMAttention(8, 2, 3, **{"step_size": (0.4, 0.3, 0.2)} | options)
    for name, parameter in layer.named_parameters():
        if name != "step_size":
            torch.nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype)


@pytest.fixture
def on_cpu(monkeypatch):
    """Lets a layer choose the operator on the CPU, where it computes by its reference."""
    monkeypatch.setattr("energylab.layers.base.runs_on", lambda h: True)
    monkeypatch.setattr(interaction, "why_not_shape", lambda *arguments: None)


@pytest.fixture
def operands(monkeypatch):
    """What a layer hands to the operator, as leaves that ask for a gradient."""

    def operands(options, batch=2, length=3, final=True):
        seen = []
        monkeypatch.setattr("energylab.layers.base.runs_on", lambda h: True)
        monkeypatch.setattr(interaction, "why_not_shape", lambda *arguments: None)
        operator = interaction.interaction_descent

        def record(*arguments, **more):
            seen.append((arguments, more))
            return operator(*arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(interaction, "interaction_descent", record)
            h = torch.randn(batch, length, 8, dtype=torch.float64, requires_grad=True)
            make_layer(**options).with_energy(h, final=final)
        arguments, more = seen[0]
        leaves = [
            a.detach().clone().requires_grad_(name not in ("cos", "sin")) if isinstance(a, torch.Tensor) else a
            for name, a in zip(interaction._ARGUMENTS, arguments, strict=True)
        ]
        return leaves, more

    return operands


@every_layer
def test_opcheck(options, operands):
    arguments, more = operands(options)
    torch.library.opcheck(interaction.interaction_descent, tuple(arguments), more)


@every_layer
@pytest.mark.parametrize("final", [True, False])
def test_gradcheck(options, final, operands):
    arguments, more = operands(options, final=final)
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]

    def function(*values):
        values = iter(values)
        call = [next(values) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in arguments]
        return interaction.interaction_descent(*call, **more)[:2]

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


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("rule", ["gradient", "heavy_ball"])
def test_energies_of_every_backend_can_be_differentiated(backend, rule):
    layer = make_layer(backend=backend, update_rule=rule)
    h = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    output, energy = layer.with_energy(h)
    torch.testing.assert_close(output, layer(h))
    torch.testing.assert_close(energy, layer.trace(h).energy)
    assert torch.equal(layer.with_energy(h, final=False)[1], energy[:-1])
    torch.testing.assert_close(energy[0], layer.energy(h, h))
    (gradient,) = torch.autograd.grad(energy[-1].sum(), h)
    assert gradient.norm() > 0


def test_on_the_cpu_auto_is_pytorch_and_triton_says_why_not():
    h = torch.randn(1, 3, 8, dtype=torch.float64)
    assert not make_layer()._fuses(h, make_layer().update_rule)
    with pytest.raises(ValueError, match=r"backend: triton cannot run this layer: .*on cpu.*TRITON_INTERPRET=1"):
        make_layer(backend="triton")(h)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"update_rule": "nesterov"}, "plain gradient steps, and the update rule is Nesterov"),
        ({"history": "refreshed"}, "computes the history once, and the history is refreshed"),
    ],
)
def test_what_the_fused_kernel_cannot_do_is_left_to_single_steps(option, reason, on_cpu):
    h = torch.randn(1, 3, 8, dtype=torch.float64)
    layer = make_layer(backend="triton", **option)
    assert not layer._fuses(h, layer.update_rule)
    assert reason in layer.why_not_fused(h)
    assert layer(h).shape == h.shape


def test_reasons(monkeypatch):
    assert available.why_not_installed(None) == "triton is not installed"
    assert available.why_not_installed("3.7.1") is None
    assert available.why_not_installed("3.10.0") == "triton 3.10.0 is installed, and 3.6 to 3.9 are supported"
    monkeypatch.setattr(available, "NOT_INSTALLED", "triton is not installed")
    assert not available.runs_on(torch.empty(1))
    assert available.why_not(torch.empty(1)) == "triton is not installed"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"width": 4096}, "no entry for width 4096 in bfloat16 on sm_80"),
        ({"dtype": torch.float32, "width": 128}, "no entry for width 128 in float32"),
        ({"width": 128, "per_head": True}, "the widths go up to 64"),
        ({"dtype": torch.float32, "width": 32, "per_head": True}, "per head there is no configuration in float32"),
        ({"rank": 9}, "rank up to 8, and the rank is 9"),
        ({"heads": 16, "head_dim": 16}, "more than twice the width 64"),
    ],
)
def test_what_the_table_has_not_is_named(change, reason):
    usual = {"dtype": torch.bfloat16, "heads": 4, "head_dim": 16, "width": 64, "rank": 8, "per_head": False}
    got = interaction.why_not_shape(device=torch.device("cpu"), **usual | change)
    assert got is None if reason is None else reason in got


def test_the_norm_of_the_operator_is_that_of_the_layers():
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(interaction._norm(x)[0], norm(x), rtol=1e-14, atol=0)
