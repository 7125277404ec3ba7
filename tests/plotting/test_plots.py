"""The pieces of figures: what lines, bands, limits, legends and captions they leave on the axes."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_hex

from energylab.analysis.statistics import student_t
from energylab.plotting import VENUES, recursion_colour, style
from energylab.plotting.plots import (
    caption,
    columns_that_fit,
    finish,
    legend,
    mean_level,
    mean_line,
    mean_points,
    new_figure,
    recursion_axis,
    reference,
    seeds_note,
    series,
    show_range,
)
from energylab.plotting.style import NEUTRAL


def runs(seeds: int = 3) -> pd.DataFrame:
    random = np.random.default_rng(0)
    rows = [
        {"variant": variant, "T": T, "seed": seed, "k": k, "error": random.normal(1 / (1 + k), 0.01), "floor": 0.1 * k}
        for seed in range(seeds)
        for variant, T in [("Llama", pd.NA), ("CEM", 10), ("CEM", 2), ("B", 1)]
        for k in (2, 0, 1)
    ]
    return pd.DataFrame(rows).astype({"T": "Int64"})


@pytest.fixture
def axes():
    _, panels = new_figure(1, 1)
    return panels[0, 0]


def test_series_are_ordered_by_number_and_labelled() -> None:
    found = series(runs())
    assert [one.label for one in found] == ["B $T=1$", "CEM $T=2$", "CEM $T=10$", "Llama"]
    assert [one.recursions for one in found] == [1, 2, 10, None]
    assert [one.colour for one in found] == [*map(recursion_colour, (1, 2, 10)), NEUTRAL]
    assert all(len(one.rows) == 9 for one in found)


def test_mean_line_draws_mean_band_and_seeds(axes) -> None:
    frame = runs(seeds=4)
    one = series(frame)[1]
    summary = mean_line(axes, one, "k", "error")
    *seeds, mean = axes.lines
    assert len(seeds) == 4
    assert all(line.get_linewidth() < mean.get_linewidth() for line in seeds)
    assert {to_hex(line.get_color()) for line in axes.lines} == {one.colour}
    expected = [student_t(one.rows.loc[one.rows["k"] == k, "error"]) for k in (0, 1, 2)]
    assert list(mean.get_xdata()) == [0, 1, 2]
    assert list(mean.get_ydata()) == [interval.mean for interval in expected]
    assert list(summary["n"]) == [4, 4, 4]
    (band,) = [item for item in axes.collections if isinstance(item, FillBetweenPolyCollection)]
    corners = {tuple(point) for point in band.get_paths()[0].vertices}
    assert {(k, bound) for k, one in enumerate(expected) for bound in (one.low, one.high)} <= corners


def test_one_seed_has_neither_band_nor_thin_line(axes) -> None:
    one = series(runs(seeds=1))[0]
    assert mean_line(axes, one, "k", "error")["low"].isna().all()
    assert len(axes.lines) == 1
    assert not axes.collections


def test_mean_level_spans_the_panel(axes) -> None:
    one = series(runs()[lambda frame: frame["k"] == 0])[-1]
    summary = mean_level(axes, one, "error")
    *seeds, mean = axes.lines
    assert len(seeds) == 3
    assert mean.get_ydata()[0] == pytest.approx(np.mean(one.rows["error"]))
    (band,) = axes.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((summary["low"][0], summary["high"][0]))


def test_mean_points_have_a_bar_each_in_the_colour_of_T(axes) -> None:
    members = [one for one in series(runs()[lambda frame: frame["k"] == 0]) if one.variant == "CEM"]
    summary = mean_points(axes, members, "T", "error", factor=1.1)
    assert list(summary["T"]) == [2, 10]
    for one, row in zip(members, summary.itertuples(), strict=True):
        bar, point = [line for line in axes.lines if to_hex(line.get_color()) == one.colour]
        assert list(bar.get_ydata()) == [row.low, row.high]
        assert list(point.get_xdata()) == pytest.approx([1.1 * row.T])
    assert axes.get_legend_handles_labels()[1] == ["CEM"]


def test_reference_is_drawn_once_and_only_if_runs_agree(axes) -> None:
    frame = runs()
    reference(axes, frame, "k", "floor", "--", "Bayes floor")
    (line,) = axes.lines
    assert (line.get_linestyle(), list(line.get_xdata())) == ("--", [0, 1, 2])
    assert list(line.get_ydata()) == pytest.approx([0, 0.1, 0.2])
    frame.loc[5, "floor"] += 0.01
    with pytest.raises(ValueError, match=r"^floor: expected the same reference for all runs of a panel, got .* 0\.01;"):
        reference(axes, frame, "k", "floor", "--", "Bayes floor")


def interval(low: float, high: float) -> pd.DataFrame:
    return pd.DataFrame({"low": [low, math.nan], "high": [high, math.nan]})


@pytest.mark.parametrize(
    ("ends", "bottom", "top", "cut"),
    [((2.0, 3.0), 1, 4, False), ((0.0, 6.0), 0, 6, False), ((-50.0, 3.0), -2, 4, True), ((2.0, 50.0), 1, 7, True)],
)
def test_show_range_holds_values_and_bounds_intervals(axes, ends, bottom, top, cut) -> None:
    assert show_range(axes, [1.0, 4.0, math.nan], [interval(*ends)], stretch=1.0) is cut
    pad = 0.05 * (top - bottom)
    assert axes.get_ylim() == pytest.approx((bottom - pad, top + pad))


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_show_range_of_a_single_value(axes, value: float) -> None:
    assert show_range(axes, [value], stretch=1.0) is False
    low, high = axes.get_ylim()
    assert low < value < high


def test_recursion_axis_is_log2_with_plain_ticks(axes) -> None:
    recursion_axis(axes, [8, 1, 2, 2])
    axes.figure.canvas.draw()
    assert axes.get_xscale() == "log"
    assert axes.xaxis.get_transform().base == 2
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "8"]
    assert axes.get_xlim()[0] < 1 < 8 < axes.get_xlim()[1]


@pytest.mark.parametrize(
    ("counts", "note"),
    [
        ([1, 1], "$n=1$ seed, hence no interval."),
        ([5, 5], "Mean over $n=5$ seeds, each seed thin. Bands: 95% Student-$t$ interval over seeds."),
        ([2, 3], "Mean over $n=2$ to $3$ seeds, each seed thin. Bands: 95% Student-$t$ interval over seeds."),
        (
            [1, 3],
            "Mean over $n=1$ to $3$ seeds, each seed thin. "
            "Bands: 95% Student-$t$ interval over seeds (none where $n=1$).",
        ),
    ],
)
def test_seeds_note_says_n_and_which_interval(counts: list[int], note: str) -> None:
    assert seeds_note(counts, "Bands") == note


def test_panels_stack_where_the_page_is_narrow() -> None:
    with style("icml"):
        assert columns_that_fit(2, narrowest=2.4) == 2
        assert columns_that_fit(9, narrowest=1.4) == 4
    with style("icml-column"):
        assert columns_that_fit(2, narrowest=2.4) == 1
        assert columns_that_fit(1, narrowest=9) == 1


def test_legend_reads_row_by_row_and_fits() -> None:
    with style("icml-column"):
        figure, panels = new_figure(2, 1)
        labels = [f"variant number {i}" for i in range(5)]
        for axes in panels.flat:
            for label in labels:
                axes.plot([0, 1], label=label)
        before = figure.get_figheight()
        legend(figure)
        figure.canvas.draw()
    (box,) = figure.legends
    texts = sorted(box.get_texts(), key=lambda text: (-round(text.get_window_extent().y0), text.get_window_extent().x0))
    assert [text.get_text() for text in texts] == labels
    assert box.get_window_extent().width <= figure.bbox.width
    assert figure.get_figheight() > before


def test_caption_wraps_between_words_and_grows_the_page() -> None:
    with style("icml-column"):
        figure, _ = new_figure(1, 1)
        before = figure.get_figheight()
        formula = "$E(z_t) - E(z_0)$"
        caption(figure, f"the change {formula} " * 6, "", "The note.")
        figure.canvas.draw()
    (text,) = [text for text in figure.texts if text.get_text()]
    *lines, last = text.get_text().split("\n")
    assert last == "The note."
    assert len(lines) > 1
    assert " ".join(lines) == f"the change {formula} " * 5 + f"the change {formula}"
    assert all(line.count("$") % 2 == 0 for line in lines)
    extent = text.get_window_extent()
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.width
    assert figure.get_figheight() == pytest.approx(before + extent.height / figure.dpi + 0.05)


def test_finish_leaves_a_figure_without_words_alone() -> None:
    figure, panels = new_figure(1, 1)
    before = figure.get_size_inches().tolist()
    finish(figure, "")
    assert figure.get_size_inches().tolist() == before == [VENUES["plain"].width, before[1]]
    assert not figure.texts
    assert not figure.legends
    assert panels[0, 0].get_title(loc="left") == ""


def test_finish_letters_many_panels() -> None:
    figure, panels = new_figure(4, 7)
    panels[0, 1].set_title("with a name", loc="left")
    finish(figure)
    titles = [axes.get_title(loc="left") for axes in panels.flat]
    assert titles[:3] == ["(a)", "(b) with a name", "(c)"]
    assert titles[25:] == ["(z)", "(aa)", "(ab)"]
