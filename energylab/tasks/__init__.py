"""Regression tasks with known answers: priors, their floors, reference predictors, test conditions, token layouts."""

from energylab.tasks.conditions import CONDITIONS, Condition, condition
from energylab.tasks.gaussian_process import FactorisationError, GaussianProcessPrior, TaskBatch
from energylab.tasks.tokens import TokenLayout, token_layout

__all__ = [
    "CONDITIONS",
    "Condition",
    "FactorisationError",
    "GaussianProcessPrior",
    "TaskBatch",
    "TokenLayout",
    "condition",
    "token_layout",
]
