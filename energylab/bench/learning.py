"""What it costs to record the descent while a model learns: one record against the training steps between two.

The models of the recursion study: width 64, depth 2, 24 pairs, batch 32, one thread. A step samples its tasks; a record
traces the validation tasks in float64 and summarises them.
"""

import argparse
from collections.abc import Sequence

import torch

from energylab.analysis.learning import Learning
from energylab.bench.timing import machine, medians
from energylab.models import ModelConfig
from energylab.tasks import GaussianProcessPrior
from energylab.training import Trainer, TrainingConfig

NUM_POINTS = 24
EVERY = 100
REACH = 0.05


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="energylab bench learning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40, help="timed calls of each (default %(default)s)")
    parser.add_argument("--every", type=int, default=EVERY, help="training steps between records (default %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(machine())
    print(f"{'model':10s} {'step, ms':>9s} {'record, ms':>11s} {f'cost at n = {options.every}':>18s}   reach")
    for recursions in (1, 2, 4, 8):
        step, record = step_and_record(recursions, options.repeats)
        cost = record / (options.every * step)
        print(
            f"CEM, T = {recursions} {step * 1e3:9.1f} {record * 1e3:11.1f} {100 * cost:16.2f} %   < {100 * REACH:g} %"
            + ("" if cost < REACH else ", missed")
        )


def step_and_record(recursions: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a training step and of a record, in turn in this process."""
    training = TrainingConfig()
    prior = GaussianProcessPrior.preset("fixed")
    trainer = Trainer(ModelConfig(recursions=recursions), training, prior, NUM_POINTS, seed=0)
    learning = Learning(prior, NUM_POINTS, steps=training.steps, every=1, snapshots=0)
    seconds = medians(
        {"step": trainer.advance, "record": lambda: learning.observe(trainer.model, trainer.step)}, repeats
    )
    return seconds["step"], seconds["record"]
