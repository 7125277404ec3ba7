r"""The element-wise energy's descent in Triton: T steps of a tied gated MLP in one launch, and its gradients in two.

    x_{t+1} = x_t + η_t P Wᵀ s_t ,      s_t = φ(a_t) ⊙ g ,      a_t = W z_t ,      z_t = norm(x_t)
    E_t     = − Σ_m g_m Φ(a_tm)

The gate g = ψ(V u) comes from outside. Rows are independent: a program takes some rows through all steps, with x on chip,
and meets the M hidden units in chunks that never leave it. The reverse of a step, with G the gradient that arrives at
x_{t+1} and e that of E_t, is

    q = P G ,   c = W q ,   b = η c ⊙ g ⊙ φ'(a) − e g ⊙ φ(a) ,   G ← G + J Wᵀ b
    ∂W += s (η q)ᵀ + b zᵀ ,     ∂g += η c ⊙ φ(a) − e Φ(a) ,     ∂η = s · c ,     ∂P = η G (Wᵀ s)ᵀ

It runs as two kernels, both free of atomics. ``reverse_kernel`` owns rows and walks t backwards; it leaves every q in
memory. ``reduce_kernel`` owns hidden units and a share of the rows; it computes a and c again from z and q, keeps its block
of ∂W on chip over all t and rows, and writes ∂g once. The shares are added by one plain sum, in a fixed order.

Where a width does not fit on chip, ``fused=False`` takes one launch a step. Energies at t < T cost no further product; E_T
is one more pass over the units. docs/kernels.md counts bytes and operations. Source of the energy: arXiv 2605.07588.

Shape suffixes: R rows (sequences times positions), D width, M hidden units, T steps, S states that the backward visits.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from energylab.energies import Quadratic, SiLU
from energylab.kernels.available import INTERPRETED
from energylab.kernels.common import (
    TRITON_DTYPES,
    CompileCase,
    accumulator,
    architecture,
    low_rank_factors,
    padded,
    precondition_dense,
    preconditioner_gradients,
    preconditioner_kind,
)
from energylab.kernels.elementwise_kernels import descend_kernel, reduce_kernel, reverse_kernel

EPSILON = 1e-6

# --- configurations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """How one kernel is cut: rows and hidden units of a tile, warps, stages of the load pipeline."""

    rows: int
    units: int
    num_warps: int
    num_stages: int = 2


# Rows, units, warps (and stages, 2 where not said): the largest tiles tried that ``compile_all`` finds clean, with every
# option on, on sm_80 and sm_90 alike. sm_86 takes them too, and they fit: its limit is 101,376 bytes of shared memory.
_SM_80 = {
    ("descend", "half"): {32: (64, 64, 4), 64: (64, 64, 4), 128: (32, 32, 8), 256: (16, 32, 8)},
    ("reverse", "half"): {32: (32, 64, 4), 64: (32, 64, 4), 128: (32, 32, 8), 256: (16, 32, 8)},
    ("reduce", "half"): {32: (16, 64, 4), 64: (32, 64, 4), 128: (16, 32, 4), 256: (16, 16, 8)},
    ("descend", "tf32"): {32: (32, 64, 4), 64: (32, 64, 4), 128: (16, 32, 4)},
    ("reverse", "tf32"): {32: (32, 64, 4), 64: (32, 64, 4), 128: (32, 32, 8)},
    ("reduce", "tf32"): {32: (16, 64, 4), 64: (16, 64, 4), 128: (16, 16, 4)},
    ("descend", "ieee"): {32: (32, 32, 4), 64: (16, 32, 4), 128: (16, 16, 8)},
    ("reverse", "ieee"): {32: (32, 32, 4), 64: (16, 16, 4), 128: (16, 16, 4)},
    ("reduce", "ieee"): {32: (16, 32, 4), 64: (16, 16, 8), 128: (16, 16, 8, 1)},
}
# the matrix instruction for gfx942 has no 16 units beside 256 columns
_GFX942 = _SM_80 | {("reduce", "half"): _SM_80["reduce", "half"] | {256: (16, 32, 8)}}
_TABLES = {"sm_80": _SM_80, "sm_86": _SM_80, "sm_90": _SM_80, "gfx942": _GFX942}
CONFIGURATIONS = {
    (kernel, kind, width, where): Configuration(*cut)
    for where, table in _TABLES.items()
    for (kernel, kind), by_width in table.items()
    for width, cut in by_width.items()
}
"""By kernel, kind of product (``half``, ``tf32``, ``ieee``), padded width and architecture."""
LARGEST_RANK = 8
"""Of a preconditioner; U Vᵀ + V Uᵀ has twice as many columns, and 16 of them is what the configurations are checked with."""
INTERPRETER_CUT = Configuration(rows=64, units=64, num_warps=1)
"""The interpreter's time is a matter of how many operations there are, not of their size."""


