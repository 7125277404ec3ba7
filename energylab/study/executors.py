"""Executors: where the runs of a study execute, behind one small interface.

`InProcess` trains one run after another where it is called; `LocalProcesses` keeps worker processes, each with one
thread, and gives every idle worker the next run. A worker that dies takes one run with it: that run is `killed`, a
fresh worker takes the next, and a later command continues it from its last state. `ray_tasks` has the executor beyond
one machine.
"""

import contextlib
import json
import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import final

import torch

from energylab.study.config import RunConfig
from energylab.study.run import Outcome, Update, execute, threads, write_progress
from energylab.study.version import Code
from energylab.training import resolve_device

Report = Callable[[Update | Outcome], None]
Said = tuple[str, str, Code, float | None, bool]
"""A task as plain values, for another process: config, directory, code, time limit, reuse."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run, and the directory that it belongs in."""

    config: RunConfig
    directory: Path
    time_limit: float | None = None
    """Seconds that the run may train, all sessions together."""
    reuse: bool = False
    """Whether the directory is in a folder of studies, whose finished runs may have done the training already."""

    def say(self, code: Code) -> Said:
        """The task for another process: it trains what config.json will say, and needs no class of a study file."""
        return json.dumps(self.config.to_dict()), str(self.directory.resolve()), code, self.time_limit, self.reuse


def execute_said(said: Said, report: Report, should_stop: Callable[[], bool]) -> Outcome:
    """Execute, in another process, what `Task.say` said."""
    text, directory, code, time_limit, reuse = said
    config = RunConfig.from_dict(json.loads(text))
    return execute(
        config,
        Path(directory),
        code=code,
        report=report,
        should_stop=should_stop,
        time_limit=time_limit,
        reuse=reuse,
    )


class Executor(ABC):
    """Brings runs to their end, some at a time."""

    @abstractmethod
    def concurrency(self, tasks: Sequence[Task]) -> int:
        """How many of these tasks are executed at a time."""

    @abstractmethod
    def execute(self, tasks: Sequence[Task], code: Code, report: Report, stop: Callable[[], bool]) -> None:
        """Execute every task, telling `report` where each is (`Update`) and how it ended (`Outcome`).

        `stop` is asked often; once it says yes, no run starts, and those at work save their state and end.
        """


@final
class InProcess(Executor):
    """One run after another, in this process and on one thread, as in a worker: the numbers are the same."""

    def concurrency(self, tasks: Sequence[Task]) -> int:
        return min(1, len(tasks))

    def execute(self, tasks: Sequence[Task], code: Code, report: Report, stop: Callable[[], bool]) -> None:
        with threads(1):
            for task in tasks:
                if stop():
                    return
                report(Update(run=task.config.name, phase="training", step=0))
                report(execute_said(task.say(code), report, stop))


@final
class LocalProcesses(Executor):
    """Worker processes on this machine, which pay for importing PyTorch once each.

    `workers` is the number of usable cores by default, or of GPUs if the runs use CUDA; then each worker sees one GPU.
    """

    def __init__(self, workers: int | None = None):
        self.workers = workers

    def concurrency(self, tasks: Sequence[Task]) -> int:
        return min(self.workers or len(_gpus_for(tasks)) or usable_cores(), len(tasks))

    def execute(self, tasks: Sequence[Task], code: Code, report: Report, stop: Callable[[], bool]) -> None:
        waiting = deque(tasks)
        gpus, number = _gpus_for(tasks), self.concurrency(tasks)
        slots: list[_Worker | None] = [None] * number
        stopping = False
        try:
            while True:
                if stop() and not stopping:
                    stopping = True
                    waiting.clear()
                    for worker in slots:
                        if worker is not None and worker.task is not None:
                            worker.say(None)
                for index in range(number):
                    if slots[index] is None and waiting:
                        slots[index] = _Worker(gpus[index % len(gpus)] if gpus else None)
                    worker = slots[index]
                    if worker is not None and worker.task is None and waiting:
                        worker.assign(waiting.popleft(), code)
                        report(Update(run=worker.name, phase="training", step=worker.step))
                busy = [worker for worker in slots if worker is not None and worker.task is not None]
                if not busy:
                    return
                handles: list[Connection | int] = [worker.connection for worker in busy]
                handles += [worker.process.sentinel for worker in busy]
                wait(handles, timeout=0.5)
                for index, worker in enumerate(slots):
                    if worker is not None and worker.task is not None and not worker.listen(report):
                        worker.close()
                        slots[index] = None
        finally:
            for worker in slots:
                if worker is not None:
                    worker.close()


