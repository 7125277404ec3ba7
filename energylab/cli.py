"""The command line: thin, and the only room that knows tyro.

Exit codes: 0 done; 1 some runs failed, are damaged or missing, and are named; 2 the command or the study is wrong, said
in one line.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib.metadata
import inspect
import io
import itertools
import os
import platform
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from energylab import project
from energylab.project import Problem


class _Helped(Exception):
    """The help of a command was printed; there is nothing more to do."""


@dataclass(frozen=True)
class Command:
    """A command: what it does in a line, and the function that takes the arguments after its name."""

    summary: str
    run: Callable[[Sequence[str]], int]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how the runs execute; none of these changes a result's name."""

    results: Path = Path("runs")
    """Folder of the results; the study's go to a folder of its name in it."""
    workers: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one a core, or one a GPU on CUDA)")
    ] = None
    """Worker processes."""
    device: Literal["study", "auto", "cpu", "cuda"] = "study"
    """Where to train: as the study says, or here."""
    executor: Literal["local", "inprocess", "ray"] = "local"
    """Worker processes, one run after another in this one, or Ray tasks."""
    address: Annotated[
        str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="(default: a Ray of its own on this machine)")
    ] = None
    """Of the Ray cluster to use, such as auto."""
    gpus_per_run: Annotated[
        float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="(default: 1 for a study on cuda, else 0)")
    ] = None
    """What a Ray task takes of a GPU, from 0 to 1; with 0, it trains on the CPU."""
    shard: Annotated[str | None, tyro.conf.arg(metavar="I/N", help_behavior_hint="(default: all runs)")] = None
    """Execute part I of N of the study, I = 1..N, while other commands execute the others."""
    time_limit: Annotated[str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="(default: none)")] = None
    """How long a run may train, as 90m or 1h30m; after that it is saved; a longer one with --retry-failed goes on."""
    retry_failed: bool = False
    """Run those that failed before or were killed, and no others."""


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where the results are."""

    results: Path = Path("runs")
    """Folder of the results."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """From where, to where."""

    results: Path = Path("runs")
    """Folder of the results."""
    output: Path = project.EXPORTED
    """Folder to copy to; the study gets a folder of its name in it."""
    weights: Annotated[
        Literal["none", "one", "all"] | None,
        tyro.conf.arg(metavar="{none,one,all}", help_behavior_hint="(default: one, of a tuning sweep none)"),
    ] = None
    """Whose weights: nobody's, one seed's of each model, or everybody's."""


@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """Which runs to draw, and where to write."""

    study: Annotated[
        str | None, tyro.conf.arg(metavar="STUDY", help_behavior_hint="(default: the study that a figure names)")
    ] = None
    """Draw the figures that need one study from the latest runs of this one."""
    results: Path = Path("runs")
    """Folder of the results."""
    venue: Literal["plain", "icml", "icml-column", "neurips"] = "plain"
    """Where the figures will be printed, which sets their width and fonts."""
    output: Annotated[
        Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: figures/STUDY beside the results)")
    ] = None
    """Folder to write to."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Which results, and where to write."""

    results: Path = Path("runs")
    """Folder of the results."""
    output: Annotated[
        Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: STUDY.html beside the results)")
    ] = None
    """The file to write."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What to draw beside the floor, and where to write."""

    run: Annotated[Path | None, tyro.conf.arg(metavar="RUN", help_behavior_hint="(default: the floor alone)")] = None
    """Directory of a finished run, to draw what its model predicts."""
    output: Path = Path("runs/figures/tasks")
    """Folder to write to."""


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a symbol that the terminal does not know is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_overview())
            return 0
        if words[0] not in COMMANDS:
            raise Problem(f"command: expected one of {', '.join(COMMANDS)}, got {words[0]!r}")
        return COMMANDS[words[0]].run(words[1:])
    except _Helped:
        return 0
    except Problem as problem:
        print(f"energylab: {_squeezed(problem)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("energylab: stopped at once; what was saved before is kept", file=sys.stderr)
        return 1
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # the reader of the output has left, as in `energylab status recursion | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            print(f"energylab: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: energylab COMMAND ...",
            "",
            "A laboratory for layers that descend an energy: train a study, look at where it is, draw it.",
            "",
            *lines,
            "",
            "`energylab COMMAND --help` explains a command. Example:",
            "  energylab run quickstart && energylab figures --study quickstart",
        ]
    )


