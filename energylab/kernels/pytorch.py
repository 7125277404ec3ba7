"""The interaction energy's force in fewer, larger PyTorch operations: fast on a CPU, runs anywhere.

Two forms of the same force, and a choice between them by what they cost:

* Without a diagonal it is tied attention, ``W_Qᵀ softmax(q kᵀ/τ) k``, and PyTorch's fused attention computes it.
* With a diagonal, ``b_j^k = A_k u_j`` is formed once for all T steps. A step is then two matrix products, ``zᵀ b_j^k`` and
  ``Σ_kj p_ij^k b_j^k``, over all heads at once, whatever ``A_k`` is made of. This trades the projections of z, which are
  gone, for a contraction over D instead of d_h in each head; it pays while the sequence is not much longer than D.

Shape suffixes: B sequences, N positions, H heads, K rank of a head, D width.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from energylab.energies import (
    ConditionalEnergy,
    InteractionEnergy,
    InteractionTerm,
    LowRankTerm,
    SharedDiagonalTerm,
)
from energylab.energies.interaction import log_sum_exp

ABSORBED_BREAK_EVEN = 1.5
"""How many times the multiplications of the explicit form the absorbed one may spend and still be faster on a CPU: its
products are larger and it has fewer passes over memory. Measured at (N, D, H) = (48, 64, 4), (64, 128, 4) and
(256, 256, 8), where the ratios are 1.2, 1.0 and 2.7."""


def fast_interaction(energy: InteractionEnergy, causal: bool = True) -> ConditionalEnergy:
    """The same energy with the fastest ``force`` that plain PyTorch has for it."""
    low_rank, *others = energy.terms
    if energy.hidden_NJ is None or not isinstance(low_rank, LowRankTerm):
        return energy
    if not others:
        return FusedAttention(energy, low_rank) if causal else energy
    if low_rank.rotary is None and _absorbing_pays(low_rank, others, width=low_rank.query_HKD.shape[-1]):
        return AbsorbedInteraction(energy, energy.hidden_NJ)
    return energy


class FastInteraction(ConditionalEnergy):
    """An ``InteractionEnergy`` with another ``force``. Curvature and single positions are the reference's, and so is the
    value where it is differentiated.
    """

    def __init__(self, reference: InteractionEnergy):
        self.reference = reference

    def value(self, z: Tensor) -> Tensor:
        return self.reference.value(z)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        return self.reference.hvp(z, v)

    def at(self, position: int) -> InteractionEnergy:
        return self.reference.at(position)


@final
class FusedAttention(FastInteraction):
    """Low rank alone, by ``scaled_dot_product_attention(q, k, k)``. A second derivative raises RuntimeError."""

    def __init__(self, reference: InteractionEnergy, low_rank: LowRankTerm):
        super().__init__(reference)
        self.low_rank = low_rank
        self.k_BHNK = once_differentiable(low_rank.k_BHJK)
        self.value_BHNK = self.k_BHNK
        if reference.sign_H is not None:
            self.value_BHNK = self.k_BHNK * reference.sign_H[:, None, None]

    def force(self, z: Tensor) -> Tensor:
        q_BHNK = once_differentiable(self.low_rank.queries(z))
        o_BHNK = F.scaled_dot_product_attention(
            q_BHNK, self.k_BHNK, self.value_BHNK, is_causal=True, scale=1 / self.reference.temperature
        )
        return self.low_rank.read_out_heads(o_BHNK)

    def value(self, z: Tensor) -> Tensor:
        return super().value(z) if z.is_cuda or torch.is_grad_enabled() else self.force_and_value(z)[1]

    def force_and_value(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """On a CPU the fused attention computes the log-sum-exp anyway, and the operation under it returns it."""
        if z.is_cuda or torch.is_grad_enabled():
            return super().force_and_value(z)
        o_BHNK, lse_BHN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self.low_rank.queries(z),
            self.k_BHNK,
            self.value_BHNK,
            is_causal=True,
            scale=1 / self.reference.temperature,
        )
        return self.low_rank.read_out_heads(o_BHNK), self.reference.over_heads(lse_BHN).to(z.dtype)


@final
class AbsorbedInteraction(FastInteraction):
    """Terms that do not depend on the position i, by ``b_j^k = A_k u_j``, formed once."""

    def __init__(self, reference: InteractionEnergy, hidden_NJ: Tensor):
        super().__init__(reference)
        parts = [term.absorbed() for term in reference.terms]
        b_BHND = sum(part for part in parts if part is not None)
        assert isinstance(b_BHND, Tensor)
        self.heads = b_BHND.shape[1]
        self.b_BCD = b_BHND.flatten(1, 2)  # C = H·N: all heads' keys, one below the other
        self.value_BCD = self.b_BCD
        if reference.sign_H is not None:
            self.value_BCD = (b_BHND * reference.sign_H[:, None, None]).flatten(1, 2)
        mask_NJ = torch.zeros(hidden_NJ.shape, dtype=b_BHND.dtype, device=hidden_NJ.device)
        mask_NJ.masked_fill_(hidden_NJ, -torch.inf)
        self.mask_NC = mask_NJ.repeat(1, self.heads)

    def force(self, z: Tensor) -> Tensor:
        return self._read_out(self._logits_and_weights(z)[1])

    def value(self, z: Tensor) -> Tensor:
        return super().value(z) if torch.is_grad_enabled() else self._value(*self._logits_and_weights(z))

    def force_and_value(self, z: Tensor) -> tuple[Tensor, Tensor]:
        logits_BNHJ, p_BNHJ = self._logits_and_weights(z)
        return self._read_out(p_BNHJ), self._value(logits_BNHJ, p_BNHJ)

    def _logits_and_weights(self, z: Tensor) -> tuple[Tensor, Tensor]:
        logits_BNC = torch.baddbmm(self.mask_NC, z, self.b_BCD.mT, alpha=1 / self.reference.temperature)
        logits_BNHJ = logits_BNC.unflatten(-1, (self.heads, -1))
        return logits_BNHJ, logits_BNHJ.softmax(-1)

    def _read_out(self, p_BNHJ: Tensor) -> Tensor:
        return p_BNHJ.flatten(2) @ self.value_BCD

    def _value(self, logits_BNHJ: Tensor, p_BNHJ: Tensor) -> Tensor:
        return self.reference.over_heads(log_sum_exp(logits_BNHJ, p_BNHJ).mT)


def _absorbing_pays(low_rank: LowRankTerm, others: Sequence[InteractionTerm], width: int) -> bool:
    heads, length, rank = low_rank.k_BHJK.shape[1:]
    # multiplications of one step at one position, halved: projections and their transposes, low rank, diagonals
    explicit = heads * rank * width + heads * length * rank
    for term in others:
        explicit += length * width * (1 if isinstance(term, SharedDiagonalTerm) else heads)
    return heads * length * width <= ABSORBED_BREAK_EVEN * explicit


def once_differentiable(x: Tensor) -> Tensor:
    """x itself, but a gradient that came through here refuses to be differentiated again, in one clear line."""
    return _OnceDifferentiable.apply(x)


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Refuse.apply(grad)


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError('second derivative: this fast path has only a first one; use backend="reference"')
