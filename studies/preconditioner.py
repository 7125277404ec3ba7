"""Do learned preconditioners help, and do their steps still descend? T = 2, each kind against P = I."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

# variant: the preconditioner, and its learning rate, which `energylab run preconditioner --tune` sweeps
MODELS = {
    "CEM": ("none", 2e-3),
    "CEM P diagonal": ("diagonal", 2e-3),
    "CEM P diagonal low rank": ("diagonal_low_rank", 2e-3),
    "CEM P diagonal low rank positive": ("diagonal_low_rank_positive", 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, tune: bool = False, debug: bool = False) -> Study:
    """The recursion study's model with each preconditioner.

    Args:
        steps: Optimiser steps of each run.
        seeds: Runs of each model, from seeds 0, 1, ...
        tune: Sweep the learning rates instead.
        debug: A miniature that ends in seconds.
    """
    runs = [
        RunConfig(
            variant=variant,
            seed=seed,
            prior="fixed",
            num_points=24,
            model=ModelConfig(recursions=2, preconditioner=kind),
            training=TrainingConfig(steps=steps, learning_rate=rate),
        )
        for seed in range(seeds)
        for variant, (kind, rate) in MODELS.items()
    ]
    return sized(Study("preconditioner", runs), tune, debug)
