"""The rules by which compiled kernels are judged: each can fail."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from energylab.kernels import compile_all
from energylab.kernels.common import CompileCase
from energylab.kernels.compile_all import Row, broken_rules, matrix_instruction, parse_ptxas, regress, unordered_buffers

GOOD = Row("a kernel", "bf16", 64, "sm_90", 4, 128, 0, 1000, "wgmma", "", "3.7.1")


@triton.jit
def _relay(x_ptr, y_ptr, n, BARRIER: tl.constexpr):
    """Each round reads what other threads wrote in the same one, through a carried pointer; y is only written."""
    offsets = tl.arange(0, 128)
    at = x_ptr
    for _ in range(n):
        tl.store(at + 127 - offsets, offsets.to(tl.float32))
        if BARRIER:
            tl.debug_barrier()
        tl.store(y_ptr + offsets, tl.load(at + offsets))
        at += 128


@pytest.fixture
def relay(monkeypatch, tmp_path):
    """The row of the little kernel, compiled for a given architecture."""

    def relay(barrier: bool, architecture: str) -> Row:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"{barrier}"))
        monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
        options = {"num_warps": 4, "num_stages": 2}
        constants = {"BARRIER": barrier, "PRECISION": "ieee"}
        constants = {name: value for name, value in constants.items() if name in _relay.arg_names}
        case = CompileCase("relay", architecture, "bf16", 128, _relay, signature, constants, options)
        return compile_all.compile_case(case)

    return relay


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_a_missing_barrier_is_seen_in_a_compiled_kernel(relay, architecture):
    row = relay(False, architecture)
    assert row.unordered == "x_ptr"
    assert "stored and loaded again without a barrier: x_ptr" in " ".join(broken_rules(row))
    assert relay(True, architecture).unordered == ""
    assert row.products == "none"
    assert any("no tensor cores" in line for line in broken_rules(row))
    if architecture == "sm_90":
        assert row.registers > 0
        assert row.spills == 0


LOOP = """
  tt.func public @k(%p: !tt.ptr<f32>, %q: !tt.ptr<f32>) attributes {noinline = false} {
    %a = tt.splat %p : !tt.ptr<f32> -> tensor<128x!tt.ptr<f32>, #blocked>
    %r:2 = scf.for %t = %c0 to %n step %c1 iter_args(%c = %a, %v = %zero) -> (!tt.ptr, f32)  : i32 {
      %x = tt.load %c : tensor<128x!tt.ptr<f32>, #blocked>
      FIRST
      tt.store %c, %x : tensor<128x!tt.ptr<f32>, #blocked>
      LAST
      scf.yield %c, %x : tensor<128x!tt.ptr<f32>, #blocked>, tensor<128xf32, #blocked>
    }
    AFTER
    %z = tt.load %r#0 : tensor<128x!tt.ptr<f32>, #blocked>
    tt.return
  }
"""


@pytest.mark.parametrize(
    ("first", "last", "after", "races"),
    [
        ("", "", "", True),
        ("", "", "ttg.barrier all", True),  # from one round to the next
        ("ttg.barrier all", "", "ttg.barrier all", True),  # the store of one round and the load of the next
        ("", "ttg.barrier global_read|global_write", "", False),
        ("", "gpu.barrier", "", False),
        ("", "ttg.barrier local", "", True),  # shared memory only
    ],
)
def test_barriers_in_and_after_a_loop(first, last, after, races):
    text = LOOP.replace("FIRST", first).replace("LAST", last).replace("AFTER", after)
    assert unordered_buffers(text) == (["p"] if races else [])


def test_a_pointer_that_cannot_be_followed_is_an_error():
    with pytest.raises(ValueError, match=r"cannot follow the pointer of: %z = tt\.load %w"):
        unordered_buffers(LOOP.replace("%r#0", "%w"))


def test_words_of_ptxas():
    log = "0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\nptxas info : Used 99 registers, used 1"
    assert parse_ptxas(log) == (99, 20)
    with pytest.raises(ValueError, match="expected its report on registers and spills"):
        parse_ptxas("ptxas fatal")


def test_matrix_instructions():
    assert matrix_instruction("wgmma.mma_async.sync.aligned.m64n64k16") == "wgmma"
    assert matrix_instruction("mma.sync.aligned.m16n8k16") == "mma"
    assert matrix_instruction("v_mfma_f32_32x32x8_bf16") == "mfma"
    assert matrix_instruction("fma.rn.f32") == "none"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spills": 4}, "4 bytes spilled"),
        ({"shared": 232_449}, "232449 bytes of shared memory, and 232448 is the limit"),
        ({"products": "none"}, "no tensor cores"),
        ({"unordered": "x_ptr"}, "without a barrier: x_ptr"),
    ],
)
def test_broken_rules(change, words):
    assert broken_rules(GOOD) == []
    (failure,) = broken_rules(replace(GOOD, **change))
    assert words in failure
    assert broken_rules(replace(GOOD, dtype="ieee", products="none")) == []
    assert broken_rules(replace(GOOD, architecture="gfx942", spills=4, products="mfma")) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"registers": 137}, "registers 137, and 128 in the stored table"),
        ({"shared": 1001}, "shared 1001, and 1000 in the stored table"),
        ({"products": "mma"}, "products by mma, and wgmma in the stored table"),
    ],
)
def test_a_regress(change, words):
    stored = {GOOD.key: GOOD}
    assert regress([GOOD], stored) == regress([replace(GOOD, registers=136)], stored) == []
    (failure,) = regress([replace(GOOD, **change)], stored)
    assert words in failure
    assert regress([replace(GOOD, triton="3.8.0", **change)], stored) == []
    assert "not compiled" in regress([], stored)[0]
    assert "--update" in regress([GOOD], {})[0]


def test_the_table_reads_back(tmp_path):
    compile_all.write(tmp_path / "table.csv", [GOOD])
    assert compile_all.read(tmp_path / "table.csv") == {GOOD.key: GOOD}


def test_the_stored_table_is_of_what_is_shipped():
    stored = compile_all.read(compile_all.STORED)
    shipped = set(compile_all.case_labels())
    labels = {compile_all.label_of(*key) for key in stored}
    assert labels <= shipped
    assert {label for label in labels if "elementwise" in label} == {
        label for label in shipped if "elementwise" in label
    }
    assert [failure for row in stored.values() for failure in broken_rules(row)] == []
