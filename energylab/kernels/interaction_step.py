r"""One step down the interaction energy: its force and its log-sum-exp, for sizes at which no kernel takes all steps.

    s_ij^k = (q_i^k·k_j^k + a_i·u_j)/τ ,     ℓ_i^k = log Σ_j exp s_ij^k ,     p_ij^k = exp(s_ij^k − ℓ_i^k)
    o_i^k  = Σ_j p_ij^k k_j^k ,              r_i = Σ_j (Σ_k p_ij^k) u_j

What is linear in z alone stays in PyTorch: q = R_i W_Q z and a = d ⊙ z go in, and ``W_Qᵀ R_iᵀ o + d ⊙ r`` is the force. With
a diagonal for each head, a and r are there for each head; without one, not at all. An "a-group" below is the heads that
share an a: all of them, or one. Any width and any number of heads will do: heads come in groups whose tiles fit, D in
chunks.

The reverse, with do, dr and λ the gradients at o, r and ℓ:

    dp_ij^k = do_i^k·k_j^k + dr_i·u_j ,      δ_i^k = Σ_j p_ij^k dp_ij^k − λ_i^k ,     ds_ij^k = p_ij^k (dp_ij^k − δ_i^k)/τ
    dq_i = Σ_j ds_ij k_j = (Σ_j p_ij dp_ij k_j − δ_i o_i)/τ ,                         dk_j = Σ_i p_ij do_i + ds_ij q_i
    da_i = Σ_j (Σ_k ds_ij^k) u_j ,           du_j = Σ_i (Σ_k p_ij^k) dr_i + (Σ_k ds_ij^k) a_i

Five kernels, each with one kind of sum, which is what keeps the tiles small. Three sum over keys: for o and ℓ; for r or, in
the backward, da; for δ and dq. Two sum over rows: for dk, and for du. Those for r, da and du have a grid axis over chunks of
D, and compute p again from ℓ. A tile of the diagonal's logits serves all heads of a program. Logits and probabilities exist
only as tiles, each sum has one owner, and there are no atomics. docs/kernels.md has the costs.

Shape suffixes: B sequences, N (and J) positions, H heads, G a-groups, K rank of a head, D width.
"""

# a jitted function's constants are written as plain values, which its annotations do not say
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from energylab.energies import InteractionEnergy, LowRankTerm
from energylab.energies.interaction import MASKS, merge_heads
from energylab.kernels.available import INTERPRETED
from energylab.kernels.common import (
    LOG2E,
    TRITON_DTYPES,
    CompileCase,
    accumulator,
    architecture,
    padded,
)
from energylab.kernels.interaction import SECOND_DERIVATIVE
from energylab.kernels.interaction_step_kernels import (
    attend_kernel,
    history_grad_kernel,
    key_grad_kernel,
    query_grad_kernel,
    read_out_kernel,
)
from energylab.kernels.pytorch import FastInteraction

# --- configurations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """How one kernel is cut."""

    rows: int
    keys: int
    chunk: int
    """Columns of D that a product for the logits takes at once."""
    wide: int
    """Columns of D that a program owns, where it owns some."""
    num_warps: int
    num_stages: int


INTERPRETER_CUT = Configuration(rows=32, keys=64, chunk=64, wide=128, num_warps=1, num_stages=1)
"""The interpreter's time is a matter of how many operations there are, not of their size."""
HEAD_COLUMNS = {"half": 512, "float32": 64}
"""How many columns, heads times their padded rank, a tile of several heads may have."""
LARGEST_HEAD_DIM = 128

