"""CEM layers against ordinary ones, and against autograd of their energy: forward plus backward, on this machine's CPU.

Each pair that a ratio compares runs in one process, in turn; a number is a median. Times are also given over the Llama
layer of the same sizes, at the same shapes.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from energylab.analysis.cost import LiveBytes
from energylab.bench.timing import machine, medians
from energylab.layers import CEMMLP, CEMAttention, EnergyLayer, LlamaAttention, LlamaMLP, norm

SHAPES = ((8, 64, 128, 4), (4, 256, 256, 8))
"""(B, N, D, H)."""
RECURSIONS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Ratio:
    """A time, or memory, over another, and what it should reach at the two shapes."""

    name: str
    numerator: str
    denominator: str
    reach: tuple[float | None, float | None]


RATIOS = (
    Ratio("CEM attention T = 1 / nn.MultiheadAttention", "attention none 1", "MultiheadAttention", (0.85, 0.85)),
    Ratio("CEM attention T = 1 / autograd of the energy", "attention none 1", "attention autograd 1", (0.40, 0.40)),
    Ratio("attention T = 8 / T = 1", "attention none 8", "attention none 1", (8.5, 8.5)),
    Ratio("attention T = 8 / T = 1, shared", "attention shared 8", "attention shared 1", (8.5, 8.5)),
    Ratio("MLP T = 8 / T = 1", "mlp 8", "mlp 1", (8.5, 8.5)),
    Ratio(
        "recomputing: attention T = 8 / T = 1", "attention none 8 recompute", "attention none 1 recompute", (8.5, 8.5)
    ),
    Ratio("recomputing: MLP T = 8 / T = 1", "mlp 8 recompute", "mlp 1 recompute", (8.5, 8.5)),
    Ratio("attention T = 8, recomputing / storing", "attention none 8 recompute", "attention none 8", (None, None)),
    Ratio("MLP T = 8, recomputing / storing", "mlp 8 recompute", "mlp 8", (None, None)),
    Ratio("shared diagonal / none, T = 1", "attention shared 1", "attention none 1", (1.6, 2.1)),
    Ratio("shared diagonal / none, T = 8", "attention shared 8", "attention none 8", (None, None)),
    Ratio("per-head diagonal / shared, T = 1", "attention per_head 1", "attention shared 1", (None, None)),
    Ratio("attention with a trace / without, T = 8", "attention trace 8", "attention forward 8", (1.4, 1.4)),
    Ratio("MLP with a trace / without, T = 8", "mlp trace 8", "mlp forward 8", (1.5, 1.5)),
    Ratio("CEM MLP T = 1 / Llama MLP", "mlp 1", "Llama MLP", (None, None)),
)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="energylab bench layers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each (default %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default 1 2)")
    options = parser.parse_args(arguments)
    for threads in options.threads:
        torch.set_num_threads(threads)
        print(f"\n{machine()}")
        for index, shape in enumerate(SHAPES):
            print("\nB = {}, N = {}, D = {}, H = {}, float32, forward plus backward\n".format(*shape))
            print_times(seconds := time_layers(shape, options.repeats))
            print_ratios(seconds, index)
            if threads == options.threads[0]:
                print_memory(shape)


def time_layers(shape: tuple[int, int, int, int], repeats: int) -> dict[str, float]:
    batch, length, width, heads = shape
    torch.manual_seed(0)
    h = torch.randn(batch, length, width, requires_grad=True)
    upstream = torch.randn(batch, length, width)
    functions: dict[str, Callable[[], object]] = {}
    for recursions in RECURSIONS:
        for diagonal in ("none", "shared", "per_head"):
            layer = attention(width, heads, recursions, diagonal)
            functions[f"attention {diagonal} {recursions}"] = train(layer, h, upstream)
        functions[f"mlp {recursions}"] = train(CEMMLP(width, 2 * width, recursions), h, upstream)
    for recursions in (1, 8):
        layers = {
            "attention none": attention(width, heads, recursions, "none"),
            "mlp": CEMMLP(width, 2 * width, recursions),
        }
        for name, layer in layers.items():
            layer.recompute = True
            functions[f"{name} {recursions} recompute"] = train(layer, h, upstream)
    one = attention(width, heads, 1, "none")
    functions["attention autograd 1"] = train(lambda h: step_by_autograd(one, h), h, upstream)
    functions["MultiheadAttention"] = train(ordinary_attention(width, heads, length), h, upstream)
    functions["Llama attention"] = train(LlamaAttention(width, heads), h, upstream)
    functions["Llama MLP"] = train(LlamaMLP(width, 2 * width), h, upstream)
    for name, layer in (("attention", attention(width, heads, 8, "shared")), ("mlp", CEMMLP(width, 2 * width, 8))):
        functions[f"{name} forward 8"] = without_gradient(layer, h)
        functions[f"{name} trace 8"] = without_gradient(layer.trace, h)
    return medians(functions, repeats)


def attention(width: int, heads: int, recursions: int, diagonal: str) -> CEMAttention:
    layer = CEMAttention(width, heads, recursions, diagonal=diagonal)
    if layer.diagonal is not None:
        nn.init.normal_(layer.diagonal)
    return layer


def train(function: Callable[[Tensor], Tensor], h: Tensor, upstream: Tensor) -> Callable[[], None]:
    def run() -> None:
        function(h).backward(upstream)

    return run


def without_gradient(function: Callable[[Tensor], object], h: Tensor) -> Callable[[], object]:
    return torch.no_grad()(lambda: function(h))


def step_by_autograd(layer: CEMAttention, h: Tensor) -> Tensor:
    """The layer's one step with the gradient taken by autograd of the energy, and differentiated again by the training."""
    z = norm(h)
    energy = layer.condition(h).value(z)
    (gradient,) = torch.autograd.grad(energy.sum(), z, create_graph=True)
    return h - layer.step_size * gradient


