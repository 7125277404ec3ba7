"""The hill that a query meets, and the path that the layer takes on it, for the smallest and the largest T of a study:
the last attention layer, one stored model each (the smallest seed whose weights are stored).

Energies of two models have no common scale: each map has its own, and both are less E(z_0).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from energylab.analysis.inside import energy_layers
from energylab.analysis.landscape import Landscape, landscape
from energylab.plotting import tables
from energylab.plotting.landscape import draw_landscapes
from energylab.study import load_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

NEEDS = ("recursion",)

PAIR = 8
SIZE = 81  # points along each side of a map


def draw(results: StudyResults) -> Figure:
    return draw_landscapes(_landscapes(results))


def table(results: StudyResults) -> DataFrame:
    """A row each (model, step): the path on its hill."""
    rows = []
    for name, found in _landscapes(results).items():
        path = found.path[found.path["kind"] == "path"]
        depth = found.path.loc[found.path["kind"] == "bottom", "energy"].iloc[0]
        best = (*found.best_multiples, float("nan"))
        turned = np.degrees(np.hypot(path["alpha"], path["beta"]))
        for step, energy, turn in zip(path["step"], path["energy"], turned, strict=True):
            multiple = best[step]
            rows.append(
                {
                    "model": name.replace("$", "").replace("=", " = "),
                    "step": int(step),
                    "E - E0": energy,
                    "of the way down (%)": abs(100 * energy / depth),
                    "turned (degrees)": round(float(turn), 6),
                    "best multiple of the next step": multiple,
                }
            )
    what = (
        f"Path of the query of pair {PAIR} of one test task on the energy of the last attention layer; one model each."
    )
    return tables.captioned(pd.DataFrame(rows), what, results)


def _landscapes(results: StudyResults) -> dict[str, Landscape]:
    recursive = results.errors.dropna(subset=["T"])
    if recursive.empty:
        raise ValueError(f"{results.name}: expected runs with recursions, got none")
    ends = dict.fromkeys((int(recursive["T"].min()), int(recursive["T"].max())))
    found = {}
    for T in ends:
        runs = recursive[recursive["T"] == T].sort_values("seed").drop_duplicates("run")
        run = load_run(Path(results.source) / runs["run"].iloc[0])
        layer = next(name for name in reversed(energy_layers(run.model)) if "attention" in name)
        pair = min(PAIR, run.config.num_points - 1)
        found[f"{run.config.variant} $T={T}$"] = landscape(
            run.model, run.prior, run.config.num_points, layer=layer, position=pair, size=SIZE
        )
    return found
