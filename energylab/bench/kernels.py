"""The fused Triton kernels against what else computes the same layer, on a GPU: right first, then fast.

1. A gate: outputs, energies and every gradient of both layers against the float64 reference, in bfloat16 and float32; then
   50 repeats that must agree in every bit. A failure ends the bench with exit code 1, before any time is taken.
2. Medians of CUDA events, the variants in turn, forward alone and forward plus backward: the fused kernel, T launches of it
   for one step each, the kernels for one step with PyTorch between (all also in a CUDA graph), the closed form in PyTorch,
   eager and compiled, FlexAttention where it can express the layer, and the Llama layer of equal width; with and without
   energies; peak memory. Where no fused kernel fits, the others.
3. Bytes and operations by formula (docs/kernels.md), over the measured rates of a copy and a matrix product.

A variant that cannot run is listed with its reason. Shapes come in order of importance, until the budget is used. Without a
GPU, ``TRITON_INTERPRET=1 python -m energylab.bench kernels --device cpu --tiny`` rehearses every line of it; its times mean
nothing. Needs torch, triton and numpy only.
"""

import argparse
import contextlib
import csv
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from energylab.energies.interaction import merge_heads, split_heads
from energylab.kernels.available import runs_on, why_not
from energylab.layers import CEMMLP, CEMAttention, EnergyLayer, LlamaAttention, LlamaMLP, norm

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
REPEATS = 50
FORWARD, TRAINING = "forward", "forward+backward"


@dataclass(frozen=True)
class Shape:
    """B sequences of N positions, width D, T steps."""

    width: int
    length: int
    batch: int
    recursions: int

    @property
    def heads(self) -> int:
        return max(4, self.width // 32)

    @property
    def hidden(self) -> int:
        return 2 * self.width

    def __str__(self) -> str:
        return f"D {self.width}, N {self.length}, B {self.batch}, T {self.recursions}"


HEADLINE = Shape(64, 128, 256, 8)
GRID = [
    HEADLINE,
    *(
        shape
        for shape in itertools.starmap(
            lambda t, d, n, b: Shape(d, n, b, t),
            itertools.product((8, 1, 2, 4), (64, 128, 256), (128, 64, 512), (256, 64)),
        )
        if shape != HEADLINE
    ),
]
TINY = [Shape(32, 5, 1, 2), Shape(32, 5, 1, 1)]


@dataclass(frozen=True)
class Measurement:
    layer: str
    variant: str
    dtype: str
    width: int
    length: int
    batch: int
    recursions: int
    mode: str
    median_ms: float
    low_ms: float
    high_ms: float
    """The first and last decile."""
    rounds: int
    peak_mib: float
    gb_per_s: float
    tflop_per_s: float
    of_copy: float
    of_matmul: float
    note: str = ""


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="energylab bench kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="default %(default)s; cpu only under TRITON_INTERPRET=1",
    )
    parser.add_argument("--budget", type=float, default=300, help="seconds in all (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench_kernels.csv"), help="default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, few rounds: a rehearsal")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device")
    if not runs_on(probe := torch.empty(0, device=device)):
        parser.error(f"--device {device}: {why_not(probe)}")
    bench = Bench(device, time.monotonic() + options.budget, options.tiny)
    print(bench.describe_machine())
    failures = gate(bench)
    for failure in failures:
        print(f"FAILED {failure}")
    if failures:
        sys.exit(1)
    measurements = measure(bench)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Measurement)], lineterminator="\n")
        writer.writeheader()
        writer.writerows([asdict(measurement) for measurement in measurements])
    report(measurements)
    print(f"\nwrote {options.output}")


