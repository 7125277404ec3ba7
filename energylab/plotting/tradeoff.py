"""What an error costs: excess MSE against parameters or operations, a point a model, over several studies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from energylab.analysis.statistics import over_seeds
from energylab.plotting import plots, tables
from energylab.plotting.style import INK, NEUTRAL, VenueFigure, recursion_colour, style

if TYPE_CHECKING:
    from energylab.study import StudyResults

COSTS = {"parameters": ("parameters (thousands)", 1e3), "flops": ("training TFLOP", 1e12)}
MARKERS = ("o", "^", "D", "v", "P", "X", "h", "<", ">", "s")


def draw_tradeoff(results: StudyResults, cost: str) -> VenueFigure:
    """`cost` is a column of `excess_by_run`: parameters or flops."""
    points = tradeoff_points(results, cost)
    with style() as venue:
        figure, panels = plots.new_figure(1, 1, height=min(0.62 * venue.width, 3.4))
        axes = panels[0, 0]
        tradeoff(axes, points, cost)
        axes.set_title(f"Error against {'size' if cost == 'parameters' else 'training cost'}")
        note = plots.seeds_note(points["n"], "Bars").replace(", each seed thin", "")
        what = (
            "A point a model, excess MSE averaged over $k$. Line and numbers: no other model here is better at that "
            "cost or less."
        )
        plots.finish(figure, f"{what} {note}", results.note)
    return figure


def tradeoff_table(results: StudyResults, cost: str) -> pd.DataFrame:
    """The numbers of `draw_tradeoff`, cheapest first, and whether each model is on the line."""
    runs = plots.excess_by_run(results)
    name = {"parameters": "parameters", "flops": "TFLOP"}[cost]
    table = tables.excess_table(runs).sort_values([name, "excess MSE"], ignore_index=True)
    table["on the front"] = np.where(_front(table[name], table["excess MSE"]), "yes", "")
    what = "Excess MSE and cost of every model; on the front where none is better at that cost or less."
    return tables.captioned(table, what, results)


def tradeoff_points(results: StudyResults, cost: str) -> pd.DataFrame:
    """A row a model: study, variant, T, n, mean, low, high, its `cost`, and whether it is on the `front`."""
    runs = plots.excess_by_run(results)
    by = ["study", "variant", "T"]
    points = over_seeds(runs, "excess_mse", by).merge(runs.drop_duplicates(by)[[*by, cost]], on=by)
    return points.assign(front=_front(points[cost], points["mean"]))


def tradeoff(axes: Axes, points: pd.DataFrame, cost: str, *, named: bool = True) -> None:
    """Draw what `tradeoff_points` returns: a colour a T, the front as a line; if `named`, a marker a study, and the
    models of the front numbered and named.
    """
    label, unit = COSTS[cost]
    markers = dict(zip(dict.fromkeys(sorted(points["study"])), MARKERS, strict=False))
    if not named:
        markers = dict.fromkeys(markers, "o")
    for (study, recursions), rows in points.groupby(["study", "T"], dropna=False, sort=True):
        colour = NEUTRAL if pd.isna(recursions) else recursion_colour(int(recursions))
        places = rows[cost] / unit
        axes.vlines(places, rows["low"], rows["high"], color=colour, linewidth=0.8, alpha=0.4, zorder=2)
        axes.plot(places, rows["mean"], linestyle="", marker=markers[str(study)], color=colour, alpha=0.9, zorder=3)
    front = points[points["front"]].sort_values(cost)
    axes.plot(front[cost] / unit, front["mean"], color=INK, linewidth=0.7, drawstyle="steps-post", zorder=1.5)
    if named:
        _legend(axes, points, markers if len(markers) > 1 else {})
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = points["mean"].min(), points["mean"].max()
    axes.set_ylim(low / 1.3, high * 1.2)
    left, right = points[cost].min() / unit, points[cost].max() / unit
    room = max((right / left) ** 0.08, 1.1)
    axes.set_xlim(left / room**2, right * room)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=12))
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(LogLocator(subs=(), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(label)
    axes.set_ylabel("excess MSE (units of $y^2$)")
    if named:
        _name_front(axes, front, cost, unit)


def _front(cost: pd.Series, error: pd.Series) -> pd.Series:
    """Whether no other model has a smaller error at the same cost or less."""
    pairs = list(zip(cost, error, strict=True))
    return pd.Series([not any(c <= own and e < err for c, e in pairs) for own, err in pairs], index=cost.index)


def _legend(axes: Axes, points: pd.DataFrame, markers: dict[str, str]) -> None:
    recursions = sorted({int(T) for T in points["T"].dropna()})
    for T in recursions:
        axes.plot([], [], linestyle="", marker="o", color=recursion_colour(T), label=f"$T={T}$")
    if points["T"].isna().any():
        axes.plot([], [], linestyle="", marker="o", color=NEUTRAL, label="no recursion")
    for study, marker in markers.items():
        axes.plot([], [], linestyle="", marker=marker, color=INK, markerfacecolor="none", label=study.replace("_", " "))


def _name_front(axes: Axes, front: pd.DataFrame, cost: str, unit: float) -> None:
    """Numbers below and left of the points on the line, where by its definition there is no other, named in the legend."""
    with style(getattr(axes.figure, "venue", None)) as venue:
        for number, row in enumerate(front.to_dict("records"), start=1):
            axes.annotate(
                f"{number}",
                (row[cost] / unit, row["mean"]),
                xytext=(-4, -4),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=venue.small,
                color=INK,
                zorder=5,
            )
            recursions = "" if pd.isna(row["T"]) else f", $T={row['T']}$"
            look = {"linestyle": "", "marker": f"${number}$", "markersize": 4.5, "color": INK}
            axes.plot([], [], label=f"{row['variant']}{recursions}", **look)
