"""Layers: a layer is an energy, conditioned on the history, and a descent; and the Llama layers they are compared with."""

from energylab.layers.attention import CEMAttention
from energylab.layers.base import EnergyLayer
from energylab.layers.descent import Backtracking, Trace, UpdateRule, norm
from energylab.layers.llama import LlamaAttention, LlamaMLP
from energylab.layers.mlp import CEMMLP

__all__ = [
    "CEMMLP",
    "Backtracking",
    "CEMAttention",
    "EnergyLayer",
    "LlamaAttention",
    "LlamaMLP",
    "Trace",
    "UpdateRule",
    "norm",
]
