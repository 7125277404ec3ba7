"""What all layers that descend a conditional energy share: the step size, the preconditioner, T, and the trace."""

import abc
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from energylab.energies import ConditionalEnergy
from energylab.kernels.available import runs_on, why_not
from energylab.layers.descent import UPDATE_RULES, Descent, Gradient, Recorder, Trace, UpdateRule, descend, norm
from energylab.layers.preconditioner import NoPreconditioner, make_preconditioner

BACKENDS = ("auto", "reference", "torch", "triton")


class EnergyLayer(nn.Module, abc.ABC):
    """A layer that conditions an energy on its input and takes ``T`` steps down it.

        x_0 = h ,    x_{t+1} = x_t − η P ∇E(norm(x_t) | norm(h)) ,    output x_T

    x_T already contains h: nothing is added outside. ``h`` is (B, N, D). A subclass gives ``_condition``: the energy, from
    the normalised history.
    """

    def __init__(
        self,
        width: int,
        recursions: int,
        preconditioner: str,
        rank: int,
        step_size: float | Sequence[float] | None,
        update_rule: str,
        history: str,
        backend: str,
    ):
        super().__init__()
        self.width = check_positive("width", width)
        self.recursions = check_positive("recursions", recursions)
        self.preconditioner = make_preconditioner(preconditioner, width, rank)
        self.step_size = nn.Parameter(_initial_step_size(step_size, recursions))
        self.update_rule = UPDATE_RULES[check_choice("update_rule", update_rule, tuple(UPDATE_RULES))]
        self.history = check_choice("history", history, ("fixed", "refreshed"))
        self.backend = check_choice("backend", backend, BACKENDS)
        self.recompute = False
        """Whether training keeps only the x_t and computes each step again in the backward: less memory, more time."""

    @abc.abstractmethod
    def _condition(self, u: Tensor) -> ConditionalEnergy:
        """The energy given the normalised history u, (B, N, D)."""

    def condition(self, h: Tensor) -> ConditionalEnergy:
        """The conditional energy ``E(· | norm(h))``; keys and gates are computed here, once."""
        return self._condition(norm(h))

    def forward(self, h: Tensor, recursions: int | None = None, check_finite: bool = False) -> Tensor:
        """``x_T``, (B, N, D). ``recursions`` overrides T; step sizes beyond the trained ones repeat the last.

        With ``check_finite``, raises ValueError if h holds NaN or infinity.
        """
        if h.ndim != 3 or h.shape[-1] != self.width:
            raise ValueError(f"h: expected shape (B, N, {self.width}), got {tuple(h.shape)}")
        if check_finite and not (finite := h.isfinite().all(-1)).all():
            raise ValueError(
                f"h: expected finite values, got NaN or infinity at {(~finite).sum()} of {finite.numel()} positions"
            )
        return self._descend(h, recursions, self.update_rule, None)

    def energy(self, x: Tensor, h: Tensor) -> Tensor:
        """``E(norm(x) | norm(h))``, (B, N)."""
        return self.condition(h).value(norm(x))

    def gradient(self, x: Tensor, h: Tensor) -> Tensor:
        """``∇E`` with respect to z, at z = norm(x), (B, N, D)."""
        return self.condition(h).gradient(norm(x))

    @torch.no_grad()
    def trace(self, h: Tensor, recursions: int | None = None, update_rule: UpdateRule | None = None) -> Trace:
        """The descent from h, step by step. Recording does not change the output by a bit.

        ``recursions`` and ``update_rule`` ask what another T or another rule, ``Backtracking`` say, would have done.

        Under ``history="refreshed"`` the energies are ``E(z_t | u_t)``: each step has an energy of its own, they cannot be
        compared across t, and no descent is claimed.
        """
        recorder = Recorder()
        self._descend(h, recursions, update_rule or self.update_rule, recorder)
        return recorder.trace()

    @torch.no_grad()
    def certified_step_size(self, h: Tensor, recursions: int | None = None) -> Tensor:
        """The largest η, (B, N), for which T steps are proven to lower the energy at every step; 0 where none is.

        Proofs exist for the plain gradient rule with P = I and a fixed history. With another rule, or a preconditioner, or
        a history that moves, even an infinitesimal step may climb, and the answer is 0.
        """
        recursions = self.recursions if recursions is None else check_positive("recursions", recursions)
        plain = isinstance(self.update_rule, Gradient) and isinstance(self.preconditioner, NoPreconditioner)
        if not plain or self.history != "fixed":
            return h.new_zeros(h.shape[:-1])
        return self._certified_step_size(h, recursions)

    @abc.abstractmethod
    def _certified_step_size(self, h: Tensor, recursions: int) -> Tensor:
        """The bound for the plain rule, P = I and a fixed history."""

    def with_energy(self, h: Tensor, recursions: int | None = None, final: bool = True) -> tuple[Tensor, Tensor]:
        """x_T and the energies ``E(z_t)`` for t = 0..T, (T+1, B, N); both can be differentiated, with every backend.

        Without ``final`` the last one is left out, (T, B, N): a fused kernel has the others for free, and computes that one
        in a sweep of its own.
        """
        recursions = self.recursions if recursions is None else check_positive("recursions", recursions)
        if self._fuses(h, self.update_rule):
            descent = self._fused_descent(h, self._step_sizes(recursions), energies=True, final=final, record=False)
            return descent.output, descent.energy
        recorder = Recorder()
        output = self._descend(h, recursions, self.update_rule, recorder)
        return output, recorder.trace().energy[: None if final else -1]

    def _fuses(self, h: Tensor, update_rule: UpdateRule) -> bool:
        """Whether one Triton kernel takes all steps: unless ``backend`` says otherwise, wherever it can.

        Raises ValueError where ``backend`` is ``triton`` and no kernel, for all steps or for one, can run, with the reason.
        """
        if self.backend not in ("auto", "triton"):
            return False
        fuses = runs_on(h) and self.why_not_fused(h, update_rule) is None
        if self.backend == "triton" and not fuses and (reason := self._why_not_by_step(h)) is not None:
            raise ValueError(f"backend: triton cannot run this layer: {reason}")
        return fuses

    def _steps_by_kernel(self, h: Tensor) -> bool:
        """Whether Triton computes the force of a single step, where no kernel takes them all."""
        return self.backend in ("auto", "triton") and self._why_not_by_step(h) is None

    def _why_not_by_step(self, h: Tensor) -> str | None:
        """Why Triton cannot compute the force of a single step on h; None if it can."""
        return self._why_no_step() if runs_on(h) else why_not(h)

    def why_not_fused(self, h: Tensor, update_rule: UpdateRule | None = None) -> str | None:
        """Why one kernel cannot take all steps on h, where Triton runs at all; None if it can."""
        rule = update_rule or self.update_rule
        if not isinstance(rule, Gradient):
            return f"the fused kernel takes plain gradient steps, and the update rule is {type(rule).__name__}"
        if self.history != "fixed":
            return f"the fused kernel computes the history once, and the history is {self.history}"
        return self._why_no_fused(h)

    def kernel(self, h: Tensor) -> str:
        """What computes this layer on h, and why nothing faster does, in a sentence."""
        if self._fuses(h, self.update_rule):
            return "triton, one kernel for all steps"
        if self._steps_by_kernel(h):
            return f"triton, kernels for one step: {self.why_not_fused(h)}"
        return f"torch: {self._why_not_by_step(h)}" if self.backend == "auto" else self.backend

    # a subclass with kernels overrides these three

    def _why_no_fused(self, h: Tensor) -> str | None:
        """Why the fused kernel does not fit this layer's sizes, in the dtype and on the device of h; None if it does."""
        return f"{type(self).__name__} has no fused kernel"

    def _why_no_step(self) -> str | None:
        """Why there is no kernel for a step of this layer, which ``_condition`` then takes; None if there is."""
        return f"{type(self).__name__} has no kernel"

    def _fused_descent(self, h: Tensor, step_sizes: Tensor, energies: bool, final: bool, record: bool) -> Descent:
        """The descent by one kernel, with the energies of z_0 .. z_{T−1}, and of z_T where ``final``.

        With ``record``, also the states and forces.
        """
        raise NotImplementedError

    def _descend(self, h: Tensor, recursions: int | None, update_rule: UpdateRule, observe: Recorder | None) -> Tensor:
        recursions = self.recursions if recursions is None else check_positive("recursions", recursions)
        if self._fuses(h, update_rule):
            record = observe is not None
            sizes = self._step_sizes(recursions)
            descent = self._fused_descent(h, sizes, energies=record, final=record, record=record)
            if observe is not None:
                for x, energy, force in zip(descent.states, descent.energy, [*descent.forces, None], strict=True):
                    observe(x, norm(x), energy, force)
            return descent.output
        look = self._look_anew if self.history == "refreshed" else self._look_from(h)
        step_sizes = self.step_sizes(recursions)
        return descend(look, h, step_sizes, self.preconditioner, update_rule, observe, self.recompute)

    def _look_from(self, h: Tensor) -> Callable[[Tensor], tuple[ConditionalEnergy, Tensor]]:
        """One energy for all steps, given norm(h), which is z_0 as well."""
        u = norm(h)
        energy = self._condition(u)
        return lambda x: (energy, u if x is h else norm(x))

    def _look_anew(self, x: Tensor) -> tuple[ConditionalEnergy, Tensor]:
        """An energy for each step, given z_t itself."""
        u = norm(x)
        return self._condition(u), u

    def step_sizes(self, recursions: int) -> Sequence[Tensor]:
        """η of each of so many steps; beyond the trained ones the last repeats."""
        if self.step_size.ndim == 0:
            return [self.step_size] * recursions
        sizes = self.step_size.unbind()
        return [sizes[min(t, len(sizes) - 1)] for t in range(recursions)]

    def _step_sizes(self, recursions: int) -> Tensor:
        """The same, (recursions,)."""
        return torch.stack([*self.step_sizes(recursions)])


def operand_dtype(h: Tensor) -> torch.dtype:
    """In which dtype a fused kernel multiplies matrices: that of h, or of autocast where it is on."""
    device = h.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype


def check_positive(key: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: expected an integer of at least 1, got {value!r}")
    return value


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{key}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def _initial_step_size(step_size: float | Sequence[float] | None, recursions: int) -> Tensor:
    """One scalar for all steps, or one value a step; 1/T by default."""
    if step_size is None:
        step_size = 1.0 / recursions
    single = isinstance(step_size, int | float)
    sizes = [step_size] if single else list(step_size)
    if len(sizes) != (1 if single else recursions) or not all(map(math.isfinite, sizes)):
        raise ValueError(
            f"step_size: expected one finite number, or {recursions} of them (recursions), got {step_size!r}"
        )
    return torch.tensor(step_size if single else sizes, dtype=torch.get_default_dtype())
