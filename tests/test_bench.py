"""The benchmark measures what it says, on real ranks, and refuses to report what it should not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ridethrough.bench import stall
from ridethrough.errors import RunError
from ridethrough.events import Event


@pytest.mark.ranks
def test_stall_measures_every_arm_against_its_floor(tmp_path: Path) -> None:
    file, folder = tmp_path / "stall.json", tmp_path / "disk"
    command = [sys.executable, "-m", "ridethrough.bench", "stall", "--size", "tiny", "--rounds", "2"]
    options = ["--repetitions", "2", "--dir", str(folder), "--json", str(file)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["ranks"] == 2 and result["machine"]["cores"] >= 1
    assert [sample["arm"] for sample in result["samples"]] == (["raw_fsync"] * 2 + ["sync"] * 2) * 2
    for arm, values in result["arms"].items():
        assert 0 < values["seconds"]["min"] <= values["seconds"]["median"] <= values["seconds"]["max"], arm
    assert result["bytes_a_rank"] > 2_000_000
    assert result["sync_over_memcpy"] > 1  # a save copies every byte at least once
    assert not list(folder.iterdir())
    assert "sync" in done.stdout


def test_an_arm_that_is_not_isolated_is_not_reported() -> None:
    events = [
        Event(0.0, "isolation", rank=0, attributes={"arm": "sync", "isolated": True}),
        Event(0.0, "isolation", rank=1, attributes={"arm": "sync", "isolated": False}),
    ]
    with pytest.raises(RunError, match="not isolated, so not reported: sync"):
        stall._summary(events, ranks=2)


def test_a_sample_that_a_rank_did_not_take_is_an_error() -> None:
    sample = {
        "arm": "sync",
        "number": 0,
        "seconds": 1.0,
        "cpu_s": 1.0,
        "floor_s": 1.0,
        "floor_cpu_s": 1.0,
        "bytes": 1,
    }
    with pytest.raises(RunError, match="sample 0 of sync was taken by 1 of 2 ranks"):
        stall._summary([Event(0.0, "sample", rank=0, attributes=sample)], ranks=2)


def test_every_byte_is_written(tmp_path: Path) -> None:
    parts = [memoryview(b"one"), memoryview(b""), memoryview(b"two")]
    stall.write_and_flush(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b"onetwo"
