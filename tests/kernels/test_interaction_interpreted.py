"""The interaction kernel in Triton's interpreter, against the float64 reference path, output and every gradient."""

import pytest
import torch
from covering import pairwise
from nan_bands import banded, nan_band

from energylab.kernels.available import INTERPRETED
from energylab.layers import CEMAttention

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from energylab.kernels import interaction
from energylab.kernels.interaction import Configuration

pytestmark = pytest.mark.interpreter

TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
OPTIONS = {
    "dtype": list(TOLERANCES),
    "width": [32, 48, 64, 128],
    "length": [1, 17, 61, 64],
    "recursions": [1, 3, 8],
    "diagonal": ["none", "shared", "per_head"],
    "preconditioner": ["none", "diagonal", "diagonal_low_rank", "diagonal_low_rank_positive"],
    "heads": [(2, None), (4, 8), (3, 16)],
    "repelling": [False, True],
    "rotary": [False, True],
    "mask": ["causal", "independent"],
    "temperature": [None, 0.7],
    "per_step": [False, True],
    "final": [True, False],
    "fused": [True, False],
    "cut": [(32, 64), (32, 16), (16, 32)],
    "whole": [True, False],
}
BASE = {name: values[0] for name, values in OPTIONS.items()} | {"length": 17, "recursions": 3, "cut": (16, 16)}
ONE_BY_ONE = [
    BASE | {name: value}
    for name, values in OPTIONS.items()
    if name not in ("dtype", "recursions", "cut")
    for value in values
    if value != BASE[name]
]


def make_layers(row: dict) -> tuple[CEMAttention, CEMAttention]:
    heads, head_dim = row["heads"]
    width, recursions = row["width"], row["recursions"]
    options = {
        "head_dim": head_dim,
        "diagonal": row["diagonal"],
        "rotary": row["rotary"],
        "mask": row["mask"],
        # never half of them: with one token a shared diagonal would cancel, and its gradient be nothing but rounding
        "repelling_heads": max(heads - 1, 2) if row["repelling"] else 0,
        "temperature": row["temperature"],
        "preconditioner": row["preconditioner"],
        "rank": 4,
        "step_size": [1 / recursions] * recursions if row["per_step"] else None,
    }
    layer = CEMAttention(width, heads, recursions, backend="triton", **options)
    for name, parameter in layer.named_parameters():
        if name != "step_size":
            torch.nn.init.normal_(parameter, std=0.5 / width**0.5)
    layer = layer.to(row["dtype"])
    reference = CEMAttention(width, heads, recursions, backend="reference", **options).double()
    reference.load_state_dict(layer.state_dict())
    return layer, reference


@pytest.fixture
def place(monkeypatch):
    """Tiles as a row of options says, and every tensor that a kernel sees between bands of NaN."""
    operator = interaction.interaction_descent

    def place(row: dict) -> None:
        rows, keys = row["cut"]
        cut = Configuration(rows=rows, keys=keys, num_warps=1, num_stages=1, whole=row["whole"])
        monkeypatch.setattr(interaction, "configuration", lambda *key: cut)
        monkeypatch.setattr(
            interaction,
            "interaction_descent",
            lambda *arguments, **options: operator(
                *(banded(a) if isinstance(a, torch.Tensor) else a for a in arguments),
                **options | {"fused": row["fused"]},
            ),
        )
        monkeypatch.setattr(
            interaction.Inputs,
            "empty",
            lambda inputs, *shape, dtype=None: nan_band(shape, dtype or inputs.accumulator),
        )

    return place


def results(layer: CEMAttention, row: dict, seed: int = 1) -> dict[str, torch.Tensor]:
    """Output, energies, and the gradients of a loss of both."""
    generator = torch.Generator().manual_seed(seed)
    dtype = layer.query_weight.dtype

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(row["dtype"]).to(dtype)

    h = draw(2, row["length"], row["width"]).requires_grad_()
    output, energy = layer.with_energy(h, final=row["final"])
    loss = (output * draw(*output.shape)).sum() + 0.3 * (energy * draw(*energy.shape)).sum()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, (h, *parameters))
    return {"output": output, "energy": energy, "h": gradients[0], **dict(zip(names, gradients[1:], strict=True))}


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
    if row["dtype"].itemsize == 2:
        # one number, summed over all rows with both signs: it may cancel, and is held to PyTorch's own error
        layer.backend = "torch"
        own = errors(results(layer, row), expected)["step_size"]
        bounds["step_size"] = max(bounds["step_size"], 2 * own)
    assert all(error <= bounds[name] for name, error in found.items()), found


SMALL = BASE | {
    "length": 5,
    "diagonal": "shared",
    "rotary": True,
    "preconditioner": "diagonal_low_rank",
    "cut": (16, 16),
}


@pytest.mark.parametrize("row", [SMALL, SMALL | {"diagonal": "none", "final": False}], ids=["all", "plain"])
def test_gradcheck(row, place):
    place(row)
    layer, _ = make_layers(row)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    h = torch.randn(1, 3, row["width"], dtype=torch.float64, requires_grad=True)

    def function(h, *values):
        values = {f"layer.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(WithEnergy(layer), values, (h,))

    assert torch.autograd.gradcheck(function, (h, *parameters), fast_mode=True)


class WithEnergy(torch.nn.Module):
    def __init__(self, layer: CEMAttention):
        super().__init__()
        self.layer = layer

    def forward(self, h):
        return self.layer.with_energy(h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_for_bit(dtype, place):
    """Again, one launch a step, a trace, and with the future changed: the same numbers."""
    row = SMALL | {"dtype": dtype, "length": 20}
    place(row)
    layer, _ = make_layers(row)
    first = results(layer, row)
    again = results(layer, row)
    place(row | {"fused": False})
    stepwise = results(layer, row)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, stepwise[name]), name
    with torch.no_grad():
        h = torch.randn(2, 20, row["width"]).to(dtype)
        output, energy = layer.with_energy(h)
        assert torch.equal(layer(h), output)
        trace = layer.trace(h)
        assert torch.equal(trace.states[-1], output)
        assert torch.equal(trace.states[0], h)
        assert torch.equal(trace.energy, energy)
        changed = h.clone()
        changed[:, 11] += 1
        output_changed, energy_changed = layer.with_energy(changed)
        assert torch.equal(output[:, :11], output_changed[:, :11])
        assert torch.equal(energy[:, :, :11], energy_changed[:, :, :11])
        assert not torch.equal(output[:, 11:], output_changed[:, 11:])


def test_autocast_multiplies_in_bfloat16(place):
    row = SMALL | {"dtype": torch.float32}
    place(row)
    layer, reference = make_layers(row)
    h = torch.randn(2, 5, row["width"], requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(h)
    assert output.dtype == torch.float32
    error = ((output - reference(h.double())).norm() / output.norm()).item()
    assert 1e-5 < error < 2e-2
    (gradient,) = torch.autograd.grad(output.square().sum(), h)
    (expected,) = torch.autograd.grad(reference(h.double()).square().sum(), h)
    assert ((gradient - expected).norm() / expected.norm()).item() < 2e-2
