r"""One step down the element-wise energy, for widths at which no kernel takes all steps.

    s = φ(a) ⊙ g ,     E = − Σ_m g_m Φ(a_m) ,          da = ds ⊙ g ⊙ φ'(a) − e s ,     dg = ds ⊙ φ(a) − e Φ(a)

with ds and e the gradients at s and E. The products ``a = W z`` and ``Wᵀ s``, and their gradients, are PyTorch's: at such
widths the arithmetic is in them. The rest is one pass over a and g forward, and one backward. a and s do pass through
memory here; docs/kernels.md says what that costs, and why.

Shape suffixes: R rows (sequences times positions), M hidden units.
"""

# a jitted function's constants are written as plain values, which its annotations do not say
# pyright: reportArgumentType=false

from collections.abc import Iterator
from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from energylab.energies import ConditionalEnergy, ElementwiseEnergy
from energylab.kernels.available import INTERPRETED
from energylab.kernels.common import TRITON_DTYPES, CompileCase, accumulator, cast
from energylab.kernels.elementwise import ACTIVATIONS, SECOND_DERIVATIVE
from energylab.kernels.elementwise_kernels import activation, potential, slope

# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def gate_kernel(
    a_ptr,  # (R, M)
    gate_ptr,  # (R, M)
    s_ptr,  # (R, M)
    energy_ptr,  # (R,)
    rows,
    M: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ACC: tl.constexpr,
):
    """s and E of BLOCK_R rows."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    local = tl.arange(0, BLOCK_R)
    inside_R = first + local < rows
    energy = tl.zeros([BLOCK_R], ACC)
    for start in range(0, M, BLOCK_M):
        units = start + tl.arange(0, BLOCK_M)
        inside = inside_R[:, None] & (units < M)[None, :]
        offsets = first * M + local[:, None] * M + units[None, :]
        a = tl.load(a_ptr + offsets, mask=inside, other=0.0).to(ACC)
        gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(ACC)
        tl.store(s_ptr + offsets, cast(activation(a, SILU) * gate, s_ptr.dtype.element_ty), mask=inside)
        energy -= tl.sum(gate * potential(a, SILU), 1)
    tl.store(energy_ptr + first + local, energy, mask=inside_R)


@triton.jit(do_not_specialize=["rows"])
def gate_grad_kernel(
    a_ptr,
    gate_ptr,
    s_grad_ptr,  # (R, M): ds
    energy_grad_ptr,  # (R,): e
    a_grad_ptr,  # (R, M)
    gate_grad_ptr,  # (R, M)
    rows,
    M: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ACC: tl.constexpr,
):
    """da and dg of BLOCK_R rows."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    local = tl.arange(0, BLOCK_R)
    inside_R = first + local < rows
    e = tl.load(energy_grad_ptr + first + local, mask=inside_R, other=0.0).to(ACC)[:, None]
    for start in range(0, M, BLOCK_M):
        units = start + tl.arange(0, BLOCK_M)
        inside = inside_R[:, None] & (units < M)[None, :]
        offsets = first * M + local[:, None] * M + units[None, :]
        a = tl.load(a_ptr + offsets, mask=inside, other=0.0).to(ACC)
        gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(ACC)
        pull = tl.load(s_grad_ptr + offsets, mask=inside, other=0.0).to(ACC)
        phi = activation(a, SILU)
        a_grad = (pull * slope(a, SILU) - e * phi) * gate
        gate_grad = pull * phi - e * potential(a, SILU)
        tl.store(a_grad_ptr + offsets, cast(a_grad, a_grad_ptr.dtype.element_ty), mask=inside)
        tl.store(gate_grad_ptr + offsets, cast(gate_grad, gate_grad_ptr.dtype.element_ty), mask=inside)


CUT = {"BLOCK_R": 8, "BLOCK_M": 128, "num_warps": 4}
"""One tile for all sizes, dtypes and architectures: eight elements a thread, and nothing that could spill."""


def _launch(kernel: Any, a: Tensor, *others: Tensor, activation: str) -> None:
    units = a.shape[-1]
    rows = a.numel() // units
    kernel[(triton.cdiv(rows, CUT["BLOCK_R"]),)](
        a, *others, rows, M=units, SILU=activation == "silu", ACC=TRITON_DTYPES[accumulator(a.dtype)], **CUT
    )


def compile_cases() -> Iterator[CompileCase]:
    """Both kernels on each architecture, in bfloat16 and float32."""
    for where in ("sm_80", "sm_90", "gfx942"):
        for name, kernel in (("gate", gate_kernel), ("gate_grad", gate_grad_kernel)):
            for dtype in ("bf16", "fp32"):
                constants = {"M": 1024, "SILU": True, "ACC": tl.float32, **CUT}
                num_warps = constants.pop("num_warps")
                yield CompileCase(
                    name=f"elementwise step {name}",
                    architecture=where,
                    dtype=dtype,
                    width=512,
                    function=kernel,
                    signature={
                        a: "i32" if a == "rows" else "*fp32" if a.startswith("energy") else f"*{dtype}"
                        for a in kernel.arg_names
                        if a not in constants
                    },
                    constants=constants,
                    options={"num_warps": num_warps, "num_stages": 2},
                    multiplies=False,
                )


