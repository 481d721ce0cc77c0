"""The laws, end to end: a run with any fault ends with the same losses and the same bytes as one without."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ridethrough.checkpoint import store
from ridethrough.events import read_events
from ridethrough.launch import run_rung
from ridethrough.report import write_report
from ridethrough.run import Run

pytestmark = pytest.mark.ranks


def cli(*arguments: object, code: int = 0, prefix: tuple[str, ...] = ()) -> str:
    """Run the command line; it must end with `code`. Returns all that it printed."""
    command = [*prefix, sys.executable, "-m", "ridethrough", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def same_result(report: dict[str, Any], reference: dict[str, Any]) -> None:
    assert report["finished"] and report["recompute_mismatch"] == []
    assert report["losses"] == reference["losses"] and len(report["losses"]) == reference["steps"]
    assert report["weights_sha256"] == reference["weights_sha256"] is not None
    assert report["state_sha256"] == reference["state_sha256"]


def account_is_closed(report: dict[str, Any]) -> None:
    """Every rank-second is in a bucket, and what was done twice is nobody's progress."""
    assert sum(report["buckets_s"].values()) == pytest.approx(report["wall_s"] * report["ranks"], rel=0.01)
    assert 0 < report["goodput"] < 1
    for fault in report["faults"]:
        assert sum(fault["phases_s"].values()) == pytest.approx(fault["mttr_s"], rel=0.02)
        assert fault["phases_s"]["recompute"] > 0  # at least the first new step is waited for


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sixty steps without a fault."""
    out = tmp_path_factory.mktemp("reference") / "run"
    report = run_rung("sync", out=out, size="tiny", steps=60, ranks=2, quiet=True)
    account_is_closed(report)
    assert report["buckets_s"]["recompute"] == 0
    return report


@pytest.mark.parametrize(
    "faults",
    [["kill@37:1"], ["kill@37:0"], ["exception@5:1", "exit@37:0", "kill@59:1"]],
    ids=["rank-1", "rank-0", "three-times"],
)
def test_a_run_that_was_resumed_equals_one_that_never_stopped(
    tmp_path: Path, faults: list[str], reference: dict[str, Any]
) -> None:
    """`ridethrough run … --fault …`, then `--resume` until done."""
    flags = [flag for fault in faults for flag in ("--fault", fault)]
    out = tmp_path / "B"
    cli("run", "sync", "--size", "tiny", "--steps", 60, "--ranks", 2, *flags, "--out", out, code=1)
    for _ in faults[1:]:
        cli("run", "sync", "--resume", "--out", out, code=1)
    cli("run", "sync", "--resume", "--out", out)
    report = json.loads((out / "report.json").read_text())
    same_result(report, reference)
    account_is_closed(report)
    assert [f"{f['kind']}@{f['step']}:{f['rank']}" for f in report["faults"]] == faults
    assert all(id in f["first_cause"] for f, id in zip(report["faults"], faults, strict=True))
    assert [f["lost_steps"] for f in report["faults"]] == [
        (int(fault.partition("@")[2].partition(":")[0]) - 1) % 10 for fault in faults
    ]
    assert report["launches"] == len(faults) + 1


def test_killed_while_saving_at_ten_random_instants(tmp_path: Path, reference: dict[str, Any]) -> None:
    """One run, lost ten times in the middle of a save, on either rank; it ends as if nothing had been."""
    seed = int.from_bytes(os.urandom(4), "big")
    chance = random.Random(seed)
    out = tmp_path / "run"
    flags = ("--steps", 60, "--ranks", 2, "--checkpoint-every", 3, "--resume", "--quiet", "--out", out)
    for life in range(10):
        process = subprocess.Popen([sys.executable, "-m", "ridethrough", "run", "sync", *map(str, flags)])
        rank, pids = wait_for_save(out, life, rank=chance.randrange(2))
        time.sleep(chance.uniform(0, 0.06))
        os.kill(pids[rank], signal.SIGKILL)
        assert process.wait(60) == 1, f"seed {seed}, life {life}"
        good = [entry for entry in store.scan(out / "checkpoints") if entry.status == "good"]
        assert good and not [e for e in store.scan(out / "checkpoints") if e.status == "damaged"], (
            f"seed {seed}"
        )
    report = run_rung("sync", out=out, resume=True, quiet=True)
    same_result(report, reference)
    account_is_closed(report)


def wait_for_save(out: Path, generation: int, rank: int) -> tuple[int, dict[int, int]]:
    """Until that rank is in the second save of that generation, so that each life makes some progress."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        events = (
            [e for e in read_events(out / "events") if e.generation == generation] if out.exists() else []
        )
        saves = [
            e for e in events if e.what == "phase" and e["phase"] == "checkpoint_stall" and e.rank == rank
        ]
        if len(saves) >= 2:
            return rank, {e.rank: e["pid"] for e in events if e.what == "spawn"}
        time.sleep(0.005)
    raise TimeoutError(f"rank {rank} made no second save in generation {generation} within 60 s")


