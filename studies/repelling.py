"""What do heads buy that move a token away from what they look for? The same parameters; some of four heads repel."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.variations import sized
from energylab.training import TrainingConfig

CEM = dict(recursions=1, diagonal="none")
LOOPED = dict(recursions=1, loops=2)
LLAMA = dict(attention="llama", mlp="llama")

# (variant, T): the model, and its learning rate, which `energylab run repelling --tune` sweeps
MODELS = {
    ("CEM no diagonal", 1): (CEM, 2e-3),
    ("CEM 1 of 4 repels", 1): (CEM | dict(repelling_heads=1), 2e-3),
    ("CEM 2 of 4 repel", 1): (CEM | dict(repelling_heads=2), 2e-3),
    ("CEM 4 of 4 repel", 1): (CEM | dict(repelling_heads=4), 2e-3),
    ("CEM 2 of 4 repel", 2): (CEM | dict(repelling_heads=2, recursions=2), 2e-3),
    ("CEM 2 of 4 repel, equal parameters", 1): (CEM | dict(repelling_heads=2, width=84, hidden=168), 2e-3),
    ("CEM looped block", 1): (LOOPED, 2e-3),
    ("CEM looped block, 2 of 4 repel", 1): (LOOPED | dict(repelling_heads=2), 2e-3),
    ("Llama attention, CEM MLP", 1): (CEM | dict(attention="llama"), 2e-3),
    ("Llama", None): (LLAMA, 2e-3),
    ("Llama looped block", None): (LLAMA | dict(loops=2), 2e-3),
}


def study(steps: int = 10_000, seeds: int = 5, tune: bool = False, debug: bool = False) -> Study:
    """CEM layers with none, one, two and all of four heads that repel, in one step, two steps and a looped block.

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
    return sized(Study("repelling", runs), tune, debug)
