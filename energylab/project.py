"""The files of a project, found from the current folder: studies/, figures/, and their results.

    studies/NAME.py      `study(...)` returns a Study; its keyword parameters are its knobs
    studies/results/     exported results
    figures/NAME.py      `NEEDS`, names of studies, and `draw(results)`, which returns a Figure; if it has them, also
                         `table(results)`, its numbers as a DataFrame; `PARTIAL = True`, where it draws what is there
                         of several studies; `ANY_STUDY = True`, where `--study` and reports draw it of every study;
                         and `VARIES`, settings in which runs of one curve may differ

Study and figure files are Python and are executed. Whatever is wrong with them is a `Problem`, one line for the reader.
"""

import contextlib
import inspect
import math
import os
import re
import shlex
import sys
import tempfile
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a mistyped command does not need, it does not wait for
    from energylab.study import Study, StudyResults

RESULTS = Path("runs")
STUDIES = Path("studies")
EXPORTED = STUDIES / "results"
FIGURES = Path("figures")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


class Problem(Exception):
    """The command, the study or the figure is wrong; the message is for the reader."""


# --- studies ---------------------------------------------------------------------------------------------------------


def known_studies() -> str:
    """The studies of the current folder, in words."""
    names = _names(STUDIES)
    return f"one of {', '.join(names)}" if names else f"a study of ./{STUDIES}, where there is none"


def study_file(word: str) -> Path:
    """The file of a study, given by its name or by its path."""
    if _is_path(word):
        path = Path(word)
        if not path.is_file():
            raise Problem(f"STUDY: expected a name or the path of a study file, got {word!r}, which is no file")
        return path
    path = STUDIES / f"{word}.py"
    if not path.is_file():
        raise Problem(f"STUDY: expected {known_studies()}, or the path of a study file, got {word!r}")
    return path


def study_function(path: Path, taken: Sequence[str] = ()) -> Callable[..., Any]:
    """The function `study` of a file. Its parameters are typed, and have none of the names that are `taken`."""
    function = getattr(_load(path), "study", None)
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        found = "none" if function is None else f"{function!r:.60}"
        raise Problem(f"{path}: expected a function `study` that returns a Study, found {found}")
    with errors_of(path):
        typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise Problem(f"{path}: expected keyword parameters only in `study`, got {parameter}")
        if parameter.annotation is parameter.empty:
            raise Problem(f"{path}: expected a type for the parameter {name} of `study`, such as {name}: int, got none")
        if name in taken:
            raise Problem(
                f"{path}: {name}: expected another name for this parameter of `study`, since "
                f"--{name.replace('_', '-')} is an option common to all studies"
            )
    return function


def resolve(path: Path, function: Callable[..., Any], knobs: Mapping[str, Any]) -> "Study":
    """The Study of these knobs."""
    from energylab.study import Study

    parameters = inspect.signature(function).parameters
    for key, value in knobs.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise Problem(f"--{key.replace('_', '-')}: expected a finite number, got {value}")
    changed = {key: value for key, value in knobs.items() if parameters[key].default != value}
    with errors_of(path, changed):
        study = function(**knobs)
    if not isinstance(study, Study):
        raise Problem(f"{path}: expected `study` to return a Study, got {study!r:.80}")
    switches = [f"--{key.replace('_', '-')}" for key, value in changed.items() if value is True]
    for key, value in changed.items():
        if switches and not isinstance(value, bool):  # such as --debug, which sets the steps itself
            with errors_of(path, changed):
                without = function(**{**knobs, key: parameters[key].default})
            if without == study:
                option = f"--{key.replace('_', '-')}"
                raise Problem(
                    f"{option}: expected none with {' '.join(switches)}, where it changes nothing, got {value}"
                )
    return study


def default_study(name: str) -> "Study | None":
    """The study of this name with its default knobs; None if the current folder has no such file."""
    path = STUDIES / f"{name}.py"
    return resolve(path, study_function(path), {}) if path.is_file() else None


def results_folder(word: str, results: Path) -> Path:
    """The folder of a study's results, given by its name or by the path of its file."""
    if results.exists() and not results.is_dir():
        raise Problem(f"--results: expected a folder, got {results}, which is a file")
    if _is_path(word):
        path = study_file(word)
        name = resolve(path, study_function(path), {}).name
    elif _NAME.fullmatch(word) and (results / word).is_dir():
        name = word
    elif (study := default_study(word)) is not None:
        name = study.name
    else:
        raise Problem(f"STUDY: expected {_one_of_results(results)}, got {word!r}")
    if not (results / name).is_dir():
        raise Problem(f"{results / name}: no results yet; make them with: {_command(word, results)}")
    return results / name


def _command(word: str, results: Path, knobs: Mapping[str, Any] | None = None) -> str:
    """The command that makes the runs of a study where they are looked for, with knobs as `store.read_study` has them."""
    path = Path(word) if _is_path(word) else STUDIES / f"{re.sub('(-tuning|-debug)+$', '', word)}.py"
    if not path.is_file():
        return "energylab run, with the file of the study"
    study = word if _is_path(word) else path.stem
    words = ["energylab", "run", study]
    parameters = inspect.signature(study_function(path)).parameters if knobs else {}
    for key, value in (knobs or {}).items():
        if key in parameters and str(value) != str(parameters[key].default):  # stored as JSON knows it
            option = f"{'no-' if value is False else ''}{key.replace('_', '-')}"
            words += [f"--{option}", *([] if isinstance(value, bool) else [str(value)])]
    if results == EXPORTED:
        return f"{shlex.join(words)} && {shlex.join(['energylab', 'export', study])}"
    return shlex.join(words if results == RESULTS else [*words, "--results", str(results)])


