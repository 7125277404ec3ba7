"""What every layer that descends an energy must do. A new layer joins by one entry in ``FACTORIES``."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from energylab.layers import CEMMLP, CEMAttention, EnergyLayer, norm

WIDTH = 8


def attention(**options) -> Callable[..., EnergyLayer]:
    return lambda **more: CEMAttention(WIDTH, 2, **options, **more)


def mlp(**options) -> Callable[..., EnergyLayer]:
    return lambda **more: CEMMLP(WIDTH, 12, **options, **more)


FACTORIES: dict[str, Callable[..., EnergyLayer]] = {
    "attention": attention(),
    "attention, shared diagonal": attention(diagonal="shared"),
    "attention, per-head diagonal": attention(diagonal="per_head"),
    "attention, rotary": attention(rotary=True),
    "attention, rotary, shared diagonal": attention(rotary=True, diagonal="shared"),
    "attention, rotary, per-head diagonal": attention(rotary=True, diagonal="per_head"),
    "attention, head_dim 6, temperature": attention(head_dim=6, temperature=0.7),
    "attention, refreshed history": attention(history="refreshed", diagonal="shared"),
    "attention, a head repels": attention(repelling_heads=1),
    "attention, a head repels, shared diagonal": attention(repelling_heads=1, diagonal="shared"),
    "attention, both heads repel, rotary, per-head diagonal": attention(
        repelling_heads=2, rotary=True, diagonal="per_head"
    ),
    "attention, diagonal preconditioner": attention(preconditioner="diagonal"),
    "attention, low-rank preconditioner": attention(preconditioner="diagonal_low_rank", rank=2),
    "attention, positive preconditioner": attention(preconditioner="diagonal_low_rank_positive", rank=2),
    "attention, heavy ball": attention(update_rule="heavy_ball"),
    "attention, Nesterov": attention(update_rule="nesterov", diagonal="per_head"),
    "mlp": mlp(),
    "mlp, quadratic": mlp(activation="quadratic"),
    "mlp, refreshed history": mlp(history="refreshed"),
    "mlp, diagonal preconditioner": mlp(preconditioner="diagonal"),
    "mlp, low-rank preconditioner": mlp(preconditioner="diagonal_low_rank", rank=2),
    "mlp, positive preconditioner": mlp(preconditioner="diagonal_low_rank_positive", rank=2),
    "mlp, heavy ball": mlp(update_rule="heavy_ball"),
    "mlp, Nesterov": mlp(update_rule="nesterov"),
}
BACKENDS = ("reference", "torch")
every_layer = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def randomised(layer: EnergyLayer, dtype: torch.dtype = torch.float64) -> EnergyLayer:
    """Away from the initial values, where diagonals are 0 and P is I."""
    for name, parameter in layer.named_parameters():
        if name != "step_size":
            torch.nn.init.normal_(parameter, std=0.5)
    return layer.to(dtype)


def history(batch: int = 2, length: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=dtype)


@every_layer
@every_backend
@pytest.mark.parametrize(("batch", "length"), [(3, 7), (1, 5), (2, 1), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shapes_and_dtypes(factory, backend, batch, length, dtype):
    layer = randomised(factory(recursions=3, backend=backend), dtype)
    h = history(batch, length, dtype)
    output, trace = layer(h), layer.trace(h)
    assert output.shape == h.shape
    assert output.dtype == dtype
    assert output.isfinite().all()
    assert layer.energy(h, h).shape == (batch, length)
    assert layer.gradient(h, h).shape == h.shape
    assert trace.energy.shape == (4, batch, length)
    for per_step in (trace.gradient_norm, trace.tangential_norm, trace.step_norm, trace.turn):
        assert per_step.shape == (3, batch, length)
    assert trace.states.shape == (4, batch, length, WIDTH)


@every_layer
@every_backend
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_gradient_is_that_of_the_energy(factory, backend, dtype, tolerance):
    layer = randomised(factory(backend=backend), dtype)
    energy = layer.condition(history(dtype=dtype))
    z = norm(history(dtype=dtype)).requires_grad_()
    (expected,) = torch.autograd.grad(energy.value(z).sum(), z)
    assert ((energy.gradient(z) - expected).norm() / expected.norm()).item() <= tolerance


@every_layer
@pytest.mark.parametrize("recursions", [1, 3])
def test_first_and_second_derivatives_of_the_reference(factory, recursions):
    layer = randomised(factory(recursions=recursions, backend="reference"))
    names = [name for name, _ in layer.named_parameters()]

    def forward(h, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (h,))

    inputs = (history(2, 3).requires_grad_(), *layer.parameters())
    assert torch.autograd.gradcheck(forward, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(forward, inputs, fast_mode=True)


@every_layer
@pytest.mark.parametrize("recursions", [1, 3])
@pytest.mark.parametrize("length", [1, 6, 40])
def test_fast_path_equals_the_reference_with_every_gradient(factory, recursions, length):
    fast = randomised(factory(recursions=recursions, backend="torch"))
    reference = factory(recursions=recursions, backend="reference").double()
    reference.load_state_dict(fast.state_dict())
    h = history(2, length).requires_grad_()
    weight = history(2, length)
    results = []
    for layer in (fast, reference):
        output = layer(h)
        gradients = torch.autograd.grad((output * weight).sum(), (h, *layer.parameters()))
        results.append((output, *gradients))
    for got, expected in zip(*results, strict=True):
        assert (got - expected).norm() <= 1e-12 * max(1, expected.norm())


@every_layer
def test_second_derivative_of_the_fast_path_is_right_or_refused(factory):
    layer = randomised(factory(recursions=2, backend="torch"))
    reference = factory(recursions=2, backend="reference").double()
    reference.load_state_dict(layer.state_dict())
    h = history().requires_grad_()

    def second(layer):
        (first,) = torch.autograd.grad(layer(h).square().sum(), h, create_graph=True)
        return torch.autograd.grad(first.square().sum(), h)[0]

    try:
        got = second(layer)
    except RuntimeError as error:
        assert 'use backend="reference"' in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(got, second(reference))


@every_layer
@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("recursions", [1, 3])
def test_causality_bit_for_bit(factory, backend, dtype, recursions):
    layer = randomised(factory(recursions=recursions, backend=backend), dtype)
    h = history(2, 9, dtype)
    changed, j = h.clone(), 4
    changed[:, j] += 1
    x = history(2, 9, dtype)
    for result in (
        layer,
        lambda h: layer.trace(h).energy[-1],
        lambda h: layer.energy(x, h),
        lambda h: layer.gradient(x, h),
    ):
        before, after = result(h), result(changed)
        assert torch.equal(before[:, :j], after[:, :j])
        assert not torch.equal(before[:, j], after[:, j])


@every_layer
@every_backend
def test_recording_changes_nothing(factory, backend):
    layer = randomised(factory(recursions=3, backend=backend), torch.float32)
    h = history(dtype=torch.float32)
    assert torch.equal(layer.trace(h).states[-1], layer(h))
    assert torch.equal(layer.trace(h).states[0], h)


@every_layer
def test_a_trace_says_what_it_says(factory):
    layer = randomised(factory(recursions=3))
    h = history()
    trace = layer.trace(h)
    for t in range(4):
        x = trace.states[t]
        u = x if layer.history == "refreshed" else h
        torch.testing.assert_close(trace.energy[t], layer.energy(x, u), rtol=1e-12, atol=1e-12)
        if t == 3:
            break
        z, after, gradient = norm(x), norm(trace.states[t + 1]), layer.gradient(x, u)
        tangential = gradient - z * (z * gradient).sum(-1, keepdim=True) / WIDTH
        torch.testing.assert_close(trace.gradient_norm[t], gradient.norm(dim=-1))
        torch.testing.assert_close(trace.tangential_norm[t], tangential.norm(dim=-1))
        torch.testing.assert_close(trace.step_norm[t], (trace.states[t + 1] - x).norm(dim=-1))
        cosine = torch.nn.functional.cosine_similarity(z, after, dim=-1)
        torch.testing.assert_close(trace.turn[t], cosine.clamp(-1, 1).acos(), rtol=1e-6, atol=1e-7)


@every_layer
def test_another_number_of_recursions_at_test_time(factory):
    short, long = randomised(factory(recursions=2)), factory(recursions=5, step_size=0.5).double()
    long.load_state_dict(short.state_dict())
    h = history()
    assert torch.equal(short(h, recursions=5), long(h))
    assert torch.equal(short(h, recursions=2), short(h))
    assert not torch.equal(short(h, recursions=5), short(h))


@every_layer
def test_a_step_size_for_each_step(factory):
    layer = randomised(factory(recursions=2, step_size=(0.3, 0.1)))
    assert layer.step_size.shape == (2,)
    h = history()
    layer(h).sum().backward()
    assert (layer.step_size.grad != 0).all()
    # beyond the trained steps, the last repeats
    padded = copy.deepcopy(layer)
    padded.step_size = torch.nn.Parameter(torch.tensor([0.3, 0.1, 0.1, 0.1], dtype=torch.float64))
    with torch.no_grad():
        padded.step_size[:2] = layer.step_size
        padded.step_size[2:] = layer.step_size[1]
    assert torch.equal(layer(h, recursions=4), padded(h, recursions=4))


@every_layer
def test_save_and_load(factory, tmp_path):
    layer, other = randomised(factory(recursions=2)), factory(recursions=2).double()
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    h = history()
    assert torch.equal(layer(h), other(h))


@every_layer
def test_autocast_to_bfloat16_stays_close(factory):
    layer = randomised(factory(recursions=2), torch.float32)
    h = history(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(h)
    assert ((output - layer(h)).norm() / layer(h).norm()).item() < 3e-2
