"""Errors against the floor, held against a loop over tasks and against predictors whose error is known."""

import numpy as np
import pytest
import torch

from energylab.analysis.evaluation import evaluate, fixed_tasks
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior

PRIOR = GaussianProcessPrior.preset("fixed")
N = 6


class Oracle(torch.nn.Module):
    """Predicts the floor's mean by conditioning on each prefix with a dense inverse, plus a known offset."""

    def __init__(self, offset: float):
        super().__init__()
        self.offset = torch.nn.Parameter(torch.tensor(offset))

    def forward(self, x, y):
        x, y = x.double(), y.double()
        covariance = torch.exp(-(x - x.mT).square() / (2 * 0.5**2)) + 0.01 * torch.eye(N, dtype=torch.float64)
        mean = torch.zeros_like(y)
        for k in range(1, N):
            weights = torch.linalg.solve(covariance[:, :k, :k], covariance[:, :k, k])
            mean[:, k] = (weights * y[:, :k]).sum(-1)
        return mean + self.offset


@pytest.mark.parametrize("offset", [0.0, 0.2])
def test_excess_is_the_distance_to_the_floor(offset):
    table = evaluate(Oracle(offset), PRIOR, N, tasks=700)
    np.testing.assert_allclose(table["excess_mse"], offset**2, rtol=1e-5, atol=1e-8)
    if not offset:  # the realised error of the Bayes-optimal prediction is its expected one, up to 700 tasks
        np.testing.assert_allclose(table["rmse"], table["floor_rmse"], rtol=0.15)
        np.testing.assert_allclose(table["rmse_f"], table["floor_rmse_f"], rtol=0.15)


def test_errors_equal_a_loop_over_tasks():
    model = InContextRegressor(ModelConfig(width=16, hidden=16, heads=2, depth=1))
    tasks = 530  # more than one chunk, unequal
    table = evaluate(model, PRIOR, N, tasks=tasks)
    batch = PRIOR.sample(tasks, N, seed=0, stream="test", dtype=torch.float64)
    with torch.no_grad():
        prediction = torch.cat([model(x[None].float(), y[None].float()) for x, y in zip(batch.x, batch.y, strict=True)])
    for k in range(N):
        row = table.iloc[k]
        assert row["k"] == k
        error = prediction[:, k].double() - batch.y[:, k]
        assert row["rmse"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-5)
        assert row["rmse_f"] == pytest.approx(
            (prediction[:, k] - batch.f[:, k]).square().mean().sqrt().item(), rel=1e-5
        )
        excess = (prediction[:, k] - batch.floor_mean[:, k]).square().mean().item()
        assert row["excess_mse"] == pytest.approx(excess, rel=1e-5)
        assert row["zero_rmse"] == pytest.approx(batch.y[:, k].square().mean().sqrt().item())
        nearest = [
            y[(x[:k] - x[k]).abs().argmin()] if k else torch.zeros(())
            for x, y in zip(batch.x[..., 0], batch.y, strict=True)
        ]
        nearest_error = (torch.stack(nearest) - batch.y[:, k]).square().mean().sqrt().item()
        assert row["nearest_neighbour_rmse"] == pytest.approx(nearest_error)


def test_the_test_tasks_are_fixed():
    first, again = (torch.cat([batch.y for batch in fixed_tasks(PRIOR, N, 600)]) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first[:20], next(fixed_tasks(PRIOR, N, 20)).y)
