"""The one-step kernels in Triton's interpreter, against the float64 reference path, output and every gradient."""

import pytest
import torch
from covering import pairwise
from nan_bands import banded, nan_band

from energylab.kernels.available import INTERPRETED
from energylab.layers import CEMMLP, CEMAttention
from energylab.layers.base import EnergyLayer

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from energylab.kernels import elementwise_step, interaction_step
from energylab.kernels.interaction_step import Configuration

pytestmark = pytest.mark.interpreter

TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
ATTENTION = {
    "dtype": list(TOLERANCES),
    "width": [48, 64, 128],
    "length": [1, 17, 61],
    "recursions": [1, 2],
    "diagonal": ["none", "shared", "per_head"],
    "preconditioner": ["none", "diagonal_low_rank"],
    "heads": [(2, None), (3, 16), (5, 12)],
    "rotary": [False, True],
    "mask": ["causal", "independent"],
    "history": ["fixed", "refreshed"],
    "update_rule": ["gradient", "heavy_ball"],
    # never half of them: with one token a shared diagonal would cancel, and its gradient be nothing but rounding
    "repelling_heads": [0, 2],
    # rows, keys, columns of a chunk, columns of a program; and the columns that a tile's heads may have
    "cut": [(32, 64, 64, 128), (64, 32, 32, 64), (32, 32, 64, 32)],
    "head_columns": [512, 32],
}
LARGE = {name: values[0] for name, values in ATTENTION.items()} | {"length": 17, "heads": (3, 32), "diagonal": "shared"}
ATTENTION_ROWS = [
    *pairwise(ATTENTION),
    LARGE | {"width": 256, "dtype": torch.float32, "rotary": True, "head_columns": 64},
    LARGE | {"width": 256, "dtype": torch.bfloat16, "length": 61, "preconditioner": "diagonal_low_rank"},
    LARGE | {"width": 128, "dtype": torch.float32, "diagonal": "per_head", "heads": (2, None), "length": 61},
]
MLP = {
    "dtype": list(TOLERANCES),
    "width": [48, 64, 256],
    "hidden": [40, 128, 300],
    "length": [1, 17, 61],
    "recursions": [1, 2],
    "activation": ["silu", "quadratic"],
    "preconditioner": ["none", "diagonal"],
    "history": ["fixed", "refreshed"],
    "update_rule": ["gradient", "nesterov"],
}


def make_layers(row: dict) -> tuple[EnergyLayer, EnergyLayer]:
    names = ("preconditioner", "history", "update_rule", "diagonal", "rotary", "mask", "activation", "repelling_heads")
    options = {name: row[name] for name in names if name in row} | {"rank": 16}
    layer, reference = (
        CEMAttention(row["width"], row["heads"][0], row["recursions"], row["heads"][1], backend=backend, **options)
        if "heads" in row
        else CEMMLP(row["width"], row["hidden"], row["recursions"], backend=backend, **options)
        for backend in ("triton", "reference")
    )
    for name, parameter in layer.named_parameters():
        if name != "step_size":
            torch.nn.init.normal_(parameter, std=0.5 / row["width"] ** 0.5)
    layer = layer.to(row["dtype"])
    reference.double().load_state_dict(layer.state_dict())
    return layer, reference


@pytest.fixture
def place(monkeypatch):
    """Layers take one step at a time, in tiles as a row of options says, and every tensor that a kernel sees lies between
    bands of NaN."""
    monkeypatch.setattr(EnergyLayer, "_fuses", lambda layer, h, rule: False)
    step, gate = interaction_step.interaction_step, elementwise_step.elementwise_step

    def between(operator):
        return lambda *arguments: operator(*(banded(a) if isinstance(a, torch.Tensor) else a for a in arguments))

    def place(row: dict) -> None:
        if "cut" in row:
            cut = Configuration(*row["cut"], num_warps=1, num_stages=1)
            monkeypatch.setattr(interaction_step, "configuration", lambda *key: cut)
            columns = dict.fromkeys(interaction_step.HEAD_COLUMNS, row["head_columns"])
            monkeypatch.setattr(interaction_step, "HEAD_COLUMNS", columns)
        monkeypatch.setattr(interaction_step, "interaction_step", between(step))
        monkeypatch.setattr(elementwise_step, "elementwise_step", between(gate))
        monkeypatch.setattr(
            interaction_step.Inputs,
            "empty",
            lambda inputs, *shape, dtype=None: nan_band(shape, dtype or inputs.accumulator),
        )
        monkeypatch.setattr(
            elementwise_step, "_empty", lambda *shape, like, dtype=None: nan_band(shape, dtype or like.dtype)
        )

    return place


