"""Models beside each other: excess MSE of each, and its difference to one of them, paired by seed.

A row a model, in the order of the study. Runs of one seed see the same tasks in the same order, so the second panel,
not the first, says which differences are more than chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from energylab.analysis.statistics import over_seeds, paired_differences
from energylab.plotting import plots, tables
from energylab.plotting.style import INK, NEUTRAL, Venue, VenueFigure, recursion_colour, style

if TYPE_CHECKING:
    from energylab.study import StudyResults

ROW = 0.19
"""Inches a row takes."""


def draw_comparison(
    results: StudyResults,
    reference: Mapping[str, Any],
    on: Sequence[str] = ("seed",),
    what: str = "",
    column: str | None = None,
) -> VenueFigure:
    """`reference` and `on` are those of `paired_differences`: which model the others are compared with, and what a pair
    shares. A study that lacks it is compared with its first model. `what` starts the caption. A `column` of the
    training's log is drawn below, against the step.
    """
    runs = plots.excess_by_run(results)
    reference = _present(reference, runs)
    models = list(runs[["variant", "T"]].drop_duplicates().itertuples(index=False, name=None))
    with style() as venue:
        wide = venue.width > 4.5
        height = ROW * (len(models) + 1) + 0.55
        if column is None:
            figure, panels = plots.new_figure(*((1, 2) if wide else (2, 1)), height=height)
            level, gain = panels.flat
        else:
            figure, level, gain, below = _with_a_panel_below(venue, wide, height)
            _training(below, results.training, column)
        summaries = [_rows(level, runs, "excess_mse", models)]
        cut = plots.show_range(level, runs["excess_mse"], summaries, stretch=1.0, along="x")
        level.set_xlabel("excess MSE (units of $y^2$)")
        level.set_title("Excess over the Bayes floor")
        gain.axvline(0, color=INK, linewidth=0.6, zorder=0.5)
        if len(runs) > len(runs.merge(pd.DataFrame([reference]))):
            pairs = paired_differences(runs, "excess_mse", reference, on)
            changes = _rows(gain, pairs, "difference", models)
            _mark_reference(gain, models, pairs)
            cut |= plots.show_range(gain, [0.0, *pairs["difference"]], [changes], stretch=1.0, along="x")
            summaries.append(changes)
        gain.set_xlabel("difference (units of $y^2$); left of 0 is better")
        gain.set_title(f"Paired difference to {_name(reference, runs, on)}")
        for axes in (level, gain):
            labelled = axes is level or not wide
            _model_axis(axes, models, runs, labelled)
        _costs(gain if wide else level, models, runs)
        counts = [n for summary in summaries for n in summary["n"]]
        note = plots.seeds_note(counts, "Bars", cut=cut).replace("each seed thin", "each seed a dot")
        several = " Not adjusted for the number of comparisons." if max(counts) > 1 and len(models) > 2 else ""
        plots.finish(figure, f"{what} {note}{several} TFLOP: training, per run.".strip(), results.note)
    return figure


def comparison_table(
    results: StudyResults, reference: Mapping[str, Any], on: Sequence[str] = ("seed",), what: str = ""
) -> pd.DataFrame:
    """The numbers of `draw_comparison`."""
    runs = plots.excess_by_run(results)
    reference = _present(reference, runs)
    table = tables.excess_table(runs, reference, on).drop(columns="study")
    difference = f"difference to {_name(reference, runs, on)}".replace("$", "").replace("=", " = ")
    table = table.rename(columns={name: name.replace("difference", difference) for name in table})
    return tables.captioned(table, what or "Excess MSE over the Bayes floor.", results, adjusted=False)


def _with_a_panel_below(venue: Venue, wide: bool, height: float) -> tuple[VenueFigure, Axes, Axes, Axes]:
    names = [["level", "gain"], ["below", "below"]] if wide else [["level"], ["gain"], ["below"]]
    below = 1.7
    heights = [*([height] * (len(names) - 1)), below]
    figure = VenueFigure(venue.name, sum(heights))
    panels = figure.subplot_mosaic(names, height_ratios=heights)
    return figure, panels["level"], panels["gain"], panels["below"]


def _training(axes: Axes, training: pd.DataFrame, column: str) -> None:
    """A column of the training's log against the step: thin lines for single seeds, their median on top."""
    for one in plots.series(training):
        for _, seed in one.rows.groupby("seed"):
            seed = seed.sort_values("step")
            axes.plot(seed["step"], seed[column], color=one.colour, linewidth=0.4, alpha=0.5, zorder=1.5)
        middle = one.rows.groupby("step")[column].median()
        axes.plot(middle.index, middle, color=one.colour, linestyle=one.style.line, label=one.label, zorder=3)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    plots.whole_number_axis(axes, int(np.max(training["step"])), "training step")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel(column.removesuffix("_max").replace("_", " "))
    axes.set_title(f"Largest {column.removesuffix('_max').replace('_', ' ')} between two logged steps; line: median")


