"""In-context regressors: a decoder of CEM layers, Llama layers, or a mixture, that reads pairs and predicts the next y."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from energylab.layers import CEMMLP, CEMAttention, EnergyLayer, LlamaAttention, LlamaMLP, Trace, norm
from energylab.layers.attention import DIAGONALS, resolve_head_dim
from energylab.layers.base import check_choice, check_positive
from energylab.layers.llama import TIES
from energylab.layers.mlp import ACTIVATIONS
from energylab.layers.preconditioner import KINDS
from energylab.tasks import token_layout


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a model is made of. Raises ValueError, naming the field, for a value out of range."""

    width: int = 64
    """D, the width of the residual stream."""
    depth: int = 2
    """Blocks; a block is an attention layer and, unless ``mlp`` is ``none``, an MLP layer."""
    heads: int = 4
    head_dim: int | None = None
    """The rank of each head; width/heads by default."""
    hidden: int = 128
    """M, the units of an MLP."""
    attention: str = "cem"
    """``cem`` or ``llama``."""
    mlp: str = "cem"
    """``cem``, ``llama`` or ``none``."""
    tie: str = "none"
    """What Llama attention shares: ``none``, ``key_value`` (W_V = W_K), ``query_output`` (W_O = W_Qᵀ) or ``both``."""
    recursions: int = 2
    """T, the steps inside every CEM layer."""
    attention_recursions: int | None = None
    """T of the attention layers where it differs."""
    mlp_recursions: int | None = None
    """T of the MLP layers where it differs."""
    diagonal: str = "shared"
    """Of the interaction: ``none``, ``shared`` or ``per_head``."""
    preconditioner: str = "none"
    """``none``, ``diagonal``, ``diagonal_low_rank`` or ``diagonal_low_rank_positive``."""
    rank: int = 8
    """The rank of the preconditioner's low-rank part."""
    activation: str = "silu"
    """Of the CEM MLP: ``silu`` or ``quadratic``."""
    history: str = "fixed"
    """``fixed``, or ``refreshed``: keys and gates recomputed from x_t at each step."""
    update_rule: str = "gradient"
    """``gradient``, ``heavy_ball`` or ``nesterov``."""
    loops: int = 1
    """Times that each block is applied, one after the other, with the same weights: recursion around a block, not in it."""
    step_sizes: str = "shared"
    """``shared``, one η for all steps of a layer, or ``per_step``."""
    initial_step_size: float | None = None
    """η of every step where training starts; 1/T by default."""
    recompute: bool = False
    """Keep only the x_t for the backward and compute each step again: less memory, more time, the same numbers."""
    temperature: float | None = None
    """τ of the interaction; sqrt(head_dim) by default."""
    repelling_heads: int = 0
    """So many of the heads of CEM attention, the last ones, move a token away from what they look for."""
    positions: str = "none"
    """``none`` or ``rotary``."""
    tokens: str = "interleaved"
    """The layout of pairs as tokens."""
    input_dim: int = 1
    """d_x."""
    head: str = "point"
    """``point`` predicts y; ``gaussian`` its mean and variance."""
    backend: str = "auto"
    """``auto``, ``reference``, ``torch`` or ``triton``."""

    def __post_init__(self) -> None:
        for key in ("width", "depth", "heads", "hidden", "recursions", "rank", "loops", "input_dim"):
            check_positive(key, getattr(self, key))
        for key in ("attention_recursions", "mlp_recursions"):
            if getattr(self, key) is not None:
                check_positive(key, getattr(self, key))
        check_choice("attention", self.attention, ("cem", "llama"))
        check_choice("mlp", self.mlp, ("cem", "llama", "none"))
        check_choice("tie", self.tie, TIES)
        if self.tie != "none" and self.attention != "llama":
            raise ValueError(f"tie: expected none, since cem attention ties all it can, got {self.tie!r}")
        if self.repelling_heads and self.attention != "cem":
            raise ValueError(
                f"repelling_heads: expected 0, since only cem attention has them, got {self.repelling_heads!r}"
            )
        check_choice("diagonal", self.diagonal, DIAGONALS)
        check_choice("preconditioner", self.preconditioner, KINDS)
        check_choice("activation", self.activation, tuple(ACTIVATIONS))
        if not isinstance(self.recompute, bool):
            raise ValueError(f"recompute: expected true or false, got {self.recompute!r}")
        check_choice("step_sizes", self.step_sizes, ("shared", "per_step"))
        size = self.initial_step_size
        number = isinstance(size, int | float) and not isinstance(size, bool)
        if size is not None and not (number and 0 < size < math.inf):
            raise ValueError(f"initial_step_size: expected a positive number, got {size!r}")
        check_choice("positions", self.positions, ("none", "rotary"))
        check_choice("head", self.head, ("point", "gaussian"))
        token_layout(self.tokens)
        head_dim = resolve_head_dim(self.width, self.heads, self.head_dim, self.positions == "rotary")
        rows = {"width": self.width, "hidden": self.hidden, "rank": self.rank, "input_dim": self.input_dim}
        for key, value in (rows | {"head_dim": self.heads * head_dim}).items():
            if value * self.width >= 2**60:  # PyTorch counts bytes in 64 bits
                raise ValueError(f"{key}: expected weights of fewer than 2^60 elements, got {value} times {self.width}")
        # what only a layer checks, it checks here, before any run starts
        with torch.device("meta"):
            _attention(self)
            _mlp(self)

    @property
    def has_energy(self) -> bool:
        """Whether any layer descends an energy, so that T means something."""
        return "cem" in (self.attention, self.mlp)


