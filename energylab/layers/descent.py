"""The descent: T preconditioned steps of one position's variable down a conditional energy, and the record of it.

    x_0 = h ,    x_{t+1} = x_t − η P ∇E(z_t) ,    z_t = norm(x_t) ,    t = 0..T−1

A descent knows steps and nothing of heads or gates; an energy knows its gradient and nothing of steps.
Source: arXiv 2605.07588.
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from energylab.energies import ConditionalEnergy

EPSILON = 1e-6


def norm(x: Tensor) -> Tensor:
    """``x / sqrt(mean(x²) + 1e-6)`` over the last axis: RMS normalisation without a gain.

    The weights can absorb a gain, and without it the Jacobian ``(I − z zᵀ/D)/rms(x)`` is symmetric and positive
    semi-definite, which the argument for descent needs.
    """
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=EPSILON)


class UpdateRule(abc.ABC):
    """How a step is made from a direction ``−P ∇E``, and at which point the next gradient is taken.

    ``memory`` is whatever a rule carries from one step to the next; it starts as None.
    """

    def look_ahead(self, x: Tensor, memory: Any) -> Tensor:
        """The point whose gradient the step uses; x itself unless a rule says otherwise."""
        return x

    @abc.abstractmethod
    def step(self, x: Tensor, direction: Tensor, step_size: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """The next x and the next memory."""


@final
class Gradient(UpdateRule):
    """``x ← x − η P ∇E`` (Cauchy 1847)."""

    def step(self, x: Tensor, direction: Tensor, step_size: Tensor, memory: Any) -> tuple[Tensor, Any]:
        return torch.addcmul(x, step_size, direction), None


@final
@dataclass(frozen=True)
class HeavyBall(UpdateRule):
    """``v ← β v − η P ∇E(x), x ← x + v`` (Polyak 1964, doi 10.1016/0041-5553(64)90137-5)."""

    momentum: float = 0.5

    def step(self, x: Tensor, direction: Tensor, step_size: Tensor, memory: Any) -> tuple[Tensor, Any]:
        velocity = step_size * direction
        if memory is not None:
            velocity = velocity + self.momentum * memory
        return x + velocity, velocity


@final
@dataclass(frozen=True)
class Nesterov(UpdateRule):
    """Heavy ball with the gradient taken at ``x + β v`` (Nesterov 1983, Soviet Math. Doklady 27)."""

    momentum: float = 0.5

    def look_ahead(self, x: Tensor, memory: Any) -> Tensor:
        return x if memory is None else x + self.momentum * memory

    def step(self, x: Tensor, direction: Tensor, step_size: Tensor, memory: Any) -> tuple[Tensor, Any]:
        return HeavyBall(self.momentum).step(x, direction, step_size, memory)


UPDATE_RULES: dict[str, UpdateRule] = {"gradient": Gradient(), "heavy_ball": HeavyBall(), "nesterov": Nesterov()}


class Preconditioning(Protocol):
    def __call__(self, v: Tensor, /) -> Tensor: ...


def descend(
    energy_at: Callable[[Tensor], ConditionalEnergy],
    x: Tensor,
    step_sizes: Sequence[Tensor],
    preconditioner: Preconditioning,
    update_rule: UpdateRule,
    observe: "Recorder | None" = None,
) -> Tensor:
    """Take one step for each of ``step_sizes`` and return the last x.

    ``energy_at(x_t)`` gives the energy to descend at step t: the same object each time for a fixed history.
    ``observe`` is told of x_0 .. x_T and cannot change the result.
    """
    memory = None
    for step_size in step_sizes:
        energy = energy_at(x)
        point = update_rule.look_ahead(x, memory)
        force = energy.force(norm(point))
        if observe:
            observe(energy, x, force if point is x else energy.force(norm(x)))
        x, memory = update_rule.step(x, preconditioner(force), step_size, memory)
    if observe:
        observe(energy_at(x), x, None)
    return x


@dataclass(frozen=True)
class Trace:
    """What one layer did to every position, at steps t = 0..T. Shapes: B sequences, N positions, D width.

    ``energy`` (T+1, B, N) is ``E(z_t)``, in the units of the temperature. Energies of different positions are not
    comparable: show ``energy - energy[0]``. ``gradient_norm`` (T, B, N) is ``‖∇E(z_t)‖``; ``tangential_norm`` is that of
    ``(I − z zᵀ/D) ∇E(z_t)``, the part that vanishes at the bottom; ``step_norm`` is ``‖x_{t+1} − x_t‖``; ``turn`` is the
    angle between z_t and z_{t+1} in radians; ``states`` (T+1, B, N, D) are the x_t.
    """

    energy: Tensor
    gradient_norm: Tensor
    tangential_norm: Tensor
    step_norm: Tensor
    turn: Tensor
    states: Tensor


@final
class Recorder:
    """Observes a descent and makes its ``Trace``."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.energies: list[Tensor] = []
        self.forces: list[Tensor] = []

    def __call__(self, energy: ConditionalEnergy, x: Tensor, force: Tensor | None) -> None:
        with torch.no_grad():
            self.states.append(x)
            self.energies.append(energy.value(norm(x)))
        if force is not None:  # at x_T no step is taken
            self.forces.append(force)

    def trace(self) -> Trace:
        states = torch.stack(self.states)
        z = norm(states)
        forces = torch.stack(self.forces)
        radial = (forces * z[:-1]).mean(-1, keepdim=True)  # −zᵀ∇E / D
        return Trace(
            energy=torch.stack(self.energies),
            gradient_norm=forces.norm(dim=-1),
            tangential_norm=(forces - radial * z[:-1]).norm(dim=-1),
            step_norm=states.diff(dim=0).norm(dim=-1),
            turn=angle(z[:-1], z[1:]),
            states=states,
        )


def angle(a: Tensor, b: Tensor) -> Tensor:
    """The angle between vectors along the last axis, in radians.

    By ``2 atan2(‖â − b̂‖, ‖â + b̂‖)`` (Kahan 2006): the arc cosine loses half the digits of a small angle.
    """
    a, b = torch.nn.functional.normalize(a, dim=-1), torch.nn.functional.normalize(b, dim=-1)
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))
