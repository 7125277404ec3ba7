"""What do other T' at test time do? The recursion study's models, each tested with 1 to 16 steps in every layer."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

# T: the learning rate, that of the recursion study
MODELS = {1: 2e-3, 2: 2e-3, 4: 2e-3, 8: 2e-3}


def study(steps: int = 10_000, seeds: int = 3, tune: bool = False, debug: bool = False) -> Study:
    """Where the recursion study is finished in the same results folder, its training is taken over and only tested.

    Args:
        steps: Optimiser steps of each run.
        seeds: Runs of each model, from seeds 0, 1, ...
        tune: Sweep the learning rates instead.
        debug: A miniature that ends in seconds.
    """
    runs = [
        RunConfig(
            variant="CEM",
            seed=seed,
            prior="fixed",
            num_points=24,
            model=ModelConfig(recursions=recursions),
            training=TrainingConfig(steps=steps, learning_rate=rate),
            test_recursions=(1, 2, 3, 4, 5, 6, 8, 12, 16),
        )
        for seed in range(seeds)
        for recursions, rate in MODELS.items()
    ]
    return sized(Study("test_time", runs), tune, debug)
