"""Results on disk: written whole or not at all, checked whenever they are read, and never executed.

A run directory `<results>/<study>/<run>/` holds

    config.json          the settings, as asked for
    metrics.parquet      a row each logged training step
    evaluation.parquet   a row each (condition, k)
    descent.parquet      energies and steps inside every CEM layer, summarised: a row each (layer, step, token)
    traces.parquet       the same, raw, for a few tasks
    test_time.parquet    errors with other T' than in training: a row each T', where the config asks for it
    weights.safetensors
    state.pt             what training continues from, and state.previous.pt, the one before
    progress.json        where the run is, for `energylab status`
    provenance.json      written last: a run is finished if and only if it is there, and its checksums hold

Files are JSON, Parquet, safetensors and PyTorch states read with `weights_only=True`: reading executes nothing.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import safetensors.torch
import torch

from energylab.analysis.descent import record
from energylab.models import InContextRegressor
from energylab.study.config import RunConfig, Study
from energylab.tasks import GaussianProcessPrior

SCHEMA = 1

CONFIG, METRICS, EVALUATION = "config.json", "metrics.parquet", "evaluation.parquet"
DESCENT, TRACES, WEIGHTS = "descent.parquet", "traces.parquet", "weights.safetensors"
TEST_TIME = "test_time.parquet"
STATE, PREVIOUS_STATE = "state.pt", "state.previous.pt"
PROGRESS, PROVENANCE, STUDY = "progress.json", "provenance.json", "study.json"

_SET_ASIDE = re.compile(r"\.damaged-\d+$")

# What every row of `load_results` has, before the columns of the evaluation and the settings that vary.
_RESULT_COLUMNS = ("study", "run", "variant", "T", "seed", "condition", "k", "rmse", "rmse_f", "excess_mse")
_COST_COLUMNS = ("parameters", "flops", "train_seconds")


class Damaged(Exception):
    """A directory whose content is not what was written there; the message names it and says why."""

    def __init__(self, directory: Path, reason: str):
        super().__init__(f"{directory.name}: {reason}")
        self.reason = reason


class FromNewerVersion(Damaged):
    """A directory that a newer energylab wrote: sound, but not readable here."""


# --- writing ---------------------------------------------------------------------------------------------------------


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file as one step: after a crash, or a full disk, the old content or the new is there, never a part."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())


def write_table(path: Path, table: pd.DataFrame) -> None:
    write_bytes(path, _parquet(table))


def write_weights(path: Path, model: torch.nn.Module) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
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


def write_provenance(directory: Path, facts: Mapping[str, Any], files: Iterable[str]) -> None:
    """Declare a run finished: its facts and the checksum of each of its files, under a checksum of their own."""
    checksums = {name: _checksum((directory / name).read_bytes()) for name in files}
    data = {"schema": SCHEMA, "state": "finished", **facts, "files": checksums}
    write_json(directory / PROVENANCE, {**data, "sha256": _digest(data)})


def write_study(folder: Path, study: Study, knobs: Mapping[str, Any]) -> None:
    """Record what the latest command asked for: the runs by name, and the knobs that made them."""
    data = {"name": study.name, "note": study.note, "knobs": dict(knobs), "runs": [run.name for run in study.runs]}
    write_json(folder / STUDY, {"schema": SCHEMA, **data})


def set_aside(directory: Path) -> Path:
    """Rename what is damaged to `<name>.damaged-1` (or -2, ...): nothing is deleted. Returns the new path."""
    number = 1
    while (target := directory.with_name(f"{directory.name}.damaged-{number}")).exists():
        number += 1
    directory.rename(target)
    _sync_folder(directory.parent)
    return target


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files of a process that died while writing. Only the owner of the run may call this."""
    for path in directory.glob(".*.tmp-*"):
        path.unlink(missing_ok=True)


def _parquet(table: pd.DataFrame) -> bytes:
    """In as few bytes as Parquet allows: most of a small file would be metadata, which `read_table` does without."""
    arrow = pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(None)
    words = [column for column, kind in table.dtypes.items() if kind == "str"]  # floats hardly repeat
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        arrow,
        buffer,
        compression="zstd",
        compression_level=9,
        use_dictionary=words,
        write_statistics=False,
        store_schema=False,
    )
    return buffer.getvalue()


