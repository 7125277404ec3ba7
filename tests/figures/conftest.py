"""Results shaped like a study's: the floor and the 1-NN error are computed, the errors of models made up."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

FIGURES = Path(__file__).parents[2] / "figures"
LEVELS = {1: 0.0235, 2: 0.0204, 4: 0.0193, 8: 0.0197}  # excess MSE


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a figure may read of a study."""

    name: str
    note: str
    source: str
    errors: pd.DataFrame
    descent: pd.DataFrame
    training: pd.DataFrame


def references(num_points: int, tasks: int = 48) -> pd.DataFrame:
    """Floor and 1-NN error on y at each k, for an RBF process with length-scale 0.5 and noise 0.1 on (-2, 2)."""
    random = np.random.default_rng(0)
    x = random.uniform(-2, 2, (tasks, num_points))
    covariance = np.exp(-((x[:, :, None] - x[:, None]) ** 2) / (2 * 0.5**2)) + 0.01 * np.eye(num_points)
    factor = np.linalg.cholesky(covariance)
    y = (factor @ random.normal(size=(tasks, num_points, 1)))[..., 0]
    nearest = np.zeros_like(y)
    for k in range(1, num_points):
        nearest[:, k] = np.take_along_axis(y, np.abs(x[:, :k] - x[:, k : k + 1]).argmin(1)[:, None], 1)[:, 0]
    return pd.DataFrame(
        {
            "k": np.arange(num_points),
            "floor_rmse": np.sqrt((np.diagonal(factor, axis1=1, axis2=2) ** 2).mean(0)),
            "zero_rmse": 1.005,
            "nearest_neighbour_rmse": np.sqrt(((nearest - y) ** 2).mean(0)),
        }
    )


@functools.cache
def make_study(
    recursions: tuple[int, ...] = (1, 2, 4, 8),
    seeds: int = 5,
    depth: int = 2,
    num_points: int = 24,
    variants: tuple[str, ...] = ("CEM",),
    llama: bool = True,
    parts: tuple[str, ...] = ("attention", "mlp"),
    note: str = "",
) -> Results:
    random = np.random.default_rng(1)
    base = references(num_points)
    k = base["k"].to_numpy()
    bump = (k / 5) * np.exp(1 - k / 5) * (1 + 0.1 * np.sin(k)) + 0.005
    errors, descent, training = [], [], []
    for seed in range(seeds):
        shift = random.normal(scale=0.0007)
        for variant, T in [(v, T) for v in variants for T in recursions] + ([("Llama", None)] if llama else []):
            name = f"{variant}-T{T}-seed{seed}"
            columns = {"study": "recursion", "run": name, "variant": variant, "T": T, "seed": seed}
            level = LEVELS.get(T, 0.02) + 0.002 * variants.index(variant) if T else 0.011
            excess = (level + shift + random.normal(scale=0.0003)) * bump / bump.mean()
            rmse = np.hypot(base["floor_rmse"], np.sqrt(excess))
            errors.append(base.assign(condition="in-prior", excess_mse=excess, rmse=rmse, **columns))
            errors.append(base.assign(condition="noise x2", excess_mse=1.0, rmse=9.0, **columns))
            training.append(pd.DataFrame({"step": [50, 100], "loss": [0.5, 0.4]}).assign(**columns))
            for block in range(depth if T else 0):
                for part in parts:
                    t = np.arange(T + 1)
                    drop = {"attention": 9.0, "mlp": 2.5}[part] * (1 + 0.6 * block) * random.normal(1, 0.04)
                    change = -drop * (1 + 0.1 * np.log2(T)) * (1 - np.exp(-1.6 * t / T))
                    for token, scale in (("query", 1.0), ("pair", 100.0)):
                        rows = {
                            "layer": f"block {block} {part}",
                            "block": block,
                            "part": part,
                            "step": t,
                            "token": token,
                            "energy_change_mean": scale * change,
                            "energy_change_q25": scale * change * 1.35,
                            "energy_change_median": scale * change,
                            "energy_change_q75": scale * change * 0.7,
                        }
                        descent.append(pd.DataFrame(rows).assign(**columns))
    if not descent:
        names = ("study", "run", "variant", "T", "seed", "layer", "block", "part", "step", "token")
        quantiles = ("mean", "q25", "median", "q75")
        descent = [pd.DataFrame(columns=[*names, *(f"energy_change_{name}" for name in quantiles)])]
    frames = [pd.concat(parts_, ignore_index=True).astype({"T": "Int64"}) for parts_ in (errors, descent, training)]
    return Results(
        name="recursion", note=note, source="runs/recursion", errors=frames[0], descent=frames[1], training=frames[2]
    )


def load_figure(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, FIGURES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def study() -> Callable[..., Results]:
    return make_study


@pytest.fixture(scope="session")
def figure_file() -> Callable[[str], ModuleType]:
    return load_figure
