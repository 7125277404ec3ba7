"""One look for every figure: venues, a colour per T, a line per variant.

    with style("icml"):
        figure = draw(results)
    save(figure, "figures/output/error_vs_context")

A figure remembers its venue and applies it again whenever it is drawn or saved: matplotlib makes ticks, and chooses
fonts for the PDF, at that moment, from whatever settings hold then. Nothing here touches the settings outside the
`with`, and pyplot, which keeps every figure alive until it is closed, is never used.

The width is the venue's text width to the point: never save with bbox_inches="tight", which changes it. Text is not
set by LaTeX, so a figure is the same on a machine without it.
"""

import contextlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from tueplots import figsizes, fontsizes

# --- venues ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Venue:
    """Where a figure is printed."""

    name: str
    width: float  # inches
    text: float  # points: labels and titles
    small: float  # points: ticks, legends, caption


def _venue(name: str, size: Mapping[str, Any], fonts: Mapping[str, float]) -> Venue:
    return Venue(
        name=name, width=float(size["figure.figsize"][0]), text=fonts["axes.labelsize"], small=fonts["xtick.labelsize"]
    )


VENUES = {
    venue.name: venue
    for venue in (
        Venue(
            name="plain", width=6.5, text=9, small=8
        ),  # a letter page with one-inch margins; also the README's pictures
        _venue("icml", figsizes.icml2024_full(), fontsizes.icml2024()),
        _venue("icml-column", figsizes.icml2024_half(), fontsizes.icml2024()),
        _venue("neurips", figsizes.neurips2024(), fontsizes.neurips2024()),
    )
}

_active: ContextVar[str | None] = ContextVar("venue", default=None)


def _settings(venue: Venue) -> dict[str, Any]:
    return {
        "font.family": "STIXGeneral",
        "mathtext.fontset": "stix",
        "text.usetex": False,
        "pdf.fonttype": 42,  # TrueType: many venues refuse the Type 3 fonts of matplotlib's default
        "ps.fonttype": 42,
        "font.size": venue.text,
        "axes.labelsize": venue.text,
        "axes.titlesize": venue.text,
        "axes.titlelocation": "left",
        "axes.titlepad": 4,
        "xtick.labelsize": venue.small,
        "ytick.labelsize": venue.small,
        "legend.fontsize": venue.small,
        "legend.frameon": False,
        "legend.handlelength": 2.2,
        "legend.columnspacing": 1.2,
        "legend.handletextpad": 0.5,
        "legend.borderpad": 0.2,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-4, 5),
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.minor.width": 0.4,
        "ytick.minor.width": 0.4,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "xtick.minor.size": 1.5,
        "ytick.minor.size": 1.5,
        "lines.linewidth": 1.3,
        "lines.markersize": 3.5,
        "figure.dpi": 150,
        "savefig.dpi": 300,
        "savefig.bbox": None,
        "text.hinting": "no_hinting",  # text is as wide at every resolution: what fits on the screen fits in the files
        "svg.hashsalt": "energylab",  # else the ids in an SVG, and with them the file, differ each time
    }


@contextlib.contextmanager
def style(venue: str | None = None) -> Iterator[Venue]:
    """Draw for `venue`: "plain", "icml" (both columns), "icml-column", "neurips"; None means the enclosing `style`,
    else "plain".

    Starts from matplotlib's own defaults, so a user's matplotlibrc does not change a figure, and restores all
    settings afterwards. Raises ValueError for an unknown venue.
    """
    name = venue if venue is not None else _active.get() or "plain"
    if name not in VENUES:
        raise ValueError(f"venue: expected one of {', '.join(VENUES)}, got {name!r}")
    token = _active.set(name)
    try:
        with matplotlib.style.context([_settings(VENUES[name])], after_reset=True):
            yield VENUES[name]
    finally:
        _active.reset(token)


# --- figures --------------------------------------------------------------------------------------------------------


