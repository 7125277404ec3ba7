"""Runs and studies as Python values: states, tables, weights, and what notebooks and figures read.

The files themselves, and how they are kept whole, are in `files`, whose functions are at hand here too.
"""

import functools
import io
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import safetensors.torch
import torch

from energylab.analysis.descent import record
from energylab.models import InContextRegressor
from energylab.study.config import RunConfig
from energylab.study.errors import Tested, TestedRuns, errors_table
from energylab.study.files import (  # noqa: F401  for those who call this room
    CIRCUITS,
    CONFIG,
    COSTS,
    DESCENT,
    EVALUATION,
    LEARNING,
    METRICS,
    PREVIOUS_STATE,
    PROGRESS,
    PROVENANCE,
    SCHEMA,
    SNAPSHOTS,
    STATE,
    STUDY,
    TEST_TIME,
    TRACES,
    WEIGHTS,
    Damaged,
    FromNewerVersion,
    check_progress,
    check_study,
    one_line,
    read_checked,
    read_json,
    read_progress,
    read_provenance,
    read_study,
    remove_leftovers,
    run_directories,
    set_aside,
    write_bytes,
    write_json,
    write_progress,
    write_provenance,
    write_study,
)
from energylab.study.index import fingerprint
from energylab.tasks import GaussianProcessPrior

# --- writing ---------------------------------------------------------------------------------------------------------


def write_table(path: Path, table: pd.DataFrame) -> None:
    write_bytes(path, parquet(table))


def write_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_bytes(path, safetensors.torch.save(tensors))


def write_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Save a training state, and keep the one before it."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    newest = directory / STATE
    # kept by a second name, not moved: at every moment a whole state.pt is there
    kept = directory / f".{PREVIOUS_STATE}.tmp-{os.getpid()}"
    if newest.exists():
        kept.unlink(missing_ok=True)
        shutil.copyfile(newest, kept)
        os.replace(kept, directory / PREVIOUS_STATE)
    write_bytes(newest, buffer.getvalue())


def write_config(directory: Path, config: RunConfig) -> None:
    write_json(directory / CONFIG, {"schema": SCHEMA, **config.to_dict()})


def parquet(table: pd.DataFrame) -> bytes:
    """In as few bytes as Parquet allows: most of a small file would be metadata, which `read_table` does without."""
    arrow = pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(None)
    words = [column for column, kind in table.dtypes.items() if kind == "str"]  # floats hardly repeat
    # what the floats of a column share is in their first bytes
    split = {column: "BYTE_STREAM_SPLIT" for column, kind in table.dtypes.items() if kind in ("float32", "float64")}
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        arrow,
        buffer,
        compression="zstd",
        compression_level=9,
        use_dictionary=words,  # pyright: ignore[reportArgumentType]  # its stub knows bool alone
        write_statistics=False,
        store_schema=False,
        column_encoding=split or None,
    )
    return buffer.getvalue()


# --- reading one run -------------------------------------------------------------------------------------------------


def read_config(directory: Path) -> RunConfig:
    """The config of a run, checked against the name of its directory."""
    data = read_json(directory / CONFIG)
    del data["schema"]
    try:
        config = RunConfig.from_dict(data)
    except ValueError as error:
        raise Damaged(directory, f"{CONFIG}: {error}") from error
    if config.name != directory.name:
        raise Damaged(directory, f"{CONFIG} belongs to {config.name}")
    return config


def read_table(directory: Path, provenance: Mapping[str, Any], name: str) -> pd.DataFrame:
    content = read_checked(directory, provenance, name)
    try:
        table = pd.read_parquet(io.BytesIO(content), engine="pyarrow")
    except (OSError, ValueError) as error:
        raise Damaged(directory, f"{name} is not readable Parquet ({one_line(error)})") from error
    # what was exported is in single precision, but means and differences are not to be
    kinds: dict[str, Any] = {column: "float64" for column, kind in table.dtypes.items() if kind == "float32"}
    return table.astype(kinds | ({"T": "Int64"} if "T" in table else {}))


