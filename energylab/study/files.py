"""The files of a run: written whole or not at all, checked whenever they are read, and never executed.

A run directory `<results>/<study>/<run>/` holds

    config.json          the settings, as asked for
    metrics.parquet      a row each logged training step
    evaluation.parquet   a row each (condition, k)
    descent.parquet      energies and steps inside every CEM layer, summarised: a row each (layer, step, token)
    traces.parquet       the same, raw, for a few tasks
    test_time.parquet    errors with other T' than in training: a row each T', where the config asks for it
    weights.safetensors
    learning.parquet, snapshots.safetensors
                         descent and weights while it learned, where its config asks for them
    state.pt             what training continues from, and state.previous.pt, the one before
    progress.json        where the run is, for `energylab status`
    provenance.json      written last: a run is finished if and only if it is there, and its checksums hold

Files are JSON, Parquet, safetensors and PyTorch states read with `weights_only=True`: reading executes nothing. This
room knows bytes and JSON alone, so that `energylab status` need not wait for PyTorch; the others are in `store`.
"""

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energylab.study.config import Study

SCHEMA = 1

CONFIG, METRICS, EVALUATION = "config.json", "metrics.parquet", "evaluation.parquet"
DESCENT, TRACES, WEIGHTS = "descent.parquet", "traces.parquet", "weights.safetensors"
TEST_TIME, CIRCUITS = "test_time.parquet", "circuits.parquet"
LEARNING, SNAPSHOTS = "learning.parquet", "snapshots.safetensors"
STATE, PREVIOUS_STATE = "state.pt", "state.previous.pt"
PROGRESS, PROVENANCE, STUDY = "progress.json", "provenance.json", "study.json"

# A name of a run, or of a file of a run, that a file may give: it stays in its folder.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+-]*")

_SET_ASIDE = re.compile(r"\.damaged-\d+$")

# What a table of results needs of a provenance.
COSTS = ("parameters", "flops", "train_seconds")


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
    except OSError as error:  # named by what the reader knows, not by the temporary file, or not at all
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(data, indent=2, allow_nan=False) + "\n").encode())


