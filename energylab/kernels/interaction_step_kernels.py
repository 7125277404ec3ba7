"""The device code of ``interaction_step.py``: one step down the interaction energy, and its reverse.

The algebra and the shape suffixes are at the top of that file.
"""

# a jitted function's constants are written as plain values, which its annotations do not say
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false

import triton
import triton.language as tl

from energylab.kernels.common import LN2, LOG2E, cast, dot
from energylab.kernels.interaction_kernels import load_heads, store_heads, visible

# --- device functions ------------------------------------------------------------------------------------------------

# Tiles of one head are matrices, (rows, K) and (rows, keys); tiles of several have the heads first. A 3-dimensional product
# spreads the heads over the warps, and with one head each warp would do all of it.


@triton.jit
def heads_from(first, HEADS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr):
    """The indices of GROUP heads, (H,); HEADS, which is none, beyond."""
    local = tl.arange(0, H)
    return tl.where(local < GROUP, first + local, HEADS)


@triton.jit
def load_group(
    pointer,
    rows,
    first,
    N,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
):
    """Rows of the heads from ``first`` on, of an (N, HEADS, HEAD_DIM) array."""
    if H == 1:
        c = tl.arange(0, K)
        mask = (rows < N)[:, None] & (c < HEAD_DIM)[None, :]
        return tl.load(
            pointer + first * HEAD_DIM + rows[:, None] * (HEADS * HEAD_DIM) + c[None, :], mask=mask, other=0.0
        )
    else:
        return load_heads(pointer, rows, N, heads_from(first, HEADS, GROUP, H), HEADS, HEAD_DIM, H, K)


@triton.jit
def store_group(
    pointer,
    value,
    rows,
    first,
    N,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
):
    """The transpose of ``load_group``."""
    value = cast(value, pointer.dtype.element_ty)
    if H == 1:
        c = tl.arange(0, K)
        mask = (rows < N)[:, None] & (c < HEAD_DIM)[None, :]
        tl.store(pointer + first * HEAD_DIM + rows[:, None] * (HEADS * HEAD_DIM) + c[None, :], value, mask=mask)
    else:
        store_heads(pointer, value, rows, N, heads_from(first, HEADS, GROUP, H), HEADS, HEAD_DIM, H, K)


@triton.jit
def of_rows(rows, first, N, HEADS: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr):
    """Offsets in an (HEADS, N) array of one number a head and row, and which of them are inside."""
    if H == 1:
        return first * N + rows, rows < N
    else:
        heads = heads_from(first, HEADS, GROUP, H)
        return heads[:, None] * N + rows[None, :], (heads < HEADS)[:, None] & (rows < N)[None, :]


