"""The command line, as a reader types it: whole studies, interruptions, damage, and bad input."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

from energylab.cli import COMMANDS, main
from energylab.study import load_results, load_run, load_study, store

STUDY = '''
from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.training import TrainingConfig

def study(steps: int = 12, seeds: int = 1, recursions: int = 2, heads: int = 2, prior: str = "fixed") -> Study:
    """A study to test with.

    Args:
        steps: How long to train.
    """
    def run(seed: int, **model) -> RunConfig:
        return RunConfig(variant="tiny", seed=seed, prior=prior, num_points=4,
                         model=ModelConfig(width=8, depth=1, heads=heads, hidden=8, **model),
                         training=TrainingConfig(steps=steps, batch_size=4, log_every=4, save_every=4))
    return Study("tiny", [run(seed, recursions=T) for seed in range(seeds) for T in (1, recursions)],
                 note="Only a test.")
'''

FIGURE = """
from matplotlib.figure import Figure

NEEDS = ("tiny",)

def draw(results):
    figure = Figure()
    axes = figure.subplots()
    for run, rows in results.errors.groupby("run"):
        axes.plot(rows["k"], rows["excess_mse"], label=run)
    figure.suptitle(results.note)
    return figure
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    """A project's folder, as the current one."""
    for name, text in {"studies/tiny.py": STUDY, "figures/error.py": FIGURE}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def energylab(command: str) -> int:
    return main(shlex.split(command))


