"""A rehearsal of the GPU bench in the interpreter: every line of it, at tiny sizes."""

import csv

import pytest
import torch

from energylab.bench import kernels
from energylab.kernels.available import INTERPRETED

if not INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.interpreter


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_rehearsal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "TINY", kernels.TINY[:1])
    kernels.main(["--device", "cpu", "--tiny", "--budget", "100000", "--output", str(tmp_path / "bench.csv")])
    words = capsys.readouterr().out
    assert "gate: 4 cases, 0 failures" in words
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    ran = {(row["layer"], row["variant"], row["mode"]) for row in rows if not row["note"]}
    refused = {(row["layer"], row["variant"], row["mode"]) for row in rows if row["note"]}
    variants = {
        "fused",
        "fused, graph",
        "fused, energies",
        "one step a launch, graph",
        "one-step kernels",
        "one-step kernels, graph",
        "PyTorch, eager",
        "Llama, eager",
    }
    variants |= {"one-step kernels, compiled", "PyTorch, compiled", "Llama, compiled"}
    assert ran >= {
        (layer, v, m) for layer in ("attention", "mlp") for v in variants for m in ("forward", "forward+backward")
    }
    assert {variant for _, variant, _ in refused} <= {"FlexAttention"}  # the CPU has no backward of it
    assert "with energies over without" in words


def test_a_wrong_kernel_does_not_pass_the_gate(tmp_path, capsys, monkeypatch):
    from energylab.kernels import elementwise

    operator = elementwise.elementwise_descent

    def wrong(*arguments, **options):
        output, *others = operator(*arguments, **options)
        return torch.where(torch.arange(output.shape[-1]) == 3, output * 1.1, output), *others

    monkeypatch.setattr(elementwise, "elementwise_descent", wrong)
    monkeypatch.setattr(kernels, "GATE", [kernels.GATE[1]])
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--device", "cpu", "--tiny", "--output", str(tmp_path / "bench.csv")])
    assert stopped.value.code == 1
    assert "output is off by" in capsys.readouterr().out
    assert not (tmp_path / "bench.csv").exists()