_NVIDIA = {
    # kind of operand, heads of a tile, kernel: rows, keys, chunk, wide, warps, stages. Several heads are the batch of
    # 3-dimensional products, whose tiles must be small, and whose warps must not be more than there are heads
    ("half", "many"): {
        "attend": (16, 32, 64, 128, 4, 2),
        "read_out": (16, 32, 64, 128, 4, 2),
        "query_grad": (16, 16, 64, 128, 4, 2),
        "key_grad": (16, 16, 64, 128, 4, 2),
        "history_grad": (16, 32, 64, 128, 4, 2),
    },
    ("half", "one"): dict.fromkeys(
        ("attend", "read_out", "query_grad", "key_grad", "history_grad"), (64, 32, 64, 128, 4, 2)
    ),
    # IEEE products hold a row and a column of both operands in registers, so that chunks must be short
    ("float32", "many"): dict.fromkeys(
        ("attend", "read_out", "query_grad", "key_grad", "history_grad"), (16, 16, 32, 64, 8, 1)
    ),
    ("float32", "one"): {
        "attend": (16, 32, 32, 64, 4, 1),
        "read_out": (32, 32, 32, 64, 4, 1),
        "query_grad": (32, 16, 32, 64, 4, 1),
        "key_grad": (16, 16, 32, 64, 4, 1),
        "history_grad": (32, 32, 32, 64, 8, 1),
    },
}
_SM_80 = _NVIDIA | {
    ("half", "one"): _NVIDIA["half", "one"] | dict.fromkeys(("read_out", "query_grad"), (64, 32, 64, 128, 8, 2))
}
_OF = {
    "sm_80": _SM_80,
    "sm_86": _SM_80,
    "sm_90": _NVIDIA,
    # a wave has 64 lanes, so that 4 are the 8 warps of the others; one stage, as in the fused kernels
    "gfx942": {key: {kernel: (*cut[:4], 4, 1) for kernel, cut in cuts.items()} for key, cuts in _NVIDIA.items()},
}
CONFIGURATIONS = {
    (kernel, kind, heads, where): Configuration(*cut)
    for where, table in _OF.items()
    for (kind, heads), cuts in table.items()
    for kernel, cut in cuts.items()
}
"""By kernel, kind of operand, whether a tile has one head or many, and architecture. Widths and ranks come in chunks."""

_FUNCTIONS = {
    "attend": attend_kernel,
    "read_out": read_out_kernel,
    "query_grad": query_grad_kernel,
    "key_grad": key_grad_kernel,
    "history_grad": history_grad_kernel,
}


def _kind(dtype: torch.dtype) -> str:
    return "half" if dtype.itemsize == 2 else "float32"


def configuration(kernel: str, dtype: torch.dtype, group: int, architecture: str) -> Configuration:
    """The entry of the table for a kernel whose tiles have ``group`` heads."""
    if INTERPRETED:
        return INTERPRETER_CUT
    return CONFIGURATIONS[kernel, _kind(dtype), "one" if group == 1 else "many", architecture]


def why_not_step(head_dim: int) -> str | None:
    """Why there is no one-step kernel for a layer; None if there is. No other size matters."""
    if head_dim > LARGEST_HEAD_DIM:
        return f"the one-step kernel takes heads of rank up to {LARGEST_HEAD_DIM}, and head_dim is {head_dim}"
    return None


