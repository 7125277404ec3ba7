"""Learned symmetric preconditioners ``P`` of shape (D, D), applied to a gradient and never formed.

    none                         P = I
    diagonal                     P = diag(softplus(d))
    diagonal_low_rank            P = diag(softplus(d)) + U Vᵀ + V Uᵀ
    diagonal_low_rank_positive   P = diag(softplus(d)) + U Uᵀ

d is (D,), U (``left``) and V (``right``) are (D, r). The third, the paper's form (arXiv 2605.07588), is symmetric but may
become indefinite while it learns: its smallest eigenvalue is something to look at. The second and fourth are positive
definite. All start at I, or near it.
"""

import abc
import math
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Preconditioner(nn.Module, abc.ABC):
    """A symmetric linear map of R^D, the same at every position and step."""

    @abc.abstractmethod
    def forward(self, v: Tensor) -> Tensor:
        """``P v`` for v of shape (..., D)."""

    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """P as a fused kernel takes it: diag(first) + U Vᵀ + V Uᵀ, or + U Uᵀ where V is None; all None for P = I."""
        return None, None, None


@final
class NoPreconditioner(Preconditioner):
    """``P = I``."""

    def forward(self, v: Tensor) -> Tensor:
        return v


@final
class DiagonalPreconditioner(Preconditioner):
    """``P = diag(softplus(d))``."""

    def __init__(self, width: int):
        super().__init__()
        self.diagonal = _unit_diagonal(width)

    def forward(self, v: Tensor) -> Tensor:
        return v * F.softplus(self.diagonal)

    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return F.softplus(self.diagonal), None, None


@final
class DiagonalLowRankPreconditioner(Preconditioner):
    """``P = diag(softplus(d)) + U Vᵀ + V Uᵀ``; V starts at 0, so that P starts at I and V has a gradient."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.diagonal = _unit_diagonal(width)
        self.left = nn.Parameter(torch.randn(width, rank) / math.sqrt(width))
        self.right = nn.Parameter(torch.zeros(width, rank))

    def forward(self, v: Tensor) -> Tensor:
        return v * F.softplus(self.diagonal) + (v @ self.right) @ self.left.mT + (v @ self.left) @ self.right.mT

    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return F.softplus(self.diagonal), self.left, self.right


@final
class DiagonalLowRankPositivePreconditioner(Preconditioner):
    """``P = diag(softplus(d)) + U Uᵀ``; U starts small, for at U = 0 its gradient vanishes."""

    INITIAL_SCALE = 0.1

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.diagonal = _unit_diagonal(width)
        self.left = nn.Parameter(torch.randn(width, rank) * (self.INITIAL_SCALE / math.sqrt(width)))

    def forward(self, v: Tensor) -> Tensor:
        return v * F.softplus(self.diagonal) + (v @ self.left) @ self.left.mT

    def parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return F.softplus(self.diagonal), self.left, None


KINDS = ("none", "diagonal", "diagonal_low_rank", "diagonal_low_rank_positive")


def make_preconditioner(kind: str, width: int, rank: int) -> Preconditioner:
    """The preconditioner of a name in ``KINDS``. Raises ValueError for another name or a rank outside 1..width."""
    if kind not in KINDS:
        raise ValueError(f"preconditioner: expected one of {', '.join(KINDS)}, got {kind!r}")
    if "low_rank" in kind and not 1 <= rank <= width:
        raise ValueError(f"rank: expected 1 to the width {width}, got {rank}")
    if kind == "none":
        return NoPreconditioner()
    if kind == "diagonal":
        return DiagonalPreconditioner(width)
    if kind == "diagonal_low_rank":
        return DiagonalLowRankPreconditioner(width, rank)
    return DiagonalLowRankPositivePreconditioner(width, rank)


def _unit_diagonal(width: int) -> nn.Parameter:
    return nn.Parameter(torch.full((width,), math.log(math.e - 1)))  # softplus of this is 1
