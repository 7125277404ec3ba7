"""Training: one optimiser, one schedule, and a state that continues exactly where it was left."""

import hashlib
import math
import time
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from energylab.layers.base import check_choice, check_positive
from energylab.models import InContextRegressor, ModelConfig
from energylab.tasks import GaussianProcessPrior, TaskBatch


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained. Raises ValueError, naming the field, for a value out of range."""

    steps: int = 10_000
    batch_size: int = 32
    """Tasks a step."""
    learning_rate: float = 2e-3
    """The peak."""
    warmup_steps: int = 200
    """Steps of linear warm-up; a run shorter than that never reaches the peak."""
    final_learning_rate: float = 0.05
    """Where the cosine ends, as a fraction of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    """The largest norm of the whole gradient."""
    tf32: bool = False
    """On a CUDA device, let float32 matrix products round to TF32."""
    device: str = "auto"
    """``auto`` (CUDA where there is one), ``cpu`` or ``cuda``."""
    log_every: int = 50
    """Steps between two rows of metrics."""
    save_every: int = 500
    """Steps between two saved states."""
    trace_every: int = 0
    """Steps between two records of the descent in every layer, on fixed tasks; 0 for none."""
    snapshots: int = 0
    """Snapshots of the weights after the initial one, at logarithmically spaced steps; 0 for none at all."""

    def __post_init__(self) -> None:
        for key in ("steps", "batch_size", "log_every", "save_every"):
            check_positive(key, getattr(self, key))
        for key in ("warmup_steps", "trace_every", "snapshots"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{key}: expected an integer of at least 0, got {value!r}")
        for key in ("learning_rate", "gradient_clip"):
            if not (_is_real(getattr(self, key)) and 0 < getattr(self, key) < math.inf):
                raise ValueError(f"{key}: expected a positive number, got {getattr(self, key)!r}")
        if not (_is_real(self.weight_decay) and 0 <= self.weight_decay < math.inf):
            raise ValueError(f"weight_decay: expected a number of at least 0, got {self.weight_decay!r}")
        if not (_is_real(self.final_learning_rate) and 0 <= self.final_learning_rate <= 1):
            raise ValueError(f"final_learning_rate: expected a fraction, 0 to 1, got {self.final_learning_rate!r}")
        betas = self.betas if isinstance(self.betas, list | tuple) else ()
        if len(betas) != 2 or not all(_is_real(beta) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {self.betas!r}")
        object.__setattr__(self, "betas", tuple(betas))
        if not isinstance(self.tf32, bool):
            raise ValueError(f"tf32: expected true or false, got {self.tf32!r}")
        check_choice("device", self.device, ("auto", "cpu", "cuda"))

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0..steps−1: warm-up times a cosine from the peak to its final fraction."""
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        cosine = (1 + math.cos(math.pi * step / self.steps)) / 2
        return self.learning_rate * warmup * (self.final_learning_rate + (1 - self.final_learning_rate) * cosine)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Diverged(RuntimeError):
    """The loss or the gradient of a step is not finite."""

    def __init__(self, step: int, what: str):
        super().__init__(f"the {what} of step {step} is not finite")
        self.step, self.what = step, what


@final
class Trainer:
    """One model on its way from initialisation to the last step.

    The tasks of step s are those of ``prior.sample(..., seed, stream="train", step=s)``; the initial weights follow
    from the seed alone. So two trainers with one seed see the same tasks in the same order, whatever their models.
    """

    def __init__(
        self, model: ModelConfig, training: TrainingConfig, prior: GaussianProcessPrior, num_points: int, seed: int
    ):
        self.training, self.prior, self.num_points, self.seed = training, prior, num_points, seed
        self.device = resolve_device(training.device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = training.tf32
        self.model = initialise(model, seed).to(self.device)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), betas=training.betas, weight_decay=training.weight_decay, fused=True
        )
        self.step = 0
        self.seconds = 0.0
        self.rows: list[dict[str, float]] = []
        self._window: list[list[float]] = []

    def advance(self) -> dict[str, float] | None:
        """One optimiser step. Returns a row of metrics every ``log_every`` steps and at the last, else None.

        A row covers the steps since the one before it: means, and maxima where named so. Every step sees new tasks, so
        ``excess_loss``, the mean of (prediction − floor mean)² on them, estimates the test error without bias.
        """
        start = time.perf_counter()
        learning_rate = self.training.learning_rate_at(self.step)
        self._window.append(self.optimise(self.tasks(self.step), learning_rate))
        self.step += 1
        self.seconds += time.perf_counter() - start
        if self.step % self.training.log_every and self.step != self.training.steps:
            return None
        losses, excesses, norms = zip(*self._window, strict=True)
        self._window = []
        self.rows.append(
            {
                "step": self.step,
                "loss": math.fsum(losses) / len(losses),
                "loss_max": max(losses),
                "excess_loss": math.fsum(excesses) / len(excesses),
                "gradient_norm": math.fsum(norms) / len(norms),
                "gradient_norm_max": max(norms),
                "learning_rate": learning_rate,
                "seconds": self.seconds,
            }
        )
        return self.rows[-1]

    def tasks(self, step: int) -> TaskBatch:
        """The tasks that a step trains on."""
        return self.prior.sample(
            self.training.batch_size,
            self.num_points,
            seed=self.seed,
            stream="train",
            step=step,
            dtype=torch.float32,
            device=self.device,
        )

    def optimise(self, batch: TaskBatch, learning_rate: float) -> list[float]:
        """Move the weights by one step of the optimiser; loss, excess loss and gradient norm before the step."""
        self.model.train()
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        prediction = self.model(batch.x, batch.y)
        loss = loss_of(prediction, batch.y)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.gradient_clip)
        mean = prediction if isinstance(prediction, Tensor) else prediction[0]
        excess = (mean.detach() - batch.floor_mean).square().mean()
        values = torch.stack([loss.detach(), excess, norm]).tolist()
        # before the optimiser's step, so that the last good weights are still there
        if not all(math.isfinite(value) for value in values):
            raise Diverged(self.step, "gradient" if math.isfinite(values[0]) else "loss")
        self.optimiser.step()
        return values

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; tensors and plain values only."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "rows": [dict(row) for row in self.rows],
            "window": [list(values) for values in self._window],
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of a trainer of the same settings."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.rows = [dict(row) for row in state["rows"]]
        self._window = [list(values) for values in state["window"]]


def loss_of(prediction: Tensor | tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Mean squared error of a point prediction; mean negative log-likelihood, in nats, of a Gaussian one."""
    if isinstance(prediction, Tensor):
        return torch.nn.functional.mse_loss(prediction, y)
    mean, variance = prediction
    return torch.nn.functional.gaussian_nll_loss(mean, y, variance, full=True)


def initialise(config: ModelConfig, seed: int) -> InContextRegressor:
    """The model of a seed, on the CPU in float32. The global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "initialisation"))
        return InContextRegressor(config)


def derive_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed of its own for each (seed, purpose)."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def resolve_device(device: str) -> torch.device:
    """The device of a config. Raises ValueError where ``cuda`` is asked for and there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch finds no CUDA device; allowed here: auto, cpu")
    return torch.device(device)
