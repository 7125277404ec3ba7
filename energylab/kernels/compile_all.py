"""``python -m energylab.kernels.compile_all``: compiles every shipped kernel ahead of time, without a GPU, and judges it.

For each configuration of the tables, on sm_80, sm_90 and gfx942: it compiles; on sm_80 and sm_90 nothing spills, as ptxas
says; shared memory is within the architecture's limit; products of half precision and tf32 run on tensor cores; and where
a kernel stores to a buffer and loads from it again, a barrier stands between. A broken rule is a failure, and so is a
regress against the stored table (more shared memory, more registers, another matrix instruction, a case that is gone), as
long as the same Triton made it. ``--update`` rewrites the table. Exit codes: 0 fine, 1 a failure, 2 it cannot run here.
"""

import argparse
import contextlib
import csv
import io
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from energylab.kernels.available import INTERPRETED, NOT_INSTALLED

STORED = Path(__file__).with_name("compiled.csv")
REGISTER_SLACK = 8
"""So many registers more are no regress: the allocator's steps."""


@dataclass(frozen=True)
class Row:
    """What the compiler said of one case."""

    name: str
    dtype: str
    """``bf16``, ``fp16``, or for float32 how it is multiplied: ``tf32`` or ``ieee``."""
    width: int
    architecture: str
    warps: int
    registers: int
    """For each thread; 0 on gfx942, where ptxas has no say."""
    spills: int
    """Bytes."""
    shared: int
    """Bytes."""
    products: str
    """The matrix instruction: ``mma``, ``wgmma``, ``mfma``, or ``none``; ``no products`` where it needs none."""
    unordered: str
    """Buffers that are stored and then loaded without a barrier between, by argument name; empty is right."""
    triton: str

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.name, self.dtype, self.width, self.architecture


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m energylab.kernels.compile_all", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--update", action="store_true", help=f"write what was found to {STORED.name}")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default %(default)s")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this text")
    options = parser.parse_args(arguments)
    reason = NOT_INSTALLED or ("TRITON_INTERPRET=1 interprets instead of compiling: unset it" if INTERPRETED else None)
    if reason is not None:
        print(f"compile_all: {reason}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    labels = [label for label in case_labels() if options.only in label]
    rows, failures = [], []
    print(header())
    # fresh processes, and an empty cache: a kernel from the cache comes without the words of ptxas
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn"), _start, (cache,)) as pool,
    ):
        for label, outcome in zip(labels, pool.map(_compile_label, labels), strict=True):
            if isinstance(outcome, str):
                failures.append(f"{label}: does not compile: {outcome}")
                continue
            rows.append(outcome)
            print(line(outcome), flush=True)
            failures.extend(broken_rules(outcome))
    stored = {} if options.update else read(STORED)
    if options.only:
        stored = {key: row for key, row in stored.items() if options.only in label_of(*key)}
    failures.extend(regress(rows, stored, compared=not options.update))
    print(f"\n{len(rows)} kernels, {len(failures)} failures, {time.perf_counter() - start:.0f} s")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    if options.update and not failures:
        kept = [row for key, row in read(STORED).items() if options.only not in label_of(*key)] if options.only else []
        write(STORED, [*kept, *rows])
        print(f"wrote {STORED}")
    return 1 if failures else 0


# --- what is compiled ------------------------------------------------------------------------------------------------


def cases() -> Iterable[Any]:
    """Every shipped case, as ``CompileCase``."""
    from energylab.kernels import elementwise, elementwise_step, interaction, interaction_step

    modules = (elementwise, interaction, interaction_step, elementwise_step)
    return [case for module in modules for case in module.compile_cases()]


def dtype_of(case: Any) -> str:
    return case.constants.get("PRECISION", "fp32") if case.dtype == "fp32" else case.dtype


def label_of(name: str, dtype: str, width: int, architecture: str) -> str:
    return f"{name}, {dtype}, width {width}, {architecture}"


def case_labels() -> list[str]:
    labels = [label_of(case.name, dtype_of(case), case.width, case.architecture) for case in cases()]
    assert len(set(labels)) == len(labels), "two cases share a name"
    return labels


