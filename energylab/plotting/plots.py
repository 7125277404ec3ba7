"""The few pieces that figures are made of: panels, lines over seeds, references, legend, caption.

Every function takes frames in long form and draws on the axes that it is given; none reads a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from energylab.analysis.statistics import over_seeds
from energylab.plotting.style import INK, NEUTRAL, VariantStyle, VenueFigure, recursion_colour, style, variant_styles

if TYPE_CHECKING:
    from energylab.study import StudyResults

MARGIN = 0.05  # inches kept free at the left and right of a caption


# --- panels ---------------------------------------------------------------------------------------------------------


def columns_that_fit(count: int, narrowest: float) -> int:
    """How many of `count` panels, each at least `narrowest` inches wide, stand side by side in the active venue."""
    with style() as venue:
        return max(1, min(count, int(venue.width / narrowest)))


def new_figure(
    rows: int, columns: int, *, shape: float = 0.72, height: float | None = None
) -> tuple[VenueFigure, np.ndarray]:
    """A figure for the active venue and its (rows, columns) array of axes; `shape`: height over width of a cell,
    within bounds; or its `height` in inches.
    """
    with style() as venue:
        height = height or min(max(shape * venue.width / columns, 1.25), 2.7)
        figure = VenueFigure(venue.name, rows * height)
        return figure, figure.subplots(rows, columns, squeeze=False)


def finish(figure: VenueFigure, *paragraphs: str) -> None:
    """What every figure ends with: panel letters, aligned labels, one legend the caption."""
    if len(figure.axes) > 1:
        for number, axes in enumerate(figure.axes):
            axes.set_title(f"({_letters(number)}) {axes.get_title(loc='left')}".rstrip(), loc="left")
    figure.align_ylabels()
    legend(figure)
    caption(figure, *paragraphs)


def _letters(number: int) -> str:
    more, last = divmod(number, 26)
    return (_letters(more - 1) if more else "") + "abcdefghijklmnopqrstuvwxyz"[last]


# --- lines over seeds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Series:
    """The rows of one variant at one T, and how they look in every panel."""

    variant: str
    recursions: int | None  # None: a model without recursions
    label: str
    colour: str
    style: VariantStyle
    rows: pd.DataFrame


def series(frame: pd.DataFrame) -> list[Series]:
    """The series of a frame with columns `variant` and `T`, by variant and rising T; models without recursions last."""
    styles = variant_styles(frame["variant"].unique())
    found = []
    for key, rows in frame.groupby(["variant", "T"], sort=True, dropna=False, observed=True):
        assert isinstance(key, tuple)
        variant, recursions = key
        if none := pd.isna(recursions):
            label, colour = str(variant), NEUTRAL
        else:
            label, colour = f"{variant} $T={int(recursions)}$", recursion_colour(int(recursions))
        found.append(
            Series(
                variant=str(variant),
                recursions=None if none else int(recursions),
                label=label,
                colour=colour,
                style=styles[str(variant)],
                rows=rows,
            )
        )
    return sorted(found, key=lambda one: one.recursions is None)


def mean_line(axes: Axes, one: Series, x: str, y: str) -> pd.DataFrame:
    """Mean of `y` over seeds against `x`, its 95 % Student-t band, and each seed as a thin line behind.

    Returns what `over_seeds` gives for each x. With one seed there is neither a band nor a thin line.
    """
    summary = over_seeds(one.rows, y, [x])
    if np.max(summary["n"]) > 1:
        for _, seed in one.rows.groupby("seed"):
            seed = seed.sort_values(x)
            axes.plot(seed[x], seed[y], color=one.colour, linewidth=0.45, alpha=0.5, zorder=1.5)
        # Bands of two seeds are as wide as the panel and lie over each other: fainter, or they hide the lines.
        alpha = 0.16 if np.max(summary["n"]) > 2 else 0.06
        low, high = summary["low"], summary["high"]
        axes.fill_between(summary[x], low, high, color=one.colour, alpha=alpha, linewidth=0, zorder=1)
    axes.plot(
        summary[x],
        summary["mean"],
        color=one.colour,
        linestyle=one.style.line,
        label=one.label,
        zorder=3,
    )
    return summary


def mean_level(axes: Axes, one: Series, y: str) -> pd.DataFrame:
    """Mean of `y` over seeds as a level across the panel, with its 95 % Student-t band and each seed as a thin line."""
    summary = over_seeds(one.rows.assign(_all=0), y, ["_all"])
    interval = summary.iloc[0]
    if interval["n"] > 1:
        for value in one.rows[y]:
            axes.axhline(value, color=one.colour, linewidth=0.45, alpha=0.5, zorder=1.5)
        axes.axhspan(interval["low"], interval["high"], color=one.colour, alpha=0.16, linewidth=0, zorder=1)
    axes.axhline(interval["mean"], color=one.colour, linestyle=one.style.line, label=one.label, zorder=2)
    return summary.drop(columns="_all")


def mean_points(axes: Axes, members: Sequence[Series], x: str, y: str, *, factor: float = 1.0) -> pd.DataFrame:
    """The series of one variant as points: the mean of `y` over seeds at each one's `x`, its 95 % Student-t interval
    as a bar.

    Thin lines join the points of a seed, a line in the variant's style joins the means. `factor` multiplies x, to set
    variants beside each other on a log axis. Returns what `over_seeds` gives for each x.
    """
    rows = pd.concat([one.rows for one in members]).sort_values(x)
    summary = over_seeds(rows, y, [x])
    look = members[0].style
    if np.max(summary["n"]) > 1:
        for _, seed in rows.groupby("seed"):
            axes.plot(
                seed[x] * factor,
                seed[y],
                color=NEUTRAL,
                linewidth=0.45,
                alpha=0.7,
                marker=".",
                markersize=1.5,
                zorder=1.5,
            )
    axes.plot(summary[x] * factor, summary["mean"], color=INK, linewidth=0.8, linestyle=look.line, zorder=2)
    colours = {place: one.colour for one in members for place in one.rows[x]}
    for place, mean, low, high in summary[[x, "mean", "low", "high"]].itertuples(index=False):
        axes.plot([place * factor] * 2, [low, high], color=colours[place], linewidth=1.6, zorder=3)
        axes.plot(
            [place * factor], [mean], color=colours[place], linestyle="", marker=look.marker, markersize=5, zorder=4
        )
    axes.plot([], [], color=INK, linewidth=0.8, linestyle=look.line, marker=look.marker, label=members[0].variant)
    return summary


def points_by_variant(axes: Axes, members: Sequence[Series], y: str) -> list[pd.DataFrame]:
    """`mean_points` of each variant against T, variants a little beside each other."""
    variants: dict[str, list[Series]] = {}
    for one in members:
        variants.setdefault(one.variant, []).append(one)
    return [
        mean_points(axes, of_one, "T", y, factor=1.06 ** (2 * place - len(variants) + 1))
        for place, of_one in enumerate(variants.values())
    ]


def excess_against_recursions(axes: Axes, excess: Sequence[Series]) -> tuple[list[pd.DataFrame], bool]:
    """Excess MSE of each run against T, models without recursions as levels. Returns the summaries, and whether an
    interval is cut off.
    """
    recursive = [one for one in excess if one.recursions is not None]
    recursion_axis(axes, [one.recursions for one in recursive if one.recursions is not None])
    summaries = points_by_variant(axes, recursive, "excess_mse")
    summaries += [mean_level(axes, one, "excess_mse") for one in excess if one.recursions is None]
    cut = show_range(axes, pd.concat([one.rows["excess_mse"] for one in excess]), summaries, stretch=2.0)
    if axes.get_ylim()[0] < 0:  # no excess MSE is negative, though an interval may be
        axes.set_ylim(bottom=0)
        cut = True
    axes.set_ylabel("excess MSE (units of $y^2$)")
    return summaries, cut


def descent_of_layer(axes: Axes, layer: pd.DataFrame) -> set[int]:
    """E(z_t) − E(z_0) of one layer against t, a line for every T; returns the numbers of seeds behind the lines.

    Lines: medians over positions; bands: the interquartile range; both averaged over seeds. Thin: single seeds.
    """
    counts = set()
    axes.axhline(0, color=INK, linewidth=0.4, zorder=0.5)
    for one in series(layer):
        middle = over_seeds(one.rows, "energy_change_median", ["step"])
        low, high = (over_seeds(one.rows, f"energy_change_{end}", ["step"])["mean"] for end in ("q25", "q75"))
        axes.fill_between(middle["step"], low, high, color=one.colour, alpha=0.16, linewidth=0, zorder=1)
        if np.max(middle["n"]) > 1:
            for _, seed in one.rows.groupby("seed"):
                seed = seed.sort_values("step")
                axes.plot(
                    seed["step"], seed["energy_change_median"], color=one.colour, linewidth=0.45, alpha=0.5, zorder=1.5
                )
        axes.plot(
            middle["step"],
            middle["mean"],
            color=one.colour,
            linestyle=one.style.line,
            marker=one.style.marker,
            markersize=2.5,
            label=one.label,
            zorder=3,
        )
        counts |= set(middle["n"])
    whole_number_axis(axes, int(np.max(layer["step"])), "step $t$")
    return counts


def reference(axes: Axes, frame: pd.DataFrame, x: str, y: str, line: str, label: str) -> None:
    """A reference that does not depend on the model, such as the floor: column `y` of any run, drawn once.

    Raises ValueError if the runs disagree on it: they were then tested on different tasks, and do not belong in one
    panel.
    """
    places, values = frame[x].to_numpy(float), frame[y].to_numpy(float)
    grid = np.unique(places)
    low, high = (np.array([end(values[places == place]) for place in grid]) for end in (np.min, np.max))
    if not np.allclose(low, high, rtol=1e-6, atol=0):
        raise ValueError(
            f"{y}: expected the same reference for all runs of a panel, got values that differ by up to "
            f"{np.max(high - low):.3g}; the runs were tested on different tasks"
        )
    axes.plot(grid, low, color=INK, linestyle=line, linewidth=1.0, label=label, zorder=2.5)


def excess_by_run(results: StudyResults) -> pd.DataFrame:
    """The headline of each run: excess MSE on in-prior tasks, mean over k, beside its parameters and operations, and the
    RMSE on y, pooled over k.

    One row a run, in the order of the study. Studies share runs: one of several studies is kept where it comes first.
    Raises ValueError if no run was tested on in-prior tasks.
    """
    errors = results.errors.loc[results.errors["condition"] == "in-prior"]
    if errors.empty:
        raise ValueError(f"{results.name}: expected runs evaluated on in-prior tasks, got none")
    labels = ["study", "run", "variant", "T", "seed", "parameters", "flops"]
    errors = errors.assign(rmse=errors["rmse"].pow(2))
    groups = errors.groupby(labels, dropna=False, observed=True, sort=False, as_index=False)
    means = groups[["excess_mse", "rmse"]].mean().assign(rmse=lambda runs: runs["rmse"].pow(0.5))
    return means.drop_duplicates("run", ignore_index=True)


def training_curves(results: StudyResults) -> pd.DataFrame:
    """The logs of all trainings of a study.

    Raises ValueError where runs were exported without them: curves of some runs would pass for those of all.
    """
    lacking = set(results.errors["run"]) - set(results.training["run"] if len(results.training) else [])
    if lacking or results.training.empty:
        raise ValueError(
            f"{results.name}: expected training curves of every run (`energylab export --tables all` keeps them), "
            + (f"got {len(lacking)} runs without, such as {min(lacking)}" if lacking else "got none")
        )
    return results.training


def equally_trained(results: StudyResults) -> tuple[StudyResults, str]:
    """The results of those studies that trained for as many steps as the first, and a sentence that names the others.

    Errors after trainings of different length do not belong in one panel.
    """
    if results.errors.empty:
        return results, ""
    steps = {study: int(np.max(rows["steps"])) for study, rows in results.errors.groupby("study", sort=False)}
    first = results.errors["study"].iloc[0]
    others = [study for study in steps if steps[study] != steps[first]]
    if not others:
        return results, ""
    errors = results.errors[~results.errors["study"].isin(others)]
    named = ", ".join(f"{study} ({steps[study]:,} steps)" for study in others)
    return replace(results, errors=errors), f"Left out, since trained for another time: {named}."


# --- axes -----------------------------------------------------------------------------------------------------------


def figure_of(axes: Axes) -> Figure:
    """The whole figure that the axes are in."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def show_range(
    axes: Axes, values: Iterable[float], summaries: Sequence[pd.DataFrame] = (), *, stretch: float, along: str = "y"
) -> bool:
    """Choose limits, of y or `along` x, that hold all `values`, and the intervals of `summaries` as far as `stretch` times
    the range of the values beyond it.

    With two seeds the t quantile is 12.7, and a band may be so wide that nothing else could be seen. Returns whether
    one is cut off.
    """
    shown, ends = _finite(values), _finite(end for one in summaries for end in (*one["low"], *one["high"]))
    low, high = float(shown.min()), float(shown.max())
    room = stretch * ((high - low) or abs(high) or 1.0)
    bottom = max(low - room, min(low, ends.min(initial=low)))
    top = min(high + room, max(high, ends.max(initial=high)))
    pad = 0.05 * ((top - bottom) or abs(top) or 1.0)
    if along == "x":
        axes.xaxis.set_major_locator(
            MaxNLocator(nbins=4 if figure_of(axes).get_figwidth() > 4.5 else 3, steps=[1, 2, 5, 10])
        )
        axes.set_xlim(bottom - pad, top + pad)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
        axes.set_ylim(bottom - pad, top + pad)
    return bool(ends.min(initial=low) < bottom - pad or ends.max(initial=high) > top + pad)


