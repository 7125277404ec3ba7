"""Commands about the runs of a study: what they will cost, where they are, what of them to keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from energylab import project
from energylab.cli.parsing import parse
from energylab.cli.running import parse_with_knobs


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where the results are."""

    results: Path = project.RESULTS
    """Folder of the results."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """From where, to where."""

    results: Path = project.RESULTS
    """Folder of the results."""
    output: Path = project.EXPORTED
    """Folder to copy to; the study gets a folder of its name in it."""
    weights: Literal["auto", "none", "one", "all"] = "auto"
    """Whose weights: nobody's, one seed's of each model, or everybody's; auto is one, but none of a sweep of --tune."""
    tables: Literal["auto", "all", "no-curves", "errors"] = "auto"
    """Which tables: all, all but the training curves, which only the figures training_curves and stability draw, or those of
    the errors alone; auto is all, but of a sweep of --tune the errors."""


def describe(words: Sequence[str]) -> int:
    description = """Say what the models of a study cost, without training.

That is parameters by part, and operations and memory of a training step for each T.

Example:
  energylab describe recursion --width 128"""
    path, function, knobs, _ = parse_with_knobs("describe", words, None, description)

    from energylab.study.describe import describe as description_of

    study = project.resolve(path, function, knobs)
    with project.problems(path.as_posix()):
        print(description_of(study))
    return 0


def status(words: Sequence[str]) -> int:
    description = """Show where the runs of a study are: finished, at work, waiting, failed or damaged.

Example:
  energylab status recursion"""
    word, _, options = parse("status", words, ResultOptions, description)

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

That is the tables of every finished run, and the weights of one seed of each model; of a sweep of --tune the errors alone.

Example:
  energylab export recursion"""
    word, _, options = parse("export", words, ExportOptions, description)

    from energylab.study.export import TABLES, export_study
    from energylab.study.files import EVALUATION, METRICS, TEST_TIME

    folder = project.results_folder(word, options.results)
    output = options.output / folder.name
    project.check_writable("--output", output)
    sweep = folder.name.endswith("-tuning")
    weights = options.weights
    if weights == "auto":
        weights = "none" if sweep else "one"
    of = {"all": TABLES, "no-curves": [name for name in TABLES if name != METRICS], "errors": [EVALUATION, TEST_TIME]}
    tables = options.tables if options.tables != "auto" else "errors" if sweep else "all"
    with project.problems():
        done = export_study(folder, output, weights, of[tables])
    exported = len(done.copied) + len(done.unchanged) + len(done.shared)
    print(f"{output}: {exported} runs, {len(done.copied)} of them new, {done.size / 1e6:.2f} MB")
    if done.shared:
        others = ", ".join(sorted(set(done.shared.values())))
        print(f"{len(done.shared)} of them stand in {output.parent} already, in {others}")
    if done.missing:
        print(f"not finished: {', '.join(done.missing)}")
    for sentence in done.damaged:
        print(f"damaged: {sentence}")
    return 1 if done.damaged or not exported else 0