@torch.compiler.assume_constant_result  # a setting that torch.compile cannot trace
def precision_of(dtype: torch.dtype) -> str:
    """``tf32`` where PyTorch's own products of float32 use it on a GPU, else ``ieee``; it matters for float32 only."""
    # not allow_tf32, which raises once somebody has used the newer setting
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _entry(kernel: str, dtype: torch.dtype, precision: str, width: int, architecture: str) -> tuple[str, str, int, str]:
    return kernel, precision if dtype == torch.float32 else "half", padded(width, 32), architecture


def configuration(kernel: str, dtype: torch.dtype, precision: str, width: int, architecture: str) -> Configuration:
    """The entry of the table for a kernel; KeyError where it has none."""
    if INTERPRETED:
        return INTERPRETER_CUT
    return CONFIGURATIONS[_entry(kernel, dtype, precision, width, architecture)]


def why_not_shape(dtype: torch.dtype, device: torch.device, width: int, rank: int) -> str | None:
    """Why the table has no kernel for a layer; None if it has."""
    if INTERPRETED:
        return None
    if rank > LARGEST_RANK:
        return f"the fused kernel is made for preconditioners of rank up to {LARGEST_RANK}, and the rank is {rank}"
    key = _entry("reduce", dtype, precision_of(dtype), width, architecture(device))
    if key not in CONFIGURATIONS:
        return f"the table of configurations has no entry for width {key[2]} in {dtype} ({key[1]}) on {key[3]}"
    return None


def compile_cases() -> list[CompileCase]:
    """Every entry of the table with all options on, and the half-precision kernels of width 64 with all of them off."""
    cases = []
    for (kernel, kind, width, where), cut in CONFIGURATIONS.items():
        if where == "sm_86":  # the same kernels as on sm_80
            continue
        for full in (True, False) if (kind, width) == ("half", 64) else (True,):
            cases.append(_compile_case(kernel, kind, width, where, cut, "bf16" if kind == "half" else "fp32", full))
    cut = CONFIGURATIONS["descend", "half", 64, "sm_90"]
    return [*cases, _compile_case("descend", "half", 64, "sm_90", cut, "fp16", True)]


def _compile_case(
    kernel: str, kind: str, width: int, where: str, cut: Configuration, dtype: str, full: bool
) -> CompileCase:
    function = {"descend": descend_kernel, "reverse": reverse_kernel, "reduce": reduce_kernel}[kernel]
    constants = {
        "D": width,
        "M": 2 * width,
        "SILU": True,
        "P": 2 if full else 0,
        "RANK": padded(2 * LARGEST_RANK),
        "ENERGY": (2 if kernel == "descend" else True) if full else (0 if kernel == "descend" else False),
        "SAVE": 2 if full else 0,
        "FORCES": full,
        "BLOCK_R": cut.rows,
        "BLOCK_M": cut.units,
        "BLOCK_D": padded(width),
        "BLOCK_S": 16,
        "EPSILON": EPSILON,
        "ACC": tl.float32,
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
    }
    wide = ("step_ptr", "scale_ptr", "energy_ptr", "pull_energy_ptr", "pull_weight_ptr", "pull_step_ptr")
    return CompileCase(
        name=f"elementwise {kernel}, {'all options' if full else 'plain'}",
        architecture=where,
        dtype=dtype,
        width=width,
        function=function,
        signature={
            name: "i32" if not name.endswith("_ptr") else "*fp32" if name in wide else f"*{dtype}"
            for name in function.arg_names
        },
        constants={name: value for name, value in constants.items() if name in function.arg_names},
        options={"num_warps": cut.num_warps, "num_stages": cut.num_stages},
    )


