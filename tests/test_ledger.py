"""The account of time: exact on logs made by hand, and never more or less than wall clock × ranks on any."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ridethrough.errors import UsageError
from ridethrough.events import PHASES, Event, read_events
from ridethrough.ledger import BUCKETS, RECOVERY, Fault, Ledger

from tests.logs import EPOCH, Logs


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "events")


def buckets(ledger: Ledger) -> dict[str, float]:
    return {name: seconds for name, seconds in ledger.buckets_s.items() if seconds}


def phases(fault: Fault) -> dict[str, float]:
    return {name: seconds for name, seconds in fault.phases_s.items() if seconds}


def begin(logs: Logs, rank: int, t: float, restored: int = 0) -> float:
    """Start-up 4, rendezvous 2, build 3, restore 1."""
    for name, at in (("startup", t + 3), ("rendezvous", t + 4), ("build", t + 6), ("restore", t + 9)):
        logs.phase(rank, at, name)
    logs.rank(rank, t + 10, "restored", restored, skipped=[])
    return t + 10


def steps(logs: Logs, rank: int, t: float, first: int, last: int, each: float = 2) -> float:
    for step in range(first, last + 1):
        logs.step(rank, t, t + each, step)
        t += each
    return t


def finish(logs: Logs, rank: int, t: float) -> None:
    logs.phase(rank, t, "shutdown")
    logs.rank(rank, t + 1, "end", steps=0, weights_sha256=None, state_sha256=None)
    logs.launcher(t + 1.5, "exit", rank, code=0)


def check_partition(ledger: Ledger) -> None:
    """What holds for every ledger whatever was written: nothing counted twice, nothing left out."""
    launches = {launch.generation: launch for launch in ledger.launches}
    places = [(lane.generation, lane.rank) for lane in ledger.lanes]
    assert places == [(g, rank) for g, launch in launches.items() for rank in range(launch.ranks)]
    for lane in ledger.lanes:
        launch = launches[lane.generation]
        edges = [launch.start, *(span.end for span in lane.spans)]
        assert [span.start for span in lane.spans] == edges[:-1] and edges[-1] == launch.end
        assert all(span.seconds > 0 and span.bucket in BUCKETS for span in lane.spans)
        lives = {(lane.rank, life.generation) for life in launch.lives}
        assert {(span.rank, span.generation) for span in lane.spans} <= lives
    assert tuple(ledger.buckets_s) == BUCKETS
    total = sum((launch.end - launch.start) * launch.ranks for launch in ledger.launches)
    assert sum(ledger.buckets_s.values()) == pytest.approx(total, abs=1e-5)
    assert 0 <= ledger.goodput <= 1
    useful = Counter((span.rank, span.step) for span in ledger.spans if span.bucket == "useful")
    assert set(useful.values()) <= {1}, "a step was useful twice on one rank"
    for fault in ledger.faults:
        assert tuple(fault.phases_s) == RECOVERY and min(fault.phases_s.values()) >= 0
        assert fault.between_launches_s >= 0 and (fault.lost_steps or 0) >= 0 and fault.first_cause
        assert min(fault.wasted_rank_s, fault.backoff_s, fault.assumed_s) >= 0
        assert fault.tier in ("outlived", "torchrun", "pods", "relaunch", None)
        if fault.mttr_s is not None:
            assert sum(fault.phases_s.values()) == pytest.approx(fault.mttr_s, abs=1e-5)


# --- by hand ---------------------------------------------------------------------------------------------


def test_a_run_without_a_fault(logs: Logs) -> None:
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        logs.launcher(0.5, "spawn", rank, pid=7)
        t = steps(logs, rank, begin(logs, rank, 0), 1, 3)
        logs.phase(rank, t, "checkpoint_stall", 3)
        finish(logs, rank, steps(logs, rank, t + 1.5 - rank, 4, 4, each=2 + rank))
    logs.launcher(22, "launch_end", outcome="finished")
    ledger = logs.ledger()
    check_partition(ledger)
    assert ledger.wall_s == 22
    assert buckets(ledger) == {
        "startup": 8,
        "rendezvous": 4,
        "build": 6,
        "restore": 2,
        "useful": 6 + 2 + 6 + 3,
        "checkpoint_stall": 1.5 + 0.5,
        "shutdown": 2.5 + 2.5,
    }
    assert ledger.goodput == 17 / 44
    assert ledger.faults == ()


def test_restore_is_counted_and_nothing_twice(logs: Logs) -> None:
    """Init 10, restore 20, five steps of 2, a stall of 3, a fault, a restart: to the second."""
    logs.launch(0, ranks=1)
    logs.phase(0, 10, "restore")
    t = steps(logs, 0, 30, 1, 5)
    logs.phase(0, t, "checkpoint_stall", 5)
    logs.phase(0, 43, "step", 6)
    logs.fault(0, 44, "kill", 6)
    logs.launcher(45, "exit", 0, code=-9)
    logs.lost(detected=45, rank=0, aborted=47, end=48, outcome="failed")
    logs.launch(60, ranks=1)
    logs.phase(0, 70, "restore")
    logs.rank(0, 90, "restored", 5, skipped=[])
    finish(logs, 0, steps(logs, 0, 90, 6, 8))
    logs.launcher(98, "launch_end", outcome="finished")
    ledger = logs.ledger()
    check_partition(ledger)
    assert buckets(ledger) == {
        "startup": 10,
        "restore": 20 + 20,
        "useful": 10 + 6,
        "checkpoint_stall": 3,
        "recompute": 1,  # what had been done of step 6
        "detect": 1,
        "abort": 3,
        "restart": 10,
        "shutdown": 2,
    }
    assert ledger.wall_s == 48 + 38 == sum(ledger.buckets_s.values())
    (fault,) = ledger.faults
    assert phases(fault) == {"detect": 1, "abort": 3, "restart": 10, "restore": 20, "recompute": 2}
    assert fault.mttr_s == 92 - 44 - 12 == sum(fault.phases_s.values())
    assert fault.between_launches_s == 12
    assert (fault.kind, fault.rank, fault.step, fault.tier) == ("kill", 0, 6, "relaunch")
    assert fault.lost_steps == 0
    assert fault.first_cause == "rank 0 was killed by SIGKILL in step 6 (injected kill@6:0)"


def test_steps_done_again_are_no_progress(logs: Logs) -> None:
    """Steps 1 to 60, resumed from 50, then 51 to 145: 145 useful, 10 done again."""
    logs.launch(0, ranks=1)
    steps(logs, 0, 0, 1, 60)
    logs.lost(detected=120, rank=0, aborted=120, end=120, outcome="failed")
    logs.launch(120, ranks=1)
    logs.rank(0, 120, "restored", 50, skipped=[])
    steps(logs, 0, 120, 51, 145)
    logs.launcher(310, "launch_end", outcome="finished")
    ledger = logs.ledger()
    assert buckets(ledger) == {"useful": 145 * 2, "recompute": 10 * 2}
    assert ledger.goodput == 145 / 155
    (fault,) = ledger.faults
    assert (fault.lost_steps, fault.mttr_s, phases(fault)) == (10, 22, {"recompute": 22})


def two_ranks_lose_step_4(logs: Logs) -> None:
    """Rank 1 is killed at 20 in step 4; rank 0 had finished it, and goes on talking."""
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        t = steps(logs, rank, begin(logs, rank, 0), 1, 3)
        logs.phase(rank, t, "step", 4)
    logs.rank(0, 18, "step", 4, loss=2.5)
    logs.phase(0, 19, "step", 5)
    logs.fault(1, 20, "kill", 4, source="outside")
    logs.phase(0, 20.5, "checkpoint_stall", 5)
    logs.rank(0, 20.75, "error", 5, type="RuntimeError", message="connection closed by peer", traceback="")
    logs.launcher(21, "exit", 1, code=-9)
    logs.lost(detected=21, rank=1, aborted=23, end=24, outcome="failed")


def test_what_survivors_write_after_the_fault_changes_nothing(logs: Logs) -> None:
    two_ranks_lose_step_4(logs)
    ledger = logs.ledger()
    check_partition(ledger)
    assert [(s.bucket, s.step, s.end - EPOCH) for s in ledger.lanes[0].spans[-4:]] == [
        ("useful", 4, 19),
        ("recompute", 5, 20),
        ("detect", None, 21),
        ("abort", None, 24),
    ]
    assert ledger.lanes[1].spans[-3].bucket == "recompute"
    (fault,) = ledger.faults
    assert (fault.step, fault.tier, fault.mttr_s, fault.lost_steps) == (4, None, None, None)
    assert phases(fault) == {"detect": 1, "abort": 3}
    assert fault.first_cause == "rank 1 was killed by SIGKILL in step 4 (injected kill@4:1)"


def test_a_step_that_one_rank_had_finished_is_new_to_the_other(logs: Logs) -> None:
    two_ranks_lose_step_4(logs)
    logs.launch(30, ranks=2)
    for rank in (0, 1):
        steps(logs, rank, begin(logs, rank, 30, restored=2), 3, 5, each=2 + rank)
    ledger = logs.ledger()
    check_partition(ledger)
    after = [(s.rank, s.step, s.bucket) for s in ledger.spans if s.generation == 1 and s.step]
    assert after == [
        (0, 3, "recompute"),
        (0, 4, "recompute"),
        (0, 5, "useful"),
        (1, 3, "recompute"),
        (1, 4, "useful"),
        (1, 5, "useful"),
    ]
    (fault,) = ledger.faults
    # Rank 1 is the slower one: it finished step 4, the first that had not been finished on both, at 46.
    assert (fault.mttr_s, fault.between_launches_s, fault.lost_steps) == (46 - 20 - 6, 6, 1)
    assert phases(fault) == {
        "detect": 1,
        "abort": 3,
        "restart": 4,
        "rendezvous": 2,
        "build": 3,
        "restore": 1,
        "recompute": 6,
    }


def test_saves_on_the_way_back_are_part_of_it(logs: Logs) -> None:
    logs.launch(0, ranks=1)
    steps(logs, 0, 0, 1, 4)
    logs.fault(0, 8, "exit", 5)
    logs.lost(detected=9, rank=0, aborted=9, end=9, outcome="failed")
    logs.launch(9, ranks=1)
    logs.rank(0, 9, "restored", 2, skipped=[])
    t = steps(logs, 0, 9, 3, 4)
    logs.phase(0, t, "checkpoint_stall", 4)
    steps(logs, 0, t + 5, 5, 6)
    ledger = logs.ledger()
    check_partition(ledger)
    assert buckets(ledger) == {"useful": 12, "detect": 1, "recompute": 4, "checkpoint_stall": 5}
    (fault,) = ledger.faults
    assert (fault.mttr_s, fault.between_launches_s, fault.lost_steps) == (12, 0, 2)
    assert phases(fault) == {"detect": 1, "recompute": 4 + 5 + 2}


def test_a_second_fault_before_any_progress(logs: Logs) -> None:
    """The first fault's recovery lasts until something new is done, over both pauses."""
    logs.launch(0, ranks=1)
    steps(logs, 0, 0, 1, 5)
    logs.fault(0, 10, "kill", 6)
    logs.lost(detected=11, rank=0, aborted=11, end=11, outcome="failed")
    logs.launch(20, ranks=1)
    logs.rank(0, 20, "restored", 2, skipped=[])
    steps(logs, 0, 20, 3, 4)
    logs.fault(0, 24, "kill", 5)
    logs.lost(detected=25, rank=0, aborted=25, end=25, outcome="failed")
    logs.launch(40, ranks=1)
    logs.rank(0, 40, "restored", 2, skipped=[])
    steps(logs, 0, 40, 3, 6)
    ledger = logs.ledger()
    check_partition(ledger)
    assert buckets(ledger) == {"useful": 12, "recompute": 4 + 6, "detect": 2}
    first, second = ledger.faults
    assert (first.mttr_s, first.between_launches_s, first.lost_steps) == (48 - 10 - 9 - 15, 24, 3)
    assert phases(first) == {"detect": 2, "recompute": 4 + 8}
    assert (second.mttr_s, second.between_launches_s, second.lost_steps) == (48 - 24 - 15, 15, 2)
    assert phases(second) == {"detect": 1, "recompute": 8}


