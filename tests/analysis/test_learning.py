"""Records of a model that learns: what they say, when they are taken, and that the model does not notice."""

import numpy as np
import pandas as pd
import pytest
import torch

from energylab.analysis.descent import record, summarise
from energylab.analysis.learning import COLUMNS, Learning, measure, snapshot_steps
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior
from energylab.training import Trainer, TrainingConfig

PRIOR = GaussianProcessPrior.preset("fixed")
N = 4


def model(**options) -> InContextRegressor:
    torch.manual_seed(0)
    return InContextRegressor(
        ModelConfig(**{"width": 16, "hidden": 16, "heads": 2, "depth": 1, "recursions": 3} | options)
    )


def test_a_record_says_what_the_summary_of_traces_says():
    which = model()
    which.layers[1].step_size.data.fill_(40.0)  # so that some positions rise
    batch = PRIOR.sample(6, N, seed=0, stream="test", dtype=torch.float64)
    keys = ["layer", "block", "part", "t", "token"]
    found = pd.DataFrame(measure(which, batch)).set_index(keys).sort_index()
    expected = summarise(record(which, PRIOR, N, tasks=6)).rename(columns={"step": "t"}).set_index(keys).sort_index()
    assert len(found) == 2 * 4 * 2
    assert 0 < found["fraction_rising"].max() < 1
    shared = ["energy_change_mean", "energy_change_q25", "energy_change_median", "energy_change_q75"]
    shared += ["fraction_rising", "tangential_norm_median"]
    np.testing.assert_allclose(found[shared], expected.loc[found.index, shared], rtol=1e-12, atol=1e-12)
    one = which.double().trace(batch.x, batch.y)[0]
    norms = one.gradient_norm[:, :, 0::2].flatten(1).numpy()
    np.testing.assert_allclose(
        found.loc[("block 0 attention", 0, "attention", slice(0, 2), "query"), "gradient_norm_median"],
        np.median(norms, axis=1),
        rtol=1e-12,
    )


def test_recording_changes_no_bit_of_the_training():
    config = TrainingConfig(steps=6, batch_size=4, device="cpu")
    watched, alone = (Trainer(model().config, config, PRIOR, N, seed=0) for _ in range(2))
    learning = Learning(PRIOR, N, steps=6, every=2, snapshots=2)
    for trainer in (watched, alone):
        for step in range(1, 7):
            trainer.advance()
            if trainer is watched:
                learning.observe(trainer.model, step)
    for name, weight in watched.model.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, alone.model.state_dict()[name])
    assert learning.table()["step"].unique().tolist() == [2, 4, 6]
    assert {name.partition("/")[0] for name in learning.snapshots} == {"1", "6"}
    assert torch.equal(learning.snapshots["6/read_in.weight"], watched.model.read_in.weight)
    assert not torch.equal(learning.snapshots["1/read_in.weight"], watched.model.read_in.weight)


def test_a_model_without_energy_has_no_rows_and_nothing_is_recorded_unasked():
    learning = Learning(PRIOR, N, steps=4, every=1, snapshots=0)
    learning.observe(model(attention="llama", mlp="llama"), 1)
    assert learning.table().empty
    assert tuple(learning.table().columns) == COLUMNS
    silent = Learning(PRIOR, N, steps=4, every=0, snapshots=0)
    silent.observe(model(), 4)
    assert silent.table().empty
    assert silent.snapshots == {}


def test_tasks_are_nobodys_training_or_test_tasks():
    batch = Learning(PRIOR, N, steps=4, every=1, snapshots=0).batch
    for stream in ("train", "test"):
        other = PRIOR.sample(len(batch), N, seed=0, stream=stream, dtype=torch.float64)
        assert not torch.isclose(batch.x, other.x).any()


@pytest.mark.parametrize(
    ("steps", "number", "expected"),
    [(10_000, 5, (0, 1, 10, 100, 1000, 10_000)), (3, 9, (0, 1, 2, 3)), (50, 1, (0, 50)), (1, 3, (0, 1)), (9, 0, ())],
)
def test_snapshots_are_spaced_by_factors(steps, number, expected):
    assert snapshot_steps(steps, number) == expected


@pytest.mark.parametrize("key", ["trace_every", "snapshots"])
@pytest.mark.parametrize("value", [-1, 2.0, True])
def test_what_cannot_be_recorded_is_refused(key, value):
    with pytest.raises(ValueError, match=f"{key}: expected an integer of at least 0, got {value}"):
        TrainingConfig(**{key: value})
