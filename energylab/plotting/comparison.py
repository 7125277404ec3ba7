"""Models beside each other: excess MSE of each, and its difference to one of them, paired by seed.

A row a model, in the order of the study. Runs of one seed see the same tasks in the same order, so the second panel,
not the first, says which differences are more than chance.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from energylab.analysis.statistics import over_seeds, paired_differences
from energylab.plotting import plots, tables
from energylab.plotting.style import INK, NEUTRAL, VenueFigure, recursion_colour, style

if TYPE_CHECKING:
    from energylab.study import StudyResults

ONE_LINE, TWO_LINES = 1.65, 3.2
"""What a row takes, in heights of its text."""


def draw_comparison(
    results: StudyResults,
    reference: Mapping[str, Any],
    on: Sequence[str] = ("seed",),
    what: str = "",
) -> VenueFigure:
    """`reference` and `on` are those of `paired_differences`: which model the others are compared with, and what a pair
    shares. A study that lacks it is compared with its first model. `what` starts the caption.
    """
    runs = plots.excess_by_run(results)
    reference = _present(reference, runs)
    models = list(runs[["variant", "T"]].drop_duplicates().itertuples(index=False, name=None))
    with style() as venue:
        wide = venue.width > 4.5
        names = _names(models, runs, 60 if venue.width > 6 else 26)
        row = TWO_LINES if any("\n" in name for name in names) else ONE_LINE
        height = row * venue.small / 72 * (len(models) + 1) + 0.55
        figure, panels = plots.new_figure(*((1, 2) if wide else (2, 1)), height=height)
        level, gain = panels.flat
        summaries = [_rows(level, runs, "excess_mse", models)]
        cut = plots.show_range(level, runs["excess_mse"], summaries, stretch=1.0, along="x")
        level.set_xlabel("excess MSE (units of $y^2$)")
        level.set_title("Excess MSE")
        gain.axvline(0, color=INK, linewidth=0.6, zorder=0.5)
        if not _matches(runs, reference).all():
            pairs = paired_differences(runs, "excess_mse", reference, on)
            changes = _rows(gain, pairs, "difference", models)
            _mark_reference(gain, models, pairs)
            cut |= plots.show_range(gain, [0.0, *pairs["difference"]], [changes], stretch=1.0, along="x")
            summaries.append(changes)
        gain.set_xlabel("difference (units of $y^2$)")
        gain.set_title(f"Difference to {_name(reference)}")
        for axes in (level, gain):
            _model_axis(axes, names if axes is level or not wide else [""] * len(models))
        _costs(gain if wide else level, models, runs)
        counts = [n for summary in summaries for n in summary["n"]]
        note = plots.seeds_note(counts, "Bars", cut=cut).replace("each seed thin", "each seed a dot")
        several = " Intervals are not adjusted for the number of comparisons." if max(counts) > 1 else ""
        pairs = f"(b) is paired by {' and '.join(f'${name}$' if name == 'T' else name for name in on)}; left of 0 is better."
        plots.finish(figure, f"{what} {note}{several} {pairs} TFLOP: of a training.".strip(), results.note)
    return figure


def comparison_table(
    results: StudyResults, reference: Mapping[str, Any], on: Sequence[str] = ("seed",), what: str = ""
) -> pd.DataFrame:
    """The numbers of `draw_comparison`."""
    runs = plots.excess_by_run(results)
    reference = _present(reference, runs)
    table = tables.excess_table(runs, reference, on).drop(columns="study")
    difference = f"difference to {_name(reference)}".replace("$", "").replace("=", " = ")
    table = table.rename(columns={name: name.replace("difference", difference) for name in table})
    return tables.captioned(table, what or "Excess MSE over the Bayes floor.", results, adjusted=False)


def _present(reference: Mapping[str, Any], runs: pd.DataFrame) -> dict[str, Any]:
    found = {name: value for name, value in reference.items() if name in runs}
    if _matches(runs, found).any():
        return found
    first = runs.iloc[0]
    return {name: first[name] for name in reference}


def _matches(runs: pd.DataFrame, reference: Mapping[str, Any]) -> pd.Series:
    same = [
        runs[column].isna() if pd.isna(value) else runs[column].eq(value).fillna(False).astype(bool)
        for column, value in reference.items()
    ]
    return np.logical_and.reduce(same)


def _name(reference: Mapping[str, Any]) -> str:
    depth = f", $T={reference['T']}$" if pd.notna(reference.get("T", pd.NA)) else ""
    return f"{reference['variant']}{depth}"


def _names(models: Sequence[tuple[str, Any]], runs: pd.DataFrame, width: int) -> list[str]:
    several = runs["T"].nunique() > 1
    names = [
        # pandas' types fear that T could be a Series
        f"{variant}, $T={T}$" if several and pd.notna(T) else variant  # pyright: ignore[reportGeneralTypeIssues]
        for variant, T in models
    ]
    return [textwrap.fill(name, width) for name in names]


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


def _model_axis(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -1.0)
    for row in range(len(names)):
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
