"""Runs so small that a test can train them."""

from pathlib import Path

import pandas as pd

from energylab.models import ModelConfig
from energylab.study import RunConfig, store
from energylab.study.run import Outcome, execute, threads
from energylab.study.version import Code
from energylab.training import TrainingConfig

CODE = Code(version="0", commit=None, dirty=None)
TABLES = (store.METRICS, store.EVALUATION, store.DESCENT, store.CIRCUITS, store.TRACES)


def tiny_config(seed: int = 0, variant: str = "CEM", steps: int = 20, recursions: int = 2, **training) -> RunConfig:
    kind = {"attention": "llama", "mlp": "llama"} if variant == "Llama" else {"recursions": recursions}
    return RunConfig(
        variant=variant,
        seed=seed,
        prior="fixed",
        num_points=4,
        model=ModelConfig(width=8, depth=1, heads=2, hidden=8, **kind),
        training=TrainingConfig(steps=steps, **{"batch_size": 4, "log_every": 5, "save_every": 5, **training}),
    )


def train(config: RunConfig, folder: Path, **options) -> Outcome:
    with threads(1):
        return execute(config, folder / config.name, code=CODE, **options)


def assert_same_results(first: Path, second: Path) -> None:
    """Bit for bit, wall-clock columns apart."""
    assert (first / store.WEIGHTS).read_bytes() == (second / store.WEIGHTS).read_bytes()
    for name in TABLES:
        tables = [pd.read_parquet(path / name).drop(columns="seconds", errors="ignore") for path in (first, second)]
        pd.testing.assert_frame_equal(*tables, check_exact=True)
