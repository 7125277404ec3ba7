"""Does the gain of a second step survive a tuned learning rate? T = 1, T = 2 and Llama at several rates, at full length."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.training import TrainingConfig

# (variant, T): the model, and its rates; 2e-3 is that of the recursion study, whose training is taken over
MODELS = {
    ("CEM", 1): (dict(recursions=1), (2e-3, 4e-3, 8e-3)),
    ("CEM", 2): (dict(recursions=2), (2e-3, 4e-3, 8e-3)),
    ("Llama", None): (dict(attention="llama", mlp="llama"), (1e-3, 2e-3, 4e-3)),
}


def study(steps: int = 10_000, seeds: int = 3) -> Study:
    """Each model at three learning rates.

    Args:
        steps: Optimiser steps of each run.
        seeds: Runs of each model and rate, from seeds 0, 1, ...
    """
    return Study(
        "learning_rate",
        [
            RunConfig(
                variant=variant,
                seed=seed,
                prior="fixed",
                num_points=24,
                model=ModelConfig(**model),
                training=TrainingConfig(steps=steps, learning_rate=rate, log_every=200),
                conditions=("in-prior", "validation"),
            )
            for seed in range(seeds)
            for (variant, _), (model, rates) in MODELS.items()
            for rate in rates
        ],
    )
