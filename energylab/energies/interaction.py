r"""The interaction energy, whose gradient step is causal multi-head attention with tied weights.

The space is R^D, one variable ``z_i`` a position. Each head k measures how well ``z_i`` agrees with each vector of its
history through a bilinear form ``A_k``, and the energy is minus the log-sum-exp of these agreements:

    E(z_i | u) = − τ Σ_k σ_k log Σ_{j≤i} exp( z_iᵀ A_k u_j / τ )
    ∇E(z_i)    = − Σ_k σ_k Σ_{j≤i} p_ij^k A_k u_j ,        p_i^k = softmax_j( z_iᵀ A_k u_j / τ )
    ∇²E(z_i) v = − 1/τ Σ_k σ_k Σ_j p_ij^k (s_ij^k − Σ_l p_il^k s_il^k) A_k u_j ,        s_ij^k = vᵀ A_k u_j

``A_k`` is a sum of terms (low rank, diagonal). A term knows two linear maps, ``z ↦ zᵀ A_k u_j`` and
``w ↦ Σ_k Σ_j w_ij^k A_k u_j``; value, gradient and curvature follow from these alone, so a new form of ``A_k`` is a new
term. With all signs σ_k = 1, which is the source's energy, E is concave in z: it lies below its tangents, which is why
every step of the plain gradient rule lowers it. A head with σ_k = −1 repels: z moves away from what it looks for.

Source: arXiv 2605.07588, for the energy and the diagonal-plus-low-rank form; Ramsauer et al. 2021 (arXiv 2008.02217)
for attention as a step on a log-sum-exp energy. The signs are ours.

Shape suffixes: B sequences, N positions that are moved, J positions of the history, H heads, K rank of a head
(``head_dim``), D width.
"""

import abc
from typing import final

import torch
from torch import Tensor

from energylab.energies.base import ConditionalEnergy, check_position
from energylab.energies.rotary import RotaryPositions


class InteractionTerm(abc.ABC):
    """One summand of ``A_k``, conditioned on the history."""

    @abc.abstractmethod
    def logits(self, z_BND: Tensor) -> Tensor:
        """``zᵀ A_k u_j``, broadcastable to (B, H, N, J)."""

    @abc.abstractmethod
    def read_out(self, weight_BHNJ: Tensor) -> Tensor:
        """``Σ_k Σ_j w_ij^k A_k u_j``, (B, N, D)."""

    def absorbed(self) -> Tensor | None:
        """``A_k u_j`` itself, broadcastable to (B, H, J, D); None where it depends on the position i as well."""
        return None

    @abc.abstractmethod
    def at(self, position: int) -> "InteractionTerm":
        """The term for points that all stand at ``position`` and see the history up to it."""


@final
class LowRankTerm(InteractionTerm):
    """``A_k = W_Qkᵀ W_Kk``, with rotary positions ``A_k = W_Qkᵀ R_iᵀ R_j W_Kk``; both weights are (H, K, D)."""

    def __init__(self, u_BJD: Tensor, query_HKD: Tensor, key_HKD: Tensor, rotary: RotaryPositions | None):
        self.query_HKD = query_HKD
        self.rotary = rotary
        self.query_rotary = rotary
        k_BHJK = split_heads(u_BJD, key_HKD)
        self.k_BHJK = rotary.rotate(k_BHJK) if rotary else k_BHJK

    def logits(self, z_BND: Tensor) -> Tensor:
        return self.queries(z_BND) @ self.k_BHJK.mT

    def read_out(self, weight_BHNJ: Tensor) -> Tensor:
        return self.read_out_heads(weight_BHNJ @ self.k_BHJK)

    def absorbed(self) -> Tensor | None:
        return None if self.rotary else self.k_BHJK @ self.query_HKD

    def queries(self, z_BND: Tensor) -> Tensor:
        """``R_i W_Qk z_i``, (B, H, N, K)."""
        q_BHNK = split_heads(z_BND, self.query_HKD)
        return self.query_rotary.rotate(q_BHNK) if self.query_rotary else q_BHNK

    def read_out_heads(self, o_BHNK: Tensor) -> Tensor:
        """``Σ_k W_Qkᵀ R_iᵀ o_ik``, (B, N, D). Without turning back, it would not be the gradient."""
        return merge_heads(self.query_rotary.rotate_back(o_BHNK) if self.query_rotary else o_BHNK, self.query_HKD)

    def at(self, position: int) -> "LowRankTerm":
        term = object.__new__(LowRankTerm)
        term.query_HKD, term.rotary = self.query_HKD, self.rotary
        term.query_rotary = self.rotary.at(position) if self.rotary else None
        term.k_BHJK = self.k_BHJK[:, :, : position + 1]
        return term