def test_two_faults_at_once_are_two_entries_with_one_first_cause(logs: Logs) -> None:
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        steps(logs, rank, 0, 1, 2)
        logs.phase(rank, 4, "step", 3)
    logs.fault(1, 5, "kill", 3)
    logs.fault(0, 6, "kill", 3)
    logs.lost(detected=7, rank=1, aborted=9, end=9, outcome="failed")
    first, second = logs.ledger().faults
    assert (first.rank, phases(first)) == (1, {"detect": 2, "abort": 2})
    assert (second.rank, phases(second)) == (0, {"detect": 1, "abort": 2})
    assert (
        first.first_cause
        == second.first_cause
        == "rank 1 was killed by SIGKILL in step 3 (injected kill@3:1)"
    )


def test_a_fault_that_the_rank_outlived_costs_no_recovery(logs: Logs) -> None:
    """Stopped at 4.5, continued at 6; killed for good later."""
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        steps(logs, rank, 0, 1, 2)
        logs.step(rank, 4, 6.5, 3)
        logs.step(rank, 6.5, 8, 4)
        logs.phase(rank, 8, "step", 5)
    logs.fault(1, 4.5, "stop", 3, source="outside")
    going_on = logs.ledger()
    assert buckets(going_on) == {"useful": 16}
    assert [fault.tier for fault in going_on.faults] == ["outlived"]
    logs.fault(0, 9, "kill", 5)
    logs.lost(detected=10, rank=0, aborted=10, end=10, outcome="failed")
    ledger = logs.ledger()
    check_partition(ledger)
    assert buckets(ledger) == {"useful": 16, "recompute": 2, "detect": 2}
    stop, kill = ledger.faults
    assert (stop.tier, stop.mttr_s, stop.lost_steps, phases(stop)) == ("outlived", None, 0, {})
    assert stop.between_launches_s == 0
    assert (kill.tier, kill.t - EPOCH) == (None, 9)
    assert kill.first_cause == "rank 0 was killed by SIGKILL in step 5 (injected kill@5:0)"


