"""How T and training length interact: excess MSE over the Bayes floor against the optimiser step.

Every step trains on new tasks, so the excess on them, before the step, estimates the test error without bias. Points are
means over windows that do not overlap, at the middle of the window: nothing is smoothed across them, and no step counts
twice.

(a) the level, on a logarithmic axis.
(b) the difference to the smallest T, window by window and paired by seed: both models have met the same tasks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter

from energylab.analysis.statistics import over_seeds, paired_differences
from energylab.plotting import plots, tables
from energylab.plotting.style import INK, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("recursion",)
ANY_STUDY = True

WINDOWS = 25  # at most


def draw(results: StudyResults) -> Figure:
    curves, window = windows(plots.training_curves(results))
    curve = plots.series(curves)
    baseline = next((one for one in curve if one.recursions is not None), None)
    others = [one for one in curve if baseline is not None and one.variant == baseline.variant and one is not baseline]
    with style():
        count = 2 if others else 1
        columns = plots.columns_that_fit(count, narrowest=2.4)
        figure, panels = plots.new_figure(count // columns, columns)
        level, *gains = panels.flat
        summaries = [plots.mean_line(level, one, "step", "excess_loss") for one in curve]
        level.set_yscale("log")
        low, high = curves["excess_loss"].min(), curves["excess_loss"].max()
        level.set_ylim(0.8 * low, 1.25 * high)
        plots.plain_log_ticks(level.yaxis)
        level.set_title("Excess over the Bayes floor")
        level.set_ylabel("excess MSE (units of $y^2$)")
        cut = False
        for gain in gains:
            gain.axhline(0, color=INK, linewidth=0.6)
            changes, kept = [], []
            for one in others:
                pairs = paired_differences(
                    pd.concat([baseline.rows, one.rows]),
                    "excess_loss",
                    {"variant": baseline.variant, "T": baseline.recursions},
                    on=("seed", "step"),
                )
                changes.append(plots.mean_line(gain, replace(one, rows=pairs), "step", "difference"))
                kept.append(pairs)
            # the first quarter, where models are far apart, would leave no room for the rest
            late = pd.concat(kept)[lambda frame: frame["step"] > 0.25 * frame["step"].max()]
            cut = plots.show_range(gain, [0.0, *late["difference"]], changes, stretch=0.3)
            gain.set_title(f"Paired difference to $T={baseline.recursions}$")
            gain.set_ylabel("difference (units of $y^2$)")
            summaries += changes
        for axes in panels.flat:
            plots.whole_number_axis(axes, int(np.max(curves["step"])), "training step")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        what = f"Excess MSE on the training tasks, new in every step; means over windows of {window:,} steps."
        counts = (n for summary in summaries for n in summary["n"])
        plots.finish(figure, f"{what} {plots.seeds_note(counts, 'Bands', cut=cut)}", results.note)
    return figure


def table(results: StudyResults) -> DataFrame:
    """A row each (model, window), for four windows spread over the training."""
    curves, window = windows(plots.training_curves(results))
    ends = sorted(set(curves["step"]))
    chosen = [ends[(len(ends) * part) // 4 - 1] for part in (1, 2, 3, 4) if (len(ends) * part) // 4]
    curves = curves[curves["step"].isin(chosen)]
    summary = over_seeds(curves, "excess_loss", ["variant", "T", "step"])
    table = tables.interval_columns(summary, "excess MSE").rename(columns={"variant": "model"})
    what = f"Excess MSE on training tasks, mean over the {window} steps around the given one."
    return tables.captioned(table.astype({"step": int}), what, results)


def windows(training: DataFrame) -> tuple[DataFrame, int]:
    """Means of `excess_loss` over windows, one row a (run, window) with the window's middle as its `step`; the length of
    a window, a whole number of logged rows of every run.

    A logged row is itself the mean over the steps since the row before it, so it counts by their number.
    """
    rows = training.sort_values(["run", "step"])
    rows = rows.assign(steps=rows.groupby("run")["step"].diff().fillna(rows["step"]))
    logged = math.lcm(*{int(steps) for steps in rows.groupby("run")["steps"].max()})
    window = logged * math.ceil(np.max(rows["step"]) / (WINDOWS * logged))
    rows["window"] = (rows["step"] - 1) // window
    rows["total"] = rows["excess_loss"] * rows["steps"]
    keys = ["study", "run", "variant", "T", "seed", "window"]
    sums = rows.groupby(keys, dropna=False, observed=True, as_index=False)[["total", "steps"]].sum()
    middle = sums["window"] * window + sums["steps"] / 2  # the last window may be shorter
    return sums.assign(excess_loss=sums["total"] / sums["steps"], step=middle), window
