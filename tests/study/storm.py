"""A storm: the processes of a study are killed at random moments, and it is started again, until it is complete.

    python tests/study/storm.py --runs 12 --kills 30 --log docs/logs/storm.txt

compares every number with that of an undisturbed study, bit for bit, wall-clock columns apart. Killed are, at random,
the command with its workers, the command alone, or one worker.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tiny_runs import CODE, assert_same_results

from energylab.study import driver, store
from energylab.study.claim import CLAIM
from energylab.study.executors import InProcess
from energylab.study.status import status

STUDY = '''
from tiny_runs import tiny_config

from energylab.study import Study


def study(runs: int = 12, steps: int = 2000) -> Study:
    """Short runs of several models and seeds, whose states are saved often."""
    kinds = [{"recursions": 1}, {"recursions": 2}, {"variant": "Llama"}]
    return Study(
        "storm",
        [tiny_config(seed=n // 3, steps=steps, save_every=10, log_every=100, **kinds[n % 3]) for n in range(runs)],
    )
'''


@dataclass
class Storm:
    """What happened."""

    lines: list[str] = field(default_factory=list)
    kills: int = 0
    within: int = 0
    """Kills of a process that had trained some steps of a run, and not all."""
    starts: int = 0

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)


def rage(folder: Path, runs: int, steps: int, kills: int, seed: int, workers: int = 2) -> Storm:
    """Kill and start again until the study is complete and has been killed so often; then compare.

    Raises AssertionError where a run is not complete, was finished twice, or has other numbers.
    """
    (folder / "studies").mkdir(parents=True)
    (folder / "studies/storm.py").write_text(STUDY)
    storm, chance = Storm(), random.Random(seed)
    storm.say(f"{runs} runs of {steps} steps, {workers} workers; seed {seed} of the storm")
    finished: dict[str, bytes] = {}
    """The provenance of each run when it was first seen finished: it must stay."""
    announced: list[str] = []
    process: subprocess.Popen | None = None
    results = folder / "runs/storm"

    def look() -> None:
        for path in results.glob(f"*/{store.PROVENANCE}"):
            content = path.read_bytes()
            assert finished.setdefault(path.parent.name, content) == content, f"{path.parent.name} was finished twice"

    def listen(ended: subprocess.Popen) -> None:
        output, _ = ended.communicate()
        assert "Traceback" not in output, output
        announced.extend(line.split()[1].rstrip(":") for line in output.splitlines() if ": finished, excess" in line)

    while storm.kills < kills or len(finished) < runs:
        if process is None or process.poll() is not None:
            if process is not None:
                listen(process)
                look()
                if len(finished) == runs:
                    break
            process = start(folder, runs, steps, workers)
            storm.starts += 1
        if storm.kills == kills:
            listen(process)
            process = None
            look()
            continue
        owners = wait_for_training(process, results)
        time.sleep(chance.uniform(0, 1.5))
        kind = chance.choices(["everything", "the command", "a worker"], weights=[2, 1, 2])[0]
        victims = {run: pid for run, pid in owners.items() if kind != "the command"}
        if kind == "a worker" and victims:
            run = chance.choice(sorted(victims))
            victims = {run: victims[run]}
            kill(victims[run])
        elif kind == "everything":
            with_group(process.pid)
        else:
            kill(process.pid)
        storm.kills += 1
        # the command alone: its workers notice, save and end by themselves, which is no sudden death of a run
        steps_of = {
            run: saved_step(results / run) for run, pid in victims.items() if dead_with_claim(results / run, pid)
        }
        inside = {run: step for run, step in steps_of.items() if 0 < step < steps}
        storm.within += bool(inside)
        where = (
            ", ".join(f"{run} after step {step}" for run, step in inside.items()) or "between runs, or while it starts"
        )
        storm.say(f"kill {storm.kills}: {kind}; {where}; {len(finished)} runs finished")
        if kind != "a worker":
            listen(process)
            process = None
        look()
    if process is not None and process.poll() is None:
        listen(process)
        look()

    study = load(folder, runs, steps)
    names = [config.name for config in study.runs]
    assert sorted(finished) == sorted(names)
    assert {run.state for run in status(results, CODE).runs} == {"finished"}
    assert len(announced) == len(set(announced)), announced
    undisturbed = folder / "undisturbed"
    tasks, _ = driver.plan(study.runs, undisturbed, code=CODE)
    settings = {"code": CODE, "knobs": {}, "tasks": tasks, "report": lambda message: None, "stop": lambda: False}
    driver.execute(study, undisturbed, InProcess(), **settings)
    sessions = []
    for name in names:
        assert_same_results(undisturbed / name, results / name)
        provenance = store.check_run(results / name)
        assert provenance is not None
        sessions.append(provenance["sessions"])
    assert not list(results.rglob("*.tmp-*"))
    storm.say(
        f"{storm.kills} processes killed, {storm.within} of them between the first and the last step of a run; "
        f"the command started {storm.starts} times; sessions of the runs: {', '.join(map(str, sessions))}"
    )
    storm.say(
        f"all {runs} runs are complete, none was finished twice, and every weight and metric equals that of an "
        "undisturbed study, bit for bit"
    )
    return storm


def start(folder: Path, runs: int, steps: int, workers: int) -> subprocess.Popen:
    words = ["run", "storm", "--runs", str(runs), "--steps", str(steps), "--workers", str(workers)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-m", "energylab", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def load(folder: Path, runs: int, steps: int):
    from energylab import project

    path = folder / "studies/storm.py"
    return project.resolve(path, project.study_function(path), {"runs": runs, "steps": steps})


def wait_for_training(process: subprocess.Popen, results: Path) -> dict[str, int]:
    """Runs at work and the processes that own them, once there is one; none if the command has ended."""
    while process.poll() is None:
        owners = {}
        for path in results.glob(f"*/{CLAIM}"):
            try:
                pid = json.loads(path.read_text())["pid"]
            except (OSError, ValueError):
                continue
            if alive(pid):
                owners[path.parent.name] = pid
        if any(saved_step(results / run) > 0 for run in owners):
            return owners
        time.sleep(0.05)
    return {}


def saved_step(directory: Path) -> int:
    try:
        state = torch.load(directory / store.STATE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError):
        return 0
    return state["trainer"]["step"]


def dead_with_claim(directory: Path, pid: int) -> bool:
    """Whether a process died while it owned the run."""
    try:
        return json.loads((directory / CLAIM).read_text())["pid"] == pid
    except (OSError, ValueError):
        return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    while alive(pid):
        time.sleep(0.01)


def with_group(pid: int) -> None:
    """Kill a command and all that it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    while alive(pid):
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        storm = rage(Path(folder) / "storm", options.runs, options.steps, options.kills, options.seed)
    if options.log:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text("\n".join(storm.lines) + "\n")


if __name__ == "__main__":
    main()
