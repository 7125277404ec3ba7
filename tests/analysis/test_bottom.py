"""The bottom of an energy: where it is known, that nothing near it is lower, and what is said of layers."""

import math

import numpy as np
import pytest
import torch

from energylab.analysis import bottom
from energylab.analysis.bottom import STATIONARY, descend_to_bottom, gaps
from energylab.analysis.inside import layer_inputs
from energylab.energies import ElementwiseEnergy, Quadratic
from energylab.layers import norm
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior

D = 16
PRIOR = GaussianProcessPrior.preset("fixed")


def ellipsoid(c: torch.Tensor) -> ElementwiseEnergy:
    """½ Σ c_i z_i²: on the sphere its minimum is D c_1 / 2, at ± √D e_1."""
    return ElementwiseEnergy(-c, torch.eye(D, dtype=torch.float64), Quadratic())


def test_the_bottom_of_ellipsoids_is_where_it_must_be():
    sequences, positions = 2, 3
    stretch = torch.rand(sequences, positions, 1, dtype=torch.float64) + 0.5
    c = stretch * torch.linspace(1, 30, D, dtype=torch.float64)
    found = descend_to_bottom(ellipsoid(c), norm(torch.randn(sequences, positions, D, dtype=torch.float64)))
    assert found.stationary.all()
    torch.testing.assert_close(found.energy, D * c[..., 0] / 2, rtol=1e-5, atol=0)  # the epsilon of norm in the start
    assert (found.z[..., 0].abs() / math.sqrt(D) > 1 - 1e-6).all()


def test_what_did_not_arrive_is_said(monkeypatch):
    monkeypatch.setattr(bottom, "ITERATIONS", 2)
    monkeypatch.setattr(bottom, "ALONE", 1)
    c = torch.linspace(1, 30, D, dtype=torch.float64).expand(1, 2, D)
    start = norm(torch.randn(1, 2, D, dtype=torch.float64))
    found = descend_to_bottom(ellipsoid(c), start)
    assert not found.stationary.any()
    assert (found.tangential_norm > STATIONARY).all()
    assert (found.energy < ellipsoid(c).value(start)).all()


@pytest.fixture(name="model", scope="module")
def _model():
    torch.manual_seed(0)
    return InContextRegressor(ModelConfig(width=D, hidden=D, heads=2, depth=1, recursions=2))


@pytest.mark.parametrize("together", [0, 2])  # position by position, and in one sum
def test_layers_end_at_minima(model, together, monkeypatch):
    monkeypatch.setattr(bottom, "TOGETHER", together)
    for one in layer_inputs(model, PRIOR, num_points=4, tasks=2):
        energy = one.layer.condition(one.h)
        found = descend_to_bottom(energy, norm(one.h))
        assert found.stationary.all()
        assert (found.tangential_norm < STATIONARY).all()
        # as a difference quotient along great circles: no way out of the point is steeper than what is said
        ways = torch.randn(20, *found.z.shape, dtype=torch.float64)
        ways -= found.z * (ways * found.z).sum(-1, keepdim=True) / found.z.square().sum(-1, keepdim=True)
        ways *= 1e-4 / ways.norm(dim=-1, keepdim=True)
        slope = torch.stack([energy.value(found.z + way) - energy.value(found.z - way) for way in ways]) / 2e-4
        assert (slope.abs() < STATIONARY + 1e-6).all()
        nearby = norm(found.z + 0.05 * torch.randn(50, *found.z.shape, dtype=torch.float64))
        values = torch.stack([energy.value(z) for z in nearby])
        assert (values >= found.energy).all()
        assert (found.energy <= energy.value(norm(one.h))).all()


def test_gaps_are_the_energies_of_layers(model):
    table = gaps(model, PRIOR, num_points=4, positions=10)
    assert len(table) == 2 * 2 * 8  # layers, tasks, tokens
    assert table["stationary"].all()
    assert (table["gap"] >= 0).all()
    for one in layer_inputs(model, PRIOR, num_points=4, tasks=2):
        rows = table[table["layer"] == one.name]
        energy = one.layer.trace(one.h).energy
        np.testing.assert_allclose(rows["fall"], (energy[0] - energy[-1]).flatten().numpy(), rtol=1e-9)
        start = descend_to_bottom(one.layer.condition(one.h), norm(one.layer.trace(one.h).states[-1]))
        np.testing.assert_allclose(rows["gap"], (energy[-1] - start.energy).flatten().numpy(), rtol=1e-9)
        position = 2 * rows["pair"] + (rows["token"] == "pair")
        assert position.tolist() == 2 * list(range(8))


def test_a_refreshed_history_has_no_bottom():
    model = InContextRegressor(ModelConfig(width=D, hidden=D, heads=2, depth=1, history="refreshed"))
    table = gaps(model, PRIOR, num_points=3, positions=4)
    assert table.empty
    assert "gap" in table.columns