# --- launching -------------------------------------------------------------------------------------------------------

PROGRAMS = 264
"""How many programs ``reduce_kernel`` is given at least, if there are so many blocks: two for each processor of an H100. A
fixed number, so that the order of the sums does not depend on the device."""


@dataclass(frozen=True)
class Inputs:
    """What a descent is given, as tensors: see ``elementwise_descent``."""

    x: Tensor
    gate: Tensor
    weight: Tensor
    step_sizes: Tensor
    scale: Tensor | None
    left: Tensor | None
    right: Tensor | None
    activation: str
    final: bool

    @property
    def steps(self) -> int:
        return self.step_sizes.shape[0]

    @property
    def states(self) -> int:
        """How many of the x_t the backward visits: those with a step, and x_T where it has an energy."""
        return self.steps + self.final

    @property
    def rows(self) -> int:
        return self.x.shape[:-1].numel()

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.weight.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.accumulator, device=self.x.device)


def _constants(inputs: Inputs, cut: Configuration, precision: str) -> dict[str, Any]:
    units, width = inputs.weight.shape
    return {
        "D": width,
        "M": units,
        "SILU": inputs.activation == "silu",
        "P": preconditioner_kind(inputs.scale, inputs.left),
        "RANK": padded(_rank(inputs)),
        "BLOCK_R": cut.rows,
        "BLOCK_M": min(cut.units, padded(units)),
        "BLOCK_D": padded(width),
        "EPSILON": EPSILON,
        "ACC": TRITON_DTYPES[inputs.accumulator],
        "PRECISION": precision,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
    }


def _rank(inputs: Inputs) -> int:
    if inputs.left is None:
        return 0
    return inputs.left.shape[1] * (1 if inputs.right is None else 2)


