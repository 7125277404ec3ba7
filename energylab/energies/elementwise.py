r"""The element-wise energy, whose gradient step is a gated MLP with tied up and down weights.

The space is R^D, one variable ``z_i`` a position. M units each look at one coordinate ``a_m = w_mᵀ z``, and the gate,
which the history holds fixed, says how much each counts:

    E(z_i | u_i) = − Σ_m g_im Φ(w_mᵀ z_i) ,        g = ψ(V u)
    ∇E(z_i)      = − Wᵀ ( φ(W z_i) ⊙ g_i ) ,       φ = Φ'
    ∇²E(z_i) v   = − Wᵀ ( φ'(W z_i) ⊙ g_i ⊙ W v )

Source: arXiv 2605.07588. Shape suffixes: B sequences, N positions, D width, M units.
"""

import abc
import math
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from energylab.energies.base import ConditionalEnergy, check_position


class Activation(abc.ABC):
    """A potential Φ, its derivative φ, the derivative of that, and the gate ψ that goes with them."""

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


@final
class SiLU(Activation):
    """φ = SiLU, ψ = identity; the potential is ``Φ(a) = a softplus(a) + Li₂(−eᵃ) + π²/12``."""

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
        return -(self.gate_BNM * self.activation.potential(F.linear(z, self.weight_MD))).sum(-1)

    def force(self, z: Tensor) -> Tensor:
        return (self.activation.activation(F.linear(z, self.weight_MD)) * self.gate_BNM) @ self.weight_MD

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        slope_BNM = self.activation.slope(F.linear(z, self.weight_MD)) * self.gate_BNM
        return -((slope_BNM * F.linear(v, self.weight_MD)) @ self.weight_MD)

    def at(self, position: int) -> "ElementwiseEnergy":
        position = check_position(position, self.gate_BNM.shape[1])
        return ElementwiseEnergy(self.gate_BNM[:, position : position + 1], self.weight_MD, self.activation)


# Li₂(x) = w − w²/4 + Σ_n B_2n w^(2n+1)/(2n+1)!  with w = −log(1 − x) (Maximon 2003, Proc. R. Soc. A 459, eq. 4.3). At
# x = −e^(−t), t ≥ 0, |w| ≤ log 2, so each term is at most 0.012 of the one before: eight reach float64.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_DILOGARITHM = tuple(b / math.factorial(2 * n + 1) for n, b in enumerate(_BERNOULLI, start=1))
# Φ(a) = a²/4 + Σ_n c_n a^(2n+1), integrated from SiLU(a) = a/2 + (a/2) tanh(a/2) and the series of tanh
_TANH = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)
_SERIES = tuple(c / (2 ** (2 * n) * (2 * n + 1)) for n, c in enumerate(_TANH, start=1))
# the series' eight terms reach float64 up to 0.35 and float32 up to 1; outside, the closed form has stopped cancelling
_SERIES_RADIUS = {torch.float64: 0.35}
_SERIES_RADIUS_SINGLE = 1.0


def silu_potential(a: Tensor) -> Tensor:
    """``Φ(a) = ∫₀ᵃ SiLU = a softplus(a) + Li₂(−eᵃ) + π²/12``, exact to the dtype for every a, and its own gradient.

    The closed form is evaluated at −|a| and reflected, ``Φ(a) + Φ(−a) = a²/2``, so that nothing overflows. Near 0 it
    cancels, and the Taylor series takes over. Differentiates to ``SiLU(a)``, as often as wished.
    """
    return _SiLUPotential.apply(a)


class _SiLUPotential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return _silu_potential(a)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return grad * F.silu(a)


def _silu_potential(a: Tensor) -> Tensor:
    magnitude = a.abs()
    log1p = torch.exp(-magnitude).log1p()  # softplus(−|a|), also the −w of the dilogarithm
    square = log1p * log1p
    dilogarithm = torch.full_like(a, _DILOGARITHM[-1])
    for c in reversed(_DILOGARITHM[:-1]):
        dilogarithm = torch.addcmul(torch.full_like(a, c), dilogarithm, square)
    dilogarithm = -(log1p + square / 4 + dilogarithm * square * log1p)
    negative = math.pi**2 / 12 - magnitude * log1p + dilogarithm  # Φ(−|a|)
    far = torch.where(a > 0, a * a / 2 - negative, negative)

    square = a * a
    series = torch.full_like(a, _SERIES[-1])
    for c in reversed(_SERIES[:-1]):
        series = torch.addcmul(torch.full_like(a, c), series, square)
    near = square / 4 + series * square * a
    return torch.where(magnitude < _SERIES_RADIUS.get(a.dtype, _SERIES_RADIUS_SINGLE), near, far)