@dataclass
class Bench:
    """The device, and how much time is left."""

    device: torch.device
    deadline: float
    tiny: bool
    copy_rate: float = field(default=0.0, init=False)
    """Bytes a second, read and written."""
    matmul_rates: dict[str, float] = field(default_factory=dict, init=False)
    """Operations a second by dtype."""

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def times(self, functions: dict[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, list[float]]:
        """Seconds of each call, in turn A B C A B C ..., until the rounds are done or the seconds over."""
        found: dict[str, list[float]] = {name: [] for name in functions}
        for function in functions.values():
            function()
        self.synchronize()
        stop = time.monotonic() + seconds
        while len(next(iter(found.values()))) < rounds and (time.monotonic() < stop or not next(iter(found.values()))):
            marks = []
            for name, function in functions.items():
                if self.cuda:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    function()
                    end.record()
                    marks.append((name, begin, end))
                else:
                    start = time.perf_counter()
                    function()
                    found[name].append(time.perf_counter() - start)
            self.synchronize()
            for name, begin, end in marks:
                found[name].append(begin.elapsed_time(end) / 1e3)
        return found

    def peak(self, function: Callable[[], object]) -> float:
        """MiB that a call needs at most beyond what was there; nan without a GPU."""
        if not self.cuda:
            return float("nan")
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        self.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def measure_machine(self) -> None:
        size, side = (1 << 16, 64) if self.tiny else (1 << 28, 8192)
        source = torch.empty(size, dtype=torch.uint8, device=self.device).fill_(1)
        target = torch.empty_like(source)
        (seconds,) = self.times({"copy": lambda: target.copy_(source)}, 20, 3).values()
        self.copy_rate = 2 * size / statistics.median(seconds)
        for name, dtype in DTYPES.items():
            a, b = (torch.randn(side, side, device=self.device).to(dtype) for _ in range(2))
            (seconds,) = self.times({"matmul": lambda a=a, b=b: a @ b}, 20, 3).values()
            self.matmul_rates[name] = 2 * side**3 / statistics.median(seconds)

    def describe_machine(self) -> str:
        from triton import __version__ as triton_version

        where = torch.cuda.get_device_name(self.device) if self.cuda else "CPU, Triton interpreted: times mean nothing"
        return f"{where}, torch {torch.__version__}, triton {triton_version}"


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# --- layers ----------------------------------------------------------------------------------------------------------


def make(kind: str, shape: Shape, backend: str, device: torch.device, dtype: torch.dtype, **options) -> EnergyLayer:
    """A layer with the same weights for every backend: 0.5·N(0, 1/D), η = 1/T."""
    if kind == "attention":
        layer: EnergyLayer = CEMAttention(shape.width, shape.heads, shape.recursions, backend=backend, **options)
    else:
        layer = CEMMLP(shape.width, shape.hidden, shape.recursions, backend=backend, **options)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        if name != "step_size":
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 / shape.width**0.5))
    return layer.to(device=device, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).to(dtype)


def inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """h and the gradient that arrives at x_T."""
    generator = torch.Generator().manual_seed(1)
    h, upstream = (torch.randn(shape.batch, shape.length, shape.width, generator=generator) for _ in range(2))
    return h.to(torch.bfloat16).to(device, dtype), upstream.to(torch.bfloat16).to(device, dtype)


@contextlib.contextmanager
def one_step_launches() -> Iterator[None]:
    """Within, the fused layers launch one kernel a step."""
    from energylab.kernels import elementwise, interaction

    operators = [(interaction, "interaction_descent"), (elementwise, "elementwise_descent")]
    originals = [getattr(module, name) for module, name in operators]
    for (module, name), original in zip(operators, originals, strict=True):
        setattr(module, name, lambda *a, original=original, **k: original(*a, **k | {"fused": False}))
    try:
        yield
    finally:
        for (module, name), original in zip(operators, originals, strict=True):
            setattr(module, name, original)


def by_steps(layer: EnergyLayer) -> EnergyLayer:
    """The layer, which from now on takes the kernels for one step though one for all might fit."""
    layer._fuses = lambda h, update_rule: False
    return layer


