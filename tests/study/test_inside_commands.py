"""The commands that look inside a run, as a reader types them: what they write, and bad input in one line."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pandas as pd
import pytest
from tiny_runs import tiny_config, train

from energylab.cli import main
from energylab.study import store

LOOKS = ("trace", "landscape", "sweep", "confidence")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs by what is the matter with them."""
    folder = tmp_path_factory.mktemp("runs")
    good, llama = tiny_config(snapshots=2), tiny_config(variant="Llama", steps=2)
    for config in (good, llama):
        assert train(config, folder / "sound").state == "finished"
    (folder / "good").symlink_to(folder / "sound" / good.name)
    (folder / "llama").symlink_to(folder / "sound" / llama.name)
    for kind in ("unfinished", "newer", "damaged"):
        directory = Path(shutil.copytree(folder / "sound" / good.name, folder / kind / good.name))
        (folder / f"{kind}-run").symlink_to(directory)
    (folder / "unfinished-run" / store.PROVENANCE).unlink()
    path = folder / "newer-run" / store.PROVENANCE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": store.SCHEMA + 1}))
    path = folder / "damaged-run" / store.WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])
    (folder / "file").write_text("mine")
    return folder


def real(runs: Path, name: str) -> str:
    """Without the link: a run's directory has the name of its config."""
    return str((runs / name).resolve())


BAD = [
    *((f"{look} unfinished-run", r"the run is not finished") for look in LOOKS),
    *((f"{look} newer-run", rf"was written by a newer energylab \(schema {store.SCHEMA + 1}") for look in LOOKS),
    *((f"{look} damaged-run", r"weights.safetensors has \d+ bytes instead of \d+") for look in LOOKS),
    *(
        (f"{look} llama", r"model: expected a layer that descends an energy \(cem\), got attention = llama")
        for look in LOOKS
    ),
    *((f"{look} file", r"RUN: expected the directory of a finished run, got '.*', which is none") for look in LOOKS),
    *((f"{look} good --output file", r"--output: expected a folder to write in, got file") for look in LOOKS),
    (
        "landscape good --layer 'block 7 mlp'",
        "layer: expected one of block 0 attention; block 0 mlp, got 'block 7 mlp'",
    ),
    ("landscape good --position 4", "position: expected 0 to 3, a pair of the task, got 4"),
    ("landscape good --position=-1 ", "position: expected 0 to 3, a pair of the task, got -1"),
    ("landscape good --position 1.5", "--position: expected INT, got '1.5'"),
    ("landscape good --plane flat", "--plane: expected one of 'trajectory', 'hessian', 'random', got 'flat'"),
    ("landscape good --size 1", "--size: expected an integer of at least 2, got 1"),
    ("landscape good --task=-1", "--task: expected an integer of at least 0, got -1"),
    ("landscape good --step 3", "step: expected one of 0, 1, 20, got 3"),
    ("sweep good --recursions 0..3", "--recursions: expected numbers from 1 to 1024, as 1..16 or 1,2,4, got '0..3'"),
    ("sweep good --recursions 5..2", "--recursions: expected numbers from 1 to 1024"),
    ("sweep good --recursions few", "--recursions: expected numbers from 1 to 1024"),
    ("confidence good --conditions in-prior,sunny", "condition: expected one of in-prior, .*, got 'sunny'"),
    ("confidence good --tasks 10", "tasks: expected at least 64, got 10"),
    ("confidence good --tasks 5000", "tasks: expected at most 4096, got 5000"),
]


@pytest.mark.parametrize(("command", "message"), BAD)
def test_bad_input_is_one_line_and_leaves_nothing(runs: Path, tmp_path: Path, monkeypatch, capsys, command, message):
    verb, name, *options = shlex.split(command)
    monkeypatch.chdir(runs)
    before = {path for path in runs.rglob("*")}
    output = [] if "--output" in options else ["--output", str(tmp_path / "out")]
    assert main([verb, real(runs, name), *options, *output]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("energylab: ")
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err
    assert {path for path in runs.rglob("*")} == before
    assert list(tmp_path.iterdir()) == []


def test_each_look_writes_where_it_is_told(runs: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = real(runs, "good")
    before = {path: path.read_bytes() for path in Path(run).iterdir()}
    for command in (
        ["trace", run, "--output", "trace"],
        ["landscape", run, "--size", "7", "--position", "2", "--step", "1", "--output", "landscape"],
        ["sweep", run, "--recursions", "1,2", "--output", "sweep"],
        ["confidence", run, "--tasks", "64", "--conditions", "in-prior", "--output", "confidence"],
    ):
        assert main(command) == 0
        assert f"{command[0]}: tables, and " in capsys.readouterr().out
    assert len(pd.read_parquet("sweep/sweep.parquet")) == 2
    assert set(pd.read_parquet("confidence/confidence.parquet")["condition"]) == {"in-prior"}
    assert (tmp_path / "landscape/block-0-attention-pair2-trajectory-step1.png").exists()
    assert {path: path.read_bytes() for path in Path(run).iterdir()} == before
