"""Is recursion within a layer the same as looping a block? T = 2 with a fixed and with a refreshed history, a block of
T = 1 layers applied twice, and twice as many blocks, of T = 1 layers and of Llama's, at about equal operations."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

# (variant, T): the model, and its learning rate, which `energylab run looping --tune` sweeps
MODELS = {
    ("CEM", 1): (dict(), 2e-3),
    ("CEM", 2): (dict(), 2e-3),
    # the fixed history saves operations, which a larger width spends: 17.6 against 18.1 TFLOP of the next three
    ("CEM, equal operations", 2): (dict(width=68, hidden=136), 2e-3),
    ("CEM refreshed history", 2): (dict(history="refreshed"), 2e-3),
    ("CEM looped block", 1): (dict(loops=2), 2e-3),
    ("CEM deeper", 1): (dict(depth=4), 2e-3),
    ("Llama deeper", None): (dict(depth=4, attention="llama", mlp="llama"), 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, tune: bool = False, debug: bool = False) -> Study:
    """Two steps in a layer, against two passes of a block and two blocks.

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
            model=ModelConfig(recursions=recursions or 1, **model),
            training=TrainingConfig(steps=steps, learning_rate=rate, log_every=200),
        )
        for seed in range(seeds)
        for (variant, recursions), (model, rate) in MODELS.items()
    ]
    return sized(Study("looping", runs), tune, debug)
