"""Do models of CEM layers alone match Llama with fewer parameters? T = 2, without and with preconditioners: excess MSE, and
the difference to Llama, paired by seed. Whether they train stably is the figure `stability`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("full_cem",)

REFERENCE = {"variant": "Llama"}


def draw(results: StudyResults) -> Figure:
    return draw_comparison(results, REFERENCE, what="CEM models take $T=2$ steps. Excess MSE averaged over $k$.")


def table(results: StudyResults) -> DataFrame:
    return comparison_table(results, REFERENCE, what="Excess MSE of models of CEM layers alone against Llama.")
