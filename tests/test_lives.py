"""Several lives of the ranks in one launch: torchrun in pods, by hand to the quarter of a second, and any."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ridethrough.events import PHASES, Event, read_events
from ridethrough.ledger import Ledger

from tests.logs import EPOCH, Logs
from tests.test_ledger import buckets, check_partition, phases

PODS: dict[str, Any] = {"launcher": "torchrun", "pods": 2, "policy": "each", "isolation": "namespaces"}
CLOSED = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.244.0.11]:5123"
WAITED = "wait timeout after 6000ms, keys: /none/torchelastic/agent/0"


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "events")


def container(logs: Logs, t: float, pod: int, attempt: int = 0, reason: str = "first") -> None:
    ip = f"10.244.0.{10 + pod}"
    logs.launcher(t, "pod_start", pod=pod, attempt=attempt, pid=9, ip=ip, reason=reason)


def ended(logs: Logs, t: float, pod: int, code: int, backoff: float = 0, assumed: float = 0) -> None:
    """A container ends, and its pod waits."""
    logs.launcher(t, "pod_exit", pod=pod, attempt=0, code=code)
    if backoff or assumed:
        logs.launcher(t, "pod_wait", pod=pod, backoff_s=backoff, assumed_s=assumed)


def agents(logs: Logs, *waiting: float, start: float) -> None:
    """Each pod's agent waits for the others from its time on; then all start their workers."""
    for pod, t in enumerate(waiting):
        logs.launcher(t, "agent", pod=pod, state="rendezvous")
        logs.launcher(start, "agent", pod=pod, state="start")
        logs.launcher(start + 0.25, "spawn", pod, pid=10 + pod, pod=pod)


def begin(logs: Logs, t: float, restored: int, pods: tuple[int, int] = (0, 1)) -> float:
    """Startup, rendezvous, build and restore of one second each; the ranks are in these pods."""
    for rank, pod in enumerate(pods):
        for at, name in enumerate(("startup", "rendezvous", "build", "restore")):
            logs.phase(rank, t + at, name)
        logs.rank(rank, t + 2, "joined", device="cpu", backend="gloo", pod=pod)
        logs.rank(rank, t + 4, "restored", restored, skipped=[])
    return t + 4


def steps(logs: Logs, t: float, first: int, last: int) -> float:
    for step in range(first, last + 1):
        for rank in (0, 1):
            logs.step(rank, t, t + 1, step)
        t += 1
    return t


def error(logs: Logs, rank: int, t: float, type: str, message: str) -> None:
    logs.rank(rank, t, "error", type=type, message=message, traceback="")


def start(logs: Logs, **about: Any) -> None:
    """A launch on two pods that gets from step 27 into step 30, at 9."""
    logs.launch(0, ranks=2, **{**PODS, **about})
    container(logs, 0, 0)
    container(logs, 0, 1)
    agents(logs, 1, 1, start=2)
    t = steps(logs, begin(logs, 3, 27), 28, 29)
    for rank in (0, 1):
        logs.phase(rank, t, "step", 30)


def hit(logs: Logs, kind: str, rank: int = 1, t: float = 9.25, step: int = 30) -> None:
    """A fault of a pod, which the launcher writes."""
    id = f"{kind}@{step}:{rank}"
    logs.launcher(t, "fault", rank, kind=kind, id=id, source="outside", pod=rank)


def lose_pod_1(logs: Logs, backoff: float = 1) -> None:
    """At 9.25; rank 0 feels it at 9.5 and is gone at 10."""
    hit(logs, "pod")
    ended(logs, 9.5, 1, -9, backoff)
    logs.launcher(9.5, "exit", 1, code=None, pod=1)
    logs.launcher(9.5, "detected", 1, cause="the process of rank 1 is gone")
    error(logs, 0, 9.5, "RuntimeError", CLOSED)
    logs.launcher(10, "exit", 0, code=1, pod=0)


def come_back(logs: Logs, t: float, pods: tuple[int, int] = (0, 1)) -> float:
    """The next life, restored at step 28, up to step 31."""
    logs.life()
    return steps(logs, begin(logs, t, 28, pods), 29, 31)


