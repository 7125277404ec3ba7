"""Five hundred damaged run directories: each is named, nothing crashes, and no wrong number comes out."""

import io
import json
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from many_runs import copies
from tiny_runs import CODE, TABLES, tiny_config, train

from energylab.cli import main
from energylab.study import Study, load_results, load_run, store
from energylab.study.files import digest
from energylab.study.status import status

FIGURE = """
from matplotlib.figure import Figure

NEEDS = ("many",)

def draw(results):
    figure = Figure()
    figure.subplots().plot(results.errors["seed"], results.errors["excess_mse"])
    return figure
"""

SOUND = 10
FINISHED = (store.CONFIG, *TABLES, store.WEIGHTS, store.STATE, store.PROVENANCE, store.PROGRESS)


def truncate(path: Path, other: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(1, path.stat().st_size - 1)])


def flip(path: Path, other: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def empty(path: Path, other: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def swap(path: Path, other: Path, chance: random.Random) -> None:
    """The file of another run."""
    shutil.copyfile(other, path)


DAMAGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (truncate, flip, empty, swap)


def same_file(name: str, first: bytes, second: bytes) -> bool:
    """Whether two contents say the same: a flipped bit may only change how a number or a space is written."""
    return first == second or (name.endswith(".json") and said(first) == said(second))


def said(content: bytes) -> object:
    try:
        return json.loads(content.decode())
    except ValueError:
        return content


def damage_all(folder: Path, names: list[str], seed: int) -> dict[str, str]:
    """Damage one file of each run; which one, by run."""
    chance = random.Random(seed)
    originals = {name: {path.name: path.read_bytes() for path in (folder / name).iterdir()} for name in names}
    done = {}
    for number, name in enumerate(names):
        file = FINISHED[number % len(FINISHED)]
        damage = DAMAGES[number // len(FINISHED) % len(DAMAGES)]
        path = folder / name / file
        other = folder.parent / "other.file"
        other.write_bytes(originals[names[number - len(FINISHED)]][file])
        while True:
            damage(path, other, chance)
            if not same_file(file, path.read_bytes(), originals[name][file]):
                break
            # such as an equal weights file of the other run: swapped, yet the same
            damage = flip
            path.write_bytes(originals[name][file])
        done[name] = file
    return done


@pytest.mark.parametrize(
    ("number", "seed"), [(100, 0), *(pytest.param(500, seed, marks=pytest.mark.slow) for seed in range(3))]
)
def test_damaged_runs_are_named_and_give_no_number(
    finished: Path, tmp_path: Path, monkeypatch, capsys, number: int, seed: int
) -> None:
    folder = tmp_path / "runs/many"
    names = copies(finished / tiny_config().name, folder, range(number + SOUND))
    expected = load_results(folder)
    damaged = damage_all(folder, names[SOUND:], seed)
    # a damaged progress.json is named too, but the run's results are sound
    sound = [name for name in names if damaged.get(name) in (None, store.PROGRESS)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors = load_results(folder)
    pd.testing.assert_frame_equal(
        errors, expected[expected["run"].isin(sound)].reset_index(drop=True), check_exact=True
    )
    left_out = [re.search(r"damaged run, ([^:]+): ", str(warning.message))[1] for warning in caught]
    assert sorted(left_out) == sorted(set(names) - set(sound))

    found = {run.run: run for run in status(folder, CODE).runs}
    assert list(found) == names
    for name, file in damaged.items():
        assert file in found[name].sentence, found[name]
        assert found[name].state == ("finished" if file == store.PROGRESS else "damaged")
        if file == store.PROGRESS:
            assert found[name].loss is None
    for name in names[:SOUND]:
        assert found[name].state == "finished"

    monkeypatch.chdir(tmp_path)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/error.py").write_text(FIGURE)
    (tmp_path / "studies/results").mkdir(parents=True)
    assert main(["figures", "--study", "many"]) == 1
    assert f"{len(sound)} of {len(names)} runs are finished" in capsys.readouterr().err
    folder.rename(tmp_path / "studies/results/many")
    assert main(["figures", "--study", "many"]) == 0
    said = capsys.readouterr().err
    assert all(name in said for name in set(names) - set(sound))
    for name in random.Random(seed).sample(sorted(set(names) - set(sound)), 5):
        with pytest.raises(ValueError, match=name):
            load_run(tmp_path / "studies/results/many" / name)


@pytest.mark.parametrize("file", [store.STATE, store.PREVIOUS_STATE, store.CONFIG, store.PROGRESS])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_unfinished_run_is_named(tmp_path: Path, stop_after, damage, file: str) -> None:
    configs = tiny_config(), tiny_config(seed=1)
    for config in configs:
        train(config, tmp_path, should_stop=stop_after(12))
    victim, other = (tmp_path / config.name for config in configs)
    if file == store.PREVIOUS_STATE:  # looked at where the newest is damaged too, and not before
        empty(victim / store.STATE, other, random.Random())
    original = (victim / file).read_bytes()
    for seed in range(3):
        (victim / file).write_bytes(original)
        damage(victim / file, other / file, random.Random(seed))
        run = next(run for run in status(tmp_path, CODE).runs if run.run == victim.name)
        if file not in run.sentence:  # what was changed says nothing: padding, or how often a state is saved
            assert damage is flip
            assert same_content(file, (victim / file).read_bytes(), original)
        if file == store.PREVIOUS_STATE:
            assert run.state == "damaged" or damage is flip


def same_content(file: str, first: bytes, second: bytes) -> bool:
    if file == store.CONFIG:
        keys = ("device", "log_every", "save_every")
        for data in (loaded := [said(first), said(second)]):
            for key in keys:
                data["training"].pop(key, None)
        return loaded[0] == loaded[1]
    if file.endswith(".json"):
        return said(first) == said(second)
    return plain(torch.load(io.BytesIO(first), weights_only=True)) == plain(
        torch.load(io.BytesIO(second), weights_only=True)
    )


def plain(value: object) -> object:
    """A state as lists and numbers, which compare exactly."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def test_a_damaged_study_file_is_named(study_folder: Path, capsys) -> None:

    study = Study("tiny", [tiny_config(), tiny_config(seed=1), tiny_config(variant="Llama"), tiny_config(seed=2)])
    store.write_study(study_folder, study, {})
    assert [run.state for run in status(study_folder, CODE).runs] == [*["finished"] * 3, "waiting"]
    path = study_folder / store.STUDY
    sound = path.read_text()
    for text in ("", sound[:-40], sound.replace("seed1", "seed3"), sound.replace('"energylab"', '"energylbb"')):
        path.write_text(text)
        found = status(study_folder, CODE)
        assert found.damage.startswith("study.json ")
        assert len(found.runs) == 3
        assert not found.sound
        with pytest.warns(UserWarning, match=r"study\.json"):
            assert load_results(study_folder)["run"].nunique() == 3
        assert main(["status", "tiny", "--results", str(study_folder.parent)]) == 1
        assert "study.json " in capsys.readouterr().out


def test_names_in_files_stay_in_their_folder(study_folder: Path, tmp_path: Path) -> None:

    (tmp_path / "secret").mkdir()
    data = {"schema": 1, "name": "tiny", "note": "", "runs": ["../secret"], "knobs": {}}
    (study_folder / store.STUDY).write_text(json.dumps(data))
    assert "names '../secret', which is no run" in status(study_folder, CODE).damage
    path = study_folder / tiny_config().name / store.PROVENANCE
    facts = json.loads(path.read_text())
    del facts["sha256"]
    facts["files"]["../secret"] = {"sha256": "", "bytes": 0}
    path.write_text(json.dumps({**facts, "sha256": digest(facts)}))
    with pytest.raises(store.Damaged, match="no list of the run's files"):
        store.check_run(path.parent)


class _Attack:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [False, True])
def test_nothing_in_a_run_directory_is_executed(study_folder: Path, tmp_path: Path, stop_after, zipped: bool) -> None:

    config = tiny_config(seed=5)
    train(config, study_folder, should_stop=stop_after(3))
    directory, mark = study_folder / config.name, tmp_path / "executed"
    for path in directory.iterdir():
        if zipped:
            torch.save({"run": config.name, "schema": 1, "trainer": _Attack(mark)}, path)
        else:
            path.write_bytes(pickle.dumps(_Attack(mark)))
    for path in (study_folder / tiny_config().name).iterdir():
        if path.name != store.PROVENANCE:
            path.write_bytes(pickle.dumps(_Attack(mark)))
    with pytest.warns(UserWarning, match="damaged"):
        load_results(study_folder)
    status(study_folder, CODE)
    for name in (config.name, tiny_config().name):
        with pytest.raises(ValueError, match=r"schema|JSON|bytes|not finished"):
            load_run(study_folder / name)
    with pytest.raises(store.Damaged):
        store.check_states(directory)
    assert train(config, study_folder).state == "damaged"
    assert not mark.exists()
