"""The bench of the kernels, as far as it goes without a GPU and without an interpreter."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from energylab.bench import kernels
from energylab.bench.kernels import FORWARD, TRAINING, Shape, flops, traffic
from energylab.layers import CEMMLP


def test_needs_only_torch_triton_and_numpy():
    blocked = (
        "scipy",
        "gpytorch",
        "pandas",
        "pyarrow",
        "matplotlib",
        "seaborn",
        "tyro",
        "rich",
        "jinja2",
        "safetensors",
    )
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked})); import energylab.bench.kernels; "
        "import energylab.kernels.elementwise, energylab.kernels.interaction, energylab.kernels.compile_all"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("device", "reason"),
    [("cuda", "this machine has no CUDA device"), ("cpu", "on the CPU Triton runs under TRITON_INTERPRET=1 only")],
)
def test_says_why_it_cannot_run(device, reason, capsys):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--device", device])
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


def test_operations_of_the_mlp_are_those_of_its_products():
    shape = Shape(width=32, length=5, batch=2, recursions=3)
    layer = CEMMLP(shape.width, shape.hidden, shape.recursions)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        layer(torch.randn(2, 5, 32))
    assert counted.get_total_flops() == flops("mlp", shape)


def test_a_fused_forward_moves_the_same_for_every_number_of_steps():
    one, eight = (Shape(width=64, length=128, batch=256, recursions=steps) for steps in (1, 8))
    for layer in ("attention", "mlp"):
        assert traffic(layer, eight, 2, FORWARD) == traffic(layer, one, 2, FORWARD)
        assert traffic(layer, eight, 2, TRAINING) > traffic(layer, one, 2, TRAINING)


def test_the_grid_starts_with_the_shape_of_the_targets_and_has_no_shape_twice():
    assert kernels.GRID[0] == Shape(64, 128, 256, 8)
    assert len(set(kernels.GRID)) == len(kernels.GRID) == 3 * 3 * 2 * 4
