"""What the tasks are compared with is what it claims to be."""

import pytest
import torch

from energylab.bench import tasks


def test_the_rival_draws_from_the_same_prior():
    torch.manual_seed(3)
    draw = tasks._gpytorch_draw()
    values = torch.stack([draw() for _ in range(20)])
    assert values.shape == (20, tasks.TASKS, tasks.NUM_POINTS)
    assert values.dtype == torch.float64
    assert values.square().mean().item() == pytest.approx(1, abs=0.1)
    assert values.mean().item() == pytest.approx(0, abs=0.1)


def test_ratios_are_of_the_medians(monkeypatch, capsys):
    seconds = {"step": 0.5, "gpytorch": 0.01, "fixed": 0.01, "rbf": 0.02, "mixture": 0.04}
    timed = []

    def medians(functions, repeats):
        timed.extend(functions)
        assert repeats == 7
        assert functions["mixture"]().floor_mean.shape == (tasks.TASKS, tasks.NUM_POINTS)
        return seconds

    monkeypatch.setattr(tasks, "medians", medians)
    monkeypatch.setattr(tasks, "_peak_memory", lambda: 512.0)
    tasks.main(["--repeats", "7"])
    assert set(timed) == set(seconds)
    lines = capsys.readouterr().out.splitlines()
    assert "training step 500.0 ms, draw from gpytorch's prior 10.0 ms" in lines
    assert [line.split() for line in lines if line.startswith("rbf")] == [["rbf", "20.0", "4.0%", "2.00"]]
    assert lines[-1].endswith("4096 tasks: 512 MiB")
