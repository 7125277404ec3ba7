"""How the error falls with context: excess MSE over the Bayes floor, and RMSE on y, against the number of earlier
pairs k.

(a) the mean over test tasks of (prediction − floor mean)², where the floor mean is the best prediction that anyone
    could make from the k earlier pairs. The mean of a curve is the headline metric, hence the linear axis from zero.
(b) the square root of the mean of (prediction − y)², pooled over tasks, between the floor (dashed) and the nearest
    earlier input (dotted).

A colour for each T, lines in the style of their variant; in-prior test tasks only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from energylab.analysis.statistics import over_seeds
from energylab.plotting import plots, tables
from energylab.plotting.style import FLOOR_LINE, NEAREST_NEIGHBOUR_LINE, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("recursion",)
ANY_STUDY = True


def draw(results: StudyResults) -> Figure:
    errors = _in_prior(results)
    with style():
        columns = plots.columns_that_fit(2, narrowest=2.4)
        figure, panels = plots.new_figure(2 // columns, columns)
        excess, rmse = panels.flat
        intervals, cut = [], False
        for axes, column in ((excess, "excess_mse"), (rmse, "rmse")):
            means = [plots.mean_line(axes, one, "k", column) for one in plots.series(errors)]
            shown = [0.0, *errors[column]]
            if axes is rmse:
                plots.reference(axes, errors, "k", "floor_rmse", FLOOR_LINE, "Bayes floor")
                plots.reference(axes, errors, "k", "nearest_neighbour_rmse", NEAREST_NEIGHBOUR_LINE, "1-NN")
                shown += [*errors["floor_rmse"], *errors["nearest_neighbour_rmse"]]
            cut |= plots.show_range(axes, shown, means, stretch=0.25)
            axes.set_ylim(bottom=0)
            plots.whole_number_axis(axes, int(np.max(errors["k"])), "earlier pairs $k$")
            intervals += means
        excess.set_title("Excess over the Bayes floor")
        excess.set_ylabel(r"excess MSE at $k$ (units of $y^2$)")
        rmse.set_title("Error on $y$, noise included")
        rmse.set_ylabel("RMSE at $k$ (units of $y$)")
        counts = (n for summary in intervals for n in summary["n"])
        plots.finish(figure, plots.seeds_note(counts, "Bands", cut=cut), results.note)
    return figure


def table(results: StudyResults) -> DataFrame:
    """A row each (k, model), at k = 0, 1, 2, 4, 8, ... and the last."""
    errors = _in_prior(results)
    last = int(np.max(errors["k"]))
    errors = errors[errors["k"].isin({0, last, *(2**power for power in range(last.bit_length()))})]
    by = ["k", "variant", "T"]
    excess = tables.interval_columns(over_seeds(errors, "excess_mse", by), "excess MSE")
    rmse = tables.interval_columns(over_seeds(errors, "rmse", by), "RMSE").drop(columns="seeds")
    floor = errors.drop_duplicates("k")[["k", "floor_rmse"]].rename(columns={"floor_rmse": "floor RMSE"})
    table = excess.merge(rmse, on=by).merge(floor, on="k").rename(columns={"variant": "model"})
    return tables.captioned(table, "Errors after $k$ pairs: excess MSE over the Bayes floor, and RMSE on $y$.", results)


def _in_prior(results: StudyResults) -> DataFrame:
    errors = results.errors.loc[results.errors["condition"] == "in-prior"]
    if errors.empty:
        raise ValueError(f"{results.name}: expected runs evaluated on in-prior tasks, got none")
    return errors
