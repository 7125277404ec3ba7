"""How models hold up on tasks that they were not trained on: excess MSE over the floor that knows the condition, a row a
condition and a mark a model, on a logarithmic axis.

The diamond is the Bayes predictor that knows the training prior only: no model that learnt nothing but that prior can
be expected to do better. It is drawn where the law of y given x has changed; elsewhere it is the floor itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from energylab.analysis.evaluation import pool
from energylab.analysis.statistics import over_seeds
from energylab.plotting import plots, tables
from energylab.plotting.style import INK, NEUTRAL, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("generalisation",)

NAMES = {
    "in-prior": "as in training",
    "shifted-inputs": "inputs beside the range",
    "held-out-kernel": "another kernel",
    "half-noise": "half the noise",
    "double-noise": "twice the noise",
    "short-lengthscale": "shorter length-scale",
    "long-lengthscale": "longer length-scale",
    "mean-offset": "mean offset",
    "double-points": "twice the pairs",
}


def draw(results: StudyResults) -> Figure:
    errors = _by_condition(results)
    conditions = list(dict.fromkeys(errors["condition"]))
    with style():
        figure, panels = plots.new_figure(1, 1, height=0.3 * (len(conditions) + 1) + 0.5)
        axes = panels[0, 0]
        members = plots.series(errors)
        offsets = np.linspace(-0.32, 0.32, len(members)) if len(members) > 1 else [0.0]
        counts = []
        for one, offset in zip(members, offsets, strict=True):
            summary = over_seeds(one.rows, "excess_mse", ["condition"]).set_index("condition")
            here = [condition for condition in conditions if condition in summary.index]
            rows = np.array([conditions.index(condition) for condition in here]) + offset
            summary = summary.loc[here]
            axes.hlines(rows, summary["low"], summary["high"], color=one.colour, linewidth=1.4, zorder=2)
            axes.plot(
                summary["mean"],
                rows,
                color=one.colour,
                linestyle="",
                marker=one.style.marker,
                label=one.label,
                zorder=3,
            )
            counts += list(summary["n"])
        known = errors.dropna(subset=["prior_excess"]).drop_duplicates("condition")
        rows = [conditions.index(condition) for condition in known["condition"]]
        axes.plot(
            known["prior_excess"],
            rows,
            color=INK,
            linestyle="",
            marker="D",
            markerfacecolor="none",
            markersize=4,
            label="Bayes, training prior",
            zorder=4,
        )
        for row in range(1, len(conditions)):
            axes.axhline(row - 0.5, color=NEUTRAL, linewidth=0.3, alpha=0.5)
        axes.set_yticks(range(len(conditions)), [NAMES.get(condition, condition) for condition in conditions])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(conditions) - 0.5, -0.5)
        axes.set_xscale("log")
        shown = [*errors["excess_mse"], *known["prior_excess"]]
        axes.set_xlim(0.75 * min(shown), 1.35 * max(shown))
        plots.plain_log_ticks(axes.xaxis)
        axes.set_xlabel("excess MSE (units of $y^2$)")
        axes.set_title("Excess over each condition’s own floor")
        note = plots.seeds_note(counts, "Bars").replace(", each seed thin", "")
        what = "Averaged over $k$. Bayes, training prior: the best prediction for who believes to be in training."
        plots.finish(figure, f"{what} {note}", results.note)
    return figure


def table(results: StudyResults) -> DataFrame:
    """A row each (condition, model)."""
    errors = _by_condition(results)
    by = ["condition", "variant", "T"]
    table = tables.interval_columns(over_seeds(errors, "excess_mse", by), "excess MSE")
    table = table.merge(errors.drop_duplicates("condition")[["condition", "prior_excess"]], on="condition")
    table = table.rename(columns={"variant": "model", "prior_excess": "excess MSE of the training prior"})
    order = {condition: place for place, condition in enumerate(dict.fromkeys(errors["condition"]))}
    table = table.sort_values("condition", key=lambda names: names.map(order), kind="stable", ignore_index=True)
    what = "Excess MSE over the floor that knows the condition, in and out of the training prior."
    return tables.captioned(table, what, results)


def _by_condition(results: StudyResults) -> DataFrame:
    """A row a (run, condition), pooled over k, with the excess MSE of the predictor that knows the training prior only.

    With predictions p of a model, q of that predictor and m of the floor, and y = m + e, a row holds (p − m)² and
    (p − y)² − (q − y)². Their difference is (q − m)² + 2 (p − q) e, whose mean is what we look for with far less noise
    than (q − y)² less the floor's, since p and q are close. It is averaged over the runs.
    """
    errors = results.errors
    if errors.empty:
        raise ValueError(f"{results.name}: expected runs tested on conditions, got none")
    pooled = pool(errors, by=["condition", "run", "variant", "T", "seed"])
    gap = pooled["excess_mse"] - pooled["excess_mse_over_prior"]
    excess = gap.groupby(pooled["condition"]).transform("mean")
    same_law = np.isclose(gap, 0, atol=1e-12)
    return pooled.assign(prior_excess=excess.where(~same_law & (excess > 0)))
