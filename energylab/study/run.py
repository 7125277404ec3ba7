"""One run, from its config to its results: train, save and continue, evaluate, trace, write.

A run ends as a value, an `Outcome`: finished, or diverged, out of memory, out of time, with a sentence for the reader.
Whatever it ends as, the rest of its study goes on; only a full disk stops that too.
"""

import contextlib
import dataclasses
import datetime
import errno
import importlib.metadata
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch

from energylab.analysis.circuits import circuits
from energylab.analysis.cost import training_flops
from energylab.analysis.descent import record, summarise
from energylab.analysis.evaluation import evaluate
from energylab.analysis.learning import Learning
from energylab.analysis.recursion import sweep
from energylab.models import count_parameters
from energylab.study import store
from energylab.study.claim import Claim, Claimed, OwnershipLost
from energylab.study.config import RunConfig
from energylab.study.reuse import trained_elsewhere
from energylab.study.version import Code
from energylab.training import Diverged, Trainer

State = Literal[
    "finished",
    "interrupted",
    "diverged",
    "out of memory",
    "out of time",
    "error",
    "killed",
    "claimed",
    "damaged",
    "disk",
]

FAILED = ("diverged", "out of memory", "out of time", "error")
"""States that would come again: such a run is not tried again unless asked for."""

TEST_TIME_TASKS = 1024
"""Of the 4096 test tasks, those on which other T' are tried: T' = 16 alone costs what 16 tests of T = 1 do."""

PROGRESS_EVERY = 2.0
"""Seconds between two updates of progress.json."""

