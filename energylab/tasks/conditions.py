"""Test conditions: the tasks that a model is tested on, in and out of the prior it was trained on.

| name | against the training prior |
|---|---|
| `in-prior` | the same |
| `shifted-inputs` | inputs beside the range seen in training: (−2, 2) becomes (2, 6) |
| `held-out-kernel` | a kernel that the prior does not draw |
| `half-noise`, `double-noise` | s/2, 2s |
| `short-lengthscale`, `long-lengthscale` | length-scales in (low/2, low), in (high, 2·high) |
| `mean-offset` | the mean of f raised by the largest output scale |
| `double-points` | 2N points, the first N of which are those of `in-prior` |
| `validation` | the same; other tasks than `in-prior`, for what is chosen before anything is tested |

A test set is the first 4096 tasks of step 0 of the stream `test` (`validation` for that condition) of root
seed 0, whatever seed a model was trained with: all conditions but that one share the random numbers, so that
differences between them are paired too.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from energylab.tasks.covariance import KERNELS
from energylab.tasks.gaussian_process import GaussianProcessPrior, TaskBatch

PROTOCOL = "gp-icl-v1"
TEST_TASKS = 4096
TEST_SEED = 0
_BATCH = 512


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A fixed set of test tasks.

    >>> test = condition("double-noise", GaussianProcessPrior.preset("fixed"), num_points=24)
    >>> test.prior.noise_std
    0.2
    >>> test.sample(num_tasks=8).y.shape
    torch.Size([8, 24])
    """

    name: str
    prior: GaussianProcessPrior
    """Where the tasks come from; their `floor` knows it."""
    num_points: int
    stream: str = "test"

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_points", self.prior.check_num_points(self.num_points))

    @property
    def specification(self) -> dict:
        """Everything that the tasks depend on, as plain JSON."""
        prior = dataclasses.asdict(self.prior)
        del prior["max_points"]  # the tasks do not depend on it
        return {
            "protocol": PROTOCOL,
            "tasks": TEST_TASKS,
            "seed": TEST_SEED,
            "stream": self.stream,
            "num_points": self.num_points,
            "prior": prior,
        }

    @property
    def identity(self) -> str:
        """Hash of the specification, 12 hexadecimal digits: equal for equal test sets, whatever they are called."""
        return hashlib.sha256(json.dumps(self.specification, sort_keys=True).encode()).hexdigest()[:12]

    def sample(
        self,
        num_tasks: int = TEST_TASKS,
        *,
        first_task: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> TaskBatch:
        """Tasks of the test set: all, or `num_tasks` from `first_task` on. Raises ValueError past the last one."""
        if first_task + num_tasks > TEST_TASKS:
            raise ValueError(
                f"num_tasks: expected at most {TEST_TASKS - first_task} from task {first_task} on, got {num_tasks!r}"
            )
        return self.prior.sample(
            num_tasks,
            self.num_points,
            seed=TEST_SEED,
            stream=self.stream,
            first_task=first_task,
            dtype=dtype,
            device=device,
        )

    def batches(self, num_tasks: int = TEST_TASKS) -> Iterator[TaskBatch]:
        """The first `num_tasks` tasks, some hundred at a time, in float64 on the CPU."""
        for first in range(0, num_tasks, _BATCH):
            yield self.sample(min(_BATCH, num_tasks - first), first_task=first, dtype=torch.float64)


def _held_out(prior: GaussianProcessPrior) -> dict:
    # Periodic first, as the least like the others; a prior that draws all of them is tested on a product of two.
    candidates = (*reversed(KERNELS), "rbf*periodic")
    absent = [name for name in candidates if name not in prior.kernels]
    if not absent:
        raise ValueError(f"kernels: expected one of {', '.join(candidates)} to be left out, got {prior.kernels!r}")
    return {"kernels": (absent[0],)}


_CHANGES: dict[str, Callable[[GaussianProcessPrior], dict]] = {
    "in-prior": lambda prior: {},
    "shifted-inputs": lambda prior: {
        "input_range": (prior.input_range[1], 2 * prior.input_range[1] - prior.input_range[0])
    },
    "held-out-kernel": _held_out,
    "half-noise": lambda prior: {"noise_std": prior.noise_std / 2},
    "double-noise": lambda prior: {"noise_std": prior.noise_std * 2},
    "short-lengthscale": lambda prior: {"lengthscale": (prior.lengthscale[0] / 2, prior.lengthscale[0])},
    "long-lengthscale": lambda prior: {"lengthscale": (prior.lengthscale[1], prior.lengthscale[1] * 2)},
    "mean-offset": lambda prior: {"mean": prior.mean + prior.output_scale[1]},
    "double-points": lambda prior: {"max_points": prior.max_points and 2 * prior.max_points},
    "validation": lambda prior: {},
}

CONDITIONS = tuple(_CHANGES)


def condition(name: str, prior: GaussianProcessPrior, num_points: int) -> Condition:
    """The condition called `name` for models trained on `prior` with `num_points` pairs. Raises ValueError for another
    name.
    """
    if name not in _CHANGES:
        raise ValueError(f"condition: expected one of {', '.join(CONDITIONS)}, got {name!r}")
    return Condition(
        name=name,
        prior=dataclasses.replace(prior, **_CHANGES[name](prior)),
        num_points=2 * num_points if name == "double-points" else num_points,
        stream="validation" if name == "validation" else "test",
    )
