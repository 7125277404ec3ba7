"""One owner a run: an atomic claim with a heartbeat, so that two processes never train the same run."""

import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Self

CLAIM = "claim.json"

HEARTBEAT = 15.0
"""Seconds between two signs of life of an owner."""
STALE_AFTER = 180.0
"""Seconds without a sign of life after which the claim of another machine is taken over. On the same machine, it is
taken over as soon as the process is gone."""


class Claimed(Exception):
    """Another living process owns the run."""


class OwnershipLost(Exception):
    """This process was silent for so long that another took its run over."""


class Claim:
    """The ownership of a run directory, as a context manager.

    The claim is a file that appears whole (a hard link either succeeds or finds another there), which also holds on
    network file systems; a thread renews its time of change. Raises Claimed on entry if a living process owns the run.
    """

    def __init__(self, directory: Path):
        self.path = directory / CLAIM
        self.token = uuid.uuid4().hex
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        content = {"token": self.token, "pid": os.getpid(), "host": socket.gethostname(), "born": _born(os.getpid())}
        own = self.path.with_name(f".{CLAIM}.{self.token}")
        own.write_text(json.dumps(content))
        try:
            self._take(own)
        finally:
            own.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._beat, name="claim", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._is_mine():
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise OwnershipLost if another process has taken the run over."""
        if not self._is_mine():
            raise OwnershipLost(f"another process took over {self.path.parent.name}")

    def _take(self, own: Path) -> None:
        try:
            _create(self.path, own)
            return
        except FileExistsError:
            pass
        guard = self.path.with_name(f"{CLAIM}.takeover")
        owner = living_owner(self.path.parent)
        if owner is not None:
            raise Claimed(owner)
        try:
            _create(guard, own)  # of several that find the claim stale, one takes it over
        except FileExistsError:
            if (_age(guard) or 0.0) > STALE_AFTER:
                guard.unlink(missing_ok=True)
            raise Claimed("a process that is taking it over from a dead one") from None
        try:
            if (owner := living_owner(self.path.parent)) is not None:
                raise Claimed(owner)
            os.replace(own, self.path)
        finally:
            guard.unlink(missing_ok=True)

    def _is_mine(self) -> bool:
        return _read(self.path).get("token") == self.token

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            if self._is_mine():
                os.utime(self.path)


def living_owner(directory: Path) -> str | None:
    """Who owns the run, in words; None if nobody does, or its owner is dead."""
    path = directory / CLAIM
    age = _age(path)
    if age is None:
        return None
    owner = _read(path)
    pid, host = owner.get("pid"), owner.get("host")
    if host == socket.gethostname() and isinstance(pid, int):
        alive = _born(pid) == owner["born"] if owner.get("born") is not None else _exists(pid)
        return f"process {pid}" if alive else None
    return f"process {pid} on {host}" if age <= STALE_AFTER else None


def _create(path: Path, content: Path) -> None:
    """Make `path` a copy of `content` in one step; FileExistsError if it is there already."""
    try:
        os.link(content, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        with open(path, "x") as file:
            file.write(content.read_text())


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _age(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _born(pid: int) -> str | None:
    """When a living process started, in ticks since boot, where the system tells: process numbers come back."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]  # a zombie is dead: only its parent does not know yet
