"""How fair one learning rate is: the models of the main comparisons at several rates, at full length."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.training import TrainingConfig

PLAIN = dict(recursions=1, diagonal="none")
LOOPED = dict(recursions=1, loops=2)
LLAMA = dict(attention="llama", mlp="llama")

# (variant, T): the model, and its rates, where short sweeps put its best; one more where the best was the largest.
# 2e-3 is the rate of the other studies, whose training is taken over
MODELS = {
    ("CEM", 1): (dict(recursions=1), (2e-3, 4e-3, 8e-3, 1.6e-2)),
    ("CEM", 2): (dict(recursions=2), (2e-3, 4e-3, 8e-3)),
    ("CEM preconditioned", 2): (dict(recursions=2, preconditioner="diagonal_low_rank"), (1e-3, 2e-3, 4e-3, 8e-3)),
    ("CEM no diagonal", 1): (PLAIN, (2e-3, 4e-3, 8e-3)),
    ("CEM 2 of 4 repel", 1): (PLAIN | dict(repelling_heads=2), (2e-3, 4e-3, 8e-3)),
    ("CEM looped block", 1): (LOOPED, (2e-3, 4e-3, 8e-3)),
    ("CEM looped block, 2 of 4 repel", 1): (LOOPED | dict(repelling_heads=2), (2e-3, 4e-3, 8e-3)),
    ("Llama attention, CEM MLP", 1): (PLAIN | dict(attention="llama"), (1e-3, 2e-3, 4e-3)),
    ("Llama", None): (LLAMA, (1e-3, 2e-3, 4e-3)),
    ("Llama looped block", None): (LLAMA | dict(loops=2), (1e-3, 2e-3, 4e-3)),
}


def study(steps: int = 10_000, seeds: int = 1) -> Study:
    """Each model at three learning rates or more.

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
