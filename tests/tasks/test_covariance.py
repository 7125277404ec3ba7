"""Covariances against formulas written out in extended precision, gpytorch and scikit-learn."""

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import ExpSineSquared

from energylab.tasks.covariance import KERNELS, covariance


def formula(name: str, x: np.ndarray, lengthscale: float, period: float) -> np.ndarray:
    """One covariance matrix of x (N, d_x), in extended precision."""
    difference = x.astype(np.longdouble)[:, None] - x.astype(np.longdouble)[None]
    lengthscale = np.longdouble(lengthscale)
    r = np.sqrt((difference**2).sum(-1)) / lengthscale
    root3, root5, pi = np.sqrt(np.longdouble(3)), np.sqrt(np.longdouble(5)), 4 * np.arctan(np.longdouble(1))
    return {
        "rbf": lambda: np.exp(-(r**2) / 2),
        "matern12": lambda: np.exp(-r),
        "matern32": lambda: (1 + root3 * r) * np.exp(-root3 * r),
        "matern52": lambda: (1 + root5 * r + 5 * r**2 / 3) * np.exp(-root5 * r),
        "periodic": lambda: np.exp(-2 * (np.sin(pi * difference / period) ** 2).sum(-1) / lengthscale**2),
    }[name]()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("input_dim", [1, 3, 20])
@pytest.mark.parametrize("offset", [0.0, 500.0])
def test_right_to_1e_10(kernel, input_dim, offset):
    generator = np.random.default_rng(0)
    x = offset + generator.uniform(-2, 2, (3, 30, input_dim))
    x[:, 1] = x[:, 0] + 1e-7  # close pairs are where squared distances lose digits
    x[:, 3] = x[:, 2]
    lengthscale = np.array([0.1, 0.37, 1.0]) * np.sqrt(input_dim)
    computed = covariance(kernel, torch.from_numpy(x), torch.from_numpy(lengthscale), period=1.7)
    assert computed.dtype == torch.float64
    for task in range(3):
        expected = formula(kernel, x[task], lengthscale[task], 1.7)
        assert np.abs(computed[task].numpy() - expected).max() < 1e-13
    assert torch.equal(computed.diagonal(dim1=-2, dim2=-1), torch.ones(3, 30, dtype=torch.float64))
    assert torch.equal(computed, computed.mT)


def test_periodic_at_a_quarter_period_and_against_scikit_learn():
    x = torch.tensor([[[0.0], [0.5], [1.3]]], dtype=torch.float64)
    computed = covariance("periodic", x, torch.tensor([0.7], dtype=torch.float64), period=2.0)[0]
    assert computed[0, 1].item() == pytest.approx(np.exp(-2 * 0.5 / 0.49), abs=1e-15)  # sin²(π/4) = 1/2
    assert np.allclose(computed, ExpSineSquared(length_scale=0.7, periodicity=2.0)(x[0].numpy()), rtol=0, atol=1e-14)


def test_agrees_with_gpytorch_as_its_users_call_it():
    x = torch.linspace(-2, 2, 15, dtype=torch.float64).reshape(1, -1, 1)
    for kernel, theirs in [
        ("rbf", gpytorch.kernels.RBFKernel()),
        ("matern12", gpytorch.kernels.MaternKernel(nu=0.5)),
        ("matern32", gpytorch.kernels.MaternKernel(nu=1.5)),
        ("matern52", gpytorch.kernels.MaternKernel(nu=2.5)),
    ]:
        theirs = theirs.double()
        theirs.lengthscale = torch.tensor(0.4, dtype=torch.float64)
        computed = covariance(kernel, x, torch.tensor([0.4], dtype=torch.float64))
        with torch.no_grad():
            assert torch.allclose(computed, theirs(x).to_dense(), rtol=0, atol=1e-7)


def test_products_and_sums():
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(1, -1, 1)
    lengthscale = torch.tensor([0.6], dtype=torch.float64)
    rbf, periodic, matern = (covariance(name, x, lengthscale) for name in ("rbf", "periodic", "matern12"))
    assert torch.equal(covariance("rbf*periodic", x, lengthscale), rbf * periodic)
    mean = (rbf * periodic + matern) / 2
    assert torch.allclose(covariance("rbf * periodic + matern12", x, lengthscale), mean, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["cubic", "rbf+", "rbf*cubic", ""])
def test_an_unknown_kernel_is_named(name):
    x = torch.zeros(1, 2, 1, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"kernel: expected one of rbf, .*got '" + name.replace("*", r"\*").replace("+", r"\+")
    ):
        covariance(name, x, torch.ones(1, dtype=torch.float64))
