"""The landscape: its energies are the layer's, its coordinates those of the sphere, its path the layer's own."""

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from energylab.analysis.inside import find_layer, layer_inputs
from energylab.analysis.landscape import PLANES, landscape, on_sphere, project
from energylab.layers import norm
from energylab.models import InContextRegressor, ModelConfig
from energylab.study import load_run
from energylab.tasks import GaussianProcessPrior

STORED = Path(__file__).parents[2] / "studies" / "results" / "recursion"
PRIOR = GaussianProcessPrior.preset("fixed")
N, PAIR, SIZE = 5, 3, 9
TOKEN = 2 * PAIR


def model(**options) -> InContextRegressor:
    torch.manual_seed(0)
    return InContextRegressor(
        ModelConfig(**{"width": 16, "hidden": 24, "heads": 2, "depth": 1, "recursions": 2} | options)
    )


def look(which: InContextRegressor, layer: str = "block 0 attention", **options):
    return landscape(which, PRIOR, N, **{"layer": layer, "position": PAIR, "size": SIZE, "task": 1} | options)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("layer", ["block 0 attention", "block 0 mlp"])
def test_energies_on_the_grid_are_those_of_the_layer(layer, plane):
    which = model()
    found = look(which, layer, plane=plane)
    assert len(found.grid) == SIZE**2
    one = find_layer(which.double(), layer, PRIOR, N, first_task=1)  # .double: the layer's own backend
    own = next(own for name, _, _, own in which.path() if name == layer)
    z = norm(found.start)
    torch.testing.assert_close(found.start, one.h[0, TOKEN])
    for row in found.grid.sample(12, random_state=0).itertuples():
        x = one.h.clone()
        rho = math.hypot(row.alpha, row.beta)
        way = row.alpha * found.axes[0] + row.beta * found.axes[1]
        # any length: the energy is that of norm(x)
        x[0, TOKEN] = 300 * (math.cos(rho) * z + (math.sin(rho) / rho * z.norm() * way if rho else 0))
        energy = (own.energy(x, one.h) - own.energy(one.h, one.h))[0, TOKEN].item()
        assert row.energy == pytest.approx(energy, rel=1e-4, abs=1e-4)  # norm's epsilon at the start, and at x
    torch.testing.assert_close(found.axes @ found.axes.mT, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-9)
    assert (found.axes @ z).abs().max() < 1e-9


def test_the_path_is_the_layers_own_and_the_rest_goes_further_down():
    which = model()
    found = look(which)
    one = find_layer(which, "block 0 attention", PRIOR, N, first_task=1)
    trace = one.layer.trace(one.h)
    path = found.path[found.path["kind"] == "path"]
    assert path["step"].tolist() == [0, 1, 2]
    expected = (trace.energy - trace.energy[0])[:, 0, TOKEN]
    np.testing.assert_allclose(path["energy"], expected.numpy(), rtol=1e-9, atol=1e-9)
    # two steps span a plane: nothing of the path is outside, and z_1, z_2 are where the chart says
    np.testing.assert_allclose(path["inside"], 1, atol=1e-9)
    there = on_sphere(norm(found.start), found.axes, torch.tensor(path[["alpha", "beta"]].to_numpy()))
    states = trace.states[:, 0, TOKEN]
    torch.testing.assert_close(there / 4, states / states.norm(dim=-1, keepdim=True), rtol=0, atol=1e-3)
    continued = found.path[found.path["kind"] == "continued"]
    assert continued["energy"].iloc[0] == pytest.approx(path["energy"].iloc[-1], rel=1e-12)
    assert (continued["energy"].diff().dropna() <= 1e-9).all()  # attention: every step size descends
    bottom = found.path.loc[found.path["kind"] == "bottom", "energy"].item()
    assert bottom <= continued["energy"].iloc[-1] + 1e-6
    assert found.stationary
    assert found.converged
    assert continued["energy"].iloc[-1] == pytest.approx(
        bottom, abs=1e-6
    )  # there is one bottom here, and it gets there
    assert found.certified_step_size == math.inf
    assert "certified" not in set(found.path["kind"])


def test_one_step_has_a_second_direction():
    found = look(model(recursions=1), "block 0 mlp")
    end = found.path[found.path["kind"] == "path"].iloc[1]
    assert end["inside"] == pytest.approx(1, abs=1e-9)
    assert end["alpha"] > 0
    assert end["beta"] == pytest.approx(0, abs=1e-9)


def test_the_certified_step_is_shown_where_there_is_one():
    which = model()
    found = look(which, "block 0 mlp")
    one = find_layer(which, "block 0 mlp", PRIOR, N, first_task=1)
    certified = one.layer.certified_step_size(one.h)[0, TOKEN].item()
    assert found.certified_step_size == certified
    energy = one.layer.condition(one.h)
    after = norm(one.h + certified * energy.force(norm(one.h)))
    expected = (energy.value(after) - energy.value(norm(one.h)))[0, TOKEN].item()
    row = found.path[found.path["kind"] == "certified"].iloc[0]
    assert row["energy"] == pytest.approx(expected, rel=1e-9)
    assert row["energy"] < 0


