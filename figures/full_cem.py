"""Do models of CEM layers alone train stably, and how do they compare with Llama?

(a) excess MSE of each model, (b) its difference to Llama, paired by seed, (c) the largest gradient norm of each stretch of
logged steps against the step, before clipping: an instability is a spike here. Thin lines are single seeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from energylab.analysis.statistics import over_seeds
from energylab.plotting import tables
from energylab.plotting.comparison import comparison_table, draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("full_cem",)

REFERENCE = {"variant": "Llama"}


def draw(results: StudyResults) -> Figure:
    what = "CEM models take $T=2$ steps. Excess MSE averaged over $k$."
    return draw_comparison(results, REFERENCE, what=what, column="gradient_norm_max")


def table(results: StudyResults) -> DataFrame:
    what = "Excess MSE of models of CEM layers alone against Llama, and the largest gradient norm after warm-up."
    table = comparison_table(results, REFERENCE, what=what)
    late = results.training[results.training["step"] > 0.1 * results.training["step"].max()]
    norms = late.groupby(["run", "variant", "T", "seed"], dropna=False, as_index=False)[["gradient_norm_max"]].max()
    norms = tables.interval_columns(over_seeds(norms, "gradient_norm_max", ["variant", "T"]), "largest gradient norm")
    norms = norms.rename(columns={"variant": "model"}).drop(columns="seeds")
    merged = pd.merge(table, norms, on=["model", "T"], how="left")
    merged.attrs = table.attrs
    return merged