def start(command: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "energylab", *shlex.split(command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_same_results(first: Path, second: Path) -> None:
    """Bit for bit, wall-clock columns apart."""
    assert (first / store.WEIGHTS).read_bytes() == (second / store.WEIGHTS).read_bytes()
    for name in (store.METRICS, store.EVALUATION, store.DESCENT, store.TRACES):
        tables = [pd.read_parquet(path / name).drop(columns="seconds", errors="ignore") for path in (first, second)]
        pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_a_study_from_the_first_run_to_the_figure(project: Path, capsys) -> None:
    process = start("run tiny --steps 10 --workers 2")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert re.search(r"tiny: 2 runs, 0 finished before, 2 to do, 2 at a time; results in runs/tiny", output)
    assert re.search(r"tiny-T2-seed0-\w+: started", output)
    assert "tiny: 2 of 2 runs are finished" in output
    first = contents(project / "runs")

    assert energylab("run tiny --steps 10") == 0
    assert "2 runs, 2 finished before, 0 to do" in capsys.readouterr().out
    assert contents(project / "runs") == first

    assert energylab("status tiny") == 0
    status = capsys.readouterr().out
    assert re.search(r"tiny-T1-seed0-\w+ +finished +10 ", status)
    assert "2 runs: 2 finished" in status

    errors = load_results("runs/tiny")
    assert list(errors["T"].unique()) == [1, 2]
    directories = store.run_directories(Path("runs/tiny"))
    assert load_run(directories[1]).model.config.recursions == 2

    assert energylab("export tiny") == 0
    assert "2 runs, 2 of them new" in capsys.readouterr().out
    pd.testing.assert_frame_equal(load_results("studies/results/tiny"), errors)

    # the default study has other settings: it is neither complete nor mixed with this one
    (project / "studies/results").rename(project / "exported")
    assert energylab("figures") == 1
    said = capsys.readouterr().err
    assert re.search(r"0 of 2 runs are finished in runs/tiny \(missing tiny-T1-seed0-\w+, tiny-T2-seed0-\w+\)", said)
    assert "make them with: energylab run tiny" in said
    assert energylab("figures --study tiny") == 0
    assert "from runs/tiny" in capsys.readouterr().out
    drawn = project / "runs/figures/tiny"
    assert {path.name for path in drawn.iterdir()} == {"error.pdf", "error.png"}
    (project / "exported").rename(project / "studies/results")
    assert energylab("figures error --output drawn") == 0
    assert "from studies/results/tiny" in capsys.readouterr().out
    assert (project / "drawn/error.pdf").read_bytes() == (drawn / "error.pdf").read_bytes()


TABLE = """

def table(results):
    from energylab.plotting import tables
    runs = results.errors.groupby(["study", "variant", "T", "seed"], as_index=False)[["excess_mse"]].mean()
    runs = runs.assign(parameters=1234, flops=1e12)
    return tables.captioned(tables.excess_table(runs), "Errors of $T$.", results)
"""


def test_venues_and_tables_of_figures(project: Path, capsys) -> None:
    (project / "figures/error.py").write_text(
        FIGURE.replace("from matplotlib.figure import Figure", "from energylab.plotting.plots import new_figure")
        .replace("figure = Figure()", "figure, panels = new_figure(1, 1)")
        .replace("figure.subplots()", "panels[0, 0]")
        + TABLE
    )
    assert energylab("run tiny --executor inprocess") == 0
    widths = set()
    for venue, folder in (("plain", "runs/figures/tiny"), ("icml-column", "runs/figures/tiny/icml-column")):
        capsys.readouterr()
        assert energylab(f"figures --venue {venue}") == 0
        assert f"error: {folder}/error.pdf, .png, .tex and .csv, from runs/tiny" in capsys.readouterr().out
        (box,) = re.findall(rb"/MediaBox \[ 0 0 (\d+)", (project / folder / "error.pdf").read_bytes())
        widths.add(int(box))
    assert widths == {468, 234}
    tex = (project / "runs/figures/tiny/error.tex").read_text()
    assert r"\caption{Errors of $T$. One seed, hence no interval. Only a test.}" in tex
    assert "1,234" in tex
    csv = pd.read_csv(project / "runs/figures/tiny/error.csv")
    assert list(csv["T"]) == [1, 2]


def test_a_partial_figure_draws_what_is_there_and_names_what_is_not(project: Path, capsys) -> None:
    (project / "studies/other.py").write_text(STUDY.replace('"tiny", [run', '"other", [run'))
    text = FIGURE.replace('("tiny",)', '("tiny", "other")')
    (project / "figures/error.py").write_text(text)
    assert energylab("run tiny --executor inprocess") == 0
    capsys.readouterr()
    assert energylab("figures") == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.match(r"error: not drawn, needs other\nother: 0 of 2 runs are finished in runs/other \(", said.err)
    (project / "figures/error.py").write_text(f"{text}\nPARTIAL = True\n")
    assert energylab("figures") == 0
    said = capsys.readouterr()
    assert re.match(r"error: drawn without other\nother: 0 of 2 runs are finished in runs/other \(", said.err)
    assert "make them with: energylab run other" in said.err
    assert "error: runs/figures/error.pdf and .png, from runs/tiny" in said.out


def test_what_was_not_run_is_named_with_the_command_that_runs_it(project: Path, capsys) -> None:
    (project / "studies/other.py").write_text(STUDY.replace('"tiny", [run', '"other", [run'))
    (project / "figures/other.py").write_text(FIGURE.replace('("tiny",)', '("other",)'))
    assert energylab("run tiny --steps 4 --results there --executor inprocess") == 0
    (project / "studies/tiny.py").write_text(STUDY.replace("steps: int = 12", "steps: int = 4"))
    (directory, _) = store.run_directories(Path("there/tiny"))
    capsys.readouterr()

    # what is stored is drawn, and nobody has run the other study: no failure, unless it was asked for
    assert energylab("figures --results there") == 0
    assert "make them with: energylab run other --results there\n" in capsys.readouterr().err
    assert energylab("figures error --results there") == 0
    assert energylab("figures other error --results there") == 1
    assert energylab("figures --study other --results there") == 1
    capsys.readouterr()
    assert energylab("figures --results studies/results") == 1
    assert "make them with: energylab run other && energylab export other\n" in capsys.readouterr().err

    # begun, and not finished: the knobs are those of the command that began it
    assert energylab("run tiny --steps 3 --seeds 2 --results there --shard 1/2 --executor inprocess") == 0
    capsys.readouterr()
    assert energylab("report tiny --results there") == 1
    said = capsys.readouterr().err
    assert "2 of 4 runs are finished in there/tiny" in said
    assert said.endswith("make them with: energylab run tiny --steps 3 --seeds 2 --results there\n")
    (directory / store.EVALUATION).write_bytes(b"PAR1")
    assert energylab("figures --results there") == 1
    assert "there/tiny: damaged: " in capsys.readouterr().err


def test_venues_of_the_command_are_those_of_the_style() -> None:
    from typing import get_args, get_type_hints

    from energylab.cli.drawing import FigureOptions
    from energylab.plotting import VENUES

    assert set(get_args(get_type_hints(FigureOptions)["venue"])) == set(VENUES)


def test_export_of_weights(project: Path, capsys) -> None:
    assert energylab("run tiny --seeds 2 --executor inprocess") == 0
    for option, expected in (("", 2), ("--weights none", 0), ("--weights all", 4), ("--weights one", 2)):
        assert energylab(f"export tiny {option}") == 0
        assert len(list((project / "studies/results").rglob(store.WEIGHTS))) == expected
        assert len(load_results("studies/results/tiny")["run"].unique()) == 4
    assert not list((project / "studies/results").rglob(store.TRACES))
    assert len(list((project / "studies/results").rglob(store.METRICS))) == 4
    assert energylab("export tiny --tables no-curves") == 0
    assert not list((project / "studies/results").rglob(store.METRICS))
    assert len(list((project / "studies/results").rglob(store.DESCENT))) == 4
    assert energylab("export tiny --tables errors") == 0
    assert {path.name for path in (project / "studies/results").rglob("*.parquet")} == {store.EVALUATION}
    (project / "runs/tiny").rename(project / "runs/tiny-tuning")
    assert energylab("export tiny-tuning --output sweeps") == 0
    assert {path.name for path in (project / "sweeps").rglob("*.parquet")} == {store.EVALUATION}
    assert not list((project / "sweeps").rglob(store.WEIGHTS))
    assert len(load_results("sweeps/tiny-tuning")["run"].unique()) == 4
    assert load_study("sweeps/tiny-tuning").training.empty


def saved_step(directory: Path) -> int:
    try:
        return torch.load(directory / store.STATE, weights_only=True)["trainer"]["step"]
    except (OSError, RuntimeError, EOFError):
        return -1


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> Path:
    """The directory of the only run, once it has saved a state of that step or a later one."""
    for _ in range(6000):
        for directory in folder.glob("*-seed0-*"):
            if saved_step(directory) >= step:
                return directory
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.01)
    raise AssertionError(f"no state of step {step}")


def test_interrupted_and_killed_and_continued_equals_undisturbed(project: Path, capsys) -> None:
    """Ctrl-C, and the sudden death of the command with its worker, one after the other."""
    text = STUDY.replace("for T in (1, recursions)", "for T in (recursions,)")
    (project / "studies/tiny.py").write_text(text)
    command = "run tiny --steps 800"
    assert energylab(f"{command} --results undisturbed --executor inprocess") == 0
    folder = Path("runs/tiny")

    process = start(command)
    directory = wait_for_step(process, folder, 40)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers hear it too
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    assert "stopping: runs at work finish their step" in output
    assert f"go on with: energylab {command}" in output
    assert "Traceback" not in output
    first = saved_step(directory)
    assert f"stopped at step {first} of 800" in output
    capsys.readouterr()
    assert energylab("status tiny") == 0
    assert re.search(rf"interrupted +{first} .*stopped at step {first}", capsys.readouterr().out)

    process = start(command)
    wait_for_step(process, folder, first + 40)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    assert first < saved_step(directory) < 800
    # its claim is that of a dead process, its progress says that it runs
    assert energylab("status tiny") == 0
    assert "its process is gone" in capsys.readouterr().out

    assert energylab(f"{command} --executor inprocess") == 0
    provenance = store.read_provenance(directory)
    assert provenance is not None
    assert provenance["sessions"] == 3
    assert_same_results(Path("undisturbed/tiny") / directory.name, directory)
    assert not list(folder.rglob("*.tmp-*"))


def test_a_worker_outlives_its_driver_only_to_save(project: Path) -> None:
    process = start("run tiny --steps 100000 --workers 1")
    directory = wait_for_step(process, Path("runs/tiny"), 4)
    worker = json.loads((directory / "claim.json").read_text())["pid"]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 300
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not (directory / "claim.json").exists()
    assert store.read_progress(directory)["state"] == "interrupted"
    assert store.read_progress(directory)["step"] == saved_step(directory)


def test_damage_is_set_aside_and_named_and_trained_anew(project: Path, capsys) -> None:
    command = "run tiny --executor inprocess"
    assert energylab(command) == 0
    damaged, sound = store.run_directories(Path("runs/tiny"))
    (damaged / store.EVALUATION).write_bytes(b"PAR1")
    before = contents(sound)
    capsys.readouterr()

    assert energylab("status tiny") == 1
    assert f"{damaged.name}  damaged" in capsys.readouterr().out

    # a run more, so that there is something to go on with
    assert energylab(f"{command} --seeds 2") == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if damaged.name in line]
    assert any("evaluation.parquet has 4 bytes" in line and "damaged-1" in line for line in lines)
    assert not damaged.exists()
    assert (damaged.with_name(f"{damaged.name}.damaged-1") / store.EVALUATION).read_bytes() == b"PAR1"
    assert contents(sound) == before
    assert set(load_results("runs/tiny")["seed"]) == {0, 1}

    assert energylab(f"{command} --seeds 2") == 0
    assert store.check_run(damaged) is not None
    assert energylab("status tiny") == 0
    assert "set aside: " in capsys.readouterr().out


