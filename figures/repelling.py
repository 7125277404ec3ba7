"""Heads that repel: excess MSE with none, one, two and all of four, in one step, two steps and a looped block, and the
difference to the model of the same parameters whose heads all attract, paired by seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("repelling",)

REFERENCE = {"variant": "CEM no diagonal"}


def draw(results: StudyResults) -> Figure:
    what = "A head that repels moves a token away from what it looks for. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, what=what)


def table(results: StudyResults) -> DataFrame:
    return comparison_table(results, REFERENCE, what="Excess MSE with heads that repel.")