def _checksum(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# --- reading one run -------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a schema that this version knows. Raises Damaged, naming directory, file and reason."""
    try:
        data = json.loads(path.read_bytes().decode())
    except FileNotFoundError as error:
        raise Damaged(path.parent, f"{path.name} is missing") from error
    except OSError as error:
        raise Damaged(path.parent, f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Damaged(path.parent, f"{path.name} is not readable JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise Damaged(path.parent, f"{path.name} has no schema version, so energylab did not write it")
    if data["schema"] > SCHEMA:
        raise FromNewerVersion(
            path.parent,
            f"{path.name} was written by a newer energylab (schema {data['schema']}; this one reads {SCHEMA})",
        )
    return data


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


def read_provenance(directory: Path) -> dict[str, Any] | None:
    """The facts of a finished run; None for a run that is not finished."""
    if not (directory / PROVENANCE).exists():
        return None
    data = read_json(directory / PROVENANCE)
    checksum = data.pop("sha256", None)
    if checksum != _digest(data):
        raise Damaged(directory, f"{PROVENANCE} does not match its own checksum")
    return data


def read_checked(directory: Path, provenance: Mapping[str, Any], name: str) -> bytes:
    """The bytes of a file of a finished run, checked against the provenance."""
    if name not in provenance["files"]:
        raise Damaged(directory, f"{PROVENANCE} lists no {name}")
    try:
        content = (directory / name).read_bytes()
    except OSError as error:
        raise Damaged(directory, f"{name} cannot be read: {error.strerror}") from error
    expected = provenance["files"][name]
    if len(content) != expected["bytes"]:
        raise Damaged(directory, f"{name} has {len(content)} bytes instead of {expected['bytes']}")
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise Damaged(directory, f"{name} does not match its checksum")
    return content


def read_table(directory: Path, provenance: Mapping[str, Any], name: str) -> pd.DataFrame:
    content = read_checked(directory, provenance, name)
    try:
        table = pd.read_parquet(io.BytesIO(content), engine="pyarrow")
    except (OSError, ValueError) as error:
        raise Damaged(directory, f"{name} is not readable Parquet ({_one_line(error)})") from error
    return table.astype({"T": "Int64"}) if "T" in table else table


def check_run(directory: Path) -> dict[str, Any] | None:
    """The provenance of a finished run after every file was checked; None for a run to start or to continue.

    Raises Damaged where the directory holds something else than what a run wrote.
    """
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
    read_config(directory)
    for name in provenance["files"]:
        read_checked(directory, provenance, name)
    return provenance


def read_state(directory: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The newest sound training state, and a sentence if a damaged one had to be passed over.

    A damaged file is renamed, so that the next save keeps the sound one. Raises Damaged if there are states, and all
    are damaged.
    """
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
            complaints.append(f"{name} is damaged ({_one_line(error)})")
            continue
        if complaints:
            set_aside(directory / STATE)
            return state, f"{complaints[0]}; continued from {name}, step {state['trainer']['step']}"
        return state, None
    if complaints:
        raise Damaged(directory, " and ".join(complaints))
    return None, None


def read_progress(directory: Path) -> dict[str, Any]:
    """Where a run says that it is; empty if it says nothing readable. Never trusted for results."""
    try:
        return read_json(directory / PROGRESS)
    except Damaged:
        return {}


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
    training: pd.DataFrame
    test_time: pd.DataFrame = field(default_factory=pd.DataFrame)
    """A row each (run, T' at test time); empty where no run was tested so."""


def run_directories(folder: Path) -> list[Path]:
    """The run directories of a study's folder, in the order of its latest command, others after them by name."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of results")
    order = {name: index for index, name in enumerate(read_study(folder).get("runs", []))}
    found = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    found = [path for path in found if not _SET_ASIDE.search(path.name)]
    found = [path for path in found if path.name in order or (path / CONFIG).exists() or (path / PROVENANCE).exists()]
    return sorted(found, key=lambda path: (order.get(path.name, len(order)), path.name))


def read_study(folder: Path) -> dict[str, Any]:
    """What the latest command wrote of the study; empty if missing or damaged, since runs stand for themselves."""
    try:
        data = read_json(folder / STUDY)
    except Damaged:
        return {}
    return data if isinstance(data.get("runs"), list) and isinstance(data.get("name"), str) else {}


def load_results(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """The test errors of a study, tidy: one row a (run, condition, k), finished runs only.

    Columns: study, run, variant, T (missing for a model without recursion), seed, condition, k, rmse, rmse_f,
    excess_mse, the floors and references beside them, parameters, flops, train_seconds, and every setting that varies
    between the runs (steps, width, ...). A damaged run is left out, with a warning that names it and says why.

    >>> errors = load_results("runs/recursion")                                                     # doctest: +SKIP
    >>> errors.groupby(["variant", "T", "k"], dropna=False).excess_mse.mean()                       # doctest: +SKIP

    Raises FileNotFoundError if there is no such folder.
    """
    folder = Path(folder)
    return _errors(_finished_runs(folder), _study_name(folder))


def load_study(folder: str | os.PathLike[str], runs: Sequence[str] | None = None) -> StudyResults:
    """The tables of a study's finished runs, for figures; `runs` chooses some by name.

    Raises ValueError where runs of one (variant, T) differ in another setting than the seed, naming the setting.
    """
    folder = Path(folder)
    loaded = _finished_runs(folder, runs)
    name = _study_name(folder)
    if mixed := mixed_settings([config for _, config, _ in loaded]):
        raise ValueError(f"{folder}: {mixed}")
    return StudyResults(
        name=name,
        note=str(read_study(folder).get("note", "")),
        source=folder.as_posix(),
        errors=_errors(loaded, name),
        descent=_concatenate([_labelled(run, name, DESCENT) for run in loaded]),
        training=_concatenate([_labelled(run, name, METRICS) for run in loaded]),
        test_time=_concatenate([_labelled(run, name, TEST_TIME) for run in loaded if TEST_TIME in run[2]["files"]]),
    )


def load_run(path: str | os.PathLike[str]) -> RunResults:
    """A finished run: `.model`, `.config`, `.prior`, `.traces`, and its tables.

    Raises FileNotFoundError, or ValueError with the file and the reason if the run is unfinished, damaged, or was
    exported without its weights.
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
        model.load_state_dict(safetensors.torch.load(read_checked(directory, provenance, WEIGHTS)))
        return RunResults(
            model=model.eval(),
            config=config,
            provenance=provenance,
            training=read_table(directory, provenance, METRICS),
            evaluation=read_table(directory, provenance, EVALUATION),
            descent=read_table(directory, provenance, DESCENT),
            stored_traces=read_table(directory, provenance, TRACES) if TRACES in provenance["files"] else None,
        )
    except Damaged as error:
        raise ValueError(f"{directory}: {error.reason}") from error


def mixed_settings(configs: Iterable[RunConfig]) -> str:
    """A sentence that names a setting, other than the seed, in which runs of one (variant, T) differ; else empty."""
    first: dict[tuple[str, int | None], dict[str, Any]] = {}
    for config in configs:
        known = first.setdefault((config.variant, config.recursions), config.flat())
        for key, value in config.flat().items():
            if known[key] != value:
                depth = "" if config.recursions is None else f", T = {config.recursions}"
                return (
                    f"{key}: expected one value for all runs of {config.variant}{depth} that share a curve, "
                    f"got {known[key]} and {value}"
                )
    return ""


_Loaded = tuple[Path, RunConfig, dict[str, Any]]


def _finished_runs(folder: Path, names: Sequence[str] | None = None) -> list[_Loaded]:
    loaded = []
    for name in read_study(folder).get("runs", []):
        if (folder / name).is_file():
            warnings.warn(f"left out a damaged run, {name}: is a file, where a run directory should be", stacklevel=3)
    for directory in run_directories(folder):
        if names is not None and directory.name not in names:
            continue
        try:
            if (provenance := check_run(directory)) is not None:
                loaded.append((directory, read_config(directory), provenance))
        except Damaged as error:
            warnings.warn(f"left out a damaged run, {error}", stacklevel=3)
    return loaded


def _study_name(folder: Path) -> str:
    return read_study(folder).get("name", folder.resolve().name)


def _errors(loaded: Sequence[_Loaded], study: str) -> pd.DataFrame:
    flats = [config.flat() for _, config, _ in loaded]
    varying = [key for key in (flats[0] if flats else ()) if len({json.dumps(flat[key]) for flat in flats}) > 1]
    tables = []
    for run, flat in zip(loaded, flats, strict=True):
        table = _labelled(run, study, EVALUATION)
        for key in _COST_COLUMNS:
            table[key] = run[2][key]
        for key in varying:
            value = flat[key]
            table[key] = ", ".join(map(str, value)) if isinstance(value, list) else value
        tables.append(table[[*_RESULT_COLUMNS, *(key for key in table if key not in _RESULT_COLUMNS)]])
    if not tables:
        return pd.DataFrame(columns=[*_RESULT_COLUMNS, *_COST_COLUMNS]).astype({"T": "Int64"})
    return _concatenate(tables)


def _labelled(run: _Loaded, study: str, name: str) -> pd.DataFrame:
    """A table of a run, with the columns study, run, variant, T and seed in front."""
    directory, config, provenance = run
    table = read_table(directory, provenance, name).drop(columns=["variant", "T", "seed"], errors="ignore")
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


# --- export ----------------------------------------------------------------------------------------------------------

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
    study = read_study(folder)
    if not study:
        raise ValueError(f"{folder / STUDY}: missing or damaged; `energylab run` writes it again")
    if output.exists():
        foreign = [path.name for path in run_directories(output) if path.name not in study["runs"]]
        if foreign:
            raise ValueError(
                f"output: expected a folder without runs of other settings, got {output} with {foreign[0]}"
                + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else "")
            )
    finished: list[_Loaded] = []
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
        write_json(output / STUDY, {**study, "runs": [name for name in study["runs"] if name in kept]})
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) if output.exists() else 0
    return Exported(tuple(copied), tuple(unchanged), tuple(missing), tuple(damaged), size)


def _export_run(source: Path, target: Path, provenance: Mapping[str, Any], whole: bool) -> bool:
    """Whether anything was copied: False if `target` already holds the same files."""
    tables = [name for name in (METRICS, EVALUATION, DESCENT, TEST_TIME) if name in provenance["files"]]
    contents = {name: read_checked(source, provenance, name) for name in (CONFIG, *([WEIGHTS] if whole else []))}
    # written anew, so that those of an older version become as small
    contents |= {name: _parquet(read_table(source, provenance, name)) for name in tables}
    if target.exists():
        with contextlib.suppress(Damaged):
            present = check_run(target)
            if present is not None and present["files"] == {name: _checksum(contents[name]) for name in contents}:
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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
