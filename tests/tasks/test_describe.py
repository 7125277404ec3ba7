"""A prior in words: every field that matters, and the floors that it prints."""

import pytest

from energylab.tasks import GaussianProcessPrior, condition
from energylab.tasks.describe import CONTEXTS, describe
from energylab.tasks.gaussian_process import PRESETS


def rows(text: str) -> dict[str, list[str]]:
    """The table below the empty line, by the name of each row."""
    lines = text.split("\n\n")[1].splitlines()[1:]
    return {line[:14].strip(): line[14:].split() for line in lines}


def test_floors_are_those_published():
    table = rows(describe(GaussianProcessPrior.preset("rbf")))
    assert table["pairs before"] == [str(k) for k in CONTEXTS]
    floor = [float(cell) for cell in table["floor on y"]]
    assert floor == pytest.approx([1.00, 0.88, 0.80, 0.64, 0.42, 0.24, 0.15, 0.11], abs=0.02)
    on_f = [float(cell) for cell in table["floor on f"]]
    assert [value**2 - 0.01 for value in floor] == pytest.approx([value**2 for value in on_f], abs=2e-3)
    assert all(float(nearest) > low for nearest, low in zip(table["1-NN on y"], floor, strict=True))
    assert [float(cell) for cell in table["zero on y"]] == pytest.approx([1.005] * 8, abs=0.05)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_described(preset):
    prior = GaussianProcessPrior.preset(preset)
    text = describe(prior, num_tasks=20)
    num_points = 50 if preset == "np-standard" else 64
    assert f"gp-icl-v1 {condition('in-prior', prior, num_points).identity}" in text
    assert rows(text)["pairs before"][-1] == str(num_points - 1)
    assert all(kernel in text for kernel in prior.kernels)
    assert ("period         2" in text) == (preset == "mixture")
    assert ("at most 50" in text) == (preset == "np-standard")


def test_fields_in_words():
    prior = GaussianProcessPrior(input_dim=4, input_range=(0, 1), input_layout="sorted", noise_std=0.25, mean=3)
    text = describe(prior, num_tasks=4)
    for words in ("0.25 to 1, log-uniform, times sqrt(4) = 2", "4, in (0, 1), sorted", "noise_std      0.25", "mean 3"):
        assert words in text