def test_a_fault_is_not_outlived_by_the_step_it_struck_nor_by_another_rank(logs: Logs) -> None:
    """Rank 1 just finishes step 3 before the signal arrives; rank 0 manages one more."""
    logs.launch(0, ranks=2)
    logs.step(1, 0, 4, 3)
    logs.fault(1, 2, "stop", 3, source="outside")
    logs.step(0, 3, 5, 4)
    logs.lost(detected=6, rank=None, aborted=7, end=7, outcome="timeout")
    (fault,) = logs.ledger().faults
    assert (fault.tier, phases(fault)) == (None, {"detect": 4, "abort": 1})


def test_a_fault_comes_before_what_is_written_in_the_same_instant(logs: Logs) -> None:
    logs.launch(0, ranks=1)
    logs.phase(0, 0, "step", 1)
    logs.launcher(2, "exit", 0, code=-9)
    logs.fault(0, 2, "kill", 1)
    logs.lost(detected=2, rank=0, aborted=3, end=3, outcome="failed")
    (fault,) = logs.ledger().faults
    assert fault.first_cause == "rank 0 was killed by SIGKILL in step 1 (injected kill@1:0)"


def test_a_stop_in_the_last_step_of_a_run_that_finishes(logs: Logs) -> None:
    logs.launch(0, ranks=1)
    logs.phase(0, 0, "step", 1)
    logs.fault(0, 1, "stop", 1)
    assert buckets(logs.ledger()) == {"recompute": 1}
    logs.launcher(3, "aborted")  # nothing but a later event: until the rank goes on, the launch looks lost
    assert buckets(logs.ledger()) == {"recompute": 1, "detect": 2}
    logs.rank(0, 5, "step", 1, loss=1.0)
    finish(logs, 0, 5)
    logs.launcher(7, "launch_end", outcome="finished")
    ledger = logs.ledger()
    assert buckets(ledger) == {"useful": 5, "shutdown": 2}
    assert [fault.tier for fault in ledger.faults] == ["outlived"]