def _one_of_results(results: Path) -> str:
    names = {*_names(STUDIES), *(path.parent.name for path in results.glob("*/study.json"))}
    return f"one of {', '.join(sorted(names))}" if names else "the name of a study (there is none here)"


def _is_path(word: str) -> bool:
    return word.endswith(".py") or os.sep in word


# --- figures ---------------------------------------------------------------------------------------------------------


def known_figures() -> list[str]:
    names = _names(FIGURES)
    if not names:
        raise Problem(f"figures: expected a folder {FIGURES} with figure files in the current folder, found none")
    return names


def figure_module(name: str) -> types.ModuleType:
    """A figure file, with its `NEEDS` and `draw`."""
    path = FIGURES / f"{name}.py"
    if not path.is_file():
        raise Problem(f"FIGURE: expected some of {', '.join(known_figures())}, got {name!r}")
    module = _load(path)
    needs = getattr(module, "NEEDS", None)
    if not isinstance(needs, tuple) or not needs or not all(isinstance(need, str) for need in needs):
        raise Problem(f'{path}: NEEDS: expected a tuple of study names, such as ("recursion",), got {needs!r}')
    if not callable(getattr(module, "draw", None)):
        raise Problem(f"{path}: expected a function `draw` that returns a Figure, found none")
    return module


def suits(module: types.ModuleType, study: str) -> bool:
    """Whether a figure shows this study when none is named: it is made for it, or for any."""
    return (study,) == module.NEEDS or getattr(module, "ANY_STUDY", False)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What there is of a study to draw."""

    results: "StudyResults | None" = None
    missing: str = ""
    """Where there are no results: what is missing, and the command that makes it."""
    begun: bool = False
    """Whether some of the runs are finished, though not all."""
    damaged: bool = False
    """Whether some are damaged."""


def results_for_figures(word: str, results: Path, latest: bool, varies: Sequence[str] = ()) -> Found:
    """The results of a study, or what is missing; damage is printed.

    They are read from the folder of the results if the study is complete there, else from the exported ones. The study
    is the one with default knobs or, if `latest`, what the latest `energylab run` made of it.
    """
    from energylab.study import load_study, store

    study = None if latest else default_study(word)
    name = word if study is None else study.name
    if not _NAME.fullmatch(name) or not any(
        path.exists() for path in (STUDIES / f"{word}.py", results / name, EXPORTED / name)
    ):
        raise Problem(f"study: expected {_one_of_results(results)}, got {word!r}")
    folder = results / name
    asked = store.read_study(folder) if study is None else {}
    runs = asked.get("runs", []) if study is None else [config.name for config in study.runs]
    missing, damaged = [], False
    for run in runs:
        try:
            if store.check_run(folder / run) is None:
                missing.append(run)
        except store.Damaged as error:
            missing.append(run)
            damaged = True
            print(f"{folder}: damaged: {error}", file=sys.stderr)
    with problems(), _plain_warnings():
        if runs and not missing:
            return Found(results=load_study(folder, runs, varies))
        if (EXPORTED / name).is_dir():
            exported = load_study(EXPORTED / name, varies=varies)
            if len(exported.errors):
                return Found(results=exported, damaged=damaged)
    progress = f"no runs in {folder}"
    if runs:
        rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        progress = f"{len(runs) - len(missing)} of {len(runs)} runs are finished in {folder}"
        progress += f" (missing {', '.join(missing[:3])}{rest})"
    command = _command(word, results, asked.get("knobs"))
    begun = len(missing) < len(runs)
    return Found(missing=f"{progress}; make them with: {command}", begun=begun, damaged=damaged)


def together(results: Sequence["StudyResults"]) -> "StudyResults":
    """Several studies as one: their tables below each other."""
    if len(results) == 1:
        return results[0]
    import pandas as pd

    from energylab.study import StudyResults

    tables = {
        field: pd.concat([getattr(result, field) for result in results], ignore_index=True)
        for field in ("errors", "descent", "training", "learning", "test_time", "circuits")
    }
    return StudyResults(
        name="+".join(result.name for result in results),
        note=" ".join(result.note for result in results if result.note),
        source=" and ".join(result.source for result in results),
        **tables,
    )


# --- both ------------------------------------------------------------------------------------------------------------


def check_writable(option: str, folder: Path) -> None:
    """Refuse a folder that could not be written, without leaving anything there."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise Problem(f"{option}: expected a folder to write in, got {folder}, and {place} is a file")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise Problem(f"{option}: expected a folder to write in, got {folder}: {place}: {error.strerror}") from error


@contextlib.contextmanager
def problems(where: str = "") -> Iterator[None]:
    """Turn a ValueError, which names key, value and what is allowed, into a Problem."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise Problem(f"{where}: {error}" if where else str(error)) from error


@contextlib.contextmanager
def errors_of(path: Path, knobs: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn any error of a study or figure file into a Problem that says where in the file it arose."""
    given = "".join(f" --{key.replace('_', '-')} {value}" for key, value in (knobs or {}).items())
    given = f" (with{given})" if given else ""
    try:
        yield
    except (Problem, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        raise Problem(f"{path}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise Problem(f"{path}: {error}{given}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        place = f", line {lines[-1]}" if lines else ""
        raise Problem(f"{path}{place}: {type(error).__name__}: {error}{given}") from error


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as lines, without the line of code that gave them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        print(f"energylab: {warning.message}", file=sys.stderr)


def _load(path: Path) -> types.ModuleType:
    """Execute a file. It is compiled here, so that no cache is left beside it."""
    name = re.sub(r"\W", "_", f"energylab_file_{path.stem}")
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    with errors_of(path):
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.py") if not path.name.startswith("_"))
