"""Export: what figures need of a study, small enough for git, in the layout of the original."""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from energylab.analysis.circuits import circuits
from energylab.study.config import RunConfig
from energylab.study.files import (
    CIRCUITS,
    CONFIG,
    DESCENT,
    EVALUATION,
    LEARNING,
    METRICS,
    STUDY,
    TEST_TIME,
    WEIGHTS,
    Damaged,
    check_study,
    checksum,
    read_checked,
    run_directories,
    write_bytes,
    write_provenance,
    write_signed,
)
from energylab.study.store import check_run, label, load_run, parquet, read_config, read_table, seven_digits

Weights = Literal["none", "one", "all"]
"""Whose weights are exported: nobody's, those of the smallest seed of each (variant, T), or everybody's."""


@dataclass(frozen=True)
class Exported:
    """What `export_study` did."""

    copied: tuple[str, ...]
    unchanged: tuple[str, ...]
    shared: dict[str, str]
    """Runs that stand in the exported folder of another study already, and which."""
    missing: tuple[str, ...]
    """Runs of the study that are not finished."""
    damaged: tuple[str, ...]
    """A sentence for each run that is damaged."""
    size: int
    """Bytes of the exported study."""


TABLES = (METRICS, EVALUATION, DESCENT, TEST_TIME, LEARNING, CIRCUITS)


def export_study(folder: Path, output: Path, weights: Weights = "one", tables: Sequence[str] = TABLES) -> Exported:
    """Copy what figures need of a study's latest runs: the tables, and the weights that `weights` says.

    Tables keep seven digits. Raw traces stay behind: the weights give them back (`RunResults.traces`). The exported folder
    has the layout of the original, so that everything reads both. A run that another study beside `output` holds already,
    with the same tables, is not copied again: study.json says where it is. Raises ValueError if `output` holds runs of
    other settings.
    """
    if output.resolve() == folder.resolve():
        raise ValueError(f"output: expected another folder than that of the results, got {output}")
    try:
        study = check_study(folder)
    except Damaged as error:
        raise ValueError(f"{folder}: {error.reason}; `energylab run` writes it again") from error
    if not study:
        raise ValueError(f"{folder / STUDY}: missing; `energylab run` writes it again")
    if output.exists():
        foreign = [path.name for path in run_directories(output, shared=False) if path.name not in study["runs"]]
        if foreign:
            raise ValueError(
                f"output: expected a folder without runs of other settings, got {output} with {foreign[0]}"
                + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else "")
            )
    finished: list[tuple[Path, RunConfig, dict[str, Any]]] = []
    missing, damaged = [], []
    places = {path.name: path for path in run_directories(folder)}
    for name in study["runs"]:
        directory = places[name] if name in places else folder / name
        try:
            provenance = check_run(directory)
        except Damaged as error:
            damaged.append(str(error))
            continue
        if provenance is None:
            missing.append(name)
        else:
            finished.append((directory, read_config(directory), provenance))
    first_seed: dict[tuple[str, int | None], int] = {}
    for _, config, _ in finished:
        key = (config.variant, config.recursions)
        first_seed[key] = min(config.seed, first_seed.get(key, config.seed))
    copied, unchanged = [], []
    present = {path.name: path.parent for path in run_directories(output)} if output.exists() else {}
    shared = {name: parent.name for name, parent in present.items() if parent != output and name in study["runs"]}
    if finished:
        output.mkdir(parents=True, exist_ok=True)
    for directory, config, provenance in finished:
        first = config.seed == first_seed[config.variant, config.recursions]
        whole = weights == "all" or (weights == "one" and first)
        contents = _contents(directory, provenance, tables, whole)
        target = output / directory.name
        if _holds(target, contents):
            shared.pop(target.name, None)
            unchanged.append(target.name)
        # a copy that is there stays there: other studies may point to it
        elif not target.exists() and (other := _holder(target, contents)) is not None:
            shared[target.name] = other
        else:
            shared.pop(target.name, None)
            _write_run(target, contents, provenance)
            copied.append(target.name)
    if finished:
        kept = {*shared, *(path.name for path in run_directories(output, shared=False))}
        runs = [name for name in study["runs"] if name in kept]
        write_signed(output / STUDY, {**study, "runs": runs, "shared": shared})
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) if output.exists() else 0
    return Exported(tuple(copied), tuple(unchanged), shared, tuple(missing), tuple(damaged), size)


def _contents(source: Path, provenance: Mapping[str, Any], tables: Sequence[str], whole: bool) -> dict[str, bytes]:
    """The files of an exported run."""
    weights = [WEIGHTS] if whole else []  # and no snapshots: each is as large as the weights
    present = [name for name in tables if name in provenance["files"]]
    contents = {name: read_checked(source, provenance, name) for name in (CONFIG, *weights)}
    # written anew, so that those of an older version become as small
    contents |= {name: parquet(seven_digits(read_table(source, provenance, name))) for name in present}
    # of a run from before there was this table
    if CIRCUITS in tables and CIRCUITS not in contents and WEIGHTS in provenance["files"]:
        run = load_run(source)
        found = circuits(run.model)
        contents[CIRCUITS] = parquet(seven_digits(pd.concat([label(run.config, len(found)), found], axis=1)))
    return contents


def _holds(directory: Path, contents: Mapping[str, bytes]) -> bool:
    """Whether a directory is a sound run of these files."""
    present = _digests(directory)
    return present is not None and present == {name: checksum(content) for name, content in contents.items()}


def _digests(directory: Path) -> dict[str, str] | None:
    """The checksums of a sound run's files."""
    with contextlib.suppress(Damaged):
        if (provenance := check_run(directory)) is not None:
            return provenance["files"]
    return None


def _holder(target: Path, contents: Mapping[str, bytes]) -> str | None:
    """The study beside that of `target` which holds the same run with these files, or more.

    The name is a hash of the config, whose file may have got new fields at their defaults.
    """
    wanted = {name: checksum(content) for name, content in contents.items() if name != CONFIG}
    for other in sorted(target.parent.parent.glob(f"*/{target.name}")):
        if other != target and wanted.items() <= (_digests(other) or {}).items():
            return other.parent.name
    return None


def _write_run(target: Path, contents: Mapping[str, bytes], provenance: Mapping[str, Any]) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, content in contents.items():
        write_bytes(partial / name, content)
    facts = {key: value for key, value in provenance.items() if key not in ("schema", "state", "files")}
    write_provenance(partial, facts, contents)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
