"""What do tied weights cost? Each tie alone and together, one gradient step (T = 1, no diagonal) where a layer is CEM, at
the width of Llama, at its parameters and at its operations."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

CEM = dict(recursions=1, diagonal="none")
LLAMA = dict(attention="llama", mlp="llama")

# variant: the model, and its learning rate, which `energylab run tied_weights --tune` sweeps
MODELS = {
    "Llama": (LLAMA, 2e-3),
    "Llama, K = V": (LLAMA | dict(tie="key_value"), 2e-3),
    "Llama, Q = O": (LLAMA | dict(tie="query_output"), 2e-3),
    "Llama, K = V and Q = O": (LLAMA | dict(tie="both"), 2e-3),
    "Llama attention, CEM MLP": (CEM | dict(attention="llama"), 2e-3),
    "CEM attention, Llama MLP": (CEM | dict(mlp="llama"), 2e-3),
    "CEM no diagonal": (CEM, 2e-3),
    "CEM no diagonal, equal operations": (CEM | dict(width=68, hidden=136), 2e-3),
    "CEM no diagonal, equal parameters": (CEM | dict(width=84, hidden=168), 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, tune: bool = False, debug: bool = False) -> Study:
    """Llama with none, some and all of its weights tied.

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
    return sized(Study("tied_weights", runs), tune, debug)
