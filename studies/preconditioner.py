"""Do learned preconditioners help, and do their steps still descend? T = 2, each kind against P = I."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.training import TrainingConfig

KINDS = ("none", "diagonal", "diagonal_low_rank", "diagonal_low_rank_positive")


def study(steps: int = 10_000, seeds: int = 3, recursions: int = 2, width: int = 64) -> Study:
    """The recursion study's model with each preconditioner.

    Args:
        steps: Optimiser steps of each run.
        seeds: Runs of each model, from seeds 0, 1, ...
        recursions: T, the steps inside a layer.
        width: D, the width of the residual stream.
    """
    return Study(
        "preconditioner",
        [
            RunConfig(
                variant=f"P {kind.replace('_', ' ')}",
                seed=seed,
                prior="fixed",
                num_points=24,
                model=ModelConfig(width=width, recursions=recursions, preconditioner=kind),
                training=TrainingConfig(steps=steps),
            )
            for seed in range(seeds)
            for kind in KINDS
        ],
    )