# --- the operators ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("energylab::elementwise_step", mutates_args=())
def elementwise_step(a: Tensor, gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``φ(a) ⊙ g``, (..., M), and the energy ``− Σ_m g_m Φ(a_m)``, (...), in one pass; both differentiable, once.

    Args:
        a, gate: ``W z`` and ψ(V u), (..., M), contiguous, in one dtype; sums are kept in float32 at least.
        activation: ``silu`` or ``quadratic``.
    """
    if not (a.is_cuda or INTERPRETED):
        return dense_forward(a, gate, activation)
    s, energy = _empty(*a.shape, like=a), _empty(*a.shape[:-1], like=a, dtype=accumulator(a.dtype))
    _launch(gate_kernel, a, gate, s, energy, activation=activation)
    return s, energy


@elementwise_step.register_fake
def _(a, gate, activation):
    return torch.empty_like(a), _empty(*a.shape[:-1], like=a, dtype=accumulator(a.dtype))


@torch.library.custom_op("energylab::elementwise_step_backward", mutates_args=())
def elementwise_step_backward(
    s_grad: Tensor, energy_grad: Tensor, a: Tensor, gate: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The gradients of ``elementwise_step`` at a and the gate."""
    if not (a.is_cuda or INTERPRETED):
        return dense_backward(s_grad, energy_grad, a, gate, activation)
    a_grad, gate_grad = _empty(*a.shape, like=a), _empty(*a.shape, like=a)
    _launch(gate_grad_kernel, a, gate, s_grad, energy_grad, a_grad, gate_grad, activation=activation)
    return a_grad, gate_grad


@elementwise_step_backward.register_fake
def _(s_grad, energy_grad, a, gate, activation):
    return torch.empty_like(a), torch.empty_like(a)


def _empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def dense_forward(a: Tensor, gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """What ``gate_kernel`` computes."""
    phi, wide = ACTIVATIONS[activation], accumulator(a.dtype)
    a_wide, gate_wide = a.to(wide), gate.to(wide)
    return (phi.activation(a_wide) * gate_wide).to(a.dtype), -(gate_wide * phi.potential(a_wide)).sum(-1)


def dense_backward(
    s_grad: Tensor, energy_grad: Tensor, a: Tensor, gate: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """What ``gate_grad_kernel`` computes."""
    phi, wide, dtype = ACTIVATIONS[activation], accumulator(a.dtype), a.dtype
    pull, a, gate, e = s_grad.to(wide), a.to(wide), gate.to(wide), energy_grad.to(wide)[..., None]
    a_grad = (pull * phi.slope(a) - e * phi.activation(a)) * gate
    return a_grad.to(dtype), (pull * phi.activation(a) - e * phi.potential(a)).to(dtype)


def _setup(ctx, inputs, output) -> None:
    a, gate, ctx.activation = inputs
    ctx.save_for_backward(a, gate)
    ctx.energy_dtype = output[1].dtype
    ctx.set_materialize_grads(False)


def _backward(ctx, s_grad, energy_grad):
    a, gate = ctx.saved_tensors
    s_grad = torch.zeros_like(a) if s_grad is None else s_grad.contiguous()
    if energy_grad is None:
        energy_grad = a.new_zeros(a.shape[:-1], dtype=ctx.energy_dtype)
    return *elementwise_step_backward(s_grad, energy_grad.contiguous(), a, gate, ctx.activation), None


elementwise_step.register_autograd(_backward, setup_context=_setup)


def _refuse(ctx, *grads):
    raise RuntimeError(SECOND_DERIVATIVE)


elementwise_step_backward.register_autograd(_refuse)


# --- the energy ------------------------------------------------------------------------------------------------------


@final
class ElementwiseByStep(ConditionalEnergy):
    """An ``ElementwiseEnergy`` whose force and value share one pass over the activations, once differentiable.

    Args:
        reference: what is left to plain PyTorch: curvature, and single positions.
        activation: the name of the reference's.
        dtype: of the matrix products.
    """

    def __init__(self, reference: ElementwiseEnergy, activation: str, dtype: torch.dtype):
        self.reference, self.activation = reference, activation
        self.weight_MD = reference.weight_MD.to(dtype)
        self.gate_BNM = reference.gate_BNM.to(dtype).contiguous()

    def force_and_value(self, z: Tensor) -> tuple[Tensor, Tensor]:
        a_BNM = F.linear(z.to(self.weight_MD.dtype), self.weight_MD)
        s_BNM, energy_BN = elementwise_step(a_BNM, self.gate_BNM, self.activation)
        return s_BNM @ self.weight_MD, energy_BN.to(z.dtype)

    def force(self, z: Tensor) -> Tensor:
        return self.force_and_value(z)[0]

    def value(self, z: Tensor) -> Tensor:
        return self.force_and_value(z)[1]

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        return self.reference.hvp(z, v)

    def at(self, position: int) -> ElementwiseEnergy:
        return self.reference.at(position)
