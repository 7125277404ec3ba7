"""What do tied weights cost? Llama with none, some and all of its weights tied, at equal width, parameters and
operations: excess MSE, and the difference to Llama, paired by seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("tied_weights",)

REFERENCE = {"variant": "Llama"}


def draw(results: StudyResults) -> Figure:
    what = "CEM layers take one step ($T=1$) and have no diagonal. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, what=what)


def table(results: StudyResults) -> DataFrame:
    return comparison_table(results, REFERENCE, what="Excess MSE with none, some and all weights tied, $T=1$.")
