"""The inside of a trained model: its energy layers in float64, and what each of them is given on fixed test tasks."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from energylab.energies import ConditionalEnergy
from energylab.layers import EnergyLayer
from energylab.models import InContextRegressor
from energylab.tasks import GaussianProcessPrior
from energylab.tasks.conditions import TEST_SEED

Advance = Callable[[float], None]
"""Told, now and then, which share of the work is done, 0 to 1."""


def ignore(share: float) -> None:
    """An ``Advance`` for nobody."""


def part_of(advance: Advance, done: int, parts: int) -> Advance:
    """An ``Advance`` for the next of so many equal parts of the work."""
    return lambda share: advance((done + share) / parts)


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """An energy layer, and the h that it meets."""

    name: str
    """``block 0 attention``."""
    block: int
    part: str
    """``attention`` or ``mlp``."""
    layer: EnergyLayer
    h: Tensor
    """(B, N, D)."""
    tokens: tuple[str, ...]
    """``query`` or ``pair``, per position."""
    pairs: tuple[int, ...]
    """The index of the pair that each position belongs to."""

    def energy(self, task: int, position: int) -> ConditionalEnergy:
        """The energy of one position of one task, for z of shape (1, S, D)."""
        return self.layer.condition(self.h[task : task + 1]).at(position)

    def of_task(self, task: int) -> "LayerInput":
        """The same, with one task alone."""
        return dataclasses.replace(self, h=self.h[task : task + 1])


@torch.no_grad()
def layer_inputs(
    model: InContextRegressor, prior: GaussianProcessPrior, num_points: int, tasks: int, first_task: int = 0
) -> Iterator[LayerInput]:
    """Every energy layer in the order in which they act, on test tasks ``first_task`` to ``first_task + tasks − 1``.

    On a copy of the model, in float64, without gradients, on the reference path, which can be differentiated twice.
    """
    config = dataclasses.replace(model.config, backend="reference")
    wide = InContextRegressor(config).double()
    wide.load_state_dict(model.state_dict())
    wide.requires_grad_(False)
    batch = prior.sample(tasks, num_points, seed=TEST_SEED, stream="test", first_task=first_task, dtype=torch.float64)
    kinds, pairs = wide.layout.kinds(num_points)
    h = wide.embed(batch.x, batch.y)
    for name, block, part, layer in wide.path():
        if isinstance(layer, EnergyLayer):
            yield LayerInput(
                name=name, block=block, part=part, layer=layer, h=h, tokens=tuple(kinds), pairs=tuple(pairs)
            )
        h = layer(h)


def find_layer(
    model: InContextRegressor,
    name: str,
    prior: GaussianProcessPrior,
    num_points: int,
    tasks: int = 1,
    first_task: int = 0,
) -> LayerInput:
    """The layer called ``name``. Raises ValueError, saying which there are, for another name."""
    names = energy_layers(model)
    if name not in names:
        raise ValueError(f"layer: expected one of {'; '.join(names)}, got {name!r}")
    inputs = layer_inputs(model, prior, num_points, tasks, first_task)
    return next(one for one in inputs if one.name == name)


def energy_layers(model: InContextRegressor) -> list[str]:
    """The names of the layers that descend an energy. Raises ValueError where there is none."""
    names = [name for name, _, _, layer in model.path() if isinstance(layer, EnergyLayer)]
    if not names:
        parts = f"attention = {model.config.attention}, mlp = {model.config.mlp}"
        raise ValueError(f"model: expected a layer that descends an energy (cem), got {parts}")
    return names


def tangential(z: Tensor, v: Tensor) -> Tensor:
    """The part of v along the sphere at z, ``(I − z zᵀ/‖z‖²) v``."""
    return v - z * (z * v).sum(-1, keepdim=True) / z.square().sum(-1, keepdim=True)


def require_fixed_history(layer: EnergyLayer) -> None:
    """Refuse a refreshed history: there each step has an energy of its own, and no landscape holds the path."""
    if layer.history != "fixed":
        raise ValueError(
            f"history: expected fixed, got {layer.history}: each step then has an energy of its own, and none to look at"
        )
