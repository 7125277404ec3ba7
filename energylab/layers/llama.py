"""The baseline block: RMSNorm, causal multi-head attention and SwiGLU, as in Llama (Touvron et al. 2023, arXiv 2302.13971).

A learned gain follows each norm, weights start at N(0, 1/fan_in), and both output projections start smaller by
1/sqrt(2·depth), the usual scale for a residual branch.
"""

import math
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from energylab.energies import RotaryPositions
from energylab.energies.interaction import MASKS, merge_heads, split_heads
from energylab.layers.attention import resolve_head_dim
from energylab.layers.base import check_choice, check_positive
from energylab.layers.descent import EPSILON

TIES = ("none", "key_value", "query_output", "both")


@final
class LlamaAttention(nn.Module):
    """``h + W_O concat_k softmax(q_k k_kᵀ / sqrt(d_h)) v_k`` on the normalised h: 4·H·d_h·D weights and the gain.

    ``tie`` shares weights: ``key_value`` sets W_V = W_K, ``query_output`` W_O = W_Qᵀ, ``both`` both: a quarter of the
    weights less, or half. With both, the update is the gradient step of ``CEMAttention`` with T = 1, η = 1 and no
    diagonal, but for the gain of the norm.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int | None = None,
        rotary: bool = False,
        depth: int = 1,
        mask: str = "causal",
        tie: str = "none",
    ):
        super().__init__()
        check_positive("width", width)
        check_positive("heads", heads)
        self.head_dim = resolve_head_dim(width, heads, head_dim, rotary)
        self.rotary, self.mask = rotary, mask
        self.norm = nn.RMSNorm(width, eps=EPSILON)
        shape = (heads, self.head_dim, width)
        self.query_weight = nn.Parameter(torch.randn(shape) / math.sqrt(width))
        self.key_weight = nn.Parameter(torch.randn(shape) / math.sqrt(width))
        self.tie = check_choice("tie", tie, TIES)
        self.value_weight = self.output_weight = None
        if tie not in ("key_value", "both"):
            self.value_weight = nn.Parameter(torch.randn(shape) / math.sqrt(width))
        if tie not in ("query_output", "both"):
            self.output_weight = nn.Parameter(torch.randn(shape) / math.sqrt(heads * self.head_dim * 2 * depth))

    def forward(self, h: Tensor) -> Tensor:
        u = self.norm(h)
        q, k = split_heads(u, self.query_weight), split_heads(u, self.key_weight)
        v = k if self.value_weight is None else split_heads(u, self.value_weight)
        if self.rotary:
            rotary = RotaryPositions(torch.arange(h.shape[1], device=h.device), self.head_dim, h.dtype)
            q, k = rotary.rotate(q), rotary.rotate(k)
        causal = self.mask == "causal"
        visible = None if causal else ~MASKS[self.mask](h.shape[1], h.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)
        return h + merge_heads(o, self.query_weight if self.output_weight is None else self.output_weight)


@final
class LlamaMLP(nn.Module):
    """``h + W_down( SiLU(W_gate u) ⊙ W_up u )`` on the normalised h: 3·M·D weights and the gain."""

    def __init__(self, width: int, hidden: int, depth: int = 1):
        super().__init__()
        check_positive("width", width)
        check_positive("hidden", hidden)
        self.norm = nn.RMSNorm(width, eps=EPSILON)
        self.gate_weight = nn.Parameter(torch.randn(hidden, width) / math.sqrt(width))
        self.up_weight = nn.Parameter(torch.randn(hidden, width) / math.sqrt(width))
        self.down_weight = nn.Parameter(torch.randn(width, hidden) / math.sqrt(hidden * 2 * depth))

    def forward(self, h: Tensor) -> Tensor:
        u = self.norm(h)
        return h + F.linear(F.silu(F.linear(u, self.gate_weight)) * F.linear(u, self.up_weight), self.down_weight)
