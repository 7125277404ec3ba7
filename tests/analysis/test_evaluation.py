"""Errors against the floor, held against a loop over tasks and against predictors whose error is known."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energylab.analysis import evaluation
from energylab.analysis.evaluation import Totals, evaluate, pool
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import CONDITIONS, Condition, GaussianProcessPrior, condition
from energylab.tasks.predictors import marginal

PRIOR = GaussianProcessPrior.preset("fixed")
RANDOM = GaussianProcessPrior.preset("rbf")
N = 6
SMALL = ModelConfig(width=16, hidden=16, heads=2, depth=1)


class Oracle(torch.nn.Module):
    """Predicts the floor's mean by conditioning on each prefix with a dense inverse, plus a known offset."""

    def __init__(self, offset: float = 0.0, noise_std: float = 0.1, gaussian_factor: float | None = None):
        super().__init__()
        self.offset = torch.nn.Parameter(torch.tensor(offset))
        self.noise_std, self.gaussian_factor = noise_std, gaussian_factor

    def forward(self, x, y):
        x, y = x.double(), y.double()
        covariance = torch.exp(-(x - x.mT).square() / (2 * 0.5**2))
        covariance += self.noise_std**2 * torch.eye(y.shape[1], dtype=torch.float64)
        mean, variance = torch.zeros_like(y), covariance.diagonal(dim1=-2, dim2=-1).clone()
        for k in range(1, y.shape[1]):
            weights = torch.linalg.solve(covariance[:, :k, :k], covariance[:, :k, k])
            mean[:, k] = (weights * y[:, :k]).sum(-1)
            variance[:, k] -= (weights * covariance[:, :k, k]).sum(-1)
        mean = mean + self.offset
        return mean if self.gaussian_factor is None else (mean, self.gaussian_factor * variance)


class PriorPredictor(torch.nn.Module):
    """What a perfectly trained model would say: the Bayes-optimal prediction under the training prior."""

    def __init__(self, prior: GaussianProcessPrior):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.prior = prior

    def forward(self, x, y):
        return marginal(x, y, self.prior).mean


@pytest.mark.parametrize("offset", [0.0, 0.2])
def test_excess_is_the_distance_to_the_floor(offset):
    table = evaluate(Oracle(offset), PRIOR, N, tasks=700)
    np.testing.assert_allclose(table["excess_mse"], offset**2, rtol=1e-5, atol=1e-8)
    if not offset:  # the realised error of the Bayes-optimal prediction is its expected one, up to 700 tasks
        np.testing.assert_allclose(table["rmse"], table["floor_rmse"], rtol=0.15)
        np.testing.assert_allclose(table["rmse_f"], table["floor_rmse_f"], rtol=0.15)


def test_errors_equal_a_loop_over_tasks():
    model = InContextRegressor(SMALL)
    tasks = 530  # more than one chunk, unequal
    table = evaluate(model, PRIOR, N, tasks=tasks)
    assert (table["predictions"] == tasks).all()
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


@pytest.mark.parametrize("name", CONDITIONS)
def test_every_condition_has_its_table(name):
    """The floor knows the condition, so the model that does is without excess; the training prior does not."""
    test = condition(name, PRIOR, N)
    table = evaluate(Oracle(noise_std=test.prior.noise_std), PRIOR, N, name, tasks=200)
    assert set(table["condition"]) == {name}
    assert set(table["condition_id"]) == {test.identity}
    assert table["k"].tolist() == list(range(2 * N if name == "double-points" else N))
    assert table.notna().all(axis=None)
    knows_it = name in ("in-prior", "validation", "shifted-inputs", "half-noise", "double-noise", "double-points")
    assert np.allclose(table["excess_mse"], 0, atol=1e-9) == knows_it
    by_object = evaluate(Oracle(noise_std=test.prior.noise_std), PRIOR, N, test, tasks=200)
    pd.testing.assert_frame_equal(by_object, table)


def test_an_unknown_condition_is_named():
    with pytest.raises(ValueError, match=r"condition: expected one of in-prior, .*got 'colder'"):
        evaluate(Oracle(), PRIOR, N, "colder")


# --- the prior predictor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_prior_predictor_has_no_excess_over_itself(name):
    table = evaluate(PriorPredictor(RANDOM), RANDOM, N, name, tasks=100)
    np.testing.assert_allclose(table["excess_mse_over_prior"], 0, atol=1e-6)
    np.testing.assert_allclose(table["rmse"], table["prior_rmse"], rtol=1e-5)


def test_without_random_hyperparameters_both_excesses_are_one():
    for name in ("in-prior", "shifted-inputs", "double-points"):
        table = evaluate(Oracle(offset=0.3), PRIOR, N, name, tasks=100)
        np.testing.assert_allclose(table["excess_mse_over_prior"], table["excess_mse"], rtol=1e-9)


def test_elsewhere_the_excess_over_the_prior_is_a_difference_of_squared_errors():
    """A model that knows of the noise beats the prior predictor, which a squared distance could never tell."""
    noisy = Condition(name="noisy", prior=dataclasses.replace(PRIOR, noise_std=0.5), num_points=N)
    pooled = pool(evaluate(Oracle(noise_std=0.5), PRIOR, N, noisy, tasks=2000)).iloc[0]
    assert pooled["excess_mse"] < 1e-9
    assert pooled["excess_mse_over_prior"] < -0.01
    difference = pooled["rmse"] ** 2 - pooled["prior_rmse"] ** 2
    assert pooled["excess_mse_over_prior"] == pytest.approx(difference, rel=1e-9)


