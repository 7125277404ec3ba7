"""Training that another run of the same results folder has done is not done again."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
from tiny_runs import assert_same_results, tiny_config, train

from energylab.study import load_run, store


def test_equal_training_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    assert train(config, tmp_path / "one").state == "finished"
    other = dataclasses.replace(config, variant="another name", conditions=("in-prior", "double-noise"))
    monkeypatch.setattr("energylab.training.Trainer.advance", lambda self: pytest.fail("it trains"))
    outcome = train(other, tmp_path / "two", reuse=True)
    assert outcome.state == "finished"
    assert outcome.notices[0].startswith(f"training taken from one/{config.name}")
    directory = tmp_path / "two" / other.name
    assert (directory / store.WEIGHTS).read_bytes() == (tmp_path / "one" / config.name / store.WEIGHTS).read_bytes()
    provenance = store.check_run(directory)
    assert provenance is not None
    assert provenance["notices"] == list(outcome.notices)
    assert set(load_run(directory).evaluation["condition"]) == {"in-prior", "double-noise"}


def test_what_was_recorded_and_by_which_code_comes_along(tmp_path: Path) -> None:
    config = tiny_config(trace_every=5, snapshots=2)
    assert train(config, tmp_path / "one").state == "finished"
    other = dataclasses.replace(config, variant="another name")
    assert train(other, tmp_path / "two", reuse=True).state == "finished"
    donor, taker = load_run(tmp_path / "one" / config.name), load_run(tmp_path / "two" / other.name)
    assert taker.learning is not None
    assert donor.learning is not None
    pd.testing.assert_frame_equal(
        taker.learning.drop(columns="variant"), donor.learning.drop(columns="variant"), check_exact=True
    )
    paths = [tmp_path / "one" / config.name, tmp_path / "two" / other.name]
    assert paths[0].joinpath(store.SNAPSHOTS).read_bytes() == paths[1].joinpath(store.SNAPSHOTS).read_bytes()
    first, second = (store.check_run(path) for path in paths)
    assert first is not None
    assert second is not None
    assert [session["step"] for session in second["history"]] == [0, 20]
    assert second["history"][0] == first["history"][0]


@pytest.mark.parametrize("change", [{"seed": 1}, {"steps": 21}, {"recursions": 3}, {"learning_rate": 0.1}])
def test_other_training_is_not(tmp_path: Path, change: dict) -> None:
    assert train(tiny_config(), tmp_path / "one").state == "finished"
    assert train(tiny_config(**change), tmp_path / "two", reuse=True).notices == ()


def test_damaged_and_unfinished_runs_are_passed_over(tmp_path: Path, stop_after) -> None:
    config = tiny_config()
    assert train(config, tmp_path / "damaged").state == "finished"
    (tmp_path / "damaged" / config.name / store.WEIGHTS).write_bytes(b"")
    assert train(config, tmp_path / "unfinished", should_stop=stop_after(10)).state == "interrupted"
    assert train(config, tmp_path / "mine", reuse=True).notices == ()
    assert train(config, tmp_path / "again", reuse=True).notices[0].startswith("training taken from mine/")
    assert_same_results(tmp_path / "mine" / config.name, tmp_path / "again" / config.name)