def test_a_rank_that_never_said_anything(logs: Logs) -> None:
    logs.launch(0, ranks=3)
    for rank in (0, 1):
        begin(logs, rank, 0)
    logs.lost(detected=12, rank=None, aborted=13, end=13, outcome="timeout")
    ledger = logs.ledger()
    check_partition(ledger)
    assert [(s.bucket, s.seconds) for s in ledger.lanes[2].spans] == [("startup", 12), ("abort", 1)]
    (fault,) = ledger.faults
    assert (fault.kind, fault.rank, fault.step, fault.first_cause) == (
        "timeout",
        None,
        None,
        "cause timeout",
    )


def test_a_launch_while_it_goes_on_ends_with_its_last_event(logs: Logs) -> None:
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        steps(logs, rank, 4, 1, 2 - rank)
    ledger = logs.ledger()
    check_partition(ledger)
    assert (ledger.wall_s, ledger.faults, ledger.launches[0].outcome) == (8, (), None)
    assert buckets(ledger) == {"startup": 8, "useful": 8}


def test_a_machine_that_goes_down_is_a_loss_without_a_word(logs: Logs) -> None:
    logs.launch(0, ranks=1)
    steps(logs, 0, 0, 1, 3)
    logs.phase(0, 6, "step", 4)
    logs.rank(0, 7, "save", 3, stall_s=1.0, bytes=1)
    assert logs.ledger().faults == ()  # so far it may as well be going on
    logs.launch(20, ranks=1)
    logs.rank(0, 22, "restored", 1, skipped=[])
    steps(logs, 0, 22, 2, 4)
    ledger = logs.ledger()
    check_partition(ledger)
    assert buckets(ledger) == {"useful": 8, "recompute": 5, "restart": 2}
    (fault,) = ledger.faults
    assert (fault.kind, fault.rank, fault.tier, fault.lost_steps) == ("lost", None, "relaunch", 2)
    assert (fault.mttr_s, fault.between_launches_s) == (8, 13)
    assert fault.first_cause.startswith("the launcher ended without a word")


