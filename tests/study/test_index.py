"""The index of checked runs: quick, never believed too much, and no loss when it is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from many_runs import copies
from tiny_runs import CODE, tiny_config

from energylab.study import index as index_module
from energylab.study import load_results, store
from energylab.study.status import status

RUNS = index_module.WORTHWHILE + 5


@pytest.fixture
def many(finished: Path, tmp_path: Path, monkeypatch) -> Path:
    """A study of some more runs than are worth an index; what was written just now counts as settled."""
    monkeypatch.setattr(index_module, "_SETTLED", -1e6)
    copies(finished / tiny_config().name, tmp_path / "many", range(RUNS))
    return tmp_path / "many"


@pytest.fixture
def indexed(many: Path) -> Path:
    load_results(many)
    status(many, CODE)
    assert {path.name for path in (many / ".index").iterdir()} == {"errors", "runs"}
    return many


def states(folder: Path) -> dict[str, str]:
    return {run.run: run.state for run in status(folder, CODE).runs}


def test_the_index_gives_what_the_checks_gave(many: Path, monkeypatch) -> None:
    errors, found = load_results(many), status(many, CODE)
    assert errors["run"].nunique() == RUNS
    assert set(errors["seed"]) == set(range(RUNS))
    monkeypatch.setattr(store, "find_run", lambda directory: pytest.fail(f"read {directory} again"))
    pd.testing.assert_frame_equal(load_results(many), errors, check_exact=True)
    assert status(many, CODE) == found
    assert {run.state for run in found.runs} == {"finished"}


@pytest.mark.parametrize("name", [store.EVALUATION, store.PROVENANCE, store.WEIGHTS])
def test_a_change_that_keeps_size_and_time_is_noticed(indexed: Path, name: str) -> None:
    victim = indexed / tiny_config(seed=7).name
    path = victim / name
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert states(indexed)[victim.name] == "damaged"
    with pytest.warns(UserWarning, match=f"{victim.name}: {name}"):
        assert set(load_results(indexed)["seed"]) == {*range(RUNS)} - {7}


def test_new_and_removed_runs_are_seen(indexed: Path, finished: Path) -> None:
    (indexed / tiny_config(seed=3).name).rename(indexed.parent / "elsewhere")
    (indexed / tiny_config(seed=4).name).rename(indexed / f"{tiny_config(seed=4).name}.damaged-1")
    copies(finished / tiny_config().name, indexed, [RUNS])
    assert set(load_results(indexed)["seed"]) == {*range(RUNS + 1)} - {3, 4}
    assert set(states(indexed).values()) == {"finished"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-20],
        lambda content: b"",
        lambda content: content[:200] + bytes([content[200] ^ 4]) + content[201:],
        lambda content: content.replace(b"energylab index 1", b"energylab index 2"),
    ],
)
def test_a_damaged_index_is_made_anew(indexed: Path, damage) -> None:
    errors, found = load_results(indexed), states(indexed)
    files = sorted((indexed / ".index").iterdir())
    sound = [path.read_bytes() for path in files]
    for path, content in zip(files, sound, strict=True):
        path.write_bytes(damage(content))
    pd.testing.assert_frame_equal(load_results(indexed), errors, check_exact=True)
    assert states(indexed) == found
    assert [path.read_bytes() for path in files] == sound


def test_swapped_files_of_the_index_are_not_believed(indexed: Path) -> None:
    errors, found = load_results(indexed), states(indexed)
    first, second = sorted((indexed / ".index").iterdir())
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    pd.testing.assert_frame_equal(load_results(indexed), errors, check_exact=True)
    assert states(indexed) == found


def test_what_changed_just_now_is_not_indexed(finished: Path, tmp_path: Path) -> None:
    copies(finished / tiny_config().name, tmp_path / "many", range(RUNS))
    load_results(tmp_path / "many")
    assert not (tmp_path / "many/.index").exists()


def test_a_small_study_has_no_index(finished: Path, monkeypatch) -> None:
    monkeypatch.setattr(index_module, "_SETTLED", -1e6)
    load_results(finished)
    status(finished, CODE)
    assert not (finished / ".index").exists()


def test_a_listing_from_the_index_waits_for_no_library() -> None:
    code = "import sys, energylab.cli, energylab.study.status; print({'torch', 'pandas', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
