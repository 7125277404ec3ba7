"""Predictions everywhere from the first pairs of a task: the exact posterior, and what a model says."""

import dataclasses

import numpy as np
import pytest
import torch

from energylab.analysis.fan import draws, fan
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior
from energylab.tasks.covariance import KERNELS

PRIOR = GaussianProcessPrior.preset("fixed")
SMALL = ModelConfig(width=16, hidden=16, heads=2, depth=1)


@pytest.mark.parametrize("num_pairs", [0, 1, 7])
def test_floor_is_the_posterior_written_out(num_pairs):
    one = fan(PRIOR, num_pairs, points=11)
    seen, grid = one.pairs["x"].to_numpy(), one.predictions["x"].to_numpy()
    assert len(seen) == num_pairs
    assert grid.tolist() == pytest.approx(np.linspace(-2, 2, 11), abs=1e-12)

    def kernel(a, b):
        return np.exp(-((a[:, None] - b[None, :]) ** 2) / (2 * 0.5**2))

    weights = np.linalg.solve(kernel(seen, seen) + 0.01 * np.eye(num_pairs), kernel(seen, grid))
    np.testing.assert_allclose(one.predictions["floor_mean"], weights.T @ one.pairs["y"], atol=1e-6)
    variance = 1.01 - (weights * kernel(seen, grid)).sum(0)
    np.testing.assert_allclose(one.predictions["floor_sd"], np.sqrt(variance), atol=1e-6)


def test_the_task_is_the_same_whatever_is_seen():
    few, many = fan(PRIOR, 3, points=5), fan(PRIOR, 9, points=5)
    assert few.pairs["x"].tolist() == many.pairs["x"].tolist()[:3]
    assert few.function.equals(many.function)
    assert few.function["x"].is_monotonic_increasing
    # the pairs lie on the function, noise apart
    nearest = [(few.function["x"] - x).abs().idxmin() for x in many.pairs["x"]]
    noise = many.pairs["y"].to_numpy() - few.function["f"].to_numpy()[nearest]
    assert 0 < np.abs(noise).max() < 0.5


def test_the_floor_knows_the_kernel_of_its_task():
    """After many pairs it follows the function, whichever kernel made it."""
    mixture = GaussianProcessPrior.preset("mixture", noise_std=0.01)
    for task in range(6):
        one = fan(mixture, 80, task=task, points=50)
        truth = np.interp(one.predictions["x"], one.function["x"], one.function["f"])
        z = (truth - one.predictions["floor_mean"]) / one.predictions["floor_sd"]
        assert z.abs().mean() < 2


@pytest.mark.parametrize("head", ["point", "gaussian"])
def test_a_model_is_asked_about_one_x_at_a_time(head):
    model = InContextRegressor(dataclasses.replace(SMALL, head=head))
    one = fan(PRIOR, 4, model, points=40)
    assert ("model_sd" in one.predictions) == (head == "gaussian")
    x = torch.tensor([*one.pairs["x"], one.predictions["x"][33]]).float()
    with torch.no_grad():
        output = model(x[None, :, None], torch.tensor([*one.pairs["y"], 123.0]).float()[None])
    mean = output if head == "point" else output[0]
    assert one.predictions["model_mean"][33] == pytest.approx(mean[0, -1].item(), abs=1e-5)
    if head == "gaussian":
        assert one.predictions["model_sd"][33] == pytest.approx(output[1][0, -1].sqrt().item(), abs=1e-5)


def test_draws_of_a_mixture_have_different_kernels():
    table = draws(GaussianProcessPrior.preset("mixture"), 5, points=20)
    assert list(dict.fromkeys(table["kernel"])) == list(KERNELS)
    fixed = draws(PRIOR, 3, points=20)
    assert fixed["task"].nunique() == 3
    assert fixed["f"].std() == pytest.approx(1, abs=0.5)
    assert fixed.loc[fixed["task"] == 0, "x"].tolist() == np.linspace(-2, 2, 20).tolist()


def test_several_inputs_are_refused():
    prior = GaussianProcessPrior(input_dim=2)
    for function in (draws, fan):
        with pytest.raises(ValueError, match="input_dim: expected 1, to draw a function of one input, got 2"):
            function(prior, 3)