def _finite(values: Iterable[float]) -> np.ndarray:
    array = np.asarray(list(values), dtype=np.float64)
    return array[np.isfinite(array)]


def plain_log_ticks(axis: Axis, within: Sequence[float] = (1, 2, 5)) -> None:
    """Ticks at these multiples of powers of ten, written as plain numbers; small ones between them without."""
    axis.set_major_locator(LogLocator(subs=within, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def recursion_axis(axes: Axes, recursions: Iterable[int]) -> None:
    """x is T, on a log2 axis, with a tick for each T that was run."""
    ticks = sorted(set(recursions))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)
    axes.set_xlabel("recursions $T$")


def whole_number_axis(axes: Axes, last: int, label: str) -> None:
    """x counts from 0 to `last`."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_xlim(-0.03 * max(last, 1), 1.03 * max(last, 1))
    axes.set_xlabel(label)


# --- words ----------------------------------------------------------------------------------------------------------


def seeds_note(counts: Iterable[int], mark: str, *, cut: bool = False) -> str:
    """How many seeds a figure shows, and which interval; `mark` says how it is drawn ("Bands")."""
    counts = set(map(int, counts))
    if max(counts) == 1:
        return "$n=1$ seed, hence no interval."
    alone = "" if min(counts) > 1 else " (none where $n=1$)"
    frame = ", cut at the frame" if cut else ""
    return f"Mean over {count(counts)}, each seed thin. {mark}: 95% Student-$t$ interval over seeds{alone}{frame}."


def count(counts: Iterable[int]) -> str:
    """$n=3$ seeds, or the range where it is not the same everywhere."""
    least, most = min(counts := set(map(int, counts))), max(counts)
    return f"$n={most}$ seed{'s' * (most > 1)}" if least == most else f"$n={least}$ to ${most}$ seeds"


def legend(figure: VenueFigure) -> None:
    """One legend for all panels, above them, each label once, in as few rows as fit, read row by row."""
    entries = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    labels = list(entries)
    with style(figure.venue):
        for rows in range(1, len(labels) + 1):
            columns = math.ceil(len(labels) / rows)
            down = [label for column in range(columns) for label in labels[column::columns]]  # matplotlib fills columns
            box = figure.legend([entries[label] for label in down], down, loc="outside upper center", ncols=columns)
            extent = box.get_window_extent()
            if extent.width <= figure.bbox.width or columns == 1:
                figure.grow(extent.height / figure.dpi)
                return
            box.remove()


def caption(figure: VenueFigure, *paragraphs: str) -> None:
    """Paragraphs below the panels, wrapped at the figure's width; the page grows to hold them. Skips empty ones."""
    if not any(paragraphs):
        return
    with style(figure.venue) as venue:
        text = figure.supxlabel("", x=MARGIN / figure.get_figwidth(), ha="left", fontsize=venue.small, color=INK)

        def width(words: str) -> float:
            text.set_text(words)
            return text.get_window_extent().width

        # words are measured one by one: to measure lines, formulas in them are set again and again
        space = width("a a") - width("aa")
        room = figure.bbox.width - 2 * MARGIN * figure.dpi
        lines = []
        for paragraph in paragraphs:
            line, taken = [], 0.0
            for word in re.findall(r"(?:\$[^$]*\$|\S)+", paragraph):  # a formula stays on one line
                own = width(word)
                if line and taken + space + own > room:
                    lines.append(" ".join(line))
                    line, taken = [], 0.0
                taken += own + (space if line else 0.0)
                line.append(word)
            lines += [" ".join(line)] if line else []
        text.set_text("\n".join(lines))
        figure.grow(text.get_window_extent().height / figure.dpi + 0.05)
