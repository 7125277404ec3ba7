"""What every conditional energy offers: a value, its gradient and its curvature, and nothing about steps."""

import abc

from torch import Tensor


class ConditionalEnergy(abc.ABC):
    """An energy ``E(z_i | u_1..i)`` of each position's variable, given the history ``u``, which stays fixed.

    Positions do not see each other's ``z``: row ``i`` of every result depends on row ``i`` of ``z`` and on the history up
    to ``i`` alone. What the history contributes (keys, gates) is computed once, on construction.

    Shapes: ``z`` and ``v`` are (B, N, D); values are (B, N); forces, gradients and Hessian-vector products are (B, N, D).
    """

    @abc.abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """``E(z)``, (B, N)."""

    @abc.abstractmethod
    def force(self, z: Tensor) -> Tensor:
        """``−∇E(z)`` in closed form, (B, N, D): what a step follows."""

    def gradient(self, z: Tensor) -> Tensor:
        """``∇E(z)``, (B, N, D)."""
        return -self.force(z)

    def force_and_value(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """``−∇E(z)`` and ``E(z)``; the force is that of ``force``, bit for bit. Overridden where the two share work."""
        return self.force(z), self.value(z)

    @abc.abstractmethod
    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        """``∇²E(z) v`` in closed form, (B, N, D): the Hessian of each position applied to that position's ``v``."""

    @abc.abstractmethod
    def at(self, position: int) -> "ConditionalEnergy":
        """The energy of one position, for many ``z`` at once.

        The result takes ``z`` of shape (B, S, D), where all S points of a sequence are conditioned on the history of
        ``position``: what a landscape or an optimiser asks for.
        """


def check_position(position: int, length: int) -> int:
    """Refuse a position outside 0..length-1; Python's negative indices would silently read another history."""
    if not 0 <= position < length:
        raise ValueError(f"position: expected 0 to {length - 1}, got {position}")
    return position
