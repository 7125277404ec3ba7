"""Which layers gain from a second step? T = 2 in attention alone, in the MLP alone, in both; and T = 1 with the shorter
step in which training starts at T = 2.
"""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

# (variant, T): the model, and its learning rate, which `energylab run recursion_by_part --tune` sweeps
MODELS = {
    ("CEM", 1): (dict(recursions=1), 2e-3),
    ("CEM first step 1/2", 1): (dict(recursions=1, initial_step_size=0.5), 2e-3),
    ("CEM T = 2 in attention", 1): (dict(recursions=1, attention_recursions=2), 2e-3),
    ("CEM T = 2 in the MLP", 1): (dict(recursions=1, mlp_recursions=2), 2e-3),
    ("CEM", 2): (dict(recursions=2), 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, tune: bool = False, debug: bool = False) -> Study:
    """The recursion study's model with a second step in some of its layers.

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
            model=ModelConfig(**model),
            training=TrainingConfig(steps=steps, learning_rate=rate, log_every=200),
        )
        for seed in range(seeds)
        for (variant, _), (model, rate) in MODELS.items()
    ]
    return sized(Study("recursion_by_part", runs), tune, debug)
