"""What a reader sees while a study trains, or a command computes: live in a terminal, plain lines elsewhere."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from rich.console import Console
from rich.live import Live as RichLive
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from energylab.study.executors import Task
from energylab.study.run import Outcome, Update
from energylab.study.status import duration

_STYLES = {"waiting": "dim", "training": "cyan", "evaluating": "cyan", "finished": "green"}


@dataclass
class _Row:
    """What is known of a run."""

    run: str
    steps: int
    state: str = "waiting"
    step: int = 0
    loss: float | None = None
    sentence: str = ""
    first: tuple[float, int] | None = None
    """Time and step of the first report of this command: the speed is measured from there."""

    def take(self, message: Update | Outcome) -> None:
        if isinstance(message, Outcome):
            self.state, self.sentence = message.state, message.sentence
            self.step = self.steps if message.state == "finished" else self.step
            return
        self.state, self.step = message.phase, message.step
        self.loss = self.loss if message.loss is None else message.loss
        # a continued run starts at 0 and reports where it really is when it has read its state
        if self.first is None or self.first[1] == 0:
            self.first = (time.monotonic(), message.step)

    def seconds_left(self) -> float | None:
        if self.state != "training" or self.first is None or self.step <= self.first[1]:
            return None
        since, start = self.first
        return (time.monotonic() - since) / (self.step - start) * (self.steps - self.step)


class Display(ABC):
    """Shows the runs of a command; call it with every message of the executor."""

    def __init__(self, tasks: Sequence[Task], workers: int):
        self.rows = {task.config.name: _Row(task.config.name, task.config.training.steps) for task in tasks}
        self.workers = workers

    def __call__(self, message: Update | Outcome) -> None:
        self.rows[message.run].take(message)
        self.show(message)

    @abstractmethod
    def show(self, message: Update | Outcome) -> None:
        """Show what has changed."""

    @abstractmethod
    def say(self, line: str) -> None:
        """Print a line that stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def summary(self) -> str:
        """How many runs are in which state, and when all will be done at the present speed."""
        counts: dict[str, int] = {}
        for row in self.rows.values():
            counts[row.state] = counts.get(row.state, 0) + 1
        text = ", ".join(f"{number} {state}" for state, number in counts.items())
        left = self.seconds_left()
        return text if left is None else f"{text}; about {duration(left)} left"

    def seconds_left(self) -> float | None:
        """A rough guess: what is left of the runs at work, and the waiting ones at their mean speed."""
        speeds, work = [], 0.0
        for row in self.rows.values():
            if (left := row.seconds_left()) is not None:
                speeds.append(left / max(row.steps - row.step, 1))
                work += left
        if not speeds:
            return None
        waiting = sum(row.steps for row in self.rows.values() if row.state == "waiting")
        return (work + waiting * sum(speeds) / len(speeds)) / self.workers


@final
class Plain(Display):
    """A line at the start and the end of each run, and now and then one in between."""

    def __init__(self, tasks: Sequence[Task], workers: int):
        super().__init__(tasks, workers)
        self._said: dict[str, float] = {}
        self._started = time.monotonic()

    def show(self, message: Update | Outcome) -> None:
        row = self.rows[message.run]
        now = time.monotonic()
        # dense at first, when the reader looks whether it works; a long study would fill its log
        pause = 10.0 if now - self._started < 180 else 60.0
        if isinstance(message, Outcome):
            done = sum(row.state not in ("waiting", "training", "evaluating") for row in self.rows.values())
            self.say(f"[{done}/{len(self.rows)}] {row.run}: {row.state}, {row.sentence}")
            for notice in message.notices:
                self.say(f"    {notice}")
        elif message.run not in self._said:
            self._said[message.run] = now
            self.say(f"{row.run}: started")
        elif now - self._said[message.run] >= pause:
            self._said[message.run] = now
            left = row.seconds_left()
            loss = "" if row.loss is None else f", loss {row.loss:.4f}"
            time_left = "" if left is None else f", {duration(left)} left"
            self.say(f"{row.run}: {row.state}, step {row.step}/{row.steps}{loss}{time_left}")

    def say(self, line: str) -> None:
        print(line, flush=True)


@final
class Live(Display):
    """A table of all runs, redrawn in place."""

    def __init__(self, tasks: Sequence[Task], workers: int):
        super().__init__(tasks, workers)
        self._console = Console(highlight=False)
        self._live = RichLive(get_renderable=self._table, console=self._console, refresh_per_second=2)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, message: Update | Outcome) -> None:
        for notice in message.notices if isinstance(message, Outcome) else ():
            self.say(f"{message.run}: {notice}")

    def say(self, line: str) -> None:
        self._console.print(Text(line))

    def _table(self) -> Table:
        table = Table(caption=self.summary(), caption_justify="left", box=None, pad_edge=False)
        table.add_column("run", no_wrap=True)
        table.add_column("state", no_wrap=True)
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("loss", justify="right", no_wrap=True)
        table.add_column("left", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, overflow="ellipsis")
        for row in self._visible():
            left = row.seconds_left()
            table.add_row(
                row.run,
                Text(row.state, style=_STYLES.get(row.state, "red")),
                f"{row.step}/{row.steps}",
                "" if row.loss is None else f"{row.loss:.4f}",
                "" if left is None else duration(left),
                Text(row.sentence),
            )
        return table

    def _visible(self) -> list[_Row]:
        """All runs, or as many as fit: those at work and in trouble first, then the waiting, then the finished."""
        rows = list(self.rows.values())
        room = max(self._console.height - 4, 5)
        if len(rows) <= room:
            return rows
        order = ["training", "evaluating", "waiting", "finished"]
        ranked = sorted(rows, key=lambda row: order.index(row.state) if row.state in order else 1.5)
        chosen = {row.run for row in ranked[:room]}
        return [row for row in rows if row.run in chosen]


@final
class Bar:
    """A bar that says what a command is doing, and fills as that is done; gone when the command is. Call it with both."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("loading", total=None)

    def __call__(self, what: str, share: float) -> None:
        self._progress.update(self._task, description=what, total=1, completed=share)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


@final
class Lines:
    """The same where there is no terminal: a line when a command takes longer than a moment, and every few seconds."""

    FIRST, NEXT = 2.0, 10.0
    """Seconds."""

    def __init__(self, command: str) -> None:
        self.command = command
        self._due = time.monotonic() + self.FIRST

    def __call__(self, what: str, share: float) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self.NEXT
            print(f"{self.command}: {what}, {100 * share:.0f} %", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None