LIBRARIES = ("torch", "numpy", "scipy", "gpytorch", "linear_operator", "pandas", "pyarrow", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended, with a sentence for the reader."""

    run: str
    state: State
    sentence: str
    new: bool = True
    """False for a run that was finished, or had failed, before."""
    notices: tuple[str, ...] = ()
    """What happened on the way, such as a damaged state that was passed over."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """Where a run is."""

    run: str
    phase: Literal["training", "evaluating"]
    step: int
    loss: float | None = None


def execute(
    config: RunConfig,
    directory: Path,
    *,
    code: Code,
    report: Callable[[Update], None] = lambda update: None,
    should_stop: Callable[[], bool] = lambda: False,
    time_limit: float | None = None,
    reuse: bool = False,
) -> Outcome:
    """Bring a run to its end in `directory`: continue what is there, or start.

    With `reuse`, `directory` is one of a study beside others, and training that one of those has done is taken over.

    `report` is told where the run is; `should_stop` is asked after every step, and when it says yes the state is saved
    and the run ends as interrupted. A run that has trained for `time_limit` seconds, all sessions together, is saved
    and ends as out of time. Nothing is raised for a run that fails by itself; that is an outcome too.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with Claim(directory) as claim:
            store.remove_leftovers(directory)
            try:
                return _Run(config, directory, code, claim, report, should_stop, time_limit, reuse).execute()
            except (store.Damaged, OwnershipLost):
                raise
            except OSError as error:
                outcome = _file_problem(config, error)
            except Exception as error:
                sentence = f"{type(error).__name__}: {store.one_line(error)} ({_where(error)})"
                state: State = "out of memory" if _is_out_of_memory(error) else "error"
                outcome = Outcome(run=config.name, state=state, sentence=sentence)
                with contextlib.suppress(OSError):
                    store.write_bytes(directory / "error.txt", _short_traceback(error).encode())
            with contextlib.suppress(OSError):
                write_progress(directory, outcome.state, outcome.sentence)
            return outcome
    except store.Damaged as error:
        return Outcome(run=config.name, state="damaged", sentence=error.reason)
    except Claimed as owner:
        return Outcome(run=config.name, state="claimed", sentence=f"{owner} is at work on it")
    except OwnershipLost as error:
        return Outcome(run=config.name, state="claimed", sentence=str(error))
    except OSError as error:
        return _file_problem(config, error)


class _Run:
    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        code: Code,
        claim: Claim,
        report: Callable[[Update], None],
        should_stop: Callable[[], bool],
        time_limit: float | None,
        reuse: bool,
    ):
        self.config, self.directory, self.code, self.claim = config, directory, code, claim
        self.report, self.should_stop, self.time_limit, self.reuse = report, should_stop, time_limit, reuse
        self.started = _now()
        self.notices: list[str] = []
        self.history: list[dict[str, Any]] = []
        """Which code trained, session by session."""

    def execute(self) -> Outcome:
        name = self.config.name
        if store.check_run(self.directory) is not None:
            return Outcome(run=name, state="finished", sentence="it was finished before", new=False)
        if not (self.directory / store.CONFIG).exists():
            store.write_config(self.directory, self.config)
        training = self.config.training
        trainer = Trainer(self.config.model, training, self.config.prior, self.config.num_points, self.config.seed)
        self.learning = Learning(
            self.config.prior,
            self.config.num_points,
            steps=training.steps,
            every=training.trace_every,
            snapshots=training.snapshots,
        )
        self._continue(trainer)
        try:
            stopped = self._train(trainer)
        except Diverged as error:
            sentence = f"diverged: {error}; the last saved state is of step {self.saved}"
            write_progress(self.directory, "diverged", sentence, step=trainer.step)
            return Outcome(run=name, state="diverged", sentence=sentence, notices=tuple(self.notices))
        if stopped is not None:
            sentence = f"stopped at step {trainer.step} of {training.steps}, its state is saved"
            if stopped == "out of time":
                sentence = f"{trainer.seconds:.0f} s of training are over: {sentence}; give it a longer --time-limit"
            write_progress(self.directory, stopped, sentence, step=trainer.step)
            return Outcome(run=name, state=stopped, sentence=sentence, notices=tuple(self.notices))
        self.report(Update(run=name, phase="evaluating", step=trainer.step, loss=trainer.rows[-1]["loss"]))
        evaluation = self._write_results(trainer)
        sentence = _summary(evaluation, trainer)
        write_progress(self.directory, "finished", sentence, step=trainer.step)
        return Outcome(run=name, state="finished", sentence=sentence, notices=tuple(self.notices))

    def _continue(self, trainer: Trainer) -> None:
        state, notice = store.read_state(self.directory)
        if notice is not None:
            self.notices.append(notice)
        if state is None:
            if self.reuse and (elsewhere := trained_elsewhere(self.config, self.directory)) is not None:
                state, notice = elsewhere
                self._take_up(state, trainer)
                self.notices.append(notice)
            self._begin_session(trainer)
            self._save(trainer)
            return
        self._take_up(state, trainer)
        self.started = state["started"]
        self._begin_session(trainer)
        self.notices = [*state["notices"], *self.notices]
        self.saved = trainer.step

    def _take_up(self, state: dict[str, Any], trainer: Trainer) -> None:
        """Where the training was left, what was recorded on the way, and by which code."""
        trainer.load_state_dict(state["trainer"])
        if "learning" in state:  # older states have none
            self.learning.load_state_dict(state["learning"])
        unknown = {field.name: None for field in dataclasses.fields(Code)}
        self.history = state.get("history", [{"start": None, "step": None, **unknown}] * state["sessions"])

    def _begin_session(self, trainer: Trainer) -> None:
        self.history = [*self.history, {"start": _now(), "step": trainer.step, **dataclasses.asdict(self.code)}]

    def _save(self, trainer: Trainer) -> None:
        self.claim.check()
        state = {
            "schema": store.SCHEMA,
            "run": self.config.name,
            "started": self.started,
            "sessions": len(self.history),
            "history": self.history,
            "notices": list(self.notices),
            "trainer": trainer.state_dict(),
            "learning": self.learning.state_dict(),
        }
        store.write_state(self.directory, state)
        self.saved = trainer.step

    def _train(self, trainer: Trainer) -> Literal["interrupted", "out of time"] | None:
        """Train to the last step, or say why it was stopped before. Either way the state is saved."""
        steps = self.config.training.steps
        loss = trainer.rows[-1]["loss"] if trainer.rows else None
        began, first = time.monotonic(), trainer.step
        self._tell(trainer, loss, None)
        told = began
        if trainer.step == 0:
            self.learning.observe(trainer.model, 0)
        while trainer.step < steps:
            row = trainer.advance()
            self.learning.observe(trainer.model, trainer.step)
            if row is not None:
                loss = row["loss"]
            now = time.monotonic()
            if now - told >= PROGRESS_EVERY or trainer.step == steps:
                self._tell(trainer, loss, (now - began) / (trainer.step - first) * (steps - trainer.step))
                told = now
            stopped = None
            if self.should_stop():
                stopped = "interrupted"
            elif self.time_limit is not None and trainer.seconds >= self.time_limit:
                stopped = "out of time"
            if stopped or trainer.step % self.config.training.save_every == 0 or trainer.step == steps:
                self._save(trainer)
            if stopped and trainer.step < steps:
                return stopped
        return None

    def _tell(self, trainer: Trainer, loss: float | None, seconds_left: float | None) -> None:
        write_progress(self.directory, "running", "", step=trainer.step, loss=loss, seconds_left=seconds_left)
        self.report(Update(run=self.config.name, phase="training", step=trainer.step, loss=loss))

    def _write_results(self, trainer: Trainer) -> pd.DataFrame:
        config, directory, model = self.config, self.directory, trainer.model.eval()
        tests = [evaluate(model, config.prior, config.num_points, condition) for condition in config.conditions]
        evaluation = pd.concat(tests, ignore_index=True)
        traces = record(model, config.prior, config.num_points)
        tables = {
            store.METRICS: pd.DataFrame(trainer.rows),
            store.EVALUATION: evaluation,
            store.TRACES: traces,
            store.DESCENT: summarise(traces),
            store.CIRCUITS: circuits(model),
        }
        if config.training.trace_every:
            tables[store.LEARNING] = self.learning.table()
        if config.test_recursions:
            found = sweep(model, config.prior, config.num_points, config.test_recursions, TEST_TIME_TASKS)
            tables[store.TEST_TIME] = found.rename(columns={"recursions": "test_recursions"})
        self.claim.check()
        for file, table in tables.items():
            labelled = pd.concat([store.label(config, len(table)), table.reset_index(drop=True)], axis=1)
            store.write_table(directory / file, labelled)
        weights = [store.WEIGHTS]
        store.write_weights(directory / store.WEIGHTS, model.state_dict())
        if config.training.snapshots:
            weights.append(store.SNAPSHOTS)
            store.write_weights(directory / store.SNAPSHOTS, self.learning.snapshots)
        (directory / store.PREVIOUS_STATE).unlink(missing_ok=True)
        facts = {
            "run": config.name,
            "exit_reason": f"trained all {trainer.step} steps",
            "energylab": dataclasses.asdict(self.code),
            "versions": _versions(),
            "device": _device_name(trainer.device),
            "threads": torch.get_num_threads(),
            "start": self.started,
            "end": _now(),
            "sessions": len(self.history),
            "history": self.history,
            "train_seconds": trainer.seconds,
            "parameters": count_parameters(model),
            "flops": training_flops(config.model, config.num_points)
            * config.training.batch_size
            * config.training.steps,
            "notices": self.notices,
        }
        files = (store.CONFIG, *tables, *weights, store.STATE)
        store.write_provenance(directory, facts, files)
        return evaluation


