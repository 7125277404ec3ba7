r"""T steps down the interaction energy in one Triton kernel, forward and backward.

    z_t = norm(x_t) ,   s_ij = (q_i·k_j + z_iᵀ diag(d) u_j)/τ ,   q_i = R_i W_Q z_i
    ℓ_i = log Σ_j exp s_ij ,   p_ij = exp(s_ij − ℓ_i)
    f_i = Σ_heads σ [ W_Qᵀ R_iᵀ Σ_j p_ij k_j + d ⊙ Σ_j p_ij u_j ] ,       x_{t+1} = x_t + η_t P f

One program takes a block of rows of one sequence through all steps, all heads at once (heads are the batch of
3-dimensional products); x stays in registers. Logits and probabilities exist only as tiles.

The reverse of a step, with g the gradient that arrives at x_{t+1}, v = P g, and λ_i the one that arrives at ℓ_i:

    dp_ij = σ (q(v)_i·k_j + v_iᵀ diag(d) u_j)    what an attention weight is worth; q(v) = R_i W_Q v_i
    δ_i   = Σ_j p_ij dp_ij                       and Σ_i δ_i is the gradient of η_t
    ds_ij = p_ij (η (dp_ij − δ_i) + λ_i)/τ
    g    ← g + J(x_t) dz ,   dz_i = Σ_heads [ W_Qᵀ R_iᵀ Σ_j ds_ij k_j + d ⊙ Σ_j ds_ij u_j ]      the force with ds for p
    dk_j  = Σ_t Σ_i ds_ij q_i + η σ p_ij q(v)_i ,    dW_Q = Σ (R_iᵀ Σ_j σ p_ij k_j) ⊗ ηv_i + (R_iᵀ Σ_j ds_ij k_j) ⊗ z_i
    y_j   = Σ_t Σ_i ds_ij z_i + η σ p_ij v_i ,       du_j = d ⊙ y_j ,   dd = Σ_j u_j ⊙ y_j

σ is −1 for the heads that repel, the last ones, and 1 for the others.

The sums over j are made by the program that owns the rows, those over i and t by the one that owns the keys, the rest by
matrix products: no atomics, so the same numbers each time. docs/kernels.md has the derivation and the costs.

Shape suffixes: B sequences, N positions, H heads, K rank of a head, D width, T steps. In kernels BM rows by BN keys.
"""

