"""Whether Triton can run on a tensor, and if not, why. Imports nothing of Triton."""

import importlib.metadata
import os
import re

import torch
from torch import Tensor

OLDEST, NEWEST = (3, 6), (3, 9)


def triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not_installed(version: str | None) -> str | None:
    """Why no Triton kernel can run in this process, whatever the tensor; None if one can."""
    if version is None:
        return "triton is not installed"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return f"triton {version} is installed, and 3.6 to 3.9 are supported"
    return None


# constants, so that torch.compile sees no call into the operating system
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets Triton kernels, on the CPU: for tests, and a thousand times slower."""
NOT_INSTALLED = why_not_installed(triton_version())


def runs_on(x: Tensor) -> bool:
    """Whether a Triton kernel can run on ``x``."""
    if NOT_INSTALLED is not None:
        return False
    if INTERPRETED:
        return x.device.type == "cpu"
    return x.is_cuda and x.dtype in (torch.float32, torch.float16, torch.bfloat16)


def why_not(x: Tensor) -> str:
    """The reason where ``runs_on`` says no."""
    if NOT_INSTALLED is not None:
        return NOT_INSTALLED
    if INTERPRETED:
        return f"TRITON_INTERPRET=1 is for tensors on the CPU, and this one is on {x.device}"
    if not x.is_cuda:
        return f"the tensor is on {x.device}; on the CPU Triton runs under TRITON_INTERPRET=1 only"
    return f"on a GPU the kernels compute in float32, float16 or bfloat16, and the tensor is {x.dtype}"