@final
class SharedDiagonalTerm(InteractionTerm):
    """``A_k = diag(d)`` for every head, d of shape (D,): one set of logits and one read-out serve all heads."""

    def __init__(self, u_BJD: Tensor, diagonal_D: Tensor):
        self.u_BJD, self.diagonal_D = u_BJD, diagonal_D

    def logits(self, z_BND: Tensor) -> Tensor:
        return ((z_BND * self.diagonal_D) @ self.u_BJD.mT).unsqueeze(1)

    def read_out(self, weight_BHNJ: Tensor) -> Tensor:
        return (weight_BHNJ.sum(1) @ self.u_BJD) * self.diagonal_D

    def absorbed(self) -> Tensor:
        return (self.u_BJD * self.diagonal_D).unsqueeze(1)

    def at(self, position: int) -> "SharedDiagonalTerm":
        return SharedDiagonalTerm(self.u_BJD[:, : position + 1], self.diagonal_D)


@final
class PerHeadDiagonalTerm(InteractionTerm):
    """``A_k = diag(d_k)``, d of shape (H, D)."""

    def __init__(self, u_BJD: Tensor, diagonal_HD: Tensor):
        self.u_BJD, self.diagonal_HD = u_BJD, diagonal_HD

    def logits(self, z_BND: Tensor) -> Tensor:
        return (z_BND.unsqueeze(1) * self.diagonal_HD[:, None]) @ self.u_BJD.mT.unsqueeze(1)

    def read_out(self, weight_BHNJ: Tensor) -> Tensor:
        return ((weight_BHNJ @ self.u_BJD.unsqueeze(1)) * self.diagonal_HD[:, None]).sum(1)

    def absorbed(self) -> Tensor:
        return self.u_BJD.unsqueeze(1) * self.diagonal_HD[:, None]

    def at(self, position: int) -> "PerHeadDiagonalTerm":
        return PerHeadDiagonalTerm(self.u_BJD[:, : position + 1], self.diagonal_HD)


