"""Causal multi-head attention as descent on the interaction energy."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from energylab.energies import (
    ConditionalEnergy,
    InteractionEnergy,
    InteractionTerm,
    LowRankTerm,
    PerHeadDiagonalTerm,
    RotaryPositions,
    SharedDiagonalTerm,
)
from energylab.energies.interaction import MASKS, split_heads
from energylab.kernels.pytorch import fast_interaction
from energylab.layers.base import EnergyLayer, check_choice, check_positive, operand_dtype
from energylab.layers.descent import Descent, norm

DIAGONALS = ("none", "shared", "per_head")


@final
class CEMAttention(EnergyLayer):
    r"""T steps down ``E(z_i | u) = − τ Σ_k σ_k log Σ_{j≤i} exp( z_iᵀ A_k u_j / τ )``, with u = norm(h) and z = norm(x).

    ``A_k = diag(d_k) + W_Qkᵀ W_Kk``, and all σ_k = 1 unless heads repel. With T = 1, P = I, η = 1 and no diagonal the
    layer is h plus causal multi-head attention with ``W_V = W_K`` and ``W_O = W_Qᵀ``: 2·H·d_h·D weights, half of ordinary
    attention's.

    Args:
        width: D.
        heads: H.
        recursions: T, the steps taken; more of them add no parameters.
        head_dim: d_h, the rank of each head's interaction; D/H by default.
        diagonal: ``none``, ``shared`` (one d for all heads, D parameters) or ``per_head`` (H·D parameters).
        temperature: τ; sqrt(d_h) by default.
        rotary: turn queries and keys by their position; needs an even head_dim. The diagonal is not turned.
        preconditioner, rank: P and the rank of its low-rank part.
        step_size: the initial η, a number or one number a step; 1/T by default. Learned.
        update_rule: ``gradient``, ``heavy_ball`` or ``nesterov``.
        history: ``fixed``, or ``refreshed``: u_t = norm(x_t) at each step, the looped reading.
        repelling_heads: so many of the heads, the last ones, have σ_k = −1: a step moves z away from what they look for,
            where the others move it towards. No parameters. Not in the source; docs/findings.md says why one wants it.
        backend: ``reference``, elementary operations, differentiable twice; ``torch``, fused PyTorch; ``triton``, on a
            GPU, one kernel for all T steps where it fits (the gradient rule, a fixed history, small widths), else kernels
            for one step; or ``auto``: ``triton`` where it can run, else ``torch``.

    Parameters: ``query_weight`` and ``key_weight`` (H, d_h, D), ``diagonal`` (D,) or (H, D) or None, ``step_size``.

    For the gradient rule with P = I, a fixed history and no head that repels, every η > 0 lowers the energy at every
    position and step, because E is concave in z and normalising cannot turn z away from the step.

    Raises ValueError for a setting out of range. Source: arXiv 2605.07588.

    >>> layer = CEMAttention(width=64, heads=4, recursions=2, diagonal="shared")
    >>> h = torch.randn(8, 24, 64)
    >>> layer(h).shape, layer.trace(h).energy.shape
    (torch.Size([8, 24, 64]), torch.Size([3, 8, 24]))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        recursions: int = 1,
        head_dim: int | None = None,
        diagonal: str = "none",
        temperature: float | None = None,
        rotary: bool = False,
        preconditioner: str = "none",
        rank: int = 8,
        step_size: float | Sequence[float] | None = None,
        update_rule: str = "gradient",
        history: str = "fixed",
        backend: str = "auto",
        mask: str = "causal",
        repelling_heads: int = 0,
    ):
        super().__init__(width, recursions, preconditioner, rank, step_size, update_rule, history, backend)
        self.heads = check_positive("heads", heads)
        number = isinstance(repelling_heads, int) and not isinstance(repelling_heads, bool)
        if not number or not 0 <= repelling_heads <= heads:
            raise ValueError(f"repelling_heads: expected 0 to {heads}, the number of heads, got {repelling_heads!r}")
        self.repelling_heads = repelling_heads
        sign = torch.ones(heads)
        sign[heads - repelling_heads :] = -1
        self.sign: Tensor
        self.register_buffer("sign", sign, persistent=False)
        self.head_dim = resolve_head_dim(width, heads, head_dim, rotary)
        number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if temperature is not None and not (number and 0 < temperature < math.inf):
            raise ValueError(f"temperature: expected a positive number, got {temperature!r}")
        self.temperature = math.sqrt(self.head_dim) if temperature is None else float(temperature)
        self.rotary = rotary
        self.mask = check_choice("mask", mask, tuple(MASKS))
        self.query_weight = nn.Parameter(torch.randn(heads, self.head_dim, width) / math.sqrt(width))
        self.key_weight = nn.Parameter(torch.randn(heads, self.head_dim, width) / math.sqrt(width))
        check_choice("diagonal", diagonal, DIAGONALS)
        self.diagonal: nn.Parameter | None = None
        if diagonal != "none":
            self.diagonal = nn.Parameter(torch.zeros((width,) if diagonal == "shared" else (heads, width)))

    def _condition(self, u: Tensor) -> ConditionalEnergy:
        length, by_kernel = u.shape[1], self._steps_by_kernel(u)
        rotary = None
        if self.rotary:
            angles = torch.promote_types(u.dtype, torch.float32) if by_kernel else u.dtype
            rotary = RotaryPositions(torch.arange(length, device=u.device), self.head_dim, angles)
        low_rank = LowRankTerm(u, self.query_weight, self.key_weight, rotary)
        terms: list[InteractionTerm] = [low_rank]
        if self.diagonal is not None:
            term = SharedDiagonalTerm if self.diagonal.ndim == 1 else PerHeadDiagonalTerm
            terms.append(term(u, self.diagonal))
        sign = self.sign if self.repelling_heads else None
        energy = InteractionEnergy(tuple(terms), self.temperature, MASKS[self.mask](length, u.device), sign)
        if by_kernel:
            from energylab.kernels.interaction_step import InteractionByStep

            return InteractionByStep(energy, low_rank, self.diagonal, u, self.mask, operand_dtype(u))
        return energy if self.backend == "reference" else fast_interaction(energy, self.mask == "causal")

    def _why_no_step(self) -> str | None:
        from energylab.kernels.interaction_step import why_not_step

        return why_not_step(self.head_dim)

    def _why_no_fused(self, h: Tensor) -> str | None:
        from energylab.kernels.interaction import why_not_shape

        rank = 0 if (left := self.preconditioner.parts()[1]) is None else left.shape[1]
        per_head = self.diagonal is not None and self.diagonal.ndim == 2
        return why_not_shape(operand_dtype(h), h.device, self.heads, self.head_dim, self.width, rank, per_head)

    def _fused_descent(self, h: Tensor, step_sizes: Tensor, energies: bool, final: bool, record: bool) -> Descent:
        from energylab.kernels.interaction import interaction_descent

        dtype = operand_dtype(h)
        u_BND = norm(h).to(dtype)
        k_BNHK = F.linear(u_BND, self.key_weight.flatten(0, 1).to(dtype)).unflatten(-1, (self.heads, self.head_dim))
        cos = sin = None
        if self.rotary:
            angles = torch.promote_types(dtype, torch.float32)
            positions = RotaryPositions(torch.arange(h.shape[1], device=h.device), self.head_dim, angles)
            k_BNHK = positions.rotate(k_BNHK.transpose(1, 2)).transpose(1, 2).to(dtype)
            cos, sin = positions.cos_NK, positions.sin_NK
        scale, left, right = self.preconditioner.parts()
        operands = [
            None if part is None else part.to(dtype) for part in (self.query_weight, self.diagonal, left, right)
        ]
        query_weight, diagonal, left, right = operands
        inputs = (h, u_BND, k_BNHK, query_weight, diagonal, step_sizes, scale, left, right)
        save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
        output, lse, states, forces = interaction_descent(
            *(None if tensor is None else tensor.contiguous() for tensor in inputs),
            cos,
            sin,
            self.temperature,
            self.mask,
            self.repelling_heads,
            final,
            energies=energies,
            save=save or record,
            forces=record or (save and scale is not None),
            fused=True,
        )
        if self.repelling_heads:
            lse = lse * self.sign.to(lse.dtype)[:, None]
        energy = -self.temperature * lse.sum(2).to(h.dtype)
        if not record:
            return Descent(output, energy)
        between = states[: len(step_sizes) - 1].detach().to(h.dtype)
        return Descent(output, energy, (h, *between, output), tuple(forces.detach().to(h.dtype)))

    def _certified_step_size(self, h: Tensor, recursions: int) -> Tensor:
        r"""Infinity where all heads attract; else ``η ≤ rms(h) / (L/2 + T G)``, as for the MLP.

        With ``β_ik = max_{j≤i} (‖W_Qk‖ ‖W_Kk u_j‖ + ‖d_k ⊙ u_j‖) ≥ ‖A_k u_j‖``, the heads that repel bound the curvature,
        ``L = Σ β_ik²/τ``, and all heads the force, ``√D G = Σ β_ik``. The derivation is in docs/descent.md.
        """
        if not self.repelling_heads:
            return h.new_full(h.shape[:-1], math.inf)
        u = norm(h)
        spectral = torch.linalg.matrix_norm(self.query_weight, ord=2)
        reach = split_heads(u, self.key_weight).norm(dim=-1) * spectral[:, None]
        if self.diagonal is not None:
            diagonal = self.diagonal.view(-1, 1, self.width)
            reach = reach + (u.unsqueeze(1) * diagonal).norm(dim=-1)
        reach = reach.cummax(dim=-1).values  # (B, H, N)
        curvature = reach[:, self.sign < 0].square().sum(1) / self.temperature
        force = reach.sum(1) / math.sqrt(self.width)
        return h.square().mean(-1).sqrt() / (curvature / 2 + recursions * force)


def resolve_head_dim(width: int, heads: int, head_dim: int | None, rotary: bool) -> int:
    """``head_dim``, or width/heads; ValueError if that is no integer, or odd where positions are rotary."""
    if head_dim is None:
        if width % heads:
            raise ValueError(f"heads: expected a divisor of the width {width} (or a head_dim), got {heads}")
        head_dim = width // heads
    check_positive("head_dim", head_dim)
    if rotary and head_dim % 2:
        raise ValueError(f"head_dim: expected an even number for rotary positions, got {head_dim}")
    return head_dim