@triton.jit
def load_chunk(pointer, rows, start, N, STRIDE: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Columns ``start`` to ``start + C`` of rows of an array with row stride STRIDE, 0 outside."""
    columns = start + tl.arange(0, C)
    mask = (rows < N)[:, None]
    if WIDTH % C != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_chunk(pointer, value, rows, start, N, STRIDE: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    columns = start + tl.arange(0, C)
    mask = (rows < N)[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] * STRIDE + columns[None, :], cast(value, pointer.dtype.element_ty), mask=mask)


@triton.jit
def chunked_product(
    x_ptr,
    y_ptr,
    rows,
    keys,
    N,
    X_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``x_i·y_j``, (BM, BN), over WIDTH columns, C of them at once."""
    if WIDTH <= C:
        x = load_chunk(x_ptr, rows, 0, N, X_STRIDE, WIDTH, C)
        return dot(x, tl.trans(load_chunk(y_ptr, keys, 0, N, Y_STRIDE, WIDTH, C)), ACC, PRECISION)
    else:
        result = tl.zeros((rows.shape[0], keys.shape[0]), ACC)
        for start in range(0, WIDTH, C):
            x = load_chunk(x_ptr, rows, start, N, X_STRIDE, WIDTH, C)
            y = load_chunk(y_ptr, keys, start, N, Y_STRIDE, WIDTH, C)
            result += dot(x, tl.trans(y), ACC, PRECISION)
        return result


@triton.jit
def diagonal_part(
    a_ptr,
    u_ptr,
    rows,
    keys,
    N,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    DIAGONAL: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``a_i·u_j``, (BM, BN): what the heads of an a-group share; 0 without a diagonal."""
    if DIAGONAL:
        return chunked_product(a_ptr, u_ptr, rows, keys, N, STRIDE, WIDTH, WIDTH, C, ACC, PRECISION)
    else:
        return 0.0


@triton.jit
def products(
    q,
    k,
    q_ptr,
    k_ptr,
    rows,
    keys,
    first,
    N,
    shared,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``q_i·k_j`` of each head, plus the diagonal's part. One head of large rank is read again, in chunks."""
    if H == 1 and K > C:
        STRIDE: tl.constexpr = HEADS * HEAD_DIM
        own = first * HEAD_DIM
        s = chunked_product(q_ptr + own, k_ptr + own, rows, keys, N, STRIDE, STRIDE, HEAD_DIM, C, ACC, PRECISION)
    else:
        s = dot(q, tl.trans(k), ACC, PRECISION)
    return s + shared


@triton.jit
def probabilities(
    s,
    lse,
    rows,
    keys,
    first,
    N,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
):
    """p of the products s and ``lse``, which is in base 2; 0 for what is not seen, rows beyond N and heads that are none."""
    see = visible(rows, keys, N, CAUSAL) & (rows < N)[:, None]
    if H > 1:
        see = see[None, :, :] & (heads_from(first, HEADS, GROUP, H) < HEADS)[:, None, None]
    return tl.where(see, tl.exp2(s * SCALE - tl.expand_dims(lse, -1)), 0.0)


@triton.jit
def over_heads(w, H: tl.constexpr):
    """``Σ_k w^k``, (BM, BN)."""
    if H == 1:
        return w
    else:
        return tl.sum(w, 0)


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def attend_kernel(
    q_ptr,  # (B, N, H, K)
    k_ptr,  # (B, N, H, K)
    a_ptr,  # (B, N, G, D)
    u_ptr,  # (B, N, D)
    out_ptr,  # (B, N, H, K): o
    lse_ptr,  # (B, H, N): ℓ
    N,
    SCALE: tl.constexpr,  # log₂e/τ
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SHARED: tl.constexpr,  # one a-group for all heads, or one for each
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a tile
    H: tl.constexpr,  # GROUP, padded
    K: tl.constexpr,
    C: tl.constexpr,  # columns of a chunk of D
    BM: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """o and ℓ of a block of rows and a group of heads: the online softmax."""
    blocks = tl.cdiv(N, BM)
    groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    block = tl.program_id(0) % blocks
    first = tl.program_id(0) // blocks % groups * GROUP
    b = (tl.program_id(0) // (blocks * groups)).to(tl.int64)
    rows = block * BM + tl.arange(0, BM)
    STRIDE: tl.constexpr = WIDTH if SHARED else HEADS * WIDTH
    q_ptr += b * N * (HEADS * HEAD_DIM)
    k_ptr += b * N * (HEADS * HEAD_DIM)
    a_ptr += b * N * STRIDE + (0 if SHARED else first * WIDTH)
    u_ptr += b * N * WIDTH
    q = load_group(q_ptr, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
    o = tl.zeros(q.shape, ACC)
    pivot = tl.full(q.shape[:-1], float("-inf"), ACC)
    total = tl.zeros(q.shape[:-1], ACC)
    for start in range(0, tl.minimum(N, (block + 1) * BM), BN):
        keys = start + tl.arange(0, BN)
        k = load_group(k_ptr, keys, first, N, HEADS, HEAD_DIM, GROUP, H, K)
        shared = diagonal_part(a_ptr, u_ptr, rows, keys, N, STRIDE, WIDTH, C, DIAGONAL, ACC, PRECISION)
        s = products(q, k, q_ptr, k_ptr, rows, keys, first, N, shared, HEADS, HEAD_DIM, H, K, C, ACC, PRECISION) * SCALE
        s = tl.where(visible(rows, keys, N, CAUSAL), s, float("-inf"))
        higher = tl.maximum(pivot, tl.max(s, -1))
        shrink = tl.exp2(pivot - higher)
        p = tl.exp2(s - tl.expand_dims(higher, -1))
        total = total * shrink + tl.sum(p, -1)
        o = o * tl.expand_dims(shrink, -1) + dot(cast(p, DTYPE), k, ACC, PRECISION)
        pivot = higher
    o = o / tl.expand_dims(total, -1)
    store_group(out_ptr + b * N * (HEADS * HEAD_DIM), o, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
    offsets, mask = of_rows(rows, first, N, HEADS, GROUP, H)
    tl.store(lse_ptr + b * HEADS * N + offsets, (pivot + tl.log2(total)) * LN2, mask=mask)


@triton.jit
def read_out_kernel(
    q_ptr,
    k_ptr,
    a_ptr,
    u_ptr,
    lse_ptr,
    out_grad_ptr,  # (B, N, H, K): do
    read_grad_ptr,  # (B, N, G, D): dr
    delta_ptr,  # (B, H, N): δ
    out_ptr,  # (B, N, G, D): r, or da
    N,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BACKWARD: tl.constexpr,  # da, by ds, rather than r, by p
    GROUP: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,  # columns of the result that a program owns
    BM: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``Σ_j (Σ_k w_ij^k) u_j`` with p or ds for w: a block of rows, an a-group, a chunk of D."""
    blocks = tl.cdiv(N, BM)
    a_groups: tl.constexpr = 1 if SHARED else HEADS
    chunks: tl.constexpr = (WIDTH + WIDE - 1) // WIDE
    block = tl.program_id(0) % blocks
    column = tl.program_id(0) // blocks % chunks * WIDE
    a_group = tl.program_id(0) // (blocks * chunks) % a_groups
    b = (tl.program_id(0) // (blocks * chunks * a_groups)).to(tl.int64)
    rows = block * BM + tl.arange(0, BM)
    STRIDE: tl.constexpr = WIDTH * a_groups
    MEMBERS: tl.constexpr = HEADS // a_groups
    INVERSE: tl.constexpr = SCALE * LN2  # 1/τ
    q_ptr += b * N * (HEADS * HEAD_DIM)
    k_ptr += b * N * (HEADS * HEAD_DIM)
    out_grad_ptr += b * N * (HEADS * HEAD_DIM)
    a_ptr += b * N * STRIDE + a_group * WIDTH
    read_grad_ptr += b * N * STRIDE + a_group * WIDTH
    u_ptr += b * N * WIDTH
    lse_ptr += b * HEADS * N
    delta_ptr += b * HEADS * N
    result = tl.zeros((BM, WIDE), ACC)
    for start in range(0, tl.minimum(N, (block + 1) * BM), BN):
        keys = start + tl.arange(0, BN)
        shared = diagonal_part(a_ptr, u_ptr, rows, keys, N, STRIDE, WIDTH, C, True, ACC, PRECISION)
        if BACKWARD:
            pulled = diagonal_part(read_grad_ptr, u_ptr, rows, keys, N, STRIDE, WIDTH, C, True, ACC, PRECISION)
        w = tl.zeros((BM, BN), ACC)
        for member in range(0, MEMBERS, GROUP):
            first = a_group * MEMBERS + member
            q = load_group(q_ptr, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
            k = load_group(k_ptr, keys, first, N, HEADS, HEAD_DIM, GROUP, H, K)
            offsets, mask = of_rows(rows, first, N, HEADS, GROUP, H)
            lse = tl.load(lse_ptr + offsets, mask=mask, other=0.0).to(ACC) * LOG2E
            s = products(q, k, q_ptr, k_ptr, rows, keys, first, N, shared, HEADS, HEAD_DIM, H, K, C, ACC, PRECISION)
            p = probabilities(s, lse, rows, keys, first, N, SCALE, CAUSAL, HEADS, GROUP, H)
            if BACKWARD:
                pull = load_group(out_grad_ptr, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
                delta = tl.load(delta_ptr + offsets, mask=mask, other=0.0)
                dp = products(
                    pull, k, out_grad_ptr, k_ptr, rows, keys, first, N, pulled, HEADS, HEAD_DIM, H, K, C, ACC, PRECISION
                )
                p = p * (dp - tl.expand_dims(delta, -1)) * INVERSE
            w += over_heads(p, H)
        u = load_chunk(u_ptr, keys, column, N, WIDTH, WIDTH, WIDE)
        result += dot(cast(w, DTYPE), u, ACC, PRECISION)
    store_chunk(out_ptr + b * N * STRIDE + a_group * WIDTH, result, rows, column, N, STRIDE, WIDTH, WIDE)


@triton.jit
def query_grad_kernel(
    q_ptr,
    k_ptr,
    a_ptr,
    u_ptr,
    out_ptr,
    lse_ptr,
    out_grad_ptr,
    read_grad_ptr,
    lse_grad_ptr,  # (B, H, N): λ
    delta_ptr,  # (B, H, N): δ, written
    q_grad_ptr,  # (B, N, H, K)
    N,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SHARED: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """δ and dq of a block of rows and a group of heads, in one sweep."""
    blocks = tl.cdiv(N, BM)
    groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    block = tl.program_id(0) % blocks
    first = tl.program_id(0) // blocks % groups * GROUP
    b = (tl.program_id(0) // (blocks * groups)).to(tl.int64)
    rows = block * BM + tl.arange(0, BM)
    STRIDE: tl.constexpr = WIDTH if SHARED else HEADS * WIDTH
    INVERSE: tl.constexpr = SCALE * LN2
    head_base = b * N * (HEADS * HEAD_DIM)
    q_ptr += head_base
    k_ptr += head_base
    out_grad_ptr += head_base
    a_ptr += b * N * STRIDE + (0 if SHARED else first * WIDTH)
    read_grad_ptr += b * N * STRIDE + (0 if SHARED else first * WIDTH)
    u_ptr += b * N * WIDTH
    q = load_group(q_ptr, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
    pull = load_group(out_grad_ptr, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
    offsets, mask = of_rows(rows, first, N, HEADS, GROUP, H)
    lse = tl.load(lse_ptr + b * HEADS * N + offsets, mask=mask, other=0.0).to(ACC) * LOG2E
    delta = tl.zeros(q.shape[:-1], ACC)
    gradient = tl.zeros(q.shape, ACC)
    for start in range(0, tl.minimum(N, (block + 1) * BM), BN):
        keys = start + tl.arange(0, BN)
        k = load_group(k_ptr, keys, first, N, HEADS, HEAD_DIM, GROUP, H, K)
        shared = diagonal_part(a_ptr, u_ptr, rows, keys, N, STRIDE, WIDTH, C, DIAGONAL, ACC, PRECISION)
        s = products(q, k, q_ptr, k_ptr, rows, keys, first, N, shared, HEADS, HEAD_DIM, H, K, C, ACC, PRECISION)
        p = probabilities(s, lse, rows, keys, first, N, SCALE, CAUSAL, HEADS, GROUP, H)
        pulled = diagonal_part(read_grad_ptr, u_ptr, rows, keys, N, STRIDE, WIDTH, C, DIAGONAL, ACC, PRECISION)
        p = p * products(
            pull, k, out_grad_ptr, k_ptr, rows, keys, first, N, pulled, HEADS, HEAD_DIM, H, K, C, ACC, PRECISION
        )
        delta += tl.sum(p, -1)
        gradient += dot(cast(p, DTYPE), k, ACC, PRECISION)
    delta -= tl.load(lse_grad_ptr + b * HEADS * N + offsets, mask=mask, other=0.0).to(ACC)
    o = load_group(out_ptr + head_base, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K).to(ACC)
    gradient = (gradient - tl.expand_dims(delta, -1) * o) * INVERSE
    tl.store(delta_ptr + b * HEADS * N + offsets, delta, mask=mask)
    store_group(q_grad_ptr + head_base, gradient, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)


@triton.jit
def key_grad_kernel(
    q_ptr,
    k_ptr,
    a_ptr,
    u_ptr,
    lse_ptr,
    out_grad_ptr,
    read_grad_ptr,
    delta_ptr,
    k_grad_ptr,  # (B, N, H, K)
    N,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SHARED: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dk of a block of keys and a group of heads: the sum over all rows that see them."""
    blocks = tl.cdiv(N, BN)
    groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    block = tl.program_id(0) % blocks
    first = tl.program_id(0) // blocks % groups * GROUP
    b = (tl.program_id(0) // (blocks * groups)).to(tl.int64)
    keys = block * BN + tl.arange(0, BN)
    STRIDE: tl.constexpr = WIDTH if SHARED else HEADS * WIDTH
    INVERSE: tl.constexpr = SCALE * LN2
    head_base = b * N * (HEADS * HEAD_DIM)
    q_ptr += head_base
    k_ptr += head_base
    out_grad_ptr += head_base
    a_ptr += b * N * STRIDE + (0 if SHARED else first * WIDTH)
    read_grad_ptr += b * N * STRIDE + (0 if SHARED else first * WIDTH)
    u_ptr += b * N * WIDTH
    lse_ptr += b * HEADS * N
    delta_ptr += b * HEADS * N
    k = load_group(k_ptr, keys, first, N, HEADS, HEAD_DIM, GROUP, H, K)
    gradient = tl.zeros(k.shape, ACC)
    for start in range(block * BN // BM * BM, N, BM):  # no row before it sees a key of this block
        rows = start + tl.arange(0, BM)
        q = load_group(q_ptr, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
        pull = load_group(out_grad_ptr, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
        offsets, mask = of_rows(rows, first, N, HEADS, GROUP, H)
        lse = tl.load(lse_ptr + offsets, mask=mask, other=0.0).to(ACC) * LOG2E
        delta = tl.load(delta_ptr + offsets, mask=mask, other=0.0)
        shared = diagonal_part(a_ptr, u_ptr, rows, keys, N, STRIDE, WIDTH, C, DIAGONAL, ACC, PRECISION)
        s = products(q, k, q_ptr, k_ptr, rows, keys, first, N, shared, HEADS, HEAD_DIM, H, K, C, ACC, PRECISION)
        p = probabilities(s, lse, rows, keys, first, N, SCALE, CAUSAL, HEADS, GROUP, H)
        gradient += dot(tl.trans(cast(p, DTYPE)), pull, ACC, PRECISION)
        pulled = diagonal_part(read_grad_ptr, u_ptr, rows, keys, N, STRIDE, WIDTH, C, DIAGONAL, ACC, PRECISION)
        dp = products(
            pull, k, out_grad_ptr, k_ptr, rows, keys, first, N, pulled, HEADS, HEAD_DIM, H, K, C, ACC, PRECISION
        )
        ds = p * (dp - tl.expand_dims(delta, -1)) * INVERSE
        gradient += dot(tl.trans(cast(ds, DTYPE)), q, ACC, PRECISION)
    store_group(k_grad_ptr + head_base, gradient, keys, first, N, HEADS, HEAD_DIM, GROUP, H, K)


@triton.jit
def history_grad_kernel(
    q_ptr,
    k_ptr,
    a_ptr,
    u_ptr,
    lse_ptr,
    out_grad_ptr,
    read_grad_ptr,
    delta_ptr,
    u_grad_ptr,  # (B, N, D)
    N,
    SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SHARED: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """du of a block of keys and a chunk of D: the sum over all heads and all rows that see them."""
    blocks = tl.cdiv(N, BN)
    a_groups: tl.constexpr = 1 if SHARED else HEADS
    chunks: tl.constexpr = (WIDTH + WIDE - 1) // WIDE
    block = tl.program_id(0) % blocks
    column = tl.program_id(0) // blocks % chunks * WIDE
    b = (tl.program_id(0) // (blocks * chunks)).to(tl.int64)
    keys = block * BN + tl.arange(0, BN)
    STRIDE: tl.constexpr = WIDTH * a_groups
    MEMBERS: tl.constexpr = HEADS // a_groups
    INVERSE: tl.constexpr = SCALE * LN2
    q_ptr += b * N * (HEADS * HEAD_DIM)
    k_ptr += b * N * (HEADS * HEAD_DIM)
    out_grad_ptr += b * N * (HEADS * HEAD_DIM)
    a_ptr += b * N * STRIDE
    read_grad_ptr += b * N * STRIDE
    u_ptr += b * N * WIDTH
    lse_ptr += b * HEADS * N
    delta_ptr += b * HEADS * N
    gradient = tl.zeros((BN, WIDE), ACC)
    for a_group in range(a_groups):
        mine = a_group * WIDTH
        for start in range(block * BN // BM * BM, N, BM):
            rows = start + tl.arange(0, BM)
            shared = diagonal_part(a_ptr + mine, u_ptr, rows, keys, N, STRIDE, WIDTH, C, True, ACC, PRECISION)
            pulled = diagonal_part(read_grad_ptr + mine, u_ptr, rows, keys, N, STRIDE, WIDTH, C, True, ACC, PRECISION)
            w = tl.zeros((BM, BN), ACC)
            dw = tl.zeros((BM, BN), ACC)
            for member in range(0, MEMBERS, GROUP):
                first = a_group * MEMBERS + member
                q = load_group(q_ptr, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
                k = load_group(k_ptr, keys, first, N, HEADS, HEAD_DIM, GROUP, H, K)
                pull = load_group(out_grad_ptr, rows, first, N, HEADS, HEAD_DIM, GROUP, H, K)
                offsets, mask = of_rows(rows, first, N, HEADS, GROUP, H)
                lse = tl.load(lse_ptr + offsets, mask=mask, other=0.0).to(ACC) * LOG2E
                delta = tl.load(delta_ptr + offsets, mask=mask, other=0.0)
                s = products(q, k, q_ptr, k_ptr, rows, keys, first, N, shared, HEADS, HEAD_DIM, H, K, C, ACC, PRECISION)
                p = probabilities(s, lse, rows, keys, first, N, SCALE, CAUSAL, HEADS, GROUP, H)
                dp = products(
                    pull, k, out_grad_ptr, k_ptr, rows, keys, first, N, pulled, HEADS, HEAD_DIM, H, K, C, ACC, PRECISION
                )
                w += over_heads(p, H)
                dw += over_heads(p * (dp - tl.expand_dims(delta, -1)) * INVERSE, H)
            read = load_chunk(read_grad_ptr + mine, rows, column, N, STRIDE, WIDTH, WIDE)
            gradient += dot(tl.trans(cast(w, DTYPE)), read, ACC, PRECISION)
            a = load_chunk(a_ptr + mine, rows, column, N, STRIDE, WIDTH, WIDE)
            gradient += dot(tl.trans(cast(dw, DTYPE)), a, ACC, PRECISION)
    store_chunk(u_grad_ptr + b * N * WIDTH, gradient, keys, column, N, WIDTH, WIDTH, WIDE)
