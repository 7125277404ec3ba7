"""The device code of ``elementwise.py``: the activation, T steps down the element-wise energy, and their reverse.

The algebra and the shape suffixes are at the top of that file; the one-step kernels share the activation.
"""

# a jitted function's constants are written as plain values, which its annotations do not say
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false

import math

import triton
import triton.language as tl

from energylab.kernels.common import LOG2E, cast, dot, inverse_rms, norm_jacobian, precondition

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
def descend_kernel(
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
def reverse_kernel(
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
def reduce_kernel(
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
