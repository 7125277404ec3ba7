"""Whether a run can fit into memory at all, asked before anything is allocated."""

import dataclasses
import os
from pathlib import Path

import torch

from energylab.analysis.cost import parameters
from energylab.study.config import RunConfig
from energylab.tasks import token_layout


def check_memory(config: RunConfig, device: torch.device) -> None:
    """Raise ValueError where a run certainly needs more memory than `device` has available.

    Counted are float32 weights, their gradients and the two moments of AdamW, and, for the backward pass of one batch, the
    input of every layer. A run needs more than that, so one that passes may still run out of memory.
    """
    model, batch_size = config.model, config.training.batch_size
    one = parameters(dataclasses.replace(model, depth=1))
    weights = 4 * 4 * (one.rest + model.depth * (one.total - one.rest))
    tokens = len(token_layout(model.tokens).kinds(config.num_points)[0])
    layers = model.depth * model.loops * (1 if model.mlp == "none" else 2)
    inputs = 4 * batch_size * tokens * model.width * layers
    available = available_memory(device)
    if weights + inputs > available:
        sizes = {key: getattr(model, key) for key in ("width", "depth", "heads", "hidden", "loops")}
        sizes |= {"num_points": config.num_points, "batch_size": batch_size}
        raise ValueError(
            f"memory: expected at most {_gib(available)}, what {device.type} has available, got at least "
            f"{_gib(weights)} for weights and optimiser and {_gib(inputs)} for the inputs of the layers, "
            f"with {', '.join(f'{key} {value}' for key, value in sizes.items())}"
        )


def available_memory(device: torch.device) -> int:
    """Bytes that could be had on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: all that there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