def write_progress(
    directory: Path,
    state: str,
    sentence: str,
    *,
    step: int | None = None,
    loss: float | None = None,
    seconds_left: float | None = None,
) -> None:
    """Record where a run is, for `energylab status`. Its results never depend on it."""
    before = store.read_progress(directory)
    data = {
        "state": state,
        "sentence": sentence,
        "step": before.get("step") if step is None else step,
        "loss": before.get("loss") if loss is None else loss,
        "seconds_left": seconds_left,
        "time": _now(),
    }
    store.write_progress(directory, data)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads in PyTorch's operations, for a while: results depend on it in the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _summary(evaluation: pd.DataFrame, trainer: Trainer) -> str:
    condition = "in-prior" if "in-prior" in set(evaluation["condition"]) else "validation"
    excess = evaluation.loc[evaluation["condition"] == condition, "excess_mse"].mean()
    return f"excess MSE {excess:.4f} after {trainer.step} steps, {trainer.seconds:.0f} s of training"


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in LIBRARIES}}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    # the same run on another instruction set rounds in another way, which a long training makes large
    return f"cpu ({torch.backends.cpu.get_cpu_capability()})" if device.type == "cpu" else device.type


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _file_problem(config: RunConfig, error: OSError) -> Outcome:
    file = "" if error.filename is None else f"{Path(error.filename).name}: "
    sentence = f"stopped, a file could not be read or written: {file}{error.strerror or error}"
    # with no room, or no right to write, every other run would fail as well
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    return Outcome(run=config.name, state="disk" if full else "interrupted", sentence=sentence)


def _is_out_of_memory(error: Exception) -> bool:
    # the allocator of the CPU says so only in its message
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"


def _short_traceback(error: BaseException) -> str:
    """A traceback with file names only: results name no folder of the machine that made them."""
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    return "\n".join([*lines, f"{type(error).__name__}: {error}", ""])