def test_cuts_show_where_the_step_should_have_ended():
    which = model()
    short, long = model(), model()
    for other, factor in ((short, 0.05), (long, 60.0)):
        other.layers[1].step_size.data.mul_(factor)
    found = look(which, "block 0 mlp")
    one = find_layer(which, "block 0 mlp", PRIOR, N, first_task=1)
    trace = one.layer.trace(one.h)
    for step in range(2):
        rows = found.cuts[found.cuts["step"] == step]
        learned = np.interp(1, rows["multiple"], rows["energy_change"])
        expected = (trace.energy[step + 1] - trace.energy[step])[0, TOKEN].item()
        assert learned == pytest.approx(expected, rel=1e-2)
        best = found.best_multiples[step]
        if 0 < best < rows["multiple"].max():
            lowest = np.interp(best, rows["multiple"], rows["energy_change"])
            assert lowest <= rows["energy_change"].min() + 1e-2 * abs(lowest)
    # the same way from the same point: a step twenty times shorter is best multiplied by twenty times more
    first = found.best_multiples[0]
    assert 0 < first < math.inf
    assert look(short, "block 0 mlp").best_multiples[0] == pytest.approx(20 * first, rel=1e-3)
    assert look(long, "block 0 mlp").best_multiples[0] == pytest.approx(first / 60, rel=1e-3)


def test_the_chart_and_its_inverse():
    z = norm(torch.randn(8, dtype=torch.float64))
    axes = torch.linalg.qr(torch.stack([z, *torch.randn(2, 8, dtype=torch.float64)]).mT).Q.mT[1:]
    coordinates = torch.tensor([[0.0, 0.0], [0.3, -0.2], [-2.0, 1.5], [1e-9, 0.0]], dtype=torch.float64)
    points = on_sphere(z, axes, coordinates)
    torch.testing.assert_close(points.norm(dim=-1), z.norm().expand(4))
    turned = torch.acos((points[1:3] @ z / z.square().sum()).clamp(-1, 1))
    torch.testing.assert_close(turned, coordinates[1:3].norm(dim=-1))
    back, inside = project(z, axes, points)
    torch.testing.assert_close(back, coordinates)
    torch.testing.assert_close(inside, torch.ones(4, dtype=torch.float64))


def test_a_path_that_does_not_come_to_rest_is_said_to_go_on(monkeypatch):
    monkeypatch.setattr("energylab.analysis.landscape.CONTINUED", 3)
    found = look(model())
    assert not found.converged
    assert (found.path["kind"] == "continued").sum() == 4


def test_a_map_of_a_stored_run_takes_less_than_five_seconds():
    run = load_run(STORED / "CEM-T4-seed0-ccea5fbd")
    start = time.process_time()  # of this process alone, whatever else the machine does
    found = landscape(run.model, run.prior, run.config.num_points, layer="block 0 attention", position=8, size=101)
    assert time.process_time() - start < 5
    assert len(found.grid) == 101**2


def test_a_random_plane_belongs_to_its_seed():
    which = model()
    one, again, other = (look(which, plane="random", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.axes, again.axes)
    assert not torch.allclose(one.axes, other.axes)


@pytest.mark.parametrize("kind", ["diagonal_low_rank", "none"])
def test_every_kind_of_model_can_be_looked_at(kind):
    which = model(preconditioner=kind, rank=2, update_rule="heavy_ball", diagonal="per_head", loops=2)
    found = look(which, "block 0 mlp, pass 1")
    assert found.certified_step_size == 0
    assert np.isfinite(found.grid["energy"]).all()


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        (
            {"attention": "llama", "mlp": "llama"},
            {},
            r"model: expected a layer that descends an energy \(cem\), got .*llama",
        ),
        ({}, {"layer": "block 7 mlp"}, "layer: expected one of block 0 attention; block 0 mlp, got 'block 7 mlp'"),
        ({}, {"position": N}, f"position: expected 0 to {N - 1}, a pair of the task, got {N}"),
        ({}, {"position": -1}, "position: expected 0 to"),
        ({}, {"plane": "flat"}, "plane: expected one of trajectory, hessian, random, got 'flat'"),
        ({}, {"size": 1}, "size: expected an integer from 2 to 2001, got 1"),
        ({"history": "refreshed"}, {}, "history: expected fixed, got refreshed"),
    ],
)
def test_what_cannot_be_looked_at_is_said(options, asked, message):
    with pytest.raises(ValueError, match=message) as raised:
        look(model(**options), **asked)
    assert "\n" not in str(raised.value)


def test_layers_are_given_what_the_model_gives_them():
    which = model(depth=2, mlp="llama")
    inputs = list(layer_inputs(which, PRIOR, N, tasks=2))
    assert [one.name for one in inputs] == ["block 0 attention", "block 1 attention"]
    batch = PRIOR.sample(2, N, seed=0, stream="test")
    traces = which.trace(batch.x, batch.y)
    for one, trace in zip(inputs, traces, strict=True):
        torch.testing.assert_close(one.h.float(), trace.states[0], rtol=1e-4, atol=1e-5)
        assert one.tokens == trace.tokens
        assert list(one.pairs) == trace.pairs.tolist()
