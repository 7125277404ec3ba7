"""An index of checked runs, so that ten thousand of them need not be read again to be listed.

It is kept in `.index` of a study's folder, can be deleted at any time, and is believed for a run only while every file
of the run has the size and the times of change that it had when its checksums were verified. The time of the last
change of an inode (ctime) is among them, which no program can set back. What changed a moment before the check is not
recorded, since a second change within the clock's resolution would leave no trace.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from energylab.study.files import write_bytes

_FORMAT = 1
WORTHWHILE = 50
"""Runs that were newly checked, before the index is written: fewer are read faster than a folder needs one more file."""
_SETTLED = 2.0
"""Seconds after its last change that a run is taken as still."""


def fingerprint(directory: Path) -> str | None:
    """Names, sizes and times of change of the files of a run; None if there is no directory, or it was changed just
    now."""
    files, newest = [], 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if not entry.is_dir():
                    facts = entry.stat()
                    files.append((entry.name, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))
                    newest = max(newest, facts.st_ctime_ns, facts.st_mtime_ns)
    except OSError:
        return None
    if newest > (time.time() - _SETTLED) * 1e9:
        return None
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()[:32]


class Index:
    """What was found in the finished runs of a study: for each, a fingerprint and what to remember, as JSON."""

    def __init__(self, folder: Path):
        self._path = folder / ".index" / "runs"
        self._known: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._new = 0
        with suppress(ValueError, TypeError, AttributeError):
            self._known = json.loads(read_sealed(self._path) or b"{}")

    def get(self, run: str, mark: str | None) -> Any:
        """What is remembered of a run, or None."""
        entry = self._known.get(run)
        if mark is None or entry is None or entry[0] != mark:
            return None
        self._kept[run] = entry
        return entry[1]

    def put(self, run: str, mark: str | None, facts: Any) -> None:
        if mark is not None:
            self._kept[run] = (mark, facts)
            self._new += 1

    def save(self) -> None:
        """Write what was got and put, if that saves anything. A folder that cannot be written needs no index."""
        if self._new >= WORTHWHILE:
            write_sealed(self._path, json.dumps(self._kept, separators=(",", ":")).encode())


def read_sealed(path: Path) -> bytes | None:
    """The content of a file of the index; None if it is missing, damaged or of another format."""
    try:
        seal, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content if seal == _seal(path, content) else None


def write_sealed(path: Path, content: bytes) -> None:
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, _seal(path, content) + b"\n" + content)


def _seal(path: Path, content: bytes) -> bytes:
    return f"energylab index {_FORMAT} {path.name} {hashlib.sha256(content).hexdigest()}".encode()
