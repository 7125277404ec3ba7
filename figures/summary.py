"""The main result in one picture: (a) excess MSE over the Bayes floor against T, with Llama as a band; (b) how the energy
falls within the last attention layer, a line for each T; (c) excess MSE against parameters, every stored model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from energylab.plotting import plots, tables
from energylab.plotting.style import INK, style
from energylab.plotting.tradeoff import tradeoff, tradeoff_points

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = (
    "recursion",
    "looping",
    "diagonal",
    "tied_weights",
    "untying",
    "repelling",
    "preconditioner",
    "full_cem",
    "update_rule",
)
PARTIAL = True


def draw(results: StudyResults) -> Figure:
    results, left_out = plots.equally_trained(results)
    runs = plots.excess_by_run(results)
    excess = plots.series(_main(runs))
    descent = _main(results.descent)
    descent = descent[(descent["token"] == "query") & (descent["part"] == "attention")] if len(descent) else descent
    if descent.empty or not any(one.recursions for one in excess):
        raise ValueError(f"{results.name}: expected runs with recursions of the study recursion, got none")
    last = int(max(descent["block"]))
    with style():
        columns = 3 if plots.columns_that_fit(3, narrowest=1.8) == 3 else 1
        figure, panels = plots.new_figure(3 // columns, columns, height=2.0)
        level, energy, cost = panels.flat
        summaries, cut = plots.excess_against_recursions(level, excess)
        level.set_title("Error against recursions")
        counts = plots.descent_of_layer(energy, descent[descent["block"] == last])
        energy.set_ylabel("$E(z_t) - E(z_0)$")
        energy.set_title(f"Energy, block {last} attention")
        points = tradeoff_points(results, "parameters")
        tradeoff(cost, points, "parameters", by_study=False, named=False)
        # a setting has a column where it varies within a study
        repelling = results.errors.reindex(columns=["study", "variant", "repelling_heads"]).query("repelling_heads > 0")
        ringed = points.merge(repelling[["study", "variant"]].drop_duplicates())
        if len(ringed):
            ring = {"linestyle": "", "marker": "o", "markersize": 6, "markerfacecolor": "none", "markeredgewidth": 0.7}
            cost.plot(ringed["parameters"] / 1e3, ringed["mean"], color=INK, label="heads that repel", zorder=4, **ring)
        cost.set_title("Error against size")
        counts |= {n for summary in summaries for n in summary["n"]} | set(points["n"])
        what = (
            "Excess MSE averaged over $k$. (b) medians over query tokens, band: interquartile range. (c) a point a "
            "model, grey without recursion; line: no other is better at that size or less."
        )
        plots.finish(
            figure, f"{what} {plots.seeds_note(counts, 'Bars and band of (a)', cut=cut)}", left_out, results.note
        )
    return figure


def table(results: StudyResults) -> DataFrame:
    """The models of (a)."""
    table = tables.excess_table(_main(plots.excess_by_run(results))).drop(columns="study")
    return tables.captioned(table, "Excess MSE over the Bayes floor and cost of each model.", results)


def _main(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the study of recursions alone, whatever it is called."""
    return frame[frame["study"] == frame["study"].iloc[0]] if len(frame) else frame
