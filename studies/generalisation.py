"""How do recursion and Llama hold up on tasks that they were not trained on? The recursion study's models, tested on every
condition: shifted inputs, a held-out kernel, other noise, other length-scales, a mean, twice the points."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.tasks import CONDITIONS
from energylab.training import TrainingConfig

# (variant, T): the model, and its learning rate, that of the recursion study
MODELS = {
    ("CEM", 1): (dict(recursions=1), 2e-3),
    ("CEM", 2): (dict(recursions=2), 2e-3),
    ("CEM", 4): (dict(recursions=4), 2e-3),
    ("CEM", 8): (dict(recursions=8), 2e-3),
    ("Llama", None): (dict(attention="llama", mlp="llama"), 2e-3),
}


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
            variant=variant,
            seed=seed,
            prior="fixed",
            num_points=24,
            model=ModelConfig(**model),
            training=TrainingConfig(steps=steps, learning_rate=rate),
            conditions=tuple(name for name in CONDITIONS if name != "validation"),
        )
        for seed in range(seeds)
        for (variant, _), (model, rate) in MODELS.items()
    ]
    return sized(Study("generalisation", runs), tune, debug)
