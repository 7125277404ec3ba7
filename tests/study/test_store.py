"""Reading: nothing damaged is used, everything damaged is named; export and tables."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from tiny_runs import tiny_config, train

from energylab.plotting import plots
from energylab.study import Study, load_results, load_run, load_study, store
from energylab.study.export import TABLES, export_study


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


FILES = (store.CONFIG, store.METRICS, store.EVALUATION, store.DESCENT, store.TRACES, store.WEIGHTS, store.PROVENANCE)


@pytest.mark.parametrize("damage", [flip, halve, empty])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_left_out(study_folder: Path, name: str, damage) -> None:
    directory = study_folder / tiny_config().name
    damage(directory / name)
    with pytest.raises(store.Damaged, match=f"^{directory.name}: {name}"):
        store.check_run(directory)
    with pytest.warns(UserWarning, match=name):
        errors = load_results(study_folder)
    assert set(errors["run"]) == {tiny_config(seed=1).name, tiny_config(variant="Llama").name}


@pytest.mark.parametrize("name", [name for name in FILES if name != store.PROVENANCE])
def test_a_missing_or_swapped_file_is_damage(study_folder: Path, name: str) -> None:
    directory, other = study_folder / tiny_config().name, study_folder / tiny_config(seed=1).name
    shutil.copyfile(other / name, directory / name)
    with pytest.raises(store.Damaged, match=name):
        store.check_run(directory)
    (directory / name).unlink()
    with pytest.raises(store.Damaged, match=name):
        store.check_run(directory)


def test_a_swapped_directory_is_damage(study_folder: Path) -> None:
    directory, other = study_folder / tiny_config().name, study_folder / tiny_config(seed=1).name
    shutil.rmtree(directory)
    other.rename(directory)
    with pytest.raises(store.Damaged, match=f"belongs to {other.name}"):
        store.check_run(directory)


def test_a_changed_number_in_the_provenance_is_damage(study_folder: Path) -> None:
    path = study_folder / tiny_config().name / store.PROVENANCE
    data = json.loads(path.read_text())
    data["flops"] *= 2
    path.write_text(json.dumps(data))
    with pytest.raises(store.Damaged, match="own checksum"):
        store.check_run(path.parent)


def test_a_newer_schema_is_not_damage_to_repair(study_folder: Path) -> None:
    path = study_folder / tiny_config().name / store.PROVENANCE
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schema": store.SCHEMA + 1}))
    with pytest.raises(store.FromNewerVersion, match="newer energylab"):
        store.check_run(path.parent)


def test_setting_aside_deletes_nothing(study_folder: Path) -> None:
    directory = study_folder / tiny_config().name
    for number in (1, 2):
        directory.mkdir(exist_ok=True)
        (directory / "mine.txt").write_text(str(number))
        assert store.set_aside(directory).name == f"{directory.name}.damaged-{number}"
        assert not directory.exists()
    assert (study_folder / f"{directory.name}.damaged-1" / store.WEIGHTS).exists()
    assert set(load_results(study_folder)["run"]) == {tiny_config(seed=1).name, tiny_config(variant="Llama").name}


def test_load_results_is_tidy(study_folder: Path) -> None:
    train(tiny_config(steps=10), study_folder)
    errors = load_results(study_folder)
    columns = ["study", "run", "variant", "T", "seed", "condition", "k", "rmse", "rmse_f", "excess_mse"]
    assert list(errors.columns[:10]) == columns
    assert {"parameters", "flops", "train_seconds", "floor_rmse", "steps", "attention"} <= set(errors.columns)
    assert not {"width", "seed_x", "device", "noise_std"} & set(errors.columns)
    assert len(errors) == 4 * 4
    assert not errors.duplicated(["run", "condition", "k"]).any()
    assert set(errors["study"]) == {"tiny"}
    assert errors["T"].dtype == "Int64"
    assert errors.loc[errors["variant"] == "Llama", "T"].isna().all()
    assert set(errors.loc[errors["variant"] == "CEM", "T"]) == {2}
    assert set(errors["steps"]) == {10, 20}
    assert (errors["excess_mse"] > 0).all()


def test_load_results_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_results(tmp_path / "nothing")
    errors = load_results(tmp_path)
    assert errors.empty
    assert {"study", "run", "T", "k", "excess_mse", "parameters"} <= set(errors.columns)


def test_unfinished_runs_are_left_out(study_folder: Path, stop_after) -> None:
    train(tiny_config(seed=7), study_folder, should_stop=stop_after(3))
    assert set(load_results(study_folder)["seed"]) == {0, 1}


def test_load_study_refuses_to_mix_settings(study_folder: Path) -> None:
    other = tiny_config(seed=2, steps=10)
    train(other, study_folder)
    with pytest.raises(ValueError, match=r"steps: expected one value for all runs of CEM, T = 2.* got 20 and 10"):
        load_study(study_folder)
    chosen = [tiny_config(seed=seed).name for seed in (0, 1)]
    results = load_study(study_folder, chosen)
    assert set(results.errors["run"]) == set(results.descent["run"]) == set(results.training["run"]) == set(chosen)
    assert list(results.descent.columns[:5]) == ["study", "run", "variant", "T", "seed"]


def test_export_reads_like_the_original(study_folder: Path, tmp_path: Path) -> None:
    configs = [tiny_config(), tiny_config(seed=1), tiny_config(variant="Llama"), tiny_config(variant="Llama", seed=1)]
    store.write_study(study_folder, Study("tiny", configs, note="Only a test."), {"steps": 20})
    output = tmp_path / "exported"
    done = export_study(study_folder, output)
    assert done.copied == tuple(config.name for config in configs[:3])
    assert done.missing == (configs[3].name,)
    assert not done.damaged
    pd.testing.assert_frame_equal(load_results(output), load_results(study_folder), rtol=1e-7)
    exported, original = load_study(output), load_study(study_folder)
    assert exported.note == "Only a test."
    pd.testing.assert_frame_equal(exported.descent, original.descent, rtol=1e-7)
    pd.testing.assert_frame_equal(exported.training, original.training, rtol=1e-7)
    whole, tables_only = load_run(output / configs[0].name), output / configs[1].name
    # the weights give the raw traces back, bit for bit
    pd.testing.assert_frame_equal(whole.traces, load_run(study_folder / configs[0].name).traces, check_exact=True)
    assert not (tables_only / store.WEIGHTS).exists()
    with pytest.raises(ValueError, match="without weights"):
        load_run(tables_only)
    assert not list(output.rglob("*.pt"))
    assert done.size < 300_000
    # again: nothing changes, so git sees nothing
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert not export_study(study_folder, output).copied
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_a_run_that_another_study_holds_is_exported_once(study_folder: Path, tmp_path: Path) -> None:
    both, own = tiny_config(), tiny_config(seed=1)
    store.write_study(study_folder, Study("tiny", [both]), {})
    export_study(study_folder, tmp_path / "out" / "tiny", "one")
    other = tmp_path / "runs" / "other"
    shutil.copytree(study_folder, other)
    store.write_study(other, Study("other", [both, own]), {})
    output = tmp_path / "out" / "other"
    for again in (False, True):
        done = export_study(other, output, "none")
        assert done.shared == {both.name: "tiny"}
        assert (done.copied, done.unchanged)[again] == (own.name,)
        assert [path.name for path in output.iterdir() if path.is_dir()] == [own.name]
        found = load_study(output)
        assert list(dict.fromkeys(found.errors["run"])) == [both.name, own.name]
        assert set(found.errors["study"]) == {"other"}
        pd.testing.assert_frame_equal(found.errors, load_study(other, [both.name, own.name]).errors, rtol=1e-7)
    # what was exported can be exported; its owner keeps its own
    assert not export_study(output, tmp_path / "more" / "other", "none").shared
    assert len(load_results(tmp_path / "more" / "other")) == len(found.errors)
    assert export_study(study_folder, tmp_path / "out" / "tiny", "one").unchanged == (both.name,)
    # another result of the same settings is copied
    store.write_study(other, Study("other", [both]), {})
    provenance = store.read_provenance(other / both.name)
    table = store.read_table(other / both.name, provenance, store.EVALUATION).assign(rmse=0.0)
    store.write_table(other / both.name / store.EVALUATION, table)
    facts = {key: value for key, value in provenance.items() if key not in ("schema", "state", "files")}
    store.write_provenance(other / both.name, facts, provenance["files"])
    done = export_study(other, tmp_path / "out" / "third", "none")
    assert done.copied == (both.name,)
    assert not done.shared


def test_export_without_training_curves(study_folder: Path, tmp_path: Path) -> None:
    both, own = tiny_config(), tiny_config(seed=1)
    store.write_study(study_folder, Study("tiny", [both]), {})
    export_study(study_folder, tmp_path / "out" / "tiny", "one")
    store.write_study(study_folder, Study("other", [both, own]), {})
    output = tmp_path / "out" / "other"
    # one that holds more is as good
    done = export_study(study_folder, output, "none", [name for name in TABLES if name != store.METRICS])
    assert (done.copied, done.shared) == ((own.name,), {both.name: "tiny"})
    assert not list(output.rglob(store.METRICS))
    found = load_study(output)
    assert set(found.errors["run"]) == {both.name, own.name}
    with pytest.raises(ValueError, match=f"^other: .* got 1 runs without, such as {own.name}$"):
        plots.training_curves(found)
    assert set(plots.training_curves(load_study(tmp_path / "out" / "tiny"))["run"]) == {both.name}


def test_tables_of_the_version_before_are_read_alike(study_folder: Path, tmp_path: Path) -> None:
    """Parquet with pandas' own metadata, as it was written once."""
    before = load_study(study_folder)
    directory = study_folder / tiny_config(variant="Llama").name
    provenance = store.read_provenance(directory)
    for name in (store.METRICS, store.EVALUATION, store.DESCENT, store.TRACES):
        table = store.read_table(directory, provenance, name)
        small = (directory / name).stat().st_size
        table.to_parquet(directory / name, engine="pyarrow", compression="zstd", index=False)
        assert (directory / name).stat().st_size > 1.3 * small
    facts = {key: value for key, value in provenance.items() if key not in ("schema", "state", "files")}
    store.write_provenance(directory, facts, provenance["files"])
    after = load_study(study_folder)
    for table in ("errors", "descent", "training"):
        pd.testing.assert_frame_equal(getattr(after, table), getattr(before, table), check_exact=True)
    assert after.errors["T"].dtype == "Int64"
    # exported, they are small again
    store.write_study(study_folder, Study("tiny", [tiny_config(variant="Llama")]), {})
    export_study(study_folder, tmp_path / "exported")
    exported = tmp_path / "exported" / directory.name
    assert (exported / store.METRICS).stat().st_size < (directory / store.METRICS).stat().st_size