# a jitted function's constants are written as plain values, which its annotations do not say
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from energylab.kernels.available import INTERPRETED
from energylab.kernels.common import (
    LOG2E,
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
from energylab.kernels.interaction_kernels import (
    EPSILON,
    backward_keys_kernel,
    backward_rows_kernel,
    forward_kernel,
)

# --- configurations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """How one kernel is cut: rows and keys of a tile, warps, stages of the load pipeline, and how it multiplies."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    whole: bool = True
    """Whether the projections take the weights of all heads as one operand, or a head at a time."""
    precision: str = "ieee"
    """Of float32 products: ``ieee``, ``tf32x3`` (three products on tensor cores for one), or ``tf32``."""


INTERPRETER_CUT = Configuration(rows=32, keys=64, num_warps=1, num_stages=1)
"""The interpreter's time is a matter of how many operations there are, not of their size."""

_NVIDIA = {
    # kernel, kind of operand, width: rows, keys, warps, stages
    ("forward", "half", 32): (16, 32, 4, 2),
    ("forward", "half", 64): (16, 32, 4, 2),
    ("forward", "half", 128): (16, 32, 8, 2),
    ("backward_rows", "half", 32): (16, 16, 4, 2),
    ("backward_rows", "half", 64): (16, 16, 4, 2),
    ("backward_rows", "half", 128): (16, 16, 8, 2),
    ("backward_keys", "half", 32): (16, 32, 4, 2),
    ("backward_keys", "half", 64): (16, 32, 4, 2),
    ("backward_keys", "half", 128): (16, 16, 8, 2),
    ("forward", "float32", 32): (16, 16, 8, 1),
    ("backward_rows", "float32", 32): (16, 16, 8, 1),
    ("backward_keys", "float32", 32): (16, 16, 4, 1),
}
_OF = {
    "sm_80": _NVIDIA,
    "sm_86": _NVIDIA,
    "sm_90": _NVIDIA
    | {
        ("forward", "half", 64): (16, 16, 4, 2),
        ("backward_rows", "half", 32): (16, 16, 8, 2),
        ("backward_rows", "half", 64): (16, 16, 8, 2),
    },
    # a wave has 64 lanes, so that 4 are the 8 warps of the others; two stages do not fit the shared memory
    "gfx942": {key: (*cut[:2], 4, 1) for key, cut in _NVIDIA.items()},
}
_DTYPES = {"half": ("bfloat16", "float16"), "float32": ("float32",)}

CONFIGURATIONS: dict[tuple[str, str, int, str], Configuration] = {
    (kernel, dtype, width, where): Configuration(*cut)
    for where, table in _OF.items()
    for (kernel, kind, width), cut in table.items()
    for dtype in _DTYPES[kind]
}
"""By kernel, dtype of the operands, padded width and architecture; docs/kernels.md says how they were found."""
PER_HEAD_WIDTH = 64
"""The largest width at which a diagonal per head compiles without spills, in half precision; in float32 none does."""
LARGEST_RANK = 8
"""Of the preconditioner: with U Vᵀ + V Uᵀ, two factors of rank 8 fill the 16 columns of a product."""


def configuration(kernel: str, dtype: torch.dtype, width: int, architecture: str) -> Configuration:
    """The entry of the table for a kernel; KeyError where it has none."""
    if INTERPRETED:
        return INTERPRETER_CUT
    return CONFIGURATIONS[kernel, str(dtype).removeprefix("torch."), padded(width, 32), architecture]


def why_not_shape(
    dtype: torch.dtype, device: torch.device, heads: int, head_dim: int, width: int, rank: int, per_head: bool
) -> str | None:
    """Why there is no kernel for a layer of these sizes; None if there is."""
    if INTERPRETED:
        return None
    key = ("forward", str(dtype).removeprefix("torch."), padded(width, 32), architecture(device))
    if key not in CONFIGURATIONS:
        return f"the table of configurations has no entry for width {width} in {key[1]} on {key[3]}"
    if per_head and dtype == torch.float32:
        return "with a diagonal per head there is no configuration in float32"
    if per_head and width > PER_HEAD_WIDTH:
        return f"with a diagonal per head the widths go up to {PER_HEAD_WIDTH}, and the width is {width}"
    if rank > LARGEST_RANK:
        return f"the fused kernel is made for preconditioners of rank up to {LARGEST_RANK}, and the rank is {rank}"
    if triton.next_power_of_2(heads) * padded(head_dim) > 2 * padded(width, 32):
        return f"{heads} heads of {head_dim}, padded, are more than twice the width {width}"
    return None


# --- launching -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What a descent is given, as tensors: see ``interaction_descent``."""

    h: Tensor
    u: Tensor
    k: Tensor
    query_weight: Tensor
    diagonal: Tensor | None
    step_sizes: Tensor
    scale: Tensor | None
    left: Tensor | None
    right: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    temperature: float
    mask: str
    repelling: int
    final: bool

    @property
    def steps(self) -> int:
        return self.step_sizes.shape[0]

    @property
    def points(self) -> int:
        """At how many of the x_t there is a log-sum-exp."""
        return self.steps + self.final

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.k.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.accumulator, device=self.h.device)


def _constants(inputs: Inputs) -> dict[str, Any]:
    heads, head_dim, width = inputs.query_weight.shape
    rank = 0
    if inputs.left is not None:
        rank = inputs.left.shape[1] * (1 if inputs.right is None else 2)
    return {
        "SCALE": LOG2E.value / inputs.temperature,
        "WIDTH": width,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "DIAGONAL": 0 if inputs.diagonal is None else inputs.diagonal.ndim,
        "P": preconditioner_kind(inputs.scale, inputs.left),
        "REPELLING": inputs.repelling,
        "ROTARY": inputs.cos is not None,
        "CAUSAL": inputs.mask == "causal",
        "D": padded(width),
        "H": triton.next_power_of_2(heads),
        "K": padded(head_dim),
        "R": padded(rank),
        "DTYPE": TRITON_DTYPES[inputs.k.dtype],
        "ACC": TRITON_DTYPES[inputs.accumulator],
    }


def _tile(cut: Configuration) -> dict[str, Any]:
    return {
        "BM": cut.rows,
        "BN": cut.keys,
        "PRECISION": cut.precision,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
    }


