"""What the paper says of these layers, and what the stored studies say of that.

A row for each comparison: the difference in excess MSE between two models, paired by seed, with the interval that decides
and the margin that matters (grey). The rule is in `energylab.analysis.verdicts`. Claims, comparisons and margins were
written down before the runs that decide them, except that the first three seeds of the recursion study were known, all
runs of its comparison in claim b1, which can only make it harder to support, and seed 0 of the comparison of claim e.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from energylab.analysis.verdicts import (
    NOT_SUPPORTED,
    SUPPORTED,
    UNDECIDED,
    Claim,
    Comparison,
    Model,
    judge,
    verdict,
)
from energylab.plotting import plots
from energylab.plotting.style import INK, NEUTRAL, VenueFigure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from energylab.study import StudyResults

GAIN = 0.001
"""A gain below this, a twentieth of the excess MSE of CEM models, is none."""
LITTLE = 0.002
"""A loss below this, a seventh of the excess MSE of Llama, is little."""


def _compare(study: str, a: Model, asks: Literal["lower", "close", "different"], b: Model) -> Comparison:
    return Comparison(study=study, a=a, b=b, asks=asks, margin=LITTLE if asks == "close" else GAIN)


CEM_1, CEM_2, PLAIN, LLAMA = Model("CEM", 1), Model("CEM", 2), Model("CEM no diagonal"), Model("Llama")

CLAIMS = (
    Claim(
        key="a",
        sentence="Tied weights lose little, at half of the attention's and two thirds of the MLP's parameters",
        comparisons=(
            _compare("tied_weights", PLAIN, "close", LLAMA),
            _compare("tied_weights", Model("CEM attention, Llama MLP"), "close", LLAMA),
            _compare("tied_weights", Model("Llama attention, CEM MLP"), "close", LLAMA),
            _compare("tied_weights", Model("CEM no diagonal, equal parameters"), "close", LLAMA),
        ),
    ),
    Claim(
        key="b1",
        sentence="T = 2 beats T = 1, in attention and in the MLP",
        comparisons=(
            _compare("tuned", CEM_2, "lower", CEM_1),
            # added when the runs of both were known: at the rate of `recursion` T = 1 is better than at that of `tuned`
            _compare("recursion", CEM_2, "lower", CEM_1),
            _compare("recursion_by_part", Model("CEM T = 2 in attention"), "lower", CEM_1),
            _compare("recursion_by_part", Model("CEM T = 2 in the MLP"), "lower", CEM_1),
        ),
    ),
    Claim(
        key="b2",
        sentence="T = 4 and T = 8 lower the error further",
        comparisons=(
            _compare("recursion", Model("CEM", 4), "lower", CEM_2),
            _compare("recursion", Model("CEM", 8), "lower", CEM_2),
        ),
    ),
    Claim(
        key="c",
        sentence="A head-shared diagonal is essential: it beats none",
        comparisons=(
            _compare("diagonal", CEM_1, "lower", Model("CEM no diagonal", 1)),
            _compare("diagonal", CEM_2, "lower", Model("CEM no diagonal", 2)),
        ),
    ),
    Claim(
        key="d",
        sentence="Learned preconditioners add little: going without one loses little",
        comparisons=tuple(
            _compare("preconditioner", Model("CEM"), "close", Model(f"CEM P {kind}"))
            for kind in ("diagonal", "diagonal low rank", "diagonal low rank positive")
        ),
    ),
    Claim(
        key="e",
        sentence="CEM layers alone, with T = 2 and preconditioners, match Llama with fewer parameters",
        # was of `full_cem`, at 2e-3 for both, until `learning_rate` put the best rate of these layers elsewhere
        comparisons=(_compare("tuned", Model("CEM preconditioned"), "close", LLAMA),),
    ),
    Claim(
        key="f",
        sentence="Recursion within a layer is not the same as looping a block",
        comparisons=(
            _compare("looping", CEM_2, "different", Model("CEM looped block")),
            _compare("looping", Model("CEM, equal operations"), "different", Model("CEM looped block")),
        ),
    ),
    Claim(
        key="g",
        sentence="Ours: ties cost since a head moves what it looks for; an indefinite P parts the two, a positive one not",
        comparisons=(
            _compare("untying", Model("CEM indefinite P", 1), "lower", Model("CEM no diagonal", 1)),
            _compare("untying", Model("CEM indefinite P", 1), "lower", Model("CEM positive P", 1)),
        ),
    ),
    Claim(
        key="h",
        sentence="Ours: ties cost since heads can only attract; where two of four repel, ties of the attention lose little",
        comparisons=(
            _compare("repelling", Model("CEM 2 of 4 repel", 1), "lower", Model("CEM no diagonal", 1)),
            _compare("repelling", Model("CEM 2 of 4 repel", 1), "close", Model("Llama attention, CEM MLP", 1)),
        ),
    ),
)

NEEDS = tuple(dict.fromkeys(comparison.study for claim in CLAIMS for comparison in claim.comparisons))
PARTIAL = True

_GAP = 0.4  # lines, above each sentence but the first
_COLOURS = {SUPPORTED: "#1b7837", NOT_SUPPORTED: "#b2182b", UNDECIDED: NEUTRAL}


def draw(results: StudyResults) -> Figure:
    """A row for each comparison that was run, under the sentence of its claim."""
    judged = [(claim, _judge(claim, results)) for claim in CLAIMS]
    judged = [(claim, rows) for claim, rows in judged if (rows["n"] > 0).any()]
    if not judged:
        raise ValueError(f"{results.name}: expected runs that some claim compares, got none")
    with style() as venue:
        # a narrow page has room for half a comparison, or half a sentence, in a line
        across, beside = int(venue.width * 144 / venue.small), 48 if venue.width > 4.5 else 30
        sentences = [textwrap.wrap(f"({c.key}) {c.sentence}: {verdict(rows)}", across) for c, rows in judged]
        with_runs = [list(rows[rows["n"] > 0].itertuples()) for _, rows in judged]
        names_of = [[textwrap.fill(_name(one), beside) for one in rows] for rows in with_runs]
        lines = sum(map(len, sentences)) + sum(name.count("\n") + 1 for names in names_of for name in names)
        lines += _GAP * (len(sentences) - 1)
        figure = VenueFigure(venue.name, 1.5 / 72 * venue.small * (lines + 1) + 0.45)
        axes = figure.subplots()
        axes.vlines(0, len(sentences[0]) - 0.5, lines, color=INK, linewidth=0.6, zorder=0.5)
        names, line = {}, 0.0  # the next free line, counted from the top
        for (_, all_rows), sentence, rows, its_names in zip(judged, sentences, with_runs, names_of, strict=True):
            verdict_of_all = verdict(all_rows)
            axes.annotate(
                "\n".join(sentence),
                (0, line + (len(sentence) - 1) / 2),
                xycoords=("figure fraction", "data"),
                xytext=(2, 0),
                textcoords="offset points",
                ha="left",
                va="center",
                fontsize=venue.small,
                fontweight="bold",
                color=_COLOURS[verdict_of_all] if verdict_of_all != UNDECIDED else INK,
                annotation_clip=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # the line at 0 passes behind
            )
            line += len(sentence)
            for one, name in zip(rows, its_names, strict=True):
                place = line + name.count("\n") / 2
                names[place] = name
                colour = _COLOURS[one.verdict]
                lowest, highest = {"lower": (-one.margin, 0), "close": (0, one.margin)}.get(
                    one.asks, (-one.margin, one.margin)
                )
                axes.fill_betweenx([place - 0.4, place + 0.4], lowest, highest, color=NEUTRAL, alpha=0.25, linewidth=0)
                if one.n > 1:
                    axes.plot([one.low, one.high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
                axes.plot([one.mean], [place], color=colour, linestyle="", marker="o", zorder=4)
                line += name.count("\n") + 1
            line += _GAP
        axes.set_yticks(list(names), list(names.values()), fontsize=venue.small)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)  # the sentences run across it
        axes.set_ylim(lines - 0.4, -0.5)
        shown = pd.concat([rows[rows["n"] > 0] for _, rows in judged])
        cut = plots.show_range(axes, [0.0, *shown["mean"]], [shown], stretch=0.6, along="x")
        axes.set_xlabel("difference in excess MSE (units of $y^2$)")
        what = (
            "Left of 0 the first model is better. Paired by seed; intervals: Student $t$, 95 % for the comparisons of a"
            " claim together (Bonferroni). Grey: what would be too small to matter."
        )
        comparisons = sum(len(claim.comparisons) for claim in CLAIMS)
        if len(shown) < comparisons:
            what += f" {comparisons - len(shown)} of {comparisons} comparisons have no runs yet: their claims are undecided."
        plots.caption(figure, what + (" Wide intervals are cut." if cut else ""))
    return figure


def _judge(claim: Claim, results: StudyResults) -> DataFrame:
    """`judge`, where two models that are compared in two studies have them in their names."""
    rows = judge(claim, results.errors)
    twice = rows.duplicated(["a", "b"], keep=False)
    return rows.assign(b=rows["b"].where(~twice, rows["b"] + " in " + rows["study"]))


def _name(one: Any) -> str:
    """What a row compares, with spaces at which a line may break between words only, not within `n = 3`."""
    return f"{one.a} − {one.b} (n = {one.n})".replace(" = ", "\u00a0=\u00a0")


def table(results: StudyResults) -> DataFrame:
    """Every comparison, with those that were not run."""
    judged = pd.concat([_judge(claim, results) for claim in CLAIMS], ignore_index=True)
    names = {"mean": "difference", "low": "difference low", "high": "difference high"}
    columns = ["claim", "a", "b", "n", *names, "verdict"]  # all that fits on a page
    shown = judged[columns].rename(columns=names)
    asked = {
        asks: ", ".join(claim.key for claim in CLAIMS if any(one.asks == asks for one in claim.comparisons))
        for asks in ("lower", "close", "different")
    }
    shown.attrs["caption"] = (
        "What the stored runs say of each claim: excess MSE of $a$ minus that of $b$, paired by seed, $n$ seeds, with a"
        " Student-$t$ interval, 95% for the comparisons of a claim together (Bonferroni). Asked is that $a$ is lower, by"
        f" {GAIN} ({asked['lower']}), not higher by more than {LITTLE} ({asked['close']}), or different by {GAIN}"
        f" ({asked['different']})."
    )
    return shown
