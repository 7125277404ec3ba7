"""Is recursion within a layer the same as looping a block? Two steps with a fixed and with a refreshed history, a block of
T = 1 layers applied twice, and twice as many blocks: excess MSE, and the difference to T = 2 with a fixed history,
paired by seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("looping",)

REFERENCE = {"variant": "CEM", "T": 2}


def draw(results: StudyResults) -> Figure:
    what = "$T$ counts steps within a layer: a looped block takes its $T=1$ layers twice. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, what=what)


def table(results: StudyResults) -> DataFrame:
    what = "Excess MSE of recursion within a layer, of a looped block and of a deeper model."
    return comparison_table(results, REFERENCE, what=what)
