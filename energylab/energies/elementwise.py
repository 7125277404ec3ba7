r"""The element-wise energy, whose gradient step is a gated MLP with tied up and down weights.

The space is R^D, one variable ``z_i`` a position. M units each look at one coordinate ``a_m = w_mᵀ z``, and the gate,
which the history holds fixed, says how much each counts:

    E(z_i | u_i) = − Σ_m g_im Φ(w_mᵀ z_i) ,        g = ψ(V u)
    ∇E(z_i)      = − Wᵀ ( φ(W z_i) ⊙ g_i ) ,       φ = Φ'
    ∇²E(z_i) v   = − Wᵀ ( φ'(W z_i) ⊙ g_i ⊙ W v )

Source: arXiv 2605.07588. Shape suffixes: B sequences, N positions, D width, M units.
"""

import abc
import functools
import math
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from energylab.energies.base import ConditionalEnergy, check_position


class Activation(abc.ABC):
    """A potential Φ, its derivative φ, the derivative of that, and the gate ψ that goes with them.

    |φ(a)| ≤ |a| is assumed by the bound on the step size.
    """

    @abc.abstractmethod
    def potential(self, a: Tensor) -> Tensor:
        """``Φ(a)``, with Φ(0) = 0."""

    @abc.abstractmethod
    def activation(self, a: Tensor) -> Tensor:
        """``φ(a) = Φ'(a)``."""

    @abc.abstractmethod
    def slope(self, a: Tensor) -> Tensor:
        """``φ'(a)``."""

    @abc.abstractmethod
    def gate(self, b: Tensor) -> Tensor:
        """``ψ(b)``."""

    slope_range: tuple[float, float]
    """The smallest and the largest value of φ', rounded outwards."""


@final
class SiLU(Activation):
    """φ = SiLU, ψ = identity; the potential is ``Φ(a) = a softplus(a) + Li₂(−eᵃ) + π²/12``."""

    slope_range = (-0.0998394, 1.0998394)  # at a = ∓2.39935728052, where a tanh(a/2) = 2

    def potential(self, a: Tensor) -> Tensor:
        return silu_potential(a)

    def activation(self, a: Tensor) -> Tensor:
        return F.silu(a)

    def slope(self, a: Tensor) -> Tensor:
        sigmoid = a.sigmoid()
        return sigmoid * (1 + a * (1 - sigmoid))

    def gate(self, b: Tensor) -> Tensor:
        return b


@final
class Quadratic(Activation):
    """φ = identity, ``Φ(a) = a²/2``, ψ = SiLU: the other reading of a gated MLP with tied weights."""

    slope_range = (1.0, 1.0)

    def potential(self, a: Tensor) -> Tensor:
        return a.square() / 2

    def activation(self, a: Tensor) -> Tensor:
        return a

    def slope(self, a: Tensor) -> Tensor:
        return torch.ones_like(a)

    def gate(self, b: Tensor) -> Tensor:
        return F.silu(b)


@final
class ElementwiseEnergy(ConditionalEnergy):
    """``E(z_i | u_i) = − Σ_m g_im Φ(w_mᵀ z_i)``, with ``gate_BNM`` computed from the history and held fixed."""

    def __init__(self, gate_BNM: Tensor, weight_MD: Tensor, activation: Activation):
        self.gate_BNM, self.weight_MD, self.activation = gate_BNM, weight_MD, activation

    def value(self, z: Tensor) -> Tensor:
        return self._value(F.linear(z, self.weight_MD))

    def force(self, z: Tensor) -> Tensor:
        return self._force(F.linear(z, self.weight_MD))

    def force_and_value(self, z: Tensor) -> tuple[Tensor, Tensor]:
        a_BNM = F.linear(z, self.weight_MD)
        return self._force(a_BNM), self._value(a_BNM)

    def _value(self, a_BNM: Tensor) -> Tensor:
        return -torch.linalg.vecdot(self.gate_BNM, self.activation.potential(a_BNM))

    def _force(self, a_BNM: Tensor) -> Tensor:
        return (self.activation.activation(a_BNM) * self.gate_BNM) @ self.weight_MD

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        slope_BNM = self.activation.slope(F.linear(z, self.weight_MD)) * self.gate_BNM
        return -((slope_BNM * F.linear(v, self.weight_MD)) @ self.weight_MD)

    def at(self, position: int) -> "ElementwiseEnergy":
        position = check_position(position, self.gate_BNM.shape[1])
        return ElementwiseEnergy(self.gate_BNM[:, position : position + 1], self.weight_MD, self.activation)


