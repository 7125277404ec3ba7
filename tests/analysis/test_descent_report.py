"""The descent report, on layers about which it is known, and against a recomputation in float64."""

import math

import numpy as np
import pytest
import torch

from energylab.analysis.bottom import gaps
from energylab.analysis.certificates import certify
from energylab.analysis.descent import record, summarise
from energylab.analysis.descent_report import describe_descent
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior

PRIOR = GaussianProcessPrior.preset("fixed")
N, TASKS = 4, 6


def model(**options) -> InContextRegressor:
    torch.manual_seed(0)
    return InContextRegressor(
        ModelConfig(**{"width": 16, "hidden": 16, "heads": 2, "depth": 1, "recursions": 2} | options)
    )


def report(which: InContextRegressor):
    return describe_descent(which, PRIOR, N, tasks=TASKS, positions=8)


def test_it_gathers_what_its_parts_say():
    which = model()
    found = report(which)
    parts = summarise(record(which, PRIOR, N, TASKS))
    keys = ["layer", "step", "token"]
    merged = found.steps.merge(parts, on=keys, suffixes=("", "_own"))
    assert len(merged) == len(parts) == len(found.steps) == 2 * 3 * 2
    np.testing.assert_array_equal(merged["energy_change_median"], merged["energy_change_median_own"])
    certificates = certify(which, PRIOR, N)
    assert found.layers["layer"].tolist() == certificates["layer"].tolist() == ["block 0 attention", "block 0 mlp"]
    np.testing.assert_array_equal(found.layers["certified"], certificates["certified"])
    bottoms = gaps(which, PRIOR, N, positions=8)
    median = bottoms.groupby("layer", sort=False)["gap"].median()
    np.testing.assert_allclose(found.layers.set_index("layer")["gap_median"], median)
    assert ((found.layers["gap_share"] >= 0) & (found.layers["gap_share"] <= 1)).all()
    assert (found.layers["stationary"] == 1).all()


def test_plain_steps_go_down_the_gradient_and_attention_never_rises():
    found = report(model())
    inner = found.steps["step"] < 2
    np.testing.assert_allclose(found.steps.loc[inner, "angle_median"], 0, atol=1e-6)
    assert found.steps.loc[~inner, "angle_median"].isna().all()
    attention = found.layers.set_index("layer").loc["block 0 attention"]
    for column in ("never_rise_query", "never_rise_pair", "never_rise_query_tasks", "never_rise_pair_tasks"):
        assert attention[column] == 1


def test_climbing_turns_the_step_around():
    which = model()
    which.layers[0].step_size.data.fill_(-0.1)
    found = report(which)
    first = found.steps[(found.steps["layer"] == "block 0 attention") & (found.steps["step"] == 0)]
    np.testing.assert_allclose(first["angle_median"], math.pi)
    row = found.layers.set_index("layer").loc["block 0 attention"]
    assert row["never_rise_query"] == row["never_rise_pair_tasks"] == 0


def test_a_task_counts_where_none_of_its_positions_rises():
    which = model()
    which.layers[1].step_size.data.fill_(40.0)  # some positions overshoot
    found = report(which).layers.set_index("layer").loc["block 0 mlp"]
    traces = record(which, PRIOR, N, TASKS)
    traces = traces[(traces["layer"] == "block 0 mlp") & (traces["token"] == "query")]
    energy = traces.pivot(index=["task", "pair"], columns="step", values="energy").to_numpy()
    falls = (np.diff(energy, axis=1) <= 1e-12 * np.abs(energy[:, 1:])).all(axis=1).reshape(TASKS, N)
    assert 0 < falls.mean() < 1
    assert found["never_rise_query"] == pytest.approx(falls.mean())
    assert found["never_rise_query_tasks"] == pytest.approx(falls.all(axis=1).mean())


def test_a_preconditioner_turns_the_step():
    which = model(preconditioner="diagonal", recursions=1)
    for parameter in which.layers[0].preconditioner.parameters():
        parameter.data.normal_(std=2)
    found = report(which)
    rows = found.steps[(found.steps["layer"] == "block 0 attention") & (found.steps["step"] == 0)].set_index("token")
    batch = PRIOR.sample(TASKS, N, seed=0, stream="test", dtype=torch.float64)
    which.double()
    layer, h = which.layers[0], which.embed(batch.x, batch.y)
    with torch.no_grad():
        step, force = layer(h) - h, -layer.gradient(h, h)
    cosine = torch.nn.functional.cosine_similarity(step, force, dim=-1)
    for place, token in enumerate(("query", "pair")):
        expected = np.median(cosine[:, place::2].acos().numpy())
        assert expected > 0.1
        assert rows.loc[token, "angle_median"] == pytest.approx(expected, rel=1e-6)


def test_the_bend_is_measured_from_the_first_step():
    which = model(recursions=3)
    which.layers[1].step_size.data.fill_(3.0)
    rows = report(which).steps.set_index(["layer", "token", "step"])["bend_median"]
    batch = PRIOR.sample(TASKS, N, seed=0, stream="test", dtype=torch.float64)
    with torch.no_grad():
        which.double()
        h = which.layers[0](which.embed(batch.x, batch.y))
        walk = torch.stack([which.layers[1](h, recursions) for recursions in range(1, 4)])
    first, *later = torch.diff(walk, dim=0, prepend=h[None])
    assert rows["block 0 mlp", "query", 0] == 0
    for t, step in enumerate(later, start=1):
        cosine = torch.nn.functional.cosine_similarity(step, first, dim=-1)[:, 0::2]
        expected = np.median(cosine.acos().numpy())
        assert expected > 0.05
        assert rows["block 0 mlp", "query", t] == pytest.approx(expected, rel=1e-6)


def test_a_refreshed_history_has_no_bottom_and_a_llama_nothing_at_all():
    found = report(model(history="refreshed"))
    assert found.gaps.empty
    assert found.layers["gap_median"].isna().all()
    with pytest.raises(ValueError, match="model: expected a layer that descends an energy"):
        report(model(attention="llama", mlp="llama"))
