"""Finished runs to read, or to damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import tiny_config, train


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
