"""Full disks and folders that may not be written: one line, the last good state intact, and then on."""

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_runs import assert_same_results, tiny_config

from energylab.cli import main
from energylab.study import load_results, store
from energylab.study.claim import CLAIM

STUDY = """
from tiny_runs import tiny_config

from energylab.study import Study


def study(seeds: int = 3) -> Study:
    return Study("tiny", [tiny_config(seed=seed) for seed in range(seeds)])
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount, or mount again with other options, a file system in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"this user cannot mount: {done.stderr.strip()}")
        return disk

    try:
        yield mount
    finally:
        while os.path.ismount(disk):
            subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies/tiny.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def energylab(command: str) -> int:
    return main(shlex.split(command))


@pytest.mark.parametrize("kilobytes_left", [8, 150])
def test_a_full_disk_stops_the_study_with_one_line(
    project: Path, small_disk, finished: Path, capsys, kilobytes_left: int
) -> None:
    """With room for almost nothing, and with room for the first states but not for the results."""
    disk = small_disk("size=4m")
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(10_000_000))
    os.truncate(filler, filler.stat().st_size - kilobytes_left * 1000)
    command = "run tiny --executor inprocess --results disk/runs"
    assert energylab(command) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    (line,) = [line for line in captured.out.splitlines() if line.startswith("  ")]
    assert "No space left on device" in line
    assert f"go on with: energylab {command}" in captured.out
    # no run after the first was tried
    assert [path.name for path in Path("disk/runs/tiny").glob("*-seed[12]-*")] == []
    assert not list(disk.rglob("*.tmp-*"))
    assert not list(disk.rglob("claim.json"))

    filler.unlink()
    assert energylab(command) == 0
    assert "3 of 3 runs are finished" in capsys.readouterr().out
    for seed in (0, 1):
        assert_same_results(finished / tiny_config(seed=seed).name, disk / "runs/tiny" / tiny_config(seed=seed).name)


def test_a_folder_that_is_read_only_is_refused_and_read(project: Path, small_disk, capsys) -> None:
    disk = small_disk("size=8m")
    assert energylab("run tiny --executor inprocess --seeds 1 --results disk") == 0
    small_disk("remount,ro")
    capsys.readouterr()
    assert energylab("run tiny --executor inprocess --results disk") == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "energylab: --results: expected a folder to write in, got disk/tiny: disk/tiny: Read-only file system\n"
    )
    assert energylab("status tiny --results disk") == 0
    assert load_results(disk / "tiny")["run"].nunique() == 1


def test_a_disk_that_becomes_read_only_stops_the_study(project: Path, small_disk, capsys, monkeypatch) -> None:
    disk = small_disk("size=8m")
    write = store.write_state

    def later_read_only(directory: Path, state) -> None:
        if state["trainer"]["step"] == 10:
            small_disk("remount,ro")
        write(directory, state)

    command = "run tiny --executor inprocess --seeds 2 --results disk"
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_state", later_read_only)
        assert energylab(command) == 1
    out = capsys.readouterr().out
    assert "Read-only file system" in out
    assert not (disk / "tiny" / tiny_config(seed=1).name).exists()
    state, complaint = store.check_states(disk / "tiny" / tiny_config().name)
    assert state is not None
    assert state["trainer"]["step"] == 5
    assert complaint is None
    small_disk("remount,rw")
    (disk / "tiny" / tiny_config().name / CLAIM).unlink()  # of a process that lives on: this one
    assert energylab(command) == 0
