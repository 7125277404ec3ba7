"""Gaussian-process regression tasks, drawn exactly, each with the best prediction that anyone could make of it.

A task is N inputs x, a function f ~ GP(m, σ² k) and targets y = f + s n. With K = σ² (k(x, x) + jitter I),

    f = m + chol(K) ε ,    K + s² I = L Lᵀ ,    e = L⁻¹ (y − m) ,

and since L is lower triangular, row k of it only knows the points up to k: the Bayes-optimal prediction of y_k from x_k
and the k pairs before it has mean y_k − L_kk e_k and variance L_kk² (of f_k: L_kk² − s²). One factorisation gives it
for every k. This is the *floor*.

Everything is float64 on the CPU and moved afterwards. The jitter is part of the prior, so it is part of the floor too;
nothing is resampled or clamped, and a factorisation that fails is an error.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from energylab.tasks.covariance import KERNEL_NAMES, KERNELS, covariance, is_kernel
from energylab.tasks.streams import WORDS, normal_pairs, stream_key, uniform_pairs

_HYPERPARAMETERS, _INPUTS, _NORMALS = 0, 1, 2
_CHUNK_ELEMENTS = 2**20


class FactorisationError(ArithmeticError):
    """A covariance matrix was not positive definite in float64. Raise the prior's jitter, or its noise."""


@dataclass(frozen=True, kw_only=True)
class TaskBatch:
    """B tasks of N points, and the floor of each prediction. B tasks may have B different kernels and length-scales.

    Out of a prior with random hyper-parameters, the floor knows those of its task: it bounds what can be learned from
    below.
    """

    x: Tensor
    """Inputs, (B, N, d_x)."""
    y: Tensor
    """Targets, (B, N)."""
    f: Tensor
    """The function without noise, (B, N)."""
    floor_mean: Tensor
    """Bayes-optimal prediction of y_k, and of f_k, from x_k and the k pairs before it, (B, N)."""
    floor_variance: Tensor
    """Its variance as a prediction of y_k, noise included, (B, N)."""
    floor_variance_f: Tensor
    """Its variance as a prediction of f_k, (B, N)."""
    lengthscale: Tensor
    """The length-scale l of each kernel, after scaling by sqrt(d_x), (B,)."""
    output_scale: Tensor
    """Standard deviation σ of f, (B,)."""
    kernel: list[str]
    """Name of each kernel."""

    def __len__(self) -> int:
        return len(self.kernel)


def _pair(key: str, value, *, positive: bool) -> tuple[float, float]:
    try:
        low, high = (float(v) for v in value)
    except (TypeError, ValueError):
        raise ValueError(f"{key}: expected two numbers (low, high), got {value!r}") from None
    allowed = "0 < low <= high" if positive else "low < high"
    if not (math.isfinite(low) and math.isfinite(high) and (0 < low <= high if positive else low < high)):
        raise ValueError(f"{key}: expected finite (low, high) with {allowed}, got {value!r}")
    return low, high


def _whole(key: str, value, low: int, high: int | None) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or value < low
        or (high is not None and value > high)
    ):
        raise ValueError(
            f"{key}: expected a whole number, {low} or more{'' if high is None else f', at most {high}'}, got {value!r}"
        )
    return int(value)


