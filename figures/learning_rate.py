"""How fair one learning rate is: excess MSE over the Bayes floor on validation tasks against the rate, model by model.

Whatever is chosen by this figure is chosen on tasks that no comparison uses. Also for the sweeps of `--tune`:
`energylab figures learning_rate --study looping-tuning`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from energylab.plotting import plots, tables
from energylab.plotting.style import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("learning_rate",)
VARIES = ("learning_rate",)


def draw(results: StudyResults) -> Figure:
    runs = _runs(results)
    with style():
        columns = plots.columns_that_fit(2, narrowest=2.4)
        figure, panels = plots.new_figure(1, 1, shape=0.72 if columns == 1 else 0.42)
        axes = panels[0, 0]
        means = []
        for one in plots.series(runs):
            means.append(plots.mean_line(axes, one, "learning_rate", "excess_mse"))
            tried, mean = means[-1]["learning_rate"], means[-1]["mean"]
            axes.plot(tried, mean, color=one.colour, linestyle="", marker=one.style.marker, markersize=3.5, zorder=4)
        cut = plots.show_range(axes, runs["excess_mse"], means, stretch=0.5)
        axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(runs["learning_rate"]))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        axes.set_xlabel("peak learning rate")
        axes.set_ylabel("excess MSE (units of $y^2$)")
        counts = [n for summary in means for n in summary["n"]]
        what = "Excess MSE over the Bayes floor on validation tasks, averaged over $k$."
        plots.finish(figure, f"{what} {plots.seeds_note(counts, 'Bands', cut=cut)}", results.note)
    return figure


def table(results: StudyResults) -> DataFrame:
    summary = plots.over_seeds(_runs(results), "excess_mse", ["variant", "T", "learning_rate"])
    shown = tables.interval_columns(summary, "excess MSE").rename(
        columns={"variant": "model", "learning_rate": "learning rate"}
    )
    return tables.captioned(shown, "Excess MSE on validation tasks at each learning rate.", results)


def _runs(results: StudyResults) -> DataFrame:
    errors = results.errors.loc[results.errors["condition"] == "validation"]
    if errors.empty or "learning_rate" not in errors:
        raise ValueError(
            f"{results.name}: expected runs of several learning rates, tested on validation tasks, got none"
        )
    labels = ["run", "variant", "T", "seed", "learning_rate"]
    return errors.groupby(labels, dropna=False, observed=True, as_index=False)[["excess_mse"]].mean()
