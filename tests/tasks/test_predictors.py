"""Reference predictors: against loops written out, their limits, and each other."""

import itertools
import random

import numpy as np
import pytest
import scipy.stats
import torch

from energylab.tasks import GaussianProcessPrior
from energylab.tasks.predictors import average, fitted, kernel_ridge, marginal, nearest_neighbour, references, zero

MIXTURE = GaussianProcessPrior.preset("mixture", output_scale=(0.5, 1.5), mean=0.3)
CAUSAL = {
    **references(GaussianProcessPrior.preset("rbf")),
    "marginal": lambda x, y: torch.stack(tuple(marginal(x, y, MIXTURE, grid=2))[:2], dim=-1),
}


def tasks(prior="rbf", batch_size=4, num_points=12, **options):
    prior = GaussianProcessPrior.preset(prior, **options)
    return prior, prior.sample(batch_size, num_points, stream="test", dtype=torch.float64)


def test_zero_and_average():
    y = torch.tensor([[1.0, 2.0, 6.0, 5.0]])
    assert zero(y[..., None], y).tolist() == [[0, 0, 0, 0]]
    assert average(y[..., None], y).tolist() == [[0, 1, 1.5, 3]]


@pytest.mark.parametrize("neighbours", [1, 3, 50])
@pytest.mark.parametrize("input_dim", [1, 3])
def test_nearest_neighbour_against_a_loop(neighbours, input_dim):
    _, batch = tasks(input_dim=input_dim)
    predicted = nearest_neighbour(batch.x, batch.y, neighbours)
    for task in range(4):
        for k in range(12):
            distance = (batch.x[task, :k] - batch.x[task, k]).square().sum(-1)
            expected = batch.y[task, :k][distance.argsort()[:neighbours]].mean() if k else torch.zeros(())
            assert predicted[task, k].item() == pytest.approx(expected.item(), abs=1e-12)


def test_nearest_neighbour_of_a_duplicate_input_is_it():
    x, y = torch.tensor([[[0.0], [1.0], [0.0]]]), torch.tensor([[5.0, 7.0, 1.0]])
    assert nearest_neighbour(x, y)[0, 2] == 5


@pytest.mark.parametrize("name", CAUSAL)
def test_no_prediction_sees_its_target_or_what_follows(name):
    _, batch = tasks()
    predicted = CAUSAL[name](batch.x, batch.y)
    for j in (0, 5, 11):
        x, y = batch.x.clone(), batch.y.clone()
        y[:, j] += 1
        x[:, j + 1 :] += 1
        y[:, j + 1 :] -= 1
        moved = (CAUSAL[name](x, y) - predicted).abs()
        # The target is added and taken off again inside the Gaussian-process formula, which rounds.
        assert moved[:, : j + 1].max() < 1e-12
        if name != "zero" and j < 11:
            assert moved[:, j + 1 :].max() > 1e-3


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("num_points", [1, 2])
def test_dtype_and_shape_are_those_of_the_targets(name, num_points):
    _, batch = tasks(num_points=num_points)
    predicted = CAUSAL[name](batch.x.float(), batch.y.float())
    assert predicted.dtype == torch.float32
    assert predicted.shape[:2] == (4, num_points)
    assert predicted.isfinite().all()


# --- marginal --------------------------------------------------------------------------------------------------------


def test_marginal_without_random_hyperparameters_is_the_floor():
    prior, batch = tasks("fixed", mean=0.4)
    predicted = marginal(batch.x, batch.y, prior)
    assert torch.allclose(predicted.mean, batch.floor_mean, rtol=0, atol=1e-12)
    assert torch.allclose(predicted.variance, batch.floor_variance, rtol=0, atol=1e-12)
    expected = torch.distributions.Normal(batch.floor_mean, batch.floor_variance.sqrt()).log_prob(batch.y)
    assert torch.allclose(predicted.log_density, expected, rtol=0, atol=1e-10)


def test_marginal_against_bayes_rule_written_out():
    """Posterior of the grid points from the likelihood of each prefix, predictions from a refit of each."""
    prior = GaussianProcessPrior(kernels=("rbf", "matern12"), output_scale=(0.5, 1.5), mean=0.3)
    batch = prior.sample(3, 6, dtype=torch.float64)
    predicted = marginal(batch.x, batch.y, prior, grid=2)
    lengthscales, scales = 0.25 * 4 ** np.array([0.25, 0.75]), np.array([0.75, 1.25])
    points = list(itertools.product(prior.kernels, lengthscales, scales))
    for task in range(3):
        y = batch.y[task].numpy()
        for k in range(6):
            weights, means, variances = [], [], []
            for name, lengthscale, scale in points:
                hyperparameters = (torch.tensor([value], dtype=torch.float64) for value in (lengthscale, scale))
                K = prior.covariance(name, batch.x[task : task + 1], *hyperparameters)[0].numpy() + 0.01 * np.eye(6)
                likelihood = scipy.stats.multivariate_normal.pdf(y[:k], [0.3] * k, K[:k, :k]) if k else 1.0
                solved = np.linalg.solve(K[:k, :k], K[:k, k])
                weights.append(likelihood)
                means.append(0.3 + solved @ (y[:k] - 0.3))
                variances.append(K[k, k] - solved @ K[:k, k])
            weights, means, variances = np.array(weights) / np.sum(weights), np.array(means), np.array(variances)
            mean = weights @ means
            assert predicted.mean[task, k].item() == pytest.approx(mean, abs=1e-10)
            variance = weights @ (variances + (means - mean) ** 2)
            assert predicted.variance[task, k].item() == pytest.approx(variance, abs=1e-10)
            density = weights @ scipy.stats.norm.pdf(y[k], means, np.sqrt(variances))
            assert predicted.log_density[task, k].item() == pytest.approx(np.log(density), abs=1e-9)


