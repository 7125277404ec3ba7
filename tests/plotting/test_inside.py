"""Drawings of a model's inside: that each shows the numbers it is given, and says which model and how many tasks."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch

from energylab.analysis.curvature import curvature
from energylab.analysis.descent_report import describe_descent
from energylab.analysis.landscape import Landscape, landscape
from energylab.models import InContextRegressor, ModelConfig
from energylab.plotting.confidence import draw_confidence
from energylab.plotting.descent import draw_curvature, draw_descent
from energylab.plotting.landscape import draw_landscape
from energylab.plotting.recursion import draw_sweep
from energylab.tasks import GaussianProcessPrior

PRIOR = GaussianProcessPrior.preset("fixed")
N = 4


def text_of(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def labels_of(figure) -> list[str]:
    return [text.get_text() for box in figure.legends for text in box.get_texts()]


@pytest.fixture(name="model", scope="module")
def _model() -> InContextRegressor:
    torch.manual_seed(0)
    return InContextRegressor(ModelConfig(width=16, hidden=24, heads=2, depth=1, recursions=2))


@pytest.fixture(name="found", scope="module")
def _found(model) -> Landscape:
    return landscape(model, PRIOR, N, layer="block 0 mlp", position=2, size=15)


def test_a_landscape_is_drawn_as_it_is(found):
    found = dataclasses.replace(found, path=found.path.assign(inside=1.0))
    figure = draw_landscape(found, model="CEM $T=2$")
    hill, cuts, bar = figure.axes
    drawn = {line.get_label(): np.radians(line.get_xydata()) for line in hill.get_lines()}
    for label, kind in (("steps of the layer", "path"), ("bottom", "bottom"), ("one certified step", "certified")):
        expected = found.path.loc[found.path["kind"] == kind, ["alpha", "beta"]].to_numpy()
        np.testing.assert_allclose(drawn[label], expected, atol=1e-12)
    low, high = bar.get_ylim()
    assert low <= found.grid["energy"].min() < found.grid["energy"].max() <= high
    ends = np.radians([hill.get_xlim(), hill.get_ylim()])
    np.testing.assert_allclose(ends[0], [found.grid["alpha"].min(), found.grid["alpha"].max()])
    np.testing.assert_allclose(ends[1], [found.grid["beta"].min(), found.grid["beta"].max()])
    curves = [line.get_ydata() for line in cuts.get_lines() if len(line.get_xdata()) > 10]
    for curve, (_, rows) in zip(curves, found.cuts.groupby("step"), strict=True):
        np.testing.assert_array_equal(curve, rows["energy_change"])
    assert "CEM $T=2$, block 0 MLP, query of pair 2 of test task 0" in text_of(figure)
    assert "certified" in text_of(figure)


def test_a_point_that_is_no_minimum_is_not_called_the_bottom(found):
    near = dataclasses.replace(found, path=found.path.assign(inside=1.0))
    assert "bottom" in labels_of(draw_landscape(near))
    assert "lowest point found" in labels_of(draw_landscape(dataclasses.replace(near, stationary=False)))
    far = dataclasses.replace(found, path=found.path.assign(inside=0.5))
    assert "bottom, far off this plane" in labels_of(draw_landscape(far))
    assert "the bottom to 50%" in text_of(draw_landscape(far))
    away = near.path.assign(alpha=near.path["alpha"].where(near.path["kind"] != "bottom", 9.0))
    assert "bottom" not in labels_of(draw_landscape(dataclasses.replace(near, path=away)))  # beyond the map


def test_where_more_steps_lead_is_said(found):
    number = int((found.path["kind"] == "continued").sum()) - 1
    assert f"{number} more steps" in text_of(draw_landscape(found))
    bottom = found.path.loc[found.path["kind"] == "bottom", "energy"].item()
    for shift, converged, words in (
        (0, True, "come to rest there"),
        (2.5, True, "come to rest 2.5 above it"),
        (2.5, False, "have not come to rest, 2.5 above it"),
    ):
        energy = found.path["energy"].where(found.path["kind"] != "continued", bottom + shift)
        changed = dataclasses.replace(found, path=found.path.assign(energy=energy), converged=converged)
        assert words in text_of(draw_landscape(changed))


def test_descent_is_drawn_layer_by_layer(model):
    report = describe_descent(model, PRIOR, N, tasks=3, positions=8)
    figure = draw_descent(report, model="CEM $T=2$", tasks=3)
    assert len(figure.axes) == 6
    for place, layer in enumerate(("block 0 attention", "block 0 mlp")):
        energy = figure.axes[3 * place]
        assert layer.replace("mlp", "MLP") in energy.get_title(loc="left")
        rows = report.steps[report.steps["layer"] == layer].sort_values("step")
        lines = {line.get_label(): line for line in energy.get_lines()}
        for token in ("query", "pair"):
            expected = rows.loc[rows["token"] == token, "energy_change_median"]
            np.testing.assert_array_equal(lines[f"{token} tokens"].get_ydata(), expected)
        gap = report.gaps[report.gaps["layer"] == layer]
        depth = -(gap["fall"] + gap["gap"]).median()
        assert set(lines["bottom (median)"].get_ydata()) == {depth}
        assert energy.get_ylim()[0] < depth
    assert "CEM $T=2$, 3 test tasks" in text_of(figure)


def test_curvature_is_drawn_with_its_condition_numbers(model):
    table = curvature(model, PRIOR, N, positions=4)
    figure = draw_curvature(table, model="CEM $T=2$")
    for axes, (_, rows) in zip(figure.axes, table.groupby("layer"), strict=True):
        (largest,) = [line for line in axes.get_lines() if line.get_label() == "largest"]
        at = rows["step"].where(rows["at"] == "step", 3)
        np.testing.assert_allclose(largest.get_ydata(), rows["largest"].groupby(at).median())
        assert [label.get_text() for label in axes.get_xticklabels()] == ["$z_0$", "$z_1$", "$z_2$", "$z_*$"]
    bottom = table.loc[(table["at"] == "bottom") & (table["layer"] == "block 0 mlp"), "condition"].median()
    assert f"block 0 MLP {bottom:.3g}" in text_of(figure)
    indefinite = draw_curvature(table.assign(preconditioner="P indefinite, undefined"), model="CEM")
    assert "(P indefinite, undefined)" in text_of(indefinite)


@pytest.mark.parametrize("early", [True, False])
def test_a_sweep_shows_where_the_model_was_trained(early):
    sweep = pd.DataFrame({"recursions": [1, 2, 3, 4], "rmse": 0.5, "excess_mse": [0.4, 0.1, 0.2, 0.3]})
    sweep["energy_change block 0 attention"] = [-1.0, -2.0, -3.0, -4.0]
    exits = pd.DataFrame({"tolerance": [1.0, 0.1], "steps": [1.5, 3.5], "rmse": 0.5, "excess_mse": [0.3, 0.25]})
    figure = draw_sweep(sweep, exits if early else pd.DataFrame(), 2, model="CEM $T=2$", tasks=16)
    error, energy = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in error.get_lines()}
    assert lines["$T'$ steps everywhere"] == [[1, 0.4], [2, 0.1], [3, 0.2], [4, 0.3]]
    assert lines["as trained"] == [[2, 0.1]]
    assert lines.get("early exit") == ([[1.5, 0.3], [3.5, 0.25]] if early else None)
    assert [-1, -2, -3, -4] in [np.asarray(line.get_ydata()).tolist() for line in energy.get_lines()]
    assert "16 test tasks" in text_of(figure)
    assert ("Early exit" in text_of(figure)) == early


def test_correlations_stand_at_their_layers():
    layers = ["block 0 attention", "block 0 mlp"]
    rows = [
        {
            "condition": condition,
            "layer": layer,
            "against": against,
            "n": 16,
            "mean": mean,
            "low": mean - 0.1,
            "high": mean + 0.1,
        }
        for condition, shift in (("in-prior", 0.0), ("double-noise", 0.2))
        for layer, level in zip(layers, (-0.5, 0.3), strict=True)
        for against, mean in (("error", level + shift), ("floor variance", -level - shift))
    ]
    figure = draw_confidence(pd.DataFrame(rows), model="CEM $T=2$", tasks=1024)
    for axes, sign in zip(figure.axes, (1, -1), strict=True):
        points = {line.get_label(): np.asarray(line.get_xdata()).tolist() for line in axes.get_lines()}
        assert points["in-prior"] == pytest.approx([sign * -0.5, sign * 0.3])
        assert points["double-noise"] == pytest.approx([sign * -0.3, sign * 0.5])
        assert [label.get_text() for label in axes.get_yticklabels()] == ["block 0 attention", "block 0 MLP"]
    left, right = (axes.get_xlim() for axes in figure.axes)
    assert left == right == pytest.approx((-0.66, 0.66))  # one scale, a tenth more than the widest interval
    assert "16 groups of tasks" in text_of(figure)