def complete(logs: Logs, t: float) -> None:
    for rank in (0, 1):
        logs.rank(rank, t, "end", steps=31, weights_sha256=None, state_sha256=None)
        logs.launcher(t + 0.5, "pod_exit", pod=rank, attempt=1, code=0)
    logs.launcher(t + 1, "launch_end", outcome="finished")


def spans(ledger: Ledger, rank: int, since: float) -> list[tuple[str, float]]:
    """From an instant on: which bucket, until when."""
    return [(s.bucket, s.end - EPOCH) for s in ledger.lanes[rank].spans if s.end > EPOCH + since]


# --- by hand ---------------------------------------------------------------------------------------------


def out_of_step(logs: Logs) -> None:
    """Each pod for itself: pod 1 comes back while rank 0's agent waits, and both give up before they meet."""
    start(logs)
    lose_pod_1(logs)
    logs.launcher(10.25, "agent", pod=0, state="rendezvous")
    container(logs, 10.5, 1, 1, "restart")
    logs.launcher(16.25, "gave_up", pod=0, error=f"DistStoreError: {WAITED}")
    ended(logs, 16.5, 0, 1, backoff=1)
    logs.launcher(16.5, "gave_up", pod=1, error=f"DistStoreError: {WAITED}")
    ended(logs, 16.75, 1, 1, backoff=2)
    container(logs, 17.5, 0, 1, "restart")
    container(logs, 18.75, 1, 2, "restart")
    agents(logs, 18.5, 19.75, start=20)
    complete(logs, come_back(logs, 21))


def test_restarts_out_of_step(logs: Logs) -> None:
    out_of_step(logs)
    ledger = logs.ledger()
    check_partition(ledger)
    (launch,) = ledger.launches
    assert [(life.generation, life.start - EPOCH, life.end - EPOCH) for life in launch.lives] == [
        (0, 0, 21),
        (1, 21, 29),
    ]
    after = [("restore", 25), ("recompute", 26), ("useful", 27), ("useful", 28), ("shutdown", 29)]
    assert spans(ledger, 0, 9) == [
        ("recompute", 9.25),
        ("detect", 9.5),
        ("abort", 10),
        ("restart", 10.25),
        ("rendezvous", 16.5),
        ("restart", 18.5),
        ("rendezvous", 20),
        ("restart", 21),
        ("restart", 22),  # in the next life
        ("rendezvous", 23),
        ("build", 24),
        *after,
    ]
    assert spans(ledger, 1, 9) == [
        ("recompute", 9.25),
        ("detect", 9.5),
        ("restart", 19.75),
        ("rendezvous", 20),
        ("restart", 21),
        ("restart", 22),
        ("rendezvous", 23),
        ("build", 24),
        *after,
    ]
    (fault,) = ledger.faults
    assert (fault.kind, fault.rank, fault.step, fault.tier, fault.generation) == ("pod", 1, 30, "pods", 0)
    assert (fault.mttr_s, fault.between_launches_s, fault.lost_steps) == (27 - 9.25, 0, 1)
    assert sum(fault.phases_s.values()) == fault.mttr_s
    # Rank 0 waits at the rendezvous for most of the time in which rank 1 starts again: the mean of both.
    assert phases(fault)["restart"] == (4.25 + 12.25) / 2
    assert phases(fault)["rendezvous"] == (8.75 + 1.25) / 2
    assert fault.wasted_rank_s == 2 * (26 - 9.25)  # step 30, from 26 on, is the first new one
    assert (fault.backoff_s, fault.assumed_s) == (1 + 2.25, 0)


def test_the_spread_of_a_lost_pod(logs: Logs) -> None:
    out_of_step(logs)
    (fault,) = logs.ledger().faults
    assert [(round(s.t - fault.t, 2), s.rank, s.pod, s.how, s.text) for s in fault.spread] == [
        (0, 1, 1, "injected", "rank 1 was killed with its pod 1 in step 30 (injected pod@30:1)"),
        (
            *(0.25, 0, 0, "connection"),
            f"rank 0 lost its connection to rank 1 in pod 1 in step 30: RuntimeError: {CLOSED}",
        ),
        (0.25, None, 1, "pod_exit", "the container of pod 1 was killed by SIGKILL"),
        (7, None, 0, "gave_up", f"torchrun in pod 0 gave up: DistStoreError: {WAITED}"),
        (7.25, None, 0, "pod_exit", "the container of pod 0 ended with code 1"),
        (7.25, None, 1, "gave_up", f"torchrun in pod 1 gave up: DistStoreError: {WAITED}"),
        (7.5, None, 1, "pod_exit", "the container of pod 1 ended with code 1"),
    ]
    assert fault.first_cause == fault.spread[0].text
    assert [sign.first for sign in fault.spread] == [True] + [False] * 6


