"""The recursion study in miniature: minutes instead of hours, to see the whole line from a sampled task to a figure."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.training import TrainingConfig


def study(steps: int = 400, seeds: int = 2, width: int = 32) -> Study:
    """A small model, trained briefly.

    Args:
        steps: Optimiser steps of each run.
        seeds: Runs of each model, from seeds 0, 1, ...
        width: D, the width of the residual stream.
    """

    def run(variant: str, seed: int, **model) -> RunConfig:
        return RunConfig(
            variant=variant,
            seed=seed,
            prior="fixed",
            num_points=16,
            model=ModelConfig(width=width, hidden=2 * width, **model),
            training=TrainingConfig(steps=steps, warmup_steps=50),
        )

    return Study(
        "quickstart",
        [run("CEM", seed, recursions=T) for seed in range(seeds) for T in (1, 2, 4, 8)]
        + [run("Llama", seed, attention="llama", mlp="llama") for seed in range(seeds)],
        note=f"After {steps} steps the models are far from trained: too short a run to rank T.",
    )
