"""Ten thousand stored runs: made from one that was trained, then listed and read.

    python tests/study/many_runs.py --runs 10000 --log docs/logs/many_runs.txt

writes how long `energylab status` and `load_results` take, without and with the index.
"""

import argparse
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
from tiny_runs import tiny_config, train

from energylab.study import load_results
from energylab.study.files import CONFIG, EVALUATION, PROGRESS, PROVENANCE, SCHEMA, STUDY, checksum, digest
from energylab.study.store import parquet, read_config


def copies(source: Path, folder: Path, seeds: Iterable[int]) -> list[str]:
    """Runs of other seeds, each with numbers of its own, as if they had been trained like the run at `source`."""
    config = read_config(source)
    facts = json.loads((source / PROVENANCE).read_text())
    evaluation = pd.read_parquet(source / EVALUATION)
    progress = json.loads((source / PROGRESS).read_text())
    kept = {path.name: path.read_bytes() for path in source.iterdir() if path.name in facts["files"]}
    names = []
    for seed in seeds:
        other = dataclasses.replace(config, seed=seed)
        contents = dict(kept)
        contents[CONFIG] = json.dumps({"schema": SCHEMA, **other.to_dict()}).encode()
        contents[EVALUATION] = parquet(evaluation.assign(seed=seed, excess_mse=evaluation["excess_mse"] + seed))
        files = {name: checksum(content) for name, content in contents.items()}
        contents[PROVENANCE] = sealed({**facts, "run": other.name, "files": files})
        contents[PROGRESS] = sealed({**progress, "run": other.name})
        directory = folder / other.name
        directory.mkdir(parents=True)
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        names.append(other.name)
    (folder / STUDY).write_bytes(
        sealed({"schema": SCHEMA, "energylab": "0", "name": "many", "note": "", "runs": names})
    )
    return names


def sealed(data: dict) -> bytes:
    data = {key: value for key, value in data.items() if key != "sha256"}
    return json.dumps({**data, "sha256": digest(data)}).encode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    lines = [f"{options.runs} stored runs; wall-clock and processor seconds; {os.cpu_count()} cores"]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        assert train(tiny_config(), root / "first").state == "finished"
        folder = root / "runs/many"
        copies(root / "first" / tiny_config().name, folder, range(options.runs))
        size = sum(path.stat().st_size for path in folder.rglob("*"))
        lines.append(
            f"{size / options.runs / 1000:.0f} kB a run, {sum(1 for _ in folder.rglob('*'))} files and folders"
        )
        time.sleep(3)  # what changed just now is not indexed

        def status() -> str:
            command = [sys.executable, "-m", "energylab", "status", "many"]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True)
            assert done.stdout.endswith(f"{options.runs} runs: {options.runs} finished\n"), (
                done.stdout[-300:] + done.stderr
            )
            return done.stdout

        tables = [timed("load_results, no index, every checksum", lambda: load_results(folder), lines)]
        tables.append(timed("load_results, index", lambda: load_results(folder), lines))
        pd.testing.assert_frame_equal(*tables, check_exact=True)
        texts = [timed("energylab status, no index, every checksum", status, lines)]
        texts.append(timed("energylab status, index", status, lines))
        assert texts[0] == texts[1]
        shutil.rmtree(folder / ".index")
        rows = len(tables[0])
    lines.append(f"{rows} rows of results, equal with and without the index")
    print(*lines, sep="\n")
    if options.log:
        options.log.write_text("\n".join(lines) + "\n")


def timed(what: str, call: Callable, lines: list[str]):
    def processor() -> float:
        parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(part.ru_utime + part.ru_stime for part in parts)

    started, used = time.perf_counter(), processor()
    result = call()
    lines.append(f"{what}: {time.perf_counter() - started:.1f} s, {processor() - used:.1f} s of processor time")
    print(lines[-1], flush=True)
    return result


if __name__ == "__main__":
    main()
