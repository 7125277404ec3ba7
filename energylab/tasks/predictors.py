"""Predictions of y_k from x_k and the k pairs before it, to hold a model against.

All take x (B, N, d_x) and y (B, N). All are causal and none is trained on other tasks.

| predictor | knows |
|---|---|
| the floor, `TaskBatch.floor_mean` | the kernel, length-scale, scale and noise that made the task |
| `marginal` | a prior over them: the Bayes-optimal prediction when they are not given |
| `kernel_ridge` | one kernel of the prior; T gradient steps towards its prediction |
| `fitted` | the family `rbf`; fits its hyper-parameters to each task by marginal likelihood |
| `zero`, `average`, `nearest_neighbour` | nothing |

On tasks from a prior with random hyper-parameters the floor is out of reach and `marginal` under that prior is what can
be reached. On tasks from elsewhere, `marginal` under the *training* prior is what a perfectly trained model would say:
the `prior` predictor.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import gpytorch
import numpy as np
import torch
from torch import Tensor

from energylab.tasks.gaussian_process import GaussianProcessPrior, cholesky, chunks, one_step_ahead


class Prediction(NamedTuple):
    """What a probabilistic predictor says of y_k, noise included."""

    mean: Tensor
    variance: Tensor
    log_density: Tensor
    """Logarithm of its density at the y_k that came: minus its mean is the negative log-likelihood."""


def references(prior: GaussianProcessPrior) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Cheap point predictors (x, y) -> (B, N) by name, for models trained on `prior`."""
    return {
        "zero": zero,
        "average": average,
        "nearest_neighbour": nearest_neighbour,
        "three_nearest_neighbours": partial(nearest_neighbour, neighbours=3),
        **{f"kernel_ridge_{steps}": partial(kernel_ridge, prior=prior, steps=steps) for steps in (1, 2, 4, 8)},
    }


def zero(x: Tensor, y: Tensor) -> Tensor:
    """The mean of a centred prior, whatever was seen."""
    return torch.zeros_like(y)


def average(x: Tensor, y: Tensor) -> Tensor:
    """Mean of the earlier targets (0 where there is none)."""
    earlier = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1].cumsum(1)], dim=1)
    return earlier / torch.arange(y.shape[1], dtype=y.dtype, device=y.device).clamp(min=1)


def nearest_neighbour(x: Tensor, y: Tensor, neighbours: int = 1) -> Tensor:
    """Mean target of the `neighbours` nearest earlier inputs (of all, where fewer were seen; 0 where none was).

    Raises ValueError for fewer than one neighbour.
    """
    if neighbours < 1:
        raise ValueError(f"neighbours: expected 1 or more, got {neighbours!r}")
    num_points = y.shape[1]
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    unseen = torch.ones(num_points, num_points, dtype=torch.bool, device=y.device).triu()
    distance, index = distance.masked_fill(unseen, torch.inf).topk(min(neighbours, num_points), dim=-1, largest=False)
    seen = distance.isfinite()
    targets = y.unsqueeze(1).expand(-1, num_points, -1).gather(-1, index)
    return torch.where(seen, targets, 0).sum(-1) / seen.sum(-1).clamp(min=1)


