"""Claims about models, and what the runs of a study say of them: supported, not supported, or undecided.

A claim is a sentence and the comparisons that would make it true. A comparison is between two models, paired by seed,
on the excess MSE over the Bayes floor, averaged over k, of in-prior test tasks:

    d_s = excess(a, seed s) − excess(b, seed s)

and is judged by a Student-t interval for the mean of d and by a margin δ, the smallest difference that matters:

| asks | supported where the interval | not supported where it |
|---|---|---|
| `lower`: a beats b | lies below 0, and the mean below −δ | lies above −δ: a gain of δ is excluded |
| `close`: a loses little against b | lies below δ | lies above δ |
| `different` | excludes 0, and the mean is beyond ±δ | lies within ±δ |

All else is undecided, and so is whatever has fewer than three seeds. The intervals of one claim hold together: with m
comparisons each has confidence 1 − 0.05/m (Bonferroni). Claims are not adjusted for each other: each is a question of
its own. A claim is supported if all of its comparisons are, not supported if any is not, else undecided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from energylab.analysis.statistics import paired_differences, student_t

SUPPORTED, NOT_SUPPORTED, UNDECIDED = "supported", "not supported", "undecided"

FEWEST_SEEDS = 3
FAMILY_ERROR = 0.05


@dataclass(frozen=True)
class Model:
    """A model of a study: its variant, and its T where the variant has several."""

    variant: str
    recursions: int | None = None

    def __str__(self) -> str:
        return self.variant if self.recursions is None else f"{self.variant} T = {self.recursions}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Excess MSE of `a` minus that of `b`, in one study."""

    study: str
    a: Model
    b: Model
    asks: Literal["lower", "close", "different"]
    margin: float
    """δ, in units of y²."""

    def __post_init__(self) -> None:
        if self.asks not in ("lower", "close", "different"):
            raise ValueError(f"asks: expected lower, close or different, got {self.asks!r}")
        if not 0 < self.margin < math.inf:
            raise ValueError(f"margin: expected a positive number, got {self.margin!r}")

    def verdict(self, n: int, mean: float, low: float, high: float) -> str:
        """What an interval of a − b says."""
        if n < FEWEST_SEEDS:
            return UNDECIDED
        if self.asks == "lower":
            yes, no = high < 0 and mean < -self.margin, low > -self.margin
        elif self.asks == "close":
            yes, no = high < self.margin, low > self.margin
        else:
            yes, no = not low <= 0 <= high and abs(mean) > self.margin, -self.margin < low and high < self.margin
        return SUPPORTED if yes else NOT_SUPPORTED if no else UNDECIDED


@dataclass(frozen=True, kw_only=True)
class Claim:
    key: str
    sentence: str
    comparisons: Sequence[Comparison]


def judge(claim: Claim, errors: pd.DataFrame) -> pd.DataFrame:
    """A row for each comparison: `claim`, `study`, `a`, `b`, `asks`, `margin`, `n`, `excess_a`, `excess_b` (means over the
    paired seeds), `mean`, `low`, `high` (of a − b), `confidence`, `verdict`.

    `errors` is `load_results` of the studies that the claim names, below each other. A comparison whose runs are missing
    has n = 0 and is undecided.
    """
    confidence = 1 - FAMILY_ERROR / len(claim.comparisons)
    tested = errors.loc[errors["condition"] == "in-prior"]
    keys = ["study", "variant", "T", "seed"]
    # a mean over all k; different settings under one name must not be averaged
    runs = tested.groupby([*keys, "run"], dropna=False, observed=True, as_index=False)[["excess_mse"]].mean()
    rows = []
    for comparison in claim.comparisons:
        one, other = (_runs_of(runs, comparison.study, model) for model in (comparison.a, comparison.b))
        row = {
            "claim": claim.key,
            "study": comparison.study,
            "a": str(comparison.a),
            "b": str(comparison.b),
            "asks": comparison.asks,
            "margin": comparison.margin,
            "confidence": confidence,
        }
        shared = sorted(set(one["seed"]) & set(other["seed"]))
        if shared:
            both = pd.concat([one.assign(side="a"), other.assign(side="b")], ignore_index=True)
            pairs = paired_differences(both, "excess_mse", {"side": "b"})
            interval = student_t(pairs["difference"], confidence)
            row |= {"n": interval.n, "mean": interval.mean, "low": interval.low, "high": interval.high}
            row |= {
                "excess_a": pairs["excess_mse"].mean(),
                "excess_b": other["excess_mse"][other["seed"].isin(shared)].mean(),
            }
        else:
            row |= {
                "n": 0,
                "mean": math.nan,
                "low": math.nan,
                "high": math.nan,
                "excess_a": math.nan,
                "excess_b": math.nan,
            }
        row["verdict"] = comparison.verdict(row["n"], row["mean"], row["low"], row["high"])
        rows.append(row)
    columns = ["claim", "study", "a", "b", "asks", "margin", "n", "excess_a", "excess_b"]
    return pd.DataFrame(rows, columns=[*columns, "mean", "low", "high", "confidence", "verdict"])


def verdict(judged: pd.DataFrame) -> str:
    """The verdict of a claim, from those of its comparisons."""
    found = set(judged["verdict"])
    if NOT_SUPPORTED in found:
        return NOT_SUPPORTED
    return SUPPORTED if found == {SUPPORTED} else UNDECIDED


def _runs_of(runs: pd.DataFrame, study: str, model: Model) -> pd.DataFrame:
    chosen = (runs["study"] == study) & (runs["variant"] == model.variant)
    if model.recursions is not None:
        chosen &= runs["T"].eq(model.recursions).fillna(False).astype(bool)
    return runs.loc[chosen]
