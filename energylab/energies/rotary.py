"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves convention, base 10000."""

from typing import final

import torch
from torch import Tensor

BASE = 10_000.0


@final
class RotaryPositions:
    """The rotations ``R_i`` of positions i, for vectors of shape (..., N, K) with K even.

    ``R_i`` turns the plane spanned by coordinates c and c + K/2 by the angle ``i · BASE^(−2c/K)``; ``R_iᵀ`` turns it back.
    """

    def __init__(self, positions_N: Tensor, head_dim: int, dtype: torch.dtype):
        # angles in float64: at float32 a position of some thousands has lost four digits of its angle
        frequency = BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_N.device) / head_dim)
        angle = positions_N.to(torch.float64)[:, None] * frequency
        angle = torch.cat([angle, angle], dim=-1)
        self._adopt(angle.cos().to(dtype), angle.sin().to(dtype))

    def _adopt(self, cos_NK: Tensor, sin_NK: Tensor) -> None:
        self.cos_NK, self.sin_NK = cos_NK, sin_NK

    def rotate(self, x: Tensor) -> Tensor:
        """``R_i x_i``."""
        return x * self.cos_NK + _quarter_turn(x) * self.sin_NK

    def rotate_back(self, x: Tensor) -> Tensor:
        """``R_iᵀ x_i``."""
        return x * self.cos_NK - _quarter_turn(x) * self.sin_NK

    def at(self, position: int) -> "RotaryPositions":
        """The rotation of one position, for any number of vectors that stand there."""
        rotary = object.__new__(RotaryPositions)
        rotary._adopt(self.cos_NK[position : position + 1], self.sin_NK[position : position + 1])
        return rotary


def _quarter_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
