"""The table of test errors: one row a (run, condition, k), from many runs at once."""

import io
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from energylab.study.config import RunConfig
from energylab.study.files import COSTS, EVALUATION, Damaged, one_line, read_checked
from energylab.study.index import WORTHWHILE, read_sealed, write_sealed

# What every row has, before the other columns of the evaluation, the costs, and the settings that vary.
_COLUMNS = ("study", "run", "variant", "T", "seed", "condition", "k", "rmse", "rmse_f", "excess_mse")


@dataclass(frozen=True, kw_only=True)
class Tested:
    """What the table needs of a finished run."""

    run: str
    variant: str
    recursions: int | None
    seed: int
    settings: dict[str, Any]
    costs: dict[str, float]
    evaluation: pa.Table

    @classmethod
    def read(cls, directory: Path, config: RunConfig, provenance: Mapping[str, Any]) -> "Tested":
        """Of a run that was checked."""
        try:
            table = pq.ParquetFile(pa.BufferReader(read_checked(directory, provenance, EVALUATION))).read()
        except (OSError, ValueError) as error:
            raise Damaged(directory, f"{EVALUATION} is not readable Parquet ({one_line(error)})") from error
        # seven digits, which is what an export keeps, so that figures are the same from both; then wide, for means
        for kind in (pa.float32(), pa.float64()):
            fields = [field.with_type(kind) if pa.types.is_floating(field.type) else field for field in table.schema]
            table = table.cast(pa.schema(fields))
        labels = [name for name in ("variant", "T", "seed") if name in table.column_names]
        return cls(
            run=directory.name,
            variant=config.variant,
            recursions=config.recursions,
            seed=config.seed,
            settings=config.flat(),
            costs={key: provenance[key] for key in COSTS},
            evaluation=table.drop_columns(labels),
        )


def errors_table(runs: Sequence[Tested], study: str) -> pd.DataFrame:
    """The test errors of all runs below each other, labelled; see `energylab.study.load_results`."""
    if not runs:
        return pd.DataFrame(columns=[*_COLUMNS, *COSTS]).astype({"T": "Int64"})
    rows = np.repeat(np.arange(len(runs)), [run.evaluation.num_rows for run in runs])
    evaluation = pa.concat_tables([run.evaluation for run in runs], promote_options="permissive").to_pandas()
    of_run = {
        "study": pd.Series([study] * len(runs), dtype="str"),
        "run": pd.Series([run.run for run in runs], dtype="str"),
        "variant": pd.Series([run.variant for run in runs], dtype="str"),
        "T": pd.Series(pd.array([run.recursions for run in runs], dtype="Int64")),
        "seed": pd.Series([run.seed for run in runs], dtype="int64"),
        **{key: _column([run.costs[key] for run in runs]) for key in COSTS},
    }
    first = runs[0].settings
    for key in first:
        values = [run.settings[key] for run in runs]
        # the number of steps even if it does not vary: errors after trainings of other lengths are not comparable
        if key == "steps" or any(value != first[key] for value in values):
            of_run[key] = _column(
                [", ".join(map(str, value)) if isinstance(value, list) else value for value in values]
            )
    names = dict.fromkeys([*_COLUMNS, *evaluation, *of_run])
    labels = pd.DataFrame(of_run).take(rows).reset_index(drop=True)
    return pd.concat([labels, evaluation], axis=1).loc[:, list(names)]


def _column(values: list[Any]) -> pd.Series:
    """Values of one kind as that kind; None beside a number stays None."""
    kinds = {type(value) for value in values}
    return pd.Series(values) if len(kinds) == 1 or kinds == {int, float} else pd.Series(values, dtype=object)


class TestedRuns:
    """The index of what `errors_table` needs: one file for all runs, which is believed as `energylab.study.index` says."""

    def __init__(self, folder: Path):
        self._path = folder / ".index" / "errors"
        self._known: dict[str, tuple[str, dict[str, Any], int, int]] = {}
        self._kept: list[tuple[str, Tested]] = []
        self._new = 0
        content = read_sealed(self._path)
        if content is not None:
            (size,) = struct.unpack_from("<Q", content)
            start = 0
            for mark, facts, rows in json.loads(content[8 : 8 + size]):
                self._known[facts["run"]] = (mark, facts, start, rows)
                start += rows
            self._table = pq.read_table(pa.BufferReader(content[8 + size :]))

    def get(self, run: str, mark: str | None) -> Tested | None:
        known = self._known.get(run)
        if mark is None or known is None or known[0] != mark:
            return None
        _, facts, start, rows = known
        tested = Tested(**facts, evaluation=self._table.slice(start, rows))
        self._kept.append((mark, tested))
        return tested

    def put(self, mark: str | None, tested: Tested) -> None:
        if mark is not None:
            self._kept.append((mark, tested))
            self._new += 1

    def save(self) -> None:
        """Write what was got and put, if that saves anything."""
        if self._new < WORTHWHILE:
            return
        facts = []
        for mark, tested in self._kept:
            values = {field.name: getattr(tested, field.name) for field in fields(tested) if field.name != "evaluation"}
            facts.append((mark, values, tested.evaluation.num_rows))
        head = json.dumps(facts, separators=(",", ":")).encode()
        body = io.BytesIO()
        table = pa.concat_tables([tested.evaluation for _, tested in self._kept], promote_options="permissive")
        pq.write_table(table, body, compression="zstd")
        write_sealed(self._path, struct.pack("<Q", len(head)) + head + body.getvalue())