def seven_digits(table: pd.DataFrame) -> pd.DataFrame:
    """The table in single precision: half the bytes, and no seed agrees with another to more than two digits."""
    return table.astype({column: "float32" for column, kind in table.dtypes.items() if kind == "float64"})


def check_run(directory: Path) -> dict[str, Any] | None:
    """The provenance of a finished run after every file was checked; None for a run to start or to continue.

    Raises Damaged where the directory holds something else than what a run wrote.
    """
    found = find_run(directory)
    return None if found is None else found[1]


def find_run(directory: Path) -> tuple[RunConfig, dict[str, Any]] | None:
    """As `check_run`, with the config of the run."""
    if not directory.is_dir():
        if directory.exists() or directory.is_symlink():
            raise Damaged(directory, "is a file, where a run directory should be")
        return None
    provenance = read_provenance(directory)
    if provenance is None:
        # killed before its config was there, a run has left nothing; with results but no config, something was lost
        if (directory / CONFIG).exists() or any((directory / name).exists() for name in (STATE, METRICS, WEIGHTS)):
            read_config(directory)
        return None
    config = read_config(directory)
    for name in provenance["files"]:
        read_checked(directory, provenance, name)
    return config, provenance


def read_state(directory: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The newest sound training state, and a sentence if a damaged one had to be passed over.

    A damaged file is renamed, so that the next save keeps the sound one. Raises Damaged if there are states, and all
    are damaged.
    """
    state, complaint = check_states(directory)
    if state is None or complaint is None:
        return state, None
    set_aside(directory / STATE)
    return state, f"{complaint}; continued from {PREVIOUS_STATE}, step {state['trainer']['step']}"


def check_states(directory: Path) -> tuple[dict[str, Any] | None, str | None]:
    """As `read_state`, but changes nothing, and the sentence only complains."""
    complaints = []
    for name in (STATE, PREVIOUS_STATE):
        path = directory / name
        if not path.exists():
            continue
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load itself ignores the checksums in the file
                if (entry := archive.testzip()) is not None:
                    raise ValueError(f"checksum of {entry}")
            state = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(state, dict) or state.get("run") != directory.name:
                raise ValueError("it belongs to another run")
            if state.get("schema", SCHEMA + 1) > SCHEMA:
                raise FromNewerVersion(directory, f"{name} was written by a newer energylab")
        except FromNewerVersion:
            raise
        except Exception as error:  # a damaged archive raises almost anything: KeyError, EOFError, UnpicklingError, ...
            complaints.append(f"{name} is damaged ({one_line(error)})")
            continue
        return state, (complaints[0] if complaints else None)
    if complaints:
        raise Damaged(directory, " and ".join(complaints))
    return None, None


# --- reading studies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunResults:
    """A finished run, read and checked."""

    model: InContextRegressor
    """With the trained weights, on the CPU, in evaluation mode."""
    config: RunConfig
    provenance: dict[str, Any]
    training: pd.DataFrame
    """A row each logged step."""
    evaluation: pd.DataFrame
    descent: pd.DataFrame
    stored_traces: pd.DataFrame | None
    """None in an exported run."""
    learning: pd.DataFrame | None
    """A row for each (step, layer, t, token) of training; None unless the run's config has a ``trace_every``."""

    @functools.cached_property
    def traces(self) -> pd.DataFrame:
        """The raw traces of a few tasks (`energylab.analysis.descent.record`): as stored, else recorded anew."""
        if self.stored_traces is not None:
            return self.stored_traces
        recorded = record(self.model, self.prior, self.config.num_points)
        return pd.concat([label(self.config, len(recorded)), recorded], axis=1)

    @property
    def prior(self) -> GaussianProcessPrior:
        return self.config.prior


@dataclass(frozen=True)
class StudyResults:
    """What figures draw: the tables of a study's finished runs, each row with study, run, variant, T and seed."""

    name: str
    note: str
    source: str
    """Where it was read, such as "runs/recursion"."""
    errors: pd.DataFrame
    """As `load_results`."""
    descent: pd.DataFrame
    """Empty where the runs are the exported ones of a sweep of learning rates."""
    training: pd.DataFrame
    """Without the runs that were exported without their training curves."""
    learning: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Empty, without columns, where no run recorded any."""
    test_time: pd.DataFrame = field(default_factory=pd.DataFrame)
    """A row each (run, T' at test time); empty where no run was tested so."""
    circuits: pd.DataFrame = field(default_factory=pd.DataFrame)
    """A row each (run, attention head), as `energylab.analysis.circuits`."""


def load_results(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """The test errors of a study, tidy: one row a (run, condition, k), finished runs only.

    Columns: study, run, variant, T (missing for a model without recursion), seed, condition, k, rmse, rmse_f,
    excess_mse, the floors and references beside them, parameters, flops, train_seconds, steps, and every other setting that
    varies between the runs (width, ...). A damaged run is left out, with a warning that names it and says why.

    >>> errors = load_results("runs/recursion")                                                     # doctest: +SKIP
    >>> errors.groupby(["variant", "T", "k"], dropna=False).excess_mse.mean()                       # doctest: +SKIP

    Raises FileNotFoundError if there is no such folder.
    """
    folder = Path(folder)
    _warn_of_misplaced_files(folder)
    index = TestedRuns(folder)
    runs = []
    for directory in run_directories(folder):
        mark = fingerprint(directory)
        tested = index.get(directory.name, mark)
        if tested is None and (loaded := _finished(directory)) is not None:
            tested = Tested.read(*loaded)
            index.put(mark, tested)
        if tested is not None:
            runs.append(tested)
    index.save()
    return errors_table(runs, _study_name(folder))


def load_study(
    folder: str | os.PathLike[str], runs: Sequence[str] | None = None, varies: Sequence[str] = ()
) -> StudyResults:
    """The tables of a study's finished runs, for figures; `runs` chooses some by name.

    Raises ValueError where runs of one (variant, T) differ in another setting than the seed and those that `varies` names,
    naming the setting.
    """
    folder = Path(folder)
    loaded = _finished_runs(folder, runs)
    name = _study_name(folder)
    if mixed := mixed_settings([config for _, config, _ in loaded], varies):
        raise ValueError(f"{folder}: {mixed}")
    return StudyResults(
        name=name,
        note=str(read_study(folder).get("note", "")),
        source=folder.as_posix(),
        errors=errors_table([Tested.read(*run) for run in loaded], name),
        descent=_tables(loaded, name, DESCENT),
        training=_tables(loaded, name, METRICS),
        learning=_tables(loaded, name, LEARNING),
        test_time=_tables(loaded, name, TEST_TIME),
        circuits=_tables(loaded, name, CIRCUITS),
    )


def load_run(path: str | os.PathLike[str], step: int | None = None) -> RunResults:
    """A finished run: `.model`, `.config`, `.prior`, `.traces`, and its tables; with the weights of a snapshot if a
    training `step` is given.

    Raises FileNotFoundError, or ValueError with the file and the reason if the run is unfinished, damaged, was exported
    without its weights, or has no snapshot of the step.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such run directory")
    try:
        provenance = read_provenance(directory)
        if provenance is None:
            raise ValueError(f"{directory}: the run is not finished")
        if WEIGHTS not in provenance["files"]:
            raise ValueError(f"{directory}: exported without weights; take the first seed of its variant, or runs/")
        for name in provenance["files"]:
            read_checked(directory, provenance, name)
        config = read_config(directory)
        model = InContextRegressor(config.model)
        model.load_state_dict(
            safetensors.torch.load(read_checked(directory, provenance, WEIGHTS))
            if step is None
            else _snapshot(directory, provenance, step)
        )
        return RunResults(
            model=model.eval(),
            config=config,
            provenance=provenance,
            training=read_table(directory, provenance, METRICS),
            evaluation=read_table(directory, provenance, EVALUATION),
            descent=read_table(directory, provenance, DESCENT),
            stored_traces=read_table(directory, provenance, TRACES) if TRACES in provenance["files"] else None,
            learning=read_table(directory, provenance, LEARNING) if LEARNING in provenance["files"] else None,
        )
    except Damaged as error:
        raise ValueError(f"{directory}: {error.reason}") from error


def _snapshot(directory: Path, provenance: Mapping[str, Any], step: int) -> dict[str, torch.Tensor]:
    """The weights that a run had after so many training steps."""
    if SNAPSHOTS not in provenance["files"]:
        made = "are made by TrainingConfig(snapshots=...), and not exported"
        raise ValueError(f"step: expected a run with snapshots, which {made}; got {directory}, which has none")
    tensors = safetensors.torch.load(read_checked(directory, provenance, SNAPSHOTS))
    steps = sorted({int(name.partition("/")[0]) for name in tensors})
    if step not in steps:
        raise ValueError(f"step: expected one of {', '.join(map(str, steps))}, got {step}")
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{step}/")}


def mixed_settings(configs: Iterable[RunConfig], varies: Sequence[str] = ()) -> str:
    """A sentence that names a setting, other than the seed and `varies`, in which runs of one (variant, T) differ; else
    empty.
    """
    first: dict[tuple[str, int | None], dict[str, Any]] = {}
    for config in configs:
        known = first.setdefault((config.variant, config.recursions), config.flat())
        for key, value in config.flat().items():
            if known[key] != value and key not in varies:
                depth = "" if config.recursions is None else f", T = {config.recursions}"
                return (
                    f"{key}: expected one value for all runs of {config.variant}{depth} that share a curve, "
                    f"got {known[key]} and {value}"
                )
    return ""


_Loaded = tuple[Path, RunConfig, dict[str, Any]]


def _finished_runs(folder: Path, names: Sequence[str] | None = None) -> list[_Loaded]:
    _warn_of_misplaced_files(folder)
    directories = [path for path in run_directories(folder) if names is None or path.name in names]
    return [loaded for directory in directories if (loaded := _finished(directory)) is not None]


def _finished(directory: Path) -> _Loaded | None:
    """A finished run, checked; None, with a warning, for a damaged one."""
    try:
        found = find_run(directory)
        return None if found is None else (directory, *found)
    except Damaged as error:
        warnings.warn(f"left out a damaged run, {error}", stacklevel=4)
        return None


def _warn_of_misplaced_files(folder: Path) -> None:
    try:
        names = check_study(folder).get("runs", [])
    except Damaged as error:
        warnings.warn(f"{error}; the runs are those that are found", stacklevel=4)
        return
    for name in names:
        if (folder / name).is_file():
            warnings.warn(f"left out a damaged run, {name}: is a file, where a run directory should be", stacklevel=4)


def _study_name(folder: Path) -> str:
    return read_study(folder).get("name", folder.resolve().name)


def _tables(loaded: Sequence[_Loaded], study: str, name: str) -> pd.DataFrame:
    """A table of all runs that have it."""
    return _concatenate([_labelled(run, study, name) for run in loaded if name in run[2]["files"]])


def _labelled(run: _Loaded, study: str, name: str) -> pd.DataFrame:
    """A table of a run, with the columns study, run, variant, T and seed in front."""
    directory, config, provenance = run
    table = read_table(directory, provenance, name).drop(columns=["variant", "T", "seed"], errors="ignore")
    # as an export keeps them, so that figures are the same from both
    rounded = seven_digits(table)
    table = rounded.astype({column: "float64" for column, kind in rounded.dtypes.items() if kind == "float32"})
    labels = label(config, len(table))
    labels.insert(0, "run", directory.name)
    labels.insert(0, "study", study)
    return pd.concat([labels, table], axis=1)


def label(config: RunConfig, rows: int) -> pd.DataFrame:
    """The columns variant, T (nullable) and seed of a run, for so many rows."""
    return pd.DataFrame(
        {
            "variant": pd.Series([config.variant] * rows, dtype="str"),
            "T": pd.array([config.recursions] * rows, dtype="Int64"),
            "seed": pd.Series([config.seed] * rows, dtype="int64"),
        }
    )


def _concatenate(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    # an empty table, such as the descent of a model without energy, would only blur the types of the others
    filled = [table for table in tables if len(table)]
    if not filled:
        return tables[0] if tables else pd.DataFrame()
    return pd.concat(filled, ignore_index=True)
