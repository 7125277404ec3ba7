"""Generated bad configs and command lines: exit code 2, one line that says what is wrong, and nothing left behind."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energylab.cli import COMMANDS, main

STUDY = """
from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.tasks import GaussianProcessPrior
from energylab.training import TrainingConfig

def study(steps: int = 12, seeds: int = 1, width: int = 8, heads: int = 2, rate: float = 1e-3, decay: float = 0.0,
          prior: str = "fixed", diagonal: str = "none", points: int = 4, variant: str = "tiny", depth: int = 1,
          batch: int = 32,
          name: str = "tiny", frozen: bool = False) -> Study:
    run = lambda seed: RunConfig(variant=variant, seed=seed, prior=prior, num_points=points,
                                 model=ModelConfig(width=width, depth=depth, heads=heads, hidden=8, diagonal=diagonal),
                                 training=TrainingConfig(steps=steps, batch_size=batch, learning_rate=rate,
                                                         weight_decay=decay))
    return Study(name, [run(seed) for seed in range(seeds)])
"""

FILE = """
from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.tasks import GaussianProcessPrior
from energylab.training import TrainingConfig

def study(steps: int = 3) -> Study:
    values = {{"variant": "a", "seed": 0, "prior": "fixed", "num_points": 4}}
    model = {{"width": 8, "depth": 1, "heads": 2, "hidden": 8}}
    training = {{"steps": steps}}
    {part}[{key!r}] = {value}
    parts = {{"model": ModelConfig(**model), "training": TrainingConfig(**training)}}
    return Study("bad", [RunConfig(**{{**parts, **values}})])
