"""How far each layer goes down: E(z_t) − E(z_0) against the step t inside the layer, one panel a layer, a colour per T.

Query tokens only. Lines are medians over the positions of the traced test tasks, bands the interquartile range, both
averaged over seeds; thin lines are the medians of single seeds. Energies of different positions or layers have no
common zero, so only the change since t = 0 is shown, and each panel has its own scale. Attention with a fixed history,
a positive step size and no preconditioner can only go down; an MLP may rise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from energylab.analysis.statistics import over_seeds
from energylab.plotting import plots, tables
from energylab.plotting.style import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("recursion",)
ANY_STUDY = True

NAMES = {"attention": "attention", "mlp": "MLP"}


def draw(results: StudyResults) -> Figure:
    descent = _query_tokens(results)
    blocks = sorted(set(descent["block"]))
    parts = [part for part in NAMES if part in set(descent["part"])]
    last = int(np.max(descent["step"]))
    with style():
        columns = plots.columns_that_fit(len(blocks), narrowest=1.4)
        # The parts of a block stand below each other; blocks that do not fit beside the others start new rows.
        places = [
            (row, column, block, part)
            for group in range(0, len(blocks), columns)
            for row, part in enumerate(parts, start=group // columns * len(parts))
            for column, block in enumerate(blocks[group : group + columns])
        ]
        figure, panels = plots.new_figure(places[-1][0] + 1, columns, shape=0.6)
        counts, used = set(), {}
        for row, column, block, part in places:
            layer = descent.loc[(descent["block"] == block) & (descent["part"] == part)]
            if layer.empty:
                continue
            axes = used[row, column] = panels[row, column]
            counts |= plots.descent_of_layer(axes, layer)
            plots.whole_number_axis(axes, last, "")
            axes.set_title(f"block {block}, {NAMES[part]}")
        for place, axes in np.ndenumerate(panels):
            if place not in used:
                axes.remove()
        for row in {row for row, _ in used}:
            used[min(place for place in used if place[0] == row)].set_ylabel("$E(z_t) - E(z_0)$")
        for column in range(columns):
            used[max(place for place in used if place[1] == column)].set_xlabel("step $t$")
        what = "Query tokens; median (line) and interquartile range (band) over positions"
        plots.finish(figure, f"{what}{_seeds(counts)}.", results.note)
    return figure


def table(results: StudyResults) -> DataFrame:
    """A row each (layer, T): how far the last step has come, and the worst share of positions that rise in a step."""
    descent = _query_tokens(results)
    by = ["layer", "variant", "T"]
    last = descent[descent["step"] == descent["T"]]
    fall = tables.interval_columns(over_seeds(last, "energy_change_median", by), "median change of E")
    table = fall.rename(columns={"variant": "model"})
    if "fraction_rising" in descent:
        worst = descent.groupby(by)["fraction_rising"].max().mul(100).reset_index(name="worst % rising")
        table["worst % rising"] = fall.merge(worst, on=by)["worst % rising"]
    what = (
        "Energy that each layer loses, $E(z_T)-E(z_0)$: median over the positions of query tokens. "
        "Last column: positions whose energy rises, in the worst step of the worst seed."
    )
    return tables.captioned(table, what, results)


def _query_tokens(results: StudyResults) -> DataFrame:
    descent = results.descent.loc[results.descent["token"] == "query"]
    if descent.empty:
        raise ValueError(f"{results.name}: expected energy traces of at least one run with recursions, got none")
    return descent


def _seeds(counts: set[int]) -> str:
    averaged = "" if max(counts) == 1 else "averaged over "
    thin = "" if max(counts) == 1 else "; thin: each seed’s median"
    return f", {averaged}{plots.count(counts)}{thin}"