def test_in_prior_both_forms_of_the_excess_estimate_one_number():
    pooled = pool(evaluate(Oracle(), RANDOM, N, tasks=4096)).iloc[0]
    difference = pooled["rmse"] ** 2 - pooled["prior_rmse"] ** 2
    assert pooled["excess_mse_over_prior"] > 0.01
    assert pooled["excess_mse_over_prior"] == pytest.approx(difference, rel=0.2)
    assert pooled["excess_mse"] > pooled["excess_mse_over_prior"]  # the floor knows the length-scale


def test_references_are_computed_once_for_all_runs(monkeypatch):
    calls = []

    def count(*arguments, **options):
        calls.append(arguments)
        return marginal(*arguments, **options)

    monkeypatch.setattr(evaluation, "marginal", count)
    tables = [evaluate(Oracle(offset), PRIOR, 5, tasks=37) for offset in (0.1, 0.2)]
    assert len(calls) == 1
    for column in ("prior_rmse", "zero_rmse", "kernel_ridge_8_rmse", "three_nearest_neighbours_rmse", "average_rmse"):
        assert tables[0][column].tolist() == tables[1][column].tolist()
    evaluate(Oracle(), PRIOR, 5, "double-noise", tasks=37)
    evaluate(Oracle(), PRIOR, 5, tasks=38)
    assert len(calls) == 3


def test_references_are_ordered_as_their_knowledge():
    pooled = pool(evaluate(Oracle(), PRIOR, 24, tasks=500)).iloc[0]
    order = ["prior", "kernel_ridge_8", "kernel_ridge_4", "kernel_ridge_2", "kernel_ridge_1", "zero"]
    errors = [pooled[f"{name}_rmse"] for name in order]
    assert errors == sorted(errors)
    assert pooled["prior_rmse"] < pooled["nearest_neighbour_rmse"] < pooled["zero_rmse"]


# --- likelihoods -----------------------------------------------------------------------------------------------------


def test_likelihood_of_the_gaussian_head():
    exact = evaluate(Oracle(gaussian_factor=1.0), PRIOR, N, tasks=2000)
    np.testing.assert_allclose(exact["excess_nll"], 0, atol=1e-6)
    np.testing.assert_allclose(exact["nll"], exact["prior_nll"], atol=1e-5)
    np.testing.assert_allclose(exact["nll"], exact["floor_nll"], atol=0.1)  # expected, and realised on 2000 tasks
    wide = evaluate(Oracle(offset=0.2, gaussian_factor=3.0), PRIOR, N, tasks=2000)
    floor = wide["floor_rmse"] ** 2
    assert wide["excess_nll"].iloc[0] == pytest.approx(
        0.5 * (math.log(3) + (floor[0] + 0.04) / (3 * floor[0]) - 1), rel=1e-5
    )
    # the expected excess is the realised one, up to Monte Carlo
    realised = pool(wide)["nll"].iloc[0] - pool(exact)["nll"].iloc[0]
    assert pool(wide)["excess_nll"].iloc[0] == pytest.approx(realised, abs=0.01)


def test_a_point_head_has_no_likelihood():
    assert not [name for name in evaluate(Oracle(), PRIOR, N, tasks=50) if "nll" in name]


# --- pooling ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_totals_of_unequal_batches_are_those_of_the_concatenation(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(size, 3, generator=generator, dtype=torch.float64).exp() for size in sizes]
    totals = Totals()
    for batch in batches:
        totals.add(rmse=batch.square(), other=batch)
    whole = torch.cat(batches)
    assert totals.tasks == len(whole)
    torch.testing.assert_close(totals.means()["rmse"], whole.square().mean(0))
    torch.testing.assert_close(totals.means()["other"], whole.mean(0))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_pooled_rows_are_those_of_the_concatenation(sizes, seed):
    errors = [np.random.default_rng((seed, size, i)).normal(size=size) for i, size in enumerate(sizes)]
    table = pd.DataFrame(
        {
            "condition": "in-prior",
            "k": range(len(sizes)),
            "predictions": sizes,
            "rmse": [np.sqrt(np.mean(values**2)) for values in errors],
            "excess_mse": [np.mean(values**2) for values in errors],
        }
    )
    row = pool(table).iloc[0]
    whole = np.concatenate(errors)
    assert row["predictions"] == len(whole)
    assert row["rmse"] == pytest.approx(np.sqrt(np.mean(whole**2)))
    assert row["excess_mse"] == pytest.approx(np.mean(whole**2))
    assert list(row.index) == ["condition", "predictions", "rmse", "excess_mse"]


def test_pooled_tables_of_parts_are_the_table_of_the_whole():
    """Of 37 and of 300 tasks; and pooled over k, it is the error over all predictions."""
    model = InContextRegressor(dataclasses.replace(SMALL, head="gaussian"))
    batch = PRIOR.sample(300, N, seed=0, stream="test", dtype=torch.float64)
    with torch.no_grad():
        error = model(batch.x.float(), batch.y.float())[0].double() - batch.y
    whole, part = evaluate(model, PRIOR, N, tasks=300), evaluate(model, PRIOR, N, tasks=37)
    assert pool(whole)["rmse"].iloc[0] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-5)
    both = pool(pd.concat([whole, part]), by=["condition", "k"])
    expected = torch.cat([error, error[:37]]).square().mean(0).sqrt()
    np.testing.assert_allclose(both["rmse"], expected, rtol=1e-5)
    assert (both["predictions"] == 337).all()
    wrong = (whole["rmse"] + part["rmse"]) / 2
    assert not np.allclose(both["rmse"], wrong, rtol=1e-4)


def test_a_metric_that_some_rows_lack_is_missing_in_the_pool():
    table = pd.DataFrame({"condition": ["a", "a", "b"], "predictions": 1, "nll": [1.0, np.nan, 2.0]})
    assert pool(table)["nll"].isna().tolist() == [True, False]
