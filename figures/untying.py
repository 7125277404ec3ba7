"""What gives the freedom back that the two ties of attention take? Equally many parameters more, spent on heads, on rank,
on a positive and on an indefinite preconditioner: excess MSE, and the difference to the tied model, paired by seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("untying",)

REFERENCE = {"variant": "CEM no diagonal"}


def draw(results: StudyResults) -> Figure:
    what = "CEM layers take one step ($T=1$) and have no diagonal. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, what=what)


def table(results: StudyResults) -> DataFrame:
    return comparison_table(results, REFERENCE, what="Excess MSE with more freedom of several kinds, $T=1$.")
