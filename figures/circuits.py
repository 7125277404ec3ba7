"""Does a head move what it looks for? The alignment of the QK and OV circuits of every attention head, (a), and what those
of the first block do with x, (b), and with y, (c). A gradient step ties the two circuits; where they are free, training
makes them unrelated: heads look for a near x and carry y.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from energylab.plotting import plots, tables
from energylab.plotting.style import INK, NEUTRAL, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("tied_weights", "untying", "repelling")
PARTIAL = True

COMPARED = ("CEM no diagonal", "CEM 2 of 4 repel", "CEM indefinite P", "Llama, K = V", "Llama, Q = O", "Llama")
"""The models of (b) and (c): both ties, both but for signs or for P, either one, none."""


def draw(results: StudyResults) -> Figure:
    heads = _heads(results)
    variants = list(dict.fromkeys(heads["variant"]))
    with style() as venue:
        columns = plots.columns_that_fit(3, narrowest=1.8)
        height = max(2.3, 2.4 * venue.small / 72 * len(variants) + 0.5)
        figure, panels = plots.new_figure(3 // columns, columns, height=height)
        alignment, for_x, for_y = panels.flat
        _alignments(alignment, heads, variants)
        first = heads[(heads["block"] == 0) & heads["variant"].isin(COMPARED)]
        for axes, token in ((for_x, "x"), (for_y, "y")):
            _first_block(axes, first, token)
        seeds = plots.count(heads.groupby("variant")["seed"].nunique())
        what = (
            "A point a head. (a) upper of each pair of rows: first block, lower: second. (b), (c) first block: how a head "
            f"weighs a token for having the same $x$ ($y$), and how much of it it adds to its own. {seeds}, all shown."
        )
        plots.finish(figure, what, results.note)
    return figure


def table(results: StudyResults) -> DataFrame:
    """A row a model and block: medians over heads and seeds."""
    heads = _heads(results)
    groups = heads.groupby(["variant", "block"], sort=False)
    names = {"alignment": "cosine", "qk_x": "QK x", "ov_x": "OV x", "qk_y": "QK y", "ov_y": "OV y"}
    table = groups[list(names)].median().rename(columns=names)
    table.insert(1, "smallest", groups["alignment"].min())
    table.insert(2, "largest", groups["alignment"].max())
    seeds = plots.count(heads.groupby("variant")["seed"].nunique())
    what = (
        "The cosine of a head's QK and OV circuits, and the two along the directions in which $x$ and $y$ are read in: "
        f"medians over the heads of {seeds}, for the cosine also the extremes."
    )
    return tables.captioned(table.reset_index().rename(columns={"variant": "model"}), what, results)


def _heads(results: StudyResults) -> DataFrame:
    """A row a head, studies that share a run once, in the order of the studies."""
    if results.circuits.empty:
        raise ValueError(f"{results.name}: expected the circuits of attention heads, got none")
    return results.circuits.drop_duplicates(["run", "block", "head"], ignore_index=True)


def _alignments(axes: Axes, heads: DataFrame, variants: list[str]) -> None:
    axes.axvline(0, color=INK, linewidth=0.4, zorder=0.5)
    for one in plots.series(heads):
        row = variants.index(one.variant)
        for block, of_block in one.rows.groupby("block"):
            place = row + 0.3 * (int(str(block)) / max(1, int(heads["block"].max())) - 0.5)
            axes.plot(
                of_block["alignment"],
                [place] * len(of_block),
                color=one.colour,
                linestyle="",
                marker="o",
                markersize=2.6,
                markeredgewidth=0,
                alpha=0.7,
            )
    axes.set_yticks(range(len(variants)), [textwrap.fill(variant, 26) for variant in variants], linespacing=0.9)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(variants) - 0.4, -0.6)
    axes.set_xlim(min(-0.3, 1.1 * heads["alignment"].min()), 1.06)
    axes.set_xlabel("cosine of QK and OV")
    axes.set_title("Every head")


def _first_block(axes: Axes, heads: DataFrame, token: str) -> None:
    for line in (axes.axhline, axes.axvline):
        line(0, color=NEUTRAL, linewidth=0.4, zorder=0.5)
    for one in plots.series(heads):
        axes.plot(
            one.rows[f"qk_{token}"],
            one.rows[f"ov_{token}"],
            color=one.colour,
            linestyle="",
            marker=one.style.marker,
            markersize=3.2,
            markerfacecolor="none" if one.recursions is None else one.colour,
            markeredgewidth=0.7,
            label=one.label,
        )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.margins(0.08)
    axes.set_xlabel(f"QK along ${token}$: weighed")
    axes.set_ylabel(f"OV along ${token}$: added")
    axes.set_title(f"First block, ${token}$")
