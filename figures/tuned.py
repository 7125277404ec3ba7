"""T = 1, 2, 4, 8, heads that repel and Llama, each at a learning rate tuned at full length, and the difference to T = 1,
paired by seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("tuned",)

REFERENCE = {"variant": "CEM", "T": 1}


def draw(results: StudyResults) -> Figure:
    what = "Each model at the learning rate that the study learning_rate chose. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, what=what)


def table(results: StudyResults) -> DataFrame:
    return comparison_table(results, REFERENCE, what="Excess MSE, each model at a learning rate of its own.")