# --- the commands ----------------------------------------------------------------------------------------------------


def run(words: Sequence[str]) -> int:
    description = """Train the runs of a study, and go on where an earlier command stopped.

STUDY is the name of a file in ./studies, or the path of a study file. Runs that are finished are not trained again.

Example:
  energylab run recursion --steps 200 --seeds 2"""
    path, function, knobs, options = _parse_with_knobs("run", words, RunOptions, description)

    part = None if options.shard is None else _part("--shard", options.shard)
    time_limit = None if options.time_limit is None else _seconds("--time-limit", options.time_limit)
    if options.executor != "ray":
        for key in ("address", "gpus_per_run"):
            if getattr(options, key) is not None:
                raise Problem(
                    f"--{_dashed(key)}: expected it with --executor ray only, got --executor {options.executor}"
                )

    import torch

    from energylab.kernels.available import runs_on, why_not
    from energylab.study import driver
    from energylab.study.progress import Live, Plain
    from energylab.study.version import current_code
    from energylab.training import resolve_device

    study = project.resolve(path, function, knobs)
    if options.workers is not None and options.workers < 1:
        raise Problem(f"--workers: expected an integer of at least 1, got {options.workers}")
    if options.device != "study":
        study = dataclasses.replace(study, runs=tuple(config.on(options.device) for config in study.runs))
    if options.executor != "ray":  # its devices are those of the cluster
        for config in study.runs:
            with project.problems(path.as_posix() if options.device == "study" else "--device"):
                device = resolve_device(config.training.device)
                if config.model.backend == "triton" and not runs_on(probe := torch.empty(0, device=device)):
                    raise ValueError(
                        f"backend: triton cannot run here: {why_not(probe)}; allowed here: auto, reference, torch"
                    )
    executor = _executor(options)
    runs = study.runs if part is None else driver.shard(study.runs, *part)
    folder = options.results / study.name
    project.check_writable("--results", folder)

    code = current_code()
    tasks, outcomes = driver.plan(runs, folder, code=code, retry_failed=options.retry_failed, time_limit=time_limit)
    before = sum(outcome.state == "finished" for outcome in outcomes)
    with project.problems():
        at_a_time = executor.concurrency(tasks)
    where = f", {at_a_time} at a time" if tasks else ""
    counts = f"{len(runs)} runs, {before} finished before, {len(tasks)} to do{where}"
    shown = study.name if part is None else f"{study.name}, part {options.shard}"
    print(f"{shown}: {counts}; results in {folder}", flush=True)
    for sentence, those in _by_sentence(outcomes).items():
        print(f"{those[0]}{f' and {len(those) - 1} more' if len(those) > 1 else ''}: {sentence}", flush=True)
    # without the limit on time, which a run that reached it would only reach again
    again = shlex.join(["energylab", "run", *_without_option("--time-limit", words)])
    display = (Live if sys.stdout.isatty() else Plain)(tasks, at_a_time)
    with _stop_on_signal(display.say) as stop, display:
        outcomes += driver.execute(
            study,
            folder,
            executor,
            code=code,
            knobs=_plain(knobs),
            tasks=tasks,
            report=display,
            stop=stop,
        )
    return _conclude(shown, len(runs), outcomes, stopped=stop(), again=again)