def test_an_unreadable_run_directory_is_set_aside(project: Path, capsys) -> None:
    command = "run tiny --executor inprocess"
    assert energylab(command) == 0
    first, second = store.run_directories(Path("runs/tiny"))
    (first / store.PROVENANCE).unlink()
    (first / store.CONFIG).write_text("{")
    for path in second.iterdir():
        path.unlink()
    second.rmdir()
    second.write_text("a file")
    capsys.readouterr()
    assert energylab(command) == 1
    out = capsys.readouterr().out
    assert "config.json is not readable JSON" in out
    assert "is a file, where a run directory should be" in out
    assert second.with_name(f"{second.name}.damaged-1").read_text() == "a file"


def test_a_run_that_fails_lets_the_others_go_on(project: Path, capsys) -> None:
    text = STUDY.replace("steps=steps,", "steps=steps, warmup_steps=0, learning_rate=1e30 if seed == 0 else 1e-3,")
    (project / "studies/tiny.py").write_text(text)
    command = "run tiny --seeds 2 --executor inprocess"
    assert energylab(command) == 1
    out = capsys.readouterr().out
    assert re.search(r"tiny-T1-seed0-\w+: diverged: .*is not finite", out)
    assert "tiny: 2 of 4 runs are finished" in out
    assert f"energylab {command} --retry-failed" in out
    assert set(load_results("runs/tiny")["seed"]) == {1}
    assert energylab("status tiny") == 1
    assert "diverged" in capsys.readouterr().out
    # it is not tried again, but still named
    assert energylab(command) == 1
    assert "0 to do" in capsys.readouterr().out


