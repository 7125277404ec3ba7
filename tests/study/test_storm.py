"""A small storm of kills in every test run, the whole one now and then; `storm.py` is the command that logs it."""

from pathlib import Path

import pytest
from storm import rage


@pytest.mark.parametrize(
    ("runs", "steps", "kills", "within"),
    [(2, 600, 2, 1), pytest.param(12, 2000, 30, 20, marks=pytest.mark.slow)],
)
def test_a_storm_of_kills_changes_no_number(tmp_path: Path, runs: int, steps: int, kills: int, within: int) -> None:
    storm = rage(tmp_path / "storm", runs, steps, kills, seed=0)
    assert storm.kills == kills
    assert storm.within >= within