def test_a_fault_whose_launcher_was_killed_too_is_never_detected(logs: Logs) -> None:
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        steps(logs, rank, 0, 1, 3)
    logs.fault(1, 6, "hang", 4)
    logs.phase(0, 6, "step", 4)
    logs.rank(0, 9, "error", 4, type="RuntimeError", message="timed out", traceback="")
    ledger = logs.ledger()
    check_partition(ledger)
    assert buckets(ledger) == {"useful": 12, "detect": 6}
    (fault,) = ledger.faults
    assert (fault.kind, fault.tier, phases(fault)) == ("hang", None, {"detect": 3})


def test_a_rank_that_outlives_its_killed_launcher_does_not_reach_into_the_next_launch(logs: Logs) -> None:
    logs.launch(0, ranks=1)
    steps(logs, 0, 0, 1, 3)
    logs.rank(0, 11, "error", 4, type="RuntimeError", message="too late", traceback="")
    logs.launch(10, ranks=1)
    steps(logs, 0, 12, 1, 4)
    ledger = logs.ledger()
    check_partition(ledger)
    assert [(one.start - EPOCH, one.end - EPOCH) for one in ledger.launches] == [(0, 10), (10, 20)]


def test_under_torchrun_there_is_no_launcher(logs: Logs) -> None:
    for rank in (0, 1):
        finish_at = steps(logs, rank, begin(logs, rank, 2 + rank), 1, 2)
        logs.rank(rank, finish_at, "end", steps=2, weights_sha256=None, state_sha256=None)
    ledger = logs.ledger()
    check_partition(ledger)
    (launch,) = ledger.launches
    assert (launch.ranks, launch.start - EPOCH, launch.end - EPOCH, launch.outcome) == (2, 5, 17, "finished")
    assert buckets(ledger) == {
        "startup": 1 + 2,
        "rendezvous": 4,
        "build": 6,
        "restore": 2,
        "useful": 8,
        "shutdown": 1,
    }


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_another_world_size_does_not_make_old_steps_new(logs: Logs, after: int) -> None:
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        steps(logs, rank, 0, 1, 6)
    logs.fault(1, 12, "kill", 7)
    logs.lost(detected=13, rank=1, aborted=14, end=14, outcome="failed")
    logs.launch(20, ranks=after)
    for rank in range(after):
        logs.rank(rank, 21, "restored", 4, skipped=[])
        steps(logs, rank, 21, 5, 8, each=2 + rank / 4)
    logs.launcher(40, "launch_end", outcome="finished")
    ledger = logs.ledger()
    check_partition(ledger)
    relaunched = [(s.step, s.bucket) for s in ledger.spans if s.generation == 1 and s.step]
    assert relaunched == [(5, "recompute"), (6, "recompute"), (7, "useful"), (8, "useful")] * after
    assert sum(ledger.buckets_s.values()) == 14 * 2 + 20 * after
    (fault,) = ledger.faults
    slowest = 2 + (after - 1) / 4
    assert (fault.mttr_s, fault.lost_steps) == (2 + 1 + 3 * slowest, 2)


def test_a_rank_that_sat_out_a_launch_does_not_earn_its_steps_again(logs: Logs) -> None:
    for start, ranks, first, last in ((0, 2, 1, 2), (20, 1, 3, 4), (40, 2, 4, 5)):
        logs.launch(start, ranks)
        for rank in range(ranks):
            steps(logs, rank, start, first, last)
        logs.launcher(start + 4, "launch_end", outcome="interrupted")
    useful = [(s.rank, s.step) for s in logs.ledger().spans if s.bucket == "useful"]
    assert useful == [(0, 1), (0, 2), (1, 1), (1, 2), (0, 3), (0, 4), (0, 5), (1, 5)]


def test_after_a_launch_that_finished_the_next_one_is_no_restart(logs: Logs) -> None:
    for start in (0, 10):
        logs.launch(start, ranks=1)
        logs.phase(0, start + 1, "startup")
        logs.phase(0, start + 2, "build")
        logs.launcher(start + 3, "launch_end", outcome="finished")
    assert buckets(logs.ledger()) == {"startup": 4, "build": 2}


