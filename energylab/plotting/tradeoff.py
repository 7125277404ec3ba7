"""What an error costs: excess MSE against parameters or operations, a point a model, over several studies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from energylab.analysis.statistics import over_seeds
from energylab.plotting import plots, tables
from energylab.plotting.style import INK, NEUTRAL, VenueFigure, recursion_colour, style

if TYPE_CHECKING:
    from energylab.study import StudyResults

COSTS = {"parameters": ("parameters (thousands)", 1e3), "flops": ("training TFLOP", 1e12)}
MARKERS = ("o", "^", "D", "v", "P", "X", "h", "<", ">", "s")


def draw_tradeoff(results: StudyResults, cost: str) -> VenueFigure:
    """`cost` is a column of `excess_by_run`: parameters or flops."""
    results, left_out = plots.equally_trained(results)
    points = tradeoff_points(results, cost)
    with style() as venue:
        figure, panels = plots.new_figure(1, 1, height=min(0.62 * venue.width, 3.4))
        axes = panels[0, 0]
        # on a narrow page, a legend of markers too would be as tall as the panel
        cut = tradeoff(axes, points, cost, by_study=venue.width > 4.5)
        axes.set_title(f"Error against {'size' if cost == 'parameters' else 'training cost'}")
        note = plots.seeds_note(points["n"], "Bars", cut=cut).replace(", each seed thin", "")
        what = (
            "A point a model, excess MSE averaged over $k$. Line and numbers: no other model here is better at that "
            "cost or less."
        )
        plots.finish(figure, f"{what} {note}", left_out, results.note)
    return figure


def tradeoff_table(results: StudyResults, cost: str) -> pd.DataFrame:
    """The numbers of `draw_tradeoff`, cheapest first, and whether each model is on the line."""
    results, left_out = plots.equally_trained(results)
    runs = plots.excess_by_run(results)
    name = {"parameters": "parameters", "flops": "TFLOP"}[cost]
    table = tables.excess_table(runs).sort_values([name, "excess MSE"], ignore_index=True)
    front = _front(table, name, "excess MSE")
    table["front"] = np.where(front, "yes", "")
    what = "Excess MSE and cost of every model; on the front where none is better at that cost or less."
    if cost == "flops":
        table = table.drop(columns="parameters")  # there is no room, and the other table has them
        places = np.flatnonzero(front).tolist()
        before = dict(zip(places[1:], places[:-1], strict=True))
        sentence = tables.add_cost_of_rmse(table, runs, [before.get(place) for place in range(len(table))])
        what += f" {sentence} the front's model before."
    return tables.captioned(table, f"{what} {left_out}".strip(), results)


def tradeoff_points(results: StudyResults, cost: str) -> pd.DataFrame:
    """A row a model: study, variant, T, n, mean, low, high, its `cost`, and whether it is on the `front`."""
    runs = plots.excess_by_run(results)
    by = ["study", "variant", "T"]
    points = over_seeds(runs, "excess_mse", by).merge(runs.drop_duplicates(by)[[*by, cost]], on=by)
    return points.assign(front=_front(points, cost, "mean"))


def tradeoff(axes: Axes, points: pd.DataFrame, cost: str, *, by_study: bool = True, named: bool = True) -> bool:
    """Draw what `tradeoff_points` returns: a colour a T, a marker a study if `by_study`, the front as a line, its models
    numbered and in the legend if `named`. Returns whether an interval is cut off at the frame.
    """
    label, unit = COSTS[cost]
    studies = [str(study) for study in sorted(set(points["study"]))]
    markers = dict(zip(studies, MARKERS if by_study else "o" * len(studies), strict=False))
    for key, rows in points.groupby(["study", "T"], dropna=False, sort=True):
        assert isinstance(key, tuple)
        study, recursions = key
        colour = NEUTRAL if pd.isna(recursions) else recursion_colour(int(recursions))
        places = rows[cost] / unit
        axes.vlines(places, rows["low"], rows["high"], color=colour, linewidth=0.8, alpha=0.4, zorder=2)
        axes.plot(places, rows["mean"], linestyle="", marker=markers[str(study)], color=colour, alpha=0.9, zorder=3)
    front = points.loc[points["front"]].sort_values(by=cost)
    axes.plot(front[cost] / unit, front["mean"], color=INK, linewidth=0.7, drawstyle="steps-post", zorder=1.5)
    if named:
        _legend(axes, points, markers if by_study and len(markers) > 1 else {})
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = float(np.min(points["mean"])), float(np.max(points["mean"]))
    bottom = float(np.min(points["low"].fillna(low).clip(lower=low / 1.5)))
    top = float(np.max(points["high"].fillna(high)))
    axes.set_ylim(0.92 * min(bottom, low / 1.12), 1.08 * min(max(top, high), 1.5 * high))
    left, right = float(np.min(points[cost])) / unit, float(np.max(points[cost])) / unit
    room = max((right / left) ** 0.05, 1.05)
    axes.set_xlim(left / room**2, right * room)
    for axis, range_of_many in ((axes.xaxis, 6), (axes.yaxis, 10)):  # numbers stand closer below each other than beside
        start, end = axis.get_view_interval()
        within = (1, 1.5, 2, 3, 4, 5, 6, 8) if end / start < range_of_many else (1, 2, 5)
        plots.plain_log_ticks(axis, within)
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)
    axes.set_ylabel("excess MSE (units of $y^2$)")
    if named:
        _name_front(axes, front, cost, unit)
    start, end = axes.get_ylim()
    return bool((points["low"] < start).any() or (points["high"] > end).any())


def _front(points: pd.DataFrame, cost: str, error: str) -> np.ndarray:
    """Whether no other model has a smaller error at the same cost or less."""
    pairs = list(zip(points[cost], points[error], strict=True))
    return np.array([not any(c <= own and e < err for c, e in pairs) for own, err in pairs], dtype=bool)


def _legend(axes: Axes, points: pd.DataFrame, markers: dict[str, str]) -> None:
    recursions = sorted({int(T) for T in points["T"].dropna()})
    for T in recursions:
        axes.plot([], [], linestyle="", marker="o", color=recursion_colour(T), label=f"$T={T}$")
    if len(points["T"].dropna()) < len(points):
        axes.plot([], [], linestyle="", marker="o", color=NEUTRAL, label="no recursion")
    for study, marker in markers.items():
        axes.plot([], [], linestyle="", marker=marker, color=INK, markerfacecolor="none", label=study.replace("_", " "))


def _name_front(axes: Axes, front: pd.DataFrame, cost: str, unit: float) -> None:
    """Numbers below and left of the points on the line, where by its definition there is no other, named in the legend."""
    figure = plots.figure_of(axes)
    with style(getattr(figure, "venue", None)) as venue:
        to_points = 72 * np.array([0.85 * figure.get_figwidth(), 0.6 * figure.get_figheight()])  # about: it grows yet
        taken: list[np.ndarray] = []
        for number, row in enumerate(front.to_dict("records"), start=1):
            at = (row[cost] / unit, row["mean"])
            place = axes.transLimits.transform(axes.transScale.transform(at)) * to_points - [4, 4]
            while any((abs(place - other) < [0.6 * venue.small, venue.small]).all() for other in taken):
                place = place - [0, venue.small]
            taken.append(place)
            offset = place - axes.transLimits.transform(axes.transScale.transform(at)) * to_points
            axes.annotate(
                f"{number}",
                at,
                xytext=tuple(offset),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=venue.small,
                color=INK,
                zorder=5,
            )
            recursions = "" if pd.isna(row["T"]) else f", $T={row['T']}$"
            look = {"linestyle": "", "marker": f"${number}$", "markersize": 5, "markeredgewidth": 0, "color": INK}
            axes.plot([], [], label=f"{row['variant']}{recursions}", **look)
