"""Figures that compare models: what every one of them must satisfy, in every venue and with 1, 2, 3 and 5 seeds, and
what each shows."""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from energylab.analysis.statistics import student_t
from energylab.plotting import VENUES, save, style
from energylab.plotting.tables import NO_INTERVAL, save_table, to_latex
from energylab.project import together
from energylab.study import load_study

COMPARISONS = (
    "diagonal",
    "preconditioner",
    "looping",
    "tied_weights",
    "untying",
    "repelling",
    "update_rule",
    "full_cem",
    "tuned",
)
OTHERS = ("training_curves", "stability", "test_time", "generalisation", "error_vs_parameters", "error_vs_operations")
NAMES = (*COMPARISONS, *OTHERS, "circuits", "summary")
# every figure where text is most crowded, and in one other venue; every number of seeds in some figures
PAGES = [(name, "icml-column", (2, 3)[i % 2]) for i, name in enumerate(NAMES)]
PAGES += [(name, ("neurips", "icml", "plain")[i % 3], (1, 5)[i % 2]) for i, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def results_of(study: Callable, models: Callable) -> Callable:
    """What a figure needs, with so many seeds."""

    @functools.cache
    def make(module, seeds: int, note: str = ""):
        options = {"seeds": seeds, "note": note}
        needed = [study(**options) if need == "recursion" else models(need, **options) for need in module.NEEDS]
        return together(needed)

    return make


@pytest.mark.parametrize(("name", "venue", "seeds"), PAGES)
def test_nothing_is_clipped_or_overlaps(
    name: str, venue: str, seeds: int, results_of: Callable, figure_file: Callable, monkeypatch
) -> None:
    module = figure_file(name)
    with style(venue):
        figure = module.draw(results_of(module, seeds))
    figure.canvas.draw()  # the layout is settled once it has been drawn
    drawn = []
    original = Text.draw

    def record(self: Text, renderer) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn.append((self.get_text(), self.get_window_extent(renderer)))
        original(self, renderer)

    monkeypatch.setattr(Text, "draw", record)
    figure.canvas.draw()
    assert figure.get_figwidth() == VENUES[venue].width
    for i, (text, box) in enumerate(drawn):
        assert box.x0 >= -0.5, text
        assert box.y0 >= -0.5, text
        assert box.x1 <= figure.bbox.width + 0.5, text
        assert box.y1 <= figure.bbox.height + 0.5, text
        for other_text, other in drawn[:i]:
            shared = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
            assert min(shared) < 1.5, f"{text!r} overlaps {other_text!r}"
    for axes in figure.axes:
        assert axes.lines
        panel = axes.get_window_extent()
        assert min(panel.width, panel.height) / figure.dpi > 0.6  # inches
    words = " ".join(text for text, _ in drawn).replace("\n", " ")
    assert ("$n=1$ seed" if seeds == 1 else f"$n={seeds}$ seeds") in words
    assert module.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_tables_say_seeds_and_interval(name: str, results_of: Callable, figure_file: Callable, tmp_path) -> None:
    module = figure_file(name)
    for seeds in (1, 3):
        table = module.table(results_of(module, seeds, note="Only a test."))
        assert len(table) > 1
        tex, csv = (path.read_text() for path in save_table(table, tmp_path / name, name))
        assert r"\toprule" in tex
        assert rf"\label{{tab:{name}}}" in tex
        assert "Only a test." in tex
        assert "nan" not in tex
        (columns,) = re.findall(r"\\begin{tabular}{([lr]+)}", tex)
        rows = [line for line in tex.splitlines() if line.endswith(r"\\")]
        assert len(rows) == len(table) + 1
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns)}
        commands = "begin end centering caption label toprule midrule bottomrule textbackslash"
        commands += " medskip footnotesize setlength tabcolsep"
        assert set(re.findall(r"\\([a-z]+)", tex)) <= set(commands.split())  # no package but booktabs
        assert len(csv.splitlines()) == len(table) + 1
        if name == "circuits":  # medians and extremes over heads, of which every one is shown
            assert f"$n={seeds}$ seed" in tex
            continue
        assert (NO_INTERVAL in tex) == (seeds == 1)
        assert (r"$n=3$ seeds; in brackets, the 95\% Student-$t$ interval" in tex) == (seeds == 3)


