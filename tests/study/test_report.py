"""The report of a study: whole, right, the same each time, small, and without a need for a network."""

import dataclasses
import html.parser
import re
from pathlib import Path

import pytest
from tiny_runs import tiny_config, train

from energylab.cli import main
from energylab.plotting import style
from energylab.plotting.plots import new_figure
from energylab.study import Study, load_results, load_study, store
from energylab.study.progress import Lines
from energylab.study.report import Drawing, report

STORED = Path(__file__).parents[2] / "studies" / "results" / "recursion"


def drawing() -> Drawing:
    figures = []
    for venue in ("plain", "icml-column"):
        with style(venue):
            figure, panels = new_figure(1, 1)
            panels[0, 0].plot([0, 1], [1, 0])
            figures.append(figure)
    return Drawing(wide=figures[0], narrow=figures[1])


class Page(html.parser.HTMLParser):
    """The tables as rows of cells, the facts, and everything that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.facts: dict[str, str] = {}
        self.sources: list[str] = []
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open = tag
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.sources += [value for key, value in attrs if key in ("src", "srcset", "href")]

    def handle_data(self, data):
        if self.open in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open == "dt":
            self.facts[data] = ""
        elif self.open == "dd":
            self.facts[list(self.facts)[-1]] += data

    def handle_endtag(self, tag):
        self.open = ""


def test_a_stored_study_is_reported_whole() -> None:
    results = load_study(STORED)
    text = report(results, STORED, {"energy": drawing()})
    assert text == report(results, STORED, {"energy": drawing()})
    page = Page(text)
    errors, differences, descent, provenance = page.tables
    assert errors[0][:4] == ["model", "T", "excess MSE", "95 % interval"]
    frame = load_results(STORED)
    assert [row[:2] for row in errors[1:]] == [["CEM", "1"], ["CEM", "2"], ["CEM", "4"], ["CEM", "8"], ["Llama", "–"]]
    means = frame.groupby(["variant", "T"], dropna=False)["excess_mse"].mean()
    assert [row[2] for row in errors[1:]] == [f"{mean:.4f}" for mean in means]
    assert differences[1][2] == f"{means['CEM', 2] - means['CEM', 1]:+.4f}".replace("-", "−")
    assert len(descent) == 1 + 4 * 4
    assert [row[0] for row in provenance[1:]] == list(dict.fromkeys(frame["run"]))
    assert page.facts["steps"] == "10000"
    assert page.facts["recursions"] == "1 or 2 or 4 or 8"
    assert page.facts["knobs"] == "steps = 10000, seeds = 5, width = 64, tune = False, debug = False"
    assert len(page.sources) == 2
    assert all(source.startswith(("data:image/svg+xml;base64,", "data:image/png;base64,")) for source in page.sources)
    assert "@import" not in text
    assert "url(" not in text
    assert "<script" not in text


def test_conditions_are_told_apart_where_there_are_several(tmp_path: Path) -> None:
    config = dataclasses.replace(tiny_config(steps=2), conditions=("in-prior", "double-noise"))
    assert train(config, tmp_path).state == "finished"
    store.write_study(tmp_path, Study("tiny", [config], note="Tiny & quick."), {})
    text = report(load_study(tmp_path), tmp_path, {})
    errors, *_ = Page(text).tables
    assert [row[0] for row in errors] == ["condition", "double-noise", "in-prior"]
    assert errors[1][errors[0].index("95 % interval")] == "one seed"
    assert "Tiny &amp; quick." in text


def test_the_command_writes_one_small_file(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(STORED.parents[2])
    monkeypatch.setattr(Lines, "FIRST", 0.0)
    monkeypatch.setattr(Lines, "NEXT", 0.0)
    assert main(["report", "recursion", "--output", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr()
    assert re.search(r"page\.html: \d\.\d\d MB, from studies/results/recursion", said.out)
    assert re.match(r"report: drawing \w+, 0 %\n(report: (drawing|writing) \w+, \d+ %\n)+$", said.err)
    shares = [int(share) for share in re.findall(r", (\d+) %", said.err)]
    assert shares == sorted(shares)
    assert max(shares) > 50
    size = (tmp_path / "page.html").stat().st_size
    assert size < 3e6
    assert len(Page((tmp_path / "page.html").read_text(encoding="utf-8")).sources) >= 2 * 3
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_study_without_runs_has_no_report(tmp_path: Path) -> None:
    store.write_study(tmp_path, Study("tiny", [tiny_config()]), {})
    with pytest.raises(ValueError, match=r"^STUDY: expected finished runs in .*, got none"):
        report(load_study(tmp_path), tmp_path, {})
