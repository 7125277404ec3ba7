"""Conditional energies and their closed-form gradients, in plain PyTorch: the reference that every fast path is held to."""

from energylab.energies.base import ConditionalEnergy
from energylab.energies.elementwise import Activation, ElementwiseEnergy, Quadratic, SiLU, silu_potential
from energylab.energies.interaction import (
    InteractionEnergy,
    InteractionTerm,
    LowRankTerm,
    PerHeadDiagonalTerm,
    SharedDiagonalTerm,
    hidden_future,
)
from energylab.energies.rotary import RotaryPositions

__all__ = [
    "Activation",
    "ConditionalEnergy",
    "ElementwiseEnergy",
    "InteractionEnergy",
    "InteractionTerm",
    "LowRankTerm",
    "PerHeadDiagonalTerm",
    "Quadratic",
    "RotaryPositions",
    "SharedDiagonalTerm",
    "SiLU",
    "hidden_future",
    "silu_potential",
]
