"""Whether a deep fall in energy is a sign of confidence: rank correlations, layer by layer, in and out of the prior."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from energylab.plotting import plots
from energylab.plotting.style import INK, VenueFigure, style

COLOURS = ("#2c6fbb", "#c8642b", "#1b7f79", "#8a5aa8", "#b08a1e", "#b5483a", "#5d8a3a", "#3a8a8a", "#6b6b6b")
TITLES = {"error": "Fall against the model’s error", "floor variance": "Fall against the floor’s variance"}


def draw_confidence(table: pd.DataFrame, *, model: str, tasks: int) -> VenueFigure:
    """`table` is what `energylab.analysis.confidence.fall_and_error` returns; `model` is what to call the model."""
    layers = list(dict.fromkeys(table["layer"]))
    conditions = list(dict.fromkeys(table["condition"]))
    with style():
        columns = plots.columns_that_fit(len(TITLES), narrowest=2.4)
        figure, panels = plots.new_figure(-(-len(TITLES) // columns), columns)
        for axes, (what, title) in zip(panels.flat, TITLES.items(), strict=True):
            _panel(axes, table.loc[table["against"] == what], layers, conditions)
            axes.set_title(title)
        reach = min(1.0, max(0.2, 1.1 * table[["low", "high"]].abs().max(axis=None)))
        for axes in panels.flat:
            axes.set_xlim(-reach, reach)
        groups = int(np.max(table["n"]))
        plots.finish(
            figure,
            f"{model}, queries of {tasks} test tasks a condition: Spearman’s rank correlation of $E(z_0)-E(z_T)$ among "
            f"tasks at the same $k$, mean over $k\\geq1$. Bars: 95% Student-$t$ interval over {groups} groups of tasks. "
            "Error: $|$prediction $-$ floor mean$|$. Left of 0: where energy falls deep, the value is small.",
        )
    return figure


def _panel(axes: Axes, rows: pd.DataFrame, layers: list[str], conditions: list[str]) -> None:
    axes.axvline(0, color=INK, linewidth=0.5, zorder=0.5)
    offsets = np.linspace(-0.28, 0.28, len(conditions)) if len(conditions) > 1 else [0.0]
    for condition, offset, colour in zip(conditions, offsets, COLOURS, strict=False):
        here = rows.loc[rows["condition"] == condition].set_index("layer").loc[layers]
        places = np.arange(len(layers)) + offset
        axes.hlines(places, here["low"], here["high"], color=colour, linewidth=1.4, zorder=2)
        axes.plot(here["mean"], places, linestyle="", marker="o", color=colour, label=condition, zorder=3)
    axes.set_yticks(range(len(layers)), [layer.replace("mlp", "MLP") for layer in layers])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.set_xlabel("rank correlation")
