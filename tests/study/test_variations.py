"""Tuning sweeps and miniatures, of every study of the repository."""

from pathlib import Path

import pytest

from energylab.project import Problem, resolve, study_function
from energylab.study.variations import LEARNING_RATES, TUNING_SEED

STUDIES = sorted((Path(__file__).parents[2] / "studies").glob("*.py"))
TUNED = [
    path for path in STUDIES if path.stem not in ("quickstart", "learning", "learning_rate", "tuned")
]  # none to choose
SMALL = [path for path in STUDIES if path.stem in {"tuned", *(path.stem for path in TUNED)}]


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.stem)
def test_every_variant_is_tuned_with_the_same_budget_on_validation_tasks_alone(path: Path) -> None:
    function = study_function(path)
    study, sweep = resolve(path, function, {}), resolve(path, function, {"tune": True})
    assert sweep.name == f"{study.name}-tuning"
    models = {(run.variant, run.recursions) for run in study.runs}
    tuned = {(variant, recursions) for variant, recursions in models if recursions is None or recursions <= 2}
    assert {(run.variant, run.recursions) for run in sweep.runs} == tuned
    for key in tuned:
        runs = [run for run in sweep.runs if (run.variant, run.recursions) == key]
        assert [run.training.learning_rate for run in runs] == list(LEARNING_RATES)
        (model,) = {run.model for run in study.runs if (run.variant, run.recursions) == key}
        assert {run.model for run in runs} == {model}
    assert {run.training.steps for run in sweep.runs} == {2000}
    assert {run.conditions for run in sweep.runs} == {("validation",)}
    assert {run.seed for run in sweep.runs} == {TUNING_SEED}
    assert TUNING_SEED not in {run.seed for run in study.runs}


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_every_study_has_a_miniature(path: Path) -> None:
    function = study_function(path)
    study, small = resolve(path, function, {}), resolve(path, function, {"debug": True})
    assert small.name == f"{study.name}-debug"
    assert {(run.variant, run.recursions) for run in small.runs} == {
        (run.variant, run.recursions) for run in study.runs
    }
    assert max(run.training.steps for run in small.runs) <= 30
    assert len(small.runs) * len(study.runs[0].conditions) <= 60


def test_what_a_miniature_or_a_sweep_sets_itself_cannot_be_set_beside_it() -> None:
    (path,) = (path for path in STUDIES if path.stem == "recursion")
    function = study_function(path)
    for switch in ("debug", "tune"):
        for key in ("steps", "seeds"):
            with pytest.raises(
                Problem, match=f"--{key}: expected none with --{switch}, where it changes nothing, got 3"
            ):
                resolve(path, function, {switch: True, key: 3})
        assert resolve(path, function, {switch: True, "width": 32}).runs[0].model.width <= 32
