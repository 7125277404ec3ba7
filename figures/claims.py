"""What the paper says of these layers, and what the stored studies say of that.

A row for each comparison: the difference in excess MSE between two models, paired by seed, with the interval that decides
and the margin that matters (grey). The rule is in `energylab.analysis.verdicts`. Claims, comparisons and margins were
written down before the runs that decide them, except for the runs of the recursion study with seeds 0 to 2.
"""

from energylab.analysis.verdicts import Claim, Comparison, Model

GAIN = 0.001
"""A gain below this, a twentieth of the excess MSE of CEM models, is none."""
LITTLE = 0.002
"""A loss below this, a seventh of the excess MSE of Llama, is little."""

CLAIMS = (
    Claim(
        key="a",
        sentence="Tied weights lose little, at half of the attention's and two thirds of the MLP's parameters",
        comparisons=(
            Comparison(
                study="tied_weights",
                a=Model("CEM no diagonal"),
                b=Model("Llama"),
                asks="close",
                margin=LITTLE,
            ),
            Comparison(
                study="tied_weights",
                a=Model("CEM attention, Llama MLP"),
                b=Model("Llama"),
                asks="close",
                margin=LITTLE,
            ),
            Comparison(
                study="tied_weights",
                a=Model("Llama attention, CEM MLP"),
                b=Model("Llama"),
                asks="close",
                margin=LITTLE,
            ),
            Comparison(
                study="tied_weights",
                a=Model("CEM no diagonal, equal parameters"),
                b=Model("Llama"),
                asks="close",
                margin=LITTLE,
            ),
        ),
    ),
    Claim(
        key="b1",
        sentence="T = 2 beats T = 1, in attention and in the MLP",
        comparisons=(
            Comparison(study="recursion", a=Model("CEM", 2), b=Model("CEM", 1), asks="lower", margin=GAIN),
            Comparison(
                study="recursion_by_part",
                a=Model("CEM T = 2 in attention"),
                b=Model("CEM", 1),
                asks="lower",
                margin=GAIN,
            ),
            Comparison(
                study="recursion_by_part",
                a=Model("CEM T = 2 in the MLP"),
                b=Model("CEM", 1),
                asks="lower",
                margin=GAIN,
            ),
        ),
    ),
    Claim(
        key="b2",
        sentence="T = 4 and T = 8 lower the error further",
        comparisons=(
            Comparison(study="recursion", a=Model("CEM", 4), b=Model("CEM", 2), asks="lower", margin=GAIN),
            Comparison(study="recursion", a=Model("CEM", 8), b=Model("CEM", 2), asks="lower", margin=GAIN),
        ),
    ),
    Claim(
        key="c",
        sentence="A head-shared diagonal is essential: it beats none",
        comparisons=(
            Comparison(study="diagonal", a=Model("CEM", 1), b=Model("CEM no diagonal", 1), asks="lower", margin=GAIN),
            Comparison(study="diagonal", a=Model("CEM", 2), b=Model("CEM no diagonal", 2), asks="lower", margin=GAIN),
        ),
    ),
    Claim(
        key="d",
        sentence="Learned preconditioners add little: going without one loses little",
        comparisons=tuple(
            Comparison(study="preconditioner", a=Model("CEM"), b=Model(f"CEM P {kind}"), asks="close", margin=LITTLE)
            for kind in ("diagonal", "diagonal low rank", "diagonal low rank positive")
        ),
    ),
    Claim(
        key="e",
        sentence="CEM layers alone, with T = 2 and preconditioners, match Llama with fewer parameters",
        comparisons=(
            Comparison(study="full_cem", a=Model("CEM preconditioned"), b=Model("Llama"), asks="close", margin=LITTLE),
        ),
    ),
    Claim(
        key="f",
        sentence="Recursion within a layer is not the same as looping a block",
        comparisons=(
            Comparison(
                study="looping",
                a=Model("CEM", 2),
                b=Model("CEM looped block"),
                asks="different",
                margin=GAIN,
            ),
            Comparison(
                study="looping",
                a=Model("CEM, equal operations"),
                b=Model("CEM looped block"),
                asks="different",
                margin=GAIN,
            ),
        ),
    ),
)

NEEDS = tuple(dict.fromkeys(comparison.study for claim in CLAIMS for comparison in claim.comparisons))
