import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import tiny_config, train

from energylab.study import claim as claim_module
from energylab.study.claim import CLAIM, STALE_AFTER, Claim, Claimed, OwnershipLost, living_owner


def write_claim(directory: Path, age: float = 0.0, **owner) -> Path:
    path = directory / CLAIM
    path.write_text(json.dumps(owner))
    os.utime(path, (time.time() - age,) * 2)
    return path


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    with Claim(tmp_path):
        assert living_owner(tmp_path) == f"process {os.getpid()}"
        with pytest.raises(Claimed, match=str(os.getpid())), Claim(tmp_path):
            pytest.fail("two owners")
        assert (tmp_path / CLAIM).exists()
    assert list(tmp_path.iterdir()) == []
    assert living_owner(tmp_path) is None


def test_a_dead_owner_is_replaced_at_once(tmp_path: Path) -> None:
    with Claim(tmp_path):
        owner = json.loads((tmp_path / CLAIM).read_text())
    write_claim(tmp_path, **{**owner, "pid": dead_process()})
    with Claim(tmp_path):
        assert living_owner(tmp_path) == f"process {os.getpid()}"


def test_a_process_with_the_number_of_a_dead_one_is_not_the_owner(tmp_path: Path) -> None:
    if claim_module._born(os.getpid()) is None:
        pytest.skip("this system does not tell when a process started")
    with Claim(tmp_path):
        owner = json.loads((tmp_path / CLAIM).read_text())
    write_claim(tmp_path, **{**owner, "born": "1"})
    assert living_owner(tmp_path) is None


@pytest.mark.parametrize(("age", "lives"), [(0.0, True), (STALE_AFTER + 60, False)])
def test_another_machine_is_believed_while_it_gives_signs_of_life(tmp_path: Path, age: float, lives: bool) -> None:
    write_claim(tmp_path, age, token="a", pid=1, host="elsewhere.invalid")
    assert (living_owner(tmp_path) == "process 1 on elsewhere.invalid") == lives
    if lives:
        with pytest.raises(Claimed), Claim(tmp_path):
            pytest.fail("two owners")
    else:
        with Claim(tmp_path):
            pass


def test_signs_of_life_are_given(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(claim_module, "HEARTBEAT", 0.01)
    with Claim(tmp_path):
        path = tmp_path / CLAIM
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


def test_a_lost_claim_is_noticed_and_left_alone(tmp_path: Path) -> None:
    with Claim(tmp_path) as claim:
        write_claim(tmp_path, token="another", pid=1, host="elsewhere.invalid")
        with pytest.raises(OwnershipLost):
            claim.check()
    assert json.loads((tmp_path / CLAIM).read_text())["token"] == "another"


def test_a_claimed_run_is_left_to_its_owner(tmp_path: Path) -> None:
    config = tiny_config()
    (tmp_path / config.name).mkdir()
    write_claim(tmp_path / config.name, token="another", pid=1, host="elsewhere.invalid")
    outcome = train(config, tmp_path)
    assert outcome.state == "claimed"
    assert "elsewhere.invalid" in outcome.sentence
    assert [path.name for path in (tmp_path / config.name).iterdir()] == [CLAIM]


def test_a_run_that_was_taken_over_stops_before_it_writes(tmp_path: Path) -> None:
    config = tiny_config()
    directory = tmp_path / config.name

    def take_over(update) -> None:
        if update.step == 0:
            write_claim(directory, token="another", pid=1, host="elsewhere.invalid")

    outcome = train(config, tmp_path, report=take_over)
    assert outcome.state == "claimed"
    assert not (directory / "provenance.json").exists()
