"""How each layer of one model descends: energy, slope and direction, step by step, and the bottom that it did not reach."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from energylab.analysis.descent_report import DescentReport
from energylab.plotting import plots
from energylab.plotting.style import INK, VenueFigure, style

TOKENS = {"query": ("#2c6fbb", "-", "o"), "pair": ("#c8642b", (0, (5, 1.5)), "s")}
BOTTOM = "#1b7f79"


def draw_descent(report: DescentReport, *, model: str, tasks: int) -> VenueFigure:
    """Three panels a layer: energy, tangential gradient, and turn; `model` is what to call the model."""
    steps = report.steps
    layers = list(dict.fromkeys(steps["layer"]))
    with style():
        figure, panels = plots.new_figure(len(layers), 3, shape=0.62)
        for row, (layer, (energy, slope, turn)) in enumerate(zip(layers, panels, strict=True)):
            of_layer = steps.loc[steps["layer"] == layer]
            last = int(of_layer["step"].max())
            _lines(energy, of_layer, "energy_change_median", ("energy_change_q25", "energy_change_q75"))
            _bottom(energy, report, layer, last)
            energy.axhline(0, color=INK, linewidth=0.4, zorder=0.5)
            energy.set_ylabel("$E(z_t)-E(z_0)$")
            _lines(slope, of_layer, "tangential_norm_median")
            slope.margins(y=0.12)
            slope.set_ylim(bottom=0)
            slope.set_ylabel(r"$\|\Pi\nabla E(z_t)\|$")
            degrees = of_layer.assign(
                turn=np.degrees(of_layer["turn_median"]), angle=np.degrees(of_layer["angle_median"])
            )
            _lines(turn, degrees, "turn")
            if np.nanmax(degrees["angle"]) > 0.5:
                _lines(turn, degrees, "angle", faint=True)
            turn.margins(y=0.12)
            turn.set_ylim(bottom=0)
            turn.set_ylabel("turn (degrees)")
            for axes in (energy, slope, turn):
                plots.whole_number_axis(axes, max(last, 1), "step $t$" if row == len(layers) - 1 else "")
                axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
            energy.set_title(layer.replace("mlp", "MLP"))
            slope.set_title("slope left, along the sphere")
            turn.set_title("turn in a step")
        words = [
            f"{model}, {tasks} test tasks: medians over positions (lines), interquartile range (band).",
            _bottoms_note(report.layers),
            "Turn: angle between $z_t$ and $z_{t+1}$.",
        ]
        if np.nanmax(np.degrees(steps["angle_median"])) > 0.5:
            words.append(r"Thin: angle between the step and $-\nabla E$.")
        plots.finish(figure, " ".join(words))
    return figure


def _lines(axes: Axes, rows: pd.DataFrame, column: str, band: Sequence[str] = (), faint: bool = False) -> None:
    for token, (colour, line, marker) in TOKENS.items():
        of_token = rows.loc[(rows["token"] == token) & rows[column].notna()].sort_values("step")
        if of_token.empty:
            continue
        if band:
            low, high = (of_token[end] for end in band)
            axes.fill_between(of_token["step"], low, high, color=colour, alpha=0.15, linewidth=0, zorder=1)
        look: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.8} if faint else {"marker": marker, "markersize": 3}
        label = None if faint else f"{token} tokens"
        axes.plot(of_token["step"], of_token[column], color=colour, linestyle=line, label=label, zorder=3, **look)


def _bottom(axes: Axes, report: DescentReport, layer: str, last: int) -> None:
    """The bottom's own depth below z_0: median over the positions where it was looked for."""
    rows = report.gaps.loc[report.gaps["layer"] == layer]
    if rows.empty:
        return
    depth = -(rows["fall"] + rows["gap"]).median()
    axes.axhline(depth, color=BOTTOM, linewidth=1.0, linestyle=":", label="bottom (median)", zorder=2)
    axes.set_ylim(bottom=min(axes.get_ylim()[0], depth * 1.06))


def _bottoms_note(layers: pd.DataFrame) -> str:
    known = layers["stationary"].dropna().to_numpy(float)
    if not len(known):
        return ""
    share = known.min()
    reached = "everywhere" if share == 1 else f"at {100 * share:.0f}% of positions or more"
    return f"Bottom: where L-BFGS comes to rest from $z_T$ ({reached})."


def draw_curvature(table: pd.DataFrame, *, model: str) -> VenueFigure:
    """Both ends of the Riemannian Hessian's eigenvalues along the path and at the bottom, a panel a layer.

    `table` is what `energylab.analysis.curvature.curvature` returns.
    """
    layers = list(dict.fromkeys(table["layer"]))
    with style():
        columns = plots.columns_that_fit(min(len(layers), 4), narrowest=1.5)
        figure, panels = plots.new_figure(-(-len(layers) // columns), columns, shape=0.8)
        for axes in panels.flat[len(layers) :]:
            axes.remove()
        for axes, layer in zip(panels.flat, layers, strict=False):
            _curvature(axes, table.loc[table["layer"] == layer])
            axes.set_title(layer.replace("mlp", "MLP"))
        for row in panels:
            row[0].set_ylabel("curvature of $E$")
        words = [
            f"{model}: smallest and largest eigenvalue of the Riemannian Hessian at $z_t$ and at the bottom $z_*$;"
            " medians over positions, bars: interquartile range.",
            _conditions(table),
        ]
        plots.finish(figure, " ".join(words))
    return figure


def _curvature(axes: Axes, rows: pd.DataFrame) -> None:
    last = int(np.max(rows["step"]))
    places = rows["step"].where(rows["at"] == "step", last + 1)
    axes.axhline(0, color=INK, linewidth=0.5, zorder=0.5)
    axes.axvspan(last + 0.5, last + 1.5, color=BOTTOM, alpha=0.08, linewidth=0)
    for column, colour, marker, label in (
        ("largest", "#7a3b8f", "^", "largest"),
        ("smallest", "#2c6fbb", "v", "smallest"),
    ):
        groups = rows[column].groupby(places)
        middle, low, high = groups.median(), groups.quantile(0.25), groups.quantile(0.75)
        axes.vlines(middle.index, low, high, color=colour, linewidth=1.2, zorder=2)
        axes.plot(middle.index, middle, color=colour, marker=marker, markersize=4, linewidth=0.7, label=label, zorder=3)
    axes.margins(y=0.1)
    axes.set_xticks([*range(last + 1), last + 1], [*(f"$z_{t}$" for t in range(last + 1)), "$z_*$"])
    axes.set_xlim(-0.5, last + 1.5)


def _conditions(table: pd.DataFrame) -> str:
    bottoms = table.loc[table["at"] == "bottom"]
    words = []
    for layer, rows in bottoms.groupby("layer", sort=False):
        known = rows["condition"].median()
        text = f"{str(layer).replace('mlp', 'MLP')} {'unknown' if np.isnan(known) else f'{known:.3g}'}"
        kind = rows["preconditioner"].iloc[0]
        if kind == "positive definite":
            text += f" ({rows['preconditioned_condition'].median():.3g} with $P$)"
        elif kind != "I":
            text += f" ({kind})"
        words.append(text)
    return "Condition number at the bottom, median: " + ", ".join(words) + "."
