"""The device code of ``interaction.py``: T steps down the interaction energy, and their reverse.

The algebra and the shape suffixes are at the top of that file; the one-step kernels share the loads and the mask.
"""

# a jitted function's constants are written as plain values, which its annotations do not say
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false

import triton
import triton.language as tl

from energylab.kernels.common import LN2, LOG2E, cast, dot, inverse_rms, norm_jacobian, precondition

EPSILON = tl.constexpr(1e-6)


# --- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def project(
    z,
    weight_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    WHOLE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``W_k z_i`` for every head, (H, BM, K), of ``z`` (BM, D), with W padded to (H, K, D).

    WHOLE reads the weights of all heads as one operand, else a head at a time.
    """
    BM: tl.constexpr = z.shape[0]
    D: tl.constexpr = z.shape[1]
    columns = tl.arange(0, D)
    if WHOLE:
        weight = tl.load(weight_ptr + tl.arange(0, H * K)[None, :] * D + columns[:, None])
        return tl.permute(tl.reshape(dot(z, weight, ACC, PRECISION), (BM, H, K)), (1, 0, 2))
    else:
        heads = tl.arange(0, H)
        result = tl.zeros((H, BM, K), ACC)
        for head in range(H):
            weight = tl.load(weight_ptr + head * (K * D) + tl.arange(0, K)[None, :] * D + columns[:, None])
            one = dot(z, weight, ACC, PRECISION)
            result = tl.where((heads == head)[:, None, None], one[None, :, :], result)
        return result


@triton.jit
def merge(
    o,
    weight_ptr,
    D: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``Σ_k W_kᵀ o_ik``, (BM, D), of ``o`` (H, BM, K): the transpose of ``project``."""
    H: tl.constexpr = o.shape[0]
    BM: tl.constexpr = o.shape[1]
    K: tl.constexpr = o.shape[2]
    columns = tl.arange(0, D)
    if WHOLE:
        weight = tl.load(weight_ptr + tl.arange(0, H * K)[:, None] * D + columns[None, :])
        return dot(tl.reshape(tl.permute(cast(o, DTYPE), (1, 0, 2)), (BM, H * K)), weight, ACC, PRECISION)
    else:
        heads = tl.arange(0, H)
        result = tl.zeros((BM, D), ACC)
        for head in range(H):
            weight = tl.load(weight_ptr + head * (K * D) + tl.arange(0, K)[:, None] * D + columns[None, :])
            one = tl.sum(tl.where((heads == head)[:, None, None], o, 0.0), 0)
            result += dot(cast(one, DTYPE), weight, ACC, PRECISION)
        return result


