"""Do models of CEM layers alone train stably? The largest loss and the largest gradient norm, before clipping, of each
stretch between two logged steps: an instability is a spike here. A column a model; thin lines are single seeds, the
thick one their median.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from energylab.plotting import plots, tables
from energylab.plotting.style import INK, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("full_cem",)

COLUMNS = {"loss_max": "loss (units of $y^2$)", "gradient_norm_max": "gradient norm"}
WARM = 0.1  # of the training, which the table leaves out
SPIKE = 3.0  # times the median of its run


def draw(results: StudyResults) -> Figure:
    training = plots.training_curves(results)
    with style():
        models = plots.series(training)
        columns = plots.columns_that_fit(len(models), narrowest=1.5)
        groups = [models[start : start + columns] for start in range(0, len(models), columns)]
        figure, panels = plots.new_figure(len(COLUMNS) * len(groups), columns, height=1.5)
        rows = [(group, column) for group in groups for column in COLUMNS]
        last = int(np.max(training["step"]))
        for row, (group, column) in zip(panels, rows, strict=True):
            top = column == "loss_max"
            for axes, one in zip(row, group, strict=False):
                for _, seed in one.rows.groupby("seed"):
                    seed = seed.sort_values("step")
                    axes.plot(seed["step"], seed[column], color=one.colour, linewidth=0.4, alpha=0.6)
                middle = one.rows.groupby("step")[column].median()
                axes.plot(middle.index, middle, color=INK, linewidth=0.6)
                axes.set_yscale("log")
                axes.set_ylim(0.8 * training[column].min(), 1.25 * training[column].max())
                plots.plain_log_ticks(axes.yaxis)
                axes.set_xlabel("" if top else "training step")
                axes.set_xticks([0, last // 2, last], [f"{step:,}" for step in (0, last // 2, last)])
                axes.tick_params(labelbottom=not top, labelleft=axes is row[0])
                if top:
                    axes.set_title("\n".join(textwrap.wrap(one.variant, 20)))
            row[0].set_ylabel(COLUMNS[column])
            for axes in row[len(group) :]:
                axes.set_axis_off()
        seeds = plots.count(training.groupby(["variant", "T"], dropna=False)["seed"].nunique())
        every = int(training.groupby("run")["step"].diff().max())
        what = f"The largest of each {every} steps, gradients before clipping. {seeds}: coloured, their median black."
        recursions = sorted({one.recursions for one in models if one.recursions is not None})
        steps = f"CEM models take $T={recursions[0]}$ steps." if len(recursions) == 1 else ""
        plots.finish(figure, f"{steps} {what}".strip(), results.note)
    return figure


def table(results: StudyResults) -> DataFrame:
    """A row a model, after the first tenth of the training: the largest loss and gradient norm of any seed, and the
    number of spikes, stretches whose largest gradient norm is over three times the median of its run, per run.
    """
    training = plots.training_curves(results)
    late = training[training["step"] > WARM * np.max(training["step"])]
    middle = late.groupby("run")["gradient_norm_max"].transform("median")
    late = late.assign(spikes=late["gradient_norm_max"] > SPIKE * middle)
    models = late.groupby(["variant", "T"], dropna=False)
    table = models.agg(
        seeds=("seed", "nunique"),
        loss=("loss_max", "max"),
        median_norm=("gradient_norm_max", "median"),
        norm=("gradient_norm_max", "max"),
        spikes=("spikes", "sum"),
    ).reset_index()
    table["spikes"] /= table["seeds"]
    names = {"variant": "model", "loss": "largest loss", "norm": "largest gradient norm", "spikes": "spikes a run"}
    what = (
        "Largest loss and gradient norm (before clipping) after the first tenth of the training; spikes: stretches whose "
        f"largest norm exceeds {SPIKE:.0f} times their run's median."
    )
    names["median_norm"] = "median of gradient norms"
    return tables.captioned(table.rename(columns=names), what, results)
