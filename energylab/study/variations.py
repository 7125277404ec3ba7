"""Variations of a study: the sweep that tunes its learning rates, and a miniature to try it out."""

import dataclasses
from collections.abc import Sequence

from energylab.study.config import RunConfig, Study

LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
TUNING_STEPS = 2_000
TUNING_SEED = 1_000
"""Far from the seeds that studies compare: what is tuned never saw their tasks or their initial weights."""


def tuning(study: Study, rates: Sequence[float] = LEARNING_RATES, steps: int = TUNING_STEPS) -> Study:
    """Each (variant, T) of a study at several learning rates, one seed, judged on validation tasks only.

    Every variant has the same budget. More than two steps are not tuned: T = 4 and T = 8 take the rate of T = 2. Runs
    shorter than those of the study favour larger rates: what a short sweep prefers is to be confirmed at full length.
    """
    runs = [
        dataclasses.replace(
            run,
            seed=TUNING_SEED,
            conditions=("validation",),
            test_recursions=(),
            training=dataclasses.replace(run.training, steps=steps, learning_rate=rate),
        )
        for run in _first_of_each(study)
        if run.recursions is None or run.recursions <= 2
        for rate in rates
    ]
    return Study(f"{study.name}-tuning", runs, note="Short runs that choose learning rates; they rank nothing else.")


def debug(study: Study) -> Study:
    """The study in miniature, one seed: seconds to see that everything runs. Its numbers mean nothing."""
    runs = [
        dataclasses.replace(
            run,
            num_points=6,
            model=dataclasses.replace(
                run.model,
                width=run.model.heads * max(1, run.model.width // (4 * run.model.heads)),
                hidden=max(1, run.model.hidden // 4),
                rank=min(run.model.rank, 4),
            ),
            training=dataclasses.replace(run.training, steps=30, batch_size=8, warmup_steps=5),
        )
        for run in _first_of_each(study)
    ]
    return Study(f"{study.name}-debug", runs, note="A miniature: its numbers mean nothing.")


def sized(study: Study, tune: bool, small: bool) -> Study:
    """The study itself, its tuning sweep, its miniature, or the miniature of the sweep."""
    if tune:
        study = tuning(study)
    return debug(study) if small else study


def _first_of_each(study: Study) -> list[RunConfig]:
    """The run of the smallest seed of each (variant, T), in the order of the study."""
    first: dict[tuple[str, int | None], RunConfig] = {}
    for run in study.runs:
        key = (run.variant, run.recursions)
        if key not in first or run.seed < first[key].seed:
            first[key] = run
    return list(first.values())
