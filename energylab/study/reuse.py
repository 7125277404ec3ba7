"""Training that another run of the same results folder has already done.

Studies share models: T = 2 without anything special is in most of them. A run that differs from a finished one in its name
and in what it is tested on, and in nothing that training depends on, takes its trained state and only evaluates.
"""

from pathlib import Path
from typing import Any

from energylab.study import store
from energylab.study.config import RunConfig


def trained_elsewhere(config: RunConfig, directory: Path) -> tuple[dict[str, Any], str] | None:
    """The last training state of a finished run with equal training, and a sentence that says whose; None if there is none.

    Looks in the studies beside that of `directory`. Damaged runs are passed over: `energylab status` names them.
    """
    for candidate in sorted(directory.parent.parent.glob(f"*/*-seed{config.seed}-*")):
        if candidate == directory or not (candidate / store.STATE).exists():
            continue
        try:
            if not _same_training(config, store.read_config(candidate)):
                continue
            provenance = store.check_run(candidate)
            if provenance is None:
                continue
            state, _ = store.read_state(candidate)
        except store.Damaged:
            continue
        if state is not None and state["trainer"]["step"] == config.training.steps:
            commit = provenance["energylab"]["commit"] or f"version {provenance['energylab']['version']}"
            whose = f"{candidate.parent.name}/{candidate.name}"
            return state, f"training taken from {whose}, which has the same settings (code {commit[:12]})"
    return None


def _same_training(one: RunConfig, other: RunConfig) -> bool:
    return _what_training_depends_on(one) == _what_training_depends_on(other)


def _what_training_depends_on(config: RunConfig) -> dict[str, Any]:
    settings = config.settings()
    return {key: settings[key] for key in ("seed", "prior", "num_points", "model", "training")}
