"""How descent emerges while a model learns: T = 1, 2, 4, each recorded every 50 steps of training."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.training import TrainingConfig


def study(steps: int = 3000, seeds: int = 3, width: int = 64, trace_every: int = 50, snapshots: int = 8) -> Study:
    """The recursion study's models, watched while they learn.

    Args:
        steps: Optimiser steps of each run.
        seeds: Runs of each model, from seeds 0, 1, ...
        width: D, the width of the residual stream.
        trace_every: Training steps between two records of the descent.
        snapshots: Snapshots of the weights after the initial one.
    """
    return Study(
        "learning",
        [
            RunConfig(
                variant="CEM",
                seed=seed,
                prior="fixed",
                num_points=24,
                model=ModelConfig(width=width, recursions=recursions),
                training=TrainingConfig(steps=steps, trace_every=trace_every, snapshots=snapshots),
            )
            for seed in range(seeds)
            for recursions in (1, 2, 4)
        ],
    )