def test_resuming_on_another_number_of_ranks_goes_on_with_the_same_samples(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    """2 → 1 → 4 ranks: other sums, so not the same bytes, but the same steps and nearly the same losses."""
    out = tmp_path / "run"
    for fault, ranks in (("kill@21:0", 2), ("kill@41:0", 1)):
        cli("run", "sync", "--fault", fault, "--ranks", ranks, "--resume", "--out", out, code=1)
    report = run_rung("sync", out=out, ranks=4, resume=True, quiet=True)
    assert report["finished"] and report["losses"].keys() == reference["losses"].keys()
    for step, loss in reference["losses"].items():
        assert report["losses"][step] == pytest.approx(loss, rel=1e-3), step


def test_torchrun_runs_the_same_rung(tmp_path: Path, reference: dict[str, Any]) -> None:
    """The rung needs no launcher of ours: a rank is told what it is by the usual environment."""
    out = tmp_path / "run"
    cli("run", "sync", "--steps", 60, "--fault", "exit@2:0", "--out", out, code=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "ridethrough.rungs.sync_checkpoint", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = write_report(Run.open(out))
    same_result(report, reference)
    account_is_closed(report)
    assert (report["launches"], report["device"], len(report["faults"])) == (2, "cpu", 1)


# Permissions bind root as well once it has given up the right to override them.
UNPRIVILEGED = (
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search",
    "--inh-caps=-dac_override,-dac_read_search",
)


@pytest.mark.skipif(
    os.geteuid() == 0 and not shutil.which("setpriv"), reason="root needs setpriv to be refused"
)
def test_files_and_folders_that_may_not_be_read_or_written(tmp_path: Path, reference: dict[str, Any]) -> None:
    out, prefix = tmp_path / "run", UNPRIVILEGED if os.geteuid() == 0 else ()
    cli("run", "sync", "--steps", 60, "--fault", "kill@37:1", "--out", out, code=1)
    shard = out / "checkpoints" / "step-00000030" / "__1_0.distcp"
    shard.chmod(0)
    assert f"{shard}: cannot be read: Permission denied" in cli(
        "checkpoint", "verify", out, code=1, prefix=prefix
    )

    (out / "checkpoints").chmod(0o555)
    printed = cli("run", "sync", "--resume", "--out", out, code=1, prefix=prefix)
    assert "__1_0.distcp: cannot be read: Permission denied" in printed  # passed over for step 20 ...
    assert (
        "cannot be made: Permission denied" in printed and "saving-00000030-" in printed
    )  # ... and on to 30

    (out / "checkpoints").chmod(0o755)
    assert "restored step 20" in cli("run", "sync", "--resume", "--out", out, prefix=prefix)
    same_result(json.loads((out / "report.json").read_text()), reference)
