"""What the Triton kernels share: arithmetic that is right in the interpreter too, ``norm`` and its Jacobian, P, and the
form of a compile case.

Rules of the kernels here. Operands of a matrix product have the dtype of the weights; everything else (the state x, sums,
softmax) has the accumulator's, float32, or float64 where a test asks for it in the interpreter. Exponentials are in base 2,
``exp(a) = exp2(a log₂e)``, with the factor folded into a scale. Each load that a mask cuts says what stands outside
(``other=``), and program offsets are 64 bits wide.
"""

# a jitted function's constants are written as plain values, which its annotations do not say
# pyright: reportArgumentType=false, reportReturnType=false

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from energylab.kernels.available import INTERPRETED

INTERPRET = tl.constexpr(INTERPRETED)
"""Fixed when triton is imported: a process either interprets its kernels or compiles them."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
SHARED_MEMORY = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448, "gfx942": 65_536}
"""Bytes that one program may use."""


@dataclass(frozen=True)
class CompileCase:
    """One kernel as it is shipped: what compiling it ahead of time needs."""

    name: str
    """Kernel and options, unique together with dtype, width and architecture."""
    architecture: str
    """``sm_80``, ``sm_90`` or ``gfx942``."""
    dtype: str
    """Of the operands, in Triton's words: ``bf16``, ``fp16``, ``fp32``."""
    width: int
    function: Any
    """The ``triton.jit`` function."""
    signature: Mapping[str, str]
    """The type of each argument that is no constant: ``*bf16``, ``i32``, ..."""
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    """``num_warps`` and ``num_stages``."""
    multiplies: bool = True
    """Whether it has matrix products, which in half precision must be on tensor cores."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In which dtype sums and states are kept: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def padded(size: int, least: int = 16) -> int:
    """The next power of two, at least 16, which is the shortest side of a matrix product on tensor cores."""
    return max(least, triton.next_power_of_2(size))


@torch.compiler.assume_constant_result  # torch.compile cannot trace a question to the driver
def architecture(device: torch.device) -> str:
    """The key of the configuration tables that fits a device best."""
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major == 8 and minor in (6, 9):
        return "sm_86"
    return "sm_90" if major >= 9 else "sm_80"


# --- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """``x`` rounded to the nearest value of DTYPE, ties to even. The interpreter truncates to bfloat16: there by hand."""
    if INTERPRET and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        return x.to(DTYPE)


@triton.jit
def dot(a, b, ACC: tl.constexpr, PRECISION: tl.constexpr):
    """``a @ b`` with sums in ACC; both 2-dimensional, or both 3-dimensional with a batch first.

    The interpreter would multiply bfloat16 by its bit patterns: there the operands become ACC first, which is exact.
    PRECISION (``ieee``, ``tf32``, ``tf32x3``) matters for float32 operands only.
    """
    if INTERPRET:
        return tl.dot(a.to(ACC), b.to(ACC), input_precision=PRECISION, out_dtype=ACC)
    else:
        return tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def inverse_rms(x, width, EPSILON: tl.constexpr):
    """``1 / sqrt(mean(x²) + ε)`` of each row of (rows, columns); columns beyond ``width`` hold 0."""
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + EPSILON)


@triton.jit
def norm_jacobian(v, z, inverse, width):
    """``J v = (v − z (zᵀv)/D) / rms``, row by row, with ``z = norm(x)`` and ``inverse`` from ``inverse_rms``."""
    return inverse[:, None] * (v - z * (tl.sum(z * v, 1) / width)[:, None])


@triton.jit
def precondition(
    v,
    scale_ptr,
    left_ptr,
    right_ptr,
    columns,
    width,
    rank,
    P: tl.constexpr,
    RANK: tl.constexpr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``P v``, row by row: v itself (P = 0), ``scale ⊙ v`` (1), or ``scale ⊙ v + L (Rᵀ v)`` (2), with L, R of (D, rank).

    ``low_rank_factors`` makes L and R of what a layer holds. ``columns`` are column indices, RANK the padded rank.
    """
    if P == 0:
        return v
    inside = columns < width
    result = v * tl.load(scale_ptr + columns, mask=inside, other=0.0).to(ACC)[None, :]
    if P == 2:
        ranks = tl.arange(0, RANK)
        offsets = columns[:, None] * rank + ranks[None, :]
        mask = inside[:, None] & (ranks < rank)[None, :]
        inner = dot(cast(v, DTYPE), tl.load(right_ptr + offsets, mask=mask, other=0.0), ACC, PRECISION)
        left = tl.load(left_ptr + offsets, mask=mask, other=0.0)
        result += dot(cast(inner, DTYPE), tl.trans(left), ACC, PRECISION)
    return result


# --- host functions --------------------------------------------------------------------------------------------------


def preconditioner_kind(scale: Tensor | None, left: Tensor | None) -> int:
    """The P of ``precondition``."""
    return 0 if scale is None else 1 if left is None else 2


def low_rank_factors(left: Tensor, right: Tensor | None) -> tuple[Tensor, Tensor]:
    """L and R with ``L Rᵀ = U Vᵀ + V Uᵀ``, (D, 2r) each; or ``U Uᵀ`` where V is None."""
    if right is None:
        return left.contiguous(), left.contiguous()
    return torch.cat([left, right], 1), torch.cat([right, left], 1)


def precondition_dense(v: Tensor, scale: Tensor | None, left: Tensor | None, right: Tensor | None) -> Tensor:
    """``P v`` in PyTorch, of (..., D)."""
    if scale is None:
        return v
    result = v * scale
    if left is not None:
        other = left if right is None else right
        result = result + (v @ other) @ left.mT
        if right is not None:
            result = result + (v @ left) @ right.mT
    return result


def preconditioner_gradients(
    pull: Tensor, force: Tensor, scale: Tensor | None, left: Tensor | None, right: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of scale, U and V, from all steps at once.

    A step is ``x' = x + η P f`` and g is the gradient that arrives at x'. ``pull`` holds η g and ``force`` holds f, both
    (..., D) over steps, sequences and positions:
    ``∂scale = Σ ηg ⊙ f``, ``∂U = Σ ηg (Vᵀf)ᵀ + f (Vᵀηg)ᵀ``, ``∂V`` the same with U and V exchanged; with ``U Uᵀ``,
    ``∂U = Σ ηg (Uᵀf)ᵀ + f (Uᵀηg)ᵀ``.
    """
    if scale is None:
        return None, None, None
    pull, force = pull.flatten(0, -2), force.flatten(0, -2)
    along = (pull * force).sum(0)
    if left is None:
        return along, None, None

    def outer(weight: Tensor) -> Tensor:
        weight = weight.to(pull.dtype)
        return pull.mT @ (force @ weight) + force.mT @ (pull @ weight)

    return along, outer(left if right is None else right), None if right is None else outer(left)
