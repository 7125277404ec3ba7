"""Commands that draw: the figures of a study, its report, and its tasks."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from energylab import project
from energylab.cli.inside import progress
from energylab.cli.parsing import argument, names_of, parse, parse_fields
from energylab.project import Problem


@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """Which runs to draw, and where to write."""

    study: Annotated[
        str | None, tyro.conf.arg(metavar="STUDY", help_behavior_hint="(default: the study that a figure names)")
    ] = None
    """Draw the figures that need one study from the latest runs of this one."""
    results: Path = project.RESULTS
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

    results: Path = project.RESULTS
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


def figures(words: Sequence[str]) -> int:
    description = """Draw the files of ./figures from stored results: PDF and PNG, and their numbers as LaTeX and CSV.

Results are read from the folder of the results where the study is complete there, else from studies/results. A figure
whose study has not been run yet is named, with the command that runs it; the exit code is 1 only where such a figure was
asked for, or where runs are damaged or unfinished.

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
    drawn = 0
    for name, module in modules.items():
        found = {need: sources[need, varies[name]] for need in needed[name]}
        present = [source.results for source in found.values() if source.results is not None]
        lacking = ", ".join(need for need, source in found.items() if source.results is None)
        enough = present and (not lacking or getattr(module, "PARTIAL", False))
        if lacking:
            said = f"drawn without {lacking}" if enough else f"not drawn, needs {lacking}"
            print(f"{name}: {said}", file=sys.stderr)
        if not enough:
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
        drawn += 1
    for need, sentence in {need: source.missing for (need, _), source in sources.items() if source.missing}.items():
        print(f"{need}: {sentence}", file=sys.stderr)
    unsound = any(source.damaged or source.begun for source in sources.values())
    # that a study has not been run yet is no failure, unless its figure was asked for
    wanted = len(modules) if chosen or options.study is not None else 1
    return 1 if unsound or drawn < wanted else 0


def _parse_figures(words: Sequence[str], description: str) -> tuple[tuple[str, ...], FigureOptions]:
    names = argument(
        tuple[str, ...], tyro.conf.Positional, metavar="[FIGURE ...]", help="Files of ./figures.", default_hint="all"
    )
    fields = {"figures": (names, ()), "options": argument(FigureOptions, name="figures")}
    parsed = parse_fields(fields, "energylab figures", words, description, names_of(FigureOptions))
    return parsed.figures, parsed.options


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
    word, _, options = parse("report", words, ReportOptions, description)
    found = project.results_for_figures(word, options.results, latest=True)
    if (results := found.results) is None:
        print(f"{word}: no report: {found.missing}", file=sys.stderr)
        return 1
    target = options.output or options.results / f"{results.name}.html"
    if target.name == "" or target.is_dir():
        raise Problem(f"--output: expected a file to write, got {options.output}")
    project.check_writable("--output", target.parent)

    from energylab.plotting import style
    from energylab.study import store
    from energylab.study.report import Drawing
    from energylab.study.report import report as page

    names = project.known_figures() if project.FIGURES.is_dir() else []
    modules = {name: project.figure_module(name) for name in names}
    modules = {name: module for name, module in modules.items() if project.suits(module, results.name)}
    drawn, left_out = {}, []
    with progress("report") as tell:
        for number, (name, module) in enumerate(modules.items()):
            tell(f"drawing {name}", number / len(modules) / 2)
            try:
                wide = module.draw(results)
                with style("icml-column"):
                    narrow = module.draw(results)
                drawn[name] = Drawing(wide=wide, narrow=narrow)
            except ValueError as error:
                left_out.append(f"{name}: left out: {error}")
        content = page(results, Path(results.source), drawn, lambda what, share: tell(what, (1 + share) / 2)).encode()
    for sentence in left_out:
        print(sentence, file=sys.stderr)
    target.parent.mkdir(parents=True, exist_ok=True)
    store.write_bytes(target, content)
    print(f"{target}: {len(content) / 1e6:.2f} MB, from {results.source}")
    return 0


def tasks(words: Sequence[str]) -> int:
    description = """Print a prior and the error of its Bayes floor, and draw functions from it and predictions of one.

PRESET is fixed, rbf, mixture or np-standard. The figure is written as PDF and PNG.

Example:
  energylab tasks rbf --output figures"""
    preset = argument(str, tyro.conf.Positional, metavar="PRESET", help="The prior.")
    fields = {"preset": preset, "options": argument(TaskOptions, name="tasks")}
    parsed = parse_fields(fields, "energylab tasks", words, description, names_of(TaskOptions))
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
