"""How pairs become tokens.

A layout turns inputs x (B, N, d_x) and targets y (B, N) into L tokens, and says at which positions the predictions are
read. What a causal model may see of pair k when it predicts y_k is decided here: y_k never appears at or before its
query position.

| name | tokens of pair i | L | width |
|---|---|---|---|
| `interleaved` | [x_i, 0, 0], [x_i, y_i, 1] | 2N | d_x + 2 |
| `independent` | as `interleaved`; a token sees no query but its own | 2N | d_x + 2 |
| `split` | [x_i, 0, 0], [0, y_i, 1] | 2N | d_x + 2 |
| `shifted` | [x_i, y_{i−1}] with y_{−1} = 0 | N | d_x + 1 |

The last entry of the first two is a flag: 0 at a query, 1 where a target is shown.
"""

from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from torch import Tensor

TokenKind = Literal["query", "pair"]


class TokenLayout(ABC):
    """Tokens of a task. A new layout is one subclass, and one entry of `LAYOUTS`."""

    mask = "causal"
    """Which tokens a token sees: `causal`, all up to itself; `independent`, of the queries only itself."""

    @abstractmethod
    def width(self, input_dim: int) -> int:
        """Features of a token."""

    @abstractmethod
    def encode(self, x: Tensor, y: Tensor) -> Tensor:
        """Tokens (B, L, width) of inputs x (B, N, d_x) and targets y (B, N)."""

    @abstractmethod
    def query_positions(self, num_points: int) -> Tensor:
        """Position (N,) at which y_k is predicted; every token up to it may be seen, y_k is in none of them."""

    @abstractmethod
    def kinds(self, num_points: int) -> tuple[list[TokenKind], list[int]]:
        """For each of the L positions: does it ask for a target (`query`) or show one (`pair`), and the index of its
        pair.
        """


class _TwoTokens(TokenLayout):
    """A query token, then a token that shows the target."""

    def width(self, input_dim: int) -> int:
        return input_dim + 2

    def query_positions(self, num_points: int) -> Tensor:
        return torch.arange(0, 2 * num_points, 2)

    def kinds(self, num_points: int) -> tuple[list[TokenKind], list[int]]:
        return ["query", "pair"] * num_points, [pair for pair in range(num_points) for _ in range(2)]

    @staticmethod
    def _alternate(x_query: Tensor, x_pair: Tensor, y: Tensor) -> Tensor:
        y = y.unsqueeze(-1)
        query = torch.cat([x_query, torch.zeros_like(y), torch.zeros_like(y)], dim=-1)
        pair = torch.cat([x_pair, y, torch.ones_like(y)], dim=-1)
        return torch.stack([query, pair], dim=2).flatten(1, 2)


@final
class Interleaved(_TwoTokens):
    """[x, 0, 0] and [x, y, 1], alternating: a pair token carries its input as well."""

    def encode(self, x: Tensor, y: Tensor) -> Tensor:
        return self._alternate(x, x, y)


@final
class Split(_TwoTokens):
    """[x, 0, 0] and [0, y, 1], alternating: the model has to join input and target itself."""

    def encode(self, x: Tensor, y: Tensor) -> Tensor:
        return self._alternate(x, torch.zeros_like(x), y)


@final
class Independent(_TwoTokens):
    """As `interleaved`, but no token sees the query of another: the pairs before y_k are a context set, the query of y_k
    the only one.
    """

    mask = "independent"

    def encode(self, x: Tensor, y: Tensor) -> Tensor:
        return self._alternate(x, x, y)


@final
class Shifted(TokenLayout):
    """[x_i, y_{i−1}]: with sorted or gridded inputs, next-value prediction on a series. Every token is a query."""

    def width(self, input_dim: int) -> int:
        return input_dim + 1

    def encode(self, x: Tensor, y: Tensor) -> Tensor:
        previous = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)
        return torch.cat([x, previous.unsqueeze(-1)], dim=-1)

    def query_positions(self, num_points: int) -> Tensor:
        return torch.arange(num_points)

    def kinds(self, num_points: int) -> tuple[list[TokenKind], list[int]]:
        return ["query"] * num_points, list(range(num_points))


LAYOUTS: dict[str, TokenLayout] = {
    "interleaved": Interleaved(),
    "split": Split(),
    "independent": Independent(),
    "shifted": Shifted(),
}


def token_layout(name: str) -> TokenLayout:
    """The layout called `name`. Raises ValueError for another name."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise ValueError(f"tokens: expected one of {', '.join(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]