def _without_option(option: str, words: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if not (skip or word == option or word.startswith(f"{option}=")):
            kept.append(word)
        skip = word == option
    return kept


def _executor(options: RunOptions) -> Any:
    if options.executor == "ray":
        if options.gpus_per_run is not None and not 0 <= options.gpus_per_run <= 1:
            raise Problem(f"--gpus-per-run: expected a number from 0 to 1, got {options.gpus_per_run}")
        if _version("ray") is None:
            raise Problem(
                "--executor: expected an installed ray, found none; get it with: pip install 'energylab[ray]'"
            )
        from energylab.study.ray_tasks import RayTasks

        with project.problems("--address"):
            return RayTasks(options.address, options.gpus_per_run, options.workers)
    from energylab.study.executors import InProcess, LocalProcesses

    return InProcess() if options.executor == "inprocess" else LocalProcesses(options.workers)


def _by_sentence(outcomes: Sequence[Any]) -> dict[str, list[str]]:
    """The runs that there is something to say of, by what that is."""
    said: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.sentence:
            said.setdefault(outcome.sentence, []).append(outcome.run)
    return said


def _conclude(shown: str, runs: int, outcomes: Sequence[Any], stopped: bool, again: str) -> int:
    from energylab.study.run import FAILED

    finished = sum(outcome.state == "finished" for outcome in outcomes)
    print(f"{shown}: {finished} of {runs} runs are finished", flush=True)
    for outcome in outcomes:
        if outcome.state != "finished":
            print(f"  {outcome.run}: {outcome.state}: {outcome.sentence}")
    if stopped:
        print(f"stopped; go on with: {again}")
    elif any(outcome.state == "disk" for outcome in outcomes):
        print(f"stopped, since files cannot be written; when they can again, go on with: {again}")
    elif any(outcome.state in FAILED for outcome in outcomes):
        print(f"try the failed ones again with: {again}{'' if '--retry-failed' in again else ' --retry-failed'}")
    return 0 if finished == runs else 1


def describe(words: Sequence[str]) -> int:
    description = """Say what the models of a study cost, without training.

That is parameters by part, and operations and memory of a training step for each T.

Example:
  energylab describe recursion --width 128"""
    path, function, knobs, _ = _parse_with_knobs("describe", words, None, description)

    from energylab.study.describe import describe as description_of

    print(description_of(project.resolve(path, function, knobs)))
    return 0


def status(words: Sequence[str]) -> int:
    description = """Show where the runs of a study are: finished, at work, waiting, failed or damaged.

Example:
  energylab status recursion"""
    word, _, options = _parse("status", words, ResultOptions, description)

    from energylab.study.status import status as status_of
    from energylab.study.version import current_code

    folder = project.results_folder(word, options.results)
    found = status_of(folder, current_code())
    rows = [
        (run.run, run.state, str(run.step), "" if run.loss is None else f"{run.loss:.4f}", run.sentence)
        for run in found.runs
    ]
    widths = [max(len(row[column]) for row in [*rows, _STATUS_HEADER]) for column in range(4)]
    for row in (_STATUS_HEADER, *rows):
        words_left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:4], widths[2:], strict=True)]
        print("  ".join([*words_left, *numbers, row[4]]).rstrip())
    counts = {state: sum(row[1] == state for row in rows) for state in dict.fromkeys(row[1] for row in rows)}
    print(f"{len(rows)} runs: " + ", ".join(f"{number} {state}" for state, number in counts.items()))
    if found.damage:
        print(found.damage)
    for path in sorted(folder.glob("*.damaged-*")):
        print(f"set aside: {path.name}")
    return 0 if found.sound else 1


_STATUS_HEADER = ("run", "state", "step", "loss", "")