def test_a_clock_that_disagrees_moves_time_but_makes_none(logs: Logs) -> None:
    """Rank 1's clock is 5 s behind its launcher's, rank 0's is 5 s ahead."""
    logs.launch(10, ranks=2)
    steps(logs, 0, 17, 1, 2)
    steps(logs, 1, 7, 1, 2)
    logs.launcher(18, "launch_end", outcome="finished")
    ledger = logs.ledger()
    check_partition(ledger)
    ahead, behind = ([(s.bucket, s.step, s.seconds) for s in lane.spans] for lane in ledger.lanes)
    assert ahead == [("startup", None, 7), ("useful", 1, 1)]
    assert behind == [("useful", 2, 8)]


def test_nothing_happened_yet() -> None:
    ledger = Ledger.of([])
    assert (ledger.wall_s, ledger.goodput, ledger.lanes, ledger.faults) == (0, 0, (), ())
    assert set(ledger.buckets_s.values()) == {0}


def test_an_unknown_phase_is_an_error_and_not_a_gap() -> None:
    events = [Event(0.0, "phase", 0, 0, None, {"phase": "dreaming"}), Event(1.0, "end", 0)]
    with pytest.raises(UsageError, match="phase 'dreaming' in the events is unknown"):
        Ledger.of(events)


# --- which cause came first ------------------------------------------------------------------------------

Failure = tuple[float, str, int, dict[str, Any]]


def exit_(t: float, rank: int, code: int) -> Failure:
    return t, "exit", rank, {"code": code}


def error(t: float, rank: int, type: str, message: str) -> Failure:
    return t, "error", rank, {"type": type, "message": message, "traceback": ""}


BUG = error(5, 1, "ValueError", "bad\n  batch")
LEFT_EARLY = "rank 0 left early: it ended with code 0 in step 3, before its work was done"
ECHO = error(5.5, 0, "RuntimeError", "connection reset by peer")


@pytest.mark.parametrize(
    ("failures", "blamed", "kind", "rank", "instant", "sentence"),
    [
        (
            [BUG, ECHO, exit_(6, 0, 1)],
            1,
            "exception",
            1,
            5,
            "rank 1 failed first: ValueError: bad batch (step 3)",
        ),
        ([BUG, ECHO], None, "exception", 1, 5, "rank 1 failed first: ValueError: bad batch (step 3)"),
        ([exit_(6, 1, -9)], 1, "kill", 1, 6, "rank 1 was killed by SIGKILL in step 3"),
        ([exit_(6, 1, -200)], 1, "kill", 1, 6, "rank 1 was killed by signal 200 in step 3"),
        ([exit_(6, 0, 3)], 0, "exit", 0, 6, "rank 0 failed first: it ended with code 3 in step 3"),
        ([exit_(6, 0, 0)], 0, "exit", 0, 6, LEFT_EARLY),
        # The peer's echo is written before the launcher has looked; time is lost from the echo on.
        ([ECHO, exit_(6, 1, -11)], 1, "kill", 1, 5.5, "rank 1 was killed by SIGSEGV in step 3"),
        ([ECHO, exit_(8, 1, -11)], 1, "kill", 1, 5.5, "rank 1 was killed by SIGSEGV in step 3"),
        ([], 1, "failed", 1, 7, "cause failed"),
        # What the launcher itself ends after it has noticed is no cause.
        ([exit_(8, 1, -9)], 1, "failed", 1, 7, "cause failed"),
    ],
)
def test_a_failure_that_nobody_injected(
    logs: Logs,
    failures: list[Failure],
    blamed: int | None,
    kind: str,
    rank: int,
    instant: float,
    sentence: str,
) -> None:
    logs.launch(0, ranks=2)
    for each in (0, 1):
        steps(logs, each, 0, 1, 2)
        logs.phase(each, 4, "step", 3)
    for t, what, who, attributes in failures:
        if what == "exit":
            logs.launcher(t, what, who, **attributes)
        else:
            logs.rank(who, t, what, **attributes)
    logs.lost(detected=7, rank=blamed, aborted=9, end=9, outcome="failed")
    ledger = logs.ledger()
    check_partition(ledger)
    (fault,) = ledger.faults
    assert (fault.kind, fault.rank, fault.t - EPOCH, fault.first_cause) == (kind, rank, instant, sentence)
    assert (fault.step, fault.tier) == (3, None)
    assert phases(fault) == ({"detect": 7 - instant, "abort": 2} if instant < 7 else {"abort": 2})


