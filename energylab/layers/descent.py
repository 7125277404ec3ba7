"""The descent: T preconditioned steps of one position's variable down a conditional energy, and the record of it.

    x_0 = h ,    x_{t+1} = x_t − η P ∇E(z_t) ,    z_t = norm(x_t) ,    t = 0..T−1

A descent knows steps and nothing of heads or gates; an energy knows its gradient and nothing of steps.
Source: arXiv 2605.07588.
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from energylab.energies import ConditionalEnergy

EPSILON = 1e-6


def norm(x: Tensor) -> Tensor:
    """``x / sqrt(mean(x²) + 1e-6)`` over the last axis: RMS normalisation without a gain.

    The weights can absorb a gain, and without it the Jacobian ``(I − z zᵀ/D)/rms(x)`` is symmetric and positive
    semi-definite, which the argument for descent needs.
    """
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=EPSILON)


def norm_jacobian(x: Tensor, v: Tensor) -> Tensor:
    """``J(x) v`` with ``J = (I − z zᵀ/D) / sqrt(mean(x²) + 1e-6)``, the Jacobian of ``norm`` at x: symmetric."""
    z = norm(x)
    scale = (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    return scale * (v - z * (z * v).mean(-1, keepdim=True))


class Here(NamedTuple):
    """What an update rule may look at: a point, and the energy there."""

    x: Tensor
    direction: Tensor
    """``−P ∇E(norm(·))`` at the point that ``look_ahead`` chose."""
    step_size: Tensor
    energy: ConditionalEnergy


class Descent(NamedTuple):
    """What a fused kernel returns of a whole descent."""

    output: Tensor
    """x_T, (B, N, D)."""
    energy: Tensor
    """E(z_t), (T, B, N), or (T+1, B, N) with that of z_T."""
    states: Sequence[Tensor] = ()
    """x_0 .. x_T, where they were asked for; the last is ``output``."""
    forces: Sequence[Tensor] = ()
    """−∇E(z_t) for t < T, where they were asked for."""


class UpdateRule(abc.ABC):
    """How a step is made, and at which point its gradient is taken.

    ``memory`` is whatever a rule carries from one step to the next; it starts as None. A new rule overrides ``step``.
    """

    def look_ahead(self, x: Tensor, memory: Any) -> Tensor:
        """The point whose gradient the step uses; x itself unless a rule says otherwise."""
        return x

    @abc.abstractmethod
    def step(self, here: Here, memory: Any) -> tuple[Tensor, Any]:
        """The next x and the next memory."""


@final
class Gradient(UpdateRule):
    """``x ← x − η P ∇E`` (Cauchy 1847)."""

    def step(self, here: Here, memory: Any) -> tuple[Tensor, Any]:
        return torch.addcmul(here.x, here.step_size, here.direction), None


@final
@dataclass(frozen=True)
class HeavyBall(UpdateRule):
    """``v ← β v − η P ∇E(x), x ← x + v`` (Polyak 1964, doi 10.1016/0041-5553(64)90137-5)."""

    momentum: float = 0.5

    def step(self, here: Here, memory: Any) -> tuple[Tensor, Any]:
        velocity = here.step_size * here.direction
        if memory is not None:
            velocity = velocity + self.momentum * memory
        return here.x + velocity, velocity


@final
@dataclass(frozen=True)
class Nesterov(UpdateRule):
    """Heavy ball with the gradient taken at ``x + β v`` (Nesterov 1983, Soviet Math. Doklady 27)."""

    momentum: float = 0.5

    def look_ahead(self, x: Tensor, memory: Any) -> Tensor:
        return x if memory is None else x + self.momentum * memory

    def step(self, here: Here, memory: Any) -> tuple[Tensor, Any]:
        return HeavyBall(self.momentum).step(here, memory)


@final
@dataclass(frozen=True)
class Backtracking(UpdateRule):
    """The gradient rule with η cut at each position until the energy falls enough (Armijo 1966, doi 10.2140/pjm.1966.16.1).

    Accepts the first of η, η/2, η/4, ... with ``E(norm(x + η d)) ≤ E(norm(x)) + c η m``, where d is the direction and
    ``m = ∇Eᵀ J d = −vᵀ J P v`` the slope along it, v = −∇E. A position where the slope is not negative (a preconditioner
    can turn a step uphill) or where no trial is accepted stays where it is. For analysis: it evaluates the energy at every
    trial, and no gradient flows through the choice of η.
    """

    shrink: float = 0.5
    sufficient: float = 1e-4
    """c, the share of the decrease that the slope promises."""
    trials: int = 40

    @torch.no_grad()
    def step(self, here: Here, memory: Any) -> tuple[Tensor, Any]:
        z = norm(here.x)
        start = here.energy.value(z)
        slope = -(here.energy.force(z) * norm_jacobian(here.x, here.direction)).sum(-1)
        step_size = here.step_size.expand_as(start).clone()
        accepted = torch.zeros_like(start, dtype=torch.bool)
        x = here.x
        for _ in range(self.trials):
            trial = here.x + step_size[..., None] * here.direction
            enough = here.energy.value(norm(trial)) <= start + self.sufficient * step_size * slope
            newly = enough & (slope < 0) & ~accepted
            x = torch.where(newly[..., None], trial, x)
            accepted |= newly
            if accepted.logical_or(slope >= 0).all():
                break
            step_size = torch.where(accepted, step_size, step_size * self.shrink)
        return x, None


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
    recompute: bool = False,
) -> Tensor:
    """Take one step for each of ``step_sizes`` and return the last x.

    ``energy_at(x_t)`` gives the energy to descend at step t: the same object each time for a fixed history.
    ``observe`` is told of x_0 .. x_T and cannot change the result. With ``recompute`` the backward keeps only the x_t and
    computes each step again (Chen et al. 2016, arXiv 1604.06174); the numbers stay the same, bit for bit.
    """
    memory = None

    def step(x: Tensor, memory: Any, step_size: Tensor) -> tuple[Tensor, Any]:
        energy = energy_at(x)
        point = update_rule.look_ahead(x, memory)
        if observe:
            observed, value = energy.force_and_value(norm(x))
            observe(x, value, observed)
            force = observed if point is x else energy.force(norm(point))
        else:
            force = energy.force(norm(point))
        return update_rule.step(Here(x, preconditioner(force), step_size, energy), memory)

    for step_size in step_sizes:
        if recompute and torch.is_grad_enabled():
            x, memory = checkpoint(step, x, memory, step_size, use_reentrant=False, preserve_rng_state=False)
        else:
            x, memory = step(x, memory, step_size)
    if observe:
        observe(x, energy_at(x).value(norm(x)), None)
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

    def __call__(self, x: Tensor, energy: Tensor, force: Tensor | None) -> None:
        self.states.append(x)
        self.energies.append(energy)
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
