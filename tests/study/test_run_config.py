import dataclasses
import json
import re

import pytest
from tiny_runs import tiny_config

from energylab.models import ModelConfig
from energylab.study import RunConfig, Study
from energylab.study.config import LATER_FIELDS
from energylab.tasks import GaussianProcessPrior
from energylab.training import TrainingConfig


def test_name_is_readable_and_ends_in_a_hash() -> None:
    assert re.fullmatch(r"CEM-T2-seed0-[0-9a-f]{8}", tiny_config().name)
    assert re.fullmatch(r"Llama-seed3-[0-9a-f]{8}", tiny_config(seed=3, variant="Llama").name)


def test_name_ignores_how_a_run_executes_and_nothing_else() -> None:
    name = tiny_config().name
    assert name == tiny_config(log_every=7, save_every=11, device="cpu").name
    others = [
        tiny_config(seed=1),
        tiny_config(variant="other"),
        tiny_config(steps=21),
        tiny_config(recursions=3),
        tiny_config(learning_rate=0.1),
        tiny_config(batch_size=5),
    ]
    assert len({name, *(config.name for config in others)}) == 1 + len(others)


def test_names_of_stored_runs_stay() -> None:
    """A new field of a config must not orphan what is stored: list it in LATER_FIELDS, with a default that does what
    was done before. Where a change is meant to alter results, change the names here."""
    assert tiny_config().name == "CEM-T2-seed0-e42a755b"
    assert tiny_config(variant="Llama").name == "Llama-seed0-f8b01aee"


def test_a_later_field_counts_once_it_is_used() -> None:
    config = tiny_config()
    assert dataclasses.replace(config, model=dataclasses.replace(config.model, loops=2)).name != config.name
    data = config.to_dict()
    for part, later in LATER_FIELDS.items():
        for key in later:
            del (data[part] if part else data)[key]
    assert RunConfig.from_dict(data).name == config.name


def test_equal_numbers_give_equal_names() -> None:
    assert tiny_config(gradient_clip=1).name == tiny_config(gradient_clip=1.0).name


def test_variant_with_any_character_makes_a_safe_directory() -> None:
    name = tiny_config(variant="../CEM, T → ∞").name
    assert re.fullmatch(r"[A-Za-z0-9_.+-]+", name)
    assert not name.startswith(".")
    assert name != tiny_config(variant="../CEM, T → 8").name


def test_a_preset_is_resolved() -> None:
    assert tiny_config().prior == GaussianProcessPrior.preset("fixed")


@pytest.mark.parametrize("config", [tiny_config(), tiny_config(variant="Llama", betas=(0.5, 0.75))])
def test_config_survives_json(config: RunConfig) -> None:
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.name == config.name


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("seed"),
        lambda data: data.update(color="red"),
        lambda data: data["model"].update(color="red"),
        lambda data: data.update(model=None),
        lambda data: data.update(model=[1]),
        lambda data: data.update(prior=3),
        lambda data: data["training"].update(steps="many"),
        lambda data: data["training"].update(betas=3),
        lambda data: data["prior"].update(kernels=None),
    ],
)
def test_from_dict_refuses_what_is_no_config(change) -> None:
    data = tiny_config().to_dict()
    change(data)
    with pytest.raises(ValueError, match=r"\w+"):
        RunConfig.from_dict(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("variant", ""),
        ("variant", "two\nlines"),
        ("seed", -1),
        ("seed", 1.0),
        ("seed", True),
        ("num_points", 0),
        ("prior", "fixd"),
        ("prior", GaussianProcessPrior(input_dim=2)),
        ("model", None),
        ("training", {}),
        ("conditions", ()),
        ("conditions", "in-prior"),
        ("conditions", ("double-noise",)),
        ("conditions", ("in-prior", "colder")),
        ("conditions", ["in-prior", ["double-noise"]]),
    ],
)
def test_values_out_of_range_are_named(key: str, value: object) -> None:
    values = {
        "variant": "CEM",
        "seed": 0,
        "prior": "fixed",
        "num_points": 4,
        "model": ModelConfig(),
        "training": TrainingConfig(),
    }
    with pytest.raises(ValueError, match=r"expected .*got"):
        RunConfig(**{**values, key: value})


def test_flat_settings_have_columns_of_their_own() -> None:
    flat = tiny_config().flat()
    assert flat["steps"] == 20
    assert flat["width"] == 8
    assert flat["noise_std"] == 0.1
    assert flat["input_dim"] == flat["prior_input_dim"] == 1
    assert not {"device", "log_every", "save_every"} & set(flat)


def test_equal_sets_of_conditions_make_equal_runs() -> None:
    config = tiny_config()
    one, other = (
        dataclasses.replace(config, conditions=names)
        for names in (("in-prior", "double-noise", "half-noise"), ["half-noise", "in-prior", "double-noise"])
    )
    assert one == other
    assert one.name == other.name != config.name
    assert one.conditions == ("in-prior", "half-noise", "double-noise")
    assert RunConfig.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert "conditions" not in one.flat()


def test_a_prior_may_limit_the_number_of_points() -> None:
    prior = GaussianProcessPrior.preset("np-standard")
    assert dataclasses.replace(tiny_config(), prior=prior, num_points=50).num_points == 50
    with pytest.raises(ValueError, match="num_points: expected at most 50, the max_points of the prior, got 51"):
        dataclasses.replace(tiny_config(), prior=prior, num_points=51)


def test_study_keeps_its_runs() -> None:
    runs = [tiny_config(), tiny_config(seed=1)]
    assert Study("tiny", runs).runs == tuple(runs)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("", [tiny_config()]),
        ("../up", [tiny_config()]),
        (".hidden", [tiny_config()]),
        ("tiny", []),
        ("tiny", [tiny_config(), tiny_config(log_every=3)]),
        ("tiny", [tiny_config(), "CEM"]),
        ("tiny", 3),
    ],
)
def test_study_refuses(name: str, runs: object) -> None:
    with pytest.raises(ValueError, match=r"(name|runs): expected .*, got"):
        Study(name, runs)
