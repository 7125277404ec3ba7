"""One HTML file that says what a study is, what it found and where that comes from; it needs no network to open."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd

from energylab.analysis.evaluation import pool
from energylab.analysis.statistics import over_seeds, paired_differences
from energylab.study.files import read_provenance
from energylab.study.store import StudyResults

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("report.html.j2")


def report(results: StudyResults, folder: Path, figures: Mapping[str, "Figure"]) -> str:
    """The page: settings, errors by model, differences, descent by layer, figures, and the provenance of every run.

    ``folder`` is where the runs of ``results`` are; ``figures`` are drawn from them, by name. Raises ValueError where
    there are no runs to report.
    """
    if results.errors.empty:
        raise ValueError(f"STUDY: expected finished runs in {folder}, got none")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    errors = _by_run(results.errors)
    return template.render(
        name=results.name,
        note=results.note,
        settings=_settings(results.errors),
        errors=_errors(errors),
        differences=_differences(errors),
        descent=_descent(results.descent),
        figures={name: _svg(figure) for name, figure in figures.items()},
        provenance=_provenance(folder, list(dict.fromkeys(results.errors["run"]))),
    )


def _by_run(errors: pd.DataFrame) -> pd.DataFrame:
    """One row a (run, condition): metrics pooled over k, and what belongs to the run."""
    keys = ["variant", "T", "seed", "condition", "run"]
    own = errors.drop_duplicates(keys)[[*keys, "parameters", "flops", "train_seconds"]]
    return pool(errors, by=keys).merge(own, on=keys)


def _settings(errors: pd.DataFrame) -> dict[str, str]:
    facts = {"runs": str(errors["run"].nunique()), "seeds": ", ".join(map(str, sorted(errors["seed"].unique())))}
    for column in ("steps", "batch_size", "num_points", "width", "depth", "heads", "learning_rate"):
        if column in errors:
            facts[column.replace("_", " ")] = ", ".join(f"{value:g}" for value in sorted(errors[column].unique()))
    return facts


def _errors(errors: pd.DataFrame) -> pd.DataFrame:
    by = ["condition", "variant", "T"]
    excess = over_seeds(errors, "excess_mse", by)
    others = errors.groupby(by, dropna=False, observed=True)
    means = others[["rmse", "floor_rmse", "parameters", "flops", "train_seconds"]].mean().reset_index()
    table = excess.merge(means, on=by)
    return pd.DataFrame(
        {
            "condition": table["condition"],
            "model": table["variant"],
            "T": table["T"].map(_recursions),
            "seeds": table["n"],
            "excess MSE": table["mean"].map("{:.4f}".format),
            "95 % interval": [_interval(low, high) for low, high in zip(table["low"], table["high"], strict=True)],
            "RMSE on y": table["rmse"].map("{:.4f}".format),
            "floor": table["floor_rmse"].map("{:.4f}".format),
            "parameters": table["parameters"].map("{:,.0f}".format),
            "training TFLOP": (table["flops"] / 1e12).map("{:.2f}".format),
            "training minutes": (table["train_seconds"] / 60).map("{:.1f}".format),
        }
    )


def _differences(errors: pd.DataFrame) -> pd.DataFrame | None:
    """Excess MSE minus that of the first variant at its smallest T, paired by seed."""
    recursive = errors[errors["T"].notna()]
    if recursive.empty:
        return None
    variant = recursive["variant"].iloc[0]
    smallest = recursive.loc[recursive["variant"] == variant, "T"].min()
    if len(errors[["variant", "T"]].drop_duplicates()) < 2:
        return None
    reference = {"variant": variant, "T": smallest}
    table = paired_differences(errors, "excess_mse", reference, on=("seed", "condition"))
    table = over_seeds(table, "difference", ["condition", "variant", "T"])
    return pd.DataFrame(
        {
            "condition": table["condition"],
            "model": table["variant"],
            "T": table["T"].map(_recursions),
            "pairs": table["n"],
            f"minus {variant}, T = {smallest}": table["mean"].map("{:+.4f}".format),
            "95 % interval": [_interval(low, high) for low, high in zip(table["low"], table["high"], strict=True)],
        }
    )


def _descent(descent: pd.DataFrame) -> pd.DataFrame | None:
    """What each layer's last step leaves behind, query tokens, averaged over seeds."""
    if descent.empty:
        return None
    query = descent[descent["token"] == "query"]
    ends = query[query["step"] == query.groupby(["run", "layer"])["step"].transform("max")]
    rising = query.groupby(["run", "layer"])["fraction_rising"].max().rename("worst").reset_index()
    ends = ends.merge(rising, on=["run", "layer"])
    by = ["variant", "T", "layer"]
    means = ends.groupby(by, dropna=False, observed=True)[["energy_change_median", "worst"]].mean().reset_index()
    return pd.DataFrame(
        {
            "model": means["variant"],
            "T": means["T"].map(_recursions),
            "layer": means["layer"],
            "median E(z_T) − E(z_0)": means["energy_change_median"].map("{:.2f}".format),
            "positions rising, worst step": (100 * means["worst"]).map("{:.1f} %".format),
        }
    )


def _provenance(folder: Path, runs: list[str]) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        facts = read_provenance(folder / run) or {}
        code = facts.get("energylab", {})
        rows.append(
            {
                "run": run,
                "commit": (code.get("commit") or "-")[:12] + (" with changes" if code.get("dirty") else ""),
                "device": facts.get("device", "-"),
                "torch": facts.get("versions", {}).get("torch", "-"),
                "start": facts.get("start", "-"),
                "end": facts.get("end", "-"),
                "reason": facts.get("exit_reason", "-"),
            }
        )
    return rows


def _svg(figure: "Figure") -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def _recursions(value: Any) -> str:
    return "–" if pd.isna(value) else str(int(value))


def _interval(low: float, high: float) -> str:
    return "one seed" if pd.isna(low) else f"{low:.4f} to {high:.4f}"
