"""Covariance functions of the priors: gpytorch's kernels, evaluated exactly, in float64.

Every kernel here has k(x, x) = 1; the output scale belongs to the prior.

| name | k(x, x') with r = ‖x − x'‖ / l |
|---|---|
| `rbf` | exp(−r²/2) |
| `matern12` | exp(−r) |
| `matern32` | (1 + √3 r) exp(−√3 r) |
| `matern52` | (1 + √5 r + 5r²/3) exp(−√5 r) |
| `periodic` | exp(−2 Σ_d sin²(π (x_d − x'_d)/p) / l²) |

The periodic kernel is a product over inputs (as in gpytorch): the same function of the Euclidean distance is not
positive definite for more than one input. `a*b` is the product of two of them and `a+b` their mean (so that k(x, x)
stays 1), with one length-scale for all terms; `*` binds tighter.
"""

import functools
import operator

import gpytorch
import torch
from torch import Tensor

KERNELS = ("rbf", "matern12", "matern32", "matern52", "periodic")
KERNEL_NAMES = f"{', '.join(KERNELS)}, or several of these joined by '+' or '*'"


class _DirectDistances:
    """Distances from differences. gpytorch expands (a − b)² for a matrix product, which loses 1e-9 of a distance at
    close pairs (Matern kernels feel it), and whose rounding depends on the size of the batch.
    """

    def covar_dist(self, x1, x2, diag=False, last_dim_is_batch=False, square_dist=False, **_):
        if last_dim_is_batch:
            x1, x2 = x1.mT.unsqueeze(-1), x2.mT.unsqueeze(-1)
        if x1.shape[-1] == 1:  # the usual case, at an eighth of the time
            distance = (x1 - x2.mT).abs_()
        else:
            distance = torch.cdist(x1, x2, compute_mode="donot_use_mm_for_euclid_dist")
        return distance.square() if square_dist else distance


class _RBF(_DirectDistances, gpytorch.kernels.RBFKernel):
    pass


class _Matern(_DirectDistances, gpytorch.kernels.MaternKernel):
    pass


class _Periodic(_DirectDistances, gpytorch.kernels.PeriodicKernel):
    pass


# gpytorch keeps log(exp(l) - 1) and takes it back, which costs a bit of l, another one at the end of a batch than
# inside it.
_AS_GIVEN = gpytorch.constraints.Positive(transform=torch.Tensor.clone, inv_transform=torch.Tensor.clone)  # pyright: ignore

_CONSTRUCTORS = {
    "rbf": functools.partial(_RBF, lengthscale_constraint=_AS_GIVEN),
    "matern12": functools.partial(_Matern, nu=0.5, lengthscale_constraint=_AS_GIVEN),
    "matern32": functools.partial(_Matern, nu=1.5, lengthscale_constraint=_AS_GIVEN),
    "matern52": functools.partial(_Matern, nu=2.5, lengthscale_constraint=_AS_GIVEN),
    "periodic": functools.partial(_Periodic, lengthscale_constraint=_AS_GIVEN, period_length_constraint=_AS_GIVEN),
}


def _terms(name: str) -> list[list[str]]:
    """`"rbf*periodic+matern12"` is `[["rbf", "periodic"], ["matern12"]]`."""
    return [[factor.strip() for factor in term.split("*")] for term in name.split("+")]


def is_kernel(name: object) -> bool:
    """Whether `covariance` takes this name."""
    return isinstance(name, str) and all(factor in KERNELS for term in _terms(name) for factor in term)


@torch.no_grad()
def covariance(name: str, x: Tensor, lengthscale: Tensor, period: float = 2.0) -> Tensor:
    """Covariance matrices k(x_i, x_j) of unit output scale.

    Args:
        name: a kernel, or kernels joined by `+` and `*`.
        x: inputs, (B, N, d_x), float64, on the CPU.
        lengthscale: (B,), float64; one a task.
        period: period of `periodic`, the same for every input.

    Raises: ValueError for an unknown kernel.

    Returns: (B, N, N), float64, right to 1e-10 for inputs as far from zero as 500.

    >>> x = torch.tensor([[[0.0], [1.0]]], dtype=torch.float64)
    >>> covariance("rbf", x, torch.tensor([1.0], dtype=torch.float64))[0, 0, 1].item()  # exp(-1/2)
    0.6065306597126334
    """
    if not is_kernel(name):
        raise ValueError(f"kernel: expected one of {KERNEL_NAMES}, got {name!r}")
    # All kernels are stationary. Near 500, rounding x/l would cost 1e-13/l of a distance; differences of neighbours
    # are exact.
    centred = x - x[:, :1]
    products = [
        functools.reduce(operator.mul, [_base(factor, centred, lengthscale, period) for factor in term])
        for term in _terms(name)
    ]
    return functools.reduce(operator.add, products).div_(len(products))


def _base(name: str, x: Tensor, lengthscale: Tensor, period: float) -> Tensor:
    lengthscale = lengthscale[:, None, None]
    with torch.device("cpu"):  # whatever the default device is
        kernel = _CONSTRUCTORS[name](batch_shape=x.shape[:1]).double()
    if name == "periodic":
        # gpytorch divides the squared sine by l where the usual formula, and ours, divides by l².
        kernel.initialize(lengthscale=lengthscale**2, period_length=torch.full_like(lengthscale, period))
    else:
        kernel.initialize(lengthscale=lengthscale)
    return kernel.forward(x, x)
