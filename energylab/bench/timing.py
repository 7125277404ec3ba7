"""Interleaved timing, and the matrix products of a computation on their own."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
)


def medians(functions: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 3) -> dict[str, float]:
    """Median seconds of each function, called in turn A B C A B C ... in this process."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(warmup + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if repeat >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def matrix_products(function: Callable[[], object]) -> Callable[[], None]:
    """A function that does only the matrix products of ``function``: same shapes, strides and order, random numbers."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
            if operation in PRODUCTS:
                left, right = (_random_like(x) for x in arguments[-2:])
                calls.append((left, right))
            return operation(*arguments, **(keywords or {}))

    with Record():
        function()

    def replay() -> None:
        for left, right in calls:
            torch.matmul(left, right)

    return replay


def _random_like(x: torch.Tensor) -> torch.Tensor:
    # by way of the storage: an expanded tensor cannot be written to
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.size(), x.stride(), strict=True))
    return torch.randn(extent, dtype=x.dtype).as_strided(x.size(), x.stride())


def machine() -> str:
    """What the numbers were measured on, in one line."""
    return (
        f"{platform.machine()}, {torch.get_num_threads()} thread(s), {torch.backends.cpu.get_cpu_capability()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
