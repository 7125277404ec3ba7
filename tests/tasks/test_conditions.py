"""Test conditions: what each changes, that all share their random numbers, and what identifies them."""

import json

import pytest
import torch

from energylab.tasks import CONDITIONS, GaussianProcessPrior, condition
from energylab.tasks.gaussian_process import PRESETS

FIXED = GaussianProcessPrior.preset("fixed")


def batch(name, prior=FIXED, num_points=10):
    return condition(name, prior, num_points).sample(6, dtype=torch.float64)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_condition_differs_from_the_others(preset):
    prior = GaussianProcessPrior.preset(preset)
    identities = {condition(name, prior, 10).identity for name in CONDITIONS}
    assert len(identities) == len(CONDITIONS)
    assert all(condition(name, prior, 10).sample(2).y.isfinite().all() for name in CONDITIONS)


def test_in_prior_is_the_test_stream_of_root_seed_0():
    expected = FIXED.sample(6, 10, seed=0, stream="test", dtype=torch.float64)
    assert torch.equal(batch("in-prior").y, expected.y)
    later = condition("in-prior", FIXED, 10).sample(2, first_task=4, dtype=torch.float64)
    assert torch.equal(later.y, expected.y[4:])


def test_conditions_are_paired():
    base = batch("in-prior")
    assert torch.allclose(batch("shifted-inputs").x, base.x + 4, rtol=0, atol=1e-12)
    for name, factor in (("half-noise", 0.5), ("double-noise", 2)):
        noisy = batch(name)
        assert torch.equal(noisy.f, base.f)
        assert torch.allclose(noisy.y - noisy.f, factor * (base.y - base.f), rtol=0, atol=1e-14)
    assert torch.allclose(batch("mean-offset").y, base.y + 1, rtol=0, atol=1e-14)
    assert torch.allclose(batch("mean-offset").floor_mean, base.floor_mean + 1, rtol=0, atol=1e-12)
    double = batch("double-points")
    assert double.y.shape == (6, 20)
    assert torch.equal(double.x[:, :10], base.x)
    assert torch.allclose(double.y[:, :10], base.y, rtol=0, atol=1e-9)
    assert torch.allclose(double.floor_mean[:, :10], base.floor_mean, rtol=0, atol=1e-9)


def test_length_scales_lie_outside_the_range():
    prior = GaussianProcessPrior.preset("rbf")
    assert batch("short-lengthscale", prior).lengthscale.max() < 0.25
    assert batch("long-lengthscale", prior).lengthscale.min() > 1


@pytest.mark.parametrize("preset", PRESETS)
def test_the_held_out_kernel_is_not_drawn_in_training(preset):
    prior = GaussianProcessPrior.preset(preset)
    assert not set(condition("held-out-kernel", prior, 10).prior.kernels) & set(prior.kernels)


def test_identity_is_that_of_the_specification():
    test = condition("double-noise", FIXED, 24)
    assert json.loads(json.dumps(test.specification))["prior"]["noise_std"] == 0.2
    assert test.identity == condition("in-prior", GaussianProcessPrior.preset("fixed", noise_std=0.2), 24).identity
    assert test.identity != condition("double-noise", FIXED, 25).identity
    assert len(test.identity) == 12
    # Stored results carry it: a change of the protocol must not go unnoticed.
    assert condition("in-prior", FIXED, 24).identity == "6400a4c2deb1"


def test_the_largest_number_of_points_changes_no_task_and_no_identity():
    prior, free = (GaussianProcessPrior.preset("np-standard", max_points=limit) for limit in (50, None))
    assert condition("in-prior", prior, 50).identity == condition("in-prior", free, 50).identity
    with pytest.raises(ValueError, match="num_points: expected at most 50, the max_points of the prior, got 51"):
        condition("in-prior", prior, 51)
    assert condition("double-points", prior, 50).num_points == 100  # out of the prior by its name
    with pytest.raises(ValueError, match="num_points: expected at most 100"):
        condition("double-points", prior, 51)


def test_batches_are_the_test_set_in_order():
    test = condition("in-prior", FIXED, 3)
    batches = list(test.batches(600))
    assert [len(one) for one in batches] == [512, 88]
    assert torch.equal(torch.cat([one.y for one in batches]), test.sample(600, dtype=torch.float64).y)


def test_bad_names_and_sizes_are_named():
    with pytest.raises(ValueError, match=r"condition: expected one of in-prior, .*got 'out-of-prior'"):
        condition("out-of-prior", FIXED, 10)
    with pytest.raises(ValueError, match=r"num_points: expected .*got 0"):
        condition("in-prior", FIXED, 0)
    with pytest.raises(ValueError, match="num_tasks: expected at most 4 from task 4092 on, got 5"):
        condition("in-prior", FIXED, 10).sample(5, first_task=4092)
