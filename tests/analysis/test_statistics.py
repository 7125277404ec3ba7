"""Student-t intervals over seeds and differences paired by seed."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from energylab.analysis.statistics import over_seeds, paired_differences, student_t


@pytest.mark.parametrize("n", [2, 3, 5, 20])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_interval_agrees_with_scipy(n: int, confidence: float) -> None:
    values = np.random.default_rng(n).normal(size=n)
    interval = student_t(values, confidence)
    expected = scipy.stats.t.interval(confidence, n - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    assert interval.n == n
    assert interval.mean == pytest.approx(values.mean(), rel=1e-14)
    assert (interval.low, interval.high) == pytest.approx(expected, rel=1e-12)


def test_interval_covers_as_often_as_it_says() -> None:
    samples = np.random.default_rng(0).normal(loc=3.0, size=(4000, 3))
    hits = [interval.low <= 3.0 <= interval.high for interval in map(student_t, samples)]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.015)  # the standard error of the share is 0.0035


def test_one_seed_has_no_interval() -> None:
    interval = student_t([0.25])
    assert (interval.n, interval.mean) == (1, 0.25)
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [1.0, math.inf]])
def test_refuses_values_without_a_mean(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^values: expected one finite number or more, got \["):
        student_t(values)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95])
def test_refuses_confidence_outside_unit_interval(confidence: float) -> None:
    with pytest.raises(ValueError, match=rf"^confidence: expected a number in \(0, 1\), got {confidence}"):
        student_t([1.0, 2.0], confidence)


@pytest.fixture
def runs() -> pd.DataFrame:
    """Three seeds of CEM at T = 1 and 2 (seed 2 lacks T = 2), two of Llama; seeds differ by more than T does."""
    rows = [("CEM", 1, 0, 10.0), ("CEM", 1, 1, 20.0), ("CEM", 1, 2, 30.0), ("CEM", 2, 0, 9.0), ("CEM", 2, 1, 18.5)]
    rows += [("Llama", pd.NA, 0, 5.0), ("Llama", pd.NA, 1, 7.0)]
    return pd.DataFrame(rows, columns=["variant", "T", "seed", "excess"]).astype({"T": "Int64"})


def test_over_seeds_keeps_models_without_recursions(runs: pd.DataFrame) -> None:
    summary = over_seeds(runs, "excess", ["variant", "T"])
    assert list(summary.columns) == ["variant", "T", "n", "mean", "low", "high"]
    assert summary["T"].dtype == "Int64"
    assert list(summary["n"]) == [3, 2, 2]
    assert list(summary["mean"]) == [20.0, 13.75, 6.0]
    assert summary["T"].isna().tolist() == [False, False, True]
    for _, row in summary.iterrows():
        own = runs["T"].isna() if pd.isna(row["T"]) else runs["T"].eq(row["T"]).fillna(False)
        assert row["low"] == student_t(runs.loc[own, "excess"]).low


def test_over_seeds_refuses_invented_replicates(runs: pd.DataFrame) -> None:
    with pytest.raises(
        ValueError,
        match=r"^seed: expected one row for each variant, seed, got more than one for variant = CEM, seed = 0$",
    ):
        over_seeds(runs, "excess", ["variant"])


def test_differences_are_paired_by_seed(runs: pd.DataFrame) -> None:
    pairs = paired_differences(runs, "excess", {"variant": "CEM", "T": 1})
    assert pairs.set_index(["variant", "seed"])["difference"].to_dict() == {
        ("CEM", 0): -1.0,
        ("CEM", 1): -1.5,
        ("Llama", 0): -5.0,
        ("Llama", 1): -13.0,
    }
    summary = over_seeds(pairs, "difference", ["variant", "T"])
    expected = student_t([-1.0, -1.5])
    assert summary.iloc[0][["n", "mean", "low", "high"]].tolist() == [2, expected.mean, expected.low, expected.high]


def test_reference_may_be_a_model_without_recursions(runs: pd.DataFrame) -> None:
    pairs = paired_differences(runs, "excess", {"T": pd.NA})
    assert pairs["difference"].tolist() == [5.0, 13.0, 4.0, 11.5]


def test_differences_at_each_k() -> None:
    frame = pd.DataFrame({"T": [1, 1, 2, 2], "seed": 0, "k": [0, 1, 1, 0], "excess": [1.0, 2.0, 5.0, 7.0]})
    pairs = paired_differences(frame, "excess", {"T": 1}, on=("seed", "k"))
    assert pairs.set_index("k")["difference"].to_dict() == {0: 6.0, 1: 3.0}


def test_differences_name_what_is_wrong(runs: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match=r"^reference: expected rows with \{'T': 4\}, got none$"):
        paired_differences(runs, "excess", {"T": 4})
    with pytest.raises(ValueError, match=r"^seed: expected one row for each seed, got more than one for seed = 0$"):
        paired_differences(runs, "excess", {"variant": "CEM"})
    alone = runs[(runs["seed"] == 2) | (runs["variant"] == "Llama")]
    with pytest.raises(ValueError, match=r"^reference: expected rows that share seed with \{'T': 1\}, got none$"):
        paired_differences(alone, "excess", {"T": 1})