def test_a_gang_restart(logs: Logs) -> None:
    """All pods are made anew, and wait for what a cluster is assumed to add; rank 0 had not noticed."""
    start(logs, policy="gang")
    hit(logs, "pod")
    logs.launcher(9.5, "pod_exit", pod=1, attempt=0, code=-9)
    logs.launcher(9.5, "exit", 1, code=None, pod=1)
    logs.launcher(9.5, "detected", 1, cause="the process of rank 1 is gone")
    logs.launcher(9.75, "pod_stop", pod=0, reason="gang")
    logs.launcher(10.5, "exit", 0, code=-15, pod=0)
    logs.launcher(10.75, "pod_exit", pod=0, attempt=0, code=-15)
    for pod in (0, 1):
        logs.launcher(10.75, "pod_wait", pod=pod, backoff_s=1.0, assumed_s=2.0)
        container(logs, 13.75, pod, 1, "recreate")
    agents(logs, 14, 14, start=15)
    complete(logs, come_back(logs, 16))
    ledger = logs.ledger()
    check_partition(ledger)
    (fault,) = ledger.faults
    assert (fault.tier, fault.mttr_s, fault.backoff_s, fault.assumed_s) == ("pods", 22 - 9.25, 1, 2)
    assert spans(ledger, 0, 9.5)[:3] == [("abort", 10.5), ("restart", 14), ("rendezvous", 15)]
    assert [sign.text for sign in fault.spread[2:]] == [
        "rank 0 was ended with its pod 0 by the gang restart in step 30",
        "the container of pod 0 was ended by the gang restart",
    ]


def test_a_worker_that_torchrun_alone_brings_back(logs: Logs) -> None:
    start(logs)
    logs.fault(1, 9.25, "kill", 30)
    logs.launcher(9.5, "exit", 1, code=-9, pod=1)
    logs.launcher(9.5, "detected", 1, cause="the process of rank 1 is gone")
    error(logs, 0, 9.5, "RuntimeError", CLOSED)
    logs.launcher(10, "exit", 0, code=1, pod=0)
    agents(logs, 10.25, 9.75, start=11)
    complete(logs, come_back(logs, 12))
    ledger = logs.ledger()
    check_partition(ledger)
    (fault,) = ledger.faults
    assert (fault.kind, fault.tier, fault.mttr_s, fault.lost_steps) == ("kill", "torchrun", 18 - 9.25, 1)
    assert [sign.how for sign in fault.spread] == ["injected", "connection"]
    assert ledger.launches[0].outcome == "finished" and ledger.lives[0].outcome is None


def test_a_hang_is_detected_when_the_others_have_waited_long_enough(logs: Logs) -> None:
    start(logs)
    logs.fault(1, 9.25, "hang", 30)
    error(logs, 0, 69.25, "RuntimeError", "Timed out waiting 60000ms for recv operation to complete")
    logs.launcher(70, "exit", 0, code=1, pod=0)
    logs.launcher(70, "detected", 0, cause="the process of rank 0 is gone")
    logs.launcher(71, "exit", 1, code=-15, pod=1)
    agents(logs, 70.5, 71.5, start=72)
    complete(logs, come_back(logs, 73))
    ledger = logs.ledger()
    check_partition(ledger)
    (fault,) = ledger.faults
    assert (fault.kind, fault.rank, fault.tier) == ("hang", 1, "torchrun")
    assert phases(fault)["detect"] == 70 - 9.25
    assert [sign.text for sign in fault.spread] == [
        "rank 1 stopped answering in step 30 (injected hang@30:1)",
        "rank 0 waited in vain in step 30: RuntimeError: Timed out waiting 60000ms for recv operation to "
        "complete",
        "rank 1 was ended by torchrun in pod 1 in step 30",
    ]