"""

# what is wrong for a kind of field; as Python source, since some are no constants
NOT_A_COUNT = st.one_of(
    st.integers(max_value=0).map(repr),
    st.floats().map(lambda value: f"float({str(value)!r})"),
    st.sampled_from(["None", "True", "'3'", "[]", "{}", "object()", "1j", "b'1'"]),
)
NOT_A_RATE = st.one_of(
    st.floats(max_value=0, allow_infinity=False).map(repr),
    st.sampled_from(["float('nan')", "float('inf')", "-1", "0", "'1e-3'", "[1e-3]", "{}", "(1e-3,)", "1j", "object()"]),
)
NOT_A_PAIR = st.sampled_from(
    ["None", "0.9", "'ab'", "(0.9,)", "(0.9, 1)", "(0.9, '0.95')", "{0.9, 0.95}", "(True, 0.9)"]
)
NOT_A_FLAG = st.sampled_from(["None", "1", "'yes'", "[]"])
WORDS = st.text(max_size=30).filter(lambda text: text not in ("none", "shared", "per_head"))

BAD_FIELDS = st.one_of(
    st.tuples(st.just("model"), st.sampled_from(["width", "depth", "heads", "hidden", "recursions"]), NOT_A_COUNT),
    st.tuples(st.just("model"), st.sampled_from(["attention", "mlp", "diagonal", "preconditioner"]), WORDS.map(repr)),
    st.tuples(st.just("model"), st.just("heads"), st.sampled_from(["3", "5", "7", "16"])),
    st.tuples(st.just("training"), st.sampled_from(["batch_size", "save_every", "log_every"]), NOT_A_COUNT),
    st.tuples(st.just("training"), st.sampled_from(["learning_rate", "gradient_clip"]), NOT_A_RATE),
    st.tuples(st.just("training"), st.sampled_from(["weight_decay", "final_learning_rate"]), st.just("'0'")),
    st.tuples(st.just("model"), st.just("temperature"), NOT_A_RATE),
    st.tuples(st.just("model"), st.sampled_from(["tokens", "positions"]), st.sampled_from(["None", "[]", "{}", "3"])),
    st.tuples(st.just("training"), st.just("betas"), NOT_A_PAIR),
    st.tuples(st.just("training"), st.just("tf32"), NOT_A_FLAG),
    st.tuples(st.just("model"), st.just("recompute"), NOT_A_FLAG),
    st.tuples(st.just("values"), st.just("seed"), st.sampled_from(["0.0", "'0'", "None", "True"])),
    st.tuples(st.just("values"), st.sampled_from(["model", "training"]), st.just("dict(steps=3)")),
    st.tuples(st.just("training"), st.just("device"), WORDS.filter(lambda t: t not in ("cpu", "auto")).map(repr)),
    st.tuples(st.just("values"), st.just("seed"), st.integers(max_value=-1).map(repr)),
    st.tuples(st.just("values"), st.just("num_points"), st.integers(max_value=0).map(repr)),
    st.tuples(st.just("values"), st.just("prior"), WORDS.filter(lambda text: "fixed" not in text).map(repr)),
    st.tuples(
        st.just("values"), st.just("variant"), st.text(max_size=3).filter(lambda t: not t.isprintable()).map(repr)
    ),
    st.tuples(
        st.sampled_from(["values", "model", "training"]),
        st.text(min_size=1, max_size=12)
        .filter(lambda text: text.strip("_") and not hasattr(st, text))
        .map("x_{}".format),
        st.just("1"),
    ),
)

# None is what the default of some options is called
PLAIN = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: text != "None"
)
NO_INTEGER = PLAIN.filter(lambda text: not _is_integer(text) and not text.startswith("-"))


def _is_integer(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _one_option(name: str, values: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return values.map(lambda value: ["run", "tiny", f"--{name}={value}"])


BAD_WORDS = st.one_of(
    PLAIN.filter(lambda text: text not in (*COMMANDS, "-h", "--help")).map(lambda text: [text]),
    st.tuples(st.sampled_from(["status", "report", "export"]), PLAIN.filter(bool)).map(list),
    st.tuples(st.sampled_from(["trace", "landscape", "sweep"]), PLAIN.map("no/{}".format)).map(list),
    st.tuples(st.sampled_from(["run", "describe"]), PLAIN.map("no/{}.py".format)).map(list),
    st.sampled_from(sorted(set(COMMANDS) - {"bench"})).flatmap(
        lambda command: PLAIN.map(lambda text: [command, f"--x{text}"])
    ),
    st.tuples(st.just("figures"), PLAIN.filter(lambda text: text and not text.startswith("-"))).map(list),
    st.tuples(st.just("tasks"), PLAIN.filter(lambda text: not text.startswith("-"))).map(list),
    PLAIN.filter(lambda text: not text.startswith("-")).map(lambda text: ["run", "tiny", "--steps", "3", text]),
    st.sampled_from(["steps", "seeds", "width", "heads", "points", "workers"]).flatmap(
        lambda name: _one_option(name, st.one_of(NO_INTEGER, st.integers(max_value=0).map(str)))
    ),
    _one_option("heads", st.sampled_from(["3", "5", "16"])),
    _one_option("rate", st.one_of(st.floats(max_value=0).map(str), st.sampled_from(["nan", "inf", "fast", "1e", ""]))),
    _one_option("decay", st.one_of(st.floats(max_value=-1e-30).map(str), st.sampled_from(["nan", "-inf", "x"]))),
    _one_option("prior", PLAIN.filter(lambda text: text not in ("fixed", "rbf", "mixture", "np-standard"))),
    _one_option("diagonal", PLAIN.filter(lambda text: text not in ("none", "shared", "per_head"))),
    _one_option("name", PLAIN.map("../{}".format)),
    _one_option("name", st.sampled_from(["", ".", "..", "/", "/etc", "a/b", "a b", "~", ".hidden", "x" * 81])),
    _one_option("device", PLAIN.filter(lambda text: text not in ("study", "auto", "cpu", "cuda"))),
    _one_option("executor", PLAIN.filter(lambda text: text not in ("local", "inprocess", "ray"))),
    _one_option("shard", st.one_of(PLAIN, st.sampled_from(["0/3", "4/3", "1/0", "-1/2", "1", "1/2/3", "٣/٣"]))),
    _one_option("time-limit", st.one_of(NO_INTEGER, st.sampled_from(["0s", "0", "5", "-5m", "1m1h", "h", "1.5h"]))),
    _one_option("gpus-per-run", st.sampled_from(["0.5", "2", "-1", "nan", "x"])),
    _one_option("address", PLAIN),
    _one_option("results", PLAIN.map("a_file/{}".format)),
    st.sampled_from(["--steps", "--results", "--workers", "--shard"]).map(lambda option: ["run", "tiny", option]),
    st.tuples(PLAIN.filter(bool), st.sampled_from(["12", "1..", "..", "9..1", "0..4", "1,x"])).map(
        lambda pair: ["sweep", "a_folder", f"--recursions={pair[1]}x{pair[0]}"]
    ),
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in {"studies/tiny.py": STUDY, "figures/one.py": "x = 1\n", "a_file": "mine", "bad.py": ""}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "a_folder").mkdir()
    return folder


def assert_refused(folder: Path, words: list[str], message: str = "") -> None:
    before = sorted(folder.rglob("*"))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    assert code == 2, (words, code, out.getvalue(), err.getvalue())
    assert_one_line(out.getvalue(), err.getvalue())
    assert re.search(message, err.getvalue())
    assert sorted(folder.rglob("*")) == before


def assert_one_line(out: str, err: str) -> None:
    assert out == ""
    assert err.startswith("energylab: ")
    assert len(err.splitlines()) == 1, err
    assert "Traceback" not in err
    assert not set(err) & set("│╭╰")


def bounded(examples: int):
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.too_slow],
    )


def refuse_words(examples: int):
    return lambda project: bounded(examples)(given(words=BAD_WORDS)(lambda words: assert_refused(project, words)))()


def refuse_configs(examples: int):
    def check(project: Path, bad: tuple[str, str, str]) -> None:
        part, key, value = bad
        (project / "bad.py").write_text(FILE.format(part=part, key=key, value=value))
        unknown = key.startswith("x_")
        assert_refused(project, ["run", "./bad.py"], "" if unknown else f"{key}: expected .*, got ")

    return lambda project: bounded(examples)(given(bad=BAD_FIELDS)(lambda bad: check(project, bad)))()


@pytest.mark.parametrize("examples", [120, pytest.param(1200, marks=pytest.mark.slow)])
def test_bad_command_lines(project: Path, examples: int) -> None:
    refuse_words(examples)(project)


@pytest.mark.parametrize("examples", [80, pytest.param(800, marks=pytest.mark.slow)])
def test_bad_configs(project: Path, examples: int) -> None:
    refuse_configs(examples)(project)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--width 1000000000",
            r"tiny.py: memory: expected at most .* GiB, what cpu has .*got at least .*width 1000000000",
        ),
        ("--batch 10000000000", r"memory: .*inputs of the layers, .*batch_size 10000000000"),
        ("--depth 1000000000", r"memory: .*depth 1000000000"),
        ("--width 10000000000", r"width: expected weights of fewer than 2\^60 elements, got 10000000000 times"),
    ],
)
@pytest.mark.parametrize("command", ["run", "describe"])
def test_what_cannot_fit_into_memory_is_refused(project: Path, command: str, options: str, message: str) -> None:
    device = ["--device=cpu"] if command == "run" else []
    assert_refused(project, [command, "tiny", *options.split(), *device], message)


@pytest.mark.slow
def test_bad_command_lines_through_a_shell(project: Path) -> None:
    @bounded(20)
    @given(words=BAD_WORDS)
    def check(words: list[str]) -> None:
        before = sorted(project.rglob("*"))
        command = shlex.join([sys.executable, "-m", "energylab", *words])
        done = subprocess.run(["sh", "-c", command], cwd=project, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 2, (words, done)
        assert_one_line(done.stdout, done.stderr)
        assert sorted(project.rglob("*")) == before

    check()