def test_marginal_survives_an_impossible_prefix():
    """Likelihoods far below the smallest double still order the grid points."""
    prior, batch = tasks(noise_std=0.001, num_points=40)
    predicted = marginal(batch.x, 30 * batch.y, prior, grid=8)
    assert all(values.isfinite().all() for values in predicted)


def test_published_distance_between_marginal_and_floor():
    """0.0040 ± 0.0006 of mean squared error over k = 1..63; and its own account of its error is right."""
    prior, batch = tasks("rbf", 4096, 64)
    predicted = marginal(batch.x, batch.y, prior, grid=8)
    squares = (batch.y - predicted.mean).square()
    worse = (squares - (batch.y - batch.floor_mean).square())[:, 1:].mean().item()
    assert abs(worse - 0.0040) < 0.0006
    excess = (predicted.mean - batch.floor_mean).square().mean(0)
    assert abs(excess[1:].mean().item() - 0.0040) < 0.0006
    assert excess[0] == 0
    assert ((squares / predicted.variance).mean() - 1).abs() < 0.01
    floor = torch.distributions.Normal(batch.floor_mean, batch.floor_variance.sqrt()).log_prob(batch.y)
    assert (floor - predicted.log_density).mean() > 0


def test_the_prior_predictor_knows_the_training_prior_only():
    """Under twice the noise it is worse than the floor, which knows of it."""
    training = GaussianProcessPrior.preset("fixed")
    batch = GaussianProcessPrior.preset("fixed", noise_std=0.4).sample(500, 24, dtype=torch.float64)
    prior = marginal(batch.x, batch.y, training).mean
    floor = (batch.y - batch.floor_mean).square().mean()
    assert (batch.y - prior).square().mean() > 1.02 * floor


# --- kernel ridge ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_kernel_ridge_against_a_loop_over_prefixes(steps):
    prior, batch = tasks("rbf", 2, 7, mean=0.3)
    predicted = kernel_ridge(batch.x, batch.y, prior, steps)
    median = torch.full((2,), 0.5, dtype=torch.float64)  # of the log-uniform law on (0.25, 1)
    K = prior.covariance("rbf", batch.x, median, torch.ones(2, dtype=torch.float64))
    for task in range(2):
        for k in range(7):
            seen, target = K[task, :k, :k], batch.y[task, :k] - 0.3
            alpha = torch.zeros(k, dtype=torch.float64)
            for _ in range(steps):
                bound = seen.abs().sum(-1).amax(0) + 0.01 if k else 1
                alpha = alpha + (target - seen @ alpha - 0.01 * alpha) / bound
            assert predicted[task, k].item() == pytest.approx((0.3 + K[task, k, :k] @ alpha).item(), abs=1e-12)


def test_kernel_ridge_descends_to_the_gaussian_process():
    prior, batch = tasks("fixed", 8, 10, noise_std=0.5)
    distances = [
        (kernel_ridge(batch.x, batch.y, prior, steps) - batch.floor_mean).abs().max().item() for steps in (1, 10, 400)
    ]
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 1e-6


# --- fitted ----------------------------------------------------------------------------------------------------------


def test_fitted_comes_close_to_the_floor_and_never_below():
    _, batch = tasks("fixed", 40, 25)
    predicted = fitted(batch.x, batch.y, contexts=[4, 24], steps=60)
    target, floor = batch.y[:, [4, 24]], batch.floor_mean[:, [4, 24]]
    error, least = (target - predicted.mean).square().mean(0), (target - floor).square().mean(0)
    assert (error > least).all()
    assert error[1] < 1.6 * least[1]
    assert predicted.mean.shape == predicted.variance.shape == (40, 2)
    expected = torch.distributions.Normal(predicted.mean, predicted.variance.sqrt()).log_prob(target)
    assert torch.allclose(predicted.log_density, expected)


def test_fitted_sees_its_prefix_only_and_draws_nothing():
    _, batch = tasks("fixed", 3, 8)
    state = random.getstate(), torch.get_rng_state()
    predicted = fitted(batch.x, batch.y, [5], steps=5)
    assert (random.getstate(), torch.get_rng_state().tolist()) == (state[0], state[1].tolist())
    y = batch.y.clone()
    y[:, 5:] += 1
    with torch.no_grad():
        assert torch.equal(fitted(batch.x, y, [5], steps=5).mean, predicted.mean)


# --- bad input -------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named():
    prior, batch = tasks()
    with pytest.raises(ValueError, match="neighbours: expected 1 or more, got 0"):
        nearest_neighbour(batch.x, batch.y, 0)
    with pytest.raises(ValueError, match="steps: expected 0 or more, got -1"):
        kernel_ridge(batch.x, batch.y, prior, -1)
    with pytest.raises(ValueError, match="grid: expected 1 or more, got 0"):
        marginal(batch.x, batch.y, prior, grid=0)
    for k in (0, 12):
        with pytest.raises(ValueError, match=f"contexts: expected each between 1 and 11, got {k}"):
            fitted(batch.x, batch.y, [k])
