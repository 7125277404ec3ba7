"""What the runs of a study cost, before any of them is started."""

import dataclasses
from collections.abc import Iterator

import pandas as pd
import torch

from energylab.analysis.cost import activation_bytes, llama_like, parameters, training_flops
from energylab.study.config import RunConfig, Study
from energylab.study.memory import check_memory

RECURSIONS = (1, 2, 4, 8)


def describe(study: Study) -> str:
    """Parameters of each model by part, and operations and memory of one training step against T, as text.

    Ratios are to the Llama model of the same width, depth, heads and hidden units. Raises ValueError for a model that
    does not fit into memory.
    """
    runs = list(_models(study))
    for run in runs:  # each of them does one forward pass here
        check_memory(run, torch.device("cpu"))
    lines = [f"{study.name}: {len(study.runs)} runs of {len(runs)} models"]
    if study.note:
        lines.append(study.note)
    lines += [
        "",
        "Parameters; weights are the matrices alone, / Llama is their ratio to the Llama model of equal sizes",
    ]
    lines.append(_parameters(runs).to_string(index=False, na_rep="-"))
    lines += [
        "",
        "One training step: operations of its matrix products, and what its forward pass keeps for the backward",
    ]
    lines.append(_steps(runs).to_string(index=False, na_rep="-"))
    return "\n".join(lines)


def _models(study: Study) -> Iterator[RunConfig]:
    """The first run of each model."""
    seen = []
    for run in study.runs:
        if (key := (run.variant, run.model, run.num_points, run.training.batch_size)) not in seen:
            seen.append(key)
            yield run


def _parameters(runs: list[RunConfig]) -> pd.DataFrame:
    rows = []
    for run in runs:
        count, llama = parameters(run.model), parameters(llama_like(run.model))
        rows.append(
            {
                "variant": run.variant,
                "T": run.recursions if run.recursions is not None else "-",
                "attention weights": f"{count.attention_weights:,}",
                "/ Llama": f"{count.attention_weights / llama.attention_weights:.4f}",
                "other": f"{count.attention_other:,}",
                "MLP weights": f"{count.mlp_weights:,}",
                "/ Llama ": f"{count.mlp_weights / llama.mlp_weights:.4f}" if llama.mlp_weights else "-",
                "other ": f"{count.mlp_other:,}",
                "in and out": f"{count.rest:,}",
                "total": f"{count.total:,}",
                "/ Llama  ": f"{count.total / llama.total:.4f}",
            }
        )
    return pd.DataFrame(rows)


def _steps(runs: list[RunConfig]) -> pd.DataFrame:
    rows = {}
    for run in runs:
        recursions = sorted({*RECURSIONS, run.model.recursions}) if run.model.has_energy else [None]
        llama = training_flops(llama_like(run.model), run.num_points)
        for T in recursions:
            model = run.model if T is None else dataclasses.replace(run.model, recursions=T)
            key = (run.variant, model)
            if key in rows:
                continue
            flops = training_flops(model, run.num_points)
            kept = activation_bytes(model, run.num_points, run.training.batch_size)
            rows[key] = {
                "variant": run.variant,
                "T": "-" if T is None else T,
                "GFLOP": f"{flops * run.training.batch_size / 1e9:.3f}",
                "/ Llama": f"{flops / llama:.2f}",
                "MiB kept": f"{kept / 2**20:.1f}",
            }
    return pd.DataFrame(list(rows.values()))
