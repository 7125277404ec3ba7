"""What a model costs: parameters by part, floating-point operations and activation memory of a training step.

Operations are those of matrix products, 2 for each multiplication and addition, on the reference path; element-wise work
is not counted. A backward pass costs twice its forward pass, but for the first map, whose input needs no gradient.

Symbols: L tokens of a task, D width, H heads, K rank of a head, M hidden units, r rank of the preconditioner, T steps.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from energylab.layers.attention import resolve_head_dim
from energylab.models import InContextRegressor, ModelConfig, count_parameters
from energylab.tasks import token_layout
from energylab.training import initialise, loss_of

WEIGHTS = (
    "query_weight",
    "key_weight",
    "value_weight",
    "output_weight",
    "weight",
    "gate_weight",
    "up_weight",
    "down_weight",
)
"""The matrices of a layer. What else it learns (gains, diagonals, preconditioners, step sizes) is counted apart."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Learned scalars by part. The two ``weights`` are matrices alone: half, and two thirds, of Llama's where tied."""

    attention_weights: int
    mlp_weights: int
    attention_other: int
    mlp_other: int
    rest: int
    """The maps into and out of the stream."""

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def parameters(config: ModelConfig) -> Parameters:
    """Parameters of a model by part; counted, not computed."""
    with torch.device("meta"):
        model = InContextRegressor(config)
    counts: dict[str, int] = dict.fromkeys(("attention_weights", "mlp_weights", "attention_other", "mlp_other"), 0)
    for (_, part), layer in zip(model.parts, model.layers, strict=True):
        weights = sum(p.numel() for name, p in layer.named_parameters() if name in WEIGHTS)
        counts[f"{part}_weights"] += weights
        counts[f"{part}_other"] += count_parameters(layer) - weights
    return Parameters(**counts, rest=count_parameters(model) - sum(counts.values()))


def training_flops(config: ModelConfig, num_points: int) -> int:
    """Operations of forward and backward for one task of ``num_points`` pairs."""
    layout = token_layout(config.tokens)
    length = len(layout.kinds(num_points)[0])
    read_in = 2 * length * layout.width(config.input_dim) * config.width
    read_out = 2 * num_points * config.width * (1 if config.head == "point" else 2)
    block = _attention_flops(config, length) + _mlp_flops(config, length)
    return 2 * read_in + 3 * (config.depth * config.loops * block + read_out)


def _attention_flops(config: ModelConfig, length: int) -> int:
    width, heads = config.width, config.heads
    rank = resolve_head_dim(width, heads, config.head_dim, rotary=False)
    projection = 2 * length * width * heads * rank  # W_Q z, W_K u, and the read-out of all heads
    scores = 2 * heads * length * length * rank  # q kᵀ, and p k
    if config.attention == "llama":
        projections = 3 if config.tie in ("key_value", "both") else 4
        return projections * projection + 2 * scores
    diagonals = {"none": 0, "shared": 1, "per_head": heads}[config.diagonal]
    step = 2 * projection + 2 * scores + 4 * diagonals * length * length * width + _preconditioner_flops(config, length)
    steps = config.attention_recursions or config.recursions
    return steps * step + projection * (steps if config.history == "refreshed" else 1)


def _mlp_flops(config: ModelConfig, length: int) -> int:
    product = 2 * length * config.width * config.hidden
    if config.mlp == "none":
        return 0
    if config.mlp == "llama":
        return 3 * product
    steps = config.mlp_recursions or config.recursions
    gates = steps if config.history == "refreshed" else 1
    return steps * (2 * product + _preconditioner_flops(config, length)) + gates * product


def _preconditioner_flops(config: ModelConfig, length: int) -> int:
    products = {"none": 0, "diagonal": 0, "diagonal_low_rank": 4, "diagonal_low_rank_positive": 2}
    return products[config.preconditioner] * 2 * length * config.width * config.rank


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations under it made and that are still alive; what was there before is not counted.

    ``peak`` is their largest sum so far, seen between operations: what an operation uses inside itself is not visible.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        for tensor in tree_leaves((arguments, keywords)):
            if isinstance(tensor, Tensor) and (address := tensor.untyped_storage()._cdata) not in self._made:
                self._before.add(address)
        output = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._before:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return output

    def now(self) -> int:
        """Bytes alive at this moment."""
        self._made = {address: entry for address, entry in self._made.items() if not entry[0].expired()}
        return sum(size for _, size in self._made.values())


def activation_bytes(config: ModelConfig, num_points: int, batch_size: int) -> int:
    """Bytes that the forward pass of one training step keeps for its backward, on a CPU in float32."""
    model = initialise(config, seed=0)
    x, y = torch.randn(batch_size, num_points, config.input_dim), torch.randn(batch_size, num_points)
    with LiveBytes() as live:
        loss = loss_of(model(x, y), y)
        kept = live.now()
    del loss  # alive until here, and all that its backward needs with it
    return kept


def llama_like(config: ModelConfig) -> ModelConfig:
    """The Llama model of the same width, depth, heads and hidden units."""
    mlp = "none" if config.mlp == "none" else "llama"
    return dataclasses.replace(config, attention="llama", mlp=mlp, tie="none", repelling_heads=0)


def matched(config: ModelConfig, target: float, cost: Callable[[ModelConfig], float]) -> ModelConfig:
    """``config`` scaled in width, its hidden units in proportion, so that ``cost`` comes closest to ``target``.

    Heads and depth stay; widths are multiples of the heads (twice that for rotary positions). Use it with
    ``lambda c: parameters(c).total`` or ``lambda c: training_flops(c, num_points)`` for comparisons at equal parameters or
    equal operations.
    """
    unit = config.heads * (2 if config.positions == "rotary" else 1)
    ratio = config.hidden / config.width

    def scaled(multiple: int) -> ModelConfig:
        width = multiple * unit
        return dataclasses.replace(config, width=width, hidden=max(1, round(ratio * width)))

    smallest = 1 if config.preconditioner in ("none", "diagonal") else math.ceil(config.rank / unit)
    multiple = smallest
    while cost(scaled(multiple)) < target:
        multiple += 1
    candidates = [scaled(m) for m in (multiple - 1, multiple) if m >= smallest]
    return min(candidates, key=lambda candidate: abs(cost(candidate) - target))