def test_a_network_cut_that_is_over_before_anyone_gives_up_costs_nothing(logs: Logs) -> None:
    start(logs)
    hit(logs, "net")
    logs.launcher(15, "repaired", pod=1, id="net@30:1")
    for rank in (0, 1):
        logs.rank(rank, 16, "step", 30, loss=1.0)
    complete(logs, steps(logs, 16, 31, 31))
    ledger = logs.ledger()
    check_partition(ledger)
    assert [(fault.tier, fault.spread) for fault in ledger.faults] == [("outlived", ())]


def test_a_network_cut_that_lasts(logs: Logs) -> None:
    """Both ranks wait in vain; only then is it over, which is too late."""
    start(logs)
    hit(logs, "net")
    for rank in (0, 1):
        error(logs, rank, 19 + rank, "RuntimeError", "Application timeout caused pair closure")
        logs.launcher(19.5 + rank, "exit", rank, code=1, pod=rank)
    logs.launcher(19.5, "detected", 0, cause="the process of rank 0 is gone")
    logs.launcher(29.25, "repaired", pod=1, id="net@30:1")
    agents(logs, 30, 30, start=31)
    complete(logs, come_back(logs, 32))
    ledger = logs.ledger()
    check_partition(ledger)
    (fault,) = ledger.faults
    assert (fault.kind, fault.rank, fault.mttr_s) == ("net", 1, 38 - 9.25)
    assert (
        fault.first_cause == "rank 1 was cut off with the network of its pod 1 in step 30 (injected net@30:1)"
    )
    assert phases(fault)["detect"] == 19.5 - 9.25


def test_a_slow_network_is_the_cause_only_if_nothing_else_is(logs: Logs) -> None:
    """Steps go on while it is slow: they count, and the loss begins after the last of them."""
    start(logs)
    hit(logs, "slow", t=8.5)
    for rank in (0, 1):
        logs.rank(rank, 14, "step", 30, loss=1.0)
        logs.step(rank, 14, 19, 31)
        logs.phase(rank, 19, "step", 32)
    going_on = logs.ledger()
    assert [fault.tier for fault in going_on.faults] == ["outlived"] and "detect" not in buckets(going_on)
    error(logs, 0, 24, "RuntimeError", "Timed out waiting 5000ms for recv operation to complete")
    logs.launcher(25, "detected", 0, cause="the process of rank 0 is gone")
    ledger = logs.ledger()
    check_partition(ledger)
    (fault,) = ledger.faults
    assert (fault.kind, fault.tier, fault.t - EPOCH) == ("slow", None, 8.5)
    assert buckets(ledger)["useful"] == 2 * (19 - 7) and phases(fault) == {"detect": 25 - 19}
    logs.fault(0, 23, "kill", 32)
    assert (
        logs.ledger().lives[0].signs[0].text == "rank 0 was killed by SIGKILL in step 32 (injected kill@32:0)"
    )


def test_a_pod_that_is_lost_again_on_the_way_back(logs: Logs) -> None:
    start(logs)
    lose_pod_1(logs, backoff=4)  # cut short at 10.5
    logs.launcher(10.25, "agent", pod=0, state="rendezvous")
    container(logs, 10.5, 1, 1, "restart")
    hit(logs, "pod", t=11)
    ended(logs, 11, 1, -9, backoff=2)
    container(logs, 13, 1, 2, "restart")
    agents(logs, 10.25, 13.5, start=14)
    complete(logs, come_back(logs, 15))
    ledger = logs.ledger()
    check_partition(ledger)
    first, second = ledger.faults
    assert (first.t - EPOCH, first.mttr_s, first.backoff_s) == (9.25, 21 - 9.25, 3)
    assert (second.t - EPOCH, second.mttr_s, second.backoff_s) == (11, 21 - 11, 2)
    assert first.first_cause == second.first_cause == first.spread[0].text