def _pick(function: Any, constants: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in constants.items() if name in function.arg_names}


def launch_forward(
    inputs: Inputs,
    energies: bool,
    save: bool,
    forces: bool,
    fused: bool = True,
    cut: Configuration | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_T, the log-sum-exps, and where asked for the states x_1 .. and the forces f_t: one launch, or T of them."""
    batch, length, width = inputs.h.shape
    heads = inputs.query_weight.shape[0]
    steps, points = inputs.steps, inputs.points
    cut = cut or configuration("forward", inputs.k.dtype, width, architecture(inputs.h.device))
    scale, left, right = _padded_preconditioner(inputs)
    query, turned = _padded_weights(inputs)
    out = torch.empty_like(inputs.h)
    energies = energies or save
    lse = inputs.empty(points if energies else 0, batch, heads, length)
    saved = points - 1 if save or not fused else 0
    states = inputs.empty(saved, batch, length, width)
    force = inputs.empty(steps if forces else 0, batch, length, width)
    nothing = inputs.step_sizes  # stands for a pointer that is not followed
    constants = _constants(inputs)
    grid = (triton.cdiv(length, cut.rows) * batch,)
    launches = [(0, steps)] if fused else [(t, t + 1) for t in range(steps)]
    for begin, end in launches:
        whole = end == steps
        forward_kernel[grid](
            inputs.h if begin == 0 else states[begin - 1],
            inputs.u,
            inputs.k,
            query,
            turned,
            _or(inputs.diagonal, nothing),
            _or(inputs.cos, nothing),
            _or(inputs.sin, nothing),
            inputs.step_sizes,
            scale,
            left,
            right,
            out if whole else states[end - 1],
            lse,
            states,
            force,
            length,
            batch,
            begin,
            end,
            saved,
            **_pick(forward_kernel, constants),
            FINAL=inputs.final and whole and energies,
            SAVE=saved > 0 and (fused or whole),
            FORCES=forces,
            ENERGIES=energies,
            WHOLE=cut.whole,
            **_tile(cut),
        )
    return out, lse, states if save else states[:0].clone(), force


def launch_backward(
    inputs: Inputs,
    grad: Tensor,
    lse_grad: Tensor,
    lse: Tensor,
    states: Tensor,
    forces: Tensor,
    fused: bool = True,
    cuts: tuple[Configuration, Configuration] | None = None,
) -> "Gradients":
    """Every gradient, from what the forward saved: one launch over rows (or T of them), one over keys, matrix products."""
    batch, length, width = inputs.h.shape
    heads, head_dim, _ = inputs.query_weight.shape
    points, dtype, where = inputs.points, inputs.k.dtype, architecture(inputs.h.device)
    rows_cut, keys_cut = cuts or [configuration(f"backward_{name}", dtype, width, where) for name in ("rows", "keys")]
    scale, left, right = _padded_preconditioner(inputs)
    query, turned = _padded_weights(inputs)
    step_sizes = inputs.step_sizes
    if inputs.final:  # E(x_T) without a step from there
        step_sizes = torch.cat([step_sizes, step_sizes.new_zeros(1)])
    constants = _constants(inputs)
    nothing = step_sizes
    delta = inputs.empty(points, batch, heads, length)
    queries_out, queries_pull = (inputs.empty(points, batch, length, heads, head_dim, dtype=dtype) for _ in range(2))
    inner = inputs.empty(2, points, batch, length, width, dtype=dtype)
    outer = inputs.empty(2, points, batch, length, heads, head_dim, dtype=dtype)
    pull = inputs.empty(points if inputs.scale is not None else 0, batch, length, width)
    h_grad = torch.empty_like(inputs.h)
    grid = (triton.cdiv(length, rows_cut.rows) * batch,)
    for begin, end in [(0, points)] if fused else [(t, t + 1) for t in reversed(range(points))]:
        out = h_grad if begin == 0 else inputs.empty(batch, length, width)
        backward_rows_kernel[grid](
            grad,
            inputs.h,
            states,
            inputs.u,
            inputs.k,
            query,
            turned,
            _or(inputs.diagonal, nothing),
            _or(inputs.cos, nothing),
            _or(inputs.sin, nothing),
            step_sizes,
            scale,
            left,
            right,
            lse,
            lse_grad,
            delta,
            queries_out,
            queries_pull,
            inner,
            outer,
            pull,
            out,
            length,
            batch,
            points,
            begin,
            end,
            **_pick(backward_rows_kernel, constants),
            WHOLE=rows_cut.whole,
            **_tile(rows_cut),
        )
        grad = out
    kind = constants["DIAGONAL"]
    group = heads if kind == 1 else 1
    blocks, groups = triton.cdiv(length, keys_cut.keys), heads // group
    key_grad = torch.empty_like(inputs.k)
    u_grad = inputs.empty(groups if kind else 0, batch, length, width)
    diagonal_grad = inputs.empty(batch * blocks if kind else 0, groups, width)
    backward_keys_kernel[(batch * groups * blocks,)](
        inputs.u,
        inputs.k,
        _or(inputs.diagonal, nothing),
        step_sizes,
        lse,
        lse_grad,
        delta,
        queries_out,
        queries_pull,
        inner,
        key_grad,
        u_grad,
        diagonal_grad,
        length,
        batch,
        points,
        **{**_pick(backward_keys_kernel, constants), "H": triton.next_power_of_2(group)},
        GROUP=group,
        **_tile(keys_cut),
    )
    query_grad = _query_gradient(inputs, outer, inner)
    scale_grad, left_grad, right_grad = preconditioner_gradients(
        pull[: inputs.steps], forces, inputs.scale, inputs.left, inputs.right
    )
    return Gradients(
        h=h_grad,
        u=u_grad.sum(0) if kind else None,
        k=key_grad,
        query_weight=query_grad,
        diagonal=diagonal_grad.sum(0).squeeze(0) if kind == 1 else diagonal_grad.sum(0) if kind else None,
        step_sizes=delta[: inputs.steps].sum((1, 2, 3)),
        scale=scale_grad,
        left=left_grad,
        right=right_grad,
    )


@dataclass(frozen=True)
class Gradients:
    """The gradient of each differentiable field of ``Inputs``, None where it is None."""

    h: Tensor
    u: Tensor | None
    k: Tensor
    query_weight: Tensor
    diagonal: Tensor | None
    step_sizes: Tensor
    scale: Tensor | None
    left: Tensor | None
    right: Tensor | None


def _query_gradient(inputs: Inputs, outer: Tensor, inner: Tensor) -> Tensor:
    """``dW_Q``, of all steps by one matrix product: (2, T, B, N, H, K) with (2, T, B, N, D)."""
    if inputs.cos is not None:
        outer = rotate_back(outer, inputs.cos[:, None], inputs.sin[:, None]).to(inner.dtype)
    return (outer.flatten(-2).flatten(0, -2).mT @ inner.flatten(0, -2)).view_as(inputs.query_weight)


def _padded_weights(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """W_Q, zero beyond its heads, ranks and width, and the same with the halves of each head exchanged, for the rotation.

    A tile of them needs no mask, and its addresses are one base and constants: kept over the steps, other addresses would
    take the registers.
    """
    heads, head_dim, width = inputs.query_weight.shape
    missing = (0, padded(width) - width, 0, padded(head_dim) - head_dim, 0, triton.next_power_of_2(heads) - heads)
    query = functional.pad(inputs.query_weight, missing).contiguous()
    if inputs.cos is None:
        return query, query
    return query, functional.pad(inputs.query_weight.roll(head_dim // 2, 1), missing).contiguous()


def _padded_preconditioner(inputs: Inputs) -> list[Tensor]:
    """scale, L and R of the preconditioner, zero beyond the width and the rank; another tensor for what there is not."""
    width = padded(inputs.h.shape[2]) - inputs.h.shape[2]
    parts = [inputs.step_sizes] * 3  # stand for pointers that are not followed
    if inputs.scale is not None:
        parts[0] = functional.pad(inputs.scale, (0, width))
    if inputs.left is not None:
        for index, factor in enumerate(low_rank_factors(inputs.left, inputs.right), start=1):
            rank = factor.shape[1]
            parts[index] = functional.pad(factor, (0, padded(rank) - rank, 0, width)).contiguous()
    return parts


def _or(tensor: Tensor | None, nothing: Tensor) -> Tensor:
    return nothing if tensor is None else tensor


_COMPILED = {
    "plain": {"DIAGONAL": 0, "P": 0, "ROTARY": False},
    "heads that repel": {"DIAGONAL": 0, "P": 0, "ROTARY": False, "REPELLING": 2},
    "heads that repel, shared diagonal": {"DIAGONAL": 1, "P": 0, "ROTARY": False, "REPELLING": 2},
    "shared diagonal, rotary, low-rank P": {"DIAGONAL": 1, "P": 2, "ROTARY": True},
    "per-head diagonal, rotary, low-rank P": {"DIAGONAL": 2, "P": 2, "ROTARY": True},
}
"""The least and the most that a kernel may be asked to do."""
_COMPILED_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def compile_cases() -> Iterator[CompileCase]:
    """Every configuration on its architecture, with the options that ask most of it, for 4 heads.

    Without any option at width 64; float16, whose code differs from that of bfloat16 in the words for the type alone, there
    on sm_90; on gfx942, where nothing spills, a diagonal per head there alone.
    """
    kernels = {"forward": forward_kernel, "backward_rows": backward_rows_kernel, "backward_keys": backward_keys_kernel}
    for (kernel, dtype, width, where), cut in CONFIGURATIONS.items():
        if where == "sm_86" or (dtype == "float16" and (width, where) != (64, "sm_90")):  # sm_86 runs what sm_80 does
            continue
        function, name = kernels[kernel], _COMPILED_DTYPES[dtype]
        heads = 4
        for options, chosen in _COMPILED.items():
            usual = dtype == "bfloat16" and width == 64
            if chosen["DIAGONAL"] == 2 and (
                dtype == "float32" or width > PER_HEAD_WIDTH or (where == "gfx942" and not usual)
            ):
                continue
            once = chosen["DIAGONAL"] == 0 or "REPELLING" in chosen
            if (once and not usual) or (dtype == "float16" and chosen["DIAGONAL"] != 1):
                continue
            group = heads if kernel != "backward_keys" or chosen["DIAGONAL"] == 1 else 1
            tile = _tile(cut)
            constants = {
                "SCALE": LOG2E.value / (width // heads) ** 0.5,
                "WIDTH": width,
                "HEADS": heads,
                "HEAD_DIM": width // heads,
                "REPELLING": 0,
                "CAUSAL": True,
                "FINAL": True,
                "SAVE": True,
                "ENERGIES": True,
                "FORCES": chosen["P"] > 0,
                "GROUP": group,
                "D": width,
                "H": triton.next_power_of_2(group),
                "K": padded(width // heads),
                "R": 16,
                "WHOLE": cut.whole,
                "DTYPE": TRITON_DTYPES[getattr(torch, dtype)],
                "ACC": tl.float32,
                **chosen,
                **tile,
            }
            yield CompileCase(
                name=f"interaction {kernel}, {options}",
                architecture=where,
                dtype=name,
                width=width,
                function=function,
                signature={a: _type_of(a, name) for a in function.arg_names if a not in constants},
                constants=_pick(function, constants),
                options={key: tile[key] for key in ("num_warps", "num_stages")},
            )


_OPERANDS = ("x", "h", "out", "grad", "u", "k", "query", "turned", "diagonal", "left", "right")
_STORED = ("query_out", "query_pull", "inner", "outer", "key_grad")


def _type_of(argument: str, dtype: str) -> str:
    """Of a kernel's argument, in Triton's words."""
    if not argument.endswith("_ptr"):
        return "i32"
    return f"*{dtype}" if argument.removesuffix("_ptr") in (*_OPERANDS, *_STORED) else "*fp32"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``R_i x_i`` over the last axis, halves convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``R_iᵀ x_i``."""
    return rotate(x, cos, -sin)


# --- the same in PyTorch, with dense tiles ---------------------------------------------------------------------------


class _Dense:
    """The linear maps of the energy, ``z ↦ zᵀ A_k u_j`` and ``w ↦ Σ_k Σ_j w_ij^k A_k u_j``, in the accumulator's dtype."""

    def __init__(self, inputs: Inputs):
        self.inputs = inputs
        wide = inputs.accumulator
        self.weight_HKD, self.u_BJD = inputs.query_weight.to(wide), inputs.u.to(wide)
        self.k_BHJK = inputs.k.to(wide).transpose(1, 2)
        self.diagonal = None if inputs.diagonal is None else inputs.diagonal.to(wide)
        length = inputs.h.shape[1]
        i, j = torch.arange(length, device=inputs.h.device)[:, None], torch.arange(length, device=inputs.h.device)
        self.hidden_NJ = j > i if inputs.mask == "causal" else (j > i) | ((j % 2 == 0) & (j != i))

    def queries(self, z_BND: Tensor) -> Tensor:
        q_BHNK = torch.einsum("bnd,hkd->bhnk", z_BND, self.weight_HKD)
        return q_BHNK if self.inputs.cos is None else rotate(q_BHNK, self.inputs.cos, self.inputs.sin)

    def unrotated(self, o_BHNK: Tensor) -> Tensor:
        return o_BHNK if self.inputs.cos is None else rotate_back(o_BHNK, self.inputs.cos, self.inputs.sin)

    def products(self, z_BND: Tensor) -> Tensor:
        s_BHNJ = self.queries(z_BND) @ self.k_BHJK.mT
        if self.diagonal is not None:
            diagonal_HD = self.diagonal if self.diagonal.ndim == 2 else self.diagonal[None]
            s_BHNJ = s_BHNJ + torch.einsum("bnd,hd,bjd->bhnj", z_BND, diagonal_HD, self.u_BJD)
        return s_BHNJ

    def logits(self, z_BND: Tensor) -> Tensor:
        return (self.products(z_BND) / self.inputs.temperature).masked_fill(self.hidden_NJ, -torch.inf)

    def signed(self, w_BHNJ: Tensor) -> Tensor:
        attracting, repelling = w_BHNJ.tensor_split([w_BHNJ.shape[1] - self.inputs.repelling], 1)
        return torch.cat([attracting, -repelling], 1)

    def read_out(self, w_BHNJ: Tensor) -> Tensor:
        force = torch.einsum("bhnk,hkd->bnd", self.unrotated(w_BHNJ @ self.k_BHJK), self.weight_HKD)
        if self.diagonal is not None:
            diagonal_HD = self.diagonal if self.diagonal.ndim == 2 else self.diagonal.expand(w_BHNJ.shape[1], -1)
            force = force + torch.einsum("bhnj,bjd,hd->bnd", w_BHNJ, self.u_BJD, diagonal_HD)
        return force


def _norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """``norm(x)`` and ``1/rms(x)``."""
    inverse = (x.square().mean(-1, keepdim=True) + EPSILON.value).rsqrt()
    return x * inverse, inverse


def dense_forward(inputs: Inputs, energies: bool, save: bool, forces: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``launch_forward`` computes, with the logits in memory."""
    dense, wide = _Dense(inputs), inputs.accumulator
    scale, left, right = (None if part is None else part.to(wide) for part in (inputs.scale, inputs.left, inputs.right))
    x, lses, states, fs = inputs.h.to(wide), [], [], []
    for step_size in inputs.step_sizes.to(wide):
        logits = dense.logits(_norm(x)[0])
        force = dense.read_out(dense.signed(logits.softmax(-1)))
        x = x + step_size * precondition_dense(force, scale, left, right)
        lses.append(logits.logsumexp(-1))
        states.append(x)
        fs.append(force)
    if inputs.final:
        lses.append(dense.logits(_norm(x)[0]).logsumexp(-1))
    none = inputs.empty(0, *inputs.h.shape)
    kept = states[: inputs.points - 1] if save else []
    return (
        x.to(inputs.h.dtype, copy=True),
        torch.stack(lses) if energies or save else lses[0].new_empty(0, *lses[0].shape),
        torch.stack(kept) if kept else none,
        torch.stack(fs) if forces else none.clone(),
    )


def dense_backward(inputs: Inputs, grad: Tensor, lse_grad: Tensor, states: Tensor, forces: Tensor) -> Gradients:
    """What ``launch_backward`` computes: the algebra at the top of this file, line by line."""
    dense, wide = _Dense(inputs), inputs.accumulator
    scale, left, right = (None if part is None else part.to(wide) for part in (inputs.scale, inputs.left, inputs.right))
    g = grad.to(wide)
    xs = [inputs.h.to(wide), *states]
    step_sizes = [*inputs.step_sizes.to(wide)] + [g.new_zeros(())] * inputs.final
    query_grad, key_grad = torch.zeros_like(dense.weight_HKD), torch.zeros_like(dense.k_BHJK)
    y_BHJD = g.new_zeros(())
    deltas: list[Tensor] = []
    pulls: list[Tensor] = []
    for x, step_size, lse_gradient in reversed(list(zip(xs, step_sizes, lse_grad.to(wide), strict=True))):
        z, inverse = _norm(x)
        v = precondition_dense(g, scale, left, right)
        p = dense.logits(z).softmax(-1)
        dp = dense.signed(dense.products(v))
        delta = (p * dp).sum(-1, keepdim=True)
        ds = p * (step_size * (dp - delta) + lse_gradient[..., None]) / inputs.temperature
        deltas.append(delta.sum())
        pulls.append(step_size * g)
        ep = dense.signed(step_size * p)
        for weight, vector in ((ep, v), (ds, z)):
            key_grad = key_grad + weight.mT @ dense.queries(vector)
            o = dense.unrotated(weight @ dense.k_BHJK)
            query_grad = query_grad + torch.einsum("bhnk,bnd->hkd", o, vector)
            if dense.diagonal is not None:
                y_BHJD = y_BHJD + weight.mT @ vector[:, None]
        dz = dense.read_out(ds)
        g = g + inverse * (dz - z * (z * dz).mean(-1, keepdim=True))  # J(x) dz
    u_grad = diagonal_grad = None
    if dense.diagonal is not None:
        diagonal_HD = dense.diagonal if dense.diagonal.ndim == 2 else dense.diagonal.expand(y_BHJD.shape[1], -1)
        u_grad = torch.einsum("bhjd,hd->bjd", y_BHJD, diagonal_HD)
        diagonal_grad = torch.einsum("bhjd,bjd->hd", y_BHJD, dense.u_BJD)
        if dense.diagonal.ndim == 1:
            diagonal_grad = diagonal_grad.sum(0)
    pull = torch.stack(pulls[::-1][: inputs.steps])
    scale_grad, left_grad, right_grad = preconditioner_gradients(pull, forces, scale, left, right)
    return Gradients(
        h=g.to(inputs.h.dtype),
        u=u_grad,
        k=key_grad.transpose(1, 2).contiguous(),
        query_weight=query_grad,
        diagonal=diagonal_grad,
        step_sizes=torch.stack(deltas[::-1][: inputs.steps]),
        scale=scale_grad,
        left=left_grad,
        right=right_grad,
    )


# --- the operators ---------------------------------------------------------------------------------------------------

_ARGUMENTS = tuple(field.name for field in dataclasses.fields(Inputs))
_DIFFERENTIABLE = tuple(field.name for field in dataclasses.fields(Gradients))
SECOND_DERIVATIVE = 'second derivative: the fused kernel has only a first one; use backend="reference"'


@torch.library.custom_op("energylab::interaction_descent", mutates_args=())
def interaction_descent(
    h: Tensor,
    u: Tensor,
    k: Tensor,
    query_weight: Tensor,
    diagonal: Tensor | None,
    step_sizes: Tensor,
    scale: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    temperature: float,
    mask: str,
    repelling: int,
    final: bool,
    energies: bool,
    save: bool,
    forces: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """T steps from ``h``: x_T, the log-sum-exps, the states x_1 .. x_{T−1}, the forces.

    Args:
        h: (B, N, D), in its own dtype; the state is kept in float32.
        u, k: the history ``norm(h)``, (B, N, D), and the (rotated) keys, (B, N, H, K).
        query_weight, diagonal: (H, K, D), and (D,), (H, D) or None; like u and k in the dtype of the matrix products.
        step_sizes: (T,).
        scale, left, right: P, diag(scale) + U Vᵀ + V Uᵀ, or + U Uᵀ where ``right`` is None.
        cos, sin: (N, K), of rotary positions.
        repelling: so many of the heads, the last ones, have σ = −1.
        final: the log-sum-exp of x_T too, by one more sweep, and then x_T among the states.
        energies: whether the log-sum-exps are wanted; the backward needs them, so ``save`` includes them.
        save, forces: whether the states and forces are wanted; the backward needs the first, and the second for P.
        fused: one launch for all steps, or one for each.

    Differentiable in x_T and the log-sum-exps, (T, B, H, N), once; the energy is ``−τ Σ_k σ_k`` of them.
    """
    tensors = h, u, k, query_weight, diagonal, step_sizes, scale, left, right, cos, sin
    inputs = Inputs(*tensors, temperature, mask, repelling, final)
    if h.is_cuda or INTERPRETED:
        return launch_forward(inputs, energies, save, forces, fused)
    return dense_forward(inputs, energies, save, forces)


@interaction_descent.register_fake
def _(h, u, k, query_weight, diagonal, step_sizes, *rest):
    inputs = Inputs(h, u, k, query_weight, diagonal, step_sizes, *rest[:-4])
    energies, save, forces, _ = rest[-4:]
    lse = inputs.empty(inputs.points if energies or save else 0, h.shape[0], query_weight.shape[0], h.shape[1])
    states = inputs.empty(inputs.points - 1 if save else 0, *h.shape)
    return torch.empty_like(h), lse, states, inputs.empty(inputs.steps if forces else 0, *h.shape)


@torch.library.custom_op("energylab::interaction_descent_backward", mutates_args=())
def interaction_descent_backward(
    grad: Tensor,
    lse_grad: Tensor,
    lse: Tensor,
    states: Tensor,
    saved_forces: Tensor,
    h: Tensor,
    u: Tensor,
    k: Tensor,
    query_weight: Tensor,
    diagonal: Tensor | None,
    step_sizes: Tensor,
    scale: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    temperature: float,
    mask: str,
    repelling: int,
    final: bool,
    fused: bool,
) -> list[Tensor]:
    """The gradients of ``interaction_descent``, in the order of ``Gradients``, those that are None left out."""
    tensors = h, u, k, query_weight, diagonal, step_sizes, scale, left, right, cos, sin
    inputs = Inputs(*tensors, temperature, mask, repelling, final)
    if h.is_cuda or INTERPRETED:
        gradients = launch_backward(inputs, grad, lse_grad, lse, states, saved_forces, fused)
    else:
        gradients = dense_backward(inputs, grad, lse_grad, states, saved_forces)
    return [
        gradient.to(getattr(inputs, name).dtype)
        for name in _DIFFERENTIABLE
        if (gradient := getattr(gradients, name)) is not None
    ]


@interaction_descent_backward.register_fake
def _(grad, lse_grad, lse, states, saved_forces, *rest):
    inputs = Inputs(*rest[:-1])
    return [torch.empty_like(getattr(inputs, name)) for name in _with_gradient(inputs)]


def _with_gradient(inputs: Inputs) -> list[str]:
    """The fields that have a gradient: without a diagonal, u does not matter."""
    names = [name for name in _DIFFERENTIABLE if getattr(inputs, name) is not None]
    return [name for name in names if name != "u" or inputs.diagonal is not None]


def _setup(ctx, inputs, output) -> None:
    *arguments, _, save, _, fused = inputs
    tensors = [argument if isinstance(argument, Tensor) else None for argument in arguments]
    ctx.save_for_backward(*tensors, *(output[1:] if save else ()))
    ctx.rest = [argument for name, argument in zip(_ARGUMENTS, arguments, strict=True) if name in _PLAIN]
    ctx.fused, ctx.saved = fused, save
    ctx.set_materialize_grads(False)


_PLAIN = ("temperature", "mask", "repelling", "final")


def _backward(ctx, grad, lse_grad, *_):
    if not ctx.saved:
        raise RuntimeError("interaction_descent: a backward needs save=True")
    tensors = ctx.saved_tensors
    arguments, (lse, states, forces) = [*tensors[: len(_ARGUMENTS) - len(_PLAIN)], *ctx.rest], tensors[-3:]
    inputs = Inputs(*arguments)
    grad = torch.zeros_like(inputs.h) if grad is None else grad.contiguous()
    lse_grad = torch.zeros_like(lse) if lse_grad is None else lse_grad.contiguous()
    values = interaction_descent_backward(grad, lse_grad, lse, states, forces, *arguments, ctx.fused)
    by_name = dict(zip(_with_gradient(inputs), values, strict=True))
    return (*(by_name.get(name) for name in _ARGUMENTS), None, None, None, None)


interaction_descent.register_autograd(_backward, setup_context=_setup)


def _refuse(ctx, *grads):
    raise RuntimeError(SECOND_DERIVATIVE)


interaction_descent_backward.register_autograd(_refuse)