def test_code_0_after_the_end_is_no_failure(logs: Logs) -> None:
    """Rank 0 is done and leaves; then rank 1 fails."""
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        steps(logs, rank, 0, 1, 1)
    logs.rank(0, 3, "end", steps=1, weights_sha256=None, state_sha256=None)
    logs.launcher(4, "exit", 0, code=0)
    logs.rank(1, 6, "error", type="OSError", message="no space", traceback="")
    logs.lost(detected=7, rank=1, aborted=8, end=8, outcome="failed")
    (fault,) = logs.ledger().faults
    assert (fault.rank, fault.t - EPOCH) == (1, 6)
    assert buckets(logs.ledger()) == {"useful": 3 + 6, "shutdown": 3, "detect": 2, "abort": 2}


def test_an_injected_fault_after_another_failure_is_not_the_first_cause(logs: Logs) -> None:
    logs.launch(0, ranks=2)
    for rank in (0, 1):
        logs.phase(rank, 0, "restore")
    logs.rank(0, 4, "error", type="CheckpointError", message="step-10 is damaged", traceback="")
    logs.fault(1, 5, "kill", 0, source="outside")
    logs.lost(detected=6, rank=0, aborted=7, end=7, outcome="failed")
    first, second = logs.ledger().faults
    assert (first.kind, first.rank, first.step) == ("exception", 0, None)
    assert (second.kind, second.rank, second.step) == ("kill", 1, None)
    expected = "rank 0 failed first: CheckpointError: step-10 is damaged (restore)"
    assert first.first_cause == second.first_cause == expected


def test_a_fault_during_a_save_says_so(logs: Logs) -> None:
    logs.launch(0, ranks=1)
    steps(logs, 0, 0, 1, 10)
    logs.phase(0, 20, "checkpoint_stall", 10)
    logs.fault(0, 21, "kill", 10, source="outside")
    logs.lost(detected=22, rank=0, aborted=22, end=22, outcome="failed")
    (fault,) = logs.ledger().faults
    assert fault.first_cause == "rank 0 was killed by SIGKILL in the save of step 10 (injected kill@10:0)"
    assert buckets(logs.ledger()) == {"useful": 20, "checkpoint_stall": 1, "detect": 1}


# --- any run ---------------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """A synchronous run of equal ranks, which keeps its own, naive account while it writes its events."""

    logs: Logs
    ranks: int
    dice: random.Random
    t: float = 0.0
    account: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    done: int = 0
    saved: int = 0
    lost_at: list[tuple[float, int]] = field(default_factory=list)  # instant, steps done in that launch
    restored: list[int] = field(default_factory=list)
    pauses: float = 0.0
    pauses_at_loss: list[float] = field(default_factory=list)
    mttr: dict[int, float] = field(default_factory=dict)

    def spend(self, bucket: str) -> None:
        seconds = self.dice.randrange(1, 40) / 4
        self.t += seconds
        self.account[bucket] += seconds * self.ranks

    def say(self, what: str, step: int | None = None, **attributes: Any) -> None:
        for rank in range(self.ranks):
            self.logs.rank(rank, self.t, what, step, **attributes)

    def launch(self, length: int, ending: str) -> None:
        self.logs.launch(self.t, self.ranks)
        first = "restart" if self.lost_at else "startup"
        for bucket, phase in ((first, "startup"), (first, "rendezvous"), ("rendezvous", "restore")):
            self.spend(bucket)
            self.say("phase", phase=phase)
        self.spend("restore")
        self.restored.append(self.saved)
        self.say("restored", self.saved, skipped=[])
        step = self.saved
        for _ in range(length):
            step += 1
            self.step(step)
        self.end(ending, step)

    def step(self, step: int) -> None:
        self.say("phase", step, phase="step")
        self.spend("useful" if step > self.done else "recompute")
        self.say("step", step, loss=1 / step)
        if step > self.done:
            self.done = step
            for number, (t, _) in enumerate(self.lost_at):
                self.mttr.setdefault(number, self.t - t - (self.pauses - self.pauses_at_loss[number]))
        if self.dice.random() < 0.3:
            self.say("phase", step, phase="checkpoint_stall")
            self.spend("checkpoint_stall")
            self.saved = step

    def end(self, ending: str, step: int) -> None:
        if ending == "finished":
            self.say("end", steps=step, weights_sha256=None, state_sha256=None)
            self.spend("shutdown")
            self.logs.launcher(self.t, "launch_end", outcome="finished")
            return
        self.say("phase", step + 1, phase="step")
        self.spend("recompute")
        self.lost_at.append((self.t, step))
        if ending == "fault":
            self.logs.fault(self.dice.randrange(self.ranks), self.t, "kill", step + 1)
        else:
            rank = self.dice.randrange(self.ranks)
            self.logs.rank(rank, self.t, "error", type="ValueError", message="x", traceback="")
        if self.dice.random() < 0.5:  # a survivor that does not know yet
            self.logs.rank(0, self.t + 0.125, "phase", step + 1, phase="checkpoint_stall")
        self.spend("detect")
        self.logs.launcher(self.t, "detected", 0, cause="x")
        self.spend("abort")
        self.logs.launcher(self.t, "launch_end", outcome="failed")
        self.pauses_at_loss.append(self.pauses)
        pause = self.dice.randrange(40) / 4
        self.t += pause
        self.pauses += pause


