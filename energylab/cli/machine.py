"""Commands about this machine: what is installed and will run, and how fast."""

import contextlib
import importlib.metadata
import io
import itertools
import platform
import sys
from collections.abc import Sequence
from typing import Any

from energylab.cli.parsing import parse_fields
from energylab.project import Problem


def doctor(words: Sequence[str]) -> int:
    description = """Say what is installed, which device and which backend runs will use, and why.

Example:
  energylab doctor"""
    parse_fields({}, "energylab doctor", words, description, [])

    import torch

    from energylab.study.executors import usable_cores
    from energylab.study.run import LIBRARIES
    from energylab.study.version import current_code
    from energylab.training import resolve_device

    code = current_code()
    where = "not from a git checkout" if code.commit is None else f"commit {code.commit[:12]}"
    changed = ", with changes" if code.dirty else ""
    print(f"energylab {code.version}, {where}{changed}; Python {platform.python_version()}")
    optional = ("matplotlib", "tueplots", "tyro", "rich", "triton", "ray")
    versions = [f"{name} {version(name) or '(not installed)'}" for name in (*LIBRARIES, *optional)]
    print(f"libraries: {', '.join(versions)}")
    device = resolve_device("auto")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        print(f"device: cuda ({torch.cuda.get_device_name(device)}; {count} visible), one worker process each")
    else:
        built = "this PyTorch has no CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        print(f"device: cpu, since {built}; {usable_cores()} usable cores, a worker process with one thread on each")
    print(f"backend: {_backend(device)}")
    return 0


def _backend(device: Any) -> str:
    """What backend="auto" chooses on a device, and why."""
    import torch

    from energylab.kernels.available import INTERPRETED, runs_on, why_not
    from energylab.layers import CEMMLP, CEMAttention

    h = torch.empty(0, device=device)
    if not runs_on(h):
        return f"torch, the fast paths in plain PyTorch; no Triton kernel runs here: {why_not(h)}"
    sentence = "triton, one kernel for all T steps where it fits a layer, else kernels for one step"
    if INTERPRETED:
        return f"{sentence} (interpreted, for tests: TRITON_INTERPRET is set)"
    layers = (CEMAttention(64, 4, diagonal="shared"), CEMMLP(64, 128))
    lines = []
    for layer, dtype in itertools.product(layers, (torch.float32, torch.bfloat16)):
        name = f"{type(layer).__name__}, width 64, {str(dtype).removeprefix('torch.')}"
        lines.append(f"\n  {name}: {layer.kernel(torch.empty(1, 1, 64, device=device, dtype=dtype))}")
    return sentence + "".join(lines)


def bench(words: Sequence[str]) -> int:
    from energylab.bench.__main__ import BENCHES
    from energylab.bench.__main__ import main as run_bench

    if words and words[0] in ("-h", "--help"):
        print("usage: energylab bench NAME [OPTIONS]\n\nTime something, beside what it is to be compared with.\n")
        for name, summary in BENCHES.items():
            print(f"  {name.ljust(max(map(len, BENCHES)))}  {summary}")
        print("\n`energylab bench NAME --help` lists the options of one.\n\nExample:\n  energylab bench step")
        return 0
    if not words or words[0] not in BENCHES:
        raise Problem(f"NAME: expected one of {', '.join(BENCHES)}, got {words[0] if words else 'none'}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return run_bench(list(words))
    except SystemExit as end:
        if end.code == 2:
            text, said = said.getvalue(), io.StringIO()
            raise Problem(f"bench {words[0]}: {text.rpartition('error: ')[2]}") from None
        return 0 if end.code is None else int(end.code)
    finally:
        print(said.getvalue(), end="", file=sys.stderr)


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
