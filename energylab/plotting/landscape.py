"""The hill under one query: a map of it with the path that the layer takes, and cuts along its steps."""

import math
from collections.abc import Mapping

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.contour import ContourSet
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from energylab.analysis.landscape import Landscape
from energylab.plotting import plots
from energylab.plotting.style import INK, NEUTRAL, VenueFigure, style

LEVELS = 24
PATH = "#d62728"
HALO = 2.4
NEAR = 0.95
"""The share of a point's length that lies in the plane from which on the map's energy is about its own."""

AXES = {
    "trajectory": ("along the path’s first direction", "along its second direction"),
    "hessian": ("along the leading eigenvector", "along the second eigenvector"),
    "random": ("along a random tangent", "along another"),
}


def draw_landscape(found: Landscape, *, model: str = "") -> VenueFigure:
    """The map, and the cuts along the steps; `model` is what to call the model."""
    with style():
        columns = plots.columns_that_fit(2, narrowest=2.6)
        figure, panels = plots.new_figure(2 // columns, columns, shape=0.86)
        hill, cuts = panels.flat
        filled = _map(hill, found)
        _cuts(cuts, found)
        plots.finish(figure, _explanation(found, model))
        _bar(hill, filled)  # after the letters: it is no panel
    return figure


def draw_landscapes(found: Mapping[str, Landscape]) -> VenueFigure:
    """Maps beside each other, by what to call their models: the hills of one layer in models that differ in T."""
    with style():
        columns = plots.columns_that_fit(len(found), narrowest=2.6)
        figure, panels = plots.new_figure(-(-len(found) // columns), columns, shape=0.86)
        for axes in panels.flat[len(found) :]:
            axes.remove()
        maps = []
        for axes, (name, one) in zip(panels.flat, found.items(), strict=False):
            maps.append((axes, _map(axes, one)))
            axes.set_title(name)
        first = next(iter(found.values()))
        layer = first.layer.replace("mlp", "MLP")
        words = [
            f"Energy of {layer} around the query of pair {first.pair} of test task {first.task}, one trained model each; "
            "angles turned from $z_0$ on the sphere.",
            *(f"{name}: {_fall(one)}" for name, one in found.items()),
        ]
        plots.finish(figure, " ".join(words))
        for axes, filled in maps:
            _bar(axes, filled)  # after the letters: it is no panel
    return figure


def _fall(found: Landscape) -> str:
    path = found.path.loc[found.path["kind"] == "path"]
    bottom = found.path.loc[found.path["kind"] == "bottom"].iloc[0]
    inside = 100 * path["inside"].min()
    return (
        f"falls by {-path['energy'].iloc[-1]:.3g} of the {-bottom['energy']:.3g} down to the bottom; its path lies in the "
        f"plane to {inside:.0f}%."
    )


def _map(axes: Axes, found: Landscape) -> ContourSet:
    grid = found.grid.pivot(index="beta", columns="alpha", values="energy")
    alpha, beta = np.degrees(grid.columns.to_numpy(float)), np.degrees(grid.index.to_numpy(float))
    filled = axes.contourf(alpha, beta, grid.to_numpy(), levels=LEVELS, cmap="viridis")
    axes.contour(
        alpha,
        beta,
        grid.to_numpy(),
        levels=filled.levels,
        colors="white",
        linewidths=0.25,
        linestyles="solid",
        alpha=0.5,
    )
    rows = dict(list(found.path.groupby("kind")))
    points = {kind: _degrees(of_kind) for kind, of_kind in rows.items()}
    path = points["path"]
    axes.plot(*path.T, color="white", linewidth=HALO, zorder=3)
    look = {"markeredgecolor": "white", "markeredgewidth": 0.6}
    axes.plot(*path.T, color=PATH, marker="o", markersize=3.8, zorder=4, label="steps of the layer", **look)
    if len(points["continued"]) > 1:
        axes.plot(*points["continued"].T, color="white", linewidth=HALO - 0.4, alpha=0.7, zorder=2.8)
        axes.plot(*points["continued"].T, color=PATH, linestyle=":", linewidth=1.2, zorder=2.9, label="more such steps")
    look = {"linestyle": "", "markeredgecolor": INK, "markeredgewidth": 0.6, "zorder": 5}
    if "certified" in points:
        axes.plot(
            *points["certified"].T, marker="D", markersize=4.2, color="#ff9d00", label="one certified step", **look
        )
    (bottom,) = points["bottom"]
    if alpha[0] <= bottom[0] <= alpha[-1] and beta[0] <= bottom[1] <= beta[-1]:
        off = rows["bottom"]["inside"].iloc[0] < NEAR
        label = f"{'bottom' if found.stationary else 'lowest point found'}{', far off this plane' if off else ''}"
        axes.plot(*bottom, marker="*", markersize=9, color="#a8a8a8" if off else "white", label=label, **look)
    # on either side of the path: it may go straight on, and the frame may be close behind its start
    (across, up), (first, second) = path[-1] - path[-2], path[1] - path[0]
    _name(axes, path[0], (-second, first), "$z_0$")
    _name(axes, path[-1], (up, -across), f"$z_{{{found.recursions}}}$")
    axes.set_aspect("equal")
    axes.set_xlim(alpha[0], alpha[-1])
    axes.set_ylim(beta[0], beta[-1])
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6))
        axis.set_major_formatter("{x:g}°")
    across, up = AXES[found.plane]
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title("Energy around the query")
    return filled


def _bar(axes: Axes, filled: ContourSet) -> None:
    figure = axes.figure
    bar = figure.colorbar(filled, ax=axes, shrink=0.92, pad=0.02)
    bar.set_label("$E(z) - E(z_0)$")
    bar.locator = MaxNLocator(nbins=7)
    bar.update_ticks()
    bar.outline.set_linewidth(0.4)


def _name(axes: Axes, at: np.ndarray, way: tuple[float, float], text: str) -> None:
    """Beside the point, that way."""
    offset = 10 * np.asarray(way) / (math.hypot(*way) or 1.0)
    box = axes.annotate(
        text,
        (at[0], at[1]),
        xytext=(offset[0], offset[1]),
        textcoords="offset points",
        ha="center",
        va="center",
        color="white",
        zorder=6,
    )
    box.set_path_effects([withStroke(linewidth=1.2, foreground=INK)])


def _degrees(rows: pd.DataFrame) -> np.ndarray:
    return np.degrees(rows[["alpha", "beta"]].to_numpy(float))


def _cuts(axes: Axes, found: Landscape) -> None:
    colours = matplotlib.colormaps["plasma"](np.linspace(0.05, 0.75, found.recursions))
    axes.axhline(0, color=INK, linewidth=0.4, zorder=0.5)
    axes.axvline(1, color=NEUTRAL, linewidth=0.8, linestyle="--", zorder=0.6)
    last = float(np.max(found.cuts["multiple"]))
    for (step, rows), colour, best in zip(found.cuts.groupby("step"), colours, found.best_multiples, strict=True):
        s, change = rows["multiple"].to_numpy(float), rows["energy_change"].to_numpy(float)
        axes.plot(s, change, color=colour, zorder=3)
        axes.plot([1], [np.interp(1, s, change)], marker="o", color=colour, zorder=4)
        if 0 < best <= last:
            axes.plot([best], [np.interp(best, s, change)], marker="v", markersize=4.5, color=colour, zorder=4)
        axes.annotate(
            f"$t={step}$",
            (s[-1], change[-1]),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    axes.plot([], [], color=NEUTRAL, linestyle="", marker="o", label="the learned step")
    if any(0 < best <= last for best in found.best_multiples):
        axes.plot([], [], color=NEUTRAL, linestyle="", marker="v", markersize=4.5, label="the best step this way")
    axes.set_xlim(0, last * 1.1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlabel(r"step, in multiples of the learned $\eta$")
    axes.set_ylabel("$E - E(z_t)$")
    axes.set_title("Along each step")


def _explanation(found: Landscape, model: str) -> str:
    layer = found.layer.replace("mlp", "MLP")
    who = f"{model}, {layer}" if model else layer
    path = found.path.loc[found.path["kind"] == "path"]
    bottom = found.path.loc[found.path["kind"] == "bottom"].iloc[0]
    fall, depth = -path["energy"].iloc[-1], -bottom["energy"]
    words = [
        f"{who}, query of pair {found.pair} of test task {found.task}.",
        f"Angles turned from $z_0$ on the sphere; the path’s points lie in the plane to {100 * path['inside'].min():.0f}%, "
        f"the bottom to {100 * bottom['inside']:.0f}%.",
        f"The layer falls by {fall:.3g} of the {depth:.3g} down to the bottom.",
        _rest(found, depth),
        _certificate(found),
        _verdict(found),
    ]
    return " ".join(words)


def _rest(found: Landscape, depth: float) -> str:
    """Where more steps lead."""
    more = found.path.loc[found.path["kind"] == "continued", "energy"]
    above = more.iloc[-1] + depth
    where = "there" if abs(above) < 1e-3 * abs(depth) else f"{abs(above):.3g} {'above' if above > 0 else 'below'} it"
    come = f"come to rest {where}" if found.converged else f"have not come to rest, {where}"
    return f"{len(more) - 1} more steps, $x$ put back to its length after each, {come}."


def _certificate(found: Landscape) -> str:
    if found.certified_step_size == math.inf:
        return r"Every $\eta>0$ is certified to descend."
    learned = found.step_sizes[0]
    if found.certified_step_size == 0:
        return rf"Learned $\eta={learned:.3g}$; no step size is certified."
    return rf"Learned $\eta={learned:.3g}$, certified $\eta\leq{found.certified_step_size:.2g}$."


def _verdict(found: Landscape) -> str:
    texts: dict[str, list[int]] = {}
    for step, best in enumerate(found.best_multiples):
        if best == 0:
            text = "leads uphill"
        elif best == math.inf:
            text = "could go on for ever and still fall"
        elif 0.95 < best < 1.05:
            text = "ends at the lowest point this way"
        else:
            text = f"{'undershoots' if best > 1 else 'overshoots'} (best is {best:.2g} times as long)"
        texts.setdefault(text, []).append(step)
    said = [f"step {', '.join(f'$t={step}$' for step in steps)} {text}" for text, steps in texts.items()]
    return f"Along its way, {'; '.join(said)}."
