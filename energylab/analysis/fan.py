"""What is said of y at every x, after the first pairs of one task: by the floor, and by a model."""

import dataclasses
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from energylab.analysis.queries import predict_queries
from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior
from energylab.tasks.predictors import marginal

STREAM = "look"
"""Neither trained nor tested on."""
TRUTH_POINTS = 400


@dataclass(frozen=True)
class Fan:
    """One task, predicted everywhere from its first pairs."""

    pairs: pd.DataFrame
    """The pairs that were seen: x, y."""
    function: pd.DataFrame
    """The function behind them: x, f."""
    predictions: pd.DataFrame
    """x; ``floor_mean``, ``floor_sd``; with a model ``model_mean``, and with its Gaussian head ``model_sd``. Of y, noise
    included.
    """


def draws(prior: GaussianProcessPrior, number: int, points: int = 300, seed: int = 0) -> pd.DataFrame:
    """Functions drawn from the prior, on a regular grid: task, kernel, lengthscale, output_scale, x, f.

    From a prior with several kernels, they are the first tasks that have different ones.
    """
    grid = dataclasses.replace(_one_input(prior), input_layout="grid", max_points=None)
    names = grid.sample(max(number, 50 * (len(prior.kernels) > 1)), 1, seed=seed, stream=STREAM).kernel
    first = [names.index(name) for name in dict.fromkeys(names)] if len(prior.kernels) > 1 else range(number)
    frames = []
    for task in sorted(first, key=lambda task: prior.kernels.index(names[task]))[:number]:
        batch = grid.sample(1, points, seed=seed, stream=STREAM, first_task=task, dtype=torch.float64)
        fixed = {"kernel": batch.kernel[0], "lengthscale": batch.lengthscale.item()}
        fixed |= {"task": task, "output_scale": batch.output_scale.item()}
        frames.append(pd.DataFrame({**fixed, "x": batch.x[0, :, 0].numpy(), "f": batch.f[0].numpy()}))
    return pd.concat(frames, ignore_index=True)


@torch.no_grad()
def fan(
    prior: GaussianProcessPrior,
    num_pairs: int,
    model: InContextRegressor | None = None,
    *,
    task: int = 0,
    points: int = 200,
    seed: int = 0,
) -> Fan:
    """Predictions at `points` equally spaced x from the first `num_pairs` pairs of a task of the prior.

    The task is the same for every `num_pairs`. The floor knows the kernel of the task and its hyper-parameters; the model
    is asked about one x at a time. Raises ValueError unless the prior has one input.
    """
    uniform = dataclasses.replace(_one_input(prior), input_layout="uniform", max_points=None)
    batch = uniform.sample(1, TRUTH_POINTS, seed=seed, stream=STREAM, first_task=task, dtype=torch.float64)
    seen_x, seen_y = batch.x[:, :num_pairs], batch.y[:, :num_pairs]
    grid = torch.linspace(*prior.input_range, points, dtype=torch.float64)[:, None]
    lengthscale, output_scale = batch.lengthscale.item(), batch.output_scale.item()
    known = dataclasses.replace(
        prior, kernels=tuple(batch.kernel), lengthscale=(lengthscale,) * 2, output_scale=(output_scale,) * 2
    )
    x = torch.cat([seen_x.expand(points, -1, -1), grid[:, None]], dim=1)
    y = torch.nn.functional.pad(seen_y.expand(points, -1), (0, 1))  # no prediction sees its own target
    floor = marginal(x, y, known)
    predictions = {"x": grid[:, 0], "floor_mean": floor.mean[:, -1], "floor_sd": floor.variance[:, -1].sqrt()}
    if model is not None:
        predicted = predict_queries(model, seen_x, seen_y, grid[None])
        predictions["model_mean"] = predicted.mean[0]
        if predicted.variance is not None:
            predictions["model_sd"] = predicted.variance[0].sqrt()
    order = batch.x[0, :, 0].argsort()
    return Fan(
        pairs=_frame(x=seen_x[0, :, 0], y=seen_y[0]),
        function=_frame(x=batch.x[0, order, 0], f=batch.f[0, order]),
        predictions=_frame(**predictions),
    )


def _one_input(prior: GaussianProcessPrior) -> GaussianProcessPrior:
    if prior.input_dim != 1:
        raise ValueError(f"input_dim: expected 1, to draw a function of one input, got {prior.input_dim}")
    return prior


def _frame(**columns: Tensor) -> pd.DataFrame:
    return pd.DataFrame({name: values.double().cpu().numpy() for name, values in columns.items()})
