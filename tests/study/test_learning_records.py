"""The record of a run that learns: whole after any interruption, checked, exported, and part of the run's name."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import safetensors.torch
import torch
from tiny_runs import assert_same_results, tiny_config, train

from energylab.study import Study, load_run, load_study, store
from energylab.study.export import export_study

RECORDED = {"trace_every": 6, "snapshots": 4}


def recorded(**options):
    return tiny_config(**RECORDED | options)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that records how it learns."""
    folder = tmp_path_factory.mktemp("watched") / "tiny"
    assert train(recorded(), folder).state == "finished"
    return folder


def test_the_record_covers_the_training_and_changes_no_result(watched: Path, finished: Path) -> None:
    run = load_run(watched / recorded().name)
    assert run.learning is not None
    assert run.learning["step"].unique().tolist() == [0, 6, 12, 18, 20]
    keys = ["step", "layer", "t", "token"]
    assert not run.learning.duplicated(keys).any()
    assert len(run.learning) == 5 * 2 * 3 * 2  # records, layers, t = 0..2, tokens
    assert {store.LEARNING, store.SNAPSHOTS} <= set(run.provenance["files"])
    plain = finished / tiny_config().name
    assert_same_results(watched / recorded().name, plain)
    assert load_run(plain).learning is None
    assert not (plain / store.LEARNING).exists()


@pytest.mark.parametrize("stop", [1, 6, 11, 18])
def test_stopped_and_continued_records_as_undisturbed(watched: Path, tmp_path: Path, stop_after, stop: int) -> None:
    name = recorded().name
    assert train(recorded(), tmp_path, should_stop=stop_after(stop)).state == "interrupted"
    assert train(recorded(), tmp_path).state == "finished"
    for file in (store.LEARNING, store.SNAPSHOTS, store.WEIGHTS):
        assert (tmp_path / name / file).read_bytes() == (watched / name / file).read_bytes()


def test_killed_between_two_saves_records_as_undisturbed(watched: Path, tmp_path: Path, monkeypatch) -> None:
    """The state is of step 5, and 6 was recorded already when the run died at 7."""
    name = recorded().name

    steps = iter(range(7))

    def die_at_the_seventh() -> bool:
        if next(steps) == 6:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        train(recorded(), tmp_path, should_stop=die_at_the_seventh)
    state, _ = store.read_state(tmp_path / name)
    assert state is not None
    assert state["trainer"]["step"] == 5
    assert train(recorded(), tmp_path).state == "finished"
    for file in (store.LEARNING, store.SNAPSHOTS):
        assert (tmp_path / name / file).read_bytes() == (watched / name / file).read_bytes()


def test_a_state_from_before_there_were_records_is_continued(finished: Path, tmp_path: Path, stop_after) -> None:
    config = tiny_config()
    train(config, tmp_path, should_stop=stop_after(7))
    state, _ = store.read_state(tmp_path / config.name)
    assert state is not None
    del state["learning"]
    store.write_state(tmp_path / config.name, state)
    assert train(config, tmp_path).state == "finished"
    assert_same_results(tmp_path / config.name, finished / config.name)


def test_snapshots_are_the_weights_of_their_steps(watched: Path, tmp_path: Path, stop_after) -> None:
    directory = watched / recorded().name
    assert torch.equal(load_run(directory, step=20).model.read_in.weight, load_run(directory).model.read_in.weight)
    train(tiny_config(), tmp_path, should_stop=stop_after(3))
    state, _ = store.read_state(tmp_path / tiny_config().name)
    assert state is not None
    early = load_run(directory, step=3).model.state_dict()
    assert all(torch.equal(early[name], weight) for name, weight in state["trainer"]["model"].items())
    tensors = safetensors.torch.load_file(directory / store.SNAPSHOTS)
    assert {int(name.partition("/")[0]) for name in tensors} == {0, 1, 3, 7, 20}


def test_a_snapshot_that_is_not_there_is_named(watched: Path, finished: Path) -> None:
    with pytest.raises(ValueError, match=r"^step: expected one of 0, 1, 3, 7, 20, got 4$"):
        load_run(watched / recorded().name, step=4)
    with pytest.raises(ValueError, match=r"^step: expected a run with snapshots, .*, which has none"):
        load_run(finished / tiny_config().name, step=3)


@pytest.mark.parametrize("file", [store.LEARNING, store.SNAPSHOTS])
def test_a_damaged_record_is_noticed(watched: Path, tmp_path: Path, file: str) -> None:
    directory = tmp_path / recorded().name
    directory.mkdir()
    for path in (watched / directory.name).iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    content = bytearray((directory / file).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} does not match its checksum"):
        load_run(directory)


def test_an_export_keeps_the_record_and_no_snapshots(tmp_path: Path) -> None:
    configs = [recorded(steps=8), recorded(steps=8, seed=1)]
    folder = tmp_path / "runs"
    for config in configs:
        assert train(config, folder).state == "finished"
    store.write_study(folder, Study("tiny", configs), {})
    export_study(folder, tmp_path / "kept")
    pd.testing.assert_frame_equal(load_study(folder).learning, load_study(tmp_path / "kept").learning)
    assert load_study(folder).learning["seed"].unique().tolist() == [0, 1]
    kept = [tmp_path / "kept" / config.name for config in configs]
    assert not any((directory / store.SNAPSHOTS).exists() for directory in kept)
    pd.testing.assert_frame_equal(load_run(kept[0]).learning, load_run(folder / kept[0].name).learning)
    with pytest.raises(ValueError, match=r"^step: expected a run with snapshots, .* and not exported; got "):
        load_run(kept[0], step=8)


def test_a_name_says_whether_a_run_records() -> None:
    """Else a finished run without a record would stand for one with."""
    plain = tiny_config()
    names = {config.name for config in (plain, recorded(), recorded(snapshots=0), recorded(trace_every=0))}
    assert len(names) == 4
    explicit = dataclasses.replace(plain, training=dataclasses.replace(plain.training, trace_every=0, snapshots=0))
    assert explicit.name == plain.name
