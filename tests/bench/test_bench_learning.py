"""Watching a model learn is cheap, and the bench says so."""

from energylab.bench import learning


def test_a_record_every_hundred_steps_costs_less_than_a_twentieth():
    step, record = learning.step_and_record(recursions=1, repeats=5)
    assert record < learning.REACH * 100 * step


def test_the_bench_says_what_misses_its_reach(monkeypatch, capsys):
    monkeypatch.setattr(learning, "step_and_record", lambda recursions, repeats: (0.02, 0.004 * recursions**2))
    learning.main(["--every", "10"])
    _, title, shallow, *_, deep = capsys.readouterr().out.splitlines()
    assert "cost at n = 10" in title
    assert shallow.endswith("2.00 %   < 5 %")
    assert deep.endswith("128.00 %   < 5 %, missed")
