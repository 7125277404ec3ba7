"""Workers: the same numbers as in one process, and what happens when one dies."""

import json
import os
import signal
from pathlib import Path

import pytest
from tiny_runs import CODE, assert_same_results, tiny_config

from energylab.study import Study, driver, store
from energylab.study.claim import CLAIM
from energylab.study.executors import InProcess, LocalProcesses, Task
from energylab.study.run import Outcome, Update


def tasks_in(folder: Path, *configs) -> list[Task]:
    return [Task(config=config, directory=folder / config.name) for config in configs]


def test_a_dead_worker_loses_its_run_and_no_other(tmp_path: Path, finished: Path) -> None:
    long = tiny_config(seed=9, steps=100_000)
    short = [tiny_config(), tiny_config(seed=1)]
    outcomes: dict[str, Outcome] = {}

    def report(message: Update | Outcome) -> None:
        if isinstance(message, Outcome):
            outcomes[message.run] = message
        elif message.run == long.name and message.step > 0:
            os.kill(json.loads((tmp_path / long.name / CLAIM).read_text())["pid"], signal.SIGKILL)

    LocalProcesses(1).execute(tasks_in(tmp_path, long, *short), CODE, report, stop=lambda: False)
    assert outcomes[long.name].state == "killed"
    assert "killed (SIGKILL" in outcomes[long.name].sentence
    assert store.read_progress(tmp_path / long.name)["state"] == "killed"
    for config in short:
        assert outcomes[config.name].state == "finished"
        # a worker's numbers are those of this process
        assert_same_results(finished / config.name, tmp_path / config.name)


def test_stop_saves_the_runs_at_work_and_starts_no_more(tmp_path: Path) -> None:
    configs = [tiny_config(seed=seed, steps=100_000) for seed in range(3)]
    outcomes, running = [], set()

    def report(message: Update | Outcome) -> None:
        if isinstance(message, Outcome):
            outcomes.append(message)
        elif message.step > 0:
            running.add(message.run)

    LocalProcesses(1).execute(tasks_in(tmp_path, *configs), CODE, report, stop=lambda: bool(running))
    assert [outcome.state for outcome in outcomes] == ["interrupted"]
    state, _ = store.read_state(tmp_path / configs[0].name)
    assert state is not None
    assert f"stopped at step {state['trainer']['step']} of" in outcomes[0].sentence
    assert not (tmp_path / configs[1].name).exists()


def test_in_process_stops_too(tmp_path: Path) -> None:
    configs = [tiny_config(seed=seed) for seed in range(3)]
    outcomes = []

    def report(message: Update | Outcome) -> None:
        outcomes.extend([message] if isinstance(message, Outcome) else [])

    InProcess().execute(tasks_in(tmp_path, *configs), CODE, report, stop=lambda: len(outcomes) == 1)
    assert [outcome.state for outcome in outcomes] == ["finished"]


@pytest.fixture
def failed(tmp_path: Path) -> Study:
    """A study with a run that diverges, executed once."""
    study = Study("tiny", [tiny_config(learning_rate=1e30, warmup_steps=0), tiny_config()])
    tasks, settled = driver.plan(study.runs, tmp_path, code=CODE)
    assert not settled
    outcomes = driver.execute(
        study,
        tmp_path,
        InProcess(),
        code=CODE,
        knobs={},
        tasks=tasks,
        report=lambda message: None,
        stop=lambda: False,
    )
    assert [outcome.state for outcome in outcomes] == ["diverged", "finished"]
    return study


def test_a_failed_run_is_not_tried_again_unless_asked_for(failed: Study, tmp_path: Path) -> None:
    tasks, settled = driver.plan(failed.runs, tmp_path, code=CODE)
    assert not tasks
    assert {outcome.state for outcome in settled} == {"diverged", "finished"}
    tasks, settled = driver.plan(failed.runs, tmp_path, code=CODE, retry_failed=True)
    assert [task.config for task in tasks] == [failed.runs[0]]
    assert [outcome.state for outcome in settled] == ["finished"]


def test_tasks_come_seed_by_seed(tmp_path: Path) -> None:
    study = Study("tiny", [tiny_config(seed=s, variant=v) for v in ("CEM", "Llama") for s in (0, 1)])
    tasks, _ = driver.plan(study.runs, tmp_path, code=CODE)
    assert [task.config.seed for task in tasks] == [0, 0, 1, 1]
