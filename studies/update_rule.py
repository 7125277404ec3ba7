"""Does momentum within a layer help? Gradient steps, heavy ball and Nesterov, T = 2 and 4."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

# (variant, T): the rule, and its learning rate, which `energylab run update_rule --tune` sweeps; T = 4 takes that of T = 2
MODELS = {
    ("CEM", 2): ("gradient", 2e-3),
    ("CEM", 4): ("gradient", 2e-3),
    ("CEM heavy ball", 2): ("heavy_ball", 2e-3),
    ("CEM heavy ball", 4): ("heavy_ball", 2e-3),
    ("CEM Nesterov", 2): ("nesterov", 2e-3),
    ("CEM Nesterov", 4): ("nesterov", 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, tune: bool = False, debug: bool = False) -> Study:
    """The recursion study's model with each update rule.

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
            model=ModelConfig(recursions=recursions, update_rule=rule),
            training=TrainingConfig(steps=steps, learning_rate=rate, log_every=200),
        )
        for seed in range(seeds)
        for (variant, recursions), (rule, rate) in MODELS.items()
    ]
    return sized(Study("update_rule", runs), tune, debug)