def export(words: Sequence[str]) -> int:
    description = """Copy what figures need from the runs of the latest `energylab run STUDY`, small enough for git.

That is the tables of every finished run, and the weights of one seed of each model.

Example:
  energylab export recursion"""
    word, _, options = _parse("export", words, ExportOptions, description)

    from energylab.study.export import export_study

    folder = project.results_folder(word, options.results)
    output = options.output / folder.name
    project.check_writable("--output", output)
    weights = options.weights or ("none" if folder.name.endswith("-tuning") else "one")
    with project.problems():
        done = export_study(folder, output, weights)
    exported = len(done.copied) + len(done.unchanged)
    print(f"{output}: {exported} runs, {len(done.copied)} of them new, {done.size / 1e6:.2f} MB")
    if done.missing:
        print(f"not finished: {', '.join(done.missing)}")
    for sentence in done.damaged:
        print(f"damaged: {sentence}")
    return 1 if done.damaged or not exported else 0


def figures(words: Sequence[str]) -> int:
    description = """Draw the files of ./figures from stored results: PDF and PNG, and their numbers as LaTeX and CSV.

Results are read from the folder of the results where the study is complete there, else from studies/results.

Example:
  energylab figures error_vs_context --study quickstart --venue icml"""
    chosen, options = _parse_figures(words, description)
    modules = {name: project.figure_module(name) for name in chosen or project.known_figures()}
    if options.study is not None:
        several = [name for name, module in modules.items() if len(module.NEEDS) > 1]
        for name in several:
            if name in chosen:
                needs = ", ".join(modules[name].NEEDS)
                raise Problem(f"--study: expected a figure of one study, got {name}, which compares {needs}")
        if not chosen:
            modules = {name: module for name, module in modules.items() if project.suits(module, options.study)}
    needed = {name: module.NEEDS if options.study is None else (options.study,) for name, module in modules.items()}
    varies = {name: tuple(getattr(module, "VARIES", ())) for name, module in modules.items()}
    sources = {
        (need, free): project.results_for_figures(need, options.results, options.study is not None, free)
        for need, free in dict.fromkeys((need, varies[name]) for name, needs in needed.items() for need in needs)
    }
    missing = {need: source for (need, _), source in sources.items() if isinstance(source, str)}
    for name, module in modules.items():
        found = {need: sources[need, varies[name]] for need in needed[name]}
        present = [source for source in found.values() if not isinstance(source, str)]
        drawn = present and (len(present) == len(found) or getattr(module, "PARTIAL", False))
        if lacking := ", ".join(need for need, source in found.items() if isinstance(source, str)):
            said = f"drawn without {lacking}" if drawn else f"not drawn, needs {lacking}"
            print(f"{name}: {said}", file=sys.stderr)
        if not drawn:
            continue
        results = project.together(present)
        folder = options.output or _figure_folder(options, needed[name], results.name)
        project.check_writable("--output", folder)

        from energylab.plotting import save, style
        from energylab.plotting.tables import save_table

        with project.errors_of(project.FIGURES / f"{name}.py"), style(options.venue):
            figure = module.draw(results)
            table = module.table(results) if hasattr(module, "table") else None
        folder.mkdir(parents=True, exist_ok=True)
        save(figure, folder / name)
        kinds = ".pdf and .png"
        if table is not None:
            save_table(table, folder / name, name)
            kinds = ".pdf, .png, .tex and .csv"
        print(f"{name}: {folder / name}{kinds}, from {results.source}", flush=True)
    for need, sentence in missing.items():
        print(f"{need}: {sentence}", file=sys.stderr)
    return 1 if missing else 0


def _figure_folder(options: FigureOptions, needs: Sequence[str], study: str) -> Path:
    """figures/STUDY of the results; figures of several studies lie beside the folders. A venue has a folder of its own."""
    folder = options.results / "figures"
    folder = folder / study if len(needs) == 1 else folder
    return folder if options.venue == "plain" else folder / options.venue


