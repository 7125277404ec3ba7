"""Whether Triton can run on a tensor, and if not, why. Imports nothing of Triton."""

import functools
import importlib.metadata
import os
import re

import torch
from torch import Tensor

OLDEST, NEWEST = (3, 6), (3, 9)


def interpreted() -> bool:
    """Whether Triton kernels of this process run in Triton's interpreter, on the CPU: a matter of minutes, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not_installed() -> str | None:
    """Why no Triton kernel can run in this process, whatever the tensor; None if one can."""
    version = triton_version()
    if version is None:
        return "triton is not installed"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST <= tuple(map(int, numbers.groups())) <= NEWEST:
        return f"triton {version} is installed, and 3.6 to 3.9 are supported"
    return None


def why_not_triton(x: Tensor) -> str | None:
    """The reason why a Triton kernel cannot run on ``x``; None if it can."""
    if (reason := why_not_installed()) is not None:
        return reason
    if interpreted():
        return (
            None if x.device.type == "cpu" else f"TRITON_INTERPRET=1 is for CPU tensors, and this one is on {x.device}"
        )
    if not x.is_cuda:
        return f"the tensor is on the device {x.device}; on the CPU Triton runs under TRITON_INTERPRET=1 only"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"on a GPU the kernels compute in float32, float16 or bfloat16, and the tensor is {x.dtype}"
    return None