def _present(reference: Mapping[str, Any], runs: pd.DataFrame) -> dict[str, Any]:
    found = {name: value for name, value in reference.items() if name in runs}
    chosen = pd.Series(True, index=runs.index)
    for column, value in found.items():
        chosen &= runs[column].eq(value).fillna(False).astype(bool)
    if chosen.any():
        return found
    first = runs.iloc[0]
    return {name: first[name] for name in reference}


def _name(reference: Mapping[str, Any], runs: pd.DataFrame, on: Sequence[str]) -> str:
    same = " of equal $T$" if "T" in on and runs["T"].nunique() > 1 else ""
    depth = f", $T={reference['T']}$" if pd.notna(reference.get("T", pd.NA)) else ""
    return f"{reference['variant']}{depth}{same}"


def _rows(axes: Axes, frame: pd.DataFrame, value: str, models: Sequence[tuple[str, Any]]) -> pd.DataFrame:
    """Mean, interval and seeds of each model on a row of its own."""
    summary = over_seeds(frame, value, ["variant", "T"])
    for row, (variant, recursions) in enumerate(models):
        of_model = _of(summary, variant, recursions)
        if of_model.empty:
            continue
        colour = NEUTRAL if pd.isna(recursions) else recursion_colour(int(recursions))
        ((n, mean, low, high),) = of_model[["n", "mean", "low", "high"]].itertuples(index=False, name=None)
        if n > 1:
            seeds = _of(frame, variant, recursions)[value]
            axes.plot(seeds, np.full(len(seeds), row + 0.28), linestyle="", marker=".", markersize=2.2, color=NEUTRAL)
            axes.plot([low, high], [row, row], color=colour, linewidth=1.6, solid_capstyle="butt", zorder=3)
        axes.plot([mean], [row], color=colour, linestyle="", marker="s" if pd.isna(recursions) else "o", zorder=4)
    return summary


def _mark_reference(axes: Axes, models: Sequence[tuple[str, Any]], pairs: pd.DataFrame) -> None:
    """An open circle at 0 for what the others are compared with."""
    rows = [row for row, model in enumerate(models) if _of(pairs, *model).empty]
    axes.plot([0.0] * len(rows), rows, linestyle="", marker="o", color=INK, markerfacecolor="white", zorder=4)


def _of(frame: pd.DataFrame, variant: str, recursions: Any) -> pd.DataFrame:
    same = frame["T"].isna() if pd.isna(recursions) else frame["T"].eq(recursions).fillna(False).astype(bool)
    return frame.loc[frame["variant"].eq(variant) & same]


def _model_axis(axes: Axes, models: Sequence[tuple[str, Any]], runs: pd.DataFrame, labelled: bool) -> None:
    several = runs["T"].nunique() > 1
    names = [f"{variant}, $T={T}$" if several and pd.notna(T) else variant for variant, T in models]
    axes.set_yticks(range(len(models)), names if labelled else [""] * len(models))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(models) - 0.4, -1.0)
    for row in range(len(models)):
        axes.axhline(row, color=NEUTRAL, linewidth=0.3, alpha=0.35, zorder=0)


def _costs(axes: Axes, models: Sequence[tuple[str, Any]], runs: pd.DataFrame) -> None:
    """Parameters and operations of each model, as numbers at the right."""
    with style(getattr(axes.figure, "venue", None)) as venue:
        for offset, header, column, unit in ((30, "params", "parameters", 1e3), (58, "TFLOP", "flops", 1e12)):
            texts = [header]
            for variant, recursions in models:
                cost = _of(runs, variant, recursions)[column].iloc[0] / unit
                digits = f"{cost:.1f}" if cost >= 0.05 else f"{cost:.1g}"
                texts.append(f"{digits}k" if unit == 1e3 else digits)
            for row, text in enumerate(texts, start=-1):
                axes.annotate(
                    text,
                    (1, row + (0.25 if row < 0 else 0)),
                    xycoords=axes.get_yaxis_transform(),
                    xytext=(offset, 0),
                    textcoords="offset points",
                    ha="right",
                    va="center",
                    fontsize=venue.small,
                    color=INK,
                    annotation_clip=False,
                )
