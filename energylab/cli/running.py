"""`energylab run`: train the runs of a study."""

import contextlib
import dataclasses
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from energylab import project
from energylab.cli.machine import version
from energylab.cli.parsing import dashed, names_of, parse, study_word
from energylab.project import Problem


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how the runs execute; none of these changes a result's name."""

    results: Path = project.RESULTS
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


def run(words: Sequence[str]) -> int:
    description = """Train the runs of a study, and go on where an earlier command stopped.

STUDY is the name of a file in ./studies, or the path of a study file. Runs that are finished are not trained again.

Example:
  energylab run recursion --steps 200 --seeds 2"""
    path, function, knobs, options = parse_with_knobs("run", words, RunOptions, description)

    part = None if options.shard is None else _part("--shard", options.shard)
    time_limit = None if options.time_limit is None else _seconds("--time-limit", options.time_limit)
    if options.executor != "ray":
        for key in ("address", "gpus_per_run"):
            if getattr(options, key) is not None:
                raise Problem(
                    f"--{dashed(key)}: expected it with --executor ray only, got --executor {options.executor}"
                )

    import torch

    from energylab.kernels.available import runs_on, why_not
    from energylab.study import driver
    from energylab.study.memory import check_memory
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
    if options.executor != "ray":
        each = {(c.model, c.num_points, c.training): c for c in (task.config for task in tasks)}
        for config in each.values():
            with project.problems(path.as_posix()):
                check_memory(config, resolve_device(config.training.device))
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


def parse_with_knobs(
    command: str, words: Sequence[str], options: type | None, description: str
) -> tuple[Path, Callable[..., Any], dict[str, Any], Any]:
    """The file and the function of STUDY, the values of its knobs, and the options of the command."""
    word = study_word(words, options)
    if word is None:
        if not {"-h", "--help"} & set(words):
            raise Problem(f"STUDY: expected {project.known_studies()}, or the path of a study file, got none")
        own = "With a STUDY, --help shows the study's own options too."
        parse(command, words, options, f"{description}\n\nSTUDY: {project.known_studies()}. {own}")
        raise AssertionError("the help ends the command")
    path = project.study_file(word)
    function = project.study_function(path, taken=(*names_of(RunOptions), "study", "help"))
    _, knobs, parsed = parse(command, words, options, description, study=function)
    return path, function, knobs, parsed


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
        if version("ray") is None:
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
