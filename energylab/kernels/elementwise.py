r"""The element-wise energy's descent in Triton: T steps of a tied gated MLP in one launch, and its gradients in two.

    x_{t+1} = x_t + η_t P Wᵀ s_t ,      s_t = φ(a_t) ⊙ g ,      a_t = W z_t ,      z_t = norm(x_t)
    E_t     = − Σ_m g_m Φ(a_tm)

The gate g = ψ(V u) comes from outside. Rows are independent: a program takes some rows through all steps, with x on chip,
and meets the M hidden units in chunks that never leave it. The reverse of a step, with G the gradient that arrives at
x_{t+1} and e that of E_t, is

    q = P G ,   c = W q ,   b = η c ⊙ g ⊙ φ'(a) − e g ⊙ φ(a) ,   G ← G + J Wᵀ b
    ∂W += s (η q)ᵀ + b zᵀ ,     ∂g += η c ⊙ φ(a) − e Φ(a) ,     ∂η = s · c ,     ∂P = η G (Wᵀ s)ᵀ

It runs as two kernels, both free of atomics. ``_reverse`` owns rows and walks t backwards; it leaves every q in memory.
``_reduce`` owns hidden units and a share of the rows; it computes a and c again from z and q, keeps its block of ∂W on chip
over all t and rows, and writes ∂g once. The shares are added by one plain sum, in a fixed order.

Where a width does not fit on chip, ``fused=False`` takes one launch a step. Energies at t < T cost no further product; E_T
is one more pass over the units. docs/kernels.md counts bytes and operations. Source of the energy: arXiv 2605.07588.

Shape suffixes: R rows (sequences times positions), D width, M hidden units, T steps, S states that the backward visits.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from energylab.energies import Quadratic, SiLU
from energylab.kernels.available import INTERPRETED
from energylab.kernels.common import (
    LOG2E,
    TRITON_DTYPES,
    CompileCase,
    accumulator,
    architecture,
    cast,
    dot,
    inverse_rms,
    low_rank_factors,
    norm_jacobian,
    padded,
    precondition,
    precondition_dense,
    preconditioner_gradients,
    preconditioner_kind,
)

EPSILON = 1e-6

# --- the activation --------------------------------------------------------------------------------------------------

# Φ(−m) = m² N(m)/Q(m) for 0 ≤ m < 18, and its limit π²/12 beyond, where it is nearer than 3.6e-7. Fitted for the least
# maximal relative error, 3.3e-7, to Φ in high precision (a linearised Lawson iteration). All coefficients are positive, so
# float32 adds little: 7e-7 was the largest error seen in all.
_N0 = tl.constexpr(0.25000008198109414)
_N1 = tl.constexpr(0.006958704607730828)
_N2 = tl.constexpr(0.005031772615463055)
_N3 = tl.constexpr(0.00021243709127676086)
_N4 = tl.constexpr(6.283278333896929e-05)
_Q1 = tl.constexpr(0.36117614922060887)
_Q2 = tl.constexpr(0.14049024879952013)
_Q3 = tl.constexpr(0.03103512130005026)
_Q4 = tl.constexpr(0.0046133114611529025)
_Q5 = tl.constexpr(0.00030824938913737046)
_Q6 = tl.constexpr(7.572985350925876e-05)
_LIMIT = tl.constexpr(math.pi**2 / 12)


@triton.jit
def _sigmoid(a):
    y = tl.exp2(tl.abs(a) * -LOG2E)  # at −|a|, so that nothing overflows
    return tl.where(a > 0, 1.0, y) / (1.0 + y)


@triton.jit
def activation(a, SILU: tl.constexpr):
    """``φ(a)``."""
    if SILU:
        return a * _sigmoid(a)
    else:
        return a


@triton.jit
def slope(a, SILU: tl.constexpr):
    """``φ'(a)``."""
    if SILU:
        sigmoid = _sigmoid(a)
        return sigmoid * (1.0 + a * (1.0 - sigmoid))
    else:
        return tl.full(a.shape, 1.0, a.dtype)


