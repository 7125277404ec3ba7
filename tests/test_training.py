"""The loop: paired tasks, an exact resume, a schedule, and failure in one sentence."""

import dataclasses
import io
import math

import pytest
import torch

from energylab.models import ModelConfig
from energylab.tasks import GaussianProcessPrior
from energylab.training import Diverged, Trainer, TrainingConfig, initialise, loss_of, resolve_device

PRIOR = GaussianProcessPrior.preset("fixed")
SMALL = ModelConfig(width=16, hidden=16, heads=2, depth=1)
SHORT = TrainingConfig(steps=12, batch_size=4, warmup_steps=3, log_every=5)


def trainer(model: ModelConfig = SMALL, training: TrainingConfig = SHORT, seed: int = 0) -> Trainer:
    return Trainer(model, training, PRIOR, num_points=6, seed=seed)


def without_clock(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize("interrupted_at", [0, 4, 5, 11])
def test_interrupted_and_continued_equals_undisturbed(interrupted_at):
    undisturbed = trainer()
    while undisturbed.step < 12:
        undisturbed.advance()
    first, second = trainer(), trainer()
    while first.step < interrupted_at:
        first.advance()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.step == interrupted_at
    while second.step < 12:
        second.advance()
    for name, value in undisturbed.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert without_clock(undisturbed.rows) == without_clock(second.rows)
    assert [row["step"] for row in second.rows] == [5, 10, 12]


def test_runs_are_paired_by_seed_whatever_T():
    one, eight = (trainer(dataclasses.replace(SMALL, recursions=T)) for T in (1, 8))
    for name, value in one.model.state_dict().items():
        if not name.endswith("step_size"):
            assert torch.equal(value, eight.model.state_dict()[name])
    seen = []
    for run in (one, eight):
        run.model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
        run.advance()
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(initialise(SMALL, 0).read_in.weight, initialise(SMALL, 1).read_in.weight)


def test_training_lowers_the_error():
    run = trainer(training=TrainingConfig(steps=150, batch_size=16, warmup_steps=10, log_every=25))
    while run.step < 150:
        run.advance()
    assert run.rows[-1]["excess_loss"] < 0.75 * run.rows[0]["excess_loss"]


def test_a_row_covers_the_steps_since_the_last():
    every, some = (trainer(training=dataclasses.replace(SHORT, log_every=n)) for n in (1, 6))
    for run in (every, some):
        while run.step < 12:
            run.advance()
    singles = [row["loss"] for row in every.rows]
    assert some.rows[0]["loss"] == pytest.approx(sum(singles[:6]) / 6)
    assert some.rows[1]["loss_max"] == max(singles[6:])


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run = trainer()
    run.advance()
    assert torch.equal(before, torch.get_rng_state())


def test_schedule():
    config = TrainingConfig(steps=1000, warmup_steps=100, learning_rate=1.0, final_learning_rate=0.1)
    rates = [config.learning_rate_at(step) for step in range(1000)]
    assert rates[0] == pytest.approx(1 / 101)
    assert 0.97 < max(rates) <= 1
    assert 95 <= rates.index(max(rates)) <= 101
    assert rates[500] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize(("value", "what"), [(math.nan, "loss"), (1e30, "loss"), (1e17, "gradient")])
def test_a_run_that_diverges_keeps_its_last_good_weights(value, what):
    run = trainer()
    run.advance()
    with torch.no_grad():
        run.model.read_out.weight.fill_(value)
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with pytest.raises(Diverged, match=f"the {what} of step 1 is not finite"):
        run.advance()
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, weights[name]) or math.isnan(value)
    assert run.step == 1


def test_losses():
    y, mean, variance = torch.randn(3, 5, 4)
    variance = variance.exp()
    assert loss_of(mean, y).item() == pytest.approx((mean - y).square().mean().item(), rel=1e-5)
    density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y)
    assert loss_of((mean, variance), y).item() == pytest.approx(-density.mean().item(), rel=1e-5)


def test_cuda_is_refused_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match="device: cuda was asked for"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -3}, "steps: expected an integer of at least 1, got -3"),
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate: expected a positive number, got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate: expected a positive number, got nan"),
        ({"warmup_steps": -1}, "warmup_steps: expected an integer of at least 0, got -1"),
        ({"final_learning_rate": 2.0}, "final_learning_rate: expected a fraction, 0 to 1, got 2.0"),
        ({"betas": (0.9, 1.0)}, r"betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"weight_decay": -1.0}, "weight_decay: expected a number of at least 0, got -1.0"),
        ({"device": "tpu"}, "device: expected one of auto, cpu, cuda, got 'tpu'"),
    ],
)
def test_bad_configs_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**options)