def write_signed(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object under a checksum of its own."""
    write_json(path, {**data, "sha256": digest(data)})


def write_provenance(directory: Path, facts: Mapping[str, Any], files: Iterable[str]) -> None:
    """Declare a run finished: its facts and the checksum of each of its files, under a checksum of their own."""
    checksums = {name: checksum((directory / name).read_bytes()) for name in files}
    write_signed(directory / PROVENANCE, {"schema": SCHEMA, "state": "finished", **facts, "files": checksums})


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


def checksum(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(data: Mapping[str, Any]) -> str:
    """The checksum of a JSON object, however it is laid out."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# --- reading ---------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a schema that this version knows. Raises Damaged, naming directory, file and reason."""
    try:
        data = json.loads(path.read_bytes().decode())
    except FileNotFoundError as error:
        raise Damaged(path.parent, f"{path.name} is missing") from error
    except OSError as error:
        raise Damaged(path.parent, f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(path.parent, f"{path.name} is not readable JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise Damaged(path.parent, f"{path.name} has no schema version, so energylab did not write it")
    if data["schema"] > SCHEMA:
        raise FromNewerVersion(
            path.parent,
            f"{path.name} was written by a newer energylab (schema {data['schema']}; this one reads {SCHEMA})",
        )
    return data


def read_signed(path: Path, since: str | None = None) -> dict[str, Any]:
    """A JSON object that matches its own checksum. Files without the key `since` are older than the checksum."""
    data = read_json(path)
    if since is not None and since not in data and "sha256" not in data:
        return data
    claimed = data.pop("sha256", None)
    if claimed != digest(data):
        raise Damaged(path.parent, f"{path.name} does not match its own checksum")
    return data


def read_provenance(directory: Path) -> dict[str, Any] | None:
    """The facts of a finished run; None for a run that is not finished."""
    if not (directory / PROVENANCE).exists():
        return None
    data = read_signed(directory / PROVENANCE)
    files = data.get("files")
    if not isinstance(files, dict) or not all(
        _PLAIN_NAME.fullmatch(name) and isinstance(entry, dict) and {"sha256", "bytes"} <= entry.keys()
        for name, entry in files.items()
    ):
        raise Damaged(directory, f"{PROVENANCE} has no list of the run's files")
    if data.get("run", directory.name) != directory.name:  # older ones do not say
        raise Damaged(directory, f"{PROVENANCE} belongs to {data['run']}")
    if not all(isinstance(data.get(key), int | float) for key in COSTS):
        raise Damaged(directory, f"{PROVENANCE} lacks one of {', '.join(COSTS)}")
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


def write_progress(directory: Path, data: Mapping[str, Any]) -> None:
    write_signed(directory / PROGRESS, {"schema": SCHEMA, "run": directory.name, **data})


def read_progress(directory: Path) -> dict[str, Any]:
    """Where a run says that it is; empty if it says nothing readable. Never trusted for results."""
    try:
        return check_progress(directory)
    except Damaged:
        return {}


def check_progress(directory: Path) -> dict[str, Any]:
    """Where a run says that it is; empty if it says nothing. Raises Damaged where what it said was changed."""
    if not (directory / PROGRESS).exists():
        return {}
    data = read_signed(directory / PROGRESS, since="run")
    if data.get("run", directory.name) != directory.name:
        raise Damaged(directory, f"{PROGRESS} belongs to {data['run']}")
    return data


# --- the file of a study ---------------------------------------------------------------------------------------------


def write_study(folder: Path, study: "Study", knobs: Mapping[str, Any]) -> None:
    """Record what the latest command asked for: the runs by name, and the knobs that made them."""
    runs = [run.name for run in study.runs]
    version = importlib.metadata.version("energylab")
    data = {"energylab": version, "name": study.name, "note": study.note, "knobs": dict(knobs), "runs": runs}
    write_signed(folder / STUDY, {"schema": SCHEMA, **data})


def read_study(folder: Path) -> dict[str, Any]:
    """What the latest command wrote of the study; empty if missing or damaged, since runs stand for themselves."""
    try:
        return check_study(folder)
    except Damaged:
        return {}


def check_study(folder: Path) -> dict[str, Any]:
    """What the latest command wrote of the study; empty if missing. Raises Damaged where it was changed since."""
    if not (folder / STUDY).exists():
        return {}
    data = read_signed(folder / STUDY, since="energylab")
    name, note, runs = data.get("name"), data.get("note"), data.get("runs")
    if not isinstance(name, str) or not isinstance(note, str) or not isinstance(runs, list):
        raise Damaged(folder, f"{STUDY} lacks one of name, note, runs")
    shared = data.get("shared", {})
    if not isinstance(shared, dict):
        raise Damaged(folder, f"{STUDY} has {shared!r:.80} as shared")
    for word, kind in [*((run, "run") for run in [*runs, *shared]), *((study, "study") for study in shared.values())]:
        if not isinstance(word, str) or not _PLAIN_NAME.fullmatch(word):
            raise Damaged(folder, f"{STUDY} names {word!r:.80}, which is no {kind}")
    return data


def run_directories(folder: Path, shared: bool = True) -> list[Path]:
    """The run directories of a study's folder, in the order of its latest command, others after them by name.

    With `shared`, also those that stand in the folder of another study beside it, where an export left them.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder of results")
    study = read_study(folder)
    order = {name: index for index, name in enumerate(study.get("runs", []))}
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    found = [folder / name for name in names if not _SET_ASIDE.search(name)]
    found = [path for path in found if path.name in order or (path / CONFIG).exists() or (path / PROVENANCE).exists()]
    if shared:
        elsewhere = [folder.parent / other / name for name, other in study.get("shared", {}).items()]
        found += [path for path in elsewhere if path.is_dir() and path.name not in names]
    return sorted(found, key=lambda path: (order.get(path.name, len(order)), path.name))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
