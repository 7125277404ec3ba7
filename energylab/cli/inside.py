"""Commands that look inside a finished run."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from energylab import project
from energylab.cli.parsing import argument, names_of, parse_fields
from energylab.project import Problem


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Where to write."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: RUN/trace)")] = None
    """Folder for the tables and the figures."""


@dataclass(frozen=True, kw_only=True)
class LandscapeOptions:
    """Where to look, and where to write."""

    layer: str = "block 0 attention"
    """A layer, as `energylab trace` names them."""
    position: int = 8
    """The query of which pair, counted from 0."""
    task: int = 0
    """Of which test task."""
    plane: Literal["trajectory", "hessian", "random"] = "trajectory"
    """The plane through z_0: main directions of the path, of the curvature, or at random."""
    size: int = 101
    """Points of the grid along each axis."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the trained weights)")] = (
        None
    )
    """Look at a snapshot of the weights, after so many steps of training."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: RUN/landscape)")] = None
    """Folder for the tables and the figure."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """How far, and where to write."""

    recursions: Annotated[
        str | None, tyro.conf.arg(metavar="RANGE", help_behavior_hint="(default: 1 to twice the trained T, or to 8)")
    ] = None
    """The T' to try, as 1..16 or 1,2,4."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: RUN/sweep)")] = None
    """Folder for the tables and the figure."""


@dataclass(frozen=True, kw_only=True)
class ConfidenceOptions:
    """On which tasks, and where to write."""

    conditions: Annotated[
        str | None, tyro.conf.arg(metavar="NAMES", help_behavior_hint="(default: four, in and out of the prior)")
    ] = None
    """Test conditions, as in-prior,double-noise."""
    tasks: int = 1024
    """Test tasks of each condition."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: RUN/confidence)")] = None
    """Folder for the table and the figure."""


MOST_RECURSIONS = 1024
"""The most steps of `sweep`: beyond, a typing error is likelier than a question."""


def trace(words: Sequence[str]) -> int:
    description = """Report how each layer of a finished run walks down its energy, and how close to the bottom it gets.

Example:
  energylab trace runs/recursion/CEM-T4-seed0-ccea5fbd"""
    run, options = _parse_run("trace", words, TraceOptions, description)

    def compute(folder: Path) -> list[str]:
        from energylab import inspection

        with progress("trace") as tell:
            return inspection.trace(run, folder, tell)

    return _inspect(options.output or run / "trace", compute)


def landscape(words: Sequence[str]) -> int:
    description = """Draw the energy around one query of a finished run, the path that the layer takes, and its cuts.

Example:
  energylab landscape runs/recursion/CEM-T4-seed0-ccea5fbd --layer 'block 1 attention' --position 12"""
    run, options = _parse_run("landscape", words, LandscapeOptions, description)
    if options.task < 0 or options.size < 2:
        key, value, least = ("task", options.task, 0) if options.task < 0 else ("size", options.size, 2)
        raise Problem(f"--{key}: expected an integer of at least {least}, got {value}")

    def compute(folder: Path) -> list[str]:
        from energylab import inspection

        with progress("landscape") as tell:
            return inspection.landscape(
                run,
                options.layer,
                options.position,
                options.plane,
                folder,
                options.size,
                task=options.task,
                step=options.step,
                tell=tell,
            )

    return _inspect(options.output or run / "landscape", compute)


def sweep(words: Sequence[str]) -> int:
    description = """Take more or fewer steps at test time than in training, and stop early by the energy.

Example:
  energylab sweep runs/recursion/CEM-T4-seed0-ccea5fbd --recursions 1..16"""
    run, options = _parse_run("sweep", words, SweepOptions, description)
    recursions = None if options.recursions is None else _numbers("--recursions", options.recursions)

    def compute(folder: Path) -> list[str]:
        from energylab import inspection

        with progress("sweep") as tell:
            return inspection.sweep(run, recursions, folder, tell=tell)

    return _inspect(options.output or run / "sweep", compute)


def confidence(words: Sequence[str]) -> int:
    description = """Say whether energy falls deep where a finished run is right, in and out of its prior.

For every layer: Spearman's rank correlation between E(z_0) - E(z_T) and the error, and the variance of the Bayes floor.

Example:
  energylab confidence runs/recursion/CEM-T4-seed0-ccea5fbd --conditions in-prior,shifted-inputs"""
    run, options = _parse_run("confidence", words, ConfidenceOptions, description)

    def compute(folder: Path) -> list[str]:
        from energylab import inspection
        from energylab.analysis.confidence import CONDITIONS

        names = CONDITIONS if options.conditions is None else tuple(dict.fromkeys(options.conditions.split(",")))
        with progress("confidence") as tell:
            return inspection.confidence(run, folder, names, options.tasks, tell)

    return _inspect(options.output or run / "confidence", compute)


def _inspect(folder: Path, compute: Callable[[Path], list[str]]) -> int:
    project.check_writable("--output", folder)

    from energylab.study.run import threads

    try:
        with threads(1):  # these products are small: a second thread mostly waits, and on a busy machine it spins
            lines = compute(folder)
    except (ValueError, FileNotFoundError) as error:
        raise Problem(str(error)) from None
    print("\n".join(lines))
    return 0


def _parse_run(command: str, words: Sequence[str], options: type, description: str) -> tuple[Path, Any]:
    """RUN, the directory of a run, and the options of the command."""
    run = argument(str, tyro.conf.Positional, metavar="RUN", help="The directory of a finished run.")
    fields = {"run": run, "options": argument(options, name=command)}
    parsed = parse_fields(fields, f"energylab {command}", words, description, names_of(options))
    if not Path(parsed.run).is_dir():
        raise Problem(f"RUN: expected the directory of a finished run, got {parsed.run!r}, which is none")
    return Path(parsed.run), parsed.options


def _numbers(option: str, text: str) -> list[int]:
    """``1..4`` or ``1,2,8`` as numbers."""
    try:
        first, dots, last = text.partition("..")
        numbers = list(range(int(first), int(last) + 1)) if dots else [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > MOST_RECURSIONS:
        raise Problem(f"{option}: expected numbers from 1 to {MOST_RECURSIONS}, as 1..16 or 1,2,4, got {text!r}")
    return numbers


@contextlib.contextmanager
def progress(command: str) -> Iterator[Callable[[str, float], None]]:
    """Shows what is being done, and which share of it is done: a bar in a terminal, elsewhere a line every few seconds."""
    from energylab.study.progress import Bar, Lines

    with Bar() if sys.stderr.isatty() else Lines(command) as tell:
        yield tell
