"""Which code trains, and whether a stored run is by code that could give other numbers."""

import hashlib
import importlib.metadata
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import energylab

_NOT_NUMERICAL = ("bench", "plotting", "study", "__main__.py", "cli", "inspection.py", "project.py")
"""What is in the package and has no part in the numbers of a run."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """Which code trains: the version of the package, and the commit if it runs from a git checkout."""

    version: str
    commit: str | None
    dirty: bool | None
    """Whether the package differs from the commit."""
    sources: str | None = None
    """A checksum of the files that have a part in the numbers of a run: equal ones give equal numbers, as far as it is
    for energylab."""


def current_code() -> Code:
    """The code that is about to run. Ask once, before a study starts: files may change while it trains."""
    package = Path(energylab.__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    version, sources = importlib.metadata.version("energylab"), _sources(package)
    # an environment inside somebody's repository would report that one's commit
    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return Code(version=version, commit=None, dirty=None, sources=sources)
    commit, dirty = git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", "."))
    return Code(version=version, commit=commit, dirty=dirty, sources=sources)


def sessions(provenance: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which code trained a run, session by session; of older runs, only the last session's is known."""
    return provenance.get("history") or [provenance.get("energylab") or {}]


def other_code(trained_by: list[dict[str, Any]], code: Code) -> str:
    """A mark for a run that code other than `code` has trained, such as "by energylab 0.1.0 at 10e92020d6b7"; else
    empty.

    Other is what has other `sources`; where those were not recorded, what has another version or commit.
    """
    others = dict.fromkeys(_label(session) for session in trained_by if not _same(session, code))
    return f"by energylab {', '.join(others)}" if others else ""


def _same(session: Mapping[str, Any], code: Code) -> bool:
    if session.get("sources") and code.sources:
        return session["sources"] == code.sources and session.get("version") == code.version
    unchanged = not session.get("dirty") and not code.dirty
    return unchanged and (session.get("version"), session.get("commit")) == (code.version, code.commit)


def _label(session: Mapping[str, Any]) -> str:
    commit = session.get("commit")
    place = "" if commit is None else f" at {commit[:12]}"
    return (
        f"{session.get('version') or 'of an unknown version'}{place}{' with changes' if session.get('dirty') else ''}"
    )


def _sources(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in _NOT_NUMERICAL:
            digest.update(f"{name.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
