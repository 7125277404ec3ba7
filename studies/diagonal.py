"""Is a diagonal of the interaction essential, and is one for all heads enough? None, shared and per head, T = 1 and 2."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

# (variant, T): the diagonal, and its learning rate, which `energylab run diagonal --tune` sweeps
MODELS = {
    ("CEM", 1): ("shared", 2e-3),
    ("CEM", 2): ("shared", 2e-3),
    ("CEM no diagonal", 1): ("none", 2e-3),
    ("CEM no diagonal", 2): ("none", 2e-3),
    ("CEM per-head diagonal", 1): ("per_head", 2e-3),
    ("CEM per-head diagonal", 2): ("per_head", 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, tune: bool = False, debug: bool = False) -> Study:
    """The recursion study's model with each diagonal.

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
            model=ModelConfig(recursions=recursions, diagonal=diagonal),
            training=TrainingConfig(steps=steps, learning_rate=rate, log_every=200),
        )
        for seed in range(seeds)
        for (variant, recursions), (diagonal, rate) in MODELS.items()
    ]
    return sized(Study("diagonal", runs), tune, debug)
