"""Does momentum within a layer help? Heavy ball and Nesterov against gradient steps at the same T: excess MSE, and the
difference paired by seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("update_rule",)

REFERENCE = {"variant": "CEM"}
PAIRED = ("seed", "T")


def draw(results: StudyResults) -> Figure:
    what = "“CEM” takes plain gradient steps. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, PAIRED, what)


def table(results: StudyResults) -> DataFrame:
    return comparison_table(results, REFERENCE, PAIRED, "Excess MSE with each rule of the steps within a layer.")