def heads_of_a_tile(heads: int, head_dim: int, dtype: torch.dtype, diagonal: int) -> int:
    """How many heads share a tile of the diagonal's logits: with a shared diagonal (1) as many as fit, evenly, else one."""
    if diagonal != 1:
        return 1
    tiles = triton.cdiv(heads, max(1, HEAD_COLUMNS[_kind(dtype)] // padded(head_dim)))
    return int(triton.cdiv(heads, tiles))


_COMPILED = [
    # shape, dtype, width, heads, head_dim, diagonal
    ("8 heads of 64", "bf16", 512, 8, 64, 1),
    ("diagonal per head, heads of 128", "bf16", 512, 4, 128, 2),
    ("no diagonal, heads of 64", "bf16", 256, 4, 64, 0),
    ("4 heads of 16", "fp32", 64, 4, 16, 1),
    ("diagonal per head, heads of 128", "fp32", 512, 4, 128, 2),
    ("no diagonal, heads of 16", "fp32", 64, 4, 16, 0),
]
"""The largest tile of each row of the table, the laboratory's usual layer, and the least that is asked."""


def compile_cases() -> Iterator[CompileCase]:
    """Every kernel of the table, the read-out as its backward does it, by ds; on gfx942 in half precision."""
    for shape, dtype, width, heads, head_dim, diagonal in _COMPILED:
        real = torch.bfloat16 if dtype == "bf16" else torch.float32
        group = heads_of_a_tile(heads, head_dim, real, diagonal)
        for kernel, function in _FUNCTIONS.items():
            if diagonal == 0 and "DIAGONAL" not in function.arg_names:
                continue
            for where in ("sm_80", "sm_90", "gfx942") if dtype == "bf16" and diagonal > 0 else ("sm_80", "sm_90"):
                cut = CONFIGURATIONS[kernel, _kind(real), "one" if group == 1 else "many", where]
                constants = {
                    "SCALE": LOG2E.value / head_dim**0.5,
                    "WIDTH": width,
                    "HEADS": heads,
                    "HEAD_DIM": head_dim,
                    "DIAGONAL": diagonal > 0,
                    "SHARED": diagonal == 1,
                    "CAUSAL": True,
                    "BACKWARD": True,
                    "GROUP": group,
                    "DTYPE": TRITON_DTYPES[real],
                    "ACC": tl.float32,
                    **_tile(cut, group, head_dim, width),
                }
                constants = {name: value for name, value in constants.items() if name in function.arg_names}
                yield CompileCase(
                    name=f"interaction step {kernel}, {shape}",
                    architecture=where,
                    dtype=dtype,
                    width=width,
                    function=function,
                    signature={
                        name: "i32" if name == "N" else "*fp32" if name in _WIDE else f"*{dtype}"
                        for name in function.arg_names
                        if name not in constants
                    },
                    constants=constants,
                    options={"num_warps": cut.num_warps, "num_stages": cut.num_stages},
                )


_WIDE = ("lse_ptr", "lse_grad_ptr", "delta_ptr")


# --- launching -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What a step is given: see ``interaction_step``."""

    q: Tensor
    k: Tensor
    a: Tensor | None
    u: Tensor | None
    temperature: float
    mask: str

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator(self.q.dtype)

    @property
    def diagonal(self) -> int:
        """0 none, 1 shared, 2 for each head. With a single head the two are the same."""
        return 0 if self.a is None else 1 if self.a.shape[2] == 1 else 2

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.accumulator, device=self.q.device)


class _Launch:
    """The kernels of one step, with what all of them are given."""

    def __init__(self, inputs: Inputs):
        self.inputs = inputs
        self.batch, self.length, self.heads, self.head_dim = inputs.q.shape
        self.width = 1 if inputs.u is None else inputs.u.shape[-1]
        self.group = heads_of_a_tile(self.heads, self.head_dim, inputs.q.dtype, inputs.diagonal)
        self.nothing = inputs.q  # stands for a pointer that is not followed

    def __call__(self, kernel: str, *pointers: Tensor | None, **options: Any) -> None:
        """One program for each block of the tile's owner and each group of heads, or a-group and chunk of D."""
        inputs, function = self.inputs, _FUNCTIONS[kernel]
        cut = configuration(kernel, inputs.q.dtype, self.group, architecture(inputs.q.device))
        constants = {
            "SCALE": LOG2E.value / inputs.temperature,
            "WIDTH": self.width,
            "HEADS": self.heads,
            "HEAD_DIM": self.head_dim,
            "DIAGONAL": inputs.diagonal > 0,
            "SHARED": inputs.diagonal == 1,
            "CAUSAL": inputs.mask == "causal",
            "GROUP": self.group,
            "DTYPE": TRITON_DTYPES[inputs.q.dtype],
            "ACC": TRITON_DTYPES[inputs.accumulator],
            **_tile(cut, self.group, self.head_dim, self.width),
            **options,
        }
        blocks = triton.cdiv(self.length, cut.keys if kernel in ("key_grad", "history_grad") else cut.rows)
        if "WIDE" in function.arg_names:
            of_rows = kernel == "read_out" and inputs.diagonal == 2
            others = triton.cdiv(self.width, constants["WIDE"]) * (self.heads if of_rows else 1)
        else:
            others = triton.cdiv(self.heads, self.group)
        function[(self.batch * others * blocks,)](
            *(self.nothing if pointer is None else pointer for pointer in pointers),
            self.length,
            **{name: value for name, value in constants.items() if name in function.arg_names},
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
        )


def _tile(cut: Configuration, group: int, head_dim: int, width: int) -> dict[str, Any]:
    return {
        "H": triton.next_power_of_2(group),
        "K": padded(head_dim),
        "C": min(cut.chunk, padded(width)),
        "WIDE": min(cut.wide, padded(width)),
        "BM": cut.rows,
        "BN": cut.keys,
        "PRECISION": "ieee",
    }


def launch_forward(inputs: Inputs, read_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    """o, r (empty without a diagonal, or where it is not wanted) and ℓ: two launches, or one."""
    launch, (q, k, a, u) = _Launch(inputs), (inputs.q, inputs.k, inputs.a, inputs.u)
    out = inputs.empty(*q.shape, dtype=q.dtype)
    lse = inputs.empty(launch.batch, launch.heads, launch.length)
    launch("attend", q, k, a, u, out, lse)
    if a is None or not read_out:
        return out, inputs.empty(0, dtype=q.dtype), lse
    read = inputs.empty(*a.shape, dtype=q.dtype)
    launch("read_out", q, k, a, u, lse, None, None, None, read, BACKWARD=False)
    return out, read, lse


def launch_backward(
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    out_grad: Tensor,
    read_grad: Tensor | None,
    lse_grad: Tensor,
) -> list[Tensor]:
    """dq and dk, and with a diagonal da and du: four launches, or two."""
    launch, (q, k, a, u) = _Launch(inputs), (inputs.q, inputs.k, inputs.a, inputs.u)
    delta = inputs.empty(*lse.shape)
    q_grad, k_grad = (inputs.empty(*q.shape, dtype=q.dtype) for _ in range(2))
    launch("query_grad", q, k, a, u, out, lse, out_grad, read_grad, lse_grad, delta, q_grad)
    common = (q, k, a, u, lse, out_grad, read_grad, delta)
    launch("key_grad", *common, k_grad)
    if a is None or u is None:
        return [q_grad, k_grad]
    a_grad, u_grad = (inputs.empty(*x.shape, dtype=q.dtype) for x in (a, u))
    launch("read_out", *common, a_grad, BACKWARD=True)
    launch("history_grad", *common, u_grad)
    return [q_grad, k_grad, a_grad, u_grad]


# --- the same in PyTorch, with dense tiles ---------------------------------------------------------------------------


class _Dense:
    """The inputs in the accumulator's dtype, and the products of the logits."""

    def __init__(self, inputs: Inputs):
        self.q_BNHK, self.k_BJHK = inputs.q.to(inputs.accumulator), inputs.k.to(inputs.accumulator)
        self.a_BNGD = self.u_BJD = None
        if inputs.a is not None and inputs.u is not None:
            self.a_BNGD, self.u_BJD = inputs.a.to(inputs.accumulator), inputs.u.to(inputs.accumulator)
        self.inputs = inputs

    def products(self, q_BNHK: Tensor, a_BNGD: Tensor | None) -> Tensor:
        s_BHNJ = torch.einsum("bnhk,bjhk->bhnj", q_BNHK, self.k_BJHK)
        if a_BNGD is not None:
            s_BHNJ = s_BHNJ + torch.einsum("bngd,bjd->bgnj", a_BNGD, self.u_BJD)
        return s_BHNJ

    def logits(self) -> Tensor:
        hidden_NJ = MASKS[self.inputs.mask](self.q_BNHK.shape[1], self.q_BNHK.device)
        s_BHNJ = self.products(self.q_BNHK, self.a_BNGD) / self.inputs.temperature
        return s_BHNJ.masked_fill(hidden_NJ, -torch.inf)

    def over_heads(self, w_BHNJ: Tensor) -> Tensor:
        """The sum over the heads of each a-group, (B, G, N, J)."""
        return w_BHNJ.sum(1, keepdim=True) if self.inputs.diagonal == 1 else w_BHNJ


def dense_forward(inputs: Inputs, read_out: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What ``launch_forward`` computes, with the logits in memory."""
    dense, dtype = _Dense(inputs), inputs.q.dtype
    logits = dense.logits()
    p = logits.softmax(-1)
    out = torch.einsum("bhnj,bjhk->bnhk", p, dense.k_BJHK).to(dtype)
    read = inputs.empty(0, dtype=dtype)
    if dense.u_BJD is not None and read_out:
        read = torch.einsum("bgnj,bjd->bngd", dense.over_heads(p), dense.u_BJD).to(dtype)
    return out.contiguous(), read.contiguous(), logits.logsumexp(-1)


def dense_backward(inputs: Inputs, out_grad: Tensor, read_grad: Tensor | None, lse_grad: Tensor) -> list[Tensor]:
    """What ``launch_backward`` computes: the algebra at the top of this file, line by line."""
    dense, wide = _Dense(inputs), inputs.accumulator
    do, dr = out_grad.to(wide), None if read_grad is None else read_grad.to(wide)
    p = dense.logits().softmax(-1)
    dp = dense.products(do, dr)
    delta = (p * dp).sum(-1) - lse_grad.to(wide)
    ds = p * (dp - delta[..., None]) / inputs.temperature
    gradients = [
        torch.einsum("bhnj,bjhk->bnhk", ds, dense.k_BJHK),
        torch.einsum("bhnj,bnhk->bjhk", p, do) + torch.einsum("bhnj,bnhk->bjhk", ds, dense.q_BNHK),
    ]
    if dense.a_BNGD is not None and dr is not None:
        w, dw = dense.over_heads(p), dense.over_heads(ds)
        gradients += [
            torch.einsum("bgnj,bjd->bngd", dw, dense.u_BJD),
            torch.einsum("bgnj,bngd->bjd", w, dr) + torch.einsum("bgnj,bngd->bjd", dw, dense.a_BNGD),
        ]
    return [gradient.to(inputs.q.dtype).contiguous() for gradient in gradients]


# --- the operators ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("energylab::interaction_step", mutates_args=())
def interaction_step(
    q: Tensor, k: Tensor, a: Tensor | None, u: Tensor | None, temperature: float, mask: str, read_out: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """o, (B, N, H, K), r, (B, N, G, D), and the log-sum-exp ℓ, (B, H, N), of one step.

    Args:
        q, k: ``R_i W_Q z_i`` and ``R_j W_K u_j``, (B, N, H, K), in the dtype of the matrix products.
        a, u: ``d ⊙ z``, (B, N, 1, D) for a diagonal that all heads share, else (B, N, H, D), and the history ``norm(h)``,
            (B, N, D), in the same dtype; both None without a diagonal.
        temperature, mask: τ, and ``causal`` or ``independent``.
        read_out: whether r is wanted; without, and without a diagonal, it is empty.

    All contiguous. Differentiable in all three, once; the energy is ``−τ Σ_k ℓ``.
    """
    inputs = Inputs(q, k, a, u, temperature, mask)
    return launch_forward(inputs, read_out) if q.is_cuda or INTERPRETED else dense_forward(inputs, read_out)


@interaction_step.register_fake
def _(q, k, a, u, temperature, mask, read_out):
    inputs = Inputs(q, k, a, u, temperature, mask)
    read = inputs.empty(0, dtype=q.dtype) if a is None or not read_out else torch.empty_like(a)
    return torch.empty_like(q), read, inputs.empty(q.shape[0], q.shape[2], q.shape[1])


@torch.library.custom_op("energylab::interaction_step_backward", mutates_args=())
def interaction_step_backward(
    out_grad: Tensor,
    read_grad: Tensor | None,
    lse_grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    a: Tensor | None,
    u: Tensor | None,
    temperature: float,
    mask: str,
) -> list[Tensor]:
    """The gradients of ``interaction_step`` at q and k, and with a diagonal at a and u."""
    inputs = Inputs(q, k, a, u, temperature, mask)
    if q.is_cuda or INTERPRETED:
        return launch_backward(inputs, out, lse, out_grad, read_grad, lse_grad)
    return dense_backward(inputs, out_grad, read_grad, lse_grad)


@interaction_step_backward.register_fake
def _(out_grad, read_grad, lse_grad, out, lse, q, k, a, u, temperature, mask):
    return [torch.empty_like(x) for x in (q, k, a, u) if x is not None]


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.temperature, ctx.mask, _ = inputs
    ctx.save_for_backward(*tensors, output[0], output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, out_grad, read_grad, lse_grad):
    q, k, a, u, out, lse = ctx.saved_tensors
    out_grad = torch.zeros_like(out) if out_grad is None else out_grad.contiguous()
    lse_grad = torch.zeros_like(lse) if lse_grad is None else lse_grad.contiguous()
    if a is None:
        read_grad = None
    elif read_grad is None or read_grad.numel() != a.numel():  # r was not asked for, or not used
        read_grad = torch.zeros_like(a)
    else:
        read_grad = read_grad.contiguous()
    gradients = interaction_step_backward(
        out_grad, read_grad, lse_grad, out, lse, q, k, a, u, ctx.temperature, ctx.mask
    )
    return (*gradients, *[None] * (4 - len(gradients)), None, None, None)


interaction_step.register_autograd(_backward, setup_context=_setup)


def _refuse(ctx, *grads):
    raise RuntimeError(SECOND_DERIVATIVE)


interaction_step_backward.register_autograd(_refuse)


# --- the energy ------------------------------------------------------------------------------------------------------


@final
class InteractionByStep(FastInteraction):
    """An ``InteractionEnergy`` whose force and value are computed by the kernels of this file, once differentiable.

    Args:
        reference: what is left to plain PyTorch: curvature, and single positions.
        low_rank: its low-rank term; with rotary positions, in float32 at least.
        diagonal, u: (D,) or (H, D), and the history; None without a diagonal.
        mask: the name of the reference's.
        dtype: of the matrix products.
    """

    def __init__(
        self,
        reference: InteractionEnergy,
        low_rank: LowRankTerm,
        diagonal: Tensor | None,
        u: Tensor,
        mask: str,
        dtype: torch.dtype,
    ):
        super().__init__(reference)
        self.low_rank, self.mask, self.dtype = low_rank, mask, dtype
        self.k_BNHK = self._heads_last(low_rank.k_BHJK)
        self.diagonal_GD = self.read_GD = self.u_BND = None
        sign_H = reference.sign_H
        if diagonal is not None:
            diagonal_GD = diagonal.view(-1, diagonal.shape[-1]).to(dtype)
            self.u_BND = u.to(dtype).contiguous()
            if sign_H is None:
                self.diagonal_GD = self.read_GD = diagonal_GD
            else:
                # the sum over the heads that share a diagonal knows no signs: a diagonal for each
                self.diagonal_GD = diagonal_GD.expand(len(sign_H), -1)
                self.read_GD = diagonal_GD * sign_H.to(dtype)[:, None]

    def force_and_value(self, z: Tensor) -> tuple[Tensor, Tensor]:
        o_BNHK, r_BNGD, lse_BHN = self._step(z, read_out=True)
        if self.reference.sign_H is not None:
            o_BNHK = o_BNHK * self.reference.sign_H[:, None].to(self.dtype)
        o_BHNK, rotary = o_BNHK.transpose(1, 2), self.low_rank.query_rotary
        if rotary is not None:
            o_BHNK = rotary.rotate_back(o_BHNK).to(self.dtype)
        force = merge_heads(o_BHNK, self.low_rank.query_HKD.to(self.dtype))
        if self.read_GD is not None and len(self.read_GD) == 1:
            force = torch.addcmul(force, r_BNGD.squeeze(2), self.read_GD[0])
        elif self.read_GD is not None:
            force = force + (r_BNGD * self.read_GD).sum(2)
        return force, self._energy(lse_BHN, z)

    def force(self, z: Tensor) -> Tensor:
        return self.force_and_value(z)[0]

    def value(self, z: Tensor) -> Tensor:
        return self._energy(self._step(z, read_out=False)[2], z)

    def _step(self, z: Tensor, read_out: bool) -> tuple[Tensor, Tensor, Tensor]:
        z = z.to(self.dtype)
        a_BNGD = None if self.diagonal_GD is None else z[:, :, None] * self.diagonal_GD
        return interaction_step(
            self._heads_last(self.low_rank.queries(z)),
            self.k_BNHK,
            a_BNGD,
            self.u_BND,
            self.reference.temperature,
            self.mask,
            read_out,
        )

    def _energy(self, lse_BHN: Tensor, z: Tensor) -> Tensor:
        return self.reference.over_heads(lse_BHN).to(z.dtype)

    def _heads_last(self, x_BHNK: Tensor) -> Tensor:
        return x_BHNK.transpose(1, 2).to(self.dtype).contiguous()
