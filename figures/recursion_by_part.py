"""Which layers gain from a second step? T = 2 in attention, in the MLP and in both: excess MSE, and the difference
to T = 1, paired by seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("recursion_by_part",)

REFERENCE = {"variant": "CEM", "T": 1}


def draw(results: StudyResults) -> Figure:
    what = "$T$ after a comma: the steps of the layers that are not named. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, what=what)


def table(results: StudyResults) -> DataFrame:
    return comparison_table(results, REFERENCE, what="Excess MSE with a second step in some layers.")
