"""The figure of claims: a row for each comparison with runs, and a table that has the others too."""

from collections.abc import Callable

import pytest

from energylab.plotting import VENUES, style
from energylab.project import together


@pytest.mark.parametrize("venue", VENUES)
def test_claims_are_judged_and_drawn(venue: str, study: Callable, models: Callable, figure_file: Callable) -> None:
    module = figure_file("claims")
    results = together(
        [study(seeds=5), models("tuned", seeds=5), models("looping", seeds=5), models("untying", seeds=2)]
    )
    table = module.table(results).set_index(["claim", "a", "b"])
    assert len(table) == sum(len(claim.comparisons) for claim in module.CLAIMS)
    looped = table.loc[("f", "CEM T = 2", "CEM looped block")]
    assert (looped["n"], looped["verdict"]) == (5, "supported")
    assert looped["difference"] == pytest.approx(0.0037, abs=5e-4)
    two_seeds = table.loc[("g", "CEM indefinite P T = 1", "CEM no diagonal T = 1")]
    assert (two_seeds["n"], two_seeds["verdict"]) == (2, "undecided")
    assert table.loc[("c", "CEM T = 1", "CEM no diagonal T = 1"), "n"] == 0
    with style(venue):
        figure = module.draw(results)
    figure.canvas.draw()
    (axes,) = figure.axes
    names = [" ".join(label.get_text().replace("\u00a0", " ").split()) for label in axes.get_yticklabels()]
    assert len(names) == len(set(names)) == (table["n"] > 0).sum()
    assert names[0] == "CEM T = 2 − CEM T = 1 in tuned (n = 5)"
    sentences = [text.get_text() for text in axes.texts if text.get_text().startswith("(")]
    assert [sentence[:4] for sentence in sentences] == ["(b1)", "(b2)", "(e) ", "(f) ", "(g) "]
    for text in (*axes.texts, *axes.get_yticklabels()):
        box = text.get_window_extent()
        assert box.x0 >= -0.5, text.get_text()
        assert box.x1 <= figure.bbox.width + 0.5, text.get_text()
