"""The element-wise kernel in Triton's interpreter, against the float64 reference path, output and every gradient."""

import mpmath
import numpy as np
import pytest
import torch
from covering import pairwise
from nan_bands import banded, nan_band
from scipy.special import spence

from energylab.energies import SiLU
from energylab.kernels.available import INTERPRETED
from energylab.layers import CEMMLP

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

from energylab.kernels import elementwise
from energylab.kernels.elementwise import Configuration
from energylab.kernels.elementwise_kernels import activation, potential, slope

pytestmark = pytest.mark.interpreter

TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
OPTIONS = {
    "dtype": list(TOLERANCES),
    "width": [32, 48, 64, 128],
    "hidden": [64, 40, 70, 128],
    "length": [1, 17, 61, 64],
    "recursions": [1, 3, 8],
    "activation": ["silu", "quadratic"],
    "preconditioner": ["none", "diagonal", "diagonal_low_rank", "diagonal_low_rank_positive"],
    "per_step": [False, True],
    "energies": ["with the last", "without the last", "none"],
    "fused": [True, False],
    "cut": [(64, 64), (32, 128), (128, 32)],
}
BASE = {name: values[0] for name, values in OPTIONS.items()} | {"length": 17, "recursions": 3, "cut": (16, 16)}
ONE_BY_ONE = [
    BASE | {name: value}
    for name, values in OPTIONS.items()
    if name not in ("dtype", "recursions", "cut")
    for value in values
    if value != BASE[name]
]


def make_layers(row: dict) -> tuple[CEMMLP, CEMMLP]:
    width, recursions = row["width"], row["recursions"]
    options = {
        "activation": row["activation"],
        "preconditioner": row["preconditioner"],
        "rank": 4,
        "step_size": [1 / recursions] * recursions if row["per_step"] else None,
    }
    layer = CEMMLP(width, row["hidden"], recursions, backend="triton", **options)
    for name, parameter in layer.named_parameters():
        if name != "step_size":
            torch.nn.init.normal_(parameter, std=0.5 / width**0.5)
    layer = layer.to(row["dtype"])
    reference = CEMMLP(width, row["hidden"], recursions, backend="reference", **options).double()
    reference.load_state_dict(layer.state_dict())
    return layer, reference


@pytest.fixture
def place(monkeypatch):
    """Tiles as a row of options says, and every tensor that a kernel sees between bands of NaN."""

    def place(row: dict) -> None:
        rows, units = row["cut"]
        cut = Configuration(rows=rows, units=units, num_warps=1)
        monkeypatch.setattr(elementwise, "configuration", lambda *key: cut)
        operator = elementwise.elementwise_descent
        monkeypatch.setattr(
            elementwise,
            "elementwise_descent",
            lambda *arguments, **options: operator(
                *(banded(a) if isinstance(a, torch.Tensor) else a for a in arguments),
                **options | {"fused": row["fused"]},
            ),
        )
        monkeypatch.setattr(
            elementwise.Inputs,
            "empty",
            lambda inputs, *shape, dtype=None: nan_band(shape, dtype or inputs.accumulator),
        )

    return place


def results(layer: CEMMLP, row: dict) -> dict[str, torch.Tensor]:
    """Output, energies, and the gradients of a loss of both."""
    generator = torch.Generator().manual_seed(1)
    dtype = layer.weight.dtype

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(row["dtype"]).to(dtype)

    h = draw(2, row["length"], row["width"]).requires_grad_()
    if row["energies"] == "none":
        output = layer(h)
        found = {"output": output}
        loss = (output * draw(*output.shape)).sum()
    else:
        output, energy = layer.with_energy(h, final=row["energies"] == "with the last")
        found = {"output": output, "energy": energy}
        loss = (output * draw(*output.shape)).sum() + 0.3 * (energy * draw(*energy.shape)).sum()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, (h, *parameters))
    return found | {"h": gradients[0], **dict(zip(names, gradients[1:], strict=True))}


def errors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    assert got.keys() == expected.keys()
    return {
        name: ((got[name].double() - value).norm() / value.norm().clamp(min=1e-30)).item()
        for name, value in expected.items()
    }


def name_of(row: dict) -> str:
    return ",".join(str(value).removeprefix("torch.") for value in row.values())


@pytest.mark.parametrize("row", [*pairwise(OPTIONS), *ONE_BY_ONE], ids=name_of)
def test_outputs_and_gradients(row, place):
    place(row)
    layer, reference = make_layers(row)
    expected = results(reference, row)
    found = errors(results(layer, row), expected)
    bounds = dict.fromkeys(found, TOLERANCES[row["dtype"]])
    if row["dtype"] in (torch.bfloat16, torch.float16):
        # a few numbers, each a sum over all rows that may cancel to nearly nothing: held to PyTorch's own error
        layer.backend = "torch"
        own = errors(results(layer, row), expected)["step_size"]
        bounds["step_size"] = max(bounds["step_size"], 2 * own)
    assert all(found[name] <= bound for name, bound in bounds.items()), (found, bounds)


