"""The figure of descent while models learn: that it shows the record, at every width."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from energylab.plotting import recursion_colour, style

STEPS = (0, 50, 100, 1000)


def results(recursions=(1, 4), seeds=2, depth=2):
    rows = []
    for seed in range(seeds):
        for T in recursions:
            for block in range(depth):
                for part in ("attention", "mlp"):
                    for step in STEPS:
                        for t in range(T + 1):
                            for token in ("query", "pair"):
                                change = (
                                    -(1 + block + 0.1 * seed) * t * (step + 1) ** 0.3 * (9 if token == "pair" else 1)
                                )
                                rising = np.nan if t == 0 else 0.5 / (t * (1 + step)) * (part == "mlp")
                                keys = (
                                    f"{T}-{seed}",
                                    "CEM",
                                    T,
                                    seed,
                                    step,
                                    f"block {block} {part}",
                                    block,
                                    part,
                                    t,
                                    token,
                                )
                                rows.append((*keys, 1.2 * change, change, 0.8 * change, rising))
    columns = ["run", "variant", "T", "seed", "step", "layer", "block", "part", "t", "token"]
    columns += ["energy_change_q25", "energy_change_median", "energy_change_q75", "fraction_rising"]
    learning = pd.DataFrame(rows, columns=columns).astype({"T": "Int64"})
    return SimpleNamespace(name="learning", note="Only a test.", learning=learning)


def lines(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


@pytest.mark.parametrize("venue", ["plain", "icml-column"])
def test_it_shows_the_record(figure_file, venue):
    given = results()
    with style(venue):
        figure = figure_file("learning").draw(given)
    figure.canvas.draw()
    columns = 4 if venue == "plain" else 2
    layers = ["block 0 attention", "block 0 mlp", "block 1 attention", "block 1 mlp"]
    assert len(figure.axes) == 12
    query = given.learning[given.learning["token"] == "query"]
    for number, layer in enumerate(layers):
        first = number // columns * 3 * columns + number % columns
        top, middle, bottom = (figure.axes[first + row * columns] for row in range(3))
        assert layer.split()[1] in top.get_title(loc="left")
        of_layer = query[query["layer"] == layer]
        for t in (1, 2, 3, 4):
            expected = (
                of_layer[(of_layer["T"] == 4) & (of_layer["t"] == t)].groupby("step")["energy_change_median"].mean()
            )
            assert lines(top, f"$t={t}$").get_xdata().tolist() == list(STEPS)
            np.testing.assert_allclose(lines(top, f"$t={t}$").get_ydata(), expected)
        for T in (1, 4):
            line = lines(middle, f"CEM $T={T}$")
            assert to_hex(line.get_color()) == recursion_colour(T)
            ends = of_layer[(of_layer["T"] == T) & (of_layer["t"] == T)].groupby("step")["energy_change_median"].mean()
            np.testing.assert_allclose(line.get_ydata(), ends)
            worst = of_layer[(of_layer["T"] == T)].groupby("step")["fraction_rising"].max()
            np.testing.assert_allclose(lines(bottom, f"CEM $T={T}$").get_ydata(), 100 * worst)
        assert bottom.get_ylim()[1] > 100 * of_layer["fraction_rising"].max()
    assert to_hex(lines(figure.axes[0], "$t=4$").get_color()) == recursion_colour(4)
    words = " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
    assert "$n=2$ seeds" in words
    assert "Only a test." in words


def test_the_table_holds_first_and_last_record_of_the_whole_layer(figure_file):
    given = results()
    table = figure_file("learning").table(given)
    assert len(table) == 4 * 2 * len(STEPS)
    query = given.learning[given.learning["token"] == "query"]
    for row in table.to_dict("records"):
        its = query[(query["layer"] == row["layer"]) & (query["T"] == row["T"]) & (query["step"] == row["step"])]
        whole = its.loc[its["t"] == row["T"], "energy_change_median"].mean()
        assert row["median change of E"] == pytest.approx(whole)
        assert row["median change of E low"] < whole < row["median change of E high"]
        assert row["worst % rising"] == pytest.approx(100 * its["fraction_rising"].max())
    assert set(table["seeds"]) == {2}
    assert "$n=2$ seeds" in table.attrs["caption"]
    assert "Only a test." in table.attrs["caption"]


def test_runs_without_a_record_are_named(figure_file):
    empty = SimpleNamespace(name="recursion", note="", learning=pd.DataFrame())
    with pytest.raises(
        ValueError, match=r"^recursion: expected runs that record their descent \(trace_every\), got none"
    ):
        figure_file("learning").draw(empty)
