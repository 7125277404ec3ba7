"""The descent: T preconditioned steps of one position's variable down a conditional energy, and the record of it.

    x_0 = h ,    x_{t+1} = x_t − η P ∇E(z_t) ,    z_t = norm(x_t) ,    t = 0..T−1

A descent knows steps and nothing of heads or gates; an energy knows its gradient and nothing of steps.
Source: arXiv 2605.07588.
"""

import abc
import dataclasses
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
    if x.dtype not in (torch.float32, torch.float64):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=EPSILON)  # computes in float32
    if x.is_cuda or torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x * _inverse_rms(x)
    return _Norm.apply(x)[0]


def norm_jacobian(x: Tensor, v: Tensor) -> Tensor:
    """``J(x) v`` with ``J = (I − z zᵀ/D) / sqrt(mean(x²) + 1e-6)``, the Jacobian of ``norm`` at x: symmetric."""
    scale = _inverse_rms(x)
    z = x * scale
    return scale * (v - z * (z * v).mean(-1, keepdim=True))


def _inverse_rms(x: Tensor) -> Tensor:
    # the norm of a row is one pass over x, and leaves no x² behind
    return (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + EPSILON).rsqrt()


class _Norm(torch.autograd.Function):
    """``norm`` with its backward ``v ↦ J v`` in closed form: fewer passes over memory than PyTorch's own on a CPU."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale = _inverse_rms(x)
        return x * scale, scale

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        (x,), (z, scale) = inputs, output
        ctx.mark_non_differentiable(scale)
        ctx.save_for_backward(x, z, scale)

    @staticmethod
    def backward(ctx, v: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, z, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: in operations that know x
            return norm_jacobian(x, v)
        radial = torch.linalg.vecdot(z, v).unsqueeze(-1).div_(-z.shape[-1])
        return torch.addcmul(v, z, radial).mul_(scale)


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
    look: Callable[[Tensor], tuple[ConditionalEnergy, Tensor]],
    x: Tensor,
    step_sizes: Sequence[Tensor],
    preconditioner: Preconditioning,
    update_rule: UpdateRule,
    observe: "Recorder | None" = None,
    recompute: bool = False,
) -> Tensor:
    """Take one step for each of ``step_sizes`` and return the last x.

    ``look(x_t)`` gives the energy to descend at step t, the same object each time for a fixed history, and ``z_t``.
    ``observe`` is told of x_0 .. x_T and cannot change the result. With ``recompute`` the backward keeps only the x_t and
    computes each step again (Chen et al. 2016, arXiv 1604.06174); the numbers stay the same, bit for bit.
    """
    memory = None

    def step(x: Tensor, memory: Any, step_size: Tensor) -> tuple[Tensor, Any]:
        energy, z = look(x)
        point = update_rule.look_ahead(x, memory)
        if observe:
            observed, value = energy.force_and_value(z)
            observe(x, z, value, observed)
            force = observed if point is x else energy.force(norm(point))
        else:
            force = energy.force(z if point is x else norm(point))
        return update_rule.step(Here(x, preconditioner(force), step_size, energy), memory)

    for step_size in step_sizes:
        if recompute and torch.is_grad_enabled():
            x, memory = checkpoint(step, x, memory, step_size, use_reentrant=False, preserve_rng_state=False)
        else:
            x, memory = step(x, memory, step_size)
    if observe:
        energy, z = look(x)
        observe(x, z, energy.value(z), None)
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
    """Observes a descent and makes its ``Trace``.

    What it notes of a step it computes at that step, while the vectors are still in a cache.
    """

    def __init__(self) -> None:
        self.notes: dict[str, list[Tensor]] = {field.name: [] for field in dataclasses.fields(Trace)}
        self._unit: Tensor | None = None  # z_t / ‖z_t‖ of the step before

    def __call__(self, x: Tensor, z: Tensor, energy: Tensor, force: Tensor | None) -> None:
        unit = torch.nn.functional.normalize(z, dim=-1)
        if self._unit is not None:
            self._note(step_norm=(x - self.notes["states"][-1]).norm(dim=-1), turn=_angle_between(self._unit, unit))
        self._note(states=x, energy=energy)
        if force is not None:  # at x_T no step is taken
            radial = torch.linalg.vecdot(force, z).unsqueeze(-1) / z.shape[-1]
            tangential = torch.addcmul(force, z, radial, value=-1)  # (I − z zᵀ/D) v
            self._note(gradient_norm=force.norm(dim=-1), tangential_norm=tangential.norm(dim=-1))
        self._unit = unit

    def _note(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.notes[name].append(value)

    def trace(self) -> Trace:
        return Trace(**{name: torch.stack(values) for name, values in self.notes.items()})


def angle(a: Tensor, b: Tensor) -> Tensor:
    """The angle between vectors along the last axis, in radians."""
    return _angle_between(*(torch.nn.functional.normalize(x, dim=-1) for x in (a, b)))


def _angle_between(a: Tensor, b: Tensor) -> Tensor:
    """The angle between unit vectors, ``2 atan2(‖a − b‖, ‖a + b‖)`` (Kahan 2006): the arc cosine loses half the digits of a
    small one.
    """
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))