@final
class InteractionEnergy(ConditionalEnergy):
    """``E(z_i | u) = − τ Σ_k σ_k log Σ_{j≤i} exp( z_iᵀ A_k u_j / τ )``, with ``A_k`` the sum of ``terms``.

    ``hidden_NJ`` is true where position i must not see position j; None where all of the history is visible.
    ``sign_H`` holds σ, 1 where a head attracts and −1 where it repels; None where all attract.
    """

    def __init__(
        self,
        terms: tuple[InteractionTerm, ...],
        temperature: float,
        hidden_NJ: Tensor | None,
        sign_H: Tensor | None = None,
    ):
        self.terms, self.temperature, self.hidden_NJ, self.sign_H = terms, temperature, hidden_NJ, sign_H

    def logits(self, z_BND: Tensor) -> Tensor:
        """``zᵀ A_k u_j / τ``, (B, H, N, J), minus infinity where hidden."""
        logits_BHNJ = self._bilinear(z_BND) / self.temperature
        return logits_BHNJ if self.hidden_NJ is None else logits_BHNJ.masked_fill(self.hidden_NJ, -torch.inf)

    def value(self, z: Tensor) -> Tensor:
        return self.over_heads(log_sum_exp(self.logits(z)))

    def force(self, z: Tensor) -> Tensor:
        return self._read_out(self.logits(z).softmax(-1))

    def force_and_value(self, z: Tensor) -> tuple[Tensor, Tensor]:
        logits_BHNJ = self.logits(z)
        p_BHNJ = logits_BHNJ.softmax(-1)
        return self._read_out(p_BHNJ), self.over_heads(log_sum_exp(logits_BHNJ, p_BHNJ))

    def over_heads(self, lse_BHN: Tensor) -> Tensor:
        """``− τ Σ_k σ_k lse_k``, (B, N)."""
        signed_BHN = lse_BHN if self.sign_H is None else lse_BHN * self.sign_H[:, None]
        return -self.temperature * signed_BHN.sum(1)

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        p_BHNJ = self.logits(z).softmax(-1)
        ps_BHNJ = p_BHNJ * self._bilinear(v)
        return -self._read_out(ps_BHNJ - p_BHNJ * ps_BHNJ.sum(-1, keepdim=True)) / self.temperature

    def at(self, position: int) -> "InteractionEnergy":
        length = 1 if self.hidden_NJ is None else self.hidden_NJ.shape[0]
        terms = tuple(term.at(check_position(position, length)) for term in self.terms)
        hidden_1J = None if self.hidden_NJ is None else self.hidden_NJ[position : position + 1, : position + 1]
        return InteractionEnergy(terms, self.temperature, hidden_1J, self.sign_H)

    def _bilinear(self, z_BND: Tensor) -> Tensor:
        first, *others = (term.logits(z_BND) for term in self.terms)
        for logits in others:
            first = first + logits
        return first

    def _read_out(self, weight_BHNJ: Tensor) -> Tensor:
        if self.sign_H is not None:
            weight_BHNJ = weight_BHNJ * self.sign_H[:, None, None]
        first, *others = (term.read_out(weight_BHNJ) for term in self.terms)
        for update_BND in others:
            first = first + update_BND
        return first


def log_sum_exp(logits: Tensor, p: Tensor | None = None) -> Tensor:
    """``log Σ_j exp s_j`` over the last axis; ``p`` is the softmax of the logits, where it is at hand.

    Where nothing is differentiated, by the largest term, ``s_j − log p_j``, which cannot underflow: the softmax is
    needed anyway, and two maxima are cheaper than another exponential.
    """
    if torch.is_grad_enabled():
        return logits.logsumexp(-1)
    p = logits.softmax(-1) if p is None else p
    return logits.amax(-1) - p.amax(-1).log()


def hidden_future(length: int, device: torch.device) -> Tensor:
    """The causal mask, (N, N): true where j > i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def hidden_queries(length: int, device: torch.device) -> Tensor:
    """For tokens query, pair, query, pair, ...: true where j > i, or where j is the query of another pair."""
    others = ~torch.eye(length, dtype=torch.bool, device=device)
    others[:, 1::2] = False
    return hidden_future(length, device) | others


MASKS = {"causal": hidden_future, "independent": hidden_queries}
"""Which positions a position must not see; in each, none of the future."""


def split_heads(x_BND: Tensor, weight_HKD: Tensor) -> Tensor:
    """``W_k x`` for every head, (B, H, N, K), as one matrix product."""
    heads, rank, _ = weight_HKD.shape
    return torch.nn.functional.linear(x_BND, weight_HKD.flatten(0, 1)).unflatten(-1, (heads, rank)).transpose(1, 2)


def merge_heads(o_BHNK: Tensor, weight_HKD: Tensor) -> Tensor:
    """``Σ_k W_kᵀ o_k``, (B, N, D), as one matrix product."""
    return o_BHNK.transpose(1, 2).flatten(2) @ weight_HKD.flatten(0, 1)
