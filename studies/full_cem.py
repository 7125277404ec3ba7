"""Do models of CEM layers alone, with T = 2 and preconditioners, train stably and match Llama with fewer parameters?"""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

PAPER = dict(recursions=2, preconditioner="diagonal_low_rank")

# variant: the model, and its learning rate, which `energylab run full_cem --tune` sweeps
MODELS = {
    "Llama": (dict(attention="llama", mlp="llama"), 2e-3),
    "CEM": (dict(recursions=2), 2e-3),
    "CEM preconditioned": (PAPER, 2e-3),
    "CEM preconditioned, equal parameters": (PAPER | dict(width=80, hidden=160), 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, tune: bool = False, debug: bool = False) -> Study:
    """Nothing but CEM layers, against Llama.

    Every run logs the largest loss and gradient norm of each 50 steps, which is where a spike shows.

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
        )
        for seed in range(seeds)
        for variant, (model, rate) in MODELS.items()
    ]
    return sized(Study("full_cem", runs), tune, debug)