# Li₂(x) = w − w²/4 + Σ_n B_2n w^(2n+1)/(2n+1)!  with w = −log(1 − x) (Maximon 2003, Proc. R. Soc. A 459, eq. 4.3). At
# x = −e^(−t), t ≥ 0, |w| ≤ log 2, so each term is at most 0.012 of the one before.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_DILOGARITHM = tuple(b / math.factorial(2 * n + 1) for n, b in enumerate(_BERNOULLI, start=1))
# Φ(a) = a²/4 + Σ_n c_n a^(2n+1), integrated from SiLU(a) = a/2 + (a/2) tanh(a/2) and the series of tanh
_TANH = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)
_SERIES = tuple(c / (2 ** (2 * n) * (2 * n + 1)) for n, c in enumerate(_TANH, start=1))
# How many terms of the two reach the dtype, and up to which |a| the second is used: beyond, the closed form no longer
# cancels by more than the dtype forgives.
_TERMS = {torch.float64: (8, 8, 0.35)}
_TERMS_SINGLE = (4, 8, 1.0)
_CHUNK = 1 << 15  # elements that stay in a core's cache through some thirty passes


def silu_potential(a: Tensor) -> Tensor:
    """``Φ(a) = ∫₀ᵃ SiLU = a softplus(a) + Li₂(−eᵃ) + π²/12``, for every a, and its own gradient.

    The closed form is evaluated at −|a| and reflected, ``Φ(a) + Φ(−a) = a²/2``, so that nothing overflows. Near 0 it
    cancels, and the Taylor series takes over. In float32 on a CPU a table of tangents takes the place of both. The relative
    error is below 2e-14 in float64 and 1e-6 in float32; narrower types are computed in float32. Differentiates to
    ``SiLU(a)``, as often as wished.
    """
    return _SiLUPotential.apply(a)


class _SiLUPotential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        wide = a if a.dtype == torch.float64 else a.float()
        if a.is_cuda or torch.compiler.is_compiling():
            return _silu_potential(wide).to(a.dtype)
        if wide.dtype == torch.float32 and a.numel() and not wide.abs().amax() > _TABLE_RANGE:
            return _silu_potential_by_table(wide).to(a.dtype)
        return torch.cat([_silu_potential(part) for part in wide.flatten().split(_CHUNK)]).view(a.shape).to(a.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (a,) = ctx.saved_tensors
        return grad * F.silu(a)


_TABLE_RANGE, _TABLE_CELLS = 20.0, 10_000


@functools.cache
def _table() -> Tensor:
    """``Φ(a)/a²``, a smooth function, by its tangent c₀ + c₁ a at the middle of each cell of (−20, 20): (1, 2, 1, cells)."""
    with torch.inference_mode(False):
        cells = torch.arange(_TABLE_CELLS, dtype=torch.float64, device="cpu")
        a = ((cells + 0.5) * (2 / _TABLE_CELLS) - 1) * _TABLE_RANGE  # never 0
        potential = _silu_potential(a)
        # (Φ/a²)' = (a φ − 2 Φ)/a³; near 0, where that cancels, from the series of Φ
        slope = torch.where(a.abs() < 0.1, 1 / 12 - a**2 / 80 + a**4 / 672, (a * F.silu(a) - 2 * potential) / a**3)
        return torch.stack([potential / a**2 - slope * a, slope]).float().view(1, 2, 1, -1)


def _silu_potential_by_table(a: Tensor) -> Tensor:
    """For |a| ≤ 20, float32: four passes instead of thirty. The relative error is below 1e-6."""
    batch = a.shape[0] if a.ndim > 1 else 1  # what the look-up divides between threads
    position = (a * (1 / _TABLE_RANGE)).reshape(batch, 1, -1, 1).expand(-1, -1, -1, 2)
    # one vectorised look-up of both columns: the table is an image of one row, so the second coordinate does not matter
    table = _table().expand(batch, -1, -1, -1)
    columns = F.grid_sample(table, position, mode="nearest", padding_mode="border", align_corners=False)
    intercept, slope = (column.view(a.shape) for column in columns.flatten(1).chunk(2, 1))
    return torch.addcmul(intercept, slope, a).mul_(a).mul_(a)


def _silu_potential(a: Tensor) -> Tensor:
    terms, near_terms, radius = _TERMS.get(a.dtype, _TERMS_SINGLE)
    magnitude = a.abs()
    log1p = torch.exp(-magnitude).log1p_()  # softplus(−|a|), also the −w of the dilogarithm
    square = log1p * log1p
    dilogarithm = _horner(_DILOGARITHM[:terms], square).mul_(square).add_(1).mul_(log1p).add_(square, alpha=0.25)
    negative = dilogarithm.neg_().addcmul_(magnitude, log1p, value=-1).add_(math.pi**2 / 12)  # Φ(−|a|)
    square = a * a
    far = torch.where(a > 0, square / 2 - negative, negative)
    near = _horner(_SERIES[:near_terms], square).mul_(a).add_(0.25).mul_(square)
    return torch.where(magnitude < radius, near, far)


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """``Σ_n c_n xⁿ``."""
    *others, last = coefficients
    value = torch.full_like(x, last)
    for c in reversed(others):
        value.mul_(x).add_(c)
    return value
