"""Where the runs of a study are, without waiting for PyTorch where the index of checked runs tells."""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energylab.study.claim import living_owner
from energylab.study.files import Damaged, check_progress, check_study, run_directories
from energylab.study.index import Index, fingerprint
from energylab.study.version import Code, other_code, sessions

UNSOUND = ("damaged", "diverged", "out of memory", "out of time", "error", "killed", "lost")
"""States that make `energylab status` end with exit code 1; a killed run was once said to be lost."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a run is, with a sentence for the reader."""

    run: str
    state: str
    step: int
    loss: float | None
    sentence: str


@dataclass(frozen=True)
class Status:
    """Where the runs of a study are."""

    runs: tuple[Standing, ...]
    damage: str
    """What is wrong with the file of the study itself; else empty."""

    @property
    def sound(self) -> bool:
        return not self.damage and not any(run.state in UNSOUND for run in self.runs)


def status(folder: Path, code: Code) -> Status:
    """The runs of the latest command, and any others in the study's folder.

    A finished run that other code than `code` has trained is marked so. Raises FileNotFoundError if there is no such
    folder.
    """
    damage = ""
    try:
        names = list(check_study(folder).get("runs", []))
    except Damaged as error:
        names, damage = [], f"{error.reason}; the runs are those that are found, `energylab run` writes it again"
    names = list(dict.fromkeys([*names, *(path.name for path in run_directories(folder))]))
    index = Index(folder)
    runs = []
    for name in names:
        mark = fingerprint(folder / name)
        facts = index.get(name, mark)
        if facts is None:
            standing, facts = _examine(folder / name)
            if facts is not None:
                index.put(name, mark, facts)
        else:
            standing = _finished(name, facts)
        if facts is not None and (other := other_code(facts["sessions"], code)):
            sentence = "; ".join(filter(None, (standing.sentence, f"{other}, so its numbers could differ")))
            standing = Standing(**{**vars(standing), "sentence": sentence})
        runs.append(standing)
    index.save()
    return Status(tuple(runs), damage)


def _finished(run: str, facts: dict[str, Any]) -> Standing:
    return Standing(run=run, state="finished", step=facts["step"], loss=facts["loss"], sentence=facts["sentence"])


def _examine(directory: Path) -> tuple[Standing, dict[str, Any] | None]:
    """Where a run is; and, if it is finished, what the index shall remember."""
    from energylab.study import store  # PyTorch: seconds

    def standing(state: str, sentence: str) -> Standing:
        return Standing(run=directory.name, state=state, step=step, loss=loss, sentence=sentence)

    complaint, progress = "", {}
    try:
        progress = check_progress(directory)
    except Damaged as error:
        complaint = error.reason
    said_step, said_loss = progress.get("step"), progress.get("loss")
    step: int = said_step if isinstance(said_step, int) else 0
    loss: float | None = said_loss if isinstance(said_loss, int | float) else None
    state, sentence = str(progress.get("state", "waiting")), str(progress.get("sentence", ""))
    try:
        found = store.find_run(directory)
        if found is not None:
            config, provenance = found
            step = config.training.steps
            # whatever its progress said last, its results are sound
            sentence = (sentence if state == "finished" else "") or complaint
            facts = {"step": step, "loss": loss, "sentence": sentence, "sessions": sessions(provenance)}
            return _finished(directory.name, facts), None if complaint else facts
        if (owner := living_owner(directory)) is not None:
            left = _seconds_left(progress)
            about = "" if left is None else f", about {duration(left)} left"
            return standing("running", complaint or f"{owner} is at work on it{about}"), None
        _, damaged_state = store.check_states(directory)
        complaint = complaint or damaged_state or ""
    except Damaged as error:
        return standing("damaged", error.reason), None
    if state in ("running", "finished"):
        # it said so itself, and then nothing more
        state, sentence = "interrupted", "its process is gone; `energylab run` continues it"
    return standing(state, "; ".join(filter(None, (sentence, complaint)))), None


def _seconds_left(progress: dict[str, Any]) -> float | None:
    """By the run's own last report, less the time since then; None where it has made none, or its time is over."""
    try:
        age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(progress["time"])
        left = progress["seconds_left"] - age.total_seconds()
    except (KeyError, TypeError, ValueError):
        return None
    return left if left > 0 else None


def duration(seconds: float) -> str:
    """Seconds as a reader says them: "40 s", "12 min", "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
