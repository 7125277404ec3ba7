"""What a run is, and what a study is: frozen values that validate themselves.

A run is named by its settings: `RunConfig.name` ends in a hash of the resolved config, so that the same settings always
meet the same directory, and changed ones never overwrite it. Where and how a run executes (device, how often it logs
and saves) is no setting, and stays out of the name.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from energylab.models import ModelConfig
from energylab.tasks import CONDITIONS, GaussianProcessPrior
from energylab.training import TrainingConfig

# Fields of TrainingConfig that say where and how a run executes: they change no result.
EXECUTION_FIELDS = ("device", "log_every", "save_every")

# Fields that came after the first stored results: part of a run's name only where they are not at their default, which
# does what was done before there was the field. So a new field renames no stored run. Such a default stays for ever.
LATER_FIELDS = {
    "": ("conditions", "test_recursions"),  # of the run itself
    "model": ("loops", "step_sizes", "temperature", "tie", "recompute", "repelling_heads", "initial_step_size"),
    # these change no weight; but a finished run is never done again, so what else it records must be part of its name
    "training": ("trace_every", "snapshots"),
    "prior": ("max_points",),
}

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: a model, trained on tasks from a prior, from one seed.

    `prior` may be the name of a preset; it is resolved on construction. Seeds of initialisation and data are derived
    from `seed`, so runs of one seed see the same tasks in the same order.

    >>> RunConfig(variant="CEM", seed=0, prior="fixed", num_points=24, model=ModelConfig(recursions=2),
    ...           training=TrainingConfig(steps=200)).name.rpartition("-")[0]
    'CEM-T2-seed0'

    Raises ValueError, naming the key, the value and what is allowed.
    """

    variant: str
    """What is compared, in words: the name of a curve in a figure."""
    seed: int
    """Root seed of the run's initialisation and data."""
    prior: GaussianProcessPrior
    """The prior of the tasks, or the name of one of its presets."""
    num_points: int
    """Pairs (x, y) in a task."""
    model: ModelConfig
    training: TrainingConfig
    conditions: tuple[str, ...] = ("in-prior",)
    """What the trained model is tested on: names of `energylab.tasks.CONDITIONS`, `in-prior` or
    `validation` among them."""
    test_recursions: tuple[int, ...] = ()
    """Other T' that the trained model is also tested with, each in every CEM layer."""

    if TYPE_CHECKING:  # what may be given, beside what is kept

        def __init__(
            self,
            *,
            variant: str,
            seed: int,
            prior: str | GaussianProcessPrior,
            num_points: int,
            model: ModelConfig,
            training: TrainingConfig,
            conditions: Sequence[str] = ("in-prior",),
            test_recursions: Sequence[int] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.variant, str) or not 1 <= len(self.variant) <= 80 or not self.variant.isprintable():
            raise ValueError(f"variant: expected a printable name of 1 to 80 characters, got {self.variant!r}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: expected an integer from 0 to 2^63 - 1, got {self.seed!r}")
        if isinstance(self.prior, str):
            object.__setattr__(self, "prior", GaussianProcessPrior.preset(self.prior))
        for key, kind in (("prior", GaussianProcessPrior), ("model", ModelConfig), ("training", TrainingConfig)):
            if not isinstance(getattr(self, key), kind):
                raise ValueError(f"{key}: expected a {kind.__name__}, got {getattr(self, key)!r}")
        object.__setattr__(self, "num_points", self.prior.check_num_points(self.num_points))
        names = self.conditions if isinstance(self.conditions, list | tuple) else ()
        if not all(name in CONDITIONS for name in names) or not {"in-prior", "validation"} & set(names):
            others = [name for name in CONDITIONS if name not in ("in-prior", "validation")]
            allowed = f"in-prior or validation, and any of {', '.join(others)}"
            raise ValueError(f"conditions: expected {allowed}, got {self.conditions!r}")
        # one order, so that equal sets make equal runs
        object.__setattr__(self, "conditions", tuple(name for name in CONDITIONS if name in names))
        numbers = self.test_recursions if isinstance(self.test_recursions, list | tuple) else (0,)
        if not all(type(number) is int and number >= 1 for number in numbers):
            raise ValueError(f"test_recursions: expected integers of at least 1, got {self.test_recursions!r}")
        if numbers and not self.model.has_energy:
            raise ValueError(f"test_recursions: expected none for a model without a CEM layer, got {numbers!r}")
        object.__setattr__(self, "test_recursions", tuple(sorted(set(numbers))))
        if self.model.input_dim != self.prior.input_dim:
            expected = f"{self.prior.input_dim}, the input_dim of the prior"
            raise ValueError(f"model.input_dim: expected {expected}, got {self.model.input_dim}")

    @property
    def recursions(self) -> int | None:
        """T, or None for a model without a CEM layer: it has no recursion."""
        return self.model.recursions if self.model.has_energy else None

    @property
    def name(self) -> str:
        """The run's directory: readable, and ending in 8 hexadecimal digits of the SHA-256 of its settings."""
        data = self.settings()
        for part, later in LATER_FIELDS.items():
            owner, section = (getattr(self, part), data[part]) if part else (self, data)
            for field in dataclasses.fields(owner):
                if field.name in later and getattr(owner, field.name) == field.default:
                    del section[field.name]
        settings = json.dumps(_canonical(data), sort_keys=True, separators=(",", ":"), allow_nan=False)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        words = re.sub(r"[^A-Za-z0-9_.+]+", "-", self.variant).strip("-.") or "run"
        depth = "" if self.recursions is None else f"-T{self.recursions}"
        return f"{words}{depth}-seed{self.seed}-{digest}"

    def on(self, device: str) -> "RunConfig":
        """The same run on another device; it keeps its name."""
        return dataclasses.replace(self, training=dataclasses.replace(self.training, device=device))

    def settings(self) -> dict[str, Any]:
        """Everything that can change what the run's directory holds, as plain nested data."""
        data = self.to_dict()
        for key in EXECUTION_FIELDS:
            del data["training"][key]
        return data

    def flat(self) -> dict[str, Any]:
        """The settings under their own names ("steps", "width", ...), for the columns of a table.

        A field of the prior that has the name of another field is prefixed: "prior_input_dim".
        """
        nested = self.settings()
        flat = {"num_points": nested["num_points"], **nested["model"], **nested["training"]}
        for key, value in nested["prior"].items():
            flat[f"prior_{key}" if key in flat else key] = value
        return flat

    def to_dict(self) -> dict[str, Any]:
        """Plain nested data for JSON; `from_dict` reads it back."""
        return json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RunConfig":
        """The config that `to_dict` wrote; ValueError where a key is unknown, missing or out of range."""
        parts = {"prior": GaussianProcessPrior, "model": _model, "training": TrainingConfig}
        try:
            values = {key: parts[key](**value) if key in parts else value for key, value in data.items()}
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"not the config of a run: {error}") from error