def results(layer: EnergyLayer, row: dict, seed: int = 1) -> dict[str, torch.Tensor]:
    """Output, energies, and the gradients of a loss of both."""
    generator = torch.Generator().manual_seed(seed)
    dtype = layer.step_size.dtype

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(row["dtype"]).to(dtype)

    h = draw(2, row["length"], row["width"]).requires_grad_()
    output, energy = layer.with_energy(h)
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


def own_error(layer: EnergyLayer, reference: EnergyLayer, row: dict) -> float:
    """Of PyTorch, in the gradient of the step size: one number, summed over all rows with both signs, so that it may cancel
    and its relative error be anything. The largest of some draws, for a single one may be right by chance.
    """
    layer.backend = "torch"
    draws = [[results(one, row, seed)["step_size"].double() for one in (layer, reference)] for seed in range(1, 5)]
    return max((own - exact).abs().item() for own, exact in draws)


def name_of(row: dict) -> str:
    return ",".join(str(value).removeprefix("torch.") for value in row.values())


@pytest.mark.parametrize("row", [*ATTENTION_ROWS, *pairwise(MLP)], ids=name_of)
def test_outputs_and_gradients(row, place):
    place(row)
    layer, reference = make_layers(row)
    expected = results(reference, row)
    found = errors(results(layer, row), expected)
    bounds = dict.fromkeys(found, TOLERANCES[row["dtype"]])
    if row["dtype"].itemsize == 2:
        bounds["step_size"] = max(
            bounds["step_size"], 2 * own_error(layer, reference, row) / abs(expected["step_size"])
        )
    assert all(error <= bounds[name] for name, error in found.items()), found


SMALL = LARGE | {"width": 48, "rotary": True, "preconditioner": "diagonal_low_rank", "cut": (16, 32, 64, 32)}
SMALL_MLP = {name: values[0] for name, values in MLP.items()} | {"length": 20}


@pytest.mark.parametrize("diagonal", ["none", "shared", "per_head"])
def test_gradcheck_of_the_attention_step(diagonal, place):
    place(SMALL | {"head_columns": 16})

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    leaves = [leaf(1, 5, 2, 4), leaf(1, 5, 2, 4)]
    if diagonal != "none":
        leaves += [leaf(1, 5, 1 if diagonal == "shared" else 2, 20), leaf(1, 5, 20)]

    def function(q, k, a=None, u=None):
        found = interaction_step.interaction_step(q, k, a, u, 0.7, "causal", True)
        return found if a is not None else (found[0], found[2])

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_gradcheck_of_the_mlp_step(place):
    place(SMALL_MLP)
    leaves = [torch.randn(2, 3, 20, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for activation in MLP["activation"]:
        function = lambda a, gate, activation=activation: elementwise_step.elementwise_step(a, gate, activation)  # noqa: E731
        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [SMALL | {"length": 20}, SMALL_MLP], ids=["attention", "mlp"])
def test_bit_for_bit(dtype, row, place):
    """Again, a trace, and with the future changed: the same numbers."""
    row = row | {"dtype": dtype}
    place(row)
    layer, _ = make_layers(row)
    first, again = results(layer, row), results(layer, row)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
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


@pytest.mark.parametrize("row", [SMALL, SMALL_MLP], ids=["attention", "mlp"])
def test_autocast_multiplies_in_bfloat16(row, place):
    row = row | {"dtype": torch.float32}
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