@triton.jit
def potential(a, SILU: tl.constexpr):
    """``Φ(a)``: for SiLU at −|a|, then ``Φ(a) + Φ(−a) = a²/2``.

    In float64 by the dilogarithm's Bernoulli series and, near 0, where that cancels, by the Taylor series, as in
    ``energylab.energies.elementwise``; in float32 by one rational function.
    """
    if SILU:
        m = tl.abs(a)
        if a.dtype == tl.float64:
            v = tl.log(1.0 + tl.exp2(m * -LOG2E))
            s = v * v
            series = -691 / 2730 / 6227020800 + s * (7 / 6 / 1307674368000 - s * (3617 / 510 / 355687428096000))
            series = -1 / 30 / 362880 + s * (5 / 66 / 39916800 + s * series)
            series = s * (1 / 36 + s * (-1 / 3600 + s * (1 / 211680 + s * series)))
            far = -(m * v + v * (1.0 + series) + 0.25 * s) + _LIMIT
            s = m * m
            series = 21844 / 6081075 / 245760 - s * (929569 / 638512875 / 1114112)
            series = 62 / 2835 / 11264 + s * (-1382 / 155925 / 53248 + s * series)
            series = -1 / 3 / 80 + s * (2 / 15 / 448 + s * (-17 / 315 / 2304 + s * series))
            near = s * (0.25 - m * (1 / 12 + s * series))
            negative = tl.where(m < 0.35, near, far)
        else:
            numerator = (((m * _N4 + _N3) * m + _N2) * m + _N1) * m + _N0
            denominator = (((((m * _Q6 + _Q5) * m + _Q4) * m + _Q3) * m + _Q2) * m + _Q1) * m + 1.0
            negative = tl.where(m < 18.0, m * m * numerator / denominator, _LIMIT)
        return tl.where(a > 0, 0.5 * a * a - negative, negative)
    else:
        return 0.5 * a * a


# --- device kernels --------------------------------------------------------------------------------------------------