def test_what_a_thousandth_of_rmse_costs(models: Callable, figure_file: Callable) -> None:
    """Along the front, each model against the one before it."""
    results = models("looping", seeds=3)
    table = figure_file("error_vs_operations").table(results)
    errors = results.errors[results.errors["condition"] == "in-prior"].assign(square=lambda rows: rows["rmse"] ** 2)
    pooled = errors.groupby(["variant", "T", "seed"])["square"].mean().pow(0.5).groupby(["variant", "T"]).mean()
    before = None
    for row in table.to_dict("records"):
        assert row["RMSE"] == pytest.approx(pooled[row["model"], row["T"]])
        if row["front"] == "yes" and before is not None:
            cost = (row["TFLOP"] - before["TFLOP"]) / (1000 * (before["RMSE"] - row["RMSE"]))
            assert row["TFLOP / 0.001"] == pytest.approx(cost)
        else:
            assert math.isnan(row["TFLOP / 0.001"])
        before = row if row["front"] == "yes" else before
    assert (table["front"] == "yes").sum() > 1


def test_latex_escapes_words_and_keeps_formulas() -> None:
    table = pd.DataFrame(
        {"a_b %": ["x & y_1 #$", "~^\\{}"], "change": [-1.5, math.nan], "change low": [-2.0, math.nan]}
    )
    table["change high"] = [-1e-5, math.nan]
    table.attrs["caption"] = "5 % of $x_1$, a_b."
    tex = to_latex(table, "one")
    assert r"\caption{5 \% of $x_1$, a\_b.}" in tex
    assert r"a\_b \% & change \\" in tex
    assert r"x \& y\_1 \#\$ & $-$1.5 [$-$2, $-$1e$-$05] \\" in tex
    assert r"\~{}\^{}\textbackslash{}\{\} & -- \\" in tex


@pytest.mark.parametrize("name", ["tied_weights", "error_vs_parameters", "test_time"])
def test_bytes_are_the_same_when_drawn_twice(name: str, results_of: Callable, figure_file: Callable, tmp_path) -> None:
    module = figure_file(name)
    results = results_of(module, 2)
    files = [[path.read_bytes() for path in save(module.draw(results), tmp_path / str(i))] for i in range(2)]
    assert files[0] == files[1]
    assert b"/Type3" not in files[0][0]
    assert b"/FontFile2" in files[0][0]


def test_a_comparison_shows_means_intervals_and_paired_differences(models: Callable, figure_file: Callable) -> None:
    results = models("looping", seeds=5)
    level, gain = figure_file("looping").draw(results).axes
    assert [label.get_text() for label in level.get_yticklabels()][:3] == [
        "CEM, $T=1$",
        "CEM, $T=2$",
        "CEM, equal operations, $T=2$",
    ]
    values = results.errors.groupby(["variant", "T", "seed"])["excess_mse"].mean()
    looped, base = values["CEM looped block", 1], values["CEM", 2]
    for axes, sample in ((level, looped), (gain, looped - base)):
        expected = student_t(sample)
        bars = [line for line in axes.lines if list(line.get_ydata()) == [4, 4] and line.get_linewidth() > 1.5]
        assert [list(line.get_xdata()) for line in bars] == [pytest.approx([expected.low, expected.high])]
        (dots,) = [line for line in axes.lines if np.allclose(line.get_ydata(), 4.28)]
        assert sorted(dots.get_xdata()) == pytest.approx(sorted(sample))
    assert gain.get_title(loc="left") == "(b) Difference to CEM, $T=2$"
    (reference,) = [line for line in gain.lines if line.get_markerfacecolor() == "white"]
    assert (list(reference.get_xdata()), list(reference.get_ydata())) == ([0.0], [1])


def test_a_comparison_at_equal_recursions(models: Callable, figure_file: Callable) -> None:
    table = figure_file("diagonal").table(models("diagonal", seeds=3)).set_index(["model", "T"])
    column = "difference to CEM no diagonal"
    for T in (1, 2):
        expected = table.loc[("CEM", T), "excess MSE"] - table.loc[("CEM no diagonal", T), "excess MSE"]
        assert table.loc[("CEM", T), column] == pytest.approx(expected)
        assert np.isnan(table.loc[("CEM no diagonal", T), column])


def test_a_study_without_the_reference_is_compared_with_its_first_model(
    models: Callable, figure_file: Callable
) -> None:
    _, gain = figure_file("preconditioner").draw(models("looping")).axes
    assert gain.get_title(loc="left") == "(b) Difference to CEM"
    _, gain = figure_file("looping").draw(models("tied_weights")).axes
    assert gain.get_title(loc="left") == "(b) Difference to Llama"