@triton.jit
def load_rotation(cos_ptr, sin_ptr, rows, N, HEAD_DIM: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr):
    """cos and signed sin of rows' angles, (BM, K). Loaded where they are used: kept, they would take registers."""
    c = tl.arange(0, K)
    offsets = rows[:, None] * HEAD_DIM + c[None, :]
    mask = (rows < N)[:, None] & (c < HEAD_DIM)[None, :]
    cos = tl.load(cos_ptr + offsets, mask=mask, other=0.0).to(ACC)
    sin = tl.load(sin_ptr + offsets, mask=mask, other=0.0).to(ACC)
    return cos, sin * tl.where(c < HEAD_DIM // 2, -1.0, 1.0)[None, :]


@triton.jit
def queries(
    z,
    query_ptr,
    turned_ptr,
    cos_ptr,
    sin_ptr,
    rows,
    N,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``R_i W_k z_i``, (H, BM, K), rounded to DTYPE.

    A quarter turn exchanges the halves of ``W_k z`` and changes a sign. The turned weights have the rows exchanged, and
    ``sin`` the sign.
    """
    z = cast(z, DTYPE)
    q = project(z, query_ptr, H, K, WHOLE, ACC, PRECISION)
    if ROTARY:
        turned = project(z, turned_ptr, H, K, WHOLE, ACC, PRECISION)
        cos, sin = load_rotation(cos_ptr, sin_ptr, rows, N, HEAD_DIM, K, ACC)
        q = q * cos[None, :, :] + turned * sin[None, :, :]
    return cast(q, DTYPE)


@triton.jit
def read_out(
    o,
    query_ptr,
    turned_ptr,
    cos_ptr,
    sin_ptr,
    rows,
    N,
    ROTARY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``Σ_k W_kᵀ R_iᵀ o_ik``, (BM, D)."""
    if ROTARY:
        K: tl.constexpr = o.shape[2]
        cos, sin = load_rotation(cos_ptr, sin_ptr, rows, N, HEAD_DIM, K, ACC)
        straight = merge(o * cos[None, :, :], query_ptr, D, WHOLE, DTYPE, ACC, PRECISION)
        return straight + merge(o * sin[None, :, :], turned_ptr, D, WHOLE, DTYPE, ACC, PRECISION)
    else:
        return merge(o, query_ptr, D, WHOLE, DTYPE, ACC, PRECISION)


@triton.jit
def load_heads(pointer, rows, N, heads, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, H: tl.constexpr, K: tl.constexpr):
    """Rows of an (N, HEADS, HEAD_DIM) array as (H, rows, K); ``heads`` are the (H,) head indices."""
    c = tl.arange(0, K)
    offsets = rows[None, :, None] * (HEADS * HEAD_DIM) + heads[:, None, None] * HEAD_DIM + c[None, None, :]
    mask = (heads < HEADS)[:, None, None] & (rows < N)[None, :, None] & (c < HEAD_DIM)[None, None, :]
    return tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def store_heads(
    pointer, value, rows, N, heads, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, H: tl.constexpr, K: tl.constexpr
):
    """The transpose of ``load_heads``; ``value`` has the dtype of the array."""
    c = tl.arange(0, K)
    offsets = rows[None, :, None] * (HEADS * HEAD_DIM) + heads[:, None, None] * HEAD_DIM + c[None, None, :]
    mask = (heads < HEADS)[:, None, None] & (rows < N)[None, :, None] & (c < HEAD_DIM)[None, None, :]
    tl.store(pointer + offsets, value, mask=mask)


@triton.jit
def load_rows(pointer, rows, columns, N, WIDTH: tl.constexpr):
    """Rows of an (N, WIDTH) array, (BM, D), 0 outside."""
    mask = (rows < N)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(pointer, value, rows, columns, N, WIDTH: tl.constexpr):
    mask = (rows < N)[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] * WIDTH + columns[None, :], value, mask=mask)


@triton.jit
def unknown_zero(t):
    """0, which the compiler cannot know and must compute at each step t.

    Addresses that contain it are made anew at each step. Without it they are kept from step to step, and take the registers
    that the tiles need. A multiple of 16, so that loads stay wide.
    """
    return (t >> 20) * 16


@triton.jit
def visible(rows, keys, N, CAUSAL: tl.constexpr):
    """Which keys a row sees, (BM, BN). CAUSAL: j ≤ i; else only pairs (odd j) before it and itself.

    Rows beyond N see what the last one sees, so that no row is empty.
    """
    i = tl.minimum(rows, N - 1)[:, None]
    j = keys[None, :]
    see = (j <= i) & (j < N)
    if not CAUSAL:
        see = see & ((j % 2 == 1) | (j == i))
    return see


@triton.jit
def signed(w, heads, HEADS: tl.constexpr, REPELLING: tl.constexpr):
    """``σ_k w^k``, (H, ...): minus that of the last REPELLING of the HEADS."""
    if REPELLING == 0:
        return w
    else:
        return tl.where((heads >= HEADS - REPELLING)[:, None, None], -w, w)


@triton.jit
def products(
    q,
    z,
    k,
    u,
    diagonal_ptr,
    columns,
    heads,
    DIAGONAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``z_iᵀ A_k u_j``, (H, BM, BN), before division by τ: ``q·k`` of the heads, and the diagonal's part.

    A shared diagonal's part (DIAGONAL = 1) is one product for all heads; per head (2) it is one for each.
    """
    s = dot(q, tl.permute(k, (0, 2, 1)), ACC, PRECISION)
    if DIAGONAL == 1:
        d = tl.load(diagonal_ptr + columns, mask=columns < WIDTH, other=0.0).to(ACC)
        s += dot(cast(z * d[None, :], DTYPE), tl.trans(u), ACC, PRECISION)[None, :, :]
    if DIAGONAL == 2:
        H: tl.constexpr = q.shape[0]
        first = tl.min(heads, 0)
        for index in range(H):
            head = first + index
            inside = (columns < WIDTH) & (head < HEADS)
            d = tl.load(diagonal_ptr + head * WIDTH + columns, mask=inside, other=0.0).to(ACC)
            one = dot(cast(z * d[None, :], DTYPE), tl.trans(u), ACC, PRECISION)
            s += tl.where((heads == head)[:, None, None], one[None, :, :], 0.0)
    return s


@triton.jit
def diagonal_read_out(
    w,
    u,
    diagonal_ptr,
    columns,
    heads,
    DIAGONAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``Σ_k d_k ⊙ Σ_j w_ij^k u_j``, (BM, D), of ``w`` (H, BM, BN); shared: one product with the sum over heads."""
    if DIAGONAL == 1:
        d = tl.load(diagonal_ptr + columns, mask=columns < WIDTH, other=0.0).to(ACC)
        return dot(cast(tl.sum(w, 0), DTYPE), u, ACC, PRECISION) * d[None, :]
    else:
        BM: tl.constexpr = w.shape[1]
        D: tl.constexpr = columns.shape[0]
        result = tl.zeros((BM, D), ACC)
        for head in range(HEADS):
            d = tl.load(diagonal_ptr + head * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(ACC)
            one = tl.sum(tl.where((heads == head)[:, None, None], w, 0.0), 0)
            result += dot(cast(one, DTYPE), u, ACC, PRECISION) * d[None, :]
        return result


@triton.jit
def log_sum_exp(
    q,
    z,
    k_ptr,
    u_ptr,
    diagonal_ptr,
    rows,
    columns,
    heads,
    N,
    end,
    SCALE: tl.constexpr,
    DIAGONAL: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``log₂ Σ_j exp s_ij``, (H, BM), in one sweep over the keys before ``end``."""
    H: tl.constexpr = q.shape[0]
    BM: tl.constexpr = q.shape[1]
    pivot = tl.full((H, BM), float("-inf"), ACC)
    total = tl.zeros((H, BM), ACC)
    for start in range(0, end, BN):
        keys = start + tl.arange(0, BN)
        k = load_heads(k_ptr, keys, N, heads, HEADS, HEAD_DIM, H, K)
        u = load_rows(u_ptr, keys, columns, N, WIDTH) if DIAGONAL > 0 else k
        s = products(q, z, k, u, diagonal_ptr, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION) * SCALE
        s = tl.where(visible(rows, keys, N, CAUSAL)[None, :, :], s, float("-inf"))
        higher = tl.maximum(pivot, tl.max(s, 2))
        total = total * tl.exp2(pivot - higher) + tl.sum(tl.exp2(s - higher[:, :, None]), 2)
        pivot = higher
    return pivot + tl.log2(total)


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def forward_kernel(
    x_ptr,  # (B, N, D): x_begin
    u_ptr,  # (B, N, D), operand
    k_ptr,  # (B, N, H, K), operand
    query_ptr,  # (H, K, D), operand, padded with 0
    turned_ptr,  # the same with the halves of K exchanged, for rotary positions
    diagonal_ptr,  # (D,) or (H, D)
    cos_ptr,  # (N, K)
    sin_ptr,
    step_ptr,  # (T,)
    scale_ptr,  # (D,), padded with 0
    left_ptr,  # (D, R), operand, padded with 0
    right_ptr,
    out_ptr,  # (B, N, D): x_end
    lse_ptr,  # (T or T + 1, B, H, N)
    states_ptr,  # (saved, B, N, D): x_1 ...
    forces_ptr,  # (T, B, N, D)
    N,
    batch,
    begin,
    end,
    saved,
    SCALE: tl.constexpr,  # log₂e/τ
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIAGONAL: tl.constexpr,  # 0 none, 1 shared, 2 per head
    REPELLING: tl.constexpr,  # so many of the heads, the last ones
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    CAUSAL: tl.constexpr,
    FINAL: tl.constexpr,  # the log-sum-exp of x_end as well
    SAVE: tl.constexpr,
    FORCES: tl.constexpr,
    ENERGIES: tl.constexpr,  # whether the log-sum-exps are wanted
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Steps ``begin`` to ``end`` of one block of rows."""
    blocks = tl.cdiv(N, BM)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    first_row = block * BM
    rows = first_row + tl.arange(0, BM)
    columns = tl.arange(0, D)
    heads = tl.arange(0, H)
    x_ptr += b * N * WIDTH
    u_ptr += b * N * WIDTH
    k_ptr += b * N * (HEADS * HEAD_DIM)
    last = tl.minimum(N, (block + 1) * BM)  # the first key that no row here sees
    lse_mask = (heads < HEADS)[:, None] & (rows < N)[None, :]
    lse_offsets = heads[:, None] * N + rows[None, :]
    x = load_rows(x_ptr, rows, columns, N, WIDTH).to(ACC)
    for t in range(begin, end):
        time = tl.cast(t, tl.int64)
        zero = unknown_zero(t)
        weights, turned, keys_ptr, history_ptr = query_ptr + zero, turned_ptr + zero, k_ptr + zero, u_ptr + zero
        here = first_row + zero + tl.arange(0, BM)
        here_mask = (heads < HEADS)[:, None] & (here < N)[None, :]
        here_offsets = heads[:, None] * N + here[None, :]
        z = x * inverse_rms(x, WIDTH, EPSILON)[:, None]
        q = queries(z, weights, turned, cos_ptr, sin_ptr, here, N, ROTARY, HEAD_DIM, H, K, WHOLE, DTYPE, ACC, PRECISION)
        o = tl.zeros((H, BM, K), ACC)
        if DIAGONAL == 0:
            pivot = tl.full((H, BM), float("-inf"), ACC)
            total = tl.zeros((H, BM), ACC)
            for start in range(0, last, BN):
                keys = start + tl.arange(0, BN)
                k = load_heads(keys_ptr, keys, N, heads, HEADS, HEAD_DIM, H, K)
                s = dot(q, tl.permute(k, (0, 2, 1)), ACC, PRECISION) * SCALE
                s = tl.where(visible(here, keys, N, CAUSAL)[None, :, :], s, float("-inf"))
                higher = tl.maximum(pivot, tl.max(s, 2))
                shrink = tl.exp2(pivot - higher)
                p = tl.exp2(s - higher[:, :, None])
                total = total * shrink + tl.sum(p, 2)
                o = o * shrink[:, :, None] + dot(cast(p, DTYPE), k, ACC, PRECISION)
                pivot = higher
            o = signed(o / total[:, :, None], heads, HEADS, REPELLING)
            lse = pivot + tl.log2(total)
            force = read_out(
                o, weights, turned, cos_ptr, sin_ptr, here, N, ROTARY, HEAD_DIM, D, WHOLE, DTYPE, ACC, PRECISION
            )
        else:
            # the heads' probabilities are added before they meet u, so each head's normaliser is needed first
            lse = log_sum_exp(
                q, z, keys_ptr, history_ptr, diagonal_ptr + zero, here, columns, heads, N, last,
                SCALE, DIAGONAL, CAUSAL, WIDTH, HEADS, HEAD_DIM, K, BN, DTYPE, ACC, PRECISION,
            )  # fmt: skip
            force = tl.zeros((BM, D), ACC)
            for start in range(0, last, BN):
                keys = start + tl.arange(0, BN)
                k = load_heads(keys_ptr, keys, N, heads, HEADS, HEAD_DIM, H, K)
                u = load_rows(history_ptr, keys, columns, N, WIDTH)
                s = products(
                    q, z, k, u, diagonal_ptr + zero, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION
                )
                see = visible(here, keys, N, CAUSAL)[None, :, :] & (heads < HEADS)[:, None, None]
                p = signed(tl.where(see, tl.exp2(s * SCALE - lse[:, :, None]), 0.0), heads, HEADS, REPELLING)
                o += dot(cast(p, DTYPE), k, ACC, PRECISION)
                force += diagonal_read_out(
                    p, u, diagonal_ptr + zero, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION
                )
            force += read_out(
                o, weights, turned, cos_ptr, sin_ptr, here, N, ROTARY, HEAD_DIM, D, WHOLE, DTYPE, ACC, PRECISION
            )
        if ENERGIES:
            tl.store(lse_ptr + (time * batch + b) * HEADS * N + here_offsets, lse * LN2, mask=here_mask)
        if FORCES:
            store_rows(forces_ptr + (time * batch + b) * N * WIDTH, force, here, columns, N, WIDTH)
        step = tl.load(step_ptr + t).to(ACC)
        x += step * precondition(
            force, scale_ptr + zero, left_ptr + zero, right_ptr + zero, columns, D, R, P, R, DTYPE, ACC, PRECISION
        )
        if SAVE and t < saved:
            store_rows(states_ptr + (time * batch + b) * N * WIDTH, x, here, columns, N, WIDTH)
    if FINAL:
        z = x * inverse_rms(x, WIDTH, EPSILON)[:, None]
        q = queries(
            z, query_ptr, turned_ptr, cos_ptr, sin_ptr, rows, N, ROTARY, HEAD_DIM, H, K, WHOLE, DTYPE, ACC, PRECISION
        )
        lse = log_sum_exp(
            q, z, k_ptr, u_ptr, diagonal_ptr, rows, columns, heads, N, last,
            SCALE, DIAGONAL, CAUSAL, WIDTH, HEADS, HEAD_DIM, K, BN, DTYPE, ACC, PRECISION,
        )  # fmt: skip
        tl.store(lse_ptr + (tl.cast(end, tl.int64) * batch + b) * HEADS * N + lse_offsets, lse * LN2, mask=lse_mask)
    rows = first_row + unknown_zero(end) + tl.arange(0, BM)
    store_rows(out_ptr + b * N * WIDTH, cast(x, out_ptr.dtype.element_ty), rows, columns, N, WIDTH)


@triton.jit
def backward_rows_kernel(
    grad_ptr,  # (B, N, D): the gradient at x_end
    h_ptr,  # (B, N, D): x_0
    states_ptr,  # (saved, B, N, D): x_1 ...
    u_ptr,
    k_ptr,
    query_ptr,
    turned_ptr,
    diagonal_ptr,
    cos_ptr,
    sin_ptr,
    step_ptr,
    scale_ptr,
    left_ptr,
    right_ptr,
    lse_ptr,  # (T, B, H, N)
    lse_grad_ptr,
    delta_ptr,  # (T, B, H, N): δ
    query_out_ptr,  # (T, B, N, H, K), operand: q
    query_pull_ptr,  # the same: q(v)
    inner_ptr,  # (2, T, B, N, D), operand: v, z
    outer_ptr,  # (2, T, B, N, H, K), operand: η Σ_j p k, Σ_j ds k
    pull_ptr,  # (T, B, N, D): η g
    out_ptr,  # (B, N, D): the gradient at x_begin, but for what comes through the keys
    N,
    batch,
    steps,
    begin,
    end,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIAGONAL: tl.constexpr,
    REPELLING: tl.constexpr,
    P: tl.constexpr,
    ROTARY: tl.constexpr,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WHOLE: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The reverse of steps ``end`` to ``begin`` of one block of rows."""
    blocks = tl.cdiv(N, BM)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    first_row = block * BM
    rows = first_row + tl.arange(0, BM)
    columns = tl.arange(0, D)
    heads = tl.arange(0, H)
    u_ptr += b * N * WIDTH
    k_ptr += b * N * (HEADS * HEAD_DIM)
    last = tl.minimum(N, (block + 1) * BM)
    INVERSE: tl.constexpr = SCALE * LN2  # 1/τ
    g = load_rows(grad_ptr + b * N * WIDTH, rows, columns, N, WIDTH).to(ACC)
    for back in range(begin, end):
        t = begin + end - 1 - back
        zero = unknown_zero(t)
        weights, turned, keys_ptr, history_ptr = query_ptr + zero, turned_ptr + zero, k_ptr + zero, u_ptr + zero
        here = first_row + zero + tl.arange(0, BM)
        here_mask = (heads < HEADS)[:, None] & (here < N)[None, :]
        here_offsets = heads[:, None] * N + here[None, :]
        slot = tl.cast(t, tl.int64) * batch + b
        inside = (here < N)[:, None] & (columns < WIDTH)[None, :]
        offsets = here[:, None] * WIDTH + columns[None, :]
        now = tl.full((1, 1), t, tl.int32)  # a tile: the interpreter of Triton 3.9 makes no mask of a scalar
        x = tl.load(h_ptr + b * N * WIDTH + offsets, mask=inside & (now == 0), other=0.0).to(ACC)
        x += tl.load(states_ptr + (slot - batch) * N * WIDTH + offsets, mask=inside & (now > 0), other=0.0).to(ACC)
        inverse = inverse_rms(x, WIDTH, EPSILON)
        z = x * inverse[:, None]
        v = precondition(
            g, scale_ptr + zero, left_ptr + zero, right_ptr + zero, columns, D, R, P, R, DTYPE, ACC, PRECISION
        )
        step = tl.load(step_ptr + t).to(ACC)
        if P > 0:
            store_rows(pull_ptr + slot * N * WIDTH, step * g, here, columns, N, WIDTH)
        half = tl.cast(steps, tl.int64) * batch  # from the first to the second of a pair of arrays
        store_rows(inner_ptr + slot * N * WIDTH, cast(v, DTYPE), here, columns, N, WIDTH)
        store_rows(inner_ptr + (half + slot) * N * WIDTH, cast(z, DTYPE), here, columns, N, WIDTH)
        q = queries(z, weights, turned, cos_ptr, sin_ptr, here, N, ROTARY, HEAD_DIM, H, K, WHOLE, DTYPE, ACC, PRECISION)
        qv = queries(
            v, weights, turned, cos_ptr, sin_ptr, here, N, ROTARY, HEAD_DIM, H, K, WHOLE, DTYPE, ACC, PRECISION
        )
        stride = N * (HEADS * HEAD_DIM)
        store_heads(query_out_ptr + slot * stride, q, here, N, heads, HEADS, HEAD_DIM, H, K)
        store_heads(query_pull_ptr + slot * stride, qv, here, N, heads, HEADS, HEAD_DIM, H, K)
        lse = tl.load(lse_ptr + slot * HEADS * N + here_offsets, mask=here_mask, other=0.0).to(ACC) * LOG2E
        lse_grad = tl.load(lse_grad_ptr + slot * HEADS * N + here_offsets, mask=here_mask, other=0.0).to(ACC)
        delta = tl.zeros((H, BM), ACC)
        o = tl.zeros((H, BM, K), ACC)
        c = tl.zeros((H, BM, K), ACC)
        for start in range(0, last, BN):
            keys = start + tl.arange(0, BN)
            k = load_heads(keys_ptr, keys, N, heads, HEADS, HEAD_DIM, H, K)
            u = load_rows(history_ptr, keys, columns, N, WIDTH) if DIAGONAL > 0 else k
            s = products(q, z, k, u, diagonal_ptr + zero, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION)
            see = visible(here, keys, N, CAUSAL)[None, :, :] & (heads < HEADS)[:, None, None]
            p = tl.where(see, tl.exp2(s * SCALE - lse[:, :, None]), 0.0)
            dp = products(
                qv, v, k, u, diagonal_ptr + zero, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION
            )
            dp = signed(dp, heads, HEADS, REPELLING)
            delta += tl.sum(p * dp, 2)
            o += dot(cast(p, DTYPE), k, ACC, PRECISION)
            if DIAGONAL == 0:
                c += dot(cast(p * dp, DTYPE), k, ACC, PRECISION)
        tl.store(delta_ptr + slot * HEADS * N + here_offsets, delta, mask=here_mask)
        moved = cast(signed(o, heads, HEADS, REPELLING) * step, DTYPE)
        store_heads(outer_ptr + slot * stride, moved, here, N, heads, HEADS, HEAD_DIM, H, K)
        if DIAGONAL == 0:
            # one sweep: Σ_j ds k needs δ only as a factor of Σ_j p k
            c = ((c - delta[:, :, None] * o) * step + lse_grad[:, :, None] * o) * INVERSE
            dz = read_out(
                c, weights, turned, cos_ptr, sin_ptr, here, N, ROTARY, HEAD_DIM, D, WHOLE, DTYPE, ACC, PRECISION
            )
        else:
            dz = tl.zeros((BM, D), ACC)
            for start in range(0, last, BN):
                keys = start + tl.arange(0, BN)
                k = load_heads(keys_ptr, keys, N, heads, HEADS, HEAD_DIM, H, K)
                u = load_rows(history_ptr, keys, columns, N, WIDTH)
                s = products(
                    q, z, k, u, diagonal_ptr + zero, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION
                )
                see = visible(here, keys, N, CAUSAL)[None, :, :] & (heads < HEADS)[:, None, None]
                p = tl.where(see, tl.exp2(s * SCALE - lse[:, :, None]), 0.0)
                dp = products(
                    qv, v, k, u, diagonal_ptr + zero, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION
                )
                dp = signed(dp, heads, HEADS, REPELLING)
                ds = p * ((dp - delta[:, :, None]) * step + lse_grad[:, :, None]) * INVERSE
                c += dot(cast(ds, DTYPE), k, ACC, PRECISION)
                dz += diagonal_read_out(
                    ds, u, diagonal_ptr + zero, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION
                )
            dz += read_out(
                c, weights, turned, cos_ptr, sin_ptr, here, N, ROTARY, HEAD_DIM, D, WHOLE, DTYPE, ACC, PRECISION
            )
        store_heads(outer_ptr + (half + slot) * stride, cast(c, DTYPE), here, N, heads, HEADS, HEAD_DIM, H, K)
        g += norm_jacobian(dz, z, inverse, WIDTH)
    rows = first_row + unknown_zero(end) + tl.arange(0, BM)
    store_rows(out_ptr + b * N * WIDTH, cast(g, out_ptr.dtype.element_ty), rows, columns, N, WIDTH)


@triton.jit
def backward_keys_kernel(
    u_ptr,
    k_ptr,
    diagonal_ptr,
    step_ptr,
    lse_ptr,
    lse_grad_ptr,
    delta_ptr,
    query_out_ptr,
    query_pull_ptr,
    inner_ptr,
    key_grad_ptr,  # (B, N, H, K)
    u_grad_ptr,  # (groups, B, N, D)
    diagonal_grad_ptr,  # (B, key blocks, groups, D)
    N,
    batch,
    steps,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIAGONAL: tl.constexpr,
    REPELLING: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a program
    D: tl.constexpr,
    H: tl.constexpr,  # GROUP, padded
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of one block of keys, of a group of heads: the sums over all steps and all rows that see them."""
    blocks = tl.cdiv(N, BN)
    groups = HEADS // GROUP
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks % groups
    b = (tl.program_id(0) // (blocks * groups)).to(tl.int64)
    keys = block * BN + tl.arange(0, BN)
    columns = tl.arange(0, D)
    # padded heads of a group must not be those of the next one
    local = tl.arange(0, H)
    heads = tl.where(local < GROUP, group * GROUP + local, HEADS)
    INVERSE: tl.constexpr = SCALE * LN2
    k = load_heads(k_ptr + b * N * (HEADS * HEAD_DIM), keys, N, heads, HEADS, HEAD_DIM, H, K)
    u = load_rows(u_ptr + b * N * WIDTH, keys, columns, N, WIDTH) if DIAGONAL > 0 else k
    key_grad = tl.zeros((H, BN, K), ACC)
    y = tl.zeros((BN, D), ACC)
    first = block * BN // BM * BM  # no row before it sees a key of this block
    half = tl.cast(steps, tl.int64) * batch
    for t in range(0, steps):
        slot = tl.cast(t, tl.int64) * batch + b
        step = tl.load(step_ptr + t).to(ACC)
        for start in range(first, N, BM):
            rows = start + tl.arange(0, BM)
            stride = N * (HEADS * HEAD_DIM)
            q = load_heads(query_out_ptr + slot * stride, rows, N, heads, HEADS, HEAD_DIM, H, K)
            qv = load_heads(query_pull_ptr + slot * stride, rows, N, heads, HEADS, HEAD_DIM, H, K)
            v = load_rows(inner_ptr + slot * N * WIDTH, rows, columns, N, WIDTH) if DIAGONAL > 0 else q
            z = load_rows(inner_ptr + (half + slot) * N * WIDTH, rows, columns, N, WIDTH) if DIAGONAL > 0 else q
            mask = (heads < HEADS)[:, None] & (rows < N)[None, :]
            offsets = slot * HEADS * N + heads[:, None] * N + rows[None, :]
            lse = tl.load(lse_ptr + offsets, mask=mask, other=0.0).to(ACC) * LOG2E
            lse_grad = tl.load(lse_grad_ptr + offsets, mask=mask, other=0.0).to(ACC)
            delta = tl.load(delta_ptr + offsets, mask=mask, other=0.0)
            s = products(
                q, z.to(ACC), k, u, diagonal_ptr, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION
            )
            see = visible(rows, keys, N, CAUSAL)[None, :, :] & mask[:, :, None]
            p = tl.where(see, tl.exp2(s * SCALE - lse[:, :, None]), 0.0)
            dp = products(
                qv, v.to(ACC), k, u, diagonal_ptr, columns, heads, DIAGONAL, WIDTH, HEADS, DTYPE, ACC, PRECISION
            )
            dp = signed(dp, heads, HEADS, REPELLING)
            ds = p * ((dp - delta[:, :, None]) * step + lse_grad[:, :, None]) * INVERSE
            p = signed(p, heads, HEADS, REPELLING) * step
            key_grad += dot(tl.permute(cast(p, DTYPE), (0, 2, 1)), qv, ACC, PRECISION)
            key_grad += dot(tl.permute(cast(ds, DTYPE), (0, 2, 1)), q, ACC, PRECISION)
            if DIAGONAL > 0:
                y += dot(tl.trans(cast(tl.sum(p, 0), DTYPE)), v, ACC, PRECISION)
                y += dot(tl.trans(cast(tl.sum(ds, 0), DTYPE)), z, ACC, PRECISION)
    element: tl.constexpr = key_grad_ptr.dtype.element_ty
    key_grad_ptr += b * N * (HEADS * HEAD_DIM)
    store_heads(key_grad_ptr, cast(key_grad, element), keys, N, heads, HEADS, HEAD_DIM, H, K)
    if DIAGONAL > 0:
        row = group if DIAGONAL == 2 else 0
        d = tl.load(diagonal_ptr + row * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(ACC)
        slot = tl.cast(group, tl.int64) * batch + b
        store_rows(u_grad_ptr + slot * N * WIDTH, y * d[None, :], keys, columns, N, WIDTH)
        partial = tl.sum(u.to(ACC) * y, 0)
        slot = (b * blocks + block) * groups + group
        tl.store(diagonal_grad_ptr + slot * WIDTH + columns, partial, mask=columns < WIDTH)