@dataclass
class _Worker:
    """A worker process, as the driver sees it."""

    gpu: str | None
    task: Task | None = None
    step: int = 0
    connection: Connection = field(init=False)
    process: BaseProcess = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked PyTorch has threads and CUDA state that do not work
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), name="energylab worker", daemon=True)
        with _birth(self.gpu):
            self.process.start()
        theirs.close()  # so that the end of either process closes the pipe

    @property
    def name(self) -> str:
        assert self.task is not None
        return self.task.config.name

    def assign(self, task: Task, code: Code) -> None:
        self.task, self.step = task, 0
        self.say(task.say(code))

    def say(self, message: object) -> None:
        with contextlib.suppress(OSError):  # a dead worker is noticed by `listen`
            self.connection.send(message)

    def listen(self, report: Report) -> bool:
        """Pass on what the worker says. False if it can take no more: a dead worker's run is reported as killed."""
        alive = self.process.is_alive()  # asked first, so that the last words of a dead worker are still read
        messages: list[Update | Outcome] = []
        try:
            while self.connection.poll():
                messages.append(self.connection.recv())
        except (EOFError, OSError):
            alive = False
        for message in messages:
            if isinstance(message, Update):
                self.step = message.step
            else:
                self.task = None
                # whatever interrupted the run, such as a signal to the worker alone, may end the worker too
                alive = alive and message.state != "interrupted"
            report(message)
        if alive:
            return True
        if self.task is not None:
            self.process.join()
            outcome = Outcome(run=self.name, state="killed", sentence=self._last_words())
            with contextlib.suppress(OSError):
                write_progress(self.task.directory, outcome.state, outcome.sentence)
            self.task = None
            report(outcome)
        return False

    def close(self) -> None:
        """End the process: an idle one leaves by itself, one at work is killed and continues in a later command."""
        if self.task is None:
            self.say(None)
            self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()

    def _last_words(self) -> str:
        code = self.process.exitcode or 0
        if code < 0:
            how = f"was killed ({signal.Signals(-code).name}" + (", perhaps for its memory)" if code == -9 else ")")
        else:
            how = f"ended with exit code {code}"
        return f"its worker process {how} near step {self.step}; `energylab run` continues it from its last state"


def _serve(connection: Connection) -> None:
    """A worker process: execute the runs that the driver sends, until it says None or is gone."""
    terminated = False

    def terminate(*_: object) -> None:
        nonlocal terminated
        terminated = True

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the driver says what to do
    signal.signal(signal.SIGTERM, terminate)
    torch.set_num_threads(1)

    def report(message: Update | Outcome) -> None:
        # a driver that is gone is noticed by should_stop
        with contextlib.suppress(OSError):
            connection.send(message)

    # during a run, anything in the pipe, and its end too, means: save and stop
    def should_stop() -> bool:
        return terminated or connection.poll()

    while not terminated:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        if message is None:
            return
        report(execute_said(message, report, should_stop))


@contextlib.contextmanager
def _birth(gpu: str | None) -> Iterator[None]:
    """What a worker inherits from here: one thread, one GPU, and no Ctrl-C, from its first moment on."""
    changes = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if gpu is not None:
        changes["CUDA_VISIBLE_DEVICES"] = gpu
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)
    resource_tracker.ensure_running()  # its own start, with the first worker, would unblock the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus_for(tasks: Sequence[Task]) -> list[str]:
    """The GPUs to share out between workers, as CUDA_VISIBLE_DEVICES names them; none for runs on the CPU."""
    if all(resolve_device(task.config.training.device).type == "cpu" for task in tasks):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