def ordinary_attention(width: int, heads: int, length: int) -> Callable[[Tensor], Tensor]:
    module = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(length)

    def run(h: Tensor) -> Tensor:
        u = norm(h)
        return h + module(u, u, u, attn_mask=mask, is_causal=True, need_weights=False)[0]

    return run


def print_times(seconds: dict[str, float]) -> None:
    print(f"| {'layer':28s} | ms | over Llama |")
    print(f"|{'-' * 30}|---:|---:|")
    for name, value in seconds.items():
        llama = seconds["Llama MLP" if "mlp" in name.lower() else "Llama attention"]
        print(f"| {name:28s} | {value * 1e3:.2f} | {value / llama:.2f} |")


def print_ratios(seconds: dict[str, float], shape: int) -> None:
    print(f"\n| {'ratio of medians':46s} | here | reach | denominator over Llama |")
    print(f"|{'-' * 48}|---:|---:|---:|")
    for ratio in RATIOS:
        value = seconds[ratio.numerator] / seconds[ratio.denominator]
        llama = seconds["Llama MLP" if "mlp" in ratio.denominator.lower() else "Llama attention"]
        reach = ratio.reach[shape]
        words = "" if reach is None else f"≤ {reach:g}{'' if value <= reach else ', missed'}"
        print(f"| {ratio.name:46s} | {value:.2f} | {words} | {seconds[ratio.denominator] / llama:.2f} |")


def print_memory(shape: tuple[int, int, int, int]) -> None:
    batch, length, width, heads = shape
    h = torch.randn(batch, length, width, requires_grad=True)
    print(f"\n| {'peak memory of forward and backward':40s} | T = 1, KiB | T = 8, KiB | ratio | reach |")
    print(f"|{'-' * 42}|---:|---:|---:|---:|")
    makers: dict[str, Callable[[int], EnergyLayer]] = {
        "attention": lambda recursions: CEMAttention(width, heads, recursions),
        "attention, shared diagonal": lambda recursions: CEMAttention(width, heads, recursions, diagonal="shared"),
        "mlp": lambda recursions: CEMMLP(width, 2 * width, recursions),
    }
    for name, make in makers.items():
        for recompute in (False, True):
            peaks = []
            for recursions in (1, 8):
                layer = make(recursions)
                layer.recompute = recompute
                peaks.append(peak_bytes(layer, h))
            ratio = peaks[1] / peaks[0]
            words = "" if not recompute else f"≤ 2.5{'' if ratio <= 2.5 else ', missed'}"
            label = f"{name}, {'recomputing' if recompute else 'storing'}"
            print(f"| {label:40s} | {peaks[0] / 1024:.0f} | {peaks[1] / 1024:.0f} | {ratio:.2f} | {words} |")


def peak_bytes(layer: EnergyLayer, h: Tensor) -> int:
    """The largest sum of live intermediate tensors during forward and backward, gradients of the weights included."""
    with LiveBytes() as live:
        layer(h).sum().backward()
    return live.peak