def test_a_second_life_that_is_lost_before_any_progress(logs: Logs) -> None:
    """Its ranks get as far as restoring; the first fault's recovery goes on through it."""
    start(logs)
    lose_pod_1(logs)
    container(logs, 10.5, 1, 1, "restart")
    agents(logs, 10.25, 11, start=12)
    logs.life()
    begin(logs, 13, 28)
    logs.launcher(17.5, "exit", 0, code=-9, pod=0)
    logs.launcher(17.5, "detected", 0, cause="the process of rank 0 is gone")
    error(logs, 1, 17.5, "RuntimeError", "Connection reset by peer [10.244.0.10]:99")
    logs.launcher(18, "exit", 1, code=1, pod=1)
    agents(logs, 17.75, 18.25, start=19)
    complete(logs, come_back(logs, 20))
    ledger = logs.ledger()
    check_partition(ledger)
    pod, kill = ledger.faults
    assert (pod.tier, pod.mttr_s, pod.lost_steps) == ("pods", 26 - 9.25, 1)
    assert (kill.kind, kill.rank, kill.generation, kill.tier) == ("kill", 0, 1, "torchrun")
    assert (kill.mttr_s, kill.lost_steps) == (26 - 17.5, 0)
    assert kill.first_cause == "rank 0 was killed by SIGKILL in restore"
    assert kill.spread[1].text.startswith("rank 1 lost its connection to rank 0 in pod 0 in restore: ")


def test_a_life_that_fails_before_its_ranks_agree_on_a_generation(logs: Logs) -> None:
    """Each of its ranks counts by itself: that is one life all the same."""
    start(logs)
    lose_pod_1(logs)
    container(logs, 10.5, 1, 1, "restart")
    agents(logs, 10.25, 11, start=12)
    for rank in (0, 1):
        logs.life()
        logs.phase(rank, 13 + rank / 4, "startup")
        logs.phase(rank, 14, "rendezvous")
        error(logs, rank, 20 + rank / 4, "DistStoreError", "wait timeout after 6000ms, keys: /x")
        logs.launcher(20.5, "exit", rank, code=1, pod=rank)
    logs.launcher(20.5, "detected", 0, cause="the process of rank 0 is gone")
    agents(logs, 21, 21, start=22)
    complete(logs, come_back(logs, 23))
    ledger = logs.ledger()
    check_partition(ledger)
    assert [(life.generation, life.start - EPOCH) for life in ledger.lives] == [(0, 0), (1, 13), (3, 23)]
    assert [(fault.kind, fault.generation) for fault in ledger.faults] == [("pod", 0), ("exception", 1)]
    assert ledger.faults[0].mttr_s == 29 - 9.25 and ledger.lives[1].restored is None


def test_a_rank_that_never_spoke_in_a_life(logs: Logs) -> None:
    """Rank 1 is gone before it has anything to say: its lane goes from one way back into the next."""
    start(logs)
    lose_pod_1(logs)
    container(logs, 10.5, 1, 1, "restart")
    agents(logs, 10.25, 11, start=12)
    logs.life()
    logs.phase(0, 13, "startup")
    logs.phase(0, 14, "rendezvous")
    logs.launcher(15, "exit", 1, code=-9, pod=1)
    logs.launcher(15, "detected", 1, cause="the process of rank 1 is gone")
    error(logs, 0, 15, "RuntimeError", CLOSED)
    logs.launcher(15.5, "exit", 0, code=1, pod=0)
    agents(logs, 16, 16, start=17)
    complete(logs, come_back(logs, 18))
    ledger = logs.ledger()
    check_partition(ledger)
    assert spans(ledger, 1, 11.5)[:5] == [
        ("rendezvous", 12),
        ("restart", 15),
        ("restart", 16),
        ("rendezvous", 17),
        ("restart", 18),
    ]
    assert ledger.lives[1].signs[0].text == "rank 1 was killed by SIGKILL in startup"


def give_up(logs: Logs, t: float) -> None:
    """No restart is left."""
    logs.launcher(t, "pod_stop", pod=0, reason="end")
    logs.launcher(t + 0.5, "pod_exit", pod=0, attempt=0, code=-15)
    logs.launcher(t + 0.5, "aborted")
    logs.launcher(t + 1, "launch_end", outcome="failed")


def test_a_launch_that_gave_up_and_is_resumed_by_hand(logs: Logs) -> None:
    start(logs)
    lose_pod_1(logs, backoff=0)
    logs.launcher(10.25, "agent", pod=0, state="rendezvous")
    give_up(logs, 12)
    lost = logs.ledger()
    check_partition(lost)
    assert spans(lost, 0, 10) == [("restart", 10.25), ("rendezvous", 12), ("abort", 13)]
    assert [(fault.tier, fault.mttr_s) for fault in lost.faults] == [(None, None)]
    assert lost.faults[0].wasted_rank_s == 2 * (13 - 9.25)
    logs.launch(20, ranks=2, **PODS)
    container(logs, 20, 0)
    container(logs, 20, 1)
    agents(logs, 21, 21, start=22)
    complete(logs, steps(logs, begin(logs, 23, 28), 29, 31))
    ledger = logs.ledger()
    check_partition(ledger)
    (fault,) = ledger.faults
    assert (fault.tier, fault.mttr_s, fault.between_launches_s) == ("relaunch", 29 - 9.25 - 7, 7)
    assert buckets(ledger)["restart"] == buckets(lost)["restart"] + 2 * 4, "the launch after a lost one"