@dataclass(frozen=True)
class Study:
    """A name and a list of runs. `note` is a sentence that figures print, such as why the runs cannot rank T."""

    name: str
    runs: Sequence[RunConfig]
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _FOLDER_NAME.fullmatch(self.name):
            raise ValueError(f"name: expected a study name of letters, digits and . _ + -, got {self.name!r}")
        if not isinstance(self.runs, Iterable) or isinstance(self.runs, str):
            raise ValueError(f"runs: expected a list of RunConfig, got {self.runs!r}")
        object.__setattr__(self, "runs", tuple(self.runs))
        if not self.runs:
            raise ValueError("runs: expected at least one run, got none")
        seen: set[str] = set()
        for run in self.runs:
            if not isinstance(run, RunConfig):
                raise ValueError(f"runs: expected RunConfig values, got {run!r}")
            if run.name in seen:
                raise ValueError(f"runs: expected different settings in every run, got {run.name} twice")
            seen.add(run.name)
        if not isinstance(self.note, str):
            raise ValueError(f"note: expected a sentence, got {self.note!r}")


def _model(**fields: Any) -> ModelConfig:
    return _model_of(json.dumps(fields))


@functools.lru_cache(maxsize=256)
def _model_of(text: str) -> ModelConfig:
    """A model's config checks itself by building its layers: once, where thousands of runs share it."""
    return ModelConfig(**json.loads(text))


def _canonical(value: Any) -> Any:
    """Nested data in which equal numbers look equal: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {key: _canonical(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_canonical(entry) for entry in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
