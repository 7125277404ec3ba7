"""A prior in words, and what can be reached on its test tasks."""

import math

import torch
from torch import Tensor

from energylab.tasks.conditions import PROTOCOL, TEST_TASKS, condition
from energylab.tasks.gaussian_process import GaussianProcessPrior
from energylab.tasks.predictors import nearest_neighbour, zero

CONTEXTS = (0, 1, 2, 4, 8, 16, 32, 63)
NUM_POINTS = 64


def describe(prior: GaussianProcessPrior, num_tasks: int = TEST_TASKS) -> str:
    """The fields of a prior, and the RMSE of its floor by the number of earlier pairs k, on the first `num_tasks` test
    tasks of 64 points, or of as many as the prior allows.

    The floor's is the expected one, the root of its mean variance, as a prediction of y and of f; beside it, what
    predicting 0 and the nearest earlier input reach on y.

    >>> print(describe(GaussianProcessPrior.preset("fixed"), num_tasks=16).splitlines()[1])
    length-scale   0.5
    """
    test = condition("in-prior", prior, min(NUM_POINTS, prior.max_points or NUM_POINTS))
    contexts = sorted({min(k, test.num_points - 1) for k in CONTEXTS})
    squares = torch.zeros(4, test.num_points, dtype=torch.float64)
    for batch in test.batches(num_tasks):
        errors = [(predict(batch.x, batch.y) - batch.y).square() for predict in (nearest_neighbour, zero)]
        squares += torch.stack([batch.floor_variance, batch.floor_variance_f, *errors]).sum(1)
    rows = zip(("floor on y", "floor on f", "1-NN on y", "zero on y"), (squares / num_tasks).sqrt(), strict=True)
    return "\n".join(
        [
            *(f"{name:14s} {text}" for name, text in _words(prior).items()),
            "",
            f"RMSE on {num_tasks} {test.name} test tasks of {test.num_points} points, {PROTOCOL} {test.identity}",
            _row("pairs before", [str(k) for k in contexts]),
            *(_row(name, [f"{value:.3f}" for value in _at(errors, contexts)]) for name, errors in rows),
        ]
    )


def _words(prior: GaussianProcessPrior) -> dict[str, str]:
    lengthscale = _range(prior.lengthscale, prior.lengthscale_law)
    if prior.input_dim > 1:
        lengthscale += f", times sqrt({prior.input_dim}) = {math.sqrt(prior.input_dim):.4g}"
    low, high = prior.input_range
    words = {
        "kernels": ", ".join(prior.kernels),
        "length-scale": lengthscale,
        "output scale": f"{_range(prior.output_scale, 'uniform')} (standard deviation of f), mean {prior.mean:g}",
        "noise_std": f"{prior.noise_std:g}",
        "inputs": f"{prior.input_dim}, in ({low:g}, {high:g}), {prior.input_layout}",
        "jitter": f"{prior.jitter:g} of the variance of f",
    }
    if any("periodic" in kernel for kernel in prior.kernels):
        words["period"] = f"{prior.period:g}"
    if prior.max_points is not None:
        words["points"] = f"at most {prior.max_points}"
    return words


def _range(bounds: tuple[float, float], law: str) -> str:
    low, high = bounds
    return f"{low:g}" if low == high else f"{low:g} to {high:g}, {law}"


def _at(values: Tensor, places: list[int]) -> list[float]:
    return values[places].tolist()


def _row(name: str, cells: list[str]) -> str:
    return f"{name:14s}" + "".join(f"{cell:>7s}" for cell in cells)
