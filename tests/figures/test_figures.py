"""What every figure must satisfy, and what each of them shows."""

from collections.abc import Callable
from dataclasses import replace

import matplotlib
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.text import Text

from energylab.analysis.statistics import student_t
from energylab.plotting import recursion_colour, save, style
from energylab.plotting.style import NEUTRAL

NAMES = ("error_vs_context", "error_vs_recursions", "energy_descent")
STUDIES = {
    "serious": ("plain", {}),
    "quick": ("icml-column", {"seeds": 2, "note": "The runs are too short to rank $T$."}),
    "single": ("neurips", {"seeds": 1, "recursions": (2,)}),
    "other": (
        "icml",
        {
            "recursions": (1, 3, 16),
            "variants": ("CEM", "full CEM"),
            "llama": False,
            "seeds": 3,
            "depth": 5,
            "parts": ("attention",),
        },
    ),
    "narrow": (
        "icml-column",
        {"variants": ("CEM", "CEM with a diagonal"), "seeds": 3, "recursions": (1, 2), "depth": 3},
    ),
}


def means(axes, colour: str) -> list:
    """The lines of full strength in a colour."""
    return [line for line in axes.lines if to_hex(line.get_color()) == colour and line.get_linewidth() > 1]


def seeds(axes, colour: str) -> list:
    return [line for line in axes.lines if to_hex(line.get_color()) == colour and line.get_linewidth() < 0.6]


@pytest.mark.parametrize("kind", STUDIES)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_clipped_overlaps_or_is_empty(
    name: str, kind: str, study: Callable, figure_file: Callable, monkeypatch
) -> None:
    venue, options = STUDIES[kind]
    module = figure_file(name)
    before = dict(matplotlib.rcParams.copy())
    with style(venue):
        figure = module.draw(study(**options))
    figure.canvas.draw()  # the layout is settled once it has been drawn
    drawn = []
    original = Text.draw

    def record(self: Text, renderer) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn.append((self.get_text(), self.get_window_extent(renderer)))
        original(self, renderer)

    monkeypatch.setattr(Text, "draw", record)
    figure.canvas.draw()

    assert len(drawn) > 8
    for text, box in drawn:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.width, text
        assert box.y1 <= figure.bbox.height, text
    for i, (text, box) in enumerate(drawn):
        for other_text, other in drawn[:i]:
            shared = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
            assert min(shared) < 1, f"{text!r} overlaps {other_text!r}"
    for axes in figure.axes:
        assert axes.lines
        assert axes.get_ylim()[0] < axes.get_ylim()[1]
        panel = axes.get_window_extent()
        assert min(panel.width, panel.height) / figure.dpi > 0.6  # inches
        for text, box in drawn:
            inside = box.x0 > panel.x0 and box.x1 < panel.x1 and box.y0 > panel.y0 and box.y1 < panel.y1
            assert not inside, f"{text!r} covers the data"
    words = " ".join(text for text, _ in drawn).replace("\n", " ")
    assert ("$n=1$ seed" in words) if options.get("seeds") == 1 else (f"$n={options.get('seeds', 5)}$ seeds" in words)
    assert options.get("note", "") in words
    assert dict(matplotlib.rcParams.copy()) == before
    assert pyplot.get_fignums() == []
    assert module.NEEDS == ("recursion",)
    assert module.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_files_are_the_same_when_drawn_twice(name: str, study: Callable, figure_file: Callable, tmp_path) -> None:
    """The second time with the rows in another order, which must not matter either."""
    results = study(seeds=2, recursions=(1, 2), depth=1)
    mixed = {table: getattr(results, table).sample(frac=1, random_state=0) for table in ("errors", "descent")}
    files = [
        [path.read_bytes() for path in save(figure_file(name).draw(frames), tmp_path / str(i))]
        for i, frames in enumerate((results, replace(results, **mixed)))
    ]
    assert files[0] == files[1]
    pdf = files[0][0]
    assert b"/Type3" not in pdf
    assert b"/FontFile2" in pdf
    assert b"/MediaBox [ 0 0 468 " in pdf


def test_error_vs_context(study: Callable, figure_file: Callable) -> None:
    results = study()
    excess, rmse = figure_file("error_vs_context").draw(results).axes
    inside = results.errors[results.errors["condition"] == "in-prior"]
    for axes, column in ((excess, "excess_mse"), (rmse, "rmse")):
        assert axes.get_xlabel() == "earlier pairs $k$"
        assert axes.get_ylim()[0] == 0
        assert axes.get_yscale() == "linear"
        for T in (1, 2, 4, 8):
            (mean,) = means(axes, recursion_colour(T))
            assert len(seeds(axes, recursion_colour(T))) == 5
            expected = inside[inside["T"] == T].groupby("k")[column].mean()
            assert list(mean.get_ydata()) == pytest.approx(list(expected))
            assert list(mean.get_xdata()) == list(range(24))
            assert mean.get_linestyle() == "-"
        (llama,) = means(axes, NEUTRAL)
        assert llama.get_linestyle() != "-"
        assert len(axes.collections) == 5  # a band each
        assert axes.get_ylim()[1] > inside[column].max()
    assert excess.get_ylabel() == "excess MSE at $k$ (units of $y^2$)"
    assert rmse.get_ylabel() == "RMSE at $k$ (units of $y$)"
    references = {line.get_label(): line for line in rmse.lines}
    assert references["Bayes floor"].get_linestyle() == "--"
    assert references["1-NN"].get_linestyle() == ":"
    run = inside[inside["run"] == inside["run"].iloc[0]]
    assert list(references["Bayes floor"].get_ydata()) == list(run["floor_rmse"])
    assert list(references["1-NN"].get_ydata()) == list(run["nearest_neighbour_rmse"])