def report(words: Sequence[str]) -> int:
    description = """Write one HTML file about a study: its settings, errors, differences, descent, figures and provenance.

The file holds everything and opens without a network. Figures are those of ./figures that are made for this study, or for
any.

Example:
  energylab report recursion"""
    word, _, options = _parse("report", words, ReportOptions, description)
    results = project.results_for_figures(word, options.results, latest=True)
    if isinstance(results, str):
        print(f"{word}: no report: {results}", file=sys.stderr)
        return 1
    target = options.output or options.results / f"{results.name}.html"
    if target.name == "" or target.is_dir():
        raise Problem(f"--output: expected a file to write, got {options.output}")
    project.check_writable("--output", target.parent)

    from energylab.plotting import style
    from energylab.study import store
    from energylab.study.report import Drawing
    from energylab.study.report import report as page

    drawn = {}
    for name in project.known_figures() if project.FIGURES.is_dir() else ():
        module = project.figure_module(name)
        if project.suits(module, results.name):
            try:
                wide = module.draw(results)
                with style("icml-column"):
                    narrow = module.draw(results)
                drawn[name] = Drawing(wide=wide, narrow=narrow)
            except ValueError as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    content = page(results, Path(results.source), drawn).encode()
    store.write_bytes(target, content)
    print(f"{target}: {len(content) / 1e6:.2f} MB, from {results.source}")
    return 0


def tasks(words: Sequence[str]) -> int:
    description = """Print a prior and the error of its Bayes floor, and draw functions from it and predictions of one.

PRESET is fixed, rbf, mixture or np-standard. The figure is written as PDF and PNG.

Example:
  energylab tasks rbf --output figures"""
    preset = _argument(str, tyro.conf.Positional, metavar="PRESET", help="The prior.")
    fields = {"preset": preset, "options": _argument(TaskOptions, name="tasks")}
    parsed = _tyro(fields, "energylab tasks", words, description, _names(TaskOptions))
    name, options = parsed.preset, parsed.options

    from energylab.plotting import save
    from energylab.plotting.tasks import Trained, look
    from energylab.study import load_run
    from energylab.tasks import GaussianProcessPrior
    from energylab.tasks.describe import describe as description_of

    with project.problems():
        prior = GaussianProcessPrior.preset(name)
    project.check_writable("--output", options.output)
    trained = None
    with project.problems("--run"):
        if options.run is not None:
            run = load_run(options.run)
            num_points = run.config.num_points
            trained = Trained(model=run.model, variant=run.config.variant, prior=run.prior, num_points=num_points)
        figure = look(name, prior, trained)
    print(description_of(prior))
    stem = options.output / (name if options.run is None else f"{name}-{options.run.resolve().name}")
    save(figure, stem)
    print(f"\n{stem}.pdf and .png")
    return 0


def trace(words: Sequence[str]) -> int:
    description = """Report how each layer of a finished run walks down its energy, and how close to the bottom it gets.

Example:
  energylab trace runs/recursion/CEM-T4-seed0-ccea5fbd"""
    run, options = _parse_run("trace", words, TraceOptions, description)

    def compute(folder: Path) -> list[str]:
        from energylab import inspection

        with _progress("trace") as tell:
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

        with _progress("landscape") as tell:
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

        with _progress("sweep") as tell:
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
        with _progress("confidence") as tell:
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
    run = _argument(str, tyro.conf.Positional, metavar="RUN", help="The directory of a finished run.")
    fields = {"run": run, "options": _argument(options, name=command)}
    parsed = _tyro(fields, f"energylab {command}", words, description, _names(options))
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


def _part(option: str, text: str) -> tuple[int, int]:
    """``2/8`` as numbers."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise Problem(f"{option}: expected a part from 1 to their number, as 2/8, got {text!r}")
    return int(match[1]), int(match[2])


def _seconds(option: str, text: str) -> float:
    """``1h30m`` in seconds."""
    match = re.fullmatch(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,6})s)?", text)
    parts = (0, 0, 0) if match is None else (int(part or 0) for part in match.groups())
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=True))
    if not seconds:
        raise Problem(f"{option}: expected a time, as 90m or 1h30m, got {text!r}")
    return seconds


MOST_RECURSIONS = 1024
"""The most steps of `sweep`: beyond, a typing error is likelier than a question."""


@contextlib.contextmanager
def _progress(command: str) -> Iterator[Callable[[str, float], None]]:
    """Shows what is being done, and which share of it is done: a bar in a terminal, elsewhere a line every few seconds."""
    from energylab.study.progress import Bar, Lines

    with Bar() if sys.stderr.isatty() else Lines(command) as tell:
        yield tell


def doctor(words: Sequence[str]) -> int:
    description = """Say what is installed, which device and which backend runs will use, and why.