def _preconditioner(inputs: Inputs, nothing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels read of P; ``nothing`` stands for a pointer that is not followed."""
    scale = nothing if inputs.scale is None else inputs.scale.to(inputs.accumulator).contiguous()
    if inputs.left is None:
        return scale, nothing, nothing
    left, right = low_rank_factors(inputs.left, inputs.right)
    return scale, left.to(inputs.weight.dtype), right.to(inputs.weight.dtype)


def launch_forward(
    inputs: Inputs,
    energies: bool,
    save: bool,
    forces: bool,
    fused: bool = True,
    cut: Configuration | None = None,
    precision: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_T, and where asked for the energies, the states and the forces: one launch, or T of them."""
    precision = precision or precision_of(inputs.weight.dtype)
    width, dtype = inputs.x.shape[-1], inputs.weight.dtype
    cut = cut or configuration("descend", dtype, precision, width, architecture(inputs.x.device))
    shape, rows, steps = inputs.x.shape, inputs.rows, inputs.steps
    x, gate, weight = inputs.x.contiguous(), inputs.gate.contiguous(), inputs.weight.contiguous()
    output = inputs.empty(*shape, dtype=x.dtype)
    energy = inputs.empty(inputs.states if energies else 0, *shape[:-1])
    states = inputs.empty(inputs.states if save else 0, *shape, dtype=x.dtype)
    force = inputs.empty(steps if forces else 0, *shape, dtype=dtype)
    step_sizes = inputs.step_sizes.to(inputs.accumulator).contiguous()
    preconditioner = _preconditioner(inputs, step_sizes)
    constants: dict[str, Any] = _constants(inputs, cut, precision)
    grid = (triton.cdiv(rows, cut.rows),)
    for begin, end in [(0, steps)] if fused else [(t, t + 1) for t in range(steps)]:
        level = 1 + (inputs.final and end == steps)
        # between launches x stays in the accumulator's dtype
        out = output if end == steps else inputs.empty(*shape)
        descend_kernel[grid](
            x,
            gate,
            weight,
            step_sizes[begin:],
            *preconditioner,
            out,
            energy[begin:],
            states[begin:],
            force[begin:],
            rows,
            end - begin,
            _rank(inputs),
            **constants,
            **{"ENERGY": level if energies else 0, "SAVE": level if save else 0, "FORCES": forces},
        )
        x = out
    return output, energy, states, force


def launch_backward(
    inputs: Inputs,
    pull_output: Tensor,
    pull_energy: Tensor | None,
    states: Tensor,
    forces: Tensor,
    fused: bool = True,
    cuts: tuple[Configuration, Configuration] | None = None,
    precision: str | None = None,
) -> "Gradients":
    """Every gradient: one launch over rows (or one for each state), one over hidden units, and a plain sum."""
    precision = precision or precision_of(inputs.weight.dtype)
    (units, width), dtype = inputs.weight.shape, inputs.weight.dtype
    where = architecture(inputs.x.device)
    reverse, reduce = cuts or [configuration(name, dtype, precision, width, where) for name in ("reverse", "reduce")]
    rows, count = inputs.rows, inputs.states
    gate, weight, pull = inputs.gate.contiguous(), inputs.weight.contiguous(), pull_output.contiguous()
    step_sizes = inputs.step_sizes.to(inputs.accumulator)
    if inputs.final:  # E(x_T) without a step from there
        step_sizes = torch.cat([step_sizes, step_sizes.new_zeros(1)])
    pull_energy_or_nothing = step_sizes if pull_energy is None else pull_energy.to(inputs.accumulator).contiguous()
    q = inputs.empty(count, *inputs.x.shape, dtype=dtype)
    pulls = inputs.empty(count if inputs.scale is not None else 0, *inputs.x.shape, dtype=dtype)
    pull_x = inputs.empty(*inputs.x.shape, dtype=inputs.x.dtype)
    constants: dict[str, Any] = {**_constants(inputs, reverse, precision), "ENERGY": pull_energy is not None}
    preconditioner = _preconditioner(inputs, step_sizes)
    for begin, end in [(0, count)] if fused else [(t, t + 1) for t in reversed(range(count))]:
        # between launches G stays in the accumulator's dtype
        out = pull_x if begin == 0 else inputs.empty(*inputs.x.shape)
        reverse_kernel[(triton.cdiv(rows, reverse.rows),)](
            pull,
            pull_energy_or_nothing,
            gate,
            weight,
            step_sizes,
            *preconditioner,
            states,
            out,
            q,
            pulls,
            rows,
            begin,
            end,
            _rank(inputs),
            **constants,
        )
        pull = out
    constants = {**_constants(inputs, reduce, precision), "ENERGY": pull_energy is not None}
    del constants["P"], constants["RANK"]
    chunks = -(-units // constants["BLOCK_M"])
    shares = min(-(-rows // reduce.rows), -(-PROGRAMS // chunks))
    pull_gate = inputs.empty(*gate.shape, dtype=dtype)
    pull_weight = inputs.empty(shares, units, width)
    pull_step = inputs.empty(shares, chunks, count)
    reduce_kernel[(chunks, shares)](
        pull_energy_or_nothing,
        gate,
        weight,
        step_sizes,
        states,
        q,
        pull_gate,
        pull_weight,
        pull_step,
        rows,
        count,
        **constants,
        BLOCK_S=triton.next_power_of_2(count),
    )
    scale, left, right = preconditioner_gradients(
        pulls[: inputs.steps], forces, inputs.scale, inputs.left, inputs.right
    )
    return Gradients(
        x=pull_x,
        gate=pull_gate,
        weight=pull_weight.sum(0),
        step_sizes=pull_step.sum((0, 1))[: inputs.steps],
        scale=scale,
        left=left,
        right=right,
    )


@dataclass(frozen=True)
class Gradients:
    """The gradient of each differentiable field of ``Inputs``, None where that is None."""

    x: Tensor
    gate: Tensor
    weight: Tensor
    step_sizes: Tensor
    scale: Tensor | None
    left: Tensor | None
    right: Tensor | None


# --- the same in PyTorch ---------------------------------------------------------------------------------------------

ACTIVATIONS = {"silu": SiLU(), "quadratic": Quadratic()}


def _in_accumulator(inputs: Inputs) -> Inputs:
    """The same, all in the accumulator's dtype."""
    parts = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    wide: dict[str, Any] = {k: v.to(inputs.accumulator) if isinstance(v, Tensor) else v for k, v in parts.items()}
    return Inputs(**wide)


def dense_forward(inputs: Inputs, energies: bool, save: bool, forces: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``launch_forward`` computes, with the hidden activations in memory."""
    wide, phi = _in_accumulator(inputs), ACTIVATIONS[inputs.activation]
    gate, weight, x = wide.gate, wide.weight, wide.x
    states, energy, force = [x], [], []
    for step_size in wide.step_sizes:
        a = _norm(x)[0] @ weight.mT
        force.append((phi.activation(a) * gate) @ weight)
        energy.append(-(gate * phi.potential(a)).sum(-1))
        x = x + step_size * precondition_dense(force[-1], wide.scale, wide.left, wide.right)
        states.append(x)
    energy.append(-(gate * phi.potential(_norm(x)[0] @ weight.mT)).sum(-1))

    def stacked(values: list[Tensor], wanted: bool, dtype: torch.dtype) -> Tensor:
        return torch.stack(values).to(dtype) if wanted else inputs.empty(0, *values[0].shape, dtype=dtype)

    return (
        x.to(inputs.x.dtype, copy=True),
        stacked(energy[: inputs.states], energies, inputs.accumulator),
        stacked(states[: inputs.states], save, inputs.x.dtype),
        stacked(force, forces, inputs.weight.dtype),
    )


def dense_backward(
    inputs: Inputs, pull_output: Tensor, pull_energy: Tensor | None, states: Tensor, forces: Tensor
) -> Gradients:
    """What ``launch_backward`` computes: the algebra at the top of this file, line by line."""
    wide, phi = _in_accumulator(inputs), ACTIVATIONS[inputs.activation]
    gate, weight, step_sizes = wide.gate, wide.weight, wide.step_sizes
    preconditioner = wide.scale, wide.left, wide.right
    if inputs.final:  # E(x_T) without a step from there
        step_sizes = torch.cat([step_sizes, step_sizes.new_zeros(1)])
    pull = pull_output.to(inputs.accumulator)
    pull_weight, pull_gate = torch.zeros_like(weight), torch.zeros_like(gate)
    pull_step, pulls = torch.zeros_like(step_sizes), []
    for t in reversed(range(inputs.states)):
        z, inverse = _norm(states[t].to(inputs.accumulator))
        q = precondition_dense(pull, *preconditioner)
        a, c = z @ weight.mT, q @ weight.mT
        activation = phi.activation(a)
        s, b = activation * gate, step_sizes[t] * c * gate * phi.slope(a)
        pull_gate = pull_gate + step_sizes[t] * c * activation
        if pull_energy is not None:
            e = pull_energy[t].to(inputs.accumulator)[..., None]
            b = b - e * s
            pull_gate = pull_gate - e * phi.potential(a)
        pull_step[t] = (s * c).sum()
        pulls.insert(0, step_sizes[t] * pull)
        pull_weight = pull_weight + step_sizes[t] * s.flatten(0, -2).mT @ q.flatten(0, -2)
        pull_weight = pull_weight + b.flatten(0, -2).mT @ z.flatten(0, -2)
        dz = b @ weight
        pull = pull + inverse * (dz - z * (z * dz).mean(-1, keepdim=True))  # J(x) dz
    scale, left, right = preconditioner_gradients(
        torch.stack(pulls[: inputs.steps]), forces.to(inputs.accumulator), *preconditioner
    )
    return Gradients(pull, pull_gate, pull_weight, pull_step[: inputs.steps], scale, left, right)


def _norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """``norm(x)`` and ``1/rms(x)``."""
    inverse = (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    return x * inverse, inverse


# --- the operators ---------------------------------------------------------------------------------------------------

_DIFFERENTIABLE = tuple(field.name for field in dataclasses.fields(Gradients))
SECOND_DERIVATIVE = 'second derivative: the fused kernel has only a first one; use backend="reference"'


@torch.library.custom_op("energylab::elementwise_descent", mutates_args=())
def elementwise_descent(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    step_sizes: Tensor,
    scale: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    activation: str,
    final: bool,
    energies: bool,
    save: bool,
    forces: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """T steps from ``x``: x_T, the energies, the states x_0 .. x_{T−1}, the forces.

    Args:
        x: (B, N, D), in its own dtype; the state is kept in float32.
        gate, weight: g = ψ(V u), (B, N, M), and W, (M, D), in the dtype of the matrix products.
        step_sizes: (T,).
        scale, left, right: P, diag(scale) + U Vᵀ + V Uᵀ, or + U Uᵀ where ``right`` is None.
        activation: ``silu`` or ``quadratic``.
        final: with x_T among the states and its energy among the energies, by one more pass over the units.
        energies, save, forces: whether these are wanted; the backward needs the states, and the forces for P.
        fused: one launch for all steps, or one for each.

    Differentiable in x_T and the energies, (T, B, N), once.
    """
    inputs = Inputs(x, gate, weight, step_sizes, scale, left, right, activation, final)
    if x.is_cuda or INTERPRETED:
        return launch_forward(inputs, energies, save, forces, fused)
    return dense_forward(inputs, energies, save, forces)


@elementwise_descent.register_fake
def _(x, gate, weight, step_sizes, scale, left, right, activation, final, energies, save, forces, fused):
    inputs = Inputs(x, gate, weight, step_sizes, scale, left, right, activation, final)
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        inputs.empty(inputs.states if energies else 0, *x.shape[:-1]),
        inputs.empty(inputs.states if save else 0, *x.shape, dtype=x.dtype),
        inputs.empty(inputs.steps if forces else 0, *x.shape, dtype=weight.dtype),
    )


@torch.library.custom_op("energylab::elementwise_descent_backward", mutates_args=())
def elementwise_descent_backward(
    pull_output: Tensor,
    pull_energy: Tensor | None,
    states: Tensor,
    saved_forces: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    step_sizes: Tensor,
    scale: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    activation: str,
    final: bool,
    fused: bool,
) -> list[Tensor]:
    """The gradients of ``elementwise_descent``, in the order of ``Gradients``, those that are None left out."""
    inputs = Inputs(x, gate, weight, step_sizes, scale, left, right, activation, final)
    if x.is_cuda or INTERPRETED:
        gradients = launch_backward(inputs, pull_output, pull_energy, states, saved_forces, fused)
    else:
        gradients = dense_backward(inputs, pull_output, pull_energy, states, saved_forces)
    return [
        getattr(gradients, name).to(getattr(inputs, name).dtype)
        for name in _DIFFERENTIABLE
        if getattr(inputs, name) is not None
    ]


@elementwise_descent_backward.register_fake
def _(pull_output, pull_energy, states, saved_forces, *arguments):
    inputs = Inputs(*arguments[:-1])
    tensors = [getattr(inputs, name) for name in _DIFFERENTIABLE]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors if t is not None]


def _setup(ctx, inputs, output) -> None:
    *tensors, activation, final, _, save, _, fused = inputs
    ctx.save_for_backward(*tensors, *(output[2:] if save else ()))
    ctx.activation, ctx.final, ctx.fused, ctx.saved = activation, final, fused, save
    ctx.set_materialize_grads(False)


def _backward(ctx, pull_output, pull_energy, *_):
    if not ctx.saved:
        raise RuntimeError("elementwise_descent: a backward needs save=True")
    *tensors, states, forces = ctx.saved_tensors
    pull_output = torch.zeros_like(tensors[0]) if pull_output is None else pull_output
    if pull_energy is not None and len(pull_energy) == 0:  # no energies were asked for
        pull_energy = None
    values = elementwise_descent_backward(
        pull_output, pull_energy, states, forces, *tensors, ctx.activation, ctx.final, ctx.fused
    )
    gradients = iter(values)
    return (*(None if tensor is None else next(gradients) for tensor in tensors), *[None] * 6)


elementwise_descent.register_autograd(_backward, setup_context=_setup)


def _refuse(ctx, *pulls):
    raise RuntimeError(SECOND_DERIVATIVE)


elementwise_descent_backward.register_autograd(_refuse)