def _real(key: str, value, *, zero: bool) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.floating)
        or not math.isfinite(value)
        or value < 0
        or (value == 0 and not zero)
    ):
        raise ValueError(f"{key}: expected a finite number, {'0 or more' if zero else 'above 0'}, got {value!r}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class GaussianProcessPrior:
    """A distribution over regression tasks. `dataclasses.asdict` of it is plain JSON, and
    `GaussianProcessPrior(**that)` equals it.

    >>> prior = GaussianProcessPrior.preset("rbf", noise_std=0.2)
    >>> batch = prior.sample(4, 16, seed=0, stream="train", step=3)
    >>> batch.x.shape, batch.y.shape
    (torch.Size([4, 16, 1]), torch.Size([4, 16]))
    """

    kernels: tuple[str, ...] = ("rbf",)
    """Names (see `energylab.tasks.covariance`), one drawn per task with equal chances."""
    lengthscale: tuple[float, float] = (0.25, 1.0)
    """Range of the length-scale, before scaling by sqrt(d_x); drawn per task. Equal ends fix it."""
    lengthscale_law: str = "log-uniform"
    """`log-uniform` or `uniform`."""
    output_scale: tuple[float, float] = (1.0, 1.0)
    """Range of the standard deviation σ of f; drawn uniformly per task."""
    mean: float = 0.0
    """Mean m of f, the same everywhere."""
    noise_std: float = 0.1
    """Standard deviation s of the noise on y."""
    period: float = 2.0
    """Period of the periodic kernel."""
    input_dim: int = 1
    """d_x, 1 to 20."""
    input_range: tuple[float, float] = (-2.0, 2.0)
    """Range of each input."""
    input_layout: str = "uniform"
    """`uniform`: independent and unsorted; `sorted`: the same in order of the first input; `grid`: equally spaced, both
    ends included, for one input. Sorted and gridded tasks of 2N points do not extend those of N points.
    """
    jitter: float = 1e-8
    """Variance of the independent part of f, relative to σ²."""
    max_points: int | None = None
    """The most points that a task may have, where those who use the prior agree on one. It changes no task."""

    def __post_init__(self) -> None:
        def put(key, value):
            object.__setattr__(self, key, value)

        kernels = self.kernels if isinstance(self.kernels, list | tuple) else ()
        if not kernels or not all(is_kernel(kernel) for kernel in kernels):
            raise ValueError(f"kernels: expected one or more of {KERNEL_NAMES}, got {self.kernels!r}")
        put("kernels", tuple(kernels))
        put("lengthscale", _pair("lengthscale", self.lengthscale, positive=True))
        put("output_scale", _pair("output_scale", self.output_scale, positive=True))
        put("input_range", _pair("input_range", self.input_range, positive=False))
        for key, allowed in (
            ("lengthscale_law", ("log-uniform", "uniform")),
            ("input_layout", ("uniform", "sorted", "grid")),
        ):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}: expected one of {', '.join(allowed)}, got {getattr(self, key)!r}")
        put("input_dim", _whole("input_dim", self.input_dim, 1, 20))
        if self.input_layout == "grid" and self.input_dim != 1:
            raise ValueError(f"input_dim: expected 1 for input_layout 'grid', got {self.input_dim!r}")
        put("noise_std", _real("noise_std", self.noise_std, zero=True))
        put("jitter", _real("jitter", self.jitter, zero=True))
        put("period", _real("period", self.period, zero=False))
        if (
            isinstance(self.mean, bool)
            or not isinstance(self.mean, int | float | np.floating)
            or not math.isfinite(self.mean)
        ):
            raise ValueError(f"mean: expected a finite number, got {self.mean!r}")
        put("mean", float(self.mean))
        if self.max_points is not None:
            put("max_points", _whole("max_points", self.max_points, 1, None))

    @classmethod
    def preset(cls, name: str, **overrides) -> "GaussianProcessPrior":
        """A named prior, with fields replaced by `overrides`. Raises ValueError for an unknown name or field."""
        if name not in PRESETS:
            raise ValueError(f"prior: expected one of {', '.join(PRESETS)}, got {name!r}")
        fields = [field.name for field in dataclasses.fields(cls)]
        for key in overrides:
            if key not in fields:
                raise ValueError(f"{key}: expected a field of the prior ({', '.join(fields)}), got {overrides[key]!r}")
        return cls(**{**PRESETS[name], **overrides})

    def check_num_points(self, num_points: int) -> int:
        """`num_points`, or ValueError where no task of this prior has so many."""
        num_points = _whole("num_points", num_points, 1, WORDS // 20)
        if self.max_points is not None and num_points > self.max_points:
            raise ValueError(
                f"num_points: expected at most {self.max_points}, the max_points of the prior, got {num_points}"
            )
        return num_points

    def scaled_lengthscale(self, quantile):
        """The length-scale at `quantile` (0 to 1; a number or an array) of its law, times sqrt(d_x)."""
        low, high = self.lengthscale
        unit = low + (high - low) * quantile if self.lengthscale_law == "uniform" else low * (high / low) ** quantile
        return unit * math.sqrt(self.input_dim)

    def scaled_output(self, quantile):
        """The output scale at `quantile` (0 to 1; a number or an array)."""
        low, high = self.output_scale
        return low + (high - low) * quantile

    def covariance(self, kernel: str, x: Tensor, lengthscale: Tensor, output_scale: Tensor) -> Tensor:
        """Covariance (B, N, N) of f at x (B, N, d_x), jitter included; `lengthscale` and `output_scale` are (B,).
        Float64.
        """
        matrix = covariance(kernel, x, lengthscale, self.period)
        matrix.diagonal(dim1=-2, dim2=-1).add_(self.jitter)
        return matrix.mul_(output_scale.square()[:, None, None])

    @torch.no_grad()
    def sample(
        self,
        batch_size: int,
        num_points: int,
        *,
        seed: int = 0,
        stream: str = "train",
        step: int = 0,
        first_task: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> TaskBatch:
        """Tasks `first_task` to `first_task + batch_size - 1` of a step of a stream.

        A task is a function of (seed, stream, step, task index, N) alone. Under `uniform` inputs, its inputs,
        hyper-parameters and normal draws at the first m points do not depend on N either: N points extend the task of m
        < N points.

        Raises: ValueError for sizes out of range, FactorisationError (naming the task) for a covariance that float64
        cannot factorise.
        """
        if not isinstance(stream, str):
            raise ValueError(f"stream: expected a name, got {stream!r}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point one, got {dtype!r}")
        batch_size = _whole("batch_size", batch_size, 1, WORDS)
        num_points = self.check_num_points(num_points)
        seed = _whole("seed", seed, 0, None)
        step = _whole("step", step, 0, WORDS - 1)
        first_task = _whole("first_task", first_task, 0, WORDS - batch_size)
        with _one_thread():
            parts = [
                self._draw(first_task + part.start, part.stop - part.start, num_points, seed, stream, step)
                for part in chunks(batch_size, num_points)
            ]
        tensors = {
            key: torch.cat([part[key] for part in parts]) if len(parts) > 1 else parts[0][key]
            for key in parts[0]
            if key != "kernel"
        }
        return TaskBatch(
            kernel=[name for part in parts for name in part["kernel"]],
            **{key: value.to(device=device, dtype=dtype) for key, value in tensors.items()},
        )

    def _draw(self, first_task: int, batch_size: int, num_points: int, seed: int, stream: str, step: int) -> dict:
        tasks = np.arange(first_task, first_task + batch_size)
        input_blocks = -(-num_points * self.input_dim // 2)
        sizes = (2, input_blocks, num_points)
        u, v = uniform_pairs(
            stream_key(seed, stream),
            np.concatenate([np.arange(size) for size in sizes]),
            np.repeat([_HYPERPARAMETERS, _INPUTS, _NORMALS], sizes),
            tasks[:, None],
            step,
        )
        choice = (u[:, 0] * len(self.kernels)).astype(int)
        lengthscale = torch.from_numpy(self.scaled_lengthscale(v[:, 0]))
        output_scale = torch.from_numpy(self.scaled_output(u[:, 1]))
        inputs = slice(2, 2 + input_blocks)
        x = torch.from_numpy(self._inputs(np.stack([u[:, inputs], v[:, inputs]], axis=-1), num_points))
        function, noise = (torch.from_numpy(z) for z in normal_pairs(u[:, -num_points:], v[:, -num_points:]))

        groups = [(name, np.flatnonzero(choice == index)) for index, name in enumerate(self.kernels)]
        groups = [(name, members) for name, members in groups if len(members)]
        if len(groups) == 1:
            matrix = self.covariance(groups[0][0], x, lengthscale, output_scale)
        else:
            matrix = torch.empty(batch_size, num_points, num_points, dtype=torch.float64, device="cpu")
            for name, members in groups:
                members = torch.from_numpy(members)
                matrix[members] = self.covariance(name, x[members], lengthscale[members], output_scale[members])
        kernel = [self.kernels[index] for index in choice]

        def name_task(row: int) -> str:
            return (
                f"seed {seed}, stream {stream!r}, step {step}, task {first_task + row} (kernel {kernel[row]},"
                f" lengthscale {lengthscale[row]:.4g}, {num_points} points, noise_std {self.noise_std},"
                f" jitter {self.jitter})"
            )

        f = self.mean + (cholesky(matrix, name_task) * function[:, None, :]).sum(-1)
        y = f + self.noise_std * noise
        matrix.diagonal(dim1=-2, dim2=-1).add_(self.noise_std**2)
        floor_mean, floor_variance = one_step_ahead(cholesky(matrix, name_task), y, self.mean)[:2]
        return {
            "x": x,
            "y": y,
            "f": f,
            "floor_mean": floor_mean,
            "floor_variance": floor_variance,
            "floor_variance_f": floor_variance - self.noise_std**2,
            "lengthscale": lengthscale,
            "output_scale": output_scale,
            "kernel": kernel,
        }

    def _inputs(self, uniforms: np.ndarray, num_points: int) -> np.ndarray:
        low, high = self.input_range
        batch_size = len(uniforms)
        if self.input_layout == "grid":
            return np.tile(np.linspace(low, high, num_points)[:, None], (batch_size, 1, 1))
        flat = uniforms.reshape(batch_size, -1)[:, : num_points * self.input_dim]
        x = low + (high - low) * flat.reshape(batch_size, num_points, self.input_dim)
        if self.input_layout == "sorted":
            x = np.take_along_axis(x, np.argsort(x[:, :, :1], axis=1, kind="stable"), axis=1)
        return x


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Several threads round a factorisation of some hundred points differently: tasks would depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def chunks(num_tasks: int, num_points: int) -> Iterator[slice]:
    """Slices of the tasks, so few at a time that their matrices take 8 MiB each (but at least one task)."""
    size = max(1, _CHUNK_ELEMENTS // num_points**2)
    for start in range(0, num_tasks, size):
        yield slice(start, min(start + size, num_tasks))


def cholesky(matrix: Tensor, name_task: Callable[[int], str]) -> Tensor:
    """Lower factors of (B, N, N). Raises FactorisationError for the first row that has none; `name_task(row)` says
    which it is.
    """
    lower, info = torch.linalg.cholesky_ex(matrix)
    if info.any():
        task = name_task(int(info.nonzero()[0]))
        raise FactorisationError(f"{task}: covariance not positive definite in float64; a larger jitter helps")
    return lower


def one_step_ahead(lower: Tensor, y: Tensor, mean: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Every prediction of y_k from the points before it, from one factor L (B, N, N) of the covariance of y (B, N).

    Returns the means y_k − L_kk e_k, the variances L_kk², and the log-densities log N(y_k) under both, each (B, N); the
    sum of the first k of the last is the log-likelihood of the first k pairs.
    """
    diagonal = lower.diagonal(dim1=-2, dim2=-1)
    innovation = torch.linalg.solve_triangular(lower, (y - mean).unsqueeze(-1), upper=False).squeeze(-1)  # e
    density = -0.5 * innovation.square() - diagonal.log() - 0.5 * math.log(2 * math.pi)
    return y - diagonal * innovation, diagonal.square(), density


PRESETS: dict[str, dict] = {
    "fixed": {"kernels": ("rbf",), "lengthscale": (0.5, 0.5)},
    "rbf": {"kernels": ("rbf",)},
    "mixture": {"kernels": KERNELS},
    "np-standard": {
        "kernels": ("rbf",),
        "lengthscale": (0.1, 0.6),
        "lengthscale_law": "uniform",
        "output_scale": (0.1, 1.0),
        "noise_std": 0.02,
        "max_points": 50,
    },
}
"""`fixed`: one known kernel, so that the floor is attainable. `rbf`: random length-scale. `mixture`: random kernel
too. `np-standard`: the tasks of neural-process papers, which have at most 50 points.
"""