@settings(deadline=None, max_examples=150)
@given(
    ranks=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    launches=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["fault", "error"])), max_size=5),
    last=st.tuples(st.integers(0, 6), st.sampled_from(["fault", "error", "finished"])),
)
def test_any_synchronous_run_is_accounted_for_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    ranks: int,
    seed: int,
    launches: list[tuple[int, str]],
    last: tuple[int, str],
) -> None:
    logs = Logs(tmp_path_factory.mktemp("run") / "events")
    run = Simulation(logs, ranks, random.Random(seed))
    for length, ending in [*launches, last]:
        run.launch(length, ending)
    logs.close()
    ledger = logs.ledger()
    check_partition(ledger)
    assert buckets(ledger) == dict(run.account)
    useful = [(span.rank, span.step) for span in ledger.spans if span.bucket == "useful"]
    assert sorted(useful) == list(itertools.product(range(ranks), range(1, run.done + 1)))
    assert [fault.t - EPOCH for fault in ledger.faults] == [t for t, _ in run.lost_at]
    for number, (fault, (_, reached)) in enumerate(zip(ledger.faults, run.lost_at, strict=True)):
        assert fault.mttr_s == run.mttr.get(number)
        back_to = run.restored[number + 1 : number + 2]
        assert fault.lost_steps == (reached - back_to[0] if back_to else None)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 3), cut=st.lists(st.floats(0, 1), min_size=1))
def test_logs_cut_off_anywhere_still_sum_up(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int, cut: list[float]
) -> None:
    logs = Logs(tmp_path_factory.mktemp("run") / "events")
    run = Simulation(logs, ranks, random.Random(seed))
    for ending in ("fault", "error", "finished"):
        run.launch(3, ending)
    logs.close()
    for file, share in zip(sorted(logs.directory.iterdir()), itertools.cycle(cut), strict=False):
        text = file.read_bytes()
        file.write_bytes(text[: int(len(text) * share)])
    check_partition(logs.ledger())


@st.composite
def soups(draw: st.DrawFn) -> list[Event]:
    """Events without rhyme or reason: any order, ranks nobody launched, clocks that disagree."""
    whats = ["phase", "phase", "step", "step", "end", "fault", "error", "exit", "detected", "aborted"]
    event = st.builds(
        Event,
        t=st.floats(EPOCH, EPOCH + 50) | st.integers(0, 20).map(lambda t: EPOCH + t),
        what=st.sampled_from([*whats, "launch", "launch_end", "restored", "spawn"]),
        rank=st.none() | st.integers(0, 3),
        generation=st.integers(0, 2),
        step=st.none() | st.integers(0, 4),
        attributes=st.fixed_dictionaries(
            {
                "phase": st.sampled_from(PHASES),
                "ranks": st.integers(1, 3),
                "code": st.sampled_from([0, 1, -9]),
                "outcome": st.sampled_from(["finished", "failed", "timeout", "interrupted"]),
            }
        ),
    )
    return draw(st.lists(event, max_size=40))


@settings(deadline=None, max_examples=400)
@given(soups())
def test_whatever_was_written_no_second_is_lost_or_counted_twice(events: list[Event]) -> None:
    ledger = Ledger.of(events)
    check_partition(ledger)


def test_a_long_run_is_read_in_a_moment(logs: Logs) -> None:
    """20,000 steps on 4 ranks: the work grows with the events, not with their square."""
    logs.launch(0, ranks=4)
    for rank in range(4):
        steps(logs, rank, 1, 1, 5000, each=0.25)
    logs.close()
    ledger = Ledger.of(read_events(logs.directory))
    assert len([s for s in ledger.spans if s.bucket == "useful"]) == 20_000
