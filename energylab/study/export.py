"""Export: what figures need of a study, small enough for git, in the layout of the original."""

import contextlib
import shutil
from collections.abc import Mapping
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
from energylab.study.store import check_run, label, load_run, parquet, read_config, read_table

Weights = Literal["none", "one", "all"]
"""Whose weights are exported: nobody's, those of the smallest seed of each (variant, T), or everybody's."""


@dataclass(frozen=True)
class Exported:
    """What `export_study` did."""

    copied: tuple[str, ...]
    unchanged: tuple[str, ...]
    missing: tuple[str, ...]
    """Runs of the study that are not finished."""
    damaged: tuple[str, ...]
    """A sentence for each run that is damaged."""
    size: int
    """Bytes of the exported study."""


def export_study(folder: Path, output: Path, weights: Weights = "one") -> Exported:
    """Copy what figures need of a study's latest runs: the tables, and the weights that `weights` says.

    Raw traces stay behind: the weights give them back (`RunResults.traces`). The exported folder has the layout of the
    original, so that everything reads both. Raises ValueError if `output` holds runs of other settings.
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
        foreign = [path.name for path in run_directories(output) if path.name not in study["runs"]]
        if foreign:
            raise ValueError(
                f"output: expected a folder without runs of other settings, got {output} with {foreign[0]}"
                + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else "")
            )
    finished: list[tuple[Path, RunConfig, dict[str, Any]]] = []
    missing, damaged = [], []
    for name in study["runs"]:
        directory = folder / name
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
    if finished:
        output.mkdir(parents=True, exist_ok=True)
    for directory, config, provenance in finished:
        first = config.seed == first_seed[config.variant, config.recursions]
        whole = weights == "all" or (weights == "one" and first)
        new = _export_run(directory, output / directory.name, provenance, whole)
        (copied if new else unchanged).append(directory.name)
    if finished:
        kept = {path.name for path in run_directories(output)}
        write_signed(output / STUDY, {**study, "runs": [name for name in study["runs"] if name in kept]})
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) if output.exists() else 0
    return Exported(tuple(copied), tuple(unchanged), tuple(missing), tuple(damaged), size)


def _export_run(source: Path, target: Path, provenance: Mapping[str, Any], whole: bool) -> bool:
    """Whether anything was copied: False if `target` already holds the same files."""
    weights = [WEIGHTS] if whole else []  # and no snapshots: each is as large as the weights
    tables = [
        name for name in (METRICS, EVALUATION, DESCENT, TEST_TIME, LEARNING, CIRCUITS) if name in provenance["files"]
    ]
    contents = {name: read_checked(source, provenance, name) for name in (CONFIG, *weights)}
    # written anew, so that those of an older version become as small
    contents |= {name: parquet(read_table(source, provenance, name)) for name in tables}
    if CIRCUITS not in contents and WEIGHTS in provenance["files"]:  # of a run from before there was this table
        run = load_run(source)
        found = circuits(run.model)
        contents[CIRCUITS] = parquet(pd.concat([label(run.config, len(found)), found], axis=1))
    if target.exists():
        with contextlib.suppress(Damaged):
            present = check_run(target)
            if present is not None and present["files"] == {name: checksum(contents[name]) for name in contents}:
                return False
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
    return True
