"""The looks inside a run: what they write, what they say, and what they refuse."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from scipy.sparse.linalg import ArpackNoConvergence

from energylab import inspection
from energylab.models import InContextRegressor, ModelConfig
from energylab.study import RunConfig
from energylab.training import TrainingConfig


@pytest.fixture(name="run")
def _run(monkeypatch):
    """Makes `load_run` give an untrained run, as its config is changed."""

    def make(**options) -> None:
        torch.manual_seed(0)
        model = ModelConfig(**{"width": 16, "hidden": 16, "heads": 2, "depth": 1, "recursions": 2} | options)
        config = RunConfig(
            variant="CEM", seed=0, prior="fixed", num_points=4, model=model, training=TrainingConfig(steps=1)
        )
        results = SimpleNamespace(model=InContextRegressor(model), config=config, prior=config.prior)
        monkeypatch.setattr(inspection, "load_run", lambda path, step=None: results)

    return make


def test_trace(run, tmp_path):
    run(preconditioner="diagonal")
    told = []
    lines = inspection.trace("some/run", tmp_path, lambda what, share: told.append((what, share)))
    assert list(dict.fromkeys(what for what, _ in told)) == ["descent and bottoms", "curvature", "drawing"]
    for stage in ("descent and bottoms", "curvature"):
        shares = [share for what, share in told if what == stage]
        assert shares == sorted(shares)
        assert 0 <= shares[0] < shares[-1] <= 1
    assert [line.split(":")[0] for line in lines[:2]] == ["block 0 attention", "block 0 mlp"]
    assert "above the bottom" in lines[0]
    assert "with P" in lines[0]
    assert set(pd.read_parquet(tmp_path / "steps.parquet")["token"]) == {"query", "pair"}
    for name in ("layers", "gaps", "curvature"):
        assert len(pd.read_parquet(tmp_path / f"{name}.parquet"))
    for name in ("descent", "curvature"):
        assert (tmp_path / f"{name}.pdf").stat().st_size > 1000
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_trace_of_a_refreshed_history(run, tmp_path):
    run(history="refreshed")
    lines = inspection.trace("some/run", tmp_path)
    assert "bottom" not in " ".join(lines[:2])
    assert (tmp_path / "descent.pdf").exists()


def test_eigenvalues_that_were_not_found_are_said(run, tmp_path, monkeypatch):
    run()

    def eigsh(*_, **__):
        raise ArpackNoConvergence("no such luck", [], [])

    monkeypatch.setattr("energylab.analysis.curvature.DENSE", 0)
    monkeypatch.setattr("energylab.analysis.curvature.eigsh", eigsh)
    lines = inspection.trace("some/run", tmp_path)
    assert "condition number there unknown; missing at 32 of 32 bottoms, since eigenvalues: Lanczos did not" in lines[0]
    table = pd.read_parquet(tmp_path / "curvature.parquet")
    assert table["condition"].isna().all()
    assert table["problem"].str.contains("no such luck").all()
    assert (tmp_path / "curvature.pdf").exists()


def test_landscape(run, tmp_path):
    run()
    lines = inspection.landscape("some/run", "block 0 mlp", 2, "hessian", tmp_path, size=7)
    assert lines[0].startswith("block 0 mlp, query of pair 2, plane hessian: E falls by ")
    stem = "block-0-mlp-pair2-hessian"
    assert len(pd.read_parquet(tmp_path / f"{stem}-grid.parquet")) == 49
    assert {"path", "continued", "bottom"} <= set(pd.read_parquet(tmp_path / f"{stem}-path.parquet")["kind"])
    assert (tmp_path / f"{stem}-cuts.parquet").exists()
    assert (tmp_path / f"{stem}.pdf").exists()
    assert stem in lines[-1]
    inspection.landscape("some/run", "block 0 mlp", 2, "hessian", tmp_path, size=7, step=30)
    assert (tmp_path / f"{stem}-step30.pdf").exists()


def test_confidence(run, tmp_path):
    run()
    lines = inspection.confidence("some/run", tmp_path, ["in-prior", "double-noise"], tasks=64)
    table = pd.read_parquet(tmp_path / "confidence.parquet")
    assert len(table) == 2 * 2 * 2
    row = table[(table["condition"] == "double-noise") & (table["layer"] == "block 0 mlp")].iloc[0]
    said = f"double-noise, block 0 mlp: error {row['mean']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
    assert any(line.startswith(said) for line in lines)
    assert (tmp_path / "confidence.pdf").exists()


def test_sweep(run, tmp_path):
    run()
    told = []
    lines = inspection.sweep("some/run", None, tmp_path, tasks=8, tell=lambda what, share: told.append(what))
    table = pd.read_parquet(tmp_path / "sweep.parquet")
    assert table["recursions"].tolist() == list(range(1, 9))
    exits = pd.read_parquet(tmp_path / "early_exit.parquet")
    assert told == ["more and fewer steps"] * len(table) + ["early exit"] * len(exits)
    assert lines[1].startswith("T' =  2: RMSE")
    assert lines[1].endswith("(as trained)")
    assert len(lines) == len(table) + len(exits) + 1


@pytest.mark.parametrize(
    ("options", "ask", "message"),
    [
        ({"attention": "llama", "mlp": "llama"}, lambda out: inspection.trace("r", out), "model: expected a layer"),
        (
            {"attention": "llama", "mlp": "llama"},
            lambda out: inspection.sweep("r", None, out),
            "model: expected a layer",
        ),
        (
            {"attention": "llama", "mlp": "llama"},
            lambda out: inspection.confidence("r", out),
            "model: expected a layer",
        ),
        ({}, lambda out: inspection.confidence("r", out, ["sunny"]), "condition: expected one of"),
        ({}, lambda out: inspection.sweep("r", [0], out), "recursions: expected an integer of at least 1"),
        ({}, lambda out: inspection.sweep("r", [], out), "recursions: expected one number"),
        ({}, lambda out: inspection.landscape("r", "block 9 mlp", 0, "random", out), "layer: expected one of"),
        ({}, lambda out: inspection.landscape("r", "block 0 mlp", 4, "random", out), "position: expected 0 to 3"),
    ],
)
def test_what_cannot_be_looked_at_is_said_and_nothing_is_written(run, tmp_path, options, ask, message):
    run(**options)
    with pytest.raises(ValueError, match=message) as raised:
        ask(tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