class VenueFigure(Figure):
    """A figure as wide as its venue, which applies the venue's style whenever it is drawn."""

    def __init__(self, venue: str, height: float) -> None:
        self.venue = venue
        super().__init__(figsize=(VENUES[venue].width, height), layout="constrained")
        FigureCanvasAgg(self)  # so that text can be measured before a file format is chosen

    def draw(self, renderer: Any) -> None:
        with style(self.venue):
            super().draw(renderer)

    def savefig(self, fname: Any, **options: Any) -> None:
        with style(self.venue):
            super().savefig(fname, **options)

    def grow(self, inches: float) -> None:
        """Make the page taller, so that text added outside the panels does not shrink them."""
        self.set_size_inches(self.get_figwidth(), self.get_figheight() + inches)


def save(figure: Figure, stem: str | Path) -> tuple[Path, Path]:
    """Write `stem`.pdf and `stem`.png and return the two paths; folders are made as needed.

    The files hold no date: the same figure drawn twice gives the same bytes.
    """
    pdf, png = Path(f"{stem}.pdf"), Path(f"{stem}.png")  # not with_suffix: a stem may hold a dot
    pdf.parent.mkdir(parents=True, exist_ok=True)
    with style(getattr(figure, "venue", None)):
        figure.savefig(pdf, metadata={"CreationDate": None})
        figure.savefig(png)
    return pdf, png


# --- the palette ----------------------------------------------------------------------------------------------------

NEUTRAL = "#6b6b6b"  # a model without recursions, such as Llama
INK = "#1a1a1a"  # references
FLOOR_LINE = "--"
NEAREST_NEIGHBOUR_LINE = ":"


@dataclass(frozen=True, kw_only=True)
class VariantStyle:
    """How a variant is drawn, whatever its T."""

    line: str | tuple[float, tuple[float, ...]]
    marker: str


# Dashed and dotted are the references'.
_KNOWN_VARIANTS = {
    "CEM": VariantStyle(line="-", marker="o"),
    "Llama": VariantStyle(line=(0, (6, 1.2, 1.2, 1.2)), marker="s"),
}
_OTHER_VARIANTS = (
    VariantStyle(line=(0, (7, 2)), marker="^"),
    VariantStyle(line=(0, (3, 1, 1, 1, 1, 1)), marker="D"),
    VariantStyle(line=(0, (4, 1)), marker="v"),
    VariantStyle(line=(0, (8, 1.5, 1, 1.5)), marker="P"),
    VariantStyle(line=(0, (2, 1)), marker="X"),
    VariantStyle(line=(0, (5, 1, 1, 1, 1, 1, 1, 1)), marker="h"),
    VariantStyle(line=(0, (10, 2)), marker="<"),
    VariantStyle(line=(0, (2, 1, 4, 1)), marker=">"),
)


def recursion_colour(recursions: int) -> str:
    """The colour of T: light to dark along the colour map `plasma` in log2 T, up to T = 32.

    Its lightness falls steadily, so the order survives grey printing and the common kinds of colour blindness.
    """
    if recursions < 1:
        raise ValueError(f"recursions: expected 1 or more, got {recursions}")
    return to_hex(matplotlib.colormaps["plasma"](0.82 * max(0.0, 1 - math.log2(recursions) / 5)))


def variant_styles(variants: Iterable[str]) -> dict[str, VariantStyle]:
    """A style for each variant of a figure, no two alike while there are enough.

    CEM and Llama always look the same. Any other name has a preferred style, which depends on the name only, so
    figures agree; where two names prefer the same, the alphabetically later one takes the next free style.
    """
    names = set(variants)
    chosen = {name: known for name, known in _KNOWN_VARIANTS.items() if name in names}
    taken: set[int] = set()
    for name in sorted(names - set(chosen)):
        start = zlib.crc32(name.encode()) % len(_OTHER_VARIANTS)
        if len(taken) == len(_OTHER_VARIANTS):
            taken.clear()
        slot = next(i for j in range(len(_OTHER_VARIANTS)) if (i := (start + j) % len(_OTHER_VARIANTS)) not in taken)
        taken.add(slot)
        chosen[name] = _OTHER_VARIANTS[slot]
    return chosen
