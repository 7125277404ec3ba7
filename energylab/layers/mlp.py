"""A gated MLP as descent on the element-wise energy."""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from energylab.energies import Activation, ConditionalEnergy, ElementwiseEnergy, Quadratic, SiLU
from energylab.layers.base import EnergyLayer, check_choice, check_positive, operand_dtype
from energylab.layers.descent import Descent, norm

ACTIVATIONS: dict[str, Activation] = {"silu": SiLU(), "quadratic": Quadratic()}


@final
class CEMMLP(EnergyLayer):
    r"""T steps down ``E(z_i | u_i) = − Σ_m ψ(v_mᵀ u_i) Φ(w_mᵀ z_i)``, with u = norm(h) and z = norm(x).

    One step with P = I is ``h + η Wᵀ( φ(W z) ⊙ ψ(V u) )``, a gated MLP whose down-projection is the transposed
    up-projection: 2·M·D weights, two thirds of an ordinary gated MLP's.

    Args:
        width: D.
        hidden: M.
        recursions: T.
        activation: ``silu`` (φ = SiLU, ψ = identity) or ``quadratic`` (φ = identity, ψ = SiLU).
        preconditioner, rank, step_size, update_rule, history, backend: as for ``CEMAttention``. Under a refreshed
            history the gate is recomputed from x_t at each step.

    Parameters: ``weight`` W and ``gate_weight`` V, (M, D) each, and ``step_size``.

    This energy is not concave, and a large step can climb. Raises ValueError for a setting out of range. Source: arXiv
    2605.07588.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        recursions: int = 1,
        activation: str = "silu",
        preconditioner: str = "none",
        rank: int = 8,
        step_size: float | Sequence[float] | None = None,
        update_rule: str = "gradient",
        backend: str = "auto",
        history: str = "fixed",
    ):
        super().__init__(width, recursions, preconditioner, rank, step_size, update_rule, history, backend)
        self.hidden = check_positive("hidden", hidden)
        self.activation = ACTIVATIONS[check_choice("activation", activation, tuple(ACTIVATIONS))]
        self.activation_name = activation
        self.weight = nn.Parameter(torch.randn(hidden, width) / math.sqrt(width))
        self.gate_weight = nn.Parameter(torch.randn(hidden, width) / math.sqrt(width))

    def _condition(self, u: Tensor) -> ConditionalEnergy:
        gate_BNM = self.activation.gate(F.linear(u, self.gate_weight))
        energy = ElementwiseEnergy(gate_BNM, self.weight, self.activation)
        if self._steps_by_kernel(u):
            from energylab.kernels.elementwise_step import ElementwiseByStep

            return ElementwiseByStep(energy, self.activation_name, operand_dtype(u))
        return energy

    def _why_no_step(self) -> None:
        return None

    def _why_no_fused(self, h: Tensor) -> str | None:
        from energylab.kernels.elementwise import why_not_shape

        rank = 0 if (left := self.preconditioner.parts()[1]) is None else left.shape[1]
        return why_not_shape(operand_dtype(h), h.device, self.width, rank)

    def _fused_descent(self, h: Tensor, step_sizes: Tensor, energies: bool, final: bool, record: bool) -> Descent:
        from energylab.kernels.elementwise import elementwise_descent

        dtype = operand_dtype(h)
        gate_BNM = self.activation.gate(F.linear(norm(h).to(dtype), self.gate_weight.to(dtype)))
        scale, left, right = self.preconditioner.parts()
        weight, left, right = (None if part is None else part.to(dtype) for part in (self.weight, left, right))
        inputs = (h, gate_BNM, weight, step_sizes, scale, left, right)
        save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
        output, energy, states, forces = elementwise_descent(
            *inputs,
            self.activation_name,
            final,
            energies,
            save=save or record,
            forces=record or (save and scale is not None),
            fused=True,
        )
        energy = energy.to(h.dtype)
        if not record:
            return Descent(output, energy)
        states = (*states[: len(step_sizes)].detach(), output)
        return Descent(output, energy, states, tuple(forces.detach().to(h.dtype)))

    def _certified_step_size(self, h: Tensor, recursions: int) -> Tensor:
        r"""``η ≤ rms(h) / (L/2 + T G)``, infinity where L = 0.

        L bounds the curvature of E from above, ``λ_max(∇²E) ≤ L = ‖W‖² max_m max(−g_m φ')``; G bounds the force on the
        ball ‖z‖ ≤ √D, ``‖∇E‖/√D ≤ G``, from |φ(a)| ≤ |a|. The derivation is in docs/descent.md.
        """
        gate = self.activation.gate(F.linear(norm(h), self.gate_weight))
        low, high = self.activation.slope_range
        spectral = torch.linalg.matrix_norm(self.weight, ord=2)
        curvature = spectral.square() * torch.maximum(-low * gate, -high * gate).amax(-1).clamp(min=0)
        rows = self.weight.square().sum(-1)  # ‖w_m‖²
        force = spectral * torch.minimum(spectral * gate.abs().amax(-1), (gate.square() @ rows).sqrt())
        rms = h.square().mean(-1).sqrt()
        bound = rms / (curvature / 2 + recursions * force)
        return torch.where(curvature > 0, bound, math.inf)
