"""A batch of tasks with their floors against a training step, and against a draw from gpytorch's prior, which has none.

The batch: 64 tasks of 64 points in float32, inputs, targets and floor, one thread. The step: forward, backward, clipping
and AdamW of the width-64, depth-2 model with T = 1 on such a batch. gpytorch's draw: uniform inputs, an RBF kernel with a
length-scale for each task, one sample of a batched MultivariateNormal, in float64; the jitter is added before it, or its
first factorisation would fail and be repeated.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gpytorch
import torch

from energylab.bench.timing import machine, medians
from energylab.models import ModelConfig
from energylab.tasks import GaussianProcessPrior
from energylab.tasks.conditions import TEST_TASKS
from energylab.tasks.predictors import marginal
from energylab.training import Trainer, TrainingConfig

TASKS, NUM_POINTS = 64, 64
PRESETS = ("fixed", "rbf", "mixture")


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="energylab bench tasks", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=40, help="timed calls of each (default %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(machine())
    functions = {"step": _step(), "gpytorch": _gpytorch_draw()} | {preset: _batch(preset) for preset in PRESETS}
    seconds = medians(functions, options.repeats)
    print(
        f"training step {seconds['step'] * 1e3:.1f} ms, draw from gpytorch's prior {seconds['gpytorch'] * 1e3:.1f} ms"
    )
    print(f"{'tasks':8s} {'batch, ms':>10s} {'of a step':>10s} {'of a gpytorch draw':>19s}")
    for preset in PRESETS:
        batch = seconds[preset]
        print(f"{preset:8s} {batch * 1e3:10.1f} {batch / seconds['step']:10.1%} {batch / seconds['gpytorch']:19.2f}")
    print(f"peak memory of a process with all floors of {TEST_TASKS} tasks: {_peak_memory():.0f} MiB")


def _step():
    training = TrainingConfig(batch_size=TASKS)
    trainer = Trainer(ModelConfig(recursions=1), training, GaussianProcessPrior.preset("fixed"), NUM_POINTS, seed=0)
    batch = trainer.tasks(0)
    return lambda: trainer.optimise(batch, learning_rate=1e-3)


def _batch(preset: str):
    prior = GaussianProcessPrior.preset(preset)
    return lambda: prior.sample(TASKS, NUM_POINTS)


def _gpytorch_draw():
    kernel = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([TASKS])).double()
    kernel.lengthscale = 0.25 * 4 ** torch.rand(TASKS, 1, 1, dtype=torch.float64)
    mean = torch.zeros(TASKS, NUM_POINTS, dtype=torch.float64)

    @torch.no_grad()
    def draw() -> torch.Tensor:
        x = 4 * torch.rand(TASKS, NUM_POINTS, 1, dtype=torch.float64) - 2
        covariance = kernel(x).add_jitter(1e-8)  # pyright: ignore[reportAttributeAccessIssue]
        return gpytorch.distributions.MultivariateNormal(mean, covariance).sample()

    return draw


def _peak_memory() -> float:
    """MiB of a fresh process that computes the floor and the marginal predictor of a whole test set."""
    command = [sys.executable, "-m", "energylab.bench.tasks"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _all_floors() -> None:
    torch.set_num_threads(1)
    prior = GaussianProcessPrior.preset("mixture")
    batch = prior.sample(TEST_TASKS, NUM_POINTS, stream="test")
    marginal(batch.x, batch.y, prior, grid=1)  # grid points come one after another: more of them take no more memory
    # not ru_maxrss: a process inherits that of the one that started it
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(line.split()[1]) / 1024)


if __name__ == "__main__":
    _all_floors()
