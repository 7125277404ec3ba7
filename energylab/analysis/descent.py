"""How far every layer of a model walks down its energy, on fixed test tasks."""

import numpy as np
import pandas as pd
import torch

from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior
from energylab.tasks.conditions import TEST_SEED

TRACE_TASKS = 64
PER_STEP = ("gradient_norm", "tangential_norm", "step_norm", "turn")
"""Columns that belong to the step from t to t+1, and are missing at t = T."""


def record(
    model: InContextRegressor, prior: GaussianProcessPrior, num_points: int, tasks: int = TRACE_TASKS
) -> pd.DataFrame:
    """The trace of every CEM layer at t = 0..T, a row for each (layer, step, task, position).

    Columns: ``layer`` (``block 0 attention``), ``block``, ``part`` (``attention``, ``mlp``), ``step`` (t), ``task``,
    ``token`` (``query``, ``pair``), ``pair`` (its index), ``energy`` (E(z_t)), ``energy_change`` (E(z_t) − E(z_0); only
    this one can be compared between positions), and ``PER_STEP`` as in ``energylab.layers.Trace``.

    The model is run in float64: late steps change the energy by less than float32 resolves.
    """
    batch = prior.sample(tasks, num_points, seed=TEST_SEED, stream="test", dtype=torch.float64)
    dtype = next(model.parameters()).dtype
    device = next(model.parameters()).device
    model.double()
    try:
        traces = model.trace(batch.x.to(device), batch.y.to(device))
    finally:
        model.to(dtype)  # exact: every float32 is a float64
    frames = []
    for trace in traces:
        steps, _, positions = trace.energy.shape
        step, task, position = np.indices((steps, tasks, positions))
        columns = {"energy": trace.energy, "energy_change": trace.energy - trace.energy[0]}
        for key in PER_STEP:
            values = getattr(trace, key)
            columns[key] = torch.cat([values, torch.full_like(values[:1], torch.nan)])
        frames.append(
            pd.DataFrame(
                {
                    "layer": trace.name,
                    "block": np.int16(trace.block),
                    "part": trace.part,
                    "step": step.ravel().astype(np.int16),
                    "task": task.ravel().astype(np.int16),
                    "token": np.array(trace.tokens)[position.ravel()],
                    "pair": trace.pairs.numpy()[position.ravel()].astype(np.int16),
                    **{key: value.flatten().cpu().numpy() for key, value in columns.items()},
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(_COLUMNS))


_COLUMNS = ("layer", "block", "part", "step", "task", "token", "pair", "energy", "energy_change", *PER_STEP)
_GROUP = ["layer", "block", "part", "step", "token"]
_SUMMARY = (
    "energy_change_mean",
    "energy_change_q25",
    "energy_change_median",
    "energy_change_q75",
    "tangential_norm_median",
    "step_norm_median",
    "turn_median",
    "fraction_rising",
)


def summarise(traces: pd.DataFrame) -> pd.DataFrame:
    """One row for each (layer, block, part, step, token): mean and quartiles of E(z_t) − E(z_0), medians of the rest.

    ``fraction_rising`` is the fraction of positions whose energy rose in the step that led to t; missing at t = 0.
    """
    if traces.empty:
        return pd.DataFrame(columns=[*_GROUP, *_SUMMARY])
    traces = traces.sort_values(["layer", "task", "token", "pair", "step"], kind="stable")
    rise = traces.groupby(["layer", "task", "token", "pair"], sort=False)["energy"].diff()
    traces = traces.assign(rising=(rise > 0).astype(float).where(rise.notna()))
    groups = traces.groupby(_GROUP, sort=True)
    change = groups["energy_change"]
    summary = pd.DataFrame(
        {
            "energy_change_mean": change.mean(),
            "energy_change_q25": change.quantile(0.25),
            "energy_change_median": change.median(),
            "energy_change_q75": change.quantile(0.75),
            "tangential_norm_median": groups["tangential_norm"].median(),
            "step_norm_median": groups["step_norm"].median(),
            "turn_median": groups["turn"].median(),
            "fraction_rising": groups["rising"].mean(),
        }
    )
    return summary.reset_index()
