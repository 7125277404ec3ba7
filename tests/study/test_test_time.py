"""Runs that also test themselves with other T'."""

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
from tiny_runs import tiny_config, train

from energylab import project
from energylab.study import Study, load_run, load_study, store
from energylab.study.export import export_study
from energylab.study.variations import tuning

STUDIES = Path(__file__).parents[2] / "studies"


def resolved(name: str) -> Study:
    path = STUDIES / f"{name}.py"
    return project.resolve(path, project.study_function(path), {})


@pytest.mark.parametrize("name", ["test_time", "generalisation"])
def test_studies_that_only_test_take_over_the_training_of_recursion(name: str) -> None:
    """Nothing that training depends on differs from a run of the recursion study: none is trained twice."""

    def training(config):
        return (config.seed, config.prior, config.num_points, config.model, config.training)

    trained = [training(config) for config in resolved("recursion").runs]
    assert all(training(config) in trained for config in resolved(name).runs)


def test_other_recursions_at_test_time_are_stored_checked_and_exported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("energylab.study.run.TEST_TIME_TASKS", 8)
    config = dataclasses.replace(tiny_config(), test_recursions=(4, 1, 2))
    assert config.test_recursions == (1, 2, 4)
    folder = tmp_path / "tiny"
    assert train(config, folder).state == "finished"
    assert train(tiny_config(), folder).state == "finished"
    store.write_study(folder, Study("tiny", [config, tiny_config()]), {})
    table = load_study(folder).test_time
    assert list(table["test_recursions"]) == [1, 2, 4]
    assert set(table["run"]) == {config.name}
    assert {"excess_mse", "rmse", "energy_change block 0 attention", "energy_change block 0 mlp"} <= set(table)
    assert set(table["T"]) == {2}
    assert (table["energy_change block 0 attention"] < 0).all()
    export_study(folder, tmp_path / "exported")
    pd.testing.assert_frame_equal(
        load_study(tmp_path / "exported").test_time.drop(columns="study"), table.drop(columns="study"), rtol=1e-7
    )
    # damage is seen as in every other file
    (folder / config.name / store.TEST_TIME).write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=store.TEST_TIME):
        load_run(folder / config.name)


def test_a_study_without_them_has_an_empty_table(finished: Path) -> None:
    assert load_study(finished).test_time.empty


def test_the_field_changes_a_name_only_where_it_is_set() -> None:
    assert dataclasses.replace(tiny_config(), test_recursions=()).name == tiny_config().name
    assert dataclasses.replace(tiny_config(), test_recursions=(4,)).name != tiny_config().name
    swept = tuning(Study("tiny", [dataclasses.replace(tiny_config(), test_recursions=(4,))]))
    assert all(config.test_recursions == () for config in swept.runs)


@pytest.mark.parametrize("value", [(0,), (1.5,), (True,), "12", 3])
def test_what_is_no_number_of_steps_is_refused(value) -> None:
    with pytest.raises(ValueError, match=r"^test_recursions: expected integers of at least 1, got"):
        dataclasses.replace(tiny_config(), test_recursions=value)


def test_a_model_without_recursion_cannot_be_tested_so() -> None:
    with pytest.raises(
        ValueError, match=r"^test_recursions: expected none for a model without a CEM layer, got \(2,\)"
    ):
        dataclasses.replace(tiny_config(variant="Llama"), test_recursions=(2,))
