"""Whether the layers of a trained model walk downhill, how far, how straight, and how close to the bottom."""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from energylab.analysis.bottom import POSITIONS, gaps
from energylab.analysis.certificates import certify
from energylab.analysis.descent import TRACE_TASKS, record, summarise
from energylab.analysis.inside import Advance, energy_layers, ignore, layer_inputs
from energylab.layers import norm
from energylab.layers.descent import angle
from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior

ROUNDING = 1e-12
"""A rise of less than this, relative to the energy, is none."""


@dataclass(frozen=True, kw_only=True)
class DescentReport:
    """Two tables about one model. Energies in the units of the temperature, angles in radians."""

    steps: pd.DataFrame
    """A row for each ``layer``, ``block``, ``part``, ``step`` (t), ``token``: the columns of
    `energylab.analysis.descent.summarise`, and, of the step from t to t+1, ``angle_median``: between x_{t+1} − x_t and
    −∇E(z_t), 0 for plain gradient steps, π for a negative step size, while a preconditioner or momentum turns the step; and
    ``bend_median``: between x_{t+1} − x_t and the first step, x_1 − x_0. Where it stays near 0, T steps are one long step.
    """
    layers: pd.DataFrame
    """A row for each layer: the columns of `energylab.analysis.certificates.certify`; for query and pair tokens the
    fractions of positions (``never_rise_query``, ``never_rise_pair``) and of tasks, with all of their positions
    (``never_rise_query_tasks``), whose energy never rises; and of `energylab.analysis.bottom.gaps` the medians
    ``fall_median``, ``gap_median``, ``gap_share`` (gap over fall and gap together), ``distance_median``, and the fraction
    that is ``stationary``, all missing under a refreshed history.
    """
    gaps: pd.DataFrame
    """What `energylab.analysis.bottom.gaps` returns."""


def describe_descent(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    tasks: int = TRACE_TASKS,
    positions: int = POSITIONS,
    advance: Advance = ignore,
) -> DescentReport:
    """The report, on the first ``tasks`` test tasks; bottoms at ``positions`` positions a layer.

    Raises ValueError for a model without CEM layers.
    """
    names = energy_layers(model)
    traces = record(model, prior, num_points, tasks)
    keys = ["layer", "step", "token"]
    steps = summarise(traces).merge(_angles(model, prior, num_points, tasks), on=keys, how="left", validate="1:1")
    bottoms = gaps(model, prior, num_points, positions, advance)
    layers = (
        certify(model, prior, num_points)
        .merge(_never_rises(traces), on="layer")
        .merge(_closeness(bottoms), on="layer", how="left")
    )
    order = {name: place for place, name in enumerate(names)}
    return DescentReport(
        steps=steps.sort_values(
            keys, key=lambda column: column.map(order) if column.name == "layer" else column
        ).reset_index(drop=True),
        layers=layers,
        gaps=bottoms,
    )


@torch.no_grad()
def step_angles(layer, states: Tensor) -> Tensor:
    """The angle between x_{t+1} − x_t and −∇E(z_t | u_t), (T, B, N), in radians, of a layer's ``states``, (T+1, B, N, D)."""
    h = states[0]
    angles = []
    for t, (before, after) in enumerate(itertools.pairwise(states)):
        history = h if layer.history == "fixed" else states[t]
        angles.append(angle(after - before, layer.condition(history).force(norm(before))))
    return torch.stack(angles)


def bends(states: Tensor) -> Tensor:
    """The angle between x_{t+1} − x_t and the first step, (T, B, N), in radians, of a layer's ``states``, (T+1, B, N, D)."""
    steps = states.diff(dim=0)
    return angle(steps, steps[:1].expand_as(steps))


def _angles(model: InContextRegressor, prior: GaussianProcessPrior, num_points: int, tasks: int) -> pd.DataFrame:
    rows = []
    for one in layer_inputs(model, prior, num_points, tasks):
        states = one.layer.trace(one.h).states
        angles = zip(step_angles(one.layer, states).numpy(), bends(states).numpy(), strict=True)
        for step, (angle_BN, bend_BN) in enumerate(angles):
            for token in dict.fromkeys(one.tokens):
                here = np.array(one.tokens) == token
                row = {"layer": one.name, "step": step, "token": token}
                row |= {"angle_median": np.median(angle_BN[:, here]), "bend_median": np.median(bend_BN[:, here])}
                rows.append(row)
    return pd.DataFrame(rows).astype({"step": np.int16})


def _never_rises(traces: pd.DataFrame) -> pd.DataFrame:
    traces = traces.sort_values(["layer", "task", "token", "pair", "step"], kind="stable")
    place = ["layer", "task", "token", "pair"]
    rise = traces.groupby(place, sort=False)["energy"].diff()
    falls = ~(rise > ROUNDING * traces["energy"].abs().clip(lower=1))
    traces = traces.assign(falls=falls.astype(float))
    positions = pd.DataFrame(traces.groupby(place, as_index=False)[["falls"]].min())
    tasks = pd.DataFrame(positions.groupby(["layer", "token", "task"], as_index=False)[["falls"]].min())
    parts = []
    for suffix, table in (("", positions), ("_tasks", tasks)):
        part = table.pivot_table(index="layer", columns="token", values="falls", aggfunc="mean")
        parts.append(part.set_axis([f"never_rise_{token}{suffix}" for token in part.columns], axis=1))
    return pd.concat(parts, axis=1).reset_index()


CLOSENESS = ("fall_median", "gap_median", "gap_share", "distance_median", "stationary")


def _closeness(bottoms: pd.DataFrame) -> pd.DataFrame:
    if bottoms.empty:
        return pd.DataFrame(columns=["layer", *CLOSENESS], dtype=float).astype({"layer": str})
    share = bottoms["gap"] / (bottoms["fall"] + bottoms["gap"])
    groups = bottoms.assign(share=share).groupby("layer", sort=False)
    return pd.DataFrame(
        {
            "fall_median": groups["fall"].median(),
            "gap_median": groups["gap"].median(),
            "gap_share": groups["share"].median(),
            "distance_median": groups["distance"].median(),
            "stationary": groups["stationary"].mean(),
        }
    ).reset_index()
