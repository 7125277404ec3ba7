"""Failure as a value: each state with its sentence, what is tried again, and which code is said to have trained."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import CODE, assert_same_results, tiny_config, train

from energylab.cli import main
from energylab.study import Study, driver, store
from energylab.study import run as run_module
from energylab.study.executors import InProcess
from energylab.study.run import write_progress
from energylab.study.status import status
from energylab.study.version import current_code
from energylab.training import Trainer

OTHER = dataclasses.replace(CODE, version="0.2", commit="abcdef0123456789")


def standing(folder: Path, run: str, code=CODE):
    return next(found for found in status(folder, code).runs if found.run == run)


def test_a_run_out_of_time_is_saved_and_goes_on_when_given_longer(tmp_path: Path, finished: Path) -> None:
    config = tiny_config()
    outcome = train(config, tmp_path, time_limit=1e-9)
    assert outcome.state == "out of time"
    assert "stopped at step 1 of 20, its state is saved; give it a longer --time-limit" in outcome.sentence
    assert standing(tmp_path, config.name).state == "out of time"
    tasks, settled = driver.plan([config], tmp_path, code=CODE)
    assert (len(tasks), [outcome.state for outcome in settled]) == (0, ["out of time"])
    (task,), _ = driver.plan([config], tmp_path, code=CODE, retry_failed=True, time_limit=600)
    assert task.time_limit == 600
    assert train(config, tmp_path, time_limit=600).state == "finished"
    assert_same_results(finished / config.name, tmp_path / config.name)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    ],
)
def test_out_of_memory_is_a_state_and_the_others_go_on(tmp_path: Path, monkeypatch, error: Exception) -> None:
    configs = [tiny_config(seed=seed) for seed in range(2)]
    advance = Trainer.advance
    folder = tmp_path / "tiny"  # alone in its folder of studies

    def fail(self: Trainer):
        if self.seed == 0 and self.step == 7:
            raise error
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", fail)
    study = Study("tiny", configs)
    tasks, _ = driver.plan(configs, folder, code=CODE)
    settings = {"code": CODE, "knobs": {}, "tasks": tasks, "report": lambda message: None, "stop": lambda: False}
    outcomes = driver.execute(study, folder, InProcess(), **settings)
    assert [outcome.state for outcome in outcomes] == ["out of memory", "finished"]
    assert standing(folder, configs[0].name).state == "out of memory"
    assert type(error).__name__ in standing(folder, configs[0].name).sentence
    state, _ = store.check_states(folder / configs[0].name)
    assert state is not None
    assert state["trainer"]["step"] == 5


def test_a_killed_run_goes_on_by_itself_and_with_the_failed_ones(tmp_path: Path, stop_after) -> None:
    configs = [tiny_config(seed=seed) for seed in range(3)]
    for config in configs[:2]:
        train(config, tmp_path, should_stop=stop_after(3))
    write_progress(tmp_path / configs[0].name, "killed", "its worker process was killed (SIGKILL)")
    assert standing(tmp_path, configs[0].name).state == "killed"
    assert not status(tmp_path, CODE).sound
    tasks, settled = driver.plan(configs, tmp_path, code=CODE)
    assert (len(tasks), settled) == (3, [])
    tasks, _ = driver.plan(configs, tmp_path, code=CODE, retry_failed=True)
    assert [task.config for task in tasks] == configs[:1]


def test_a_full_disk_stops_the_study(tmp_path: Path, monkeypatch) -> None:
    def full(directory: Path, state) -> None:
        raise OSError(28, "No space left on device", str(directory / store.STATE))

    monkeypatch.setattr(store, "write_state", full)
    configs = [tiny_config(seed=seed) for seed in range(3)]
    tasks, _ = driver.plan(configs, tmp_path, code=CODE)
    settings = {"code": CODE, "knobs": {}, "tasks": tasks, "report": lambda message: None, "stop": lambda: False}
    (outcome,) = driver.execute(Study("tiny", configs), tmp_path, InProcess(), **settings)
    assert outcome.state == "disk"
    assert "state.pt: No space left on device" in outcome.sentence


def test_shards_are_the_study_without_overlap() -> None:
    configs = [tiny_config(seed=seed, variant=variant) for variant in ("CEM", "Llama") for seed in range(5)]
    parts = [driver.shard(configs, part, 3) for part in (1, 2, 3)]
    assert sorted(config.name for part in parts for config in part) == sorted(config.name for config in configs)
    assert [len(part) for part in parts] == [4, 3, 3]
    assert {config.seed for config in parts[0][:1]} == {0}


def test_the_code_of_every_session_is_named(tmp_path: Path, stop_after) -> None:
    config = tiny_config()
    train(config, tmp_path, should_stop=stop_after(7))
    assert run_module.execute(config, tmp_path / config.name, code=OTHER).state == "finished"
    provenance = store.read_provenance(tmp_path / config.name)
    assert provenance is not None
    history = provenance["history"]
    assert [(session["step"], session["version"], session["commit"]) for session in history] == [
        (0, "0", None),
        (7, "0.2", "abcdef0123456789"),
    ]
    assert provenance["sessions"] == 2
    assert provenance["energylab"]["commit"] == OTHER.commit


def test_a_state_that_knows_no_sessions_by_name_continues(tmp_path: Path, stop_after) -> None:
    """As energylab wrote it before it named them."""
    config = tiny_config()
    train(config, tmp_path, should_stop=stop_after(7))
    path = tmp_path / config.name / store.STATE
    state = torch.load(path, weights_only=True)
    del state["history"]
    torch.save({**state, "sessions": 2}, path)
    assert train(config, tmp_path).state == "finished"
    provenance = store.read_provenance(tmp_path / config.name)
    assert provenance is not None
    assert [session["version"] for session in provenance["history"]] == [None, None, "0"]


@pytest.mark.parametrize(
    ("trained_by", "now", "marked"),
    [
        (CODE, CODE, False),
        (OTHER, CODE, True),
        (dataclasses.replace(CODE, commit="a" * 40), dataclasses.replace(CODE, commit="b" * 40), True),
        # another commit, with the same files that have a part in the numbers
        (
            dataclasses.replace(CODE, commit="a" * 40, sources="1"),
            dataclasses.replace(CODE, commit="b" * 40, sources="1"),
            False,
        ),
        (dataclasses.replace(CODE, sources="1"), dataclasses.replace(CODE, sources="2"), True),
    ],
)
def test_a_run_of_other_code_is_marked(tmp_path: Path, trained_by, now, marked: bool) -> None:
    config = tiny_config()
    run_module.execute(config, tmp_path / config.name, code=trained_by)
    sentence = standing(tmp_path, config.name, now).sentence
    assert ("its numbers could differ" in sentence) == marked
    assert (f"by energylab {trained_by.version}" in sentence) == marked
    _, (outcome,) = driver.plan([config], tmp_path, code=now)
    assert outcome.state == "finished"
    assert ("could differ" in outcome.sentence) == marked


def test_the_code_that_runs_has_a_checksum_of_what_makes_numbers() -> None:
    code = current_code()
    assert re.fullmatch("[0-9a-f]{12}", code.sources or "")
    assert code == current_code()


def test_status_tells_the_time_left(tmp_path: Path) -> None:
    sentences = []

    def look(update) -> None:
        if update.phase == "training":
            directory = tmp_path / update.run
            write_progress(directory, "running", "", step=update.step, seconds_left=400.0)
            sentences.append(standing(tmp_path, update.run).sentence)

    train(tiny_config(), tmp_path, report=look)
    assert sentences[0].endswith("is at work on it, about 7 min left")


def test_results_that_are_a_file_are_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    assert main(["status", "tiny", "--results", "a_file"]) == 2
    assert "--results: expected a folder, got a_file, which is a file" in capsys.readouterr().err


STUDY = """
from tiny_runs import tiny_config

from energylab.study import Study


def study(steps: int = 100_000) -> Study:
    return Study("tiny", [tiny_config(seed=seed, steps=steps) for seed in range(2)])
"""


# the command, with runs that never hear that they should stop, as if a step took hours
DEAF = """
import sys

from energylab.cli import main
from energylab.study.run import _Run

train = _Run._train

def deaf(run, trainer):
    run.should_stop = lambda: False
    return train(run, trainer)

_Run._train = deaf
sys.exit(main(["run", "tiny.py", "--executor", "inprocess"]))
"""


def test_a_second_interrupt_stops_at_once(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "tiny.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not list(tmp_path.glob(f"runs/tiny/*/{store.PREVIOUS_STATE}")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "stopped at once; what was saved before is kept" in output
    assert "Traceback" not in output
    (directory,) = tmp_path.glob("runs/tiny/*-seed0-*")
    assert store.check_states(directory)[0] is not None
