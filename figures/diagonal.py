"""Is a diagonal of the interaction essential, and is one for all heads enough? None, shared and per head, at T = 1 and
2: excess MSE, and its difference to the model without a diagonal at the same T, paired by seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("diagonal",)

REFERENCE = {"variant": "CEM no diagonal"}
PAIRED = ("seed", "T")


def draw(results: StudyResults) -> Figure:
    what = "“CEM” has one diagonal for all heads. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, PAIRED, what)


def table(results: StudyResults) -> DataFrame:
    what = "Excess MSE with no diagonal, one for all heads (CEM), and one per head."
    return comparison_table(results, REFERENCE, PAIRED, what)
