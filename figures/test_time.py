"""What other T' at test time do: excess MSE over the Bayes floor against the steps T' taken in every layer, a line for
each T of training; and how far the energy of one layer falls, the last attention.

Weights and step size are those of training. The ring marks T' = T. Log axes: away from T the error grows by more than
ten times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from energylab.analysis.statistics import over_seeds
from energylab.plotting import plots, tables
from energylab.plotting.style import INK, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("test_time",)


def draw(results: StudyResults) -> Figure:
    tested = _tested(results)
    layers = [name for name in tested if str(name).startswith("energy_change ") and str(name).endswith("attention")]
    layers = [name for name in layers if tested[name].notna().all()][-1:]
    with style():
        count = 1 + len(layers)
        columns = plots.columns_that_fit(count, narrowest=2.4)
        figure, panels = plots.new_figure(count // columns, columns)
        error, *energies = panels.flat
        members = plots.series(tested)
        summaries = []
        for one in members:
            summaries.append(plots.mean_line(error, one, "test_recursions", "excess_mse"))
            _ring(error, one, summaries[-1])
        error.set_yscale("log")
        low, high = tested["excess_mse"].min(), tested["excess_mse"].max()
        error.set_ylim(0.75 * low, 1.35 * high)
        plots.plain_log_ticks(error.yaxis)
        error.set_ylabel("excess MSE (units of $y^2$)")
        error.set_title("Error at test time")
        error.plot([], [], linestyle="", marker="o", markerfacecolor="none", color=INK, label="as trained")
        bottom, top = error.get_ylim()
        cut = any((one["low"] < bottom).any() or (one["high"] > top).any() for one in summaries)
        for axes, name in zip(energies, layers, strict=True):
            axes.axhline(0, color=INK, linewidth=0.4, zorder=0.5)
            changes = [plots.mean_line(axes, one, "test_recursions", str(name)) for one in members]
            for one, change in zip(members, changes, strict=True):
                _ring(axes, one, change)
            cut |= plots.show_range(axes, [0.0, *tested[name]], changes, stretch=0.2)
            axes.set_ylabel("mean $E(z_{T'}) - E(z_0)$")
            axes.set_title(str(name).removeprefix("energy_change ").capitalize())
        for axes in panels.flat:
            tried = sorted(set(tested["test_recursions"]))
            plots.recursion_axis(axes, [number for number in tried if number & (number - 1) == 0] or tried)
            axes.set_xlim(tried[0] / 1.15, tried[-1] * 1.15)
            axes.set_xlabel("steps $T'$ at test time")
        what = "$T'$ steps in every layer, with the weights and the step size of training."
        if layers:
            what += " The layer of (b) meets another input at every $T'$, so its fall need not grow with $T'$."
        counts = (n for summary in summaries for n in summary["n"])
        plots.finish(figure, f"{what} {plots.seeds_note(counts, 'Bands', cut=cut)}", results.note)
    return figure


def table(results: StudyResults) -> DataFrame:
    """A row each (T, T')."""
    summary = over_seeds(_tested(results), "excess_mse", ["variant", "T", "test_recursions"])
    table = tables.interval_columns(summary, "excess MSE").rename(columns={"variant": "model", "test_recursions": "T'"})
    return tables.captioned(table, "Excess MSE with $T'$ steps at test time, trained with $T$.", results)


def _tested(results: StudyResults) -> DataFrame:
    if results.test_time.empty:
        raise ValueError(f"{results.name}: expected runs with test_recursions, tested with other T', got none")
    return results.test_time


def _ring(axes: Axes, one: plots.Series, summary: pd.DataFrame) -> None:
    here = summary[summary["test_recursions"] == one.recursions]
    look = {"linestyle": "", "marker": "o", "markersize": 6, "markerfacecolor": "none"}
    axes.plot(here["test_recursions"], here["mean"], color=one.colour, zorder=4, **look)
    powers = np.log2(summary["test_recursions"].to_numpy(float)) % 1 == 0
    axes.plot(
        summary["test_recursions"][powers],
        summary["mean"][powers],
        color=one.colour,
        linestyle="",
        marker=one.style.marker,
        markersize=2.5,
        zorder=4,
    )