@triton.jit
def _load_weight(weight_ptr, first, D: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows ``first`` to ``first + BLOCK_M`` of W."""
    units, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    inside = (units < M)[:, None] & (columns < D)[None, :]
    return tl.load(weight_ptr + units[:, None] * D + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _load_gate(gate_ptr, first, inside_R, M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr):
    """Units ``first`` to ``first + BLOCK_M`` of the gate of some rows; ``gate_ptr`` stands at the first of these."""
    rows, units = tl.arange(0, BLOCK_R), first + tl.arange(0, BLOCK_M)
    inside = inside_R[:, None] & (units < M)[None, :]
    return tl.load(gate_ptr + rows[:, None] * M + units[None, :], mask=inside, other=0.0)


@triton.jit
def _energy(z, w, gate, SILU: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """The share of some units in E, (BLOCK_R,)."""
    a = dot(z, tl.trans(w), ACC, PRECISION)
    return -tl.sum(gate.to(ACC) * potential(a, SILU), 1)


@triton.jit
def _force(
    z, w, gate, force, energy, SILU: tl.constexpr, ENERGY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr
):
    """The force, and the energy if asked, with the share of some units added."""
    a = dot(z, tl.trans(w), ACC, PRECISION)
    if ENERGY:
        energy -= tl.sum(gate.to(ACC) * potential(a, SILU), 1)
    s = activation(a, SILU) * gate.to(ACC)
    force += dot(cast(s, w.dtype), w, ACC, PRECISION)
    return force, energy


# one compilation for every number of rows and steps, wherever in a sequence of launches
@triton.jit(do_not_specialize=["rows", "steps", "rank"], do_not_specialize_on_alignment=["step_ptr", "energy_ptr"])
def _descend(
    x_ptr,
    gate_ptr,
    weight_ptr,
    step_ptr,
    scale_ptr,
    left_ptr,
    right_ptr,
    output_ptr,
    energy_ptr,
    states_ptr,
    forces_ptr,
    rows,
    steps,
    rank,
    D: tl.constexpr,
    M: tl.constexpr,
    SILU: tl.constexpr,
    P: tl.constexpr,
    RANK: tl.constexpr,
    ENERGY: tl.constexpr,  # 0: none; 1: at t < T; 2: at T too
    SAVE: tl.constexpr,  # 0: no states; 1: x_t at t < T; 2: at T too
    FORCES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EPSILON: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_R rows through all T steps. x stays on chip, and W and the gate too where BLOCK_M covers them."""
    DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    state_stride = tl.cast(rows, tl.int64) * D
    local, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    inside_R = first + local < rows
    inside = inside_R[:, None] & (columns < D)[None, :]
    offsets = local[:, None] * D + columns[None, :]
    gate_ptr += first * M
    energy_ptr += first
    states_ptr += first * D
    forces_ptr += first * D
    x = tl.load(x_ptr + first * D + offsets, mask=inside, other=0.0).to(ACC)
    if M <= BLOCK_M:
        w = _load_weight(weight_ptr, 0, D, M, BLOCK_M, BLOCK_D)
        gate = _load_gate(gate_ptr, 0, inside_R, M, BLOCK_R, BLOCK_M)
    for t in range(steps):
        if SAVE > 0:
            tl.store(states_ptr + offsets, cast(x, states_ptr.dtype.element_ty), mask=inside)
            states_ptr += state_stride
        z = cast(x * inverse_rms(x, D, EPSILON)[:, None], DTYPE)
        force = tl.zeros([BLOCK_R, BLOCK_D], ACC)
        energy = tl.zeros([BLOCK_R], ACC)
        if M <= BLOCK_M:
            force, energy = _force(z, w, gate, force, energy, SILU, ENERGY > 0, ACC, PRECISION)
        else:
            for m in range(0, M, BLOCK_M):
                chunk = _load_weight(weight_ptr, m, D, M, BLOCK_M, BLOCK_D)
                chunk_gate = _load_gate(gate_ptr, m, inside_R, M, BLOCK_R, BLOCK_M)
                force, energy = _force(z, chunk, chunk_gate, force, energy, SILU, ENERGY > 0, ACC, PRECISION)
        if ENERGY > 0:
            tl.store(energy_ptr + local, energy, mask=inside_R)
            energy_ptr += rows
        if FORCES:
            tl.store(forces_ptr + offsets, cast(force, DTYPE), mask=inside)
            forces_ptr += state_stride
        direction = precondition(
            force, scale_ptr, left_ptr, right_ptr, columns, D, rank, P, RANK, DTYPE, ACC, PRECISION
        )
        x += tl.load(step_ptr + t) * direction
    tl.store(output_ptr + first * D + offsets, cast(x, output_ptr.dtype.element_ty), mask=inside)
    if SAVE > 1:
        tl.store(states_ptr + offsets, cast(x, states_ptr.dtype.element_ty), mask=inside)
    if ENERGY > 1:
        z = cast(x * inverse_rms(x, D, EPSILON)[:, None], DTYPE)
        energy = tl.zeros([BLOCK_R], ACC)
        for m in range(0, M, BLOCK_M):
            chunk = _load_weight(weight_ptr, m, D, M, BLOCK_M, BLOCK_D)
            chunk_gate = _load_gate(gate_ptr, m, inside_R, M, BLOCK_R, BLOCK_M)
            energy += _energy(z, chunk, chunk_gate, SILU, ACC, PRECISION)
        tl.store(energy_ptr + local, energy, mask=inside_R)


@triton.jit
def _pull(
    z, q, w, gate, eta, pull_energy, pulled,
    SILU: tl.constexpr, ENERGY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``Wᵀ b`` with the share of some units added."""
    a = dot(z, tl.trans(w), ACC, PRECISION)
    b = eta * dot(q, tl.trans(w), ACC, PRECISION) * slope(a, SILU)
    if ENERGY:
        b -= pull_energy[:, None] * activation(a, SILU)
    return pulled + dot(cast(b * gate.to(ACC), w.dtype), w, ACC, PRECISION)


@triton.jit(do_not_specialize=["rows", "begin", "end", "rank"])
def _reverse(
    pull_output_ptr,
    pull_energy_ptr,
    gate_ptr,
    weight_ptr,
    step_ptr,
    scale_ptr,
    left_ptr,
    right_ptr,
    states_ptr,
    pull_x_ptr,
    q_ptr,
    pull_ptr,
    rows,
    begin,
    end,
    rank,
    D: tl.constexpr,
    M: tl.constexpr,
    SILU: tl.constexpr,
    P: tl.constexpr,
    RANK: tl.constexpr,
    ENERGY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EPSILON: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_R rows from the state ``end - 1`` back to ``begin``. Leaves q of each state, and ηG under P > 0."""
    DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    state_stride = tl.cast(rows, tl.int64) * D
    local, columns = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    inside_R = first + local < rows
    inside = inside_R[:, None] & (columns < D)[None, :]
    offsets = local[:, None] * D + columns[None, :]
    gate_ptr += first * M
    pull = tl.load(pull_output_ptr + first * D + offsets, mask=inside, other=0.0).to(ACC)
    for t in range(end - 1, begin - 1, -1):
        at = first * D + state_stride * t
        eta = tl.load(step_ptr + t)
        q = precondition(pull, scale_ptr, left_ptr, right_ptr, columns, D, rank, P, RANK, DTYPE, ACC, PRECISION)
        q = cast(q, DTYPE)
        tl.store(q_ptr + at + offsets, q, mask=inside)
        if P > 0:
            tl.store(pull_ptr + at + offsets, cast(eta * pull, DTYPE), mask=inside)
        x = tl.load(states_ptr + at + offsets, mask=inside, other=0.0).to(ACC)
        inverse = inverse_rms(x, D, EPSILON)
        z = cast(x * inverse[:, None], DTYPE)
        pull_energy = tl.zeros([BLOCK_R], ACC)
        if ENERGY:
            pull_energy = tl.load(pull_energy_ptr + first + rows * t + local, mask=inside_R, other=0.0)
        pulled = tl.zeros([BLOCK_R, BLOCK_D], ACC)
        for m in range(0, M, BLOCK_M):
            w = _load_weight(weight_ptr, m, D, M, BLOCK_M, BLOCK_D)
            gate = _load_gate(gate_ptr, m, inside_R, M, BLOCK_R, BLOCK_M)
            pulled = _pull(z, q, w, gate, eta, pull_energy, pulled, SILU, ENERGY, ACC, PRECISION)
        x = tl.load(states_ptr + at + offsets, mask=inside, other=0.0).to(ACC)  # again, rather than held over the units
        pull += norm_jacobian(pulled, x * inverse[:, None], inverse, D)
    tl.store(pull_x_ptr + first * D + offsets, cast(pull, pull_x_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "states"])
def _reduce(
    pull_energy_ptr,
    gate_ptr,
    weight_ptr,
    step_ptr,
    states_ptr,
    q_ptr,
    pull_gate_ptr,
    pull_weight_ptr,
    pull_step_ptr,
    rows,
    states,
    D: tl.constexpr,
    M: tl.constexpr,
    SILU: tl.constexpr,
    ENERGY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,  # the states, padded to a power of two
    EPSILON: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_M units, all states of every ``num_programs(1)``-th block of rows.

    Units come first in every tile: then W and the left factors of ∂W are spread over the warps, where rows first would give
    each warp a copy of W.
    """
    DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M
    share = tl.program_id(1).to(tl.int64)
    shares = tl.num_programs(1)
    local, columns, units = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D), m + tl.arange(0, BLOCK_M)
    order = tl.arange(0, BLOCK_S)
    offsets = local[:, None] * D + columns[None, :]
    gate_offsets = local[None, :] * M + units[:, None]
    w = _load_weight(weight_ptr, m, D, M, BLOCK_M, BLOCK_D)
    pull_weight = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    pull_step = tl.zeros([BLOCK_S], ACC)
    first = share * BLOCK_R
    state_stride = tl.cast(rows, tl.int64) * D
    for _ in range(tl.program_id(1), tl.cdiv(rows, BLOCK_R), shares):
        inside_R = first + local < rows
        inside = inside_R[:, None] & (columns < D)[None, :]
        inside_MR = (units < M)[:, None] & inside_R[None, :]
        gate = tl.load(gate_ptr + first * M + gate_offsets, mask=inside_MR, other=0.0).to(ACC)
        pull_gate = tl.zeros([BLOCK_M, BLOCK_R], ACC)
        at = first * D
        energy_at = first
        for t in range(states):
            x = tl.load(states_ptr + at + offsets, mask=inside, other=0.0).to(ACC)
            q = tl.load(q_ptr + at + offsets, mask=inside, other=0.0)
            eta = tl.load(step_ptr + t)
            z = cast(x * inverse_rms(x, D, EPSILON)[:, None], DTYPE)
            a = dot(w, tl.trans(z), ACC, PRECISION)
            c = dot(w, tl.trans(q), ACC, PRECISION)
            phi = activation(a, SILU)
            s = phi * gate
            pull_step += tl.where(order == t, tl.sum(s * c), 0.0)
            c *= eta
            pull_gate += c * phi
            b = c * slope(a, SILU)
            if ENERGY:
                pull_energy = tl.load(pull_energy_ptr + energy_at + local, mask=inside_R, other=0.0)[None, :]
                pull_gate -= pull_energy * potential(a, SILU)
                b -= pull_energy * phi
            pull_weight += dot(cast(eta * s, DTYPE), q, ACC, PRECISION)
            pull_weight += dot(cast(b * gate, DTYPE), z, ACC, PRECISION)
            at += state_stride
            energy_at += rows
        tl.store(pull_gate_ptr + first * M + gate_offsets, cast(pull_gate, DTYPE), mask=inside_MR)
        first += shares * BLOCK_R
    inside = (units < M)[:, None] & (columns < D)[None, :]
    tl.store(pull_weight_ptr + share * (M * D) + units[:, None] * D + columns[None, :], pull_weight, mask=inside)
    chunk = share * tl.num_programs(0) + tl.program_id(0)
    tl.store(pull_step_ptr + chunk * states + order, pull_step, mask=order < states)


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
    function = {"descend": _descend, "reverse": _reverse, "reduce": _reduce}[kernel]
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
"""How many programs ``_reduce`` is given at least, if there are so many blocks: two for each processor of an H100. A fixed
number, so that the order of the sums does not depend on the device."""


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
        _descend[grid](
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
        _reverse[(triton.cdiv(rows, reverse.rows),)](
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
    _reduce[(chunks, shares)](
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
