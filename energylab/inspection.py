"""Looks inside one finished run: compute, write tables and figures, and say in a few lines what was found.

What `energylab trace`, `landscape`, `sweep` and `confidence` do. Each returns the lines to print, and raises ValueError, in
one line, for what it cannot look at, FileNotFoundError for a run that is not there. `tell` is told what is being done, and
which share of that is done.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from energylab.analysis.confidence import CONDITIONS, TASKS, fall_and_error
from energylab.analysis.curvature import INDEFINITE, curvature
from energylab.analysis.descent import TRACE_TASKS
from energylab.analysis.descent_report import describe_descent
from energylab.analysis.inside import energy_layers
from energylab.analysis.landscape import landscape as compute_landscape
from energylab.analysis.recursion import SWEEP_TASKS, TOLERANCES, early_exit
from energylab.analysis.recursion import sweep as compute_sweep
from energylab.layers import EnergyLayer
from energylab.plotting import save
from energylab.plotting.confidence import draw_confidence
from energylab.plotting.descent import draw_curvature, draw_descent
from energylab.plotting.landscape import draw_landscape
from energylab.plotting.recursion import draw_sweep
from energylab.study import load_run
from energylab.study.store import RunResults, write_table

Location = str | os.PathLike[str]
Tell = Callable[[str, float], None]


def in_silence(what: str, share: float) -> None:
    """A ``Tell`` for nobody."""


def trace(run_path: Location, output: Location, tell: Tell = in_silence) -> list[str]:
    """The descent report: steps.parquet, layers.parquet, gaps.parquet, curvature.parquet, and two figures."""
    run = load_run(run_path)
    energy_layers(run.model)
    folder = Path(output)
    report = describe_descent(
        run.model, run.prior, run.config.num_points, advance=functools.partial(tell, "descent and bottoms")
    )
    bends = curvature(run.model, run.prior, run.config.num_points, advance=functools.partial(tell, "curvature"))
    _write(folder, steps=report.steps, layers=report.layers, gaps=report.gaps, curvature=bends)
    tell("drawing", 0)
    written = [*save(draw_descent(report, model=name_of(run), tasks=TRACE_TASKS), folder / "descent")]
    if not bends.empty:
        written += save(draw_curvature(bends, model=name_of(run)), folder / "curvature")
    lines = [_layer_line(row, bends) for row in report.layers.to_dict("records")]
    return [*lines, _wrote(folder, written)]


def landscape(
    run_path: Location,
    layer: str,
    position: int,
    plane: str,
    output: Location,
    size: int = 101,
    task: int = 0,
    seed: int = 0,
    step: int | None = None,
    tell: Tell = in_silence,
) -> list[str]:
    """The energy around one query: grid.parquet, path.parquet, cuts.parquet, and a figure.

    `step` asks for a snapshot of the weights, after so many steps of training.
    """
    run = load_run(run_path, step)
    found = compute_landscape(
        run.model,
        run.prior,
        run.config.num_points,
        layer=layer,
        position=position,
        plane=plane,
        size=size,
        task=task,
        seed=seed,
        advance=functools.partial(tell, "energies"),
    )
    tell("drawing", 0)
    folder = Path(output)
    stem = f"{found.layer.replace(', ', ' ').replace(' ', '-')}-pair{found.pair}-{found.plane}"
    stem += (f"-task{task}" if task else "") + ("" if step is None else f"-step{step}")
    _write(folder, **{f"{stem}-grid": found.grid, f"{stem}-path": found.path, f"{stem}-cuts": found.cuts})
    model = name_of(run) + ("" if step is None else f" after {step} training steps")
    written = save(draw_landscape(found, model=model), folder / stem)
    kinds = found.path.groupby("kind", sort=False)["energy"].last()
    certified = found.certified_step_size
    sizes = ", ".join(f"{size:.3g}" for size in found.step_sizes[: 1 if len(set(found.step_sizes)) == 1 else None])
    return [
        f"{found.layer}, query of pair {found.pair}, plane {found.plane}: E falls by {-kinds['path']:.4g} in T = "
        f"{found.recursions}, by {-kinds['continued']:.4g} in more steps, by {-kinds['bottom']:.4g} at the bottom",
        f"learned step size {sizes}; certified {'any' if certified == math.inf else f'{certified:.3g}'}; "
        f"best multiples along the steps: {', '.join(f'{best:.3g}' for best in found.best_multiples)}",
        _wrote(folder, written),
    ]


def sweep(
    run_path: Location,
    recursions: Sequence[int] | None,
    output: Location,
    tasks: int = SWEEP_TASKS,
    tell: Tell = in_silence,
) -> list[str]:
    """Recursion at test time: sweep.parquet, early_exit.parquet, and a figure.

    `recursions` are the T' to try; by default 1 to twice the T of training, and at least to 8.
    """
    run = load_run(run_path)
    energy_layers(run.model)
    trained = max(layer.recursions for _, _, _, layer in run.model.path() if isinstance(layer, EnergyLayer))
    numbers = list(range(1, max(8, 2 * trained) + 1)) if recursions is None else sorted(set(recursions))
    if not numbers:
        raise ValueError("recursions: expected one number of at least 1, or more, got none")
    folder = Path(output)
    more = functools.partial(tell, "more and fewer steps")
    found = compute_sweep(run.model, run.prior, run.config.num_points, numbers, tasks, more)
    exits = pd.DataFrame()
    if run.config.model.history == "fixed":
        early = functools.partial(tell, "early exit")
        exits = early_exit(run.model, run.prior, run.config.num_points, numbers[-1], TOLERANCES, tasks, early)
    _write(folder, sweep=found, **({} if exits.empty else {"early_exit": exits}))
    written = save(draw_sweep(found, exits, trained, model=name_of(run), tasks=tasks), folder / "sweep")
    lines = [
        f"T' = {int(row['recursions']):2d}: RMSE {row['rmse']:.4f}, excess MSE {row['excess_mse']:.5f}"
        + ("  (as trained)" if row["recursions"] == trained else "")
        for row in found.to_dict("records")
    ]
    lines += [
        f"early exit at {row['tolerance']:g}: {row['steps']:.2f} steps, RMSE {row['rmse']:.4f}, "
        f"excess MSE {row['excess_mse']:.5f}"
        for row in exits.to_dict("records")
    ]
    return [*lines, _wrote(folder, written)]


def confidence(
    run_path: Location,
    output: Location,
    conditions: Sequence[str] = CONDITIONS,
    tasks: int = TASKS,
    tell: Tell = in_silence,
) -> list[str]:
    """Energy against error, in and out of the prior: confidence.parquet, and a figure."""
    run = load_run(run_path)
    advance = functools.partial(tell, "falls and errors")
    found = fall_and_error(run.model, run.prior, run.config.num_points, conditions, tasks, advance)
    folder = Path(output)
    _write(folder, confidence=found)
    written = save(draw_confidence(found, model=name_of(run), tasks=tasks), folder / "confidence")
    lines = []
    for key, rows in found.groupby(["condition", "layer"], sort=False):
        assert isinstance(key, tuple)
        said = [
            f"{row['against']} {row['mean']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
            for row in rows.to_dict("records")
        ]
        lines.append(f"{', '.join(key)}: {', '.join(said)}")
    return ["rank correlation of the fall in energy with", *lines, _wrote(folder, written)]


def name_of(run: RunResults) -> str:
    """What figures call the model of a run: ``CEM $T=2$``."""
    depth = "" if run.config.recursions is None else f" $T={run.config.recursions}$"
    return f"{run.config.variant}{depth}"


def _layer_line(row: Mapping[Any, Any], bends: pd.DataFrame) -> str:
    parts = [f"never rises at {100 * row['never_rise_query']:.0f}% of queries"]
    if "never_rise_pair" in row:
        parts[0] += f", {100 * row['never_rise_pair']:.0f}% of pairs"
    certified = "any" if row["certified"] == math.inf else f"{row['certified']:.2g}"
    parts.append(f"step size {row['step_size']:.3g} (certified {certified})")
    if not _missing(row.get("gap_median")):
        parts.append(
            f"falls by {row['fall_median']:.3g}, {row['gap_median']:.3g} above the bottom "
            f"({100 * row['stationary']:.0f}% of bottoms stationary)"
        )
    here = bends.loc[(bends["layer"] == row["layer"]) & (bends["at"] == "bottom")] if len(bends) else bends
    if len(here):
        kind = here["preconditioner"].iloc[0]
        known = here["condition"].median()
        unknown = bool(pd.isna(known))
        text = f"condition number there {'unknown' if unknown else f'{known:.3g}'}"
        if kind == INDEFINITE:
            text += f" ({INDEFINITE})"
        elif kind != "I":
            text += f", with P {here['preconditioned_condition'].median():.3g}"
        parts.append(text)
    problems = here.loc[here["problem"] != "", "problem"] if len(here) else here
    if len(problems):
        parts.append(f"missing at {len(problems)} of {len(here)} bottoms, since {problems.iloc[0]}")
    if not row["eigenvalue_min"] == row["eigenvalue_max"] == 1:
        parts.append(f"eigenvalues of P {row['eigenvalue_min']:.3g} to {row['eigenvalue_max']:.3g}")
    return f"{row['layer']}: {'; '.join(parts)}"


def _missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _write(folder: Path, **tables: pd.DataFrame) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_table(folder / f"{name}.parquet", table)


def _wrote(folder: Path, figures: Sequence[Path]) -> str:
    return f"{folder}: tables, and {', '.join(path.name for path in figures if path.suffix == '.pdf')} (.png too)"
