"""A training step of the recursion study's models against its matrix products alone.

The step: forward, backward, clipping and AdamW at width 64, depth 2, 24 pairs, batch 32, one thread, its tasks sampled
before. Its matrix products: those that the reference path performs, at the same shapes, in the same process.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from energylab.bench.timing import machine, matrix_products, medians
from energylab.models import ModelConfig
from energylab.tasks import GaussianProcessPrior
from energylab.training import Trainer, TrainingConfig

NUM_POINTS = 24


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="energylab bench step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40, help="timed calls of each (default %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(machine())
    print(f"{'model':28s} {'step, ms':>9s} {'products, ms':>13s} {'ratio':>6s}")
    for recursions in (1, 8):
        functions = {}
        for diagonal in ("none", "shared"):
            model = ModelConfig(recursions=recursions, diagonal=diagonal)
            name = f"CEM, T = {recursions}, diagonal {diagonal}"
            functions[name] = _step(model)
            functions[f"{name}: products"] = matrix_products(_step(replace(model, backend="reference")))
        if recursions == 1:
            llama = ModelConfig(attention="llama", mlp="llama")
            functions["Llama"] = _step(llama)
            functions["Llama: products"] = matrix_products(_step(llama))
        seconds = medians(functions, options.repeats)
        for name in (name for name in functions if not name.endswith("products")):
            step, products = seconds[name], seconds[f"{name}: products"]
            print(f"{name:28s} {step * 1e3:9.1f} {products * 1e3:13.1f} {step / products:6.2f}")
    for recursions in (1, 8):
        print(f"peak memory of a training process, T = {recursions}: {_peak_memory(recursions):.0f} MiB")


def _step(model: ModelConfig):
    trainer = Trainer(model, TrainingConfig(), GaussianProcessPrior.preset("fixed"), NUM_POINTS, seed=0)
    batch = trainer.tasks(0)
    return lambda: trainer.optimise(batch, learning_rate=1e-3)


def _peak_memory(recursions: int) -> float:
    """MiB of a fresh process that trains for some steps."""
    command = [sys.executable, "-m", "energylab.bench.step", "--memory-of", str(recursions)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _train_and_report(recursions: int) -> None:
    torch.set_num_threads(1)
    model = ModelConfig(recursions=recursions)
    trainer = Trainer(model, TrainingConfig(), GaussianProcessPrior.preset("fixed"), NUM_POINTS, seed=0)
    for _ in range(20):
        trainer.advance()
    # not ru_maxrss: a process inherits that of the one that started it
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(line.split()[1]) / 1024)


if __name__ == "__main__":
    _train_and_report(int(sys.argv[2]))
