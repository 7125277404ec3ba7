"""One HTML file that says what a study is, what it found and where that comes from; it needs no network to open."""

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd

from energylab.analysis.evaluation import pool
from energylab.analysis.statistics import over_seeds, paired_differences
from energylab.study.files import read_provenance, read_study
from energylab.study.store import StudyResults, read_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("report.html.j2")

MAIN_SETTINGS = (
    "steps",
    "batch_size",
    "learning_rate",
    "num_points",
    "kernels",
    "lengthscale",
    "noise_std",
    "width",
    "depth",
    "heads",
    "hidden",
    "tokens",
)
"""Shown at once; the others on request."""
SVG_BONUS = 200_000
"""Bytes that sharp lines at every size are worth."""
WORDS = ("condition", "model", "layer", "run", "code", "device", "torch", "start", "end", "ended because")
"""Columns that are read, not compared: they stand to the left."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure for a desk, and the same for a phone, drawn for a narrow column."""

    wide: "Figure"
    narrow: "Figure"


def report(
    results: StudyResults,
    folder: Path,
    figures: Mapping[str, Drawing],
    tell: Callable[[str, float], None] = lambda what, share: None,
) -> str:
    """The page: settings, errors by model, differences, descent by layer, figures, and the provenance of every run.

    ``folder`` is where the runs of ``results`` are; ``figures`` are drawn from them, by name; ``tell`` hears which of them
    is written, and which share is done. Raises ValueError where there are no runs to report.
    """
    if results.errors.empty:
        raise ValueError(f"STUDY: expected finished runs in {folder}, got none")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    runs = list(dict.fromkeys(results.errors["run"]))
    settings = _settings(folder, runs)
    errors = _by_run(results.errors)
    images = {}
    for number, (name, drawn) in enumerate(figures.items()):
        tell(f"writing {name}", number / len(figures))
        images[name] = {"wide": _image(drawn.wide), "narrow": _image(drawn.narrow)}
    return template.render(
        name=results.name,
        note=results.note,
        facts=_facts(results, folder) | {key: settings[key] for key in MAIN_SETTINGS if key in settings},
        settings={key: value for key, value in settings.items() if key not in MAIN_SETTINGS},
        errors=_one_condition(_errors(errors)),
        differences=_one_condition(_differences(errors)),
        descent=_descent(results.descent),
        figures=images,
        provenance=_provenance(folder, runs),
        words=WORDS,
    )


def _by_run(errors: pd.DataFrame) -> pd.DataFrame:
    """One row a (run, condition): metrics pooled over k, and what belongs to the run."""
    keys = ["variant", "T", "seed", "condition", "run"]
    own = errors.drop_duplicates(keys)[[*keys, "parameters", "flops", "train_seconds"]]
    return pool(errors, by=keys).merge(own, on=keys)


def _facts(results: StudyResults, folder: Path) -> dict[str, str]:
    """What was run, in words."""
    errors = results.errors
    knobs = [f"{key.replace('_', ' ')} = {value}" for key, value in read_study(folder).get("knobs", {}).items()]
    models = errors[["variant", "T"]].drop_duplicates()
    return {
        "knobs": ", ".join(knobs) or "–",
        "runs": f"{errors['run'].nunique()}, from seeds {', '.join(map(str, sorted(errors['seed'].unique())))}",
        "models": ", ".join(
            str(variant) + ("" if pd.isna(depth) else f" T = {depth}")
            for variant, depth in models.itertuples(index=False, name=None)
        ),
        "tested on": ", ".join(errors["condition"].unique()),
    }


def _settings(folder: Path, runs: Sequence[str]) -> dict[str, str]:
    """Every setting of the runs; of those that vary, each value."""
    flats = [read_config(folder / run).flat() for run in runs]
    found = {}
    for key in flats[0]:
        values = {json.dumps(flat[key]): _said(flat[key]) for flat in flats}
        found[key] = " or ".join(values.values())
    return found


def _said(value: Any) -> str:
    if isinstance(value, list):
        return (
            " to ".join(map(_said, value))
            if len(value) == 2 and value[0] != value[1]
            else ", ".join(dict.fromkeys(map(_said, value)))
        )
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _one_condition(table: pd.DataFrame | None) -> pd.DataFrame | None:
    """Without the condition, where there is one alone."""
    return table if table is None or len(set(table["condition"])) > 1 else table.drop(columns="condition")


