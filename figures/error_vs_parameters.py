"""What a parameter buys: excess MSE against the number of parameters, every model of several studies.

The line joins the models that no other beats at their cost or less. It follows means: where intervals overlap, another
seed may draw it elsewhere. Models of several studies that share settings are one point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.tradeoff import draw_tradeoff, tradeoff_table

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
    return draw_tradeoff(results, "parameters")


def table(results: StudyResults) -> DataFrame:
    return tradeoff_table(results, "parameters")
