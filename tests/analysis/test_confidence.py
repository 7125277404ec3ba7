"""Ranks of the fall in energy, against SciPy and against models about which they are known."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from energylab.analysis import confidence
from energylab.analysis.confidence import fall_and_error, rank_correlation
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior

PRIOR = GaussianProcessPrior.preset("fixed")


def model(**options) -> InContextRegressor:
    torch.manual_seed(0)
    return InContextRegressor(ModelConfig(**{"width": 16, "hidden": 16, "heads": 2, "depth": 1} | options))


def test_rank_correlation_is_spearmans_for_each_column():
    rng = np.random.default_rng(0)
    one = rng.integers(0, 8, (40, 3)).astype(float)  # with ties
    other = one + rng.normal(0, 3, one.shape)
    expected = np.mean([spearmanr(one[:, k], other[:, k]).statistic for k in range(3)])
    assert rank_correlation(one, other) == pytest.approx(expected, rel=1e-12)
    assert rank_correlation(one, one) == pytest.approx(1)
    assert rank_correlation(one, -one) == pytest.approx(-1)


def test_what_is_correlated_is_what_is_said():
    which = model()
    falls, against = confidence._measure(which, PRIOR, 4, "double-noise", 70)
    batch = confidence.condition("double-noise", PRIOR, 4).sample(70)
    trace = which.trace(batch.x, batch.y)[0]
    expected = (trace.energy[0] - trace.energy[-1])[:, [2, 4, 6]]
    np.testing.assert_allclose(falls["block 0 attention"], expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        error = (which(batch.x, batch.y) - batch.floor_mean).abs()[:, 1:]
    np.testing.assert_allclose(against["error"], error, atol=1e-5)
    np.testing.assert_allclose(against["floor variance"], batch.floor_variance[:, 1:], rtol=1e-5)


def test_the_table_finds_a_relation_that_is_there(monkeypatch):
    rng = np.random.default_rng(1)
    fall, noise = rng.normal(size=(2, 160, 3))
    measured = {"layer": fall}, {"error": -fall + 0.5 * noise, "floor variance": noise}
    monkeypatch.setattr(confidence, "_measure", lambda *arguments: measured)
    table = fall_and_error(model(), PRIOR, 4, conditions=("in-prior",), tasks=160).set_index("against")
    assert table.loc["error", "high"] < -0.7
    assert table.loc["floor variance", "low"] < 0 < table.loc["floor variance", "high"]
    assert (table["n"] == confidence.GROUPS).all()


def test_rows_are_conditions_layers_and_quantities():
    table = fall_and_error(model(), PRIOR, 3, conditions=("in-prior", "double-points"), tasks=64)
    assert len(table) == 2 * 2 * 2
    assert table[["mean", "low", "high"]].abs().max(axis=None) <= 1.5


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ({"attention": "llama", "mlp": "llama"}, {}, "model: expected a layer that descends an energy"),
        ({"history": "refreshed"}, {}, "history: expected fixed"),
        ({}, {"conditions": ("sunny",)}, "condition: expected one of"),
        ({}, {"tasks": 5}, "tasks: expected at least 64, got 5"),
    ],
)
def test_what_cannot_be_asked_is_said(options, asked, message):
    with pytest.raises(ValueError, match=message):
        fall_and_error(model(**options), PRIOR, 3, **asked)
