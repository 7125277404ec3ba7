"""Ray Core tasks, where ray is installed: the same numbers, and what happens when a worker is killed."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from storm import saved_step
from tiny_runs import assert_same_results, tiny_config, train

from energylab.cli import main
from energylab.study import store
from energylab.study.claim import CLAIM

STUDY = """
from tiny_runs import tiny_config

from energylab.study import Study


def study(steps: int = 600) -> Study:
    return Study("tiny", [tiny_config(seed=seed, steps=steps) for seed in range(2)])
"""

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies/tiny.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
    return tmp_path


def start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "energylab", "run", "tiny", "--executor", "ray", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for_state(process: subprocess.Popen, directory: Path) -> int:
    """The process that trains a run, once it has saved a state after the first."""
    while process.poll() is None:
        if saved_step(directory) > 0:
            return json.loads((directory / CLAIM).read_text())["pid"]
        time.sleep(0.02)
    output = process.stdout.read() if process.stdout else ""
    if "timed out during startup" in output:
        pytest.skip("Ray did not start within its half minute: this machine is too busy")
    pytest.fail(output)


@needs_ray
def test_a_killed_worker_is_replaced_and_the_results_are_the_serial_ones(project: Path) -> None:
    configs = [tiny_config(seed=seed, steps=600) for seed in range(2)]
    process = start("--workers", "2")
    victim = project / "runs/tiny" / configs[0].name
    os.kill(wait_for_state(process, victim), signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "2 of 2 runs are finished" in output
    assert "Traceback" not in output
    for config in configs:
        assert train(config, project / "serial").state == "finished"
        assert_same_results(project / "serial" / config.name, project / "runs/tiny" / config.name)
    provenance = store.read_provenance(victim)
    assert provenance is not None
    first, second = provenance["history"]
    assert first["step"] == 0
    assert 0 < second["step"] < 600
    assert provenance["device"].startswith("cpu (")
    assert not list((project / "runs/tiny").glob(".stop-*"))


@needs_ray
@pytest.mark.slow
def test_an_interrupt_saves_the_runs_at_work(project: Path) -> None:
    process = start("--workers", "1", "--steps", "100000")
    directory = project / "runs/tiny" / tiny_config(steps=100_000).name
    wait_for_state(process, directory)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    assert re.search(r"stopped at step \d+ of 100000", output)
    assert "go on with: energylab run tiny --executor ray" in output
    assert not (directory / CLAIM).exists()


@needs_ray
@pytest.mark.slow
def test_a_run_that_fails_by_itself_is_not_tried_again(project: Path) -> None:
    text = STUDY.replace("steps=steps", "steps=steps, warmup_steps=0, learning_rate=1e30")
    (project / "studies/tiny.py").write_text(text)
    output, _ = start("--workers", "1").communicate(timeout=600)
    assert len(re.findall(r"\[./2\] .*diverged", output)) == 2
    assert "--retry-failed" in output


def test_options_of_ray_are_refused_without_it(project: Path, capsys, monkeypatch) -> None:
    assert main(["run", "tiny", "--gpus-per-run", "0.5"]) == 2
    assert "--gpus-per-run: expected it with --executor ray only" in capsys.readouterr().err
    assert main(["run", "tiny", "--executor", "ray", "--gpus-per-run", "1.5"]) == 2
    assert "--gpus-per-run: expected a number from 0 to 1, got 1.5" in capsys.readouterr().err
    monkeypatch.setattr("energylab.cli.running.version", lambda name: None)
    assert main(["run", "tiny", "--executor", "ray"]) == 2
    assert "pip install 'energylab[ray]'" in capsys.readouterr().err
    assert not (project / "runs").exists()