def _errors(errors: pd.DataFrame) -> pd.DataFrame:
    by = ["condition", "variant", "T"]
    excess = over_seeds(errors, "excess_mse", by)
    others = errors.groupby(by, dropna=False, observed=True, as_index=False)
    means = others[["rmse", "floor_rmse", "parameters", "flops", "train_seconds"]].mean()
    table = excess.merge(means, on=by)  # pyright: ignore[reportArgumentType]  # pandas' types do not see a frame
    return pd.DataFrame(
        {
            "condition": table["condition"],
            "model": table["variant"],
            "T": table["T"].map(_recursions),
            "excess MSE": table["mean"].map("{:.4f}".format),
            "95 % interval": [_interval(low, high) for low, high in zip(table["low"], table["high"], strict=True)],
            "seeds": table["n"],
            "RMSE on y": table["rmse"].map("{:.4f}".format),
            "floor": table["floor_rmse"].map("{:.4f}".format),
            "parameters": table["parameters"].map("{:,.0f}".format),
            "training TFLOP": (table["flops"] / 1e12).map("{:.2f}".format),
            "training minutes": (table["train_seconds"] / 60).map("{:.1f}".format),
        }
    )


def _differences(errors: pd.DataFrame) -> pd.DataFrame | None:
    """Excess MSE minus that of the first variant at its smallest T, paired by seed."""
    recursive = errors.loc[errors["T"].notna()]
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
            f"minus {variant}, T = {smallest}": [_signed("{:+.4f}", value) for value in table["mean"]],
            "95 % interval": [_interval(low, high) for low, high in zip(table["low"], table["high"], strict=True)],
            "pairs": table["n"],
        }
    )


def _descent(descent: pd.DataFrame) -> pd.DataFrame | None:
    """What each layer's last step leaves behind, query tokens, averaged over seeds."""
    if descent.empty:
        return None
    query = descent.loc[descent["token"] == "query"]
    ends = query.loc[query["step"] == query.groupby(["run", "layer"])["step"].transform("max")]
    rising = query.groupby(["run", "layer"], as_index=False)[["fraction_rising"]].max()
    ends = ends.merge(rising.rename(columns={"fraction_rising": "worst"}), on=["run", "layer"])
    by = ["variant", "T", "layer"]
    ends = ends.groupby(by, dropna=False, observed=True, as_index=False)
    means = ends[["energy_change_median", "worst"]].mean()
    return pd.DataFrame(
        {
            "model": means["variant"],
            "T": means["T"].map(_recursions),
            "layer": means["layer"].str.replace("mlp", "MLP"),
            "E(z_T) − E(z_0)": [_signed("{:.2f}", value) for value in means["energy_change_median"]],
            "rising": (100 * means["worst"]).map("{:.1f} %".format),
        }
    )


def _provenance(folder: Path, runs: Sequence[str]) -> pd.DataFrame:
    rows = []
    for run in runs:
        facts = read_provenance(folder / run) or {}
        code = facts.get("energylab", {})
        rows.append(
            {
                "run": run,
                "code": (code.get("commit") or "–")[:12] + (" with changes" if code.get("dirty") else ""),
                "device": facts.get("device", "–"),
                "torch": facts.get("versions", {}).get("torch", "–"),
                "start": _minute(facts.get("start", "–")),
                "end": _minute(facts.get("end", "–")),
                "ended because": facts.get("exit_reason", "–"),
            }
        )
    return pd.DataFrame(rows)


def _image(figure: "Figure") -> str:
    """The figure as a data URI: an image of its own, so that the ids in two figures do not meet.

    As SVG, but as PNG where filled contours make the SVG larger than that.
    """
    images = {}
    for kind in ("svg+xml", "png"):
        buffer = io.BytesIO()
        options: dict[str, Any] = {"dpi": 200} if kind == "png" else {"metadata": {"Date": None}}
        figure.savefig(buffer, format=kind[:3], **options)
        images[kind] = buffer.getvalue()
    kind = min(images, key=lambda kind: len(images[kind]) - (SVG_BONUS if kind != "png" else 0))
    return f"data:image/{kind};base64,{base64.b64encode(images[kind]).decode()}"


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")


def _recursions(value: Any) -> str:
    return "–" if pd.isna(value) else str(int(value))


def _interval(low: float, high: float) -> str:
    return "one seed" if pd.isna(low) else f"{_signed('{:.4f}', low)} to {_signed('{:.4f}', high)}"


def _signed(template: str, value: float) -> str:
    return template.format(value).replace("-", "−")
