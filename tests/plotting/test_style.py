"""Venues, the palette, and files: exact width, embedded TrueType fonts, the same bytes each time, no traces left."""

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import colors, pyplot
from matplotlib.figure import Figure
from PIL import Image

from energylab.plotting import VENUES, VenueFigure, recursion_colour, save, style, variant_styles
from energylab.plotting.plots import new_figure

# Run in a fresh interpreter too, so it imports what it needs.
DRAW = """
from energylab.plotting import save, style
from energylab.plotting.plots import new_figure, finish
def draw():
    with style("icml"):
        figure, panels = new_figure(1, 2)
        for axes in panels.flat:
            axes.plot([1, 10, 100], [0.5, 2, 1], label="$T=2$")
            axes.set_yscale("log")
            axes.set_ylabel("excess MSE over the floor")
        finish(figure, "A caption with $x^2$.")
    return figure
"""


def draw() -> VenueFigure:
    space: dict = {}
    exec(DRAW, space)
    return space["draw"]()


def settings() -> dict:
    return dict(matplotlib.rcParams.copy())


@pytest.mark.parametrize(("venue", "points"), [("plain", 468), ("icml", 486), ("icml-column", 234), ("neurips", 396)])
def test_page_is_exactly_as_wide_as_the_venue(venue: str, points: int, tmp_path: Path) -> None:
    with style(venue):
        figure, panels = new_figure(1, 2)
        panels[0, 0].set_ylabel("a label that would stick out " * 3)
    pdf, png = save(figure, tmp_path / "figure")
    box = re.search(rb"/MediaBox \[ ?([\d. ]+)\]", pdf.read_bytes())
    assert box is not None
    assert float(box[1].split()[2]) == points
    with Image.open(png) as image:
        assert image.width == round(points / 72 * 300)


def test_fonts_are_embedded_truetype(tmp_path: Path) -> None:
    pdf = save(draw(), tmp_path / "figure")[0].read_bytes()
    assert b"/Type3" not in pdf
    assert re.findall(rb"/FontFile(\d?)", pdf).count(b"2") >= 2  # upright, and italic for the formulas
    assert set(re.findall(rb"/BaseFont /(?:[A-Z]{6}\+)?([A-Za-z]+)", pdf)) == {b"STIXGeneral"}


def test_same_bytes_whenever_drawn(tmp_path: Path) -> None:
    """In this process, under other global settings, and in a process with other hashes."""
    first = [path.read_bytes() for path in save(draw(), tmp_path / "first")]
    with matplotlib.rc_context({"axes.grid": True, "font.size": 30, "pdf.fonttype": 3, "savefig.dpi": 50}):
        second = [path.read_bytes() for path in save(draw(), tmp_path / "second")]
    subprocess.run(
        [sys.executable, "-c", f"{DRAW}\nsave(draw(), 'third')"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        check=True,
    )
    third = [(tmp_path / f"third.{ending}").read_bytes() for ending in ("pdf", "png")]
    assert first == second == third
    assert b"CreationDate" not in first[0]


def test_figure_keeps_its_style_outside_the_context(tmp_path: Path) -> None:
    figure = draw()
    with matplotlib.rc_context({"pdf.fonttype": 3, "xtick.labelsize": 30, "savefig.bbox": "tight"}):
        figure.savefig(tmp_path / "figure.pdf")
        figure.canvas.draw()
    pdf = (tmp_path / "figure.pdf").read_bytes()
    assert b"/Type3" not in pdf
    assert b"/MediaBox [ 0 0 486" in pdf
    assert figure.axes[0].get_xticklabels()[0].get_fontsize() == VENUES["icml"].small


def test_settings_are_restored() -> None:
    before = settings()
    with style("neurips"):
        assert matplotlib.rcParams["font.family"] == ["STIXGeneral"]
    draw().canvas.draw()
    with pytest.raises(RuntimeError), style("icml"):
        raise RuntimeError
    assert settings() == before


def test_inner_style_takes_the_enclosing_venue() -> None:
    with style() as plain, style("icml") as icml:
        with style() as inner:
            assert inner is icml
        assert plain is VENUES["plain"]
    with style() as after:
        assert after is plain


def test_unknown_venue_is_named() -> None:
    with pytest.raises(ValueError, match=r"^venue: expected one of plain, icml, icml-column, neurips, got 'nature'$"):
        style("nature").__enter__()


def test_save_accepts_dots_new_folders_and_plain_figures(tmp_path: Path) -> None:
    figure = Figure(figsize=(2, 1))
    figure.subplots().set_title("text")
    pdf, png = save(figure, tmp_path / "new" / "folder" / "loss.v2")
    assert (pdf.name, png.name) == ("loss.v2.pdf", "loss.v2.png")
    assert b"/Type3" not in pdf.read_bytes()
    assert png.stat().st_size > 0


def test_figures_do_not_accumulate() -> None:
    figures = [weakref.ref(draw()) for _ in range(6)]
    for _ in range(3):  # one pass frees what holds the last figures, the next the figures
        gc.collect()
    assert [figure() for figure in figures] == [None] * 6
    assert pyplot.get_fignums() == []


def test_matplotlib_is_loaded_late_and_pyplot_never() -> None:
    code = (
        "import sys, energylab\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import energylab.plotting.plots\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def lightness(colour: str) -> float:
    """CIE L*, which is all that grey printing leaves of a colour."""
    rgb = np.array(colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    return 116 * np.cbrt(luminance) - 16


def test_recursion_colours_darken_with_every_doubling() -> None:
    levels = [lightness(recursion_colour(T)) for T in (1, 2, 4, 8, 16, 32)]
    assert levels[0] < 78  # still visible on white
    assert np.all(np.diff(levels) < -6)
    assert np.all(np.diff(levels[:4]) < -10)
    assert recursion_colour(64) == recursion_colour(32)
    assert levels[1] > lightness(recursion_colour(3)) > levels[2]


def test_recursions_below_one_have_no_colour() -> None:
    with pytest.raises(ValueError, match=r"^recursions: expected 1 or more, got 0$"):
        recursion_colour(0)


def test_variant_styles_do_not_depend_on_order_or_company() -> None:
    names = ["full CEM", "diagonal", "Llama", "CEM"]
    styles = variant_styles(names)
    assert styles == variant_styles(reversed(names))
    assert styles["CEM"] == variant_styles(["CEM"])["CEM"]
    assert styles["Llama"] == variant_styles(["Llama", "x"])["Llama"]
    assert styles["diagonal"] == variant_styles(["diagonal"])["diagonal"]  # alphabetically first: gets what it prefers


def test_variants_of_a_figure_look_different() -> None:
    names = ["CEM", "Llama", *(f"variant {i}" for i in range(8))]
    looks = {(one.line, one.marker) for one in variant_styles(names).values()}
    assert len(looks) == len(names)
    assert len(variant_styles(f"variant {i}" for i in range(30))) == 30


def test_text_is_as_wide_in_the_files_as_where_it_was_laid_out() -> None:
    line = "comparisons of a claim together (Bonferroni). Grey: what would be too small to matter. 2 of 21"
    widths = []
    with style("icml-column") as venue:
        for dpi in (150, 300, 1200):
            figure = VenueFigure(venue.name, 1.0)
            figure.set_dpi(dpi)
            text = figure.text(0, 0, line, fontsize=venue.small)
            widths.append(text.get_window_extent().width / dpi)
    assert max(widths) < 1.002 * min(widths)