def test_a_launcher_that_was_killed_in_the_middle_of_a_recovery(logs: Logs) -> None:
    start(logs)
    lose_pod_1(logs)
    logs.launcher(10.25, "agent", pod=0, state="rendezvous")
    container(logs, 10.5, 1, 1, "restart")
    going_on = logs.ledger()
    check_partition(going_on)
    assert [(fault.tier, fault.mttr_s, fault.lost_steps) for fault in going_on.faults] == [(None,) * 3]
    logs.launch(30, ranks=2, **PODS)
    complete(logs, steps(logs, begin(logs, 31, 28), 29, 31))
    ledger = logs.ledger()
    check_partition(ledger)
    (fault,) = ledger.faults
    assert (fault.tier, fault.between_launches_s, fault.mttr_s) == ("relaunch", 19.5, 37 - 9.25 - 19.5)


def test_a_plain_torchrun_after_a_launch_is_a_launch_of_its_own(logs: Logs) -> None:
    """Whether the launch before said its end or was killed; where it was one that starts its ranks once."""
    for killed in (False, True):
        one = Logs(logs.directory.with_name(f"killed-{killed}"))
        one.launch(0, ranks=2)
        steps(one, 1, 1, 2)
        if not killed:
            one.lost(detected=4, rank=1, aborted=5, end=5, outcome="failed")
        one.life()
        steps(one, begin(one, 10, 2), 3, 4)
        ledger = one.ledger()
        check_partition(ledger)
        assert [len(launch.lives) for launch in ledger.launches] == [1, 1]
        assert ledger.launches[1].start - EPOCH == 10


def test_ranks_may_change_pods(logs: Logs) -> None:
    """torchrun counts ranks anew: rank 1's way back is that of the pod where it was."""
    start(logs)
    lose_pod_1(logs)
    container(logs, 10.5, 1, 1, "restart")
    for rank, pod in ((0, 1), (1, 0)):
        logs.launcher(11 + pod / 2, "agent", pod=pod, state="rendezvous")
        logs.launcher(12, "agent", pod=pod, state="start")
        logs.launcher(12.25, "spawn", rank, pid=20 + rank, pod=pod)
    t = come_back(logs, 13, pods=(1, 0))
    logs.fault(0, t - 0.5, "kill", 31)
    logs.launcher(t, "exit", 0, code=-9, pod=1)
    logs.launcher(t, "detected", 0, cause="the process of rank 0 is gone")
    ledger = logs.ledger()
    assert spans(ledger, 1, 10)[:2] == [("restart", 11.5), ("rendezvous", 12)]
    assert [life.signs[0].pod for life in ledger.lives] == [1, 1]
    ended(logs, t + 1, 1, -9)
    first, second = logs.ledger().faults
    assert [sign.how for sign in first.spread] == ["injected", "connection", "pod_exit"], "until it was back"
    assert [sign.how for sign in second.spread] == ["injected", "pod_exit"]


# --- any run ---------------------------------------------------------------------------------------------