def test_error_vs_context_refuses_runs_of_different_tasks(study: Callable, figure_file: Callable) -> None:
    results = study()
    errors = results.errors.copy()
    errors.loc[errors["seed"] == 1, "floor_rmse"] *= 1.1
    with pytest.raises(ValueError, match=r"^floor_rmse: expected the same reference for all runs"):
        figure_file("error_vs_context").draw(replace(results, errors=errors))


def test_error_vs_recursions(study: Callable, figure_file: Callable) -> None:
    results = study(seeds=3)
    level, gain = figure_file("error_vs_recursions").draw(results).axes
    inside = results.errors[results.errors["condition"] == "in-prior"]
    values = inside.groupby(["run", "variant", "T", "seed"], dropna=False)["excess_mse"].mean().reset_index()
    paired = values.pivot(index="seed", columns="T", values="excess_mse")
    for axes in (level, gain):
        assert axes.get_xscale() == "log"
        assert axes.xaxis.get_transform().base == 2
        assert axes.get_xlabel() == "recursions $T$"
    for T in (1, 2, 4, 8):
        bar, point = (line for line in level.lines if to_hex(line.get_color()) == recursion_colour(T))
        expected = student_t(values.loc[values["T"].eq(T).fillna(False), "excess_mse"])
        assert list(point.get_xdata()) == [T]
        assert list(point.get_ydata()) == pytest.approx([expected.mean])
        assert list(bar.get_ydata()) == pytest.approx([expected.low, expected.high])
        bar, point = (line for line in gain.lines if to_hex(line.get_color()) == recursion_colour(T))
        expected = student_t(paired[T] - paired[1])
        assert list(point.get_ydata()) == pytest.approx([expected.mean])
        assert list(bar.get_ydata()) == pytest.approx([expected.low, expected.high])
    assert gain.get_title(loc="left") == "(b) Paired difference to $T=1$"
    (llama,) = [line for line in level.lines if line.get_label() == "Llama"]
    assert llama.get_ydata()[0] == pytest.approx(values.loc[values["variant"] == "Llama", "excess_mse"].mean())
    assert len(level.patches) == 1
    joined = [line for line in seeds(level, NEUTRAL) if len(line.get_xdata()) == 4]
    assert len(joined) == 3


def test_paired_difference_takes_the_smallest_T_and_is_left_out_for_one(study: Callable, figure_file: Callable) -> None:
    module = figure_file("error_vs_recursions")
    figure = module.draw(study(recursions=(2, 8)))
    assert figure.axes[1].get_title(loc="left") == "(b) Paired difference to $T=2$"
    (alone,) = module.draw(study(recursions=(4,))).axes
    assert alone.get_title(loc="left") == "Excess over the Bayes floor"


def test_energy_descent(study: Callable, figure_file: Callable) -> None:
    results = study(seeds=3)
    figure = figure_file("energy_descent").draw(results)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["(a) block 0, attention", "(b) block 1, attention", "(c) block 0, MLP", "(d) block 1, MLP"]
    query = results.descent[results.descent["token"] == "query"]
    for axes, (part, block) in zip(
        figure.axes, [("attention", 0), ("attention", 1), ("mlp", 0), ("mlp", 1)], strict=True
    ):
        layer = query[(query["part"] == part) & (query["block"] == block)]
        assert len(axes.collections) == 4
        for T in (1, 2, 4, 8):
            (mean,) = means(axes, recursion_colour(T))
            assert len(seeds(axes, recursion_colour(T))) == 3
            assert list(mean.get_xdata()) == list(range(T + 1))
            expected = layer[layer["T"] == T].groupby("step")["energy_change_median"].mean()
            assert list(mean.get_ydata()) == pytest.approx(list(expected))
        low = layer[layer["T"] == 8].groupby("step")["energy_change_q25"].mean().min()
        assert axes.get_ylim()[0] < low  # the band is shown whole
    assert [axes.get_ylabel() for axes in figure.axes] == ["$E(z_t) - E(z_0)$", "", "$E(z_t) - E(z_0)$", ""]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "step $t$", "step $t$"]


def test_energy_descent_of_mixed_layers(study: Callable, figure_file: Callable) -> None:
    """Only the layers that have an energy get a panel: here block 1 has no MLP with one."""
    results = study(seeds=1, depth=2)
    lacking = (results.descent["block"] == 1) & (results.descent["part"] == "mlp")
    figure = figure_file("energy_descent").draw(replace(results, descent=results.descent[~lacking]))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "(a) block 0, attention",
        "(b) block 1, attention",
        "(c) block 0, MLP",
    ]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "step $t$", "step $t$"]
    other = replace(results, descent=results.descent[results.descent["layer"] != "block 0 attention"])
    labels = {axes.get_title(loc="left"): axes.get_ylabel() for axes in figure_file("energy_descent").draw(other).axes}
    change = "$E(z_t) - E(z_0)$"
    assert labels == {"(a) block 1, attention": change, "(b) block 0, MLP": change, "(c) block 1, MLP": ""}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("error_vs_recursions", "recursion: expected runs with recursions, evaluated on in-prior tasks, got none"),
        ("energy_descent", "recursion: expected energy traces of at least one run with recursions, got none"),
    ],
)
def test_a_study_without_recursions_is_refused(
    name: str, sentence: str, study: Callable, figure_file: Callable
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        figure_file(name).draw(study(recursions=()))


def test_a_study_without_the_training_prior_is_refused(study: Callable, figure_file: Callable) -> None:
    results = study()
    other = replace(results, errors=results.errors.assign(condition="noise x2"))
    with pytest.raises(ValueError, match=r"^recursion: expected runs evaluated on in-prior tasks, got none$"):
        figure_file("error_vs_context").draw(other)
