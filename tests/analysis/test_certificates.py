"""What is said of a layer's descent, on layers about which it is known."""

import math

import torch

from energylab.analysis.certificates import certify
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior

PRIOR = GaussianProcessPrior.preset("fixed")
SMALL = {"width": 16, "hidden": 16, "heads": 2, "depth": 1}


def table(model: InContextRegressor):
    return certify(model, PRIOR, num_points=5, tasks=6).set_index("layer")


def test_attention_with_a_plain_step_needs_no_certificate():
    row = table(InContextRegressor(ModelConfig(**SMALL, recursions=3))).loc["block 0 attention"]
    assert row["certified"] == math.inf
    assert math.isnan(row["looseness"])
    assert row["ever_rises"] == 0
    assert row["small_steps_proven"] == row["eigenvalue_min"] == row["eigenvalue_max"] == 1


def test_the_bound_of_an_mlp_holds_and_is_loose():
    model = InContextRegressor(ModelConfig(**SMALL, recursions=2))
    row = table(model).loc["block 0 mlp"]
    assert 0 < row["certified"] < math.inf
    assert row["looseness"] >= 1
    with torch.no_grad():
        model.layers[1].step_size.fill_(row["certified"] / 8)
    assert table(model).loc["block 0 mlp", "ever_rises"] == 0


def test_climbing_is_seen():
    model = InContextRegressor(ModelConfig(**SMALL, recursions=2))
    with torch.no_grad():
        model.layers[0].step_size.fill_(-0.1)
    assert table(model).loc["block 0 attention", "ever_rises"] == 1


def test_preconditioners():
    model = InContextRegressor(ModelConfig(**SMALL, preconditioner="diagonal_low_rank", rank=2))
    row = table(model).loc["block 0 mlp"]  # at the start P = I, though nothing is proven of its later values
    assert abs(row["eigenvalue_min"] - 1) < 1e-6
    assert row["certified"] == 0
    assert row["small_steps_proven"] == 1
    with torch.no_grad():
        model.layers[1].preconditioner.right.normal_(std=3)
    row = table(model).loc["block 0 mlp"]
    assert row["eigenvalue_min"] < 0
    assert row["small_steps_proven"] == 0
