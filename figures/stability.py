"""Do models of CEM layers alone train stably? The largest loss and the largest gradient norm, before clipping, of each
stretch between two logged steps: an instability is a spike here. Thin lines are single seeds, thick ones their median.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter

from energylab.analysis.statistics import over_seeds
from energylab.plotting import plots, tables
from energylab.plotting.style import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("full_cem",)

COLUMNS = {"loss_max": "largest loss (units of $y^2$)", "gradient_norm_max": "largest gradient norm"}
WARM = 0.1  # of the training, which the table leaves out


def draw(results: StudyResults) -> Figure:
    training = plots.training_curves(results)
    with style():
        columns = plots.columns_that_fit(2, narrowest=2.4)
        figure, panels = plots.new_figure(2 // columns, columns)
        for axes, (column, label) in zip(panels.flat, COLUMNS.items(), strict=True):
            for one in plots.series(training):
                for _, seed in one.rows.groupby("seed"):
                    seed = seed.sort_values("step")
                    axes.plot(seed["step"], seed[column], color=one.colour, linewidth=0.4, alpha=0.5, zorder=1.5)
                middle = one.rows.groupby("step")[column].median()
                axes.plot(
                    middle.index, middle, color=one.colour, linestyle=one.style.line, linewidth=0.9, label=one.label
                )
            axes.set_yscale("log")
            plots.plain_log_ticks(axes.yaxis)
            plots.whole_number_axis(axes, int(np.max(training["step"])), "training step")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.set_ylabel(label)
            axes.set_title("Loss" if column == "loss_max" else "Gradient")
        seeds = plots.count(training.groupby(["variant", "T"], dropna=False)["seed"].nunique())
        every = int(training.groupby("run")["step"].diff().max())
        what = f"The largest of each {every} steps, gradients before clipping. {seeds}: each thin, their median thick."
        plots.finish(figure, what, results.note)
    return figure


def table(results: StudyResults) -> DataFrame:
    """A row a model: the largest loss and gradient norm after the first tenth of the training."""
    training = plots.training_curves(results)
    late = training[training["step"] > WARM * np.max(training["step"])]
    by = ["variant", "T"]
    most = late.groupby([*by, "seed"], dropna=False, as_index=False)[list(COLUMNS)].max()
    loss = tables.interval_columns(over_seeds(most, "loss_max", by), "largest loss")
    norm = tables.interval_columns(over_seeds(most, "gradient_norm_max", by), "largest gradient norm")
    table = loss.merge(norm.drop(columns="seeds"), on=by).rename(columns={"variant": "model"})
    what = "Largest loss and gradient norm (before clipping) of a step, after the first tenth of the training."
    return tables.captioned(table, what, results)
