"""How descent emerges over training: a column for each layer, query tokens of fixed validation tasks.

Top: E(z_t) − E(z_0) after each step t of the models with the largest T, so one sees which steps learn to go down. Middle:
what the whole layer falls by, a colour per T. Bottom: the share of positions whose energy rises, in the worst of the layer's
steps. All are medians or shares over positions, averaged over seeds. The axis of training steps is logarithmic, and linear
before the first record after the initial weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from energylab.analysis.statistics import over_seeds
from energylab.plotting import plots, tables
from energylab.plotting.style import INK, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("learning",)

LABELS = ("$E(z_t) - E(z_0)$", "$E(z_T) - E(z_0)$", "rising (%)")


def draw(results: StudyResults) -> Figure:
    if results.learning.empty:
        raise ValueError(f"{results.name}: expected runs that record their descent (trace_every), got none")
    query = results.learning.loc[results.learning["token"] == "query"].sort_values(["block", "part", "t", "step"])
    layers = list(dict.fromkeys(query["layer"]))
    largest = query["T"].max()
    counts = set()
    with style():
        columns = plots.columns_that_fit(len(layers), narrowest=1.4)
        groups = [layers[start : start + columns] for start in range(0, len(layers), columns)]
        figure, panels = plots.new_figure(len(LABELS) * len(groups), columns, shape=0.85)
        for number, group in enumerate(groups):
            rows = panels[len(LABELS) * number : len(LABELS) * (number + 1)]
            for axes, label in zip(rows[:, 0], LABELS, strict=True):
                axes.set_ylabel(label)
            for column, layer in zip(rows.T[: len(group)], group, strict=True):
                of_layer = query.loc[query["layer"] == layer]
                _steps(column[0], of_layer.loc[of_layer["T"] == largest])
                counts |= _layers(column[1], column[2], of_layer)
                for axes in column:
                    axes.set_title(layer.replace(" mlp", ", MLP").replace(" attention", ", attention"))
                    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
                    _training_axis(axes, of_layer["step"])
                column[2].set_xlabel("training step")
            for axes in rows[:, len(group) :].flat:
                axes.remove()
        plots.finish(
            figure,
            "Query tokens of validation tasks, medians over positions. First row of a layer: after each step $t$ of "
            f"$T={largest}$; band: "
            "interquartile range at $t=T$. Second: the whole layer. Third: share of positions whose energy rises, in "
            f"the worst of the layer’s steps. {plots.seeds_note(counts, 'Bands')}",
            results.note,
        )
    return figure


def table(results: StudyResults) -> DataFrame:
    """A row each (layer, T, training step), for the first and last record and two between: what the layer falls by."""
    query = results.learning.loc[results.learning["token"] == "query"]
    records = np.unique(query["step"])
    chosen = records[np.unique(np.linspace(0, len(records) - 1, 4).round().astype(int))]
    by = ["layer", "variant", "T", "step"]
    query = query[query["step"].isin(chosen)]
    fall = over_seeds(_whole_layer(query), "energy_change_median", by)
    worst = query.groupby(by)["fraction_rising"].max().mul(100).reset_index(name="worst % rising")
    table = tables.interval_columns(fall, "median change of E").merge(worst, on=by)
    what = (
        "Energy that each layer loses, $E(z_T)-E(z_0)$, while a model learns: median over the positions of query tokens. "
        "Last column: positions whose energy rises, in the worst step of the worst seed."
    )
    return tables.captioned(table.rename(columns={"variant": "model"}), what, results)


def _whole_layer(rows: DataFrame) -> DataFrame:
    """Of every run, the rows after its last step."""
    return rows.loc[rows["t"] == rows.groupby("run")["t"].transform("max")]


def _steps(axes: Axes, rows: DataFrame) -> None:
    """Every step of one T."""
    axes.axhline(0, color=INK, linewidth=0.4, zorder=0.5)
    (deepest,) = {one.recursions: one for one in plots.series(rows)}.values()
    last = int(np.max(rows["t"]))
    for t, of_step in rows.loc[rows["t"] > 0].groupby("t"):
        middle = over_seeds(of_step, "energy_change_median", ["step"])
        # the later the step, the closer to the colour of its T
        colour = tuple(1 - (0.25 + 0.75 * t / last) * (1 - part) for part in to_rgb(deepest.colour))
        axes.plot(middle["step"], middle["mean"], color=colour, linewidth=0.9, label=f"$t={t}$", zorder=2 + t / last)
        if t == last:
            low, high = (over_seeds(of_step, f"energy_change_{end}", ["step"])["mean"] for end in ("q25", "q75"))
            axes.fill_between(middle["step"], low, high, color=colour, alpha=0.16, linewidth=0, zorder=1)


def _layers(fall: Axes, rising: Axes, rows: DataFrame) -> set[int]:
    """The whole layer, for every T; returns the numbers of seeds behind its lines."""
    fall.axhline(0, color=INK, linewidth=0.4, zorder=0.5)
    keys = ["run", "variant", "T", "seed", "step"]
    worst = rows.groupby(keys, as_index=False)["fraction_rising"].max()
    counts = set()
    for one in plots.series(_whole_layer(rows)):
        counts |= set(plots.mean_line(fall, one, "step", "energy_change_median")["n"])
    for one in plots.series(worst.assign(percent=100 * worst["fraction_rising"])):
        plots.mean_line(rising, one, "step", "percent")
    top = max(10.0, 1.08 * rising.dataLim.y1)
    rising.set_ylim(-0.05 * top, top)
    return counts


def _training_axis(axes: Axes, steps: DataFrame) -> None:
    first, last = int(steps[steps > 0].min()), int(steps.max())
    axes.set_xscale("symlog", linthresh=first, linscale=0.4)
    powers = [10**power for power in range(9) if first < 10**power <= last]
    axes.xaxis.set_major_locator(FixedLocator([0, *powers]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(0, last)
