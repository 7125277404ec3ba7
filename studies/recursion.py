"""RMSE and energy descent for T = 1, 2, 4, 8, against Llama blocks."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

# (variant, T): the model, and its learning rate, which `energylab run recursion --tune` sweeps; T > 2 takes that of T = 2
MODELS = {
    ("CEM", 1): (dict(recursions=1), 2e-3),
    ("CEM", 2): (dict(recursions=2), 2e-3),
    ("CEM", 4): (dict(recursions=4), 2e-3),
    ("CEM", 8): (dict(recursions=8), 2e-3),
    ("Llama", None): (dict(attention="llama", mlp="llama"), 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, width: int = 64, tune: bool = False, debug: bool = False) -> Study:
    """What more steps in a layer buy.

    Args:
        steps: Optimiser steps of each run.
        seeds: Runs of each model, from seeds 0, 1, ...
        width: D, the width of the residual stream.
        tune: Sweep the learning rates instead.
        debug: A miniature that ends in seconds.
    """
    runs = [
        RunConfig(
            variant=variant,
            seed=seed,
            prior="fixed",
            num_points=24,
            model=ModelConfig(width=width, **model),
            training=TrainingConfig(steps=steps, learning_rate=rate),
        )
        for seed in range(seeds)
        for (variant, _), (model, rate) in MODELS.items()
    ]
    return sized(Study("recursion", runs), tune, debug)
