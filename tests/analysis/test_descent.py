"""Recorded descents, held against the layers themselves, and their summary against NumPy."""

import numpy as np
import pytest
import torch

from energylab.analysis.descent import PER_STEP, record, summarise
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior

PRIOR = GaussianProcessPrior.preset("fixed")
N, TASKS = 5, 7


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return InContextRegressor(ModelConfig(width=16, hidden=16, heads=2, attention_recursions=3, mlp_recursions=2))


@pytest.fixture(scope="module")
def traces(model):
    return record(model, PRIOR, N, tasks=TASKS)


def test_rows_are_layers_steps_tasks_and_positions(traces):
    assert len(traces) == 2 * (4 + 3) * TASKS * 2 * N
    assert not traces.duplicated(["layer", "step", "task", "token", "pair"]).any()
    assert set(traces["token"]) == {"query", "pair"}
    last = traces["step"] == traces["part"].map({"attention": 3, "mlp": 2})
    for column in PER_STEP:
        assert (traces[column].isna() == last).all()


def test_energies_are_those_of_the_layers(model, traces):
    batch = PRIOR.sample(TASKS, N, seed=0, stream="test", dtype=torch.float64)
    double = InContextRegressor(model.config).double()
    double.load_state_dict(model.state_dict())
    h = double.embed(batch.x, batch.y)
    for name, _, _, layer in double.path():
        rows = traces[(traces["layer"] == name) & (traces["step"] == layer.recursions)]
        with torch.no_grad():
            start, x = h, layer(h)
            energy, before = layer.energy(x, start), layer.energy(start, start)
        for row in rows.sample(20, random_state=0).itertuples():
            position = 2 * row.pair + (row.token == "pair")
            assert row.energy == pytest.approx(energy[row.task, position].item(), rel=1e-12)
            change = (energy - before)[row.task, position].item()
            assert row.energy_change == pytest.approx(change, rel=1e-9, abs=1e-12)
        h = x


def test_recording_leaves_the_model_as_it_was(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    record(model, PRIOR, N, tasks=2)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def test_summary(traces):
    summary = summarise(traces).set_index(["layer", "step", "token"])
    rows = traces[(traces["layer"] == "block 1 mlp") & (traces["token"] == "query")]
    for step in range(3):
        change = rows.loc[rows["step"] == step, "energy_change"].to_numpy()
        line = summary.loc[("block 1 mlp", step, "query")]
        assert line["energy_change_mean"] == pytest.approx(change.mean())
        quartiles = [line[f"energy_change_{q}"] for q in ("q25", "median", "q75")]
        np.testing.assert_allclose(quartiles, np.quantile(change, [0.25, 0.5, 0.75]))


def test_a_rise_is_counted(traces):
    risen = traces.copy()
    layer = risen["layer"] == "block 0 attention"
    risen.loc[layer & (risen["step"] == 2) & (risen["task"] == 0), "energy"] += 1e6
    summary = summarise(risen).set_index(["layer", "step", "token"])
    assert summary.loc[("block 0 attention", 2, "query"), "fraction_rising"] == pytest.approx(1 / TASKS)
    assert summary.loc[("block 0 attention", 3, "query"), "fraction_rising"] == 0
    assert np.isnan(summary.loc[("block 0 attention", 0, "query"), "fraction_rising"])


def test_a_llama_has_no_descent():
    llama = InContextRegressor(ModelConfig(width=16, hidden=16, heads=2, attention="llama", mlp="llama"))
    traces = record(llama, PRIOR, N, tasks=2)
    assert traces.empty
    summary = summarise(traces)
    assert summary.empty
    assert "energy_change_median" in summary.columns