def test_windows_of_training_curves_count_every_step_once(models: Callable, figure_file: Callable) -> None:
    training = models("recursion", seeds=2).training
    means, window = figure_file("training_curves").windows(training)
    assert window == 400
    one = means[means["run"] == means["run"].iloc[0]]
    rows = training[training["run"] == means["run"].iloc[0]]
    assert list(one["step"]) == list(range(200, 10_000, 400))
    assert one["excess_loss"].mean() == pytest.approx(rows["excess_loss"].mean())
    short = training[training["step"] <= 9_600 - 200]
    means, window = figure_file("training_curves").windows(short)
    assert (window, means["step"].max()) == (400, 9_300)


def test_the_front_holds_what_nothing_beats(results_of: Callable, figure_file: Callable) -> None:
    module = figure_file("error_vs_parameters")
    table = module.table(results_of(module, 3))
    for row in table.itertuples():
        cheaper = table[table["parameters"] <= row.parameters]
        best = (cheaper["excess MSE"] >= table.loc[row.Index, "excess MSE"]).all()
        assert best == (table.loc[row.Index, "front"] == "yes")
    figure = module.draw(results_of(module, 3))
    numbered = [text.get_text() for text in figure.axes[0].texts]
    assert numbered == [str(i + 1) for i in range((table["front"] == "yes").sum())]


def test_generalisation_draws_the_training_prior_only_where_the_law_changed(models: Callable, figure_file) -> None:
    results = models("generalisation", seeds=3)
    figure = figure_file("generalisation").draw(results)
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "Bayes, training prior"]
    conditions = list(dict.fromkeys(results.errors["condition"]))
    changed = [conditions[int(row)] for row in line.get_ydata()]
    assert changed == ["held-out-kernel", "double-noise", "short-lengthscale", "mean-offset"]
    assert list(line.get_xdata()) == pytest.approx([0.01] * 4)


def test_test_time_rings_what_was_trained(models: Callable, figure_file: Callable) -> None:
    results = models("test_time", seeds=3)
    error, energy = figure_file("test_time").draw(results).axes
    rings = [line for line in error.lines if line.get_markersize() == 6]
    assert [list(line.get_xdata()) for line in rings] == [[1], [2], [4], [8]]
    assert energy.get_title(loc="left") == "(b) Block 1 attention"


@pytest.mark.parametrize("name", ["diagonal", "training_curves", "test_time", "generalisation", "stability", "summary"])
def test_nothing_to_draw_is_refused(name: str, models: Callable, figure_file: Callable) -> None:
    results = models("looping", seeds=1)
    none = type(results)(
        name="looping",
        note="",
        source="",
        errors=results.errors[:0],
        descent=results.descent,
        training=results.training[:0],
    )
    with pytest.raises(ValueError, match=r"^looping: expected .* got none$"):
        figure_file(name).draw(none)


def test_studies_trained_for_another_time_are_left_out_and_named(results_of: Callable, figure_file: Callable) -> None:
    module = figure_file("error_vs_parameters")
    results = results_of(module, 1)
    steps = results.errors["steps"].where(results.errors["study"] != "looping", 3_000)
    table = module.table(replace(results, errors=results.errors.assign(steps=steps)))
    assert "looping" not in set(table["study"])
    assert set(module.table(results)["study"]) > set(table["study"])
    assert "Left out, since trained for another time: looping (3,000 steps)." in table.attrs["caption"]


def test_the_example_of_the_docs_works(study: Callable) -> None:
    text = (Path(__file__).parents[2] / "docs/figures.md").read_text()
    module: dict = {}
    exec(text.partition("```python\n")[2].partition("```")[0], module)
    results = study(seeds=2)
    assert len(module["draw"](results).axes[0].lines) == 5
    assert list(module["table"](results)["seeds"]) == [2] * 5


def test_the_landscapes_of_a_stored_study(figure_file: Callable) -> None:
    module = figure_file("landscape")
    results = load_study(Path(__file__).parents[2] / "studies/results/recursion")
    figure = module.draw(results)
    assert [axes.get_title(loc="left") for axes in figure.axes][:2] == ["(a) CEM $T=1$", "(b) CEM $T=8$"]
    table = module.table(results)
    assert list(table["step"]) == [0, 1, *range(9)]
    assert (table.groupby("model")["E - E0"].diff().dropna() < 0).all()