Example:
  energylab doctor"""
    _tyro({}, "energylab doctor", words, description, [])

    import torch

    from energylab.study.executors import usable_cores
    from energylab.study.run import LIBRARIES
    from energylab.study.version import current_code
    from energylab.training import resolve_device

    code = current_code()
    where = "not from a git checkout" if code.commit is None else f"commit {code.commit[:12]}"
    changed = ", with changes" if code.dirty else ""
    print(f"energylab {code.version}, {where}{changed}; Python {platform.python_version()}")
    optional = ("matplotlib", "seaborn", "tueplots", "tyro", "rich", "triton", "ray")
    versions = [f"{name} {_version(name) or '(not installed)'}" for name in (*LIBRARIES, *optional)]
    print(f"libraries: {', '.join(versions)}")
    device = resolve_device("auto")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        print(f"device: cuda ({torch.cuda.get_device_name(device)}; {count} visible), one worker process each")
    else:
        built = "this PyTorch has no CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        print(f"device: cpu, since {built}; {usable_cores()} usable cores, a worker process with one thread on each")
    print(f"backend: {_backend(device)}")
    return 0


def bench(words: Sequence[str]) -> int:
    from energylab.bench.__main__ import BENCHES
    from energylab.bench.__main__ import main as run_bench

    if words and words[0] in ("-h", "--help"):
        print("usage: energylab bench NAME [OPTIONS]\n\nTime something, beside what it is to be compared with.\n")
        for name, summary in BENCHES.items():
            print(f"  {name.ljust(max(map(len, BENCHES)))}  {summary}")
        print("\n`energylab bench NAME --help` lists the options of one.\n\nExample:\n  energylab bench step")
        return 0
    if not words or words[0] not in BENCHES:
        raise Problem(f"NAME: expected one of {', '.join(BENCHES)}, got {words[0] if words else 'none'}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return run_bench(list(words))
    except SystemExit as end:
        if end.code == 2:
            text, said = said.getvalue(), io.StringIO()
            raise Problem(f"bench {words[0]}: {text.rpartition('error: ')[2]}") from None
        return 0 if end.code is None else int(end.code)
    finally:
        print(said.getvalue(), end="", file=sys.stderr)


COMMANDS = {
    "run": Command("train the runs of a study", run),
    "describe": Command("what the models of a study cost", describe),
    "status": Command("where the runs of a study are", status),
    "figures": Command("draw figures from stored results", figures),
    "trace": Command("how each layer of a run walks down its energy", trace),
    "landscape": Command("draw the energy around one query of a run", landscape),
    "sweep": Command("take more or fewer steps at test time", sweep),
    "confidence": Command("whether energy falls deep where a run is right", confidence),
    "report": Command("write one HTML file about a study", report),
    "export": Command("copy a study's results for git", export),
    "tasks": Command("print and draw a prior and its floor", tasks),
    "bench": Command("time layers, tasks and training steps", bench),
    "doctor": Command("what is installed, and what will run", doctor),
}


def _backend(device: Any) -> str:
    """What backend="auto" chooses on a device, and why."""
    import torch

    from energylab.kernels.available import INTERPRETED, runs_on, why_not
    from energylab.layers import CEMMLP, CEMAttention

    h = torch.empty(0, device=device)
    if not runs_on(h):
        return f"torch, the fast paths in plain PyTorch; no Triton kernel runs here: {why_not(h)}"
    sentence = "triton, one kernel for all T steps where it fits a layer, else kernels for one step"
    if INTERPRETED:
        return f"{sentence} (interpreted, for tests: TRITON_INTERPRET is set)"
    layers = (CEMAttention(64, 4, diagonal="shared"), CEMMLP(64, 128))
    lines = []
    for layer, dtype in itertools.product(layers, (torch.float32, torch.bfloat16)):
        name = f"{type(layer).__name__}, width 64, {str(dtype).removeprefix('torch.')}"
        lines.append(f"\n  {name}: {layer.kernel(torch.empty(1, 1, 64, device=device, dtype=dtype))}")
    return sentence + "".join(lines)


# --- parsing ---------------------------------------------------------------------------------------------------------


def _parse_with_knobs(
    command: str, words: Sequence[str], options: type | None, description: str
) -> tuple[Path, Callable[..., Any], dict[str, Any], Any]:
    """The file and the function of STUDY, the values of its knobs, and the options of the command."""
    word = _study_word(words, options)
    if word is None:
        if not {"-h", "--help"} & set(words):
            raise Problem(f"STUDY: expected {project.known_studies()}, or the path of a study file, got none")
        own = "With a STUDY, --help shows the study's own options too."
        _parse(command, words, options, f"{description}\n\nSTUDY: {project.known_studies()}. {own}")
        raise AssertionError("the help ends the command")
    path = project.study_file(word)
    function = project.study_function(path, taken=(*_names(RunOptions), "study", "help"))
    _, knobs, parsed = _parse(command, words, options, description, study=function)
    return path, function, knobs, parsed


def _parse(
    command: str, words: Sequence[str], options: type | None, description: str, study: Callable[..., Any] | None = None
) -> tuple[str, dict[str, Any], Any]:
    """STUDY, the study's knobs if its function is given, and the options of the command."""
    fields: dict[str, Any] = {
        "word": _argument(str, tyro.conf.Positional, name="study", metavar="STUDY", help="The study.")
    }
    known = [] if options is None else _names(options)
    if study is not None:

        @functools.wraps(study)
        def knobs_of(**knobs: Any) -> dict[str, Any]:
            return knobs

        fields["knobs"] = _argument(dict, constructor=knobs_of)
        known = [*inspect.signature(study).parameters, *known]
    if options is not None:
        fields["options"] = _argument(options, name="common" if command == "run" else command)
    parsed = _tyro(fields, f"energylab {command}", words, description, known)
    return parsed.word, getattr(parsed, "knobs", {}), getattr(parsed, "options", None)