def _start(cache: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"


def _compile_label(label: str) -> Row | str:
    """The row of a case, or why it does not compile."""
    (case,) = (c for c in cases() if label_of(c.name, dtype_of(c), c.width, c.architecture) == label)
    try:
        return compile_case(case)
    except Exception as error:  # whatever a compiler raises
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def compile_case(case: Any) -> Row:
    """Compile one case and read what the compiler says. Needs the environment of ``_start`` for NVIDIA targets."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.function.arg_names
    signature = {name: "constexpr" if name in case.constants else case.signature[name] for name in names}
    # as at run time: PyTorch's tensors start at multiples of 16 bytes
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(fn=case.function, signature=signature, constexprs=constants, attrs=aligned)
    nvidia = case.architecture.startswith("sm_")
    target = GPUTarget("cuda", int(case.architecture[3:]), 32) if nvidia else GPUTarget("hip", case.architecture, 64)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        kernel = triton.compile(source, target=target, options=dict(case.options))
    registers = spills = 0
    if nvidia:
        registers, spills = parse_ptxas(log.getvalue())
    return Row(
        name=case.name,
        dtype=dtype_of(case),
        width=case.width,
        architecture=case.architecture,
        warps=case.options["num_warps"],
        registers=registers,
        spills=spills,
        shared=kernel.metadata.shared,
        products=matrix_instruction(kernel.asm["ptx" if nvidia else "amdgcn"]) if case.multiplies else "no products",
        unordered=" ".join(unordered_buffers(kernel.asm["ttgir"])),
        triton=triton.__version__,
    )


# --- what the compiler says ------------------------------------------------------------------------------------------


def parse_ptxas(log: str) -> tuple[int, int]:
    """Registers, and the bytes of spill stores and loads together, from the words of ``ptxas -v``."""
    used, stores, loads = (
        re.search(pattern, log)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    )
    if used is None or stores is None or loads is None:
        raise ValueError(f"ptxas: expected its report on registers and spills, got {log!r}")
    return int(used[1]), int(stores[1]) + int(loads[1])


def matrix_instruction(assembly: str) -> str:
    for text, name in (("wgmma.mma_async", "wgmma"), ("mma.sync", "mma"), ("v_mfma_", "mfma")):
        if text in assembly:
            return name
    return "none"


_POINTER_OPERATIONS = (
    "tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.bitcast", "tt.reshape", "tt.trans",
    "ttg.convert_layout", "arith.select", "amdgpu.",
)  # fmt: skip
_STORES = ("tt.store", "tt.atomic", "amdg.buffer_store", "amdgpu.buffer_store")
_LOADS = (
    "tt.load", "ttg.async_copy_global_to_local", "amdg.buffer_load", "amdgpu.buffer_load",
)  # fmt: skip
_BARRIERS = re.compile(r"gpu\.barrier|ttg\.barrier (all|.*global)")
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")


def unordered_buffers(ttgir: str) -> list[str]:
    """Pointer arguments that a kernel stores to and loads from with no barrier between, in Triton's GPU dialect.

    Threads of a program see each other's stores to global memory only past a barrier, and the compiler places none. A store
    and a later load count, in the order of the text, and a store and an earlier load of the same loop, one round later.
    Pointers are followed to the argument that they come from; one that cannot be followed raises ValueError.
    """
    origin: dict[str, str] = {}
    events: list[tuple[str, str, tuple[int, ...]]] = []  # what, which argument, in which loops
    loops: list[int] = []
    depth: list[str] = []
    for number, text in enumerate(ttgir.splitlines()):
        code = text.split(" loc(")[0].strip()
        if "tt.func" in code:
            for name in re.findall(r"(%[\w$.-]+): !tt\.ptr", text):
                origin[name] = name
        if "scf.for" in code or "scf.while" in code:
            carried = re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", code.partition("iter_args")[2])
            result = re.match(r"(%[\w$.-]+)(:\d+)? = ", code)
            for index, (inner, outer) in enumerate(carried):
                if outer in origin:
                    origin[inner] = origin[outer]
                    if result:
                        origin[f"{result[1]}#{index}" if result[2] else result[1]] = origin[outer]
        elif (match := re.match(r"(%[\w$.-]+) = ([\w.]+) (.*)", code)) and match[2].startswith(_POINTER_OPERATIONS):
            for operand in _VALUE.findall(match[3]):
                if operand in origin:
                    origin[match[1]] = origin[operand]
                    break
        kind = "store" if _has(code, _STORES) else "load" if _has(code, _LOADS) else ""
        if kind:
            operands = _VALUE.findall(code.partition("= ")[2] if code.startswith("%") else code)
            sources = [origin[operand] for operand in operands if operand in origin]
            if not sources:
                raise ValueError(f"cannot follow the pointer of: {code}")
            events.append((kind, sources[0].lstrip("%"), tuple(loops)))
        elif _BARRIERS.search(code):
            events.append(("barrier", "", tuple(loops)))
        # regions open and close one at a time; those of a for are remembered
        if code.endswith("{"):
            depth.append("loop" if "scf.for" in code or "scf.while" in code else "other")
            if depth[-1] == "loop":
                loops.append(number)
        elif code.startswith("}") and depth:
            if depth.pop() == "loop":
                loops.pop()
            if code.endswith("{"):  # } else {
                depth.append("other")
    return sorted({name for kind, name, _ in events if kind == "store" and _races(events, name)})


def _has(code: str, operations: tuple[str, ...]) -> bool:
    return any(operation in code for operation in operations)


def _races(events: list[tuple[str, str, tuple[int, ...]]], name: str) -> bool:
    for i, (kind, target, loops) in enumerate(events):
        if (kind, target) != ("store", name):
            continue
        for j, (other, source, other_loops) in enumerate(events):
            if (other, source) != ("load", name):
                continue
            if j > i:
                between = events[i + 1 : j]
            elif common := [loop for loop in loops if loop in other_loops]:
                # to the end of the innermost loop around both, and from its start
                body = [k for k, event in enumerate(events) if common[-1] in event[2]]
                between = [events[k] for k in body if k > i or k < j]
            else:
                continue
            if not any(event[0] == "barrier" for event in between):
                return True
    return False


# --- judgement -------------------------------------------------------------------------------------------------------


def broken_rules(row: Row) -> list[str]:
    from energylab.kernels.common import SHARED_MEMORY

    label, limit = label_of(*row.key), SHARED_MEMORY[row.architecture]
    failures = []
    if row.spills and row.architecture in ("sm_80", "sm_90"):
        failures.append(f"{label}: {row.spills} bytes spilled")
    if row.shared > limit:
        failures.append(f"{label}: {row.shared} bytes of shared memory, and {limit} is the limit")
    if row.products == "none" and row.dtype != "ieee":
        failures.append(f"{label}: no tensor cores")
    if row.unordered:
        failures.append(f"{label}: stored and loaded again without a barrier: {row.unordered}")
    return failures


def regress(rows: Sequence[Row], stored: Mapping[tuple[str, str, int, str], Row], compared: bool = True) -> list[str]:
    """Where the rows are worse than the stored ones; missing on either side counts, other versions of Triton do not."""
    if not compared:
        return []
    found = {row.key: row for row in rows}
    failures = [f"{label_of(*key)}: in the stored table and not compiled" for key in stored if key not in found]
    for key, row in found.items():
        before = stored.get(key)
        if before is None:
            failures.append(f"{label_of(*key)}: not in the stored table; run with --update")
            continue
        if before.triton != row.triton:
            continue
        for field, slack in (("registers", REGISTER_SLACK), ("shared", 0)):
            old, new = getattr(before, field), getattr(row, field)
            if new > old + slack:
                failures.append(f"{label_of(*key)}: {field} {new}, and {old} in the stored table")
        if row.products != before.products:
            failures.append(f"{label_of(*key)}: products by {row.products}, and {before.products} in the stored table")
    return failures


# --- the table -------------------------------------------------------------------------------------------------------


def header() -> str:
    return (
        f"{'kernel':44s} {'dtype':5s} {'width':>5s} {'arch':7s} {'warps':>5s} {'regs':>4s} {'spill':>5s} "
        f"{'shared':>7s} products"
    )


def line(row: Row) -> str:
    return (
        f"{row.name:44s} {row.dtype:5s} {row.width:5d} {row.architecture:7s} {row.warps:5d} {row.registers:4d} "
        f"{row.spills:5d} {row.shared:7d} {row.products} {row.unordered and 'UNORDERED ' + row.unordered}"
    ).rstrip()


def read(path: Path) -> dict[tuple[str, str, int, str], Row]:
    if not path.exists():
        return {}
    rows = []
    with path.open(newline="") as file:
        for entry in csv.DictReader(file):
            values: dict[str, Any] = {
                f.name: int(entry[f.name]) if f.type is int else entry[f.name] for f in fields(Row)
            }
            rows.append(Row(**values))
    return {row.key: row for row in rows}


def write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows([asdict(row) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
