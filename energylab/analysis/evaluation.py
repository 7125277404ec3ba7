"""The error of a model on fixed test tasks, against the Bayes floor of each."""

from collections.abc import Iterator

import pandas as pd
import torch
from torch import Tensor

from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior, TaskBatch
from energylab.tasks.predictors import nearest_neighbour, zero

TEST_SEED = 0
"""The root seed of every test set, whatever a run's seed: all models meet the same tasks."""
TEST_TASKS = 4096
CHUNK = 512


def fixed_tasks(
    prior: GaussianProcessPrior, num_points: int, tasks: int = TEST_TASKS, stream: str = "test"
) -> Iterator[TaskBatch]:
    """The fixed test tasks of a prior, a chunk at a time, in float64 on the CPU."""
    for first in range(0, tasks, CHUNK):
        size = min(CHUNK, tasks - first)
        yield prior.sample(size, num_points, seed=TEST_SEED, stream=stream, first_task=first, dtype=torch.float64)


@torch.no_grad()
def evaluate(
    model: InContextRegressor,
    prior: GaussianProcessPrior,
    num_points: int,
    condition: str = "in-prior",
    tasks: int = TEST_TASKS,
) -> pd.DataFrame:
    """One row for each k = 0..N−1, the number of pairs that the prediction of y_k has seen.

    Errors are pooled over the tasks before any root. The columns: ``excess_mse``, the mean of (prediction − floor mean)²,
    the headline; ``rmse`` on y and ``rmse_f`` on f; the expected floors ``floor_rmse`` and ``floor_rmse_f``, from the mean
    of the Bayes-optimal predictor's variance; and what two references reach, ``zero_rmse`` and
    ``nearest_neighbour_rmse``, on y. In the units of y, those of the excess squared.
    """
    device = next(model.parameters()).device
    totals: dict[str, Tensor] = {}

    def add(key: str, error_BN: Tensor) -> None:
        totals[key] = totals.get(key, torch.zeros(num_points, dtype=torch.float64)) + error_BN.sum(0)

    for batch in fixed_tasks(prior, num_points, tasks):
        output = model(batch.x.to(device, torch.float32), batch.y.to(device, torch.float32))
        prediction = (output if isinstance(output, Tensor) else output[0]).to("cpu", torch.float64)
        add("excess_mse", (prediction - batch.floor_mean).square())
        add("rmse", (prediction - batch.y).square())
        add("rmse_f", (prediction - batch.f).square())
        add("floor_rmse", batch.floor_variance)
        add("floor_rmse_f", batch.floor_variance_f)
        add("zero_rmse", (zero(batch.x, batch.y) - batch.y).square())
        add("nearest_neighbour_rmse", (nearest_neighbour(batch.x, batch.y) - batch.y).square())
    means = {key: total / tasks for key, total in totals.items()}
    columns = {key: (mean if key == "excess_mse" else mean.sqrt()).numpy() for key, mean in means.items()}
    return pd.DataFrame({"condition": condition, "k": range(num_points), **columns})
