"""What docs/tasks.md says holds for this code."""

import re
from pathlib import Path

import torch

from energylab.tasks import CONDITIONS, GaussianProcessPrior, condition, token_layout
from energylab.tasks.gaussian_process import PRESETS
from energylab.tasks.tokens import LAYOUTS

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text()


def rows(pattern: str) -> dict[str, str]:
    """The first two groups of every table row that matches."""
    return {match[1]: match[2] for match in re.finditer(rf"^\| `([\w-]+)` \|{pattern}", PAGE, re.MULTILINE)}


def test_identities_of_the_test_sets():
    fixed = GaussianProcessPrior.preset("fixed")
    expected = {name: condition(name, fixed, 24).identity for name in CONDITIONS}
    assert rows(r"[^|]+\| ([0-9a-f]{12}) \|") == expected
    priors = {name: GaussianProcessPrior.preset(name) for name in PRESETS}
    points = {name: prior.max_points or 64 for name, prior in priors.items()}
    expected = {name: condition("in-prior", prior, points[name]).identity for name, prior in priors.items()}
    assert rows(r" ([0-9a-f]{12}) \|") == expected


def test_every_layout_and_preset_has_a_row():
    named = set(re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE))
    assert set(LAYOUTS) | set(PRESETS) | set(CONDITIONS) <= named
    for name in LAYOUTS:
        assert token_layout(name).width(3) == 3 + (1 if name == "shifted" else 2)


def test_the_first_example_runs():
    example = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    names = {"my_model": lambda x, y: torch.zeros_like(y)}
    exec(example[1], names)
    assert names["excess"].shape == (512, 64)
    assert names["test"].identity in PAGE
