"""The driver: which runs of a study are to do, and what becomes of each."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from energylab.study import store
from energylab.study.claim import living_owner
from energylab.study.config import RunConfig, Study
from energylab.study.executors import Executor, Task
from energylab.study.run import FAILED, Outcome, Update
from energylab.study.version import Code, other_code, sessions


def shard(runs: Sequence[RunConfig], part: int, parts: int) -> list[RunConfig]:
    """The runs of part 1, 2, ... of a study that several commands share out; seed by seed, as `plan` has them."""
    return sorted(runs, key=lambda config: config.seed)[part - 1 :: parts]


def plan(
    runs: Sequence[RunConfig],
    folder: Path,
    *,
    code: Code,
    retry_failed: bool = False,
    time_limit: float | None = None,
) -> tuple[list[Task], list[Outcome]]:
    """The runs to execute, and how the others stand: finished before, failed before, or damaged.

    A damaged directory is set aside, and its run is left for the next command. With `retry_failed`, the tasks are the
    runs that failed before or were killed, and no others. Tasks come seed by seed, so that whole comparisons are
    finished early.
    """
    tasks, settled = [], []
    for config in runs:
        directory = folder / config.name
        outcome = _standing(config, directory, code)
        task = Task(config=config, directory=directory, time_limit=time_limit, reuse=True)
        if outcome is None or outcome.state == "killed":
            tasks += [] if retry_failed and outcome is None else [task]
        elif retry_failed and outcome.state in FAILED:
            tasks.append(task)
        else:
            settled.append(outcome)
    tasks.sort(key=lambda task: task.config.seed)
    return tasks, settled


def execute(
    study: Study,
    folder: Path,
    executor: Executor,
    *,
    code: Code,
    knobs: Mapping[str, Any],
    tasks: list[Task],
    report: Callable[[Update | Outcome], None],
    stop: Callable[[], bool],
) -> list[Outcome]:
    """Bring the planned runs of a study to their end; returns how each ended. Those that never started are left out.

    Where a disk is full or may not be written, no run starts any more: it would fail as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store.write_study(folder, study, knobs)
    outcomes: list[Outcome] = []
    full = False
    directories = {task.config.name: task.directory for task in tasks}

    def listen(message: Update | Outcome) -> None:
        nonlocal full
        if isinstance(message, Outcome):
            full |= message.state == "disk"
            if message.state == "damaged":
                message = _put_aside(message.run, directories[message.run], message.sentence)
            outcomes.append(message)
        report(message)

    executor.execute(tasks, code, listen, lambda: stop() or full)
    return outcomes


def _standing(config: RunConfig, directory: Path, code: Code) -> Outcome | None:
    """How a run ended before this command; None if it is to start or to continue."""
    if living_owner(directory) is not None:
        return None  # half-written by its owner, perhaps; whoever executes it will meet the claim
    try:
        if (provenance := store.check_run(directory)) is not None:
            other = other_code(sessions(provenance), code)
            sentence = f"it was finished before, {other}: its numbers could differ" if other else ""
            return Outcome(run=config.name, state="finished", sentence=sentence, new=False)
    except store.FromNewerVersion as error:
        return Outcome(run=config.name, state="damaged", sentence=error.reason, new=False)
    except store.Damaged as error:
        return _put_aside(config.name, directory, error.reason)
    progress = store.read_progress(directory)
    if progress.get("state") in (*FAILED, "killed"):
        return Outcome(run=config.name, state=progress["state"], sentence=str(progress.get("sentence")), new=False)
    return None


def _put_aside(run: str, directory: Path, reason: str) -> Outcome:
    target = store.set_aside(directory)
    sentence = f"damaged ({reason}); set aside as {target.name}, the next `energylab run` trains it anew"
    return Outcome(run=run, state="damaged", sentence=sentence)
