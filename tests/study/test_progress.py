"""What a reader sees while a study trains."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import tiny_config

from energylab.study import progress
from energylab.study.executors import Task
from energylab.study.progress import Bar, Lines, Live, Plain, duration
from energylab.study.run import Outcome, Update


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time in seconds; set clock[0]."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def tasks(number: int) -> list[Task]:
    return [Task(config=tiny_config(seed=seed, steps=100), directory=Path("x")) for seed in range(number)]


def test_lines_at_start_and_end_and_seldom_between(clock, capsys) -> None:
    (task,) = tasks(1)
    name = task.config.name
    with Plain([task], workers=1) as display:
        for step in range(0, 101):
            display(Update(run=name, phase="training", step=step, loss=0.5))
            clock[0] += 0.5
        notice = "state.pt is damaged"
        display(Outcome(run=name, state="finished", sentence="excess MSE 0.1", notices=(notice,)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{name}: started"
    assert lines[1] == f"{name}: training, step 20/100, loss 0.5000, 40 s left"
    assert len(lines) == 1 + 5 + 2
    assert lines[-2:] == [f"[1/1] {name}: finished, excess MSE 0.1", f"    {notice}"]


def test_time_left_counts_the_waiting_runs_too(clock) -> None:
    first, second, _ = (task.config.name for task in tasks(3))
    display = Plain(tasks(3), workers=2)
    display.say = lambda line: None
    for name in (first, second):
        display(Update(run=name, phase="training", step=10))
    clock[0] += 20
    for name in (first, second):
        display(Update(run=name, phase="training", step=20))
    # 2 s a step: 80 steps of each running one, 100 of the waiting one, on two workers
    assert display.seconds_left() == pytest.approx((80 + 80 + 100) * 2 / 2)
    assert display.summary() == "2 training, 1 waiting; about 4 min left"


def test_the_table_shows_the_runs_at_work_even_if_not_all_fit(clock) -> None:
    display = Live(tasks(40), workers=2)
    display._console = Console(height=14, width=120, record=True, file=io.StringIO())
    names = [task.config.name for task in tasks(40)]
    display(Update(run=names[37], phase="training", step=1, loss=0.25))
    display(Outcome(run=names[38], state="diverged", sentence="the loss of step 3 is not finite"))
    display._console.print(display._table())
    text = display._console.export_text()
    assert f"{names[37]}" in text
    assert "0.2500" in text
    assert "diverged" in text
    assert "not finite" in text
    assert "1 training" in text
    assert len(text.splitlines()) <= 14


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.2, "3 s"), (89, "89 s"), (120, "2 min"), (3600 * 1.49, "89 min"), (3600 * 3 + 290, "3 h 05 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_command_says_where_it_is_once_it_takes_longer_than_a_moment(clock, capsys) -> None:
    with Lines("trace") as tell:
        for second in range(25):
            tell("descent" if second < 8 else "curvature", second / 25)
            clock[0] += 1
    assert capsys.readouterr().err.splitlines() == [
        "trace: descent, 8 %",
        "trace: curvature, 48 %",
        "trace: curvature, 88 %",
    ]


def test_a_quick_command_says_nothing(clock, capsys) -> None:
    with Lines("trace") as tell:
        clock[0] += 1.9
        tell("descent", 0.5)
    assert capsys.readouterr().err == ""


def test_in_a_terminal_a_bar_fills_and_goes(monkeypatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=file, force_terminal=True, width=60))
    with Bar() as tell:
        tell("curvature", 0.5)
        tell._progress.refresh()
        (task,) = tell._progress.tasks
        assert task.description == "curvature"
        assert task.percentage == 50
    assert "curvature" in file.getvalue()
    assert file.getvalue().rstrip().endswith("\x1b[2K")  # the line is wiped
