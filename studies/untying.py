"""What gives the freedom back that the two ties of attention take? 16,000 parameters more, spent on heads, on rank, on a
positive or on an indefinite preconditioner; one gradient step (T = 1, no diagonal)."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

CEM = dict(recursions=1, diagonal="none")
LLAMA = dict(attention="llama", mlp="llama")

# variant: the model, and its learning rate, which `energylab run untying --tune` sweeps
MODELS = {
    "CEM no diagonal": (CEM, 2e-3),
    "CEM 8 heads": (CEM | dict(heads=8, head_dim=16), 2e-3),
    "CEM heads of rank 32": (CEM | dict(head_dim=32), 2e-3),
    # U Uᵀ of rank 64 and U Vᵀ + V Uᵀ of rank 32 have equally many parameters
    "CEM positive P": (CEM | dict(preconditioner="diagonal_low_rank_positive", rank=64), 2e-3),
    "CEM indefinite P": (CEM | dict(preconditioner="diagonal_low_rank", rank=32), 2e-3),
    # P starts at I: with heads that all repel, the step is that of heads that attract and a P that starts at -I
    "CEM indefinite P from −I": (CEM | dict(preconditioner="diagonal_low_rank", rank=32, repelling_heads=4), 2e-3),
    "Llama, K = V": (LLAMA | dict(tie="key_value"), 2e-3),
    "Llama": (LLAMA, 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, tune: bool = False, debug: bool = False) -> Study:
    """One gradient step a layer, with more of one thing at a time, between CEM and Llama.

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
        for variant, (model, rate) in MODELS.items()
    ]
    return sized(Study("untying", runs), tune, debug)