def flex_layer(layer: CEMAttention, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A CEM attention layer without diagonal, rotary positions and P, its attention by a compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attention = torch.compile(flex_attention)
    masks = {}

    def run(h: Tensor) -> Tensor:
        length = h.shape[1]
        if length not in masks:
            masks[length] = create_block_mask(
                lambda b, head, i, j: i >= j, None, None, length, length, device=str(device)
            )
        k = split_heads(norm(h), layer.key_weight)
        x = h
        for step_size in layer.step_sizes(layer.recursions):
            q = split_heads(norm(x), layer.query_weight)
            o = attention(q, k, k, block_mask=masks[length], scale=1 / layer.temperature)
            assert isinstance(o, Tensor)
            x = torch.addcmul(x, step_size, merge_heads(o, layer.query_weight))
        return x

    return run


# --- the gate --------------------------------------------------------------------------------------------------------

GATE: list[tuple[str, dict, torch.dtype, int]] = [
    ("attention", {}, torch.bfloat16, 64),
    ("mlp", {}, torch.bfloat16, 64),
    ("attention", {"diagonal": "per_head", "preconditioner": "diagonal_low_rank"}, torch.float32, 64),
    ("mlp", {"preconditioner": "diagonal_low_rank"}, torch.float32, 64),
    ("attention", {"diagonal": "shared", "rotary": True}, torch.bfloat16, 64),
    ("mlp", {"activation": "quadratic", "preconditioner": "diagonal"}, torch.bfloat16, 64),
    ("attention", {"diagonal": "per_head", "preconditioner": "diagonal_low_rank"}, torch.bfloat16, 64),
    ("mlp", {"preconditioner": "diagonal_low_rank_positive"}, torch.bfloat16, 64),
    *((kind, {}, torch.float32, width) for width in (64, 128) for kind in ("attention", "mlp")),
    *((kind, {}, torch.bfloat16, width) for width in (128, 256) for kind in ("attention", "mlp")),
]
"""Each costs some kernels to compile, seconds apiece: not the full product."""


def gate(bench: Bench) -> list[str]:
    """What is wrong, one line each."""
    failures = []
    repeats, cases = (2, GATE[:4]) if bench.tiny else (REPEATS, GATE)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    start, tried = time.monotonic(), set()
    for kind, options, dtype, width in cases:
        shape = TINY[0] if bench.tiny else Shape(width, 61, 3, 3)
        name = f"{kind} {options or ''}, {str(dtype).removeprefix('torch.')}, {shape}"
        if (reason := unavailable(bench, kind, shape, dtype, options)) is not None:
            print(f"gate: no fused kernel for {name}: {reason}")
        else:
            tried.add(kind)
        try:
            failures += [f"{name}: {line}" for line in check(bench, kind, options, dtype, shape, repeats)]
        except Exception as error:  # a kernel that does not launch is a failure of the gate, told with its case
            failures.append(f"{name}: {type(error).__name__}: {error}")
    failures += [f"{kind}: no case has a fused kernel here" for kind in ("attention", "mlp") if kind not in tried]
    print(
        f"gate: {len(cases)} cases, {len(failures)} failures; {repeats} repeats bit for bit; "
        f"{time.monotonic() - start:.0f} s",
        flush=True,
    )
    return failures


def unavailable(bench: Bench, kind: str, shape: Shape, dtype: torch.dtype, options: dict) -> str | None:
    """Why there is no fused kernel for a layer; None if there is one."""
    layer = make(kind, shape, "triton", bench.device, dtype, **options)
    return layer.why_not_fused(torch.empty(1, 1, shape.width, device=bench.device, dtype=dtype))


def check(bench: Bench, kind: str, options: dict, dtype: torch.dtype, shape: Shape, repeats: int) -> Iterator[str]:
    device = bench.device
    layer = make(kind, shape, "triton", device, dtype, **options)

    def as_reference(of: torch.dtype) -> EnergyLayer:
        other = make(kind, shape, "reference", device, dtype, **options).to(of)
        other.load_state_dict(layer.state_dict())
        return other

    expected = results(as_reference(torch.float64), shape, device)
    own = results(as_reference(dtype), shape, device)
    paths = {
        "one-step kernels": (by_steps(make(kind, shape, "triton", device, dtype, **options)), contextlib.nullcontext)
    }
    if unavailable(bench, kind, shape, dtype, options) is None:
        paths |= {"fused": (layer, contextlib.nullcontext), "one step a launch": (layer, one_step_launches)}
    for path, (tried, within) in paths.items():
        with within():
            found = results(tried, shape, device)
            for key, value in expected.items():
                scale = value.norm().clamp(min=1e-30)
                error = ((found[key].double() - value).norm() / scale).item()
                bound = TOLERANCES[dtype]
                if key == "step_size":  # a sum over all positions that may cancel: held to PyTorch's own error
                    bound = max(bound, 2 * ((own[key].double() - value).norm() / scale).item())
                if not error <= bound:
                    yield f"{path}: {key} is off by {error:.1e}, and {bound:.1e} is allowed"
            if not torch.equal(tried(inputs(shape, device, dtype)[0]), found["output"]):
                yield f"{path}: the output changes when energies are asked for"
            yield from differences(lambda tried=tried: results(tried, shape, device), found, repeats, path)


def differences(
    again: Callable[[], dict[str, Tensor]], found: dict[str, Tensor], repeats: int, path: str
) -> Iterator[str]:
    """The first repeat that is not the same in every bit."""
    for repeat in range(repeats):
        for key, value in again().items():
            if not torch.equal(found[key], value):
                yield f"{path}: repeat {repeat}: {key} differs"
                return


def results(layer: EnergyLayer, shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Output, energies and every gradient of a loss of both."""
    dtype = next(layer.parameters()).dtype
    h, upstream = inputs(shape, device, dtype)
    h.requires_grad_()
    output, energy = layer.with_energy(h)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    loss = (output * upstream).sum() + 0.1 * energy.sum()
    gradients = torch.autograd.grad(loss, (h, *parameters))
    return {"output": output.detach(), "energy": energy.detach(), "h": gradients[0]} | dict(
        zip(names, gradients[1:], strict=True)
    )


# --- times -----------------------------------------------------------------------------------------------------------


def measure(bench: Bench) -> list[Measurement]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # on both sides, where a side can
    bench.measure_machine()
    rates = ", ".join(f"{name} {rate / 1e12:.1f} TFLOP/s" for name, rate in bench.matmul_rates.items())
    print(f"measured: copy {bench.copy_rate / 1e9:.0f} GB/s, matrix product {rates}")
    found: list[Measurement] = []
    shapes = TINY if bench.tiny else GRID
    for index, shape in enumerate(shapes):
        cases = [("attention", "bf16", {}), ("mlp", "bf16", {})]
        if index == 0:
            cases += [("attention", "fp32", {}), ("mlp", "fp32", {}), ("attention", "bf16", {"diagonal": "shared"})]
        for kind, dtype, options in cases:
            if bench.left < 0:
                print(f"the budget is used; not measured: {', '.join(map(str, shapes[index:]))}")
                return found
            if (reason := unavailable(bench, kind, shape, DTYPES[dtype], options)) is not None:
                print(f"\n{kind}, {dtype}, {shape}: no fused kernel: {reason}")
            # compiling takes longer than all else: where it matters most, and then where there is time
            compiled = index == 0 or (shape.recursions == 8 and bench.left > 60)
            found += measure_layer(bench, kind, dtype, options, shape, compiled)
    return found


def measure_layer(
    bench: Bench, kind: str, dtype: str, options: dict, shape: Shape, compiled: bool
) -> list[Measurement]:
    label = " ".join([kind, *map(str, options.values())])
    torch._dynamo.reset()  # or the many layers of one class reach its limit of recompilations
    found = []
    for mode in (FORWARD, TRAINING):
        functions, notes = {}, {}
        for name, build in variants(bench, kind, dtype, options, shape, compiled, mode).items():
            try:
                functions[name] = build()
                functions[name]()
                bench.synchronize()
            except Exception as error:  # a variant that this machine or shape cannot run is a result too
                functions.pop(name, None)
                notes[name] = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        seconds = bench.times(functions, 3 if bench.tiny else 50, max(0.2, min(2.0, bench.left)))
        operations = flops(label, shape) * (1 if mode == FORWARD else 3)
        for name, values in seconds.items():
            values = sorted(values)
            median = statistics.median(values)
            bytes_moved = (
                traffic(label, shape, DTYPES[dtype].itemsize, mode) if name.startswith("fused") else float("nan")
            )
            measurement = Measurement(
                label, name, dtype, shape.width, shape.length, shape.batch, shape.recursions, mode,
                median_ms=median * 1e3, low_ms=values[len(values) // 10] * 1e3, high_ms=values[-1 - len(values) // 10] * 1e3,
                rounds=len(values), peak_mib=bench.peak(functions[name]), gb_per_s=bytes_moved / median / 1e9,
                tflop_per_s=operations / median / 1e12, of_copy=bytes_moved / median / bench.copy_rate,
                of_matmul=operations / median / bench.matmul_rates[dtype],
            )  # fmt: skip
            if name.startswith("Llama"):  # other operations than those counted
                measurement = replace(measurement, tflop_per_s=float("nan"), of_matmul=float("nan"))
            found.append(measurement)
        nan = float("nan")
        found += [
            Measurement(label, name, dtype, shape.width, shape.length, shape.batch, shape.recursions, mode,
                        nan, nan, nan, 0, nan, nan, nan, nan, nan, note)
            for name, note in notes.items()
        ]  # fmt: skip
        print_shape(found[-len(seconds) - len(notes) :])
    return found


def variants(
    bench: Bench, kind: str, dtype: str, options: dict, shape: Shape, compiled: bool, mode: str
) -> dict[str, Callable[[], Callable[[], object]]]:
    """What is timed, each as a function that prepares it."""
    device, real = bench.device, DTYPES[dtype]
    fused = make(kind, shape, "triton", device, real, **options)
    steps = by_steps(make(kind, shape, "triton", device, real, **options))
    plain = make(kind, shape, "torch", device, real, **options)
    llama_layer = (
        LlamaAttention(shape.width, shape.heads) if kind == "attention" else LlamaMLP(shape.width, shape.hidden)
    )
    llama = llama_layer.to(device, real)

    def stepwise(h: Tensor) -> Tensor:
        with one_step_launches():
            return fused(h)

    def run(function: Callable[[Tensor], Tensor], module: torch.nn.Module) -> Callable[[], object]:
        return call(function, module, shape, device, real, mode)

    def with_energies() -> Callable[[], object]:
        h, upstream = inputs(shape, device, real)
        if mode == FORWARD:
            return torch.no_grad()(lambda: fused.with_energy(h, final=False))
        parameters = list(fused.parameters())
        h.requires_grad_()

        def step() -> object:
            output, energy = fused.with_energy(h, final=False)
            return torch.autograd.grad((output, energy), (h, *parameters), (upstream, torch.ones_like(energy)))

        return step

    found: dict[str, Callable[[], Callable[[], object]]] = {}
    if unavailable(bench, kind, shape, real, options) is None:
        found = {
            "fused": lambda: run(fused, fused),
            "fused, graph": lambda: graphed(bench, run(fused, fused)),
            "fused, energies": with_energies,
            "one step a launch, graph": lambda: graphed(bench, run(stepwise, fused)),
        }
    found |= {
        "one-step kernels": lambda: run(steps, steps),
        "one-step kernels, graph": lambda: graphed(bench, run(steps, steps)),
        "PyTorch, eager": lambda: run(plain, plain),
        "Llama, eager": lambda: run(llama, llama),
    }
    if compiled:
        backend = "aot_eager" if bench.tiny else "inductor"
        found["one-step kernels, compiled"] = lambda: run(torch.compile(steps, fullgraph=True, backend=backend), steps)
        found["PyTorch, compiled"] = lambda: run(torch.compile(plain, fullgraph=True, backend=backend), plain)
        found["Llama, compiled"] = lambda: run(torch.compile(llama, fullgraph=True, backend=backend), llama)
        if kind == "attention" and not options:
            assert isinstance(plain, CEMAttention)
            found["FlexAttention"] = lambda: run(flex_layer(plain, device), plain)
    return found


def call(
    function: Callable[[Tensor], Tensor],
    module: torch.nn.Module,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    mode: str,
) -> Callable[[], object]:
    h, upstream = inputs(shape, device, dtype)
    if mode == FORWARD:
        return torch.no_grad()(lambda: function(h))
    parameters = list(module.parameters())
    h.requires_grad_()
    return lambda: torch.autograd.grad(function(h), (h, *parameters), upstream)


def graphed(bench: Bench, function: Callable[[], object]) -> Callable[[], object]:
    """The same work as one CUDA graph; without a GPU the function itself."""
    if not bench.cuda:
        return function
    stream = torch.cuda.Stream(bench.device)
    stream.wait_stream(torch.cuda.current_stream(bench.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream(bench.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()
    return lambda: (graph.replay(), kept)


# --- formulas --------------------------------------------------------------------------------------------------------


def flops(layer: str, shape: Shape) -> float:
    """Operations of the layer's matrix products in a forward pass; a backward counts as two more of these."""
    rows, width, steps = shape.batch * shape.length, shape.width, shape.recursions
    if layer == "mlp":
        return 2.0 * rows * width * shape.hidden * (1 + 2 * steps)  # the gate, and two products a step
    inner = shape.heads * max(1, width // shape.heads)
    visible = (shape.length + 1) / 2
    step = 4.0 * rows * width * inner + 4.0 * rows * visible * inner  # projections and read-out, logits and sums
    if "shared" in layer:
        step += 4.0 * rows * visible * width
    return 2.0 * rows * width * inner + steps * step


def traffic(layer: str, shape: Shape, itemsize: int, mode: str) -> float:
    """Bytes that a fused descent must move between the GPU and its memory, its inputs and outputs once.

    What is read again comes from the L2 cache and is not counted; nor is what PyTorch does before the descent.
    """
    rows, width, steps = shape.batch * shape.length, shape.width, shape.recursions
    if layer == "mlp":
        history, weights = shape.hidden, shape.hidden * width
    else:
        history = shape.heads * (width // shape.heads) + width * ("shared" in layer)  # keys, and u for the diagonal
        weights = width * width
    forward = rows * (2 * width + history) + weights
    if mode == FORWARD:
        return float(itemsize * forward)
    # the states are written, and read twice; q (or its like) is written and read; gradients of the history and of W
    backward = rows * (2 * width + 2 * history) + 2 * weights
    return float(itemsize * (forward + backward + 5 * steps * rows * width))


# --- the report ------------------------------------------------------------------------------------------------------


def print_shape(found: Sequence[Measurement]) -> None:
    first = found[0]
    shape = Shape(first.width, first.length, first.batch, first.recursions)
    print(f"\n{first.layer}, {first.dtype}, {shape}, {first.mode}")
    print(f"| {'variant':26s} |      ms | 10 % .. 90 %         | / first | peak MiB | of copy | of matmul |")
    print(f"|{'-' * 28}|--------:|----------------------|--------:|---------:|--------:|----------:|")
    base = next((m.median_ms for m in found if not m.note), float("nan"))
    for m in found:
        if m.note:
            print(f"| {m.variant:26s} | {m.note}")
            continue
        spread = f"{m.low_ms:.3f} .. {m.high_ms:.3f}"
        print(
            f"| {m.variant:26s} | {m.median_ms:7.3f} | {spread:20s} | {m.median_ms / base:7.2f} | {m.peak_mib:8.1f} "
            f"| {m.of_copy:7.2f} | {m.of_matmul:9.3f} |"
        )
    sys.stdout.flush()


def report(found: Sequence[Measurement]) -> None:
    """The figures with a target, where they were measured."""
    if not found:
        print("nothing was measured")
        return
    times = {
        (m.layer, m.dtype, m.variant): m.median_ms
        for m in found
        if m.mode == TRAINING and not m.note and (m.width, m.length, m.batch, m.recursions) == _key(found)
    }
    print(f"\n{TRAINING} at {Shape(*_key(found))}")
    for layer, dtype in sorted({key[:2] for key in times}):
        fused = times.get((layer, dtype, "fused"))
        if fused is None:
            continue
        for variant, words in (
            ("PyTorch, compiled", "compiled PyTorch over fused (reach: 2 or more)"),
            ("one step a launch, graph", "T launches in a graph over fused"),
            ("one-step kernels, graph", "kernels for one step in a graph over fused"),
            ("fused, energies", "with energies over without (reach: 1.05 or less)"),
        ):
            if (other := times.get((layer, dtype, variant))) is not None:
                print(f"  {layer}, {dtype}: {words}: {other / fused:.2f}")


def _key(found: Sequence[Measurement]) -> tuple[int, int, int, int]:
    return (found[0].width, found[0].length, found[0].batch, found[0].recursions)