def test_export_adds_the_circuits_of_older_runs(study_folder: Path, tmp_path: Path) -> None:
    config = tiny_config()
    store.write_study(study_folder, Study("tiny", [config]), {})
    directory = study_folder / config.name
    expected = load_study(study_folder, [config.name]).circuits
    provenance = json.loads((directory / store.PROVENANCE).read_text())
    facts = {key: value for key, value in provenance.items() if key not in ("schema", "state", "files", "sha256")}
    files = [name for name in provenance["files"] if name != store.CIRCUITS]
    (directory / store.CIRCUITS).unlink()
    store.write_provenance(directory, facts, files)
    assert load_study(study_folder, [config.name]).circuits.empty
    export_study(study_folder, tmp_path / "exported", "none")
    pd.testing.assert_frame_equal(load_study(tmp_path / "exported").circuits, expected)


def test_export_names_damage_and_keeps_what_was_exported(study_folder: Path, tmp_path: Path) -> None:
    configs = [tiny_config(), tiny_config(seed=1)]
    store.write_study(study_folder, Study("tiny", configs), {})
    output = tmp_path / "exported"
    export_study(study_folder, output)
    flip(study_folder / configs[0].name / store.EVALUATION)
    done = export_study(study_folder, output)
    assert len(done.damaged) == 1
    assert store.EVALUATION in done.damaged[0]
    assert set(load_results(output)["run"]) == {config.name for config in configs}


def test_export_onto_itself_is_refused(study_folder: Path) -> None:
    store.write_study(study_folder, Study("tiny", [tiny_config()]), {})
    before = {path: path.read_bytes() for path in study_folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"^output: expected another folder than that of the results, got .*tiny"):
        export_study(study_folder, study_folder / ".." / study_folder.name, "none")
    assert before == {path: path.read_bytes() for path in study_folder.rglob("*") if path.is_file()}


def test_export_refuses_to_mix_settings(study_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    for configs in ([tiny_config()], [tiny_config(seed=1)]):
        store.write_study(study_folder, Study("tiny", configs), {})
        if output.exists():
            with pytest.raises(ValueError, match=r"output: expected .*got .*CEM-T2-seed0"):
                export_study(study_folder, output)
        else:
            export_study(study_folder, output)


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file.json"
    store.write_json(path, {"a": 1})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        store.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]