@torch.no_grad()
def marginal(x: Tensor, y: Tensor, prior: GaussianProcessPrior, *, grid: int = 16) -> Prediction:
    """The Bayes-optimal prediction under `prior`, which does not tell the hyper-parameters of the task.

    Each point g of a grid over (kernel, length-scale, output scale) predicts with mean m_g and variance v_g, and counts
    with weight w_g ∝ p(y_0..k−1 | g), the likelihood of the prefix: mean Σ w_g m_g, density Σ w_g N(y_k; m_g, v_g). One
    factorisation a grid point serves all prefixes. Grid points are the midpoints of `grid` equally likely intervals of
    each random hyper-parameter (a fixed one takes one point), so a prior without any is predicted exactly. With 16, the
    mean squared distance to the floor is right to 0.1 % on `rbf` and `mixture`, to 1 % on `np-standard`.

    Returns (B, N) each, in the dtype and on the device of y; computed in float64 on the CPU.
    """
    if grid < 1:
        raise ValueError(f"grid: expected 1 or more, got {grid!r}")
    quantiles = (np.arange(grid) + 0.5) / grid

    def points(law: Callable, bounds: tuple[float, float]) -> list[float]:
        return [float(law(0.5))] if bounds[0] == bounds[1] else [float(value) for value in law(quantiles)]

    hyperparameters = list(
        product(
            prior.kernels,
            points(prior.scaled_lengthscale, prior.lengthscale),
            points(prior.scaled_output, prior.output_scale),
        )
    )

    def predict(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Running averages over the grid, and the logarithms of the summed weights before and after y_k was seen.
        mean, variance = torch.zeros_like(y), torch.zeros_like(y)
        before, after = torch.full_like(y, -torch.inf), torch.full_like(y, -torch.inf)
        for kernel, lengthscale, output_scale in hyperparameters:
            constant = torch.ones_like(y[:, 0])
            matrix = prior.covariance(kernel, x, lengthscale * constant, output_scale * constant)
            matrix.diagonal(dim1=-2, dim2=-1).add_(prior.noise_std**2)
            lower = cholesky(
                matrix, lambda task, what=(kernel, lengthscale, output_scale): f"row {task}, grid point {what}"
            )
            mean_g, variance_g, density = one_step_ahead(lower, y, prior.mean)
            log_weight = torch.cat([torch.zeros_like(y[:, :1]), density[:, :-1].cumsum(1)], dim=1)
            before = torch.logaddexp(before, log_weight)
            after = torch.logaddexp(after, log_weight + density)
            share, distance = (log_weight - before).exp(), mean_g - mean
            mean = mean + share * distance
            variance = variance + share * (variance_g - variance + (1 - share) * distance.square())
        return mean, variance, after - before

    return Prediction(*_by_chunks(predict, x, y))


@torch.no_grad()
def kernel_ridge(x: Tensor, y: Tensor, prior: GaussianProcessPrior, steps: int) -> Tensor:
    """Kernel ridge regression by gradient descent from zero, stopped after `steps` steps.

    For the first k pairs, with K their covariance and λ = s², the descent on ½‖y − g‖² + ½λ‖g‖² over functions g = Σ
    α_i k(x_i, ·) is α ← α + η (y − K α − λ α). It tends to the Gaussian-process prediction; η = 1/(λ + max_j Σ_i
    |K_ji|) is safe, since the largest row sum bounds the largest eigenvalue (Gershgorin). The kernel is the first of
    the prior, at the medians of its hyper-parameters. A reference for models with T recursions, not a bound for them:
    they learn their step.

    Raises ValueError for a negative number of steps.
    """
    if steps < 0:
        raise ValueError(f"steps: expected 0 or more, got {steps!r}")
    ridge = prior.noise_std**2

    def predict(x: Tensor, y: Tensor) -> tuple[Tensor]:
        constant = torch.ones_like(y[:, 0])
        lengthscale, output_scale = prior.scaled_lengthscale(0.5) * constant, prior.scaled_output(0.5) * constant
        matrix = prior.covariance(prior.kernels[0], x, lengthscale, output_scale)
        # Row k of every matrix below belongs to the prefix of the first k pairs.
        prefix = torch.ones_like(matrix[0]).tril(-1)
        row_sums = prefix @ matrix.abs()  # (k, j): Σ_{i<k} |K_ij|
        step_size = 1 / (ridge + (row_sums * prefix).amax(-1, keepdim=True)).clamp(min=torch.finfo(y.dtype).tiny)
        target = (y - prior.mean)[:, None, :]
        alpha = torch.zeros_like(matrix)
        for _ in range(steps):
            alpha = alpha + step_size * prefix * (target - alpha @ matrix - ridge * alpha)
        return (prior.mean + (alpha * matrix).sum(-1),)

    return _by_chunks(predict, x, y)[0]


def fitted(
    x: Tensor, y: Tensor, contexts: Sequence[int], *, steps: int = 100, learning_rate: float = 0.1
) -> Prediction:
    """A Gaussian process as a practitioner would fit it, knowing nothing of the prior: gpytorch's `ExactGP` with a
    constant mean and a scaled RBF kernel, all hyper-parameters by Adam on the marginal likelihood, from gpytorch's
    initial values.

    It is fitted anew to the first k pairs of each task, for each k in `contexts` (1 or more each): costly, so give it a
    subset, and say which. Returns (B, len(contexts)) each, in the dtype and on the device of y; computed in float64 on
    the CPU.
    """
    for k in contexts:
        if not 1 <= k < y.shape[1]:
            raise ValueError(f"contexts: expected each between 1 and {y.shape[1] - 1}, got {k!r}")
    inputs, targets = x.detach().to("cpu", torch.float64), y.detach().to("cpu", torch.float64)
    results = [_fit_and_predict(inputs[:, : k + 1], targets[:, : k + 1], steps, learning_rate) for k in contexts]
    return Prediction(*(torch.stack(values, dim=1).to(y) for values in zip(*results, strict=True)))


class _ScaledRBF(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood):
        super().__init__(x, y, likelihood)
        batch_shape = x.shape[:1]
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch_shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch_shape), batch_shape=batch_shape
        )

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        mean, covariance = self.mean_module(x), self.covar_module(x)
        return gpytorch.distributions.MultivariateNormal(mean, covariance)  # pyright: ignore[reportArgumentType]


def _fit_and_predict(x: Tensor, y: Tensor, steps: int, learning_rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """Fit to all points but the last, predict the last."""
    # gpytorch's stochastic estimates would draw from the global generator.
    with torch.device("cpu"), torch.enable_grad(), gpytorch.settings.fast_computations(False, False, False):
        likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=x.shape[:1]).double()
        model = _ScaledRBF(x[:, :-1], y[:, :-1], likelihood).double()
        evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate)
        model.train()
        for _ in range(steps):
            optimiser.zero_grad()
            torch.neg(evidence(model(x[:, :-1]), y[:, :-1])).sum().backward()  # pyright: ignore[reportArgumentType]
            optimiser.step()
        model.eval()
        likelihood.eval()
        with torch.no_grad():
            predicted = likelihood(model(x[:, -1:]))
            mean, variance = predicted.mean[:, 0], predicted.variance[:, 0]
            density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[:, -1])
    return mean, variance, density


def _by_chunks(predict: Callable[[Tensor, Tensor], tuple[Tensor, ...]], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Run `predict` in float64 on the CPU, few tasks at a time, so that memory does not grow with the number of
    tasks.
    """
    inputs, targets = x.detach().to("cpu", torch.float64), y.detach().to("cpu", torch.float64)
    parts = [predict(inputs[part], targets[part]) for part in chunks(len(y), y.shape[1])]
    return tuple(torch.cat(values).to(y) for values in zip(*parts, strict=True))
