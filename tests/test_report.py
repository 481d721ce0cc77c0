"""The report: every documented key and no other, what each says, and a table that fits a terminal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ridethrough.config import JobConfig, PodConfig
from ridethrough.errors import UsageError
from ridethrough.ledger import BUCKETS, RECOVERY
from ridethrough.report import SCHEMA, VERSION, build_report, format_report, write_report
from ridethrough.run import Run

from tests.logs import Logs
from tests.test_lives import out_of_step

ABOUT = {"versions": {"torch": "2.13.0"}, "machine": {"cores": 2}, "command": ["ridethrough", "run"]}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", "sync", 2, JobConfig(steps=6, checkpoint_every=2), (), ABOUT)


@pytest.fixture
def logs(run: Run) -> Logs:
    return Logs(run.events)


def save(logs: Logs, t: float, step: int, stalls: tuple[float, ...], commit: bool = True) -> None:
    for rank, stall in enumerate(stalls):
        logs.phase(rank, t, "checkpoint_stall", step)
        logs.rank(rank, t + stall, "save", step, stall_s=stall, bytes=1000 + rank)
    if commit:
        logs.rank(0, t + min(stalls), "commit", step, durable_s=min(stalls), bytes=2500, save_id=f"s{step}")


def both(logs: Logs, t: float, first: int, last: int) -> float:
    for step in range(first, last + 1):
        for rank in (0, 1):
            logs.step(rank, t, t + 1, step)
        t += 1
    return t


def killed_and_resumed(logs: Logs) -> None:
    """Steps 1 to 3, rank 1 killed in step 4, resumed from step 2 after a pause of 5, finished after 6."""
    logs.launch(0, ranks=2)
    both(logs, 1, 1, 2)
    save(logs, 3, 2, (0.5, 0.25))
    t = both(logs, 4, 3, 3)
    logs.fault(1, t, "kill", 4)
    logs.launcher(6, "exit", 1, code=-9)
    logs.lost(detected=6, rank=1, aborted=7, end=7, outcome="failed")
    logs.launch(12, ranks=2)
    for rank in (0, 1):
        logs.phase(rank, 14, "restore")
        logs.rank(rank, 15, "restored", 2, skipped=[])
    t = both(logs, 15, 3, 4)
    save(logs, t, 4, (0.25, 1.0))
    t = both(logs, t + 1, 5, 6)
    for rank in (0, 1):
        logs.phase(rank, t, "shutdown")
        weights, state = ("a" * 64, "b" * 64) if rank == 0 else (None, None)
        logs.rank(rank, t + 1, "end", steps=6, weights_sha256=weights, state_sha256=state)
    logs.launcher(t + 1, "launch_end", outcome="finished")


def paths(value: Any, at: str = "") -> Iterator[str]:
    """Every key in a report, as `SCHEMA` writes them."""
    if isinstance(value, list):
        for entry in value:
            yield from paths(entry, f"{at}[]")
    elif isinstance(value, dict) and at not in ("config", "launcher", "versions", "machine"):
        for name, entry in value.items():
            path = f"{at}.*" if at == "losses" else f"{at}.{name}".lstrip(".")
            yield path
            yield from paths(entry, path)


def test_every_key_is_documented_and_every_documented_key_is_there(run: Run, logs: Logs) -> None:
    killed_and_resumed(logs)
    report = build_report(run)
    assert set(paths(report)) == set(SCHEMA)
    assert report["launcher"] == {"launcher": "direct"}
    assert report["schema"] == VERSION == 1
    assert all(meaning.strip() for meaning in SCHEMA.values())


def test_a_run_that_was_killed_and_resumed(run: Run, logs: Logs) -> None:
    killed_and_resumed(logs)
    report = build_report(run)
    assert {name: report[name] for name in ("run", "rung", "ranks", "steps", "finished", "launches")} == {
        "run": run.id,
        "rung": "sync",
        "ranks": 2,
        "steps": 6,
        "finished": True,
        "launches": 2,
    }
    assert report["config"] == run.config.to_dict()
    assert report["versions"] == {"torch": "2.13.0"} and report["machine"] == {"cores": 2}
    assert report["weights_sha256"] == "a" * 64 and report["state_sha256"] == "b" * 64
    assert list(report["losses"].items()) == [(str(step), 10.0 / step) for step in range(1, 7)]
    assert report["recompute_mismatch"] == []
    assert report["wall_s"] == 7 + 9
    assert {name: s for name, s in report["buckets_s"].items() if s} == {
        "useful": 12,
        "checkpoint_stall": 4,
        "startup": 2,
        "detect": 2,
        "abort": 2,
        "restart": 4,
        "restore": 2,
        "recompute": 2,
        "shutdown": 2,
    }
    assert sum(report["buckets_s"].values()) == report["wall_s"] * report["ranks"]
    assert report["goodput"] == 12 / 32
    assert report["checkpoints"] == [
        {"step": 2, "stall_s": 0.5, "durable_s": 0.25, "bytes": 2500, "committed": True, "error": None},
        {"step": 4, "stall_s": 1.0, "durable_s": 0.25, "bytes": 2500, "committed": True, "error": None},
    ]
    assert report["faults"] == [
        {
            "kind": "kill",
            "rank": 1,
            "step": 4,
            "tier": "relaunch",
            "phases_s": {
                "detect": 1,
                "abort": 1,
                "restart": 2,
                "rendezvous": 0,
                "build": 0,
                "restore": 1,
                "recompute": 2,
            },
            "mttr_s": 7,
            "between_launches_s": 5,
            "lost_steps": 1,
            "first_cause": "rank 1 was killed by SIGKILL in step 4 (injected kill@4:1)",
            "spread": [
                {
                    "after_s": 0,
                    "rank": 1,
                    "pod": None,
                    "how": "injected",
                    "text": "rank 1 was killed by SIGKILL in step 4 (injected kill@4:1)",
                }
            ],
            "wasted_rank_s": 2 * (1 + 1 + 2 + 1 + 1),  # but for step 4, the first new one
            "waits_s": {"backoff": 0, "assumed": 0},
        }
    ]


def test_each_attempt_to_save_is_an_entry(run: Run, logs: Logs) -> None:
    logs.launch(0, ranks=2)
    both(logs, 1, 1, 2)
    save(logs, 3, 2, (0.5, 0.5), commit=False)
    for rank in (0, 1):
        logs.rank(rank, 3.75, "save_failed", 2, error="step 2: rank 1: No space left", consecutive=1)
    both(logs, 4, 3, 4)
    save(logs, 6, 4, (0.25, 0.25))
    both(logs, 7, 5, 6)
    for rank in (0, 1):
        logs.phase(rank, 9, "checkpoint_stall", 6)
    logs.fault(0, 9.5, "kill", 6, source="outside")  # in the middle of the save
    logs.lost(detected=10, rank=0, aborted=10, end=10, outcome="failed")
    logs.launch(20, ranks=2)
    both(logs, 21, 5, 6)
    save(logs, 23, 6, (0.75, 0.5))
    rows = [tuple(row.values()) for row in build_report(run)["checkpoints"]]
    assert rows == [
        (2, 0.5, None, 2001, False, "step 2: rank 1: No space left"),
        (4, 0.25, 0.25, 2500, True, None),
        (6, 0.5, None, 0, False, None),
        (6, 0.75, 0.5, 2500, True, None),
    ]


def test_a_step_that_gives_another_loss_the_second_time_is_reported(run: Run, logs: Logs) -> None:
    for start, losses in ((0, (4.0, 3.0, 2.0)), (10, (4.0, math.nextafter(3.0, 4), 2.0))):
        logs.launch(start, ranks=2)
        for rank in (0, 1):
            for step, loss in enumerate(losses, 1):
                logs.step(rank, start + step, start + step + 1, step, loss)
        logs.launcher(start + 5, "launch_end", outcome="failed")
    report = build_report(run)
    assert report["recompute_mismatch"] == [2]
    assert report["losses"]["2"] == math.nextafter(3.0, 4)
    assert "NOT REPEATABLE: run again, these steps gave another loss: 2" in format_report(report)


def test_ranks_that_disagree_about_a_loss_are_reported(run: Run, logs: Logs) -> None:
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        logs.step(rank, 0, 1, 1, loss=2.0 + rank)
    assert build_report(run)["recompute_mismatch"] == [1]


def test_another_world_size_may_round_differently(run: Run, logs: Logs) -> None:
    for start, ranks, loss in ((0, 2, 3.0), (10, 1, math.nextafter(3.0, 4))):
        logs.launch(start, ranks)
        for rank in range(ranks):
            logs.step(rank, start, start + 1, 1, loss)
    report = build_report(run)
    assert report["recompute_mismatch"] == []
    assert report["losses"] == {"1": math.nextafter(3.0, 4)}
    assert report["ranks"] == 2 and report["wall_s"] == 2
    assert sum(report["buckets_s"].values()) == 3  # one launch of 2 ranks, one of 1


def test_a_loss_that_is_not_finite_is_null_and_no_mismatch(run: Run, logs: Logs) -> None:
    for start in (0, 10):
        logs.launch(start, ranks=1)
        logs.step(0, start, start + 1, 1, loss=math.nan)
    report = build_report(run)
    assert report["losses"] == {"1": None} and report["recompute_mismatch"] == []
    json.dumps(report, allow_nan=False)
    assert "loss not finite at step 1" in format_report(report)


def test_steps_and_losses_are_those_that_all_ranks_finished(run: Run, logs: Logs) -> None:
    logs.launch(0, ranks=2)
    both(logs, 0, 1, 2)
    logs.step(0, 2, 3, 3)
    report = build_report(run)
    assert report["steps"] == 2 and list(report["losses"]) == ["1", "2"]
    assert not report["finished"] and report["weights_sha256"] is None


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "new", "sync", 1, JobConfig(), (), {})
    report = build_report(run)
    assert (report["steps"], report["wall_s"], report["goodput"], report["launches"]) == (0, 0, 0, 0)
    assert (report["versions"], report["machine"]) == ({}, {})
    assert not report["finished"]
    text = format_report(report)
    assert "sync on 1 rank: 0 of 60 steps, not finished, 0 launches" in text
    assert "checkpoints" not in text and "faults" not in text


def test_write_report_writes_what_it_returns(run: Run, logs: Logs) -> None:
    killed_and_resumed(logs)
    report = write_report(run)
    file = run.path / "report.json"
    assert json.loads(file.read_text()) == report == build_report(run)
    logs.generation = 1
    logs.rank(0, 40, "phase", phase="dreaming")
    with pytest.raises(UsageError, match="dreaming"):
        write_report(run)
    assert json.loads(file.read_text()) == report, "a failed report must not touch the earlier one"
    assert sorted(path.name for path in run.path.iterdir()) == ["events", "report.json", "run.json"]


def test_a_garbage_line_is_an_error_that_names_it(run: Run, logs: Logs) -> None:
    killed_and_resumed(logs)
    file = sorted(run.events.iterdir())[0]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:1], "{}\n", *lines[1:]]))
    with pytest.raises(UsageError, match=f"{file}:2 is not an event: 't' is missing"):
        build_report(run)


def test_the_table(run: Run, logs: Logs) -> None:
    killed_and_resumed(logs)
    assert format_report(build_report(run)).splitlines() == [
        "sync on 2 ranks: 6 of 6 steps, finished, 2 launches",
        "wall clock 16.00 s, goodput 37.5%",
        "loss 1.6667 at step 6",
        f"weights {'a' * 64}",
        "",
        "time                  rank-seconds    share",
        "  useful                     12.00    37.5%",
        "  checkpoint_stall            4.00    12.5%",
        "  detect                      2.00     6.2%",
        "  abort                       2.00     6.2%",
        "  restart                     4.00    12.5%",
        "  restore                     2.00     6.2%",
        "  recompute                   2.00     6.2%",
        "  startup                     2.00     6.2%",
        "  shutdown                    2.00     6.2%",
        "  total                      32.00   100.0%",
        "",
        "checkpoints      stall s   durable s          MB",
        "  step 2           0.500       0.250       0.003",
        "  step 4           1.000       0.250       0.003",
        "",
        "faults",
        "  kill on rank 1 in step 4: relaunch, back in 7.00 s + 5.00 s between launches, 1 step lost",
        "    seconds: detect 1.00, abort 1.00, restart 2.00, restore 1.00, recompute 2.00",
        "    first cause: rank 1 was killed by SIGKILL in step 4 (injected kill@4:1)",
    ]


def out_of_step_report(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    """Of a run in pods: see `test_lives.out_of_step`."""
    config = PodConfig(policy="each", time_scale=0.1, **settings)
    run = Run.create(tmp_path / "pods", "sync", 2, JobConfig(steps=31), (), ABOUT, config)
    out_of_step(Logs(run.events))
    return build_report(run)


def test_a_run_in_pods_says_how_it_ran_and_how_a_fault_spread(tmp_path: Path) -> None:
    report = out_of_step_report(tmp_path)
    json.dumps(report, allow_nan=False)
    assert set(paths(report)) <= set(SCHEMA)
    assert (report["launches"], report["lives"], report["finished"]) == (1, 2, True)
    assert report["launcher"] == {**PodConfig(policy="each").to_dict(), "isolation": "namespaces"}
    assert report["wasted_rank_s"] == sum(report["buckets_s"].values()) - report["buckets_s"]["useful"]
    (fault,) = report["faults"]
    assert fault["waits_s"] == {"backoff": 3.25, "assumed": 0}
    assert [(sign["after_s"], sign["rank"], sign["pod"], sign["how"]) for sign in fault["spread"][:3]] == [
        (0, 1, 1, "injected"),
        (0.25, 0, 0, "connection"),
        (0.25, None, 1, "pod_exit"),
    ]
    assert fault["spread"][0]["text"] == fault["first_cause"]


def test_the_table_of_a_run_in_pods(tmp_path: Path) -> None:
    report = out_of_step_report(tmp_path, assumed_s=15.0)
    report["faults"][0]["waits_s"]["assumed"] = 1.5
    lines = format_report(report, gpus=512).splitlines()
    assert lines[0] == "sync on 2 ranks: 31 of 31 steps, finished, 1 launch, 2 lives of the ranks"
    assert (
        lines[2]
        == "torchrun in 2 pods (namespaces), restart policy each, waits × 0.1, 15 s assumed for each "
        "new pod"
    )
    wasted = report["wasted_rank_s"]
    total = f"  wasted {wasted:.2f} rank-seconds; on 512 GPUs {wasted / 2 * 512 / 3600:,.2f} GPU-hours"
    assert lines[lines.index("faults") - 2] == total
    assert lines[lines.index("faults") + 1 :] == [
        "  pod on rank 1 in step 30: pods, back in 17.75 s, 1 step lost",
        "    seconds: detect 0.25, abort 0.25, restart 8.25, rendezvous 5.00, build 1.00, restore 1.00,",
        "      recompute 2.00",
        "    of which 3.25 s back-off (32 s × 0.1), 1.50 s assumed for new pods (15 s × 0.1)",
        "    first cause: rank 1 was killed with its pod 1 in step 30 (injected pod@30:1)",
        "      +0.25 s  rank 0 lost its connection to rank 1 in pod 1 in step 30: RuntimeError:",
        "                [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.244.0.11]:5123",
        "      +0.25 s  the container of pod 1 was killed by SIGKILL",
        "      +7.00 s  torchrun in pod 0 gave up: DistStoreError: wait timeout after 6000ms, keys:",
        "                /none/torchelastic/agent/0",
        "      +7.25 s  the container of pod 0 ended with code 1",
        "      +7.25 s  torchrun in pod 1 gave up: DistStoreError: wait timeout after 6000ms, keys:",
        "                /none/torchelastic/agent/0",
        "      +7.50 s  the container of pod 1 ended with code 1",
        "    wasted 33.50 rank-seconds; on 512 GPUs 2.38 GPU-hours",
    ]
    assert "GPU" not in format_report(report)


def test_a_spread_over_many_ranks_is_cut_short(tmp_path: Path) -> None:
    report = out_of_step_report(tmp_path)
    fault = report["faults"][0]
    fault["spread"] = [{**fault["spread"][1], "text": f"rank {rank} noticed"} for rank in range(64)]
    text = format_report(report)
    assert "rank 11 noticed" in text and "rank 12 noticed" not in text
    assert "(52 more are in report.json)" in text


def test_the_table_fits_100_columns_whatever_happened(run: Run, logs: Logs) -> None:
    logs.launch(0, ranks=2)
    for step in range(1, 31):
        logs.step(0, step, step + 0.5, step)
        logs.phase(0, step + 0.5, "checkpoint_stall", step)
        logs.rank(0, step + 0.75, "save_failed", step, error="no space " * 40, consecutive=1)
    logs.rank(1, 40, "error", type="ValueError", message="x" * 500, traceback="")
    logs.lost(detected=1e6, rank=1, aborted=2e6, end=2e6, outcome="failed")
    text = format_report(build_report(run))
    assert max(map(len, text.splitlines())) <= 100
    assert "(the first 18 are in report.json)" in text
    assert "step 18 " not in text and "step 19 " in text and "not committed" in text
    assert "x" * 80 in text and "not recovered" in text


def test_every_bucket_and_part_is_described() -> None:
    assert {name.removeprefix("buckets_s.") for name in SCHEMA if name.startswith("buckets_s.")} == set(
        BUCKETS
    )
    prefix = "faults[].phases_s."
    assert [name.removeprefix(prefix) for name in SCHEMA if name.startswith(prefix)] == list(RECOVERY)


def test_the_report_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, ridethrough.report; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
