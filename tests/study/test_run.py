"""One run: what it writes, how it continues, and how it ends when something goes wrong."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny_runs import TABLES, assert_same_results, tiny_config, train

import energylab
from energylab.study import load_results, load_run, store
from energylab.study import run as run_module
from energylab.tasks import condition
from energylab.training import Trainer


def test_a_run_writes_its_directory(finished: Path) -> None:
    config = tiny_config()
    directory = finished / config.name
    assert {path.name for path in directory.iterdir()} == {
        store.CONFIG,
        *TABLES,
        store.WEIGHTS,
        store.STATE,
        store.PROGRESS,
        store.PROVENANCE,
    }
    provenance = store.read_provenance(directory)
    assert provenance is not None
    assert provenance["state"] == "finished"
    assert provenance["threads"] == 1
    assert provenance["device"] == f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    assert provenance["train_seconds"] > 0
    assert provenance["start"] <= provenance["end"]
    for name in TABLES:
        table = pd.read_parquet(directory / name)
        assert list(table.columns[:3]) == ["variant", "T", "seed"]
        assert set(table["T"]) == {2}
    assert list(pd.read_parquet(directory / store.METRICS)["step"]) == [5, 10, 15, 20]


def test_results_name_no_folder_of_this_machine(finished: Path) -> None:
    for path in finished.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for folder in (finished, Path.home(), Path(energylab.__file__).parent):
                assert f"{folder}/".encode() not in content


def test_same_config_gives_the_same_bits(finished: Path, tmp_path: Path) -> None:
    config = tiny_config()
    train(config, tmp_path)
    assert_same_results(finished / config.name, tmp_path / config.name)


@pytest.mark.parametrize("stop", [1, 5, 7, 19])
def test_stopped_and_continued_equals_undisturbed(finished: Path, tmp_path: Path, stop_after, stop: int) -> None:
    config = tiny_config()
    first = train(config, tmp_path, should_stop=stop_after(stop))
    assert first.state == "interrupted"
    assert f"step {stop} of 20" in first.sentence
    assert train(config, tmp_path).state == "finished"
    assert_same_results(finished / config.name, tmp_path / config.name)
    provenance = store.read_provenance(tmp_path / config.name)
    assert provenance is not None
    assert provenance["sessions"] == 2


def test_a_run_that_was_killed_while_evaluating_continues(finished: Path, tmp_path: Path, monkeypatch) -> None:
    config = tiny_config()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "summarise", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    assert not (tmp_path / config.name / store.PROVENANCE).exists()
    assert train(config, tmp_path).state == "finished"
    assert_same_results(finished / config.name, tmp_path / config.name)


def test_a_finished_run_is_not_trained_again(study_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(Trainer, "advance", lambda self: pytest.fail("trained again"))
    outcome = train(tiny_config(), study_folder)
    assert outcome.state == "finished"
    assert not outcome.new


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-100]), Path.unlink])
def test_a_damaged_state_falls_back_to_the_one_before(finished: Path, tmp_path: Path, stop_after, damage) -> None:
    config = tiny_config()
    train(config, tmp_path, should_stop=stop_after(12))
    damage(tmp_path / config.name / store.STATE)
    outcome = train(config, tmp_path)
    assert outcome.state == "finished"
    assert_same_results(finished / config.name, tmp_path / config.name)
    if damage is not Path.unlink:
        assert "state.pt is damaged" in outcome.notices[0]
        assert "step 10" in outcome.notices[0]
        assert (tmp_path / config.name / "state.pt.damaged-1").exists()


def test_a_flipped_bit_in_a_state_is_noticed(tmp_path: Path, stop_after) -> None:
    config = tiny_config()
    train(config, tmp_path, should_stop=stop_after(12))
    path = tmp_path / config.name / store.STATE
    content = bytearray(path.read_bytes())
    content[content.index(b"data/0") + 1000] ^= 1
    path.write_bytes(content)
    outcome = train(config, tmp_path)
    assert outcome.state == "finished"
    assert "damaged" in outcome.notices[0]


def test_two_damaged_states_are_damage(tmp_path: Path, stop_after) -> None:
    config = tiny_config()
    train(config, tmp_path, should_stop=stop_after(12))
    for name in (store.STATE, store.PREVIOUS_STATE):
        (tmp_path / config.name / name).write_bytes(b"nonsense")
    outcome = train(config, tmp_path)
    assert outcome.state == "damaged"
    assert "state.pt" in outcome.sentence
    assert "state.previous.pt" in outcome.sentence


def test_a_state_of_another_run_is_not_continued(tmp_path: Path, stop_after) -> None:
    configs = tiny_config(), tiny_config(seed=1)
    for config in configs:
        train(config, tmp_path, should_stop=stop_after(3))
    mine, other = (tmp_path / config.name for config in configs)
    (mine / store.STATE).write_bytes((other / store.STATE).read_bytes())
    outcome = train(configs[0], tmp_path)
    assert "another run" in outcome.notices[0]


def test_divergence_is_an_outcome_with_step_and_last_state(tmp_path: Path) -> None:
    config = tiny_config(learning_rate=1e30, warmup_steps=0)
    outcome = train(config, tmp_path)
    assert outcome.state == "diverged"
    assert "is not finite" in outcome.sentence
    assert "last saved state is of step 0" in outcome.sentence
    assert store.read_progress(tmp_path / config.name)["state"] == "diverged"


def test_an_error_is_an_outcome_that_says_where(tmp_path: Path, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(run_module, "evaluate", broken)
    config = tiny_config()
    outcome = train(config, tmp_path)
    assert outcome.state == "error"
    assert "RuntimeError: no such luck (test_run.py, line" in outcome.sentence
    trace = (tmp_path / config.name / "error.txt").read_text()
    assert "no such luck" in trace
    assert str(Path(__file__).parent) not in trace


def test_a_full_disk_keeps_the_last_state(tmp_path: Path, monkeypatch, finished: Path) -> None:
    config = tiny_config()
    write, calls = store.write_bytes, 0

    def full(path: Path, content: bytes) -> None:
        nonlocal calls
        calls += path.name == store.STATE
        if calls >= 3:
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_bytes", full)
        outcome = train(config, tmp_path)
    assert outcome.state == "disk"
    assert "state.pt: No space left on device" in outcome.sentence
    assert train(config, tmp_path).state == "finished"
    assert_same_results(finished / config.name, tmp_path / config.name)


def test_load_run_gives_back_the_trained_model(finished: Path) -> None:
    results = load_run(finished / tiny_config().name)
    config = tiny_config()
    assert results.config == config
    assert results.prior == config.prior
    assert not results.model.training
    batch = results.prior.sample(4096, config.num_points, seed=0, stream="test")
    error = (results.model(batch.x, batch.y) - batch.floor_mean).square().mean().item()
    assert error == pytest.approx(results.evaluation["excess_mse"].mean(), rel=1e-4)
    assert results.traces is not None
    assert set(results.traces["layer"]) == {"block 0 attention", "block 0 mlp"}
    assert set(results.traces["step"]) == {0, 1, 2}
    assert list(results.training["step"]) == [5, 10, 15, 20]


def test_every_condition_is_evaluated(finished: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(tiny_config(), conditions=("in-prior", "double-noise", "double-points"))
    assert train(config, tmp_path).state == "finished"
    results = load_run(tmp_path / config.name)
    sizes = results.evaluation.groupby("condition", sort=False).size()
    assert sizes.to_dict() == {"in-prior": 4, "double-noise": 4, "double-points": 8}
    identities = {name: condition(name, config.prior, 4).identity for name in config.conditions}
    assert dict(zip(results.evaluation["condition"], results.evaluation["condition_id"], strict=True)) == identities
    # the conditions are told apart, and the training is that of the run without them
    assert results.evaluation.groupby("condition")["floor_rmse"].mean().nunique() == 3
    alone = load_run(finished / tiny_config().name).evaluation
    in_prior = results.evaluation.query("condition == 'in-prior'")
    assert in_prior["rmse"].tolist() == alone["rmse"].tolist()
    errors = load_results(tmp_path)
    assert list(errors["condition"].unique()) == list(config.conditions)


def test_load_run_refuses_with_a_reason(study_folder: Path, tmp_path: Path, stop_after) -> None:
    with pytest.raises(FileNotFoundError, match="no such run"):
        load_run(tmp_path / "nothing")
    train(tiny_config(seed=5), tmp_path, should_stop=stop_after(2))
    with pytest.raises(ValueError, match="not finished"):
        load_run(tmp_path / tiny_config(seed=5).name)
    path = study_folder / tiny_config().name / store.WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"weights\.safetensors has \d+ bytes"):
        load_run(path.parent)


def test_progress_tells_where_a_run_is(tmp_path: Path, stop_after) -> None:
    updates = []
    train(tiny_config(), tmp_path, report=updates.append)
    assert [update.phase for update in updates][-1] == "evaluating"
    assert updates[0].step == 0
    progress = json.loads((tmp_path / tiny_config().name / store.PROGRESS).read_text())
    assert progress["state"] == "finished"
    assert progress["step"] == 20