@st.composite
def soups(draw: st.DrawFn) -> list[Event]:
    """A launch of pods, and events without rhyme or reason: in any order and generation."""
    times = st.floats(EPOCH, EPOCH + 50) | st.integers(0, 20).map(lambda t: EPOCH + t)
    whats = ["phase", "phase", "step", "step", "end", "fault", "error", "exit", "detected", "spawn", "joined"]
    pods = ["agent", "gave_up", "pod_exit", "pod_start", "pod_stop", "pod_wait", "repaired"]
    attributes = st.fixed_dictionaries(
        {
            "phase": st.sampled_from(PHASES),
            "code": st.sampled_from([0, 1, -9, -15, -6, None, 137]),
            "state": st.sampled_from(["rendezvous", "start"]),
            "reason": st.sampled_from(["gang", "drain", "end", "restart"]),
            "kind": st.sampled_from(["kill", "hang", "pod", "net", "slow", "drain", "pid1"]),
            "message": st.sampled_from(["Timed out waiting", CLOSED, "bad batch"]),
            "backoff_s": st.floats(0, 9),
            "assumed_s": st.floats(0, 9),
        },
        optional={"pod": st.integers(0, 1), "id": st.just("x"), "ip": st.just("10.244.0.11")},
    )
    event = st.builds(
        Event,
        t=times,
        what=st.sampled_from([*whats, *pods, "restored"]),
        rank=st.none() | st.integers(0, 2),
        generation=st.integers(0, 4),
        step=st.none() | st.integers(0, 4),
        attributes=attributes,
    )
    launches = [
        Event(EPOCH, "launch", attributes={"ranks": 2, **PODS}),
        Event(EPOCH + 30, "launch", None, 3, None, {"ranks": 2, **PODS}),
    ]
    ends = [Event(EPOCH + 29, "launch_end", attributes={"outcome": "failed"})]
    first, last = draw(st.integers(0, 2)), draw(st.integers(0, 1))
    return launches[:first] + ends[:last] + draw(st.lists(event, max_size=50))


@settings(deadline=None, max_examples=400)
@given(soups())
def test_whatever_was_written_no_second_is_lost_or_counted_twice(events: list[Event]) -> None:
    ledger = Ledger.of(events)
    check_partition(ledger)
    for life in ledger.lives:
        assert sum(sign.first for sign in life.signs) <= 1
        assert not any(sign.first for sign in life.signs[1:])
    for fault in ledger.faults:
        assert fault.wasted_rank_s <= sum(ledger.buckets_s.values()) + 1e-5


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), losses=st.lists(st.booleans(), max_size=5))
def test_any_run_of_pods_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, seed: int, losses: list[bool]
) -> None:
    """A naive account beside it, of equal ranks that come back through torchrun or through pods."""
    dice = random.Random(seed)
    logs = Logs(tmp_path_factory.mktemp("run") / "events")
    logs.launch(0, ranks=2, **PODS)
    account = {"startup": 2 * 3.0}
    t, done, first = 3.0, 0, "startup"

    def spend(bucket: str, seconds: float) -> None:
        nonlocal t
        t += seconds
        account[bucket] = account.get(bucket, 0.0) + 2 * seconds

    for new_pods in [*losses, None]:
        for pod in (0, 1):
            logs.launcher(t - 0.25, "spawn", pod, pid=1, pod=pod)
        begin(logs, t, restored := dice.randint(0, done))
        for bucket in (first, "rendezvous", "build", "restore"):
            spend(bucket, 1)
        for step in range(restored + 1, restored + 1 + dice.randint(0, 4)):
            steps(logs, t, step, step)
            spend("useful" if step > done else "recompute", 1)
            done = max(done, step)
        if new_pods is None:
            break
        for rank in (0, 1):
            logs.phase(rank, t, "step", 99)
        spend("recompute", 0.5)
        logs.fault(rank := dice.randint(0, 1), t, "kill", 99)
        spend("detect", 0.25)
        logs.launcher(t, "detected", rank, cause="x")
        spend("abort", wait := dice.randint(0, 4) / 4)
        for rank in (0, 1):
            logs.launcher(t, "exit", rank, code=-9, pod=rank)
        if new_pods:
            for pod in (0, 1):
                ended(logs, t, pod, 1, backoff=wait)
                container(logs, t + wait, pod, 1, "restart")
        spend("restart", 1.5)
        for pod in (0, 1):
            logs.launcher(t, "agent", pod=pod, state="rendezvous")
        spend("rendezvous", 2)
        for pod in (0, 1):
            logs.launcher(t, "agent", pod=pod, state="start")
        spend("restart", 0.5)
        logs.life()
        first = "restart"
    logs.launcher(t, "launch_end", outcome="interrupted")
    logs.close()
    ledger = Ledger.of(read_events(logs.directory))
    check_partition(ledger)
    assert buckets(ledger) == {name: seconds for name, seconds in account.items() if seconds}
    assert [fault.kind for fault in ledger.faults] == ["kill"] * len(losses) + ["lost"]