@dataclass(frozen=True)
class LayerTrace(Trace):
    """A layer's ``Trace`` with its name (``block 0 attention``) and what stands at each of the N positions."""

    name: str
    """In a model whose blocks loop, the pass as well: ``block 0 attention, pass 1``."""
    block: int
    part: str
    """``attention`` or ``mlp``."""
    tokens: tuple[str, ...]
    """``query`` or ``pair``, per position."""
    pairs: Tensor
    """The index k of the pair that each position belongs to, (N,)."""


@final
class InContextRegressor(nn.Module):
    """A causal decoder for in-context regression.

    ``model(x, y)``, with x (B, N, d_x) and y (B, N), predicts every y_k from x_k and the pairs before it. With the ``point``
    head it returns (B, N); with the ``gaussian`` head the mean and the variance, each (B, N).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.layout = token_layout(config.tokens)
        self.read_in = nn.Linear(self.layout.width(config.input_dim), config.width)
        self.layers = nn.ModuleList()
        self.parts: list[tuple[int, str]] = []  # block and part of each layer
        for block in range(config.depth):
            for part, layer in (("attention", _attention(config)), ("mlp", _mlp(config))):
                if layer is not None:
                    if isinstance(layer, EnergyLayer):
                        layer.recompute = config.recompute
                    self.layers.append(layer)
                    self.parts.append((block, part))
        self.read_out = nn.Linear(config.width, 1 if config.head == "point" else 2)
        for linear in (self.read_in, self.read_out):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features))
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if x.ndim != 3 or x.shape[-1] != self.config.input_dim or y.shape != x.shape[:2]:
            raise ValueError(
                f"x, y: expected shapes (B, N, {self.config.input_dim}) and (B, N), "
                f"got {tuple(x.shape)} and {tuple(y.shape)}"
            )
        h = self.embed(x, y)
        for _, _, _, layer in self.path():
            h = layer(h)
        return self.read(h, num_points=x.shape[1])

    def path(self) -> Iterator[tuple[str, int, str, nn.Module]]:
        """The layers in the order in which they act: name, block, part, layer. One that loops comes once a pass."""
        layers = list(zip(self.parts, self.layers, strict=True))
        for _, group in itertools.groupby(layers, key=lambda layer: layer[0][0]):
            block_layers = list(group)
            for loop in range(self.config.loops):
                for (block, part), layer in block_layers:
                    suffix = f", pass {loop}" if self.config.loops > 1 else ""
                    yield f"block {block} {part}{suffix}", block, part, layer

    def embed(self, x: Tensor, y: Tensor) -> Tensor:
        """The input of the first layer, (B, tokens, D)."""
        return self.read_in(self.layout.encode(x, y))

    @torch.no_grad()
    def trace(self, x: Tensor, y: Tensor) -> list[LayerTrace]:
        """The descent of every CEM layer on these tasks, in order."""
        tokens, pairs = self.layout.kinds(x.shape[1])
        traces = []
        h = self.embed(x, y)
        for name, block, part, layer in self.path():
            if isinstance(layer, EnergyLayer):
                trace = layer.trace(h)
                where = {"name": name, "block": block, "part": part}
                traces.append(LayerTrace(**vars(trace), **where, tokens=tuple(tokens), pairs=torch.as_tensor(pairs)))
                h = trace.states[-1]
            else:
                h = layer(h)
        return traces

    def read(self, h: Tensor, num_points: int) -> Tensor | tuple[Tensor, Tensor]:
        """The predictions, from the output of the last layer, (B, tokens, D)."""
        output = self.read_out(norm(h[:, self.layout.query_positions(num_points).to(h.device)]))
        if self.config.head == "point":
            return output.squeeze(-1)
        mean, raw = output.unbind(-1)
        return mean, F.softplus(raw) + VARIANCE_FLOOR


VARIANCE_FLOOR = 1e-6
"""Added to the Gaussian head's variance, far below any noise variance, so that its logarithm stays finite."""


def count_parameters(model: nn.Module) -> int:
    """Learned scalars, every one."""
    return sum(parameter.numel() for parameter in model.parameters())


def _attention(config: ModelConfig) -> nn.Module:
    rotary = config.positions == "rotary"
    if config.attention == "llama":
        mask = token_layout(config.tokens).mask
        return LlamaAttention(config.width, config.heads, config.head_dim, rotary, config.depth, mask, config.tie)
    recursions = config.attention_recursions or config.recursions
    return CEMAttention(
        config.width,
        config.heads,
        recursions,
        head_dim=config.head_dim,
        diagonal=config.diagonal,
        temperature=config.temperature,
        rotary=rotary,
        mask=token_layout(config.tokens).mask,
        history=config.history,
        repelling_heads=config.repelling_heads,
        **_descent(config, recursions),
    )


def _mlp(config: ModelConfig) -> nn.Module | None:
    if config.mlp == "none":
        return None
    if config.mlp == "llama":
        return LlamaMLP(config.width, config.hidden, config.depth)
    recursions = config.mlp_recursions or config.recursions
    return CEMMLP(
        config.width,
        config.hidden,
        recursions,
        activation=config.activation,
        history=config.history,
        **_descent(config, recursions),
    )


def _descent(config: ModelConfig, recursions: int) -> dict[str, Any]:
    """What both layers are told alike of how they descend."""
    step_size = config.initial_step_size or 1 / recursions
    return {
        "preconditioner": config.preconditioner,
        "rank": config.rank,
        "step_size": [step_size] * recursions if config.step_sizes == "per_step" else step_size,
        "update_rule": config.update_rule,
        "backend": config.backend,
    }
