"""What walking further, or stopping early, does to a trained model's error and energy."""

import pandas as pd
from matplotlib.axes import Axes

from energylab.plotting import plots
from energylab.plotting.style import INK, VenueFigure, recursion_colour, style

EARLY = "#1b7f79"
PARTS = {"attention": "-", "mlp": "--"}


def draw_sweep(sweep: pd.DataFrame, exits: pd.DataFrame, trained: int, *, model: str, tasks: int) -> VenueFigure:
    """`sweep` and `exits` as `energylab.analysis.recursion` returns them; `exits` may be empty. `trained` is T."""
    with style():
        columns = plots.columns_that_fit(2, narrowest=2.4)
        figure, panels = plots.new_figure(2 // columns, columns)
        error, energy = panels.flat
        _errors(error, sweep, exits, trained)
        _energies(energy, sweep, trained)
        words = (
            f"{model}, {tasks} test tasks, one run. $T'$ steps in every layer, with the weights and the step size "
            f"trained at $T={trained}$. (b): each layer starts where those before it came with $T'$ steps, so a fall may "
            "shrink though every step goes down."
        )
        if not exits.empty:
            words += (
                " Early exit: a position leaves a layer after the first step that lowers its energy by less than"
                f" {exits['tolerance'].max():g} (left) to {exits['tolerance'].min():g} (right)."
            )
        plots.finish(figure, words)
    return figure


def _errors(axes: Axes, sweep: pd.DataFrame, exits: pd.DataFrame, trained: int) -> None:
    colour = recursion_colour(trained)
    sweep = sweep.sort_values("recursions")
    axes.plot(
        sweep["recursions"], sweep["excess_mse"], color=colour, marker="o", label="$T'$ steps everywhere", zorder=3
    )
    here = sweep.loc[sweep["recursions"] == trained]
    axes.plot(
        here["recursions"],
        here["excess_mse"],
        color=colour,
        linestyle="",
        marker="o",
        markersize=8,
        markerfacecolor="none",
        label="as trained",
        zorder=4,
    )
    if not exits.empty:
        exits = exits.sort_values("steps")
        axes.plot(
            exits["steps"], exits["excess_mse"], color=EARLY, marker="s", linestyle="--", label="early exit", zorder=3
        )
    axes.set_yscale("log")
    _steps_axis(axes, sweep)
    axes.set_xlabel("steps a position takes in a layer, mean")
    axes.set_ylabel("excess MSE (units of $y^2$)")
    axes.set_title("Error at test time")


def _energies(axes: Axes, sweep: pd.DataFrame, trained: int) -> None:
    names = [name for name in sweep if str(name).startswith("energy_change ")]
    axes.axhline(0, color=INK, linewidth=0.4, zorder=0.5)
    axes.axvline(trained, color=INK, linewidth=0.5, linestyle=":", zorder=0.6)
    blocks = sorted({str(name).split()[2].rstrip(",") for name in names})
    shades = dict(zip(blocks, ("#4878a8", "#b5483a", "#5d8a3a", "#8a5aa8", "#a88a3a", "#3a8a8a"), strict=False))
    for name in names:
        _, _, block, part, *_ = str(name).replace(",", "").split()
        label = str(name).removeprefix("energy_change ").replace("mlp", "MLP")
        axes.plot(
            sweep["recursions"],
            sweep[name],
            color=shades.get(block, INK),
            linestyle=PARTS[part],
            marker="o" if part == "attention" else "s",
            markersize=2.5,
            label=label,
        )
    _steps_axis(axes, sweep)
    axes.set_xlabel("steps $T'$")
    axes.set_ylabel("mean $E(z_{T'}) - E(z_0)$")
    axes.set_title("How far down")


def _steps_axis(axes: Axes, sweep: pd.DataFrame) -> None:
    recursions = sorted(set(sweep["recursions"]))
    ticks = [t for t in recursions if t in (1, 2, 4, 8, 16, 32, 64) or t == recursions[-1]]
    plots.recursion_axis(axes, ticks)
    axes.set_xlim(recursions[0] / 1.15, recursions[-1] * 1.15)
