"""Other recursions at test time, and early exit, against evaluation and against each other."""

import math

import numpy as np
import pytest
import torch

from energylab.analysis.evaluation import evaluate
from energylab.analysis.recursion import early_exit, steps_until_exit, sweep
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior

PRIOR = GaussianProcessPrior.preset("fixed")
N, TASKS = 4, 40  # more than a batch of the model


def model(**options) -> InContextRegressor:
    torch.manual_seed(0)
    return InContextRegressor(ModelConfig(**{"width": 16, "hidden": 16, "heads": 2, "recursions": 2} | options))


@pytest.mark.parametrize("options", [{}, {"head": "gaussian"}, {"mlp": "llama"}, {"loops": 2}])
def test_as_many_steps_as_trained_are_the_model_itself(options):
    which = model(**options)
    row = sweep(which, PRIOR, N, [2], tasks=TASKS).iloc[0]
    table = evaluate(which, PRIOR, N, tasks=TASKS)
    assert row["rmse"] == pytest.approx(math.sqrt((table["rmse"] ** 2).mean()), rel=1e-6)
    assert row["excess_mse"] == pytest.approx(table["excess_mse"].mean(), rel=1e-6)


def test_other_recursions_are_those_of_the_layers():
    which = model()
    table = sweep(which, PRIOR, N, [1, 5], tasks=TASKS).set_index("recursions")
    for number in (1, 5):
        for layer in which.layers:
            layer.recursions = number
        expected = evaluate(which, PRIOR, N, tasks=TASKS)
        assert table.loc[number, "excess_mse"] == pytest.approx(expected["excess_mse"].mean(), rel=1e-6)
        batch = PRIOR.sample(TASKS, N, seed=0, stream="test")
        for trace in which.trace(batch.x, batch.y):
            change = (trace.energy[-1] - trace.energy[0]).mean().item()
            assert table.loc[number, f"energy_change {trace.name}"] == pytest.approx(change, rel=1e-4)


def test_no_patience_is_one_step_and_endless_patience_all_of_them():
    which = model()
    steps = sweep(which, PRIOR, N, [1, 5], tasks=TASKS).set_index("recursions")
    exits = early_exit(which, PRIOR, N, 5, [math.inf, -math.inf, 1.0, 0.1], tasks=TASKS).set_index("tolerance")
    for tolerance, number in ((math.inf, 1), (-math.inf, 5)):
        assert exits.loc[tolerance, "steps"] == number
        assert exits.loc[tolerance, "excess_mse"] == pytest.approx(steps.loc[number, "excess_mse"], rel=1e-5)
    assert 1 < exits.loc[1.0, "steps"] < exits.loc[0.1, "steps"] < 5
    of_layers = [name for name in exits if name.startswith("steps ")]
    np.testing.assert_allclose(exits["steps"], exits[of_layers].mean(axis=1), rtol=1e-12)


def test_the_first_small_fall_ends_a_walk():
    energy = torch.tensor([[0.0, 0, 0], [-5, -5, -0.5], [-6, -5.5, -9], [-7, -9, -99], [-7, -9.5, -999]])[:, None]
    assert steps_until_exit(energy, 1.0)[0].tolist() == [4, 2, 1]


def test_what_cannot_be_swept_is_said():
    with pytest.raises(ValueError, match="recursions: expected an integer of at least 1, got 0"):
        sweep(model(), PRIOR, N, [1, 0], tasks=4)
    llama = model(attention="llama", mlp="llama")
    for ask in (lambda: sweep(llama, PRIOR, N, [1], tasks=4), lambda: early_exit(llama, PRIOR, N, 2, tasks=4)):
        with pytest.raises(ValueError, match="model: expected a layer that descends an energy"):
            ask()
    refreshed = model(history="refreshed")
    with pytest.raises(ValueError, match="history: expected fixed, got refreshed"):
        early_exit(refreshed, PRIOR, N, 2, tasks=4)
    changes = sweep(refreshed, PRIOR, N, [2], tasks=4).filter(like="energy_change")
    assert changes.isna().all(axis=None)
