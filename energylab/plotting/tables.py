"""The numbers of a figure as a table, for a paper (LaTeX, booktabs) and for a spreadsheet (CSV).

A figure's `table(results)` returns a frame of plain numbers. Columns `X`, `X low` and `X high` are a mean and the ends
of its interval: three columns in the CSV, one in the LaTeX, "0.0208 [0.0166, 0.0251]". Names decide how numbers are
rounded there; the CSV keeps six digits. The caption travels in `frame.attrs["caption"]`, which `captioned` sets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from energylab.analysis.statistics import over_seeds, paired_differences

if TYPE_CHECKING:
    from energylab.study import StudyResults

NO_INTERVAL = "One seed, hence no interval."


def save_table(frame: pd.DataFrame, stem: str | Path, label: str) -> tuple[Path, Path]:
    """Write `stem`.tex and `stem`.csv and return the two paths; `label` is what LaTeX refers to, `tab:label`."""
    tex, csv = Path(f"{stem}.tex"), Path(f"{stem}.csv")
    tex.parent.mkdir(parents=True, exist_ok=True)
    tex.write_text(to_latex(frame, label), encoding="utf-8")
    frame.to_csv(csv, index=False, float_format="%.6g", lineterminator="\n")
    return tex, csv


def to_latex(frame: pd.DataFrame, label: str) -> str:
    """A table environment for a document with `\\usepackage{booktabs}`."""
    shown = pd.DataFrame(
        {
            name: [_cell(frame, name, row) for row in range(len(frame))]
            for name in map(str, frame)
            if not _is_end(name, frame)
        }
    )
    words = [name for name in shown if not pd.api.types.is_numeric_dtype(frame[name])]
    styler = shown.style.hide(axis="index")
    styler.format_index(lambda name: name.translate(_ESCAPED), axis=1)
    text = styler.to_latex(
        hrules=True,
        column_format="".join("l" if name in words else "r" for name in shown),
        caption=_latex_words(str(frame.attrs.get("caption", ""))),
        label=f"tab:{label}",
        position="t",
        position_float="centering",
    )
    # eight columns with intervals on a page with one-inch margins; and air below the caption
    return text.replace(
        r"\begin{tabular}", "\\medskip\\footnotesize\\setlength{\\tabcolsep}{2.5pt}\n\\begin{tabular}", 1
    )


def captioned(frame: pd.DataFrame, caption: str, results: StudyResults, *, adjusted: bool = True) -> pd.DataFrame:
    """The frame with its caption: what it shows, how many seeds, which interval, and the note of the study.

    Formulas stand between dollars. The column `seeds`, where there is one, says how many seeds. `adjusted=False` adds
    that differences are compared several at a time.
    """
    notes = [caption]
    if "seeds" in frame:
        counts = sorted(set(frame["seeds"]))
        if counts == [1]:
            notes.append(NO_INTERVAL)
        else:
            n = f"$n={counts[0]}$" if len(counts) == 1 else f"$n={counts[0]}$ to ${counts[-1]}$"
            notes.append(f"Means over {n} seeds; in brackets, the 95% Student-$t$ interval over seeds.")
    if not adjusted:
        notes.append("Differences are paired by seed; intervals are not adjusted for the number of comparisons.")
    frame.attrs["caption"] = " ".join([*notes, results.note]).strip()
    return frame


def interval_columns(summary: pd.DataFrame, name: str) -> pd.DataFrame:
    """What `over_seeds` returns, with its columns named: seeds, `name`, `name` low, `name` high."""
    return summary.rename(columns={"n": "seeds", "mean": name, "low": f"{name} low", "high": f"{name} high"})


def excess_table(
    runs: pd.DataFrame, reference: Mapping[str, Any] | None = None, on: Sequence[str] = ("seed",)
) -> pd.DataFrame:
    """One row a (study, variant, T): cost, excess MSE, and, given a `reference`, the difference to it, paired by seed.

    `runs` is what `plots.excess_by_run` returns; `reference` and `on` are those of `paired_differences`.
    """
    by = ["study", "variant", "T"]
    table = over_seeds(runs, "excess_mse", by)
    costs = runs.drop_duplicates(by)[[*by, "parameters", "flops"]]
    # the order in which the study lists its models
    table = costs.merge(interval_columns(table, "excess MSE"), on=by)
    table.insert(4, "TFLOP", table.pop("flops") / 1e12)
    if reference is not None:
        differences = over_seeds(paired_differences(runs, "excess_mse", reference, on), "difference", by)
        table = table.merge(interval_columns(differences, "difference").drop(columns="seeds"), on=by, how="left")
    return table.rename(columns={"variant": "model"})


def add_cost_of_rmse(table: pd.DataFrame, runs: pd.DataFrame, before: Sequence[int | None]) -> str:
    """Add to an `excess_table` the RMSE on y, and what a thousandth of it costs; returns the sentence that says how.

    (TFLOP − TFLOP') / (RMSE' − RMSE) / 1000, where the row at place `before` has the TFLOP' and RMSE'; missing where it
    takes no more operations, or gains nothing.
    """
    by = ["study", "variant", "T"]
    table["RMSE"] = table[["study", "model", "T"]].merge(
        over_seeds(runs, "rmse", by).rename(columns={"variant": "model"}), how="left"
    )["mean"]
    costs = []
    for here, there in enumerate(before):
        more = gain = math.nan
        if there is not None:
            more = table["TFLOP"].iloc[here] - table["TFLOP"].iloc[there]
            gain = table["RMSE"].iloc[there] - table["RMSE"].iloc[here]
        costs.append(more / gain / 1000 if more > 0 and gain > 0 else math.nan)
    table["TFLOP / 0.001"] = costs
    return "RMSE on $y$, pooled over $k$; last, the training TFLOP that each 0.001 less of it takes beyond those of"


def _is_end(name: str, frame: pd.DataFrame) -> bool:
    stem, _, end = name.rpartition(" ")
    return end in ("low", "high") and stem in frame


def _cell(frame: pd.DataFrame, name: str, row: int) -> str:
    value = frame[name].iloc[row]
    text = _number(name, value)
    if f"{name} low" in frame:
        low, high = (frame[f"{name} {end}"].iloc[row] for end in ("low", "high"))
        if not math.isnan(low):
            text += f" [{_number(name, low)}, {_number(name, high)}]"
    # a hyphen is shorter than a minus sign
    return text.translate(_ESCAPED) if isinstance(value, str) else re.sub(r"-(?=[\di])", "$-$", text)


def _number(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return "--"
    if name == "parameters":
        return f"{int(value):,}"
    if "difference" in name:
        return f"{value:+.4f}"
    if "TFLOP" in name:
        return f"{value:.1f}"
    if "MSE" in name or "RMSE" in name:
        return f"{value:.4f}"
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"


_ESCAPED = str.maketrans(
    {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}", "−": "$-$", "’": "'", "…": r"\ldots{}"}
    | {character: f"\\{character}" for character in "%&#_{}$"}
)


def _latex_words(text: str) -> str:
    """A caption in LaTeX: formulas between dollars as they are."""
    parts = re.split(r"(\$[^$]*\$)", text)
    return "".join(part if place % 2 else part.translate(_ESCAPED) for place, part in enumerate(parts))