def test_a_file_anywhere_is_a_study(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/own_study.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    assert energylab("run elsewhere/own_study.py --results deep/down --executor inprocess") == 0
    assert energylab("status elsewhere/own_study.py --results deep/down") == 0
    assert "2 runs: 2 finished" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["own_study.py"]


# --- bad input: exit code 2, one line that says what is wrong, nothing written ---------------------------------------

BAD = [
    ("nonsense", "command: expected one of run, describe, status.*doctor, got 'nonsense'"),
    ("--version", "command: expected one of"),
    ("run", "STUDY: expected one of .*tiny.*got none"),
    ("run --steps 3", "STUDY: expected one of .*tiny.*got none"),
    ("run nope", "STUDY: expected one of .*tiny.*got 'nope'"),
    ("run studies/nope.py", "STUDY: .*got 'studies/nope.py', which is no file"),
    ("run studies", "STUDY: expected one of .*tiny.*got 'studies'"),
    ("run ../tiny", "STUDY: .*no file"),
    ("run tiny --stpes 3", "--stpes: unknown option.*--steps.*did you mean --steps"),
    ("run tiny --steps", "--steps: expected a value, got none"),
    ("run tiny --steps ten", "--steps: expected INT, got 'ten'"),
    ("run tiny --steps=1.5", "--steps: expected INT, got '1.5'"),
    ("run tiny --steps -3", "steps: expected an integer of at least 1, got -3"),
    ("run tiny --steps 0", "steps: expected an integer of at least 1, got 0"),
    ("run tiny --recursions 0", "recursions: expected an integer of at least 1, got 0"),
    ("run tiny --heads 3", "heads: expected a divisor of the width 8.*got 3"),
    ("run tiny --prior fixd", "fixed, rbf.*got 'fixd'"),
    ("run tiny --seeds 0", "runs: expected at least one run, got none.*--seeds 0"),
    ("run tiny --recursions 1", "runs: expected different settings in every run"),
    ("run tiny extra", "expected no further arguments, got extra"),
    ("run tiny --workers 0", "--workers: expected an integer of at least 1, got 0"),
    ("run tiny --workers many", "--workers: expected INT, got 'many'"),
    ("run tiny --executor cloud", "--executor: expected one of 'local', 'inprocess', 'ray', got 'cloud'"),
    ("run tiny --device tpu", "--device: expected one of .*'cpu', 'cuda', got 'tpu'"),
    ("run tiny --results a_file", "--results: expected a folder.*a_file is a file"),
    ("run tiny --results a_file/in/it", "--results: expected a folder.*a_file is a file"),
    ("run tiny --results /proc/nowhere", "--results: expected a folder to write in, got /proc/nowhere/tiny: /proc"),
    ("run broken", "studies/broken.py, line 2: ZeroDivisionError: division by zero"),
    ("run syntax", "studies/syntax.py, line 1: "),
    ("run no_study", "studies/no_study.py: expected a function `study`.*found none"),
    ("run returns_nothing", "studies/returns_nothing.py: expected `study` to return a Study, got None"),
    ("run common_name", "studies/common_name.py: workers: expected another name.*common to all studies"),
    ("run untyped", "studies/untyped.py: expected a type for the parameter steps"),
    ("run variadic", r"studies/variadic.py: expected keyword parameters only in `study`, got \*\*options"),
    ("run unknown_type", "studies/unknown_type.py.*Nope"),
    ("run raises", "studies/raises.py, line 2: KeyError: 'a'"),
    ("run exits", "studies/exits.py, line 2: SystemExit: 3"),
    ("status ..", "STUDY: expected one of .*tiny.*got '..'"),
    ("figures error --study nope", "study: expected one of .*tiny.*got 'nope'"),
    ("figures error --study ../..", "study: expected one of .*tiny.*got '../..'"),
    ("status", "STUDY: expected a value, got none"),
    ("describe", "STUDY: expected one of .*tiny.*got none"),
    ("describe tiny --heads 3", "heads: expected a divisor of the width 8.*got 3"),
    ("describe tiny --results there", "--results: unknown option of `energylab describe`"),
    ("bench", "NAME: expected one of step.*got none"),
    ("bench nope", "NAME: expected one of step.*got nope"),
    ("bench step --repeats x", "bench step: argument --repeats: invalid int value: 'x'"),
    ("status nope", "STUDY: expected one of .*tiny.*got 'nope'"),
    ("status tiny", "runs/tiny: no results yet; make them with: energylab run tiny"),
    ("status tiny --steps 3", "--steps: unknown option of `energylab status`"),
    ("export tiny", "runs/tiny: no results yet"),
    ("export tiny --output", "--output: expected a value, got none"),
    ("export tiny --weights some", "--weights: expected one of 'auto', 'none', 'one', 'all', got 'some'"),
    ("export tiny --results there", "there/tiny: no results yet; make them with: energylab run tiny --results there"),
    ("figures nope", "FIGURE: expected some of error.*got 'nope'"),
    ("figures error --stduy tiny", "--stduy: unknown option.*did you mean --study"),
    ("figures no_needs", "figures/no_needs.py: NEEDS: expected a tuple of study names.*got 'tiny'"),
    ("figures two --study tiny", "--study: expected a figure of one study, got two, which compares tiny, other"),
    ("figures no_draw", "figures/no_draw.py: expected a function `draw`"),
    ("tasks", "PRESET: expected a value, got none"),
    ("tasks fxed", "prior: expected one of fixed, rbf, mixture, np-standard, got 'fxed'"),
    ("tasks fixed --run runs/nope", "--run: runs/nope: no such run directory"),
    ("tasks fixed --rnu nope", "--rnu: unknown option of `energylab tasks`.*did you mean --run"),
    ("tasks fixed --output a_file", "--output: expected a folder to write in, got a_file"),
    ("doctor --loud", "--loud: unknown option of `energylab doctor`"),
    ("doctor now", "expected no further arguments, got now"),
]

FILES = {
    "a_file": "mine",
    "studies/broken.py": "def study(steps: int = 1):\n    return 1 / 0\n",
    "studies/syntax.py": "def study(:\n",
    "studies/no_study.py": "x = 1\n",
    "studies/returns_nothing.py": "def study(steps: int = 1):\n    pass\n",
    "studies/common_name.py": "def study(workers: int = 1):\n    pass\n",
    "studies/untyped.py": "def study(steps=1):\n    pass\n",
    "studies/variadic.py": "def study(**options: int):\n    pass\n",
    "studies/unknown_type.py": "def study(steps: 'Nope' = 1):\n    pass\n",
    "studies/raises.py": "def study(steps: int = 1):\n    return {}['a']\n",
    "studies/exits.py": "def study(steps: int = 1):\n    raise SystemExit(3)\n",
    "figures/no_needs.py": "NEEDS = 'tiny'\n",
    "figures/two.py": "NEEDS = ('tiny', 'other')\ndef draw(results):\n    pass\n",
    "figures/no_draw.py": "NEEDS = ('tiny',)\n",
}


@pytest.fixture
def messy_project(project: Path) -> Iterator[Path]:
    for name, text in FILES.items():
        (project / name).write_text(text)
    before = contents(project)
    yield project
    assert contents(project) == before


@pytest.mark.parametrize(("command", "message"), BAD)
def test_bad_input_is_one_line_and_leaves_nothing(messy_project: Path, capsys, command: str, message: str) -> None:
    assert energylab(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err
    assert not re.search("[│╭╰─]|---|Traceback", captured.err)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_bad_input_through_a_shell(messy_project: Path, monkeypatch, encoding: str) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    process = start("run tiny --steps ten")
    output, _ = process.communicate()
    assert process.returncode == 2
    assert output == "energylab: --steps: expected INT, got 'ten'\n"


def test_a_folder_that_cannot_be_written_is_refused(project: Path, capsys) -> None:
    (project / "locked").mkdir()
    (project / "locked").chmod(0o555)
    if os.access(project / "locked", os.W_OK):
        pytest.skip("this user may write anywhere")
    assert energylab("run tiny --results locked") == 2
    assert "--results: expected a folder to write in, got locked" in capsys.readouterr().err
    assert list((project / "locked").iterdir()) == []


def test_cuda_where_there_is_none_is_refused(project: Path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert energylab("run tiny --device cuda") == 2
    assert "--device: " in capsys.readouterr().err
    assert not (project / "runs").exists()


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_itself_with_an_example(project: Path, capsys, command: str) -> None:
    assert energylab(f"{command} --help") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: energylab {command}")
    assert f"Example:\n  energylab {command}" in out


def test_overview_names_every_command(capsys) -> None:
    assert main([]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {command} +{COMMANDS[command].summary}$", out, re.M) for command in COMMANDS)


def test_describe_says_what_the_models_cost(project: Path, capsys) -> None:
    assert energylab("describe tiny --recursions 3") == 0
    out = capsys.readouterr().out
    assert "tiny: 2 runs of 2 models" in out
    assert contents(project).keys() == {"studies", "studies/tiny.py", "figures", "figures/error.py"}


def test_help_of_a_study_has_two_groups(project: Path, capsys) -> None:
    assert energylab("run tiny --help") == 0
    out = capsys.readouterr().out
    knobs, common = out.index("knobs options"), out.index("common options")
    for option, place in (("--steps INT", (knobs, common)), ("--seeds INT", (knobs, common))):
        assert place[0] < out.index(option) < place[1]
    assert "How long to train. (default: 12)" in out
    for option in ("--results", "--workers", "--device", "--executor"):
        assert out.index(option) > common


# --- small things ----------------------------------------------------------------------------------------------------


WORDS = ("tiny", "--steps 4", "--results=there", "--executor inprocess")


@pytest.mark.parametrize("first", range(len(WORDS)))
def test_options_may_stand_anywhere(project: Path, monkeypatch, first: int) -> None:
    """Parsing alone: the study is found before its own options are known."""
    asked: list[Callable] = []
    monkeypatch.setattr(
        "energylab.study.driver.plan", lambda runs, folder, **_: asked.append((runs, folder)) or ([], [])
    )
    monkeypatch.setattr("energylab.study.driver.execute", lambda *_, **__: [])
    assert energylab(" ".join(["run", *WORDS[first:], *WORDS[:first]])) == 1
    ((runs, folder),) = asked
    assert {run.training.steps for run in runs} == {4}
    assert folder == Path("there/tiny")


def test_tasks_prints_a_prior_and_draws_a_run(project: Path, capsys) -> None:
    assert energylab("run tiny --steps 4 --executor inprocess") == 0
    (directory, *_) = store.run_directories(Path("runs/tiny"))
    capsys.readouterr()
    assert energylab(f"tasks np-standard --output drawn --run {directory}") == 0
    out = capsys.readouterr().out
    assert re.search(r"^floor on y +0\.611 ", out, re.M)
    assert f"drawn/np-standard-{directory.name}.pdf and .png" in out
    written = sorted(path.name for path in Path("drawn").iterdir())
    assert written == [f"np-standard-{directory.name}.{kind}" for kind in ("pdf", "png")]


def test_doctor_says_what_will_run_and_why(capsys) -> None:
    assert energylab("doctor") == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out
    assert re.search(r"device: (cpu, since|cuda \()", out)
    assert re.search(r"backend: (torch, .*no Triton kernel runs here: \w+|triton, one kernel)", out)


def test_figures_names_the_setting_that_is_mixed(project: Path, capsys) -> None:
    assert energylab("run tiny --executor inprocess") == 0
    assert energylab("export tiny") == 0
    other = store.run_directories(Path("runs/tiny"))
    assert energylab("run tiny --steps 8 --executor inprocess --results other") == 0
    for directory in store.run_directories(Path("other/tiny")):
        directory.rename(Path("studies/results/tiny") / directory.name)
    for directory in other:
        (directory / store.PROVENANCE).unlink()
    capsys.readouterr()
    assert energylab("figures") == 2
    assert re.search(r"steps: expected one value for all runs of tiny, T = 1.*12 and 8", capsys.readouterr().err)


def test_importing_the_package_loads_no_heavy_room() -> None:
    code = "import sys, energylab.cli; print({'ray', 'triton', 'matplotlib', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
