"""Results shaped like a study's: the floor and the 1-NN error are computed, the errors of models made up."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

FIGURES = Path(__file__).parents[2] / "figures"
STEP = np.arange(200, 10_001, 200)
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
    test_time: pd.DataFrame = field(default_factory=pd.DataFrame)
    learning: pd.DataFrame = field(default_factory=pd.DataFrame)
    circuits: pd.DataFrame = field(default_factory=pd.DataFrame)


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
            cost = {"steps": 10_000, "parameters": 49_605 if T else 82_497, "flops": int(1e12 * (2 + 7 * (T or 1)))}
            errors.append(base.assign(condition="in-prior", excess_mse=excess, rmse=rmse, **columns, **cost))
            errors.append(base.assign(condition="noise x2", excess_mse=1.0, rmse=9.0, **columns, **cost))
            curve = level + shift + 0.5 * np.exp(-STEP / 900) + random.normal(scale=0.0008, size=len(STEP))
            training.append(pd.DataFrame({"step": STEP, "excess_loss": curve}).assign(**columns))
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


MODELS: dict[str, dict[tuple[str, int | None], tuple[float, int, float]]] = {
    # (variant, T): excess MSE, parameters, TFLOP; the variants are those of the study files
    "diagonal": {
        ("CEM", 1): (0.0248, 49_605, 9.1),
        ("CEM", 2): (0.0208, 49_605, 15.9),
        ("CEM no diagonal", 1): (0.0252, 49_477, 8.2),
        ("CEM no diagonal", 2): (0.0222, 49_477, 14.1),
        ("CEM per-head diagonal", 1): (0.0247, 49_989, 11.8),
        ("CEM per-head diagonal", 2): (0.0211, 49_989, 21.4),
    },
    "preconditioner": {
        ("CEM", 2): (0.0208, 49_605, 15.9),
        ("CEM P diagonal", 2): (0.0206, 49_861, 15.9),
        ("CEM P diagonal low rank", 2): (0.0204, 53_957, 18.2),
        ("CEM P diagonal low rank positive", 2): (0.0209, 51_909, 17.0),
    },
    "recursion_by_part": {
        ("CEM", 1): (0.0248, 49_605, 9.1),
        ("CEM first step 1/2", 1): (0.0240, 49_605, 9.1),
        ("CEM T = 2 in attention", 1): (0.0226, 49_605, 12.8),
        ("CEM T = 2 in the MLP", 1): (0.0255, 49_605, 12.1),
        ("CEM", 2): (0.0208, 49_605, 15.9),
    },
    "tuned": {
        ("CEM", 1): (0.0240, 49_605, 9.1),
        ("CEM", 2): (0.0208, 49_605, 15.9),
        ("CEM", 4): (0.0217, 49_605, 29.5),
        ("CEM", 8): (0.0228, 49_605, 56.6),
        ("CEM 2 of 4 repel", 1): (0.0140, 49_477, 7.9),
        ("CEM preconditioned", 2): (0.0170, 53_957, 17.4),
        ("Llama", None): (0.0140, 82_497, 8.7),
    },
    "looping": {
        ("CEM", 1): (0.0248, 49_605, 9.1),
        ("CEM", 2): (0.0208, 49_605, 15.9),
        ("CEM, equal operations", 2): (0.0201, 55_900, 17.6),
        ("CEM refreshed history", 2): (0.0188, 49_605, 18.1),
        ("CEM looped block", 1): (0.0171, 49_605, 18.1),
        ("CEM deeper", 1): (0.0142, 98_900, 18.1),
    },
    "tied_weights": {
        ("Llama", None): (0.0110, 82_497, 8.7),
        ("Llama, K = V", None): (0.0130, 74_305, 7.9),
        ("Llama, Q = O", None): (0.0112, 74_305, 8.7),
        ("Llama, K = V and Q = O", None): (0.0210, 66_113, 7.9),
        ("Llama attention, CEM MLP", 1): (0.0113, 66_115, 8.4),
        ("CEM attention, Llama MLP", 1): (0.0208, 66_115, 8.0),
        ("CEM no diagonal", 1): (0.0252, 49_477, 8.2),
        ("CEM no diagonal, equal operations", 1): (0.0238, 55_800, 9.0),
        ("CEM no diagonal, equal parameters", 1): (0.0225, 84_900, 13.1),
    },
    "untying": {
        ("CEM no diagonal", 1): (0.0252, 49_477, 8.2),
        ("CEM 8 heads", 1): (0.0248, 65_861, 10.5),
        ("CEM heads of rank 32", 1): (0.0247, 65_861, 10.5),
        ("CEM positive P", 1): (0.0246, 66_117, 9.8),
        ("CEM indefinite P", 1): (0.0180, 66_117, 9.8),
        ("Llama, K = V", None): (0.0150, 74_305, 7.9),
        ("Llama", None): (0.0140, 82_497, 8.7),
    },
    "repelling": {
        ("CEM no diagonal", 1): (0.0252, 49_477, 8.2),
        ("CEM 1 of 4 repels", 1): (0.0204, 49_477, 8.2),
        ("CEM 2 of 4 repel", 1): (0.0161, 49_477, 8.2),
        ("CEM 4 of 4 repel", 1): (0.0201, 49_477, 8.2),
        ("CEM 2 of 4 repel", 2): (0.0150, 49_477, 14.1),
        ("CEM 2 of 4 repel, equal parameters", 1): (0.0141, 85_100, 13.2),
        ("CEM looped block", 1): (0.0171, 49_605, 18.1),
        ("CEM looped block, 2 of 4 repel", 1): (0.0130, 49_605, 18.1),
        ("Llama attention, CEM MLP", 1): (0.0153, 66_115, 8.4),
        ("Llama", None): (0.0140, 82_497, 8.7),
        ("Llama looped block", None): (0.0110, 82_497, 17.4),
    },
    "update_rule": {
        ("CEM", 2): (0.0208, 49_605, 15.9),
        ("CEM", 4): (0.0217, 49_605, 29.5),
        ("CEM heavy ball", 2): (0.0207, 49_609, 15.9),
        ("CEM heavy ball", 4): (0.0214, 49_609, 29.5),
        ("CEM Nesterov", 2): (0.0206, 49_609, 15.9),
        ("CEM Nesterov", 4): (0.0212, 49_609, 29.5),
    },
    "full_cem": {
        ("Llama", None): (0.0140, 82_497, 8.7),
        ("CEM", 2): (0.0208, 49_605, 15.9),
        ("CEM preconditioned", 2): (0.0204, 53_957, 18.2),
        ("CEM preconditioned, equal parameters", 2): (0.0188, 83_100, 27.0),
    },
}
CONDITIONS = {
    "in-prior": 1.0,
    "shifted-inputs": 31.0,
    "held-out-kernel": 9.0,
    "half-noise": 0.9,
    "double-noise": 2.2,
    "short-lengthscale": 6.0,
    "long-lengthscale": 1.7,
    "mean-offset": 14.0,
    "double-points": 2.9,
}


@functools.cache
def make_models(name: str, seeds: int = 3, note: str = "") -> Results:
    """A study of `MODELS`, or "generalisation", "test_time"."""
    random = np.random.default_rng(2)
    recursive = {("CEM", T): (level, 49_605, 2.0 + 7 * T) for T, level in LEVELS.items()}
    conditions = {"in-prior": 1.0}
    if name == "generalisation":
        models = recursive | {("Llama", None): (0.011, 82_497, 8.7)}
        conditions = CONDITIONS
    else:
        models = MODELS.get(name, recursive)
    base = references(12)
    errors, descent, training, test_time, circuits = [], [], [], [], []
    for seed in range(seeds):
        shift = random.normal(scale=0.0007)
        for (variant, T), (level, parameters, tflop) in models.items():
            columns = {"study": name, "run": f"{variant}-T{T}-seed{seed}", "variant": variant, "T": T, "seed": seed}
            own = level + shift + random.normal(scale=0.0003)
            for condition, factor in conditions.items():
                excess = own * factor * random.normal(1, 0.02)
                out = condition in ("held-out-kernel", "mean-offset", "double-noise", "short-lengthscale")
                rows = base.assign(
                    condition=condition,
                    predictions=4096,
                    excess_mse=excess,
                    excess_mse_over_prior=excess - 0.01 if out else excess,
                    rmse=np.hypot(base["floor_rmse"], np.sqrt(excess)),
                    prior_rmse=np.hypot(base["floor_rmse"], 0.1) if out else base["floor_rmse"],
                    parameters=parameters,
                    flops=int(tflop * 1e12),
                    steps=10_000,
                )
                errors.append(rows.assign(**columns))
            step = np.arange(200, 10_001, 200)
            curve = own + 0.5 * np.exp(-step / 900) + random.normal(scale=0.0008, size=len(step))
            norm = (0.5 + 2 * np.exp(-step / 900)) * np.exp(random.normal(scale=0.1, size=len(step)))
            logged = {
                "step": step,
                "loss": 0.2 + curve,
                "loss_max": 0.3 + 2 * curve,
                "excess_loss": curve,
                "gradient_norm": norm,
                "gradient_norm_max": 3 * norm,
                "learning_rate": 2e-3,
            }
            training.append(pd.DataFrame(logged).assign(**columns))
            tied = "CEM" in variant and "indefinite" not in variant
            qk, ov = random.normal(scale=0.3, size=(2, 8, 2))
            ov = 2 * qk if tied else ov
            heads = {
                "block": np.repeat([0, 1], 4),
                "head": np.tile(np.arange(4), 2),
                "alignment": 1.0 if tied else ov[:, 0] / 9,
            }
            for place, token in enumerate("xy"):
                heads |= {f"qk_{token}": qk[:, place], f"ov_{token}": ov[:, place]}
            circuits.append(pd.DataFrame(heads).assign(**columns))
            if name == "test_time" and T:
                steps = np.array([1, 2, 3, 4, 5, 6, 8, 12, 16])
                away = np.abs(np.log2(steps / T))
                changes = {
                    f"energy_change block {block} {part}": -size * (1 - np.exp(-steps / T))
                    for block in (0, 1)
                    for part, size in (("attention", 90.0), ("mlp", 15.0))
                }
                excess = own * (1 + 12 * away**1.5)
                rows = {"test_recursions": steps, "rmse": np.sqrt(0.21 + excess), "excess_mse": excess, **changes}
                test_time.append(pd.DataFrame(rows).assign(**columns))
    frames = [pd.concat(parts, ignore_index=True).astype({"T": "Int64"}) for parts in (errors, training)]
    return Results(
        name=name,
        note=note,
        source=f"runs/{name}",
        errors=frames[0],
        descent=pd.DataFrame(descent),
        training=frames[1],
        test_time=pd.concat(test_time, ignore_index=True).astype({"T": "Int64"}) if test_time else pd.DataFrame(),
        circuits=pd.concat(circuits, ignore_index=True).astype({"T": "Int64"}),
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
def models() -> Callable[..., Results]:
    return make_models


@pytest.fixture(scope="session")
def figure_file() -> Callable[[str], ModuleType]:
    return load_figure
