"""Runs as Ray Core tasks: on this machine, or on all of a cluster that shares the folder of the results.

A task takes the config of its run as text and gives back how it ended; weights and tables go through the folder of the
results, nothing through Ray's object store. A task whose worker or machine is lost is started again elsewhere, and its
run continues from its last state; a run that fails by itself is an outcome like any other and is not tried again.
"""

import contextlib
import dataclasses
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from energylab.study import store
from energylab.study.claim import STALE_AFTER, living_owner
from energylab.study.executors import Executor, Report, Said, Task, execute_said, usable_cores
from energylab.study.run import Outcome, Update, threads, write_progress
from energylab.study.version import Code

RETRIES = 3
"""How often a run is started again after its worker or its machine was lost."""

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))  # else a run that needs too much memory is never given up
# Ray would hide no GPU from a task that asks for none; from a later version on it will, and says so at every start
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray  # noqa: E402  after the settings that it reads on import
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError  # noqa: E402

_OBJECT_STORE = 100_000_000
"""Bytes; Ray would take 30 % of the memory, and hardly anything goes through it here."""


@final
class RayTasks(Executor):
    """Ray Core tasks, each with one CPU, and `gpus_per_run` of a GPU: by default 1 if the study asks for CUDA, else 0.

    A run without a GPU trains on the CPU. `address` is that of a cluster, such as "auto"; without one, a Ray of its own
    starts on this machine, with `workers` CPUs, by default all, and without a dashboard.
    """

    def __init__(self, address: str | None, gpus_per_run: float | None, workers: int | None):
        self.address, self.gpus_per_run, self.workers = address, gpus_per_run, workers

    def concurrency(self, tasks: Sequence[Task]) -> int:
        if not tasks:
            return 0
        self._connect()
        places = self._places(tasks)
        if places < 1:
            wanted = "a CPU and a GPU" if self._gpus(tasks[0]) else "a CPU"
            raise ValueError(f"address: expected a cluster with {wanted} for a run, got none")
        return places

    def execute(self, tasks: Sequence[Task], code: Code, report: Report, stop: Callable[[], bool]) -> None:
        if not tasks:
            return
        self._connect()
        signal = tasks[0].directory.resolve().parent / f".stop-{uuid.uuid4().hex}"
        waiting, at_work = deque(tasks), {}
        watched: dict[str, int] = {}
        try:
            while waiting or at_work:
                if stop() and not signal.exists():
                    waiting.clear()
                    with contextlib.suppress(OSError):
                        signal.touch()
                # the one that ends makes room at once, also on a cluster that grows
                while waiting and len(at_work) < self._places(tasks) + 1:
                    task = waiting.popleft()
                    at_work[self._start(task, code, signal)] = task
                if not at_work:
                    return
                ready, _ = ray.wait(list(at_work), timeout=0.5)
                for reference in ready:
                    task = at_work.pop(reference)
                    outcome = _end(reference, task)
                    if outcome is not None:
                        report(outcome)
                for task in at_work.values():
                    _watch(task, watched, report)
        finally:
            for reference in at_work:
                with contextlib.suppress(RayError):
                    ray.cancel(reference, force=True)
            with contextlib.suppress(OSError):
                signal.unlink(missing_ok=True)
            ray.shutdown()

    def _places(self, tasks: Sequence[Task]) -> int:
        """For how many tasks the cluster has room at present; machines may come and go."""
        gpus, resources = self._gpus(tasks[0]), ray.cluster_resources()
        places = int(resources.get("CPU", 0))
        if gpus:
            places = min(places, int(resources.get("GPU", 0) / gpus))
        return min(places, self.workers or places, len(tasks))

    def _start(self, task: Task, code: Code, signal: Path) -> Any:
        gpus = self._gpus(task)
        # Ray tasks without a GPU may see all of them, so the device is said, not found
        placed = dataclasses.replace(task, config=task.config.on("cuda" if gpus else "cpu"))
        remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES, retry_exceptions=False)(_execute)
        return remote.remote(placed.say(code), str(signal))

    def _gpus(self, task: Task) -> float:
        if task.config.training.device == "cpu":
            return 0
        if self.gpus_per_run is not None:
            return self.gpus_per_run
        return 1 if task.config.training.device == "cuda" else 0

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self.address is not None:
                ray.init(address=self.address, **quiet)
            else:
                cores = self.workers or usable_cores()
                ray.init("local", num_cpus=cores, include_dashboard=False, object_store_memory=_OBJECT_STORE, **quiet)
        except Exception as error:  # Ray raises anything, plain Exception among it
            wanted = f"a Ray cluster at {self.address}" if self.address else "Ray to start on this machine"
            raise ValueError(f"address: expected {wanted}, got none: {store.one_line(error)}") from error


def _execute(said: Said, signal: str) -> Outcome | None:
    """In a worker of Ray: bring a run to its end. None if the command was stopped before."""
    asked, answer = 0.0, False

    def should_stop() -> bool:
        # a file on a network file system need not be looked for at every step
        nonlocal asked, answer
        if not answer and time.monotonic() - asked > 1.0:
            asked, answer = time.monotonic(), Path(signal).exists()
        return answer

    if should_stop():
        return None
    deadline = time.monotonic() + STALE_AFTER + 60
    with threads(1):
        while True:
            outcome = execute_said(said, lambda message: None, should_stop)
            # after the loss of a machine, its claim lives on until it is stale
            if outcome.state != "claimed" or should_stop() or time.monotonic() > deadline:
                return outcome
            time.sleep(2.0)


def _end(reference: Any, task: Task) -> Outcome | None:
    """How a task ended."""
    try:
        return ray.get(reference)
    except RayTaskError as error:  # not even an outcome: such as a worker without energylab
        state, sentence = "error", f"its Ray task failed: {store.one_line(error.cause or error)}"
    except OutOfMemoryError:
        state, sentence = "out of memory", "Ray ended its worker, since its machine ran out of memory"
    except RayError as error:
        sentence = f"its worker was lost {RETRIES + 1} times ({type(error).__name__})"
        state, sentence = "killed", f"{sentence}; `energylab run` continues it from its last state"
    with contextlib.suppress(OSError):
        write_progress(task.directory, state, sentence)
    return Outcome(run=task.config.name, state=state, sentence=sentence)


def _watch(task: Task, watched: dict[str, int], report: Report) -> None:
    """Report where a run is, by its own file, if it has gone on."""
    progress = store.read_progress(task.directory)
    step = progress.get("step")
    if progress.get("state") == "running" and isinstance(step, int) and watched.get(task.config.name) != step:
        if living_owner(task.directory) is None:
            return  # the report of an earlier command
        watched[task.config.name] = step
        report(Update(run=task.config.name, phase="training", step=step, loss=progress.get("loss")))
