"""What tasks look like: functions from a prior, and what is said of one of them after more and more pairs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from energylab.analysis.fan import Fan, draws, fan
from energylab.models import InContextRegressor
from energylab.plotting import plots
from energylab.plotting.style import FLOOR_LINE, INK, NEUTRAL, VenueFigure, recursion_colour, style
from energylab.tasks import GaussianProcessPrior

DRAWS = 5
CONTEXTS = (2, 5, 15)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model, and how it was trained."""

    model: InContextRegressor
    variant: str
    prior: GaussianProcessPrior
    num_points: int


def look(name: str, prior: GaussianProcessPrior, trained: Trained | None = None) -> VenueFigure:
    """Functions from the prior called `name`, and what the floor, and a trained model, say of one task from it.

    A model is shown with no more pairs than it was trained with. Raises ValueError unless both have one input.
    """
    functions = draws(prior, DRAWS)
    if trained is None:
        return draw_tasks(name, functions, {pairs: fan(prior, pairs) for pairs in CONTEXTS})
    config = trained.model.config
    if config.input_dim != prior.input_dim:
        raise ValueError(f"input_dim: expected a model of {prior.input_dim} input, got one of {config.input_dim}")
    most = trained.num_points - 1
    fans = {pairs: fan(prior, pairs, trained.model) for pairs in sorted({min(pairs, most) for pairs in CONTEXTS})}
    return draw_tasks(
        name,
        functions,
        fans,
        model=f"{trained.variant} $T={config.recursions}$" if config.has_energy else trained.variant,
        colour=recursion_colour(config.recursions) if config.has_energy else NEUTRAL,
        note="" if trained.prior == prior else "The model was trained on tasks from another prior.",
    )


def draw_tasks(
    prior: str,
    functions: pd.DataFrame,
    fans: Mapping[int, Fan],
    *,
    model: str | None = None,
    colour: str = NEUTRAL,
    note: str = "",
) -> VenueFigure:
    """`functions` from the prior of this name, and a panel for each number of pairs in `fans`.

    `model` is what to call the model whose predictions the fans hold, and `colour` its colour.
    """
    with style():
        count = 1 + len(fans)
        columns = plots.columns_that_fit(2, narrowest=2.2)
        figure, panels = plots.new_figure(-(-count // columns), columns, shape=0.6)
        for axes in panels.flat[count:]:
            figure.delaxes(axes)
        first, *others = panels.flat[:count]
        _draw_functions(first, functions)
        first.set_title(f"Functions from the prior “{prior}”")
        first.set_ylabel("$f(x)$")
        limits = _limits(fans.values())
        for axes, (pairs, one) in zip(others, fans.items(), strict=True):
            _draw_fan(axes, one, model, colour)
            axes.set_title(f"One task, $k={pairs}$ {'pair' if pairs == 1 else 'pairs'} seen")
            axes.set_ylabel("$y$")
            axes.set_ylim(limits)
        for axes in (first, *others):
            axes.set_xlabel("$x$")
            axes.set_xlim(functions["x"].min(), functions["x"].max())
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
        plots.finish(figure, _explanation(fans, model), note)
    return figure


def _draw_functions(axes: Axes, functions: pd.DataFrame) -> None:
    groups = [rows for _, rows in functions.groupby("task", sort=False)]
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(groups)))
    lines = [
        axes.plot(rows["x"], rows["f"], color=colour, linewidth=1.1)[0]
        for rows, colour in zip(groups, colours, strict=True)
    ]
    differing = [key for key in ("kernel", "lengthscale", "output_scale") if len(set(functions[key])) > 1]
    labels = [_label(rows, differing) for rows in groups]
    if any(labels):
        columns = 3 if max(map(len, labels)) <= 16 else 2  # as many as fit in a panel
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + (0.08 + 0.17 * -(-len(labels) // columns)) * (high - low))
        axes.legend(lines, labels, loc="upper center", ncols=columns, handlelength=1.2, columnspacing=0.9)


def _label(rows: pd.DataFrame, differing: Sequence[str]) -> str:
    if "kernel" in differing:
        return str(rows["kernel"].iloc[0])
    symbols = {"lengthscale": r"\ell", "output_scale": r"\sigma"}
    return ", ".join(f"${symbols[key]}={rows[key].iloc[0]:.2f}$" for key in differing)


def _draw_fan(axes: Axes, one: Fan, model: str | None, colour: str) -> None:
    table = one.predictions
    x, mean, sd = (table[key].to_numpy() for key in ("x", "floor_mean", "floor_sd"))
    axes.plot(one.function["x"], one.function["f"], color=NEUTRAL, linewidth=0.7, label="the function $f$", zorder=2)
    if "model_mean" in table:
        predicted = table["model_mean"].to_numpy()
        if "model_sd" in table:
            spread = 2 * table["model_sd"].to_numpy()
            axes.fill_between(x, predicted - spread, predicted + spread, color=colour, alpha=0.2, linewidth=0, zorder=1)
        axes.plot(x, predicted, color=colour, label=model, zorder=3)
    else:
        axes.fill_between(x, mean - 2 * sd, mean + 2 * sd, color=NEUTRAL, alpha=0.12, linewidth=0, zorder=1)
    axes.plot(x, mean, color=INK, linestyle=FLOOR_LINE, linewidth=1.1, label="Bayes floor", zorder=3.5)
    for side in (-2, 2):
        axes.plot(x, mean + side * sd, color=INK, linestyle=FLOOR_LINE, linewidth=0.5, zorder=2.5)
    axes.plot(one.pairs["x"], one.pairs["y"], color=INK, linestyle="", marker="o", label="pairs seen", zorder=4)


def _limits(fans: Iterable[Fan]) -> tuple[float, float]:
    """The same for all panels: the floor's range, the pairs and the function. A model may leave it."""
    values = np.concatenate(
        [
            np.concatenate(
                [
                    one.predictions["floor_mean"] - 2 * one.predictions["floor_sd"],
                    one.predictions["floor_mean"] + 2 * one.predictions["floor_sd"],
                    one.pairs["y"],
                    one.function["f"],
                ]
            )
            for one in fans
        ]
    )
    pad = 0.05 * (values.max() - values.min())
    return float(values.min() - pad), float(values.max() + pad)


def _explanation(fans: Mapping[int, Fan], model: str | None) -> str:
    words = r"Dashed: mean and $\pm 2$ standard deviations of $y$, noise included, under the kernel that made the task."
    if model is None:
        return words
    spread = any("model_sd" in one.predictions for one in fans.values())
    return f"{words} {'Shaded: the same by the model.' if spread else 'The model predicts a point.'}"
