"""The decision rule, on differences whose verdict is known."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from energylab.analysis.verdicts import Claim, Comparison, Model, judge, verdict

CEM, LLAMA = Model("CEM", 2), Model("Llama")


def errors(differences: list[float], k: int = 3) -> pd.DataFrame:
    """Runs of a study in which CEM at T = 2 differs from Llama by so much, a seed each."""
    rows = []
    for seed, difference in enumerate(differences):
        for model, T, excess in (("CEM", 2, 0.5 + seed + difference), ("CEM", 4, 9.0), ("Llama", pd.NA, 0.5 + seed)):
            common = {"study": "s", "variant": model, "T": T, "seed": seed, "run": f"{model}{T}{seed}"}
            rows += [{**common, "condition": "in-prior", "k": j, "excess_mse": excess + j - 1} for j in range(k)]
            rows += [{**common, "condition": "validation", "k": j, "excess_mse": 77.0} for j in range(k)]
    return pd.DataFrame(rows).astype({"T": "Int64"})


def claim(asks: str, comparisons: int = 1, margin: float = 0.1) -> Claim:
    one = Comparison(study="s", a=CEM, b=LLAMA, asks=asks, margin=margin)
    return Claim(key="x", sentence="", comparisons=[one] * comparisons)


@pytest.mark.parametrize(
    ("asks", "differences", "expected"),
    [
        ("lower", [-0.5, -0.51, -0.49], "supported"),
        ("lower", [-0.05, -0.051, -0.049], "not supported"),  # certain, and too small to matter
        ("lower", [0.5, 0.51, 0.49], "not supported"),
        ("lower", [-0.5, -1.5, 0.4], "undecided"),
        ("close", [0.05, 0.051, 0.049], "supported"),
        ("close", [-0.5, -0.51, -0.49], "supported"),
        ("close", [0.5, 0.51, 0.49], "not supported"),
        ("close", [0.0, 0.3, -0.2], "undecided"),
        ("different", [0.5, 0.51, 0.49], "supported"),
        ("different", [-0.5, -0.51, -0.49], "supported"),
        ("different", [0.01, 0.011, -0.01], "not supported"),
        ("different", [0.5, -0.5, 0.3], "undecided"),
        ("lower", [-0.5, -0.51], "undecided"),  # two seeds decide nothing
    ],
)
def test_verdicts(asks: str, differences: list[float], expected: str) -> None:
    judged = judge(claim(asks), errors(differences))
    assert verdict(judged) == expected


def test_the_interval_is_that_of_scipy_and_widens_with_the_number_of_comparisons() -> None:
    differences = [-0.5, -0.8, -0.1, -0.4]
    for comparisons in (1, 4):
        row = judge(claim("lower", comparisons), errors(differences)).iloc[0]
        low, high = stats.t.interval(1 - 0.05 / comparisons, 3, loc=np.mean(differences), scale=stats.sem(differences))
        assert (row["low"], row["high"]) == pytest.approx((low, high), rel=1e-9)
        assert row["n"] == 4
        assert row["excess_a"] - row["excess_b"] == pytest.approx(row["mean"])
        assert row["excess_b"] == pytest.approx(0.5 + 1.5)


def test_only_shared_seeds_are_paired_and_missing_runs_are_undecided() -> None:
    frame = errors([-0.5, -0.51, -0.49, 100.0])
    frame = frame[~((frame["seed"] == 3) & (frame["variant"] == "Llama"))]
    row = judge(claim("lower"), frame).iloc[0]
    assert (row["n"], row["verdict"]) == (3, "supported")
    nothing = judge(claim("lower"), frame[frame["variant"] == "CEM"]).iloc[0]
    assert (nothing["n"], nothing["verdict"]) == (0, "undecided")
    assert math.isnan(nothing["mean"])


def test_a_claim_is_as_good_as_its_worst_comparison() -> None:
    frame = errors([-0.5, -0.51, -0.49])
    good = Comparison(study="s", a=CEM, b=LLAMA, asks="lower", margin=0.1)
    bad = Comparison(study="s", a=LLAMA, b=CEM, asks="lower", margin=0.1)
    open_ = Comparison(study="elsewhere", a=CEM, b=LLAMA, asks="lower", margin=0.1)
    for comparisons, expected in (
        ([good, good], "supported"),
        ([good, bad], "not supported"),
        ([good, open_], "undecided"),
    ):
        assert verdict(judge(Claim(key="x", sentence="", comparisons=comparisons), frame)) == expected


def test_a_model_that_is_there_twice_for_a_seed_is_refused() -> None:
    frame = errors([-0.5, -0.51, -0.49])
    with pytest.raises(ValueError, match="more than one"):
        judge(claim("lower"), pd.concat([frame, frame.assign(run=lambda rows: rows["run"] + "other")]))


@pytest.mark.parametrize(("key", "value"), [("asks", "better"), ("margin", 0.0), ("margin", math.nan)])
def test_bad_comparisons_are_named(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}: expected .*got"):
        Comparison(**{"study": "s", "a": CEM, "b": LLAMA, "asks": "lower", "margin": 0.1, key: value})
