"""Runs so small that a test can train them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from energylab.models import ModelConfig
from energylab.study import RunConfig
from energylab.study.run import Code, Outcome, execute, threads
from energylab.training import TrainingConfig

CODE = Code(version="0", commit=None, dirty=None)


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


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three finished runs. Read it, or copy it with `study_folder`."""
    folder = tmp_path_factory.mktemp("finished") / "tiny"
    for config in (tiny_config(), tiny_config(seed=1), tiny_config(variant="Llama")):
        assert train(config, folder).state == "finished"
    return folder


@pytest.fixture
def study_folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished runs, to damage."""
    return Path(shutil.copytree(finished, tmp_path / "tiny"))


@pytest.fixture
def stop_after() -> Callable[[int], Callable[[], bool]]:
    """A `should_stop` that says yes when asked for the n-th time, that is after step n."""

    def make(steps: int) -> Callable[[], bool]:
        asked = 0

        def should_stop() -> bool:
            nonlocal asked
            asked += 1
            return asked == steps

        return should_stop

    return make