def _parse_figures(words: Sequence[str], description: str) -> tuple[tuple[str, ...], FigureOptions]:
    names = _argument(
        tuple[str, ...], tyro.conf.Positional, metavar="[FIGURE ...]", help="Files of ./figures.", default_hint="all"
    )
    fields = {"figures": (names, ()), "options": _argument(FigureOptions, name="figures")}
    parsed = _tyro(fields, "energylab figures", words, description, _names(FigureOptions))
    return parsed.figures, parsed.options


def _argument(kind: Any, *markers: Any, default_hint: str | None = None, **details: Any) -> Any:
    """A type with what tyro should know of it."""
    if default_hint is not None:
        details["help_behavior_hint"] = f"(default: {default_hint})"
    return Annotated[(kind, *markers, tyro.conf.arg(**details))]


def _tyro(fields: Mapping[str, Any], prog: str, words: Sequence[str], description: str, known: Sequence[str]) -> Any:
    """Parse with tyro into an object with these fields, each a type, or a type and its default.

    The errors of tyro become a Problem of one line.
    """
    given = [(name, *field) if isinstance(field, tuple) else (name, field) for name, field in fields.items()]
    target = dataclasses.make_dataclass("Arguments", given, kw_only=True)
    options = ["--help", *(f"--{_dashed(name)}" for name in known)]
    for word in words:
        name = word.partition("=")[0]
        plain = "--" + _dashed(name[2:])
        if name.startswith("--") and not any(
            plain in (option, f"--no-{option[2:]}") or plain.startswith(f"{option}.") for option in options
        ):
            near = difflib.get_close_matches(plain, options, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise Problem(f"{name}: unknown option of `{prog}`, expected some of {', '.join(options)}{meant}")
    if {"-h", "--help"} & set(words):
        words = ["--help"]  # otherwise the help would leave out what is given already
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
            return tyro.cli(target, prog=prog, description=description, args=words, config=config)
    except SystemExit as end:
        if end.code in (0, None):
            raise _Helped from None
        raise Problem(_from_box(said.getvalue(), words)) from None


def _from_box(text: str, words: Sequence[str]) -> str:
    """The sentence in one of tyro's error boxes, which is drawn with dashes alone where the output knows only ASCII."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in text.splitlines()]
    sections: list[list[str]] = [[]]
    for line in filter(None, lines):
        if set(line) <= set("-─╰╯"):
            sections.append([])
        elif not line.startswith("╭"):
            sections[-1].append(line)
    if "╭" not in text:
        sections = sections[1:]  # the title
    sentence = " ".join(" ".join(sections[0]).split()) if sections else _squeezed(text)
    details = [line for section in sections[1:] for line in section]
    option = re.match(r"Error parsing (--[\w-]+)", sentence)
    if option is not None:
        expected = next((line for line in details if line.startswith(option[1])), "").partition(" ")[2]
        given = _value_of(option[1], words)
        if expected and given is not None:
            return f"{option[1]}: expected {expected.replace('{None}|', '')}, got {given!r}"
    choice = re.match(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*?),?\)\.", sentence)
    if choice is not None:
        return f"{choice[2]}: expected one of {choice[3]}, got {choice[1]!r}"
    absent = re.match(r"Missing from energylab \S+ (\S+)", sentence)
    if absent is not None:
        return f"{absent[1]}: expected a value, got none"
    missing = re.match(r"Missing value for argument '(\S+)'", sentence)
    if missing is not None:
        return f"{missing[1]}: expected a value, got none"
    unexpected = re.match(r"Unrecognized options: (.*)", sentence)
    if unexpected is not None:
        return f"expected no further arguments, got {unexpected[1]}"
    return sentence


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """What was given for an option; the last counts."""
    for index in reversed(range(len(words))):
        name, equals, value = words[index].partition("=")
        if name.startswith("--") and "--" + _dashed(name[2:]) == option:
            return value if equals else (words[index + 1] if index + 1 < len(words) else None)
    return None


def _study_word(words: Sequence[str], options: type | None) -> str | None:
    """STUDY: the first argument that is neither an option nor the value of one.

    It is needed before the study's own options are known; each of those is taken to have a value.
    """
    fields = () if options is None else dataclasses.fields(options)
    flags = {f"--{_dashed(field.name)}" for field in fields if field.type is bool}
    flags |= {f"--no-{flag[2:]}" for flag in flags} | {"--help", "-h"}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            return word
        if "=" not in word and "--" + _dashed(word.lstrip("-")) not in flags and word not in flags:
            next(rest, None)
    return None


def _names(options: type) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]


def _dashed(name: str) -> str:
    return name.replace("_", "-")


# --- small things ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stop_on_signal(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """A function that says whether to stop: after SIGINT or SIGTERM. A second one stops at once."""
    signals, said = 0, False

    def handle(*_: object) -> None:  # says nothing itself: it may interrupt another line being written
        nonlocal signals
        signals += 1
        if signals > 1:
            raise KeyboardInterrupt

    def stop() -> bool:
        nonlocal said
        if signals and not said:
            said = True
            say("stopping: runs at work finish their step and save their state; once more stops at once")
        return signals > 0

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _plain(knobs: dict[str, Any]) -> dict[str, Any]:
    """Knobs as JSON knows them."""
    kept = (str, int, float, bool, type(None))
    return {key: value if isinstance(value, kept) else str(value) for key, value in knobs.items()}


def _squeezed(message: object) -> str:
    return " ".join(str(message).split())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
