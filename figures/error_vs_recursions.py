"""What more recursions buy: excess MSE over the Bayes floor, averaged over k, against T on a log2 axis.

(a) the mean over seeds at each T, each seed as a thin line through its own T, models without recursions as horizontal
    bands.
(b) the same minus the value at the smallest T (T = 1 where it was run), seed by seed. Runs of one seed see the same
    tasks in the same order, so the difference is free of what the seed alone does, and its interval is the one that
    decides; left out where only one T was run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from energylab.analysis.statistics import paired_differences
from energylab.plotting import plots, tables
from energylab.plotting.style import INK, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("recursion",)
ANY_STUDY = True


def draw(results: StudyResults) -> Figure:
    excess = plots.series(plots.excess_by_run(results))
    recursive = [one for one in excess if one.recursions is not None]
    if not recursive:
        raise ValueError(f"{results.name}: expected runs with recursions, evaluated on in-prior tasks, got none")
    recursions = sorted({one.recursions for one in recursive if one.recursions is not None})
    differences = _differences(recursive, recursions[0])

    with style():
        count = 2 if differences else 1
        columns = plots.columns_that_fit(count, narrowest=2.4)
        figure, panels = plots.new_figure(count // columns, columns)
        level, *gains = panels.flat
        for axes in panels.flat:
            plots.recursion_axis(axes, recursions)

        intervals, cut = plots.excess_against_recursions(level, excess)
        level.set_title("Excess over the Bayes floor")
        level.set_ylabel("excess MSE (units of $y^2$)")

        for gain in gains:
            gain.axhline(0, color=INK, linewidth=0.6)
            changes = plots.points_by_variant(gain, differences, "difference")
            cut |= plots.show_range(
                gain, pd.concat([one.rows["difference"] for one in differences]), changes, stretch=2.0
            )
            gain.set_title(f"Paired difference to $T={recursions[0]}$")
            gain.set_ylabel("difference (units of $y^2$)")
            intervals += changes

        counts = (n for summary in intervals for n in summary["n"])
        what = "Excess MSE over the Bayes floor, averaged over $k$."
        plots.finish(figure, f"{what} {plots.seeds_note(counts, 'Bars and bands', cut=cut)}", results.note)
    return figure


def _differences(recursive: list[plots.Series], baseline: int) -> list[plots.Series]:
    """Each series with its difference to T = `baseline` of its variant, seed by seed; 0 for the baseline itself."""
    bases = {one.variant: one for one in recursive if one.recursions == baseline}
    found = []
    for one in recursive:
        if one.recursions != baseline and one.variant in bases:
            both = pd.concat([bases[one.variant].rows, one.rows])
            found.append(replace(one, rows=paired_differences(both, "excess_mse", {"T": baseline})))
    compared = {one.variant for one in found}
    return [
        replace(base, rows=base.rows.assign(difference=0.0)) for base in bases.values() if base.variant in compared
    ] + found


def table(results: StudyResults) -> DataFrame:
    """A row a model; differences to the smallest T of the first variant, for every other model."""
    runs = plots.excess_by_run(results)
    recursive = runs[runs["T"].notna()]
    reference = {"variant": recursive["variant"].iloc[0]}
    reference["T"] = int(np.min(recursive.loc[recursive["variant"] == reference["variant"], "T"]))
    alone = len(runs[["variant", "T"]].drop_duplicates()) == 1
    table = tables.excess_table(runs, None if alone else reference)
    what = "Excess MSE over the Bayes floor against $T$."
    if not alone:
        place = int(np.flatnonzero((table["model"] == reference["variant"]) & (table["T"] == reference["T"]))[0])
        sentence = tables.add_cost_of_rmse(table, runs, [place] * len(table))
        what += (
            f" {sentence} {reference['variant']}, $T={reference['T']}$; missing where there are no more, or no gain."
        )
    table = table.drop(columns="study")
    name = f"difference to {reference['variant']}, T = {reference['T']}"
    table = table.rename(columns={column: column.replace("difference", name) for column in table})
    return tables.captioned(table, what, results, adjusted=alone)