def test_gradients_through_the_energies_alone(place):
    place(BASE)
    layer, reference = make_layers(BASE | {"dtype": torch.float64})
    h = torch.randn(2, 17, 32, dtype=torch.float64)
    gradients = [
        torch.autograd.grad(one.with_energy(h)[1].sin().sum(), [one.weight, one.gate_weight, one.step_size])
        for one in (layer, reference)
    ]
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_trace_is_the_layer_bit_for_bit():
    for dtype in (torch.float32, torch.bfloat16):
        layer, h = CEMMLP(48, 70, 3, backend="triton").to(dtype), torch.randn(2, 17, 48, dtype=dtype)
        trace, reference = layer.trace(h), CEMMLP(48, 70, 3, backend="reference").to(dtype)
        reference.load_state_dict(layer.state_dict())
        assert torch.equal(trace.states[-1], layer(h))
        assert torch.equal(trace.states[0], h)
        expected = reference.trace(h)
        for name in ("energy", "gradient_norm", "tangential_norm", "states"):
            got = getattr(trace, name)
            bound = 4 * TOLERANCES[dtype]
            assert (got.double() - getattr(expected, name).double()).norm() <= bound * getattr(
                expected, name
            ).double().norm()


def test_a_row_of_its_own_is_the_same_row():
    """Rows do not see each other: the same row gives the same bits, wherever it stands."""
    layer, h = CEMMLP(32, 40, 3, backend="triton"), torch.randn(1, 70, 32)
    output = layer(h)
    changed = h.clone()
    changed[:, 20] = 7.0
    same = torch.arange(70) != 20
    assert torch.equal(layer(changed)[:, same], output[:, same])


def test_gradcheck():
    elementwise_descent = elementwise.elementwise_descent
    x, gate, weight = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((1, 3, 16), (1, 3, 8), (8, 16))
    )
    step_sizes = torch.tensor([0.3, 0.2], dtype=torch.float64, requires_grad=True)
    scale = (torch.rand(16, dtype=torch.float64) + 0.5).requires_grad_()
    left, right = (0.2 * torch.randn(16, 2, dtype=torch.float64) for _ in range(2))
    inputs = (x, gate, weight, step_sizes, scale, left.requires_grad_(), right.requires_grad_())

    def both(*tensors):
        return elementwise_descent(*tensors, "silu", True, True, True, True, True)[:2]

    assert torch.autograd.gradcheck(both, inputs, fast_mode=True)


# --- the activation's device functions -------------------------------------------------------------------------------


@triton.jit
def _apply(a_ptr, potential_ptr, activation_ptr, slope_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    a = tl.load(a_ptr + offsets, mask=inside, other=0.0)
    tl.store(potential_ptr + offsets, potential(a, True), mask=inside)
    tl.store(activation_ptr + offsets, activation(a, True), mask=inside)
    tl.store(slope_ptr + offsets, slope(a, True), mask=inside)


def apply(a: torch.Tensor) -> list[torch.Tensor]:
    outputs = [torch.full_like(a, torch.nan) for _ in range(3)]
    _apply[(triton.cdiv(len(a), 1024),)](a, *outputs, len(a), BLOCK=1024)
    return outputs


def points() -> torch.Tensor:
    return torch.cat(
        [
            torch.linspace(-60, 60, 20001),
            torch.linspace(-1.1, 1.1, 4001),
            torch.linspace(17.9, 18.1, 401),
            -torch.linspace(17.9, 18.1, 401),
            *(sign * torch.logspace(-12, 4, 801) for sign in (1, -1)),
        ]
    )


def test_potential_in_float32_against_the_dilogarithm():
    """``Φ(a) = a softplus(a) + Li₂(−eᵃ) + π²/12`` at −|a|, with scipy's dilogarithm; near 0, where that cancels, against the
    series of the reference path, which its own tests hold to high precision."""
    a = points()
    wide = a.double()
    m = wide.abs().numpy()
    y = np.exp(-m)
    negative = torch.from_numpy(-m * np.log1p(y) + spence(1 + y) + np.pi**2 / 12)
    expected = torch.where(a > 0, wide**2 / 2 - negative, negative)
    near = wide.abs() < 0.3
    expected[near] = SiLU().potential(wide[near])
    error = (apply(a)[0].double() - expected).abs() / expected
    print("largest relative error:", error.max().item())
    assert error.max() <= 1e-6
    assert apply(torch.zeros(1))[0].item() == 0


def test_potential_in_float64_in_high_precision():
    a = torch.cat([torch.linspace(-60, 60, 61), torch.linspace(-0.5, 0.5, 61), torch.logspace(-8, -1, 22)]).double()
    with mpmath.workdps(30):
        for value, got in zip(a.tolist(), apply(a)[0].tolist(), strict=True):
            exact = mpmath.mpf(value)
            expected = exact * mpmath.log1p(mpmath.exp(exact)) + mpmath.pi**2 / 12
            expected = mpmath.re(expected + mpmath.polylog(2, -mpmath.exp(exact)))
            assert abs(got - expected) <= 2e-14 * abs(expected), value


def test_activation_and_slope():
    a = points().double()
    _, phi, derivative = apply(a)
    torch.testing.assert_close(phi, SiLU().activation(a), rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(derivative, SiLU().slope(a), rtol=1e-13, atol=1e-15)
