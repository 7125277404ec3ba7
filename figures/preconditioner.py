"""Do learned preconditioners help? T = 2, each kind of P against P = I: excess MSE, and the difference paired by seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("preconditioner",)

REFERENCE = {"variant": "CEM"}
PAIRED = ("seed", "T")


def draw(results: StudyResults) -> Figure:
    what = "$T=2$; “CEM” has $P=I$, the others learn the $P$ that they name. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, PAIRED, what)


def table(results: StudyResults) -> DataFrame:
    return comparison_table(results, REFERENCE, PAIRED, "Excess MSE with each kind of preconditioner, $T=2$.")
