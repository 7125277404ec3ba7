"""The look at the data: what each panel shows, not how it looks."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from energylab.analysis.fan import Fan, draws, fan
from energylab.models import InContextRegressor, ModelConfig
from energylab.plotting.style import FLOOR_LINE, NEUTRAL, recursion_colour, style
from energylab.plotting.tasks import Trained, draw_tasks, look
from energylab.tasks import GaussianProcessPrior


def with_model(one: Fan, spread: bool) -> Fan:
    table = one.predictions.assign(model_mean=0.5)
    return dataclasses.replace(one, predictions=table.assign(model_sd=0.25) if spread else table)


@pytest.fixture(name="fans", scope="module")
def _fans() -> dict[int, Fan]:
    return {pairs: fan(GaussianProcessPrior.preset("fixed"), pairs, points=12) for pairs in (1, 4, 9)}


@pytest.fixture(name="functions", scope="module")
def _functions() -> pd.DataFrame:
    return draws(GaussianProcessPrior.preset("fixed"), 3, points=30)


def text_of(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def test_floor_pairs_and_function_are_drawn_as_they_are(fans, functions):
    figure = draw_tasks("fixed", functions, fans)
    first, *others = figure.axes
    assert [line.get_ydata().tolist() for line in first.get_lines()] == [
        rows["f"].tolist() for _, rows in functions.groupby("task")
    ]
    for axes, (pairs, one) in zip(others, fans.items(), strict=True):
        assert f"$k={pairs}$ pair{'s' if pairs > 1 else ''} seen" in axes.get_title(loc="left")
        table = one.predictions
        dashed = [line.get_ydata().tolist() for line in axes.get_lines() if line.get_linestyle() == FLOOR_LINE]
        mean, sd = table["floor_mean"].to_numpy(), table["floor_sd"].to_numpy()
        assert dashed == [mean.tolist(), (mean - 2 * sd).tolist(), (mean + 2 * sd).tolist()]
        (dots,) = [line for line in axes.get_lines() if line.get_marker() == "o"]
        assert dots.get_xydata().tolist() == one.pairs[["x", "y"]].to_numpy().tolist()
        low, high = axes.get_ylim()
        assert low < (mean - 2 * sd).min() < (mean + 2 * sd).max() < high
    assert "under the kernel that made the task" in text_of(figure)
    assert "model" not in text_of(figure)


@pytest.mark.parametrize("spread", [True, False])
def test_a_model_is_drawn_with_its_spread_where_it_has_one(fans, functions, spread):
    shown = {pairs: with_model(one, spread) for pairs, one in fans.items()}
    figure = draw_tasks("fixed", functions, shown, model="CEM $T=2$", colour="#ff0000")
    for axes in figure.axes[1:]:
        (line,) = [line for line in axes.get_lines() if line.get_color() == "#ff0000"]
        assert set(line.get_ydata()) == {0.5}
        bands = [collection.get_paths()[0].vertices[:, 1] for collection in axes.collections]
        assert [(band.min(), band.max()) for band in bands] == ([(0.0, 1.0)] if spread else [])
    assert ("Shaded: the same by the model." if spread else "The model predicts a point.") in text_of(figure)


@pytest.mark.parametrize(
    ("preset", "labels"),
    [("mixture", ["rbf", "matern12", "matern32", "matern52", "periodic"]), ("fixed", None), ("rbf", r"$\ell=")],
)
def test_functions_are_labelled_by_what_differs(fans, preset, labels):
    figure = draw_tasks(preset, draws(GaussianProcessPrior.preset(preset), 5, points=30), fans)
    box = figure.axes[0].get_legend()
    if labels is None:
        assert box is None
        return
    given = [text.get_text() for text in box.get_texts()]
    assert given == labels if isinstance(labels, list) else all(text.startswith(labels) for text in given)
    figure.canvas.draw()
    inside = box.get_window_extent()
    panel = figure.axes[0].get_window_extent()
    assert panel.x0 <= inside.x0
    assert inside.x1 <= panel.x1
    highest = max(np.max(line.get_ydata()) for line in figure.axes[0].get_lines())
    assert figure.axes[0].transData.transform((0, highest))[1] < inside.y0


def test_an_even_grid_of_panels_in_every_venue(fans, functions):
    for venue, columns in (("plain", 2), ("icml-column", 1)):
        with style(venue):
            figure = draw_tasks("fixed", functions, fans)
        figure.canvas.draw()
        assert len({round(axes.get_position().x0, 2) for axes in figure.axes}) == columns
    two = draw_tasks("fixed", functions, {1: fans[1], 4: fans[4]})
    assert len(two.axes) == 3


@pytest.mark.parametrize(
    ("options", "label", "colour"),
    [
        ({"recursions": 4}, "mine $T=4$", recursion_colour(4)),
        ({"attention": "llama", "mlp": "llama"}, "mine", NEUTRAL),
    ],
)
def test_a_look_at_a_trained_model(options, label, colour):
    prior = GaussianProcessPrior.preset("fixed")
    model = InContextRegressor(ModelConfig(width=16, hidden=16, heads=2, depth=1, head="gaussian", **options))
    figure = look("fixed", prior, Trained(model=model, variant="mine", prior=prior, num_points=5))
    titles = [axes.get_title(loc="left") for axes in figure.axes[1:]]
    assert [title.partition("$")[2] for title in titles] == ["k=2$ pairs seen", "k=4$ pairs seen"]
    (line,) = [line for line in figure.axes[1].get_lines() if line.get_label() == label]
    assert line.get_color() == colour
    assert len(figure.axes[1].collections) == 1
    assert "another prior" not in text_of(figure)
    elsewhere = Trained(model=model, variant="mine", prior=GaussianProcessPrior(), num_points=1)
    figure = look("fixed", prior, elsewhere)
    assert figure.axes[1].get_title(loc="left").endswith("$k=0$ pairs seen")
    assert "trained on tasks from another prior" in text_of(figure)


def test_a_model_of_two_inputs_is_refused():
    prior = GaussianProcessPrior.preset("fixed")
    model = InContextRegressor(ModelConfig(width=16, hidden=16, heads=2, depth=1, input_dim=2))
    with pytest.raises(ValueError, match="input_dim: expected a model of 1 input, got one of 2"):
        look("fixed", prior, Trained(model=model, variant="mine", prior=prior, num_points=5))
