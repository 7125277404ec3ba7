"""RMSE and energy descent for T = 1, 2, 4, 8, against Llama blocks."""

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.training import TrainingConfig


def study(steps: int = 10_000, seeds: int = 5, width: int = 64) -> Study:
    def run(variant: str, seed: int, **model) -> RunConfig:
        return RunConfig(
            variant=variant,
            seed=seed,
            prior="fixed",
            num_points=24,
            model=ModelConfig(width=width, **model),
            training=TrainingConfig(steps=steps),
        )

    return Study(
        "recursion",
        [run("CEM", seed, recursions=T) for seed in range(seeds) for T in (1, 2, 4, 8)]
        + [run("Llama", seed, attention="llama", mlp="llama") for seed in range(seeds)],
    )
