"""Who was in trouble first, and what came of it: with the injector's word for it and without."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from ridethrough.events import Event
from ridethrough.faults import KINDS
from ridethrough.ledger import Sign, signs

IP = ("10.244.0.10", "10.244.0.11")
CLOSED = (
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [{ip}]:5123"
)
TIMED_OUT = (
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"
)

#: As torch 2.13 writes them: gloo, TCPStore, sockets, this package.
HEARD = {
    CLOSED.format(ip=IP[1]): "connection",
    "[gloo/transport/tcp/pair.cc:452] Read error [10.244.0.11]:1: Connection reset by peer": "connection",
    "writev [10.244.0.11]:1: Broken pipe": "connection",
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?": "connection",
    "rank 0 waited for the commit of step 40, for 600 s at most; a rank is gone or late: x": "connection",
    TIMED_OUT: "timeout",
    "Application timeout caused pair closure": "timeout",
    "wait timeout after 6000ms, keys: /none/torchelastic": "timeout",
    "The client socket has timed out after 60000ms while trying to connect to (10.244.0.10, 1).": "timeout",
}

#: Taken from torch's and NCCL's sources; not run on a GPU.
NCCL = {
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)": "timeout",
    "NCCL communicator was aborted on rank 0.": "connection",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.": "connection",
    "NCCL error: remote process exited or there was a network error, NCCL version 2.27": "connection",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed": "connection",
}


def event(t: float, what: str, rank: int | None = None, step: int | None = None, **more: Any) -> Event:
    return Event(t, what, rank, 0, step, more)


def error(t: float, rank: int, message: str, type: str = "RuntimeError") -> Event:
    return event(t, "error", rank, type=type, message=message, traceback="")


def running(ranks: int = 2, pods: int = 0, t: float = 9.0) -> list[Event]:
    """Ranks in step 30 since `t`; in pods, where there are some, of equal shares."""
    said = [event(0, "launch", ranks=ranks)]
    said += [
        event(0, "pod_start", pod=pod, ip=IP[pod], attempt=0, pid=1, reason="first") for pod in range(pods)
    ]
    for rank in range(ranks):
        about = {"pod": rank * pods // ranks} if pods else {}
        said.append(event(1, "spawn", rank, pid=1, **about))
        said.append(event(2, "joined", rank, device="cpu", backend="gloo", **about))
        said.append(event(8, "step", rank, 29, loss=1.0))
        said.append(event(t, "phase", rank, 30, phase="step"))
    return said


def detected(t: float, rank: int | None = None) -> Event:
    return event(t, "detected", rank, cause="a process is gone")


def told(found: tuple[Sign, ...]) -> list[tuple[int | None, str, str]]:
    return [(sign.rank, sign.how, sign.text) for sign in found]


# --- each kind of fault, on each rank --------------------------------------------------------------------

#: What its peer says of it, and how its own process ends: the exit's code and when.
AFTERWARDS: dict[str, tuple[str, int | None, float]] = {
    "exception": (CLOSED, 1, 10.2),
    "kill": (CLOSED, -9, 10.1),
    "exit": (CLOSED, 17, 10.1),
    "hang": (TIMED_OUT, -15, 71.0),
    "stop": (TIMED_OUT, -9, 73.0),
    "pod": (CLOSED, None, 10.1),
    "drain": (CLOSED, -15, 10.1),
}


def struck(kind: str, rank: int, pods: int) -> list[Event]:
    """Two ranks, one of which is struck at 10; as their launchers write it down."""
    message, code, gone = AFTERWARDS[kind]
    peer, about = 1 - rank, (lambda rank: {"pod": rank} if pods else {})
    heard = 70.0 if message == TIMED_OUT else 10.02
    id = f"{kind}@30:{rank}"
    said = running(pods=pods)
    said.append(event(10, "fault", rank, 30, kind=kind, id=id, source="inside", **about(rank)))
    if kind == "exception":
        said.append(error(10, rank, id, "InjectedFault"))
    if kind == "drain":
        said.append(event(10, "pod_stop", pod=rank, reason="drain"))
    said.append(error(heard, peer, message.format(ip=IP[rank])))
    first = rank if gone < heard + 0.15 else peer
    said.append(detected(min(gone, heard + 0.15), first))
    said.append(event(gone, "exit", rank, code=code, **about(rank)))
    said.append(event(heard + 0.15, "exit", peer, code=1, **about(peer)))
    if kind in ("pod", "drain"):
        said.append(event(10.1, "pod_exit", pod=rank, attempt=0, code=-9 if kind == "pod" else -15))
    return sorted(said, key=lambda event: event.t)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("pods", [0, 2])
@pytest.mark.parametrize("kind", [kind for kind in AFTERWARDS])
def test_the_first_cause_is_the_rank_that_was_struck(kind: str, pods: int, rank: int) -> None:
    if kind in ("pod", "drain") and not pods:
        return
    events = struck(kind, rank, pods)
    first, *rest = signs(events, 2)
    assert (first.rank, first.how, first.first, first.t) == (rank, "injected", True, 10)
    assert kind == "exception" or first.text.endswith(f" (injected {kind}@30:{rank})")
    assert first.text.startswith(f"rank {rank} ") and "step 30" in first.text
    echo = next(sign for sign in rest if sign.rank == 1 - rank)
    assert echo.how == ("timeout" if kind in ("hang", "stop") else "connection")
    assert not {(sign.rank, sign.how) for sign in rest} & {
        (rank, "killed"),
        (rank, "exited"),
        (rank, "raised"),
    }

    stripped = [event for event in events if event.what != "fault"]
    first, *rest = signs(stripped, 2)
    assert (first.rank, first.first) == (rank, True)
    assert first.how == {
        "exception": "raised",
        "exit": "exited",
        "hang": "silent",
        "stop": "silent",
    }.get(kind, "killed")
    assert not any(sign.first for sign in rest)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("kill", "rank 1 was killed by SIGKILL in step 30 (injected kill@30:1)"),
        ("exit", "rank 1 failed first: it ended with code 17 in step 30 (injected exit@30:1)"),
        ("exception", "rank 1 failed first: InjectedFault: exception@30:1 (step 30)"),
        ("hang", "rank 1 stopped answering in step 30 (injected hang@30:1)"),
        ("stop", "rank 1 stopped answering in step 30 (injected stop@30:1)"),
        ("pod", "rank 1 was killed with its pod 1 in step 30 (injected pod@30:1)"),
        ("net", "rank 1 was cut off with the network of its pod 1 in step 30 (injected net@30:1)"),
        ("slow", "rank 1 was slowed down with the network of its pod 1 in step 30 (injected slow@30:1)"),
        ("drain", "rank 1 was drained with its pod 1 in step 30 (injected drain@30:1)"),
        (
            "pid1",
            "rank 1 lost its launcher in step 30: the first process of its pod 1 was stopped "
            "(injected pid1@30:1)",
        ),
    ],
)
def test_the_sentence_on_each_kind(kind: str, sentence: str) -> None:
    fault = event(10, "fault", 1, 30, kind=kind, id=f"{kind}@30:1", source="inside", pod=1)
    (sign,) = signs([*running(pods=2), fault], 2)
    assert (sign.text, sign.pod, sign.event) == (sentence, 1, fault)
    assert kind in KINDS


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("kill", "rank 1 was killed by SIGKILL in step 30"),
        ("exit", "rank 1 failed first: it ended with code 17 in step 30"),
        ("exception", "rank 1 failed first: InjectedFault: exception@30:1 (step 30)"),
        ("hang", "rank 1 stopped answering in step 30, 61.0 s before rank 0 gave up"),
        ("pod", "rank 1 was killed with its pod 1 in step 30"),
        ("drain", "rank 1 was drained with its pod 1 in step 30"),
    ],
)
def test_the_sentence_when_nobody_has_said_what_was_done(kind: str, sentence: str) -> None:
    events = [event for event in struck(kind, 1, pods=2) if event.what != "fault"]
    assert signs(events, 2)[0].text == sentence


def test_a_code_that_nobody_knows() -> None:
    found = signs([*running(), event(10, "exit", 1, code=None)], 2)
    assert told(found) == [(1, "exited", "rank 1 was gone without a word in step 30")]


# --- echoes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("message", "how"), [*HEARD.items(), *NCCL.items()])
def test_an_echo_is_no_first_cause_where_a_rank_has_a_trouble_of_its_own(message: str, how: str) -> None:
    own = error(10.5, 1, "the batch is empty", "ValueError")
    found = signs([*running(), error(10, 0, message), own], 2)
    assert [(sign.rank, sign.how, sign.first) for sign in found] == [(1, "raised", True), (0, how, False)]
    assert found[0].t == 10, "a cause is not later than what came of it"


def test_errors_of_a_rank_s_own_are_no_echoes() -> None:
    for type, message in (
        ("ValueError", "the batch is empty"),
        ("CheckpointError", "step-00000030 is damaged: rank-0.distcp has 10 bytes instead of 20"),
        ("RunError", "the launcher (pid 7) is gone"),
        ("OSError", "[Errno 28] No space left on device"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("InjectedFault", "exception@3:1"),
    ):
        found = signs([*running(), error(10, 0, CLOSED), error(10.25, 1, message, type)], 2)
        assert (found[0].rank, found[0].how) == (1, "raised"), message


def test_what_an_echo_says_of_its_peer() -> None:
    closed = error(10, 0, CLOSED.format(ip=IP[1]))
    killed = event(10, "exit", 1, code=-9, pod=1)
    lost = "in step 30: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert signs([*running(pods=2), closed, killed], 2)[1].text == (
        f"rank 0 lost its connection to rank 1 in pod 1 {lost} [10.244.0.11]:5123"
    )
    assert signs([*running(4, pods=2), closed, killed], 4)[1].text.startswith(
        "rank 0 lost its connection to pod 1 (ranks 2, 3) in step 30: "
    )
    # Without a network of their own, all pods have one address, and it says nothing.
    shared = [
        replace(one, attributes={**one.attributes, "ip": IP[1]}) if one.what == "pod_start" else one
        for one in running(pods=2)
    ]
    assert signs([*shared, closed, killed], 2)[1].text.startswith(f"rank 0 lost a connection {lost}")
    # What stood before this life says it as well.
    before, life = running(pods=2)[:5], running(pods=2)[5:]
    assert "to rank 1 in pod 1" in signs([*life, closed, killed], 2, before)[1].text


def test_frames_of_cpp_and_long_messages_are_left_out() -> None:
    frames = f"Exception raised from wait at Store.cpp:1\nframe #0: {'y' * 900}"
    message = f"wait timeout after 6000ms, keys: /x\n{frames}"
    (first, *_) = signs([error(10, 0, message, "DistStoreError")], 1)
    assert (
        first.text == "rank 0 waited in vain in startup: DistStoreError: wait timeout after 6000ms, keys: /x"
    )
    found = signs([error(10, 0, "bad"), error(11, 1, "worse " * 200)], 2)
    assert len(found[1].text) <= 200 and found[1].text.startswith("rank 1 failed then: RuntimeError: worse")


def test_a_rank_that_dies_is_dated_before_the_errors_it_causes_though_noticed_after_them() -> None:
    raised, killed = error(10.0, 0, "bad", "ValueError"), event(10.1, "exit", 1, code=-9)
    assert [sign.rank for sign in signs([*running(), raised, killed], 2)] == [1, 0]
    assert signs([*running(), raised, killed], 2)[0].t == 10.0
    late = event(12, "exit", 1, code=-15)
    assert [sign.rank for sign in signs([*running(), raised, late], 2)] == [0, 1]


def test_sigabrt_is_how_the_watchdog_of_nccl_ends_a_rank() -> None:
    """A rank that waited in vain is aborted without a word; with gloo, SIGABRT is a rank's own trouble."""
    aborts = event(70, "exit", 0, code=-signal.SIGABRT)
    nccl = [
        replace(one, attributes={"device": "cuda", "backend": "nccl"}) if one.what == "joined" else one
        for one in running()
    ]
    first, second = signs([*nccl, aborts], 2)
    assert (first.rank, first.how) == (1, "silent")
    assert second.text == "rank 0 was killed by SIGABRT in step 30"
    assert [(sign.rank, sign.how) for sign in signs([*running(), aborts], 2)] == [(0, "killed")]


# --- silence ---------------------------------------------------------------------------------------------


def test_of_several_silent_ranks_the_one_heard_least_is_first() -> None:
    said = running(ranks=4)
    said = [replace(one, t=8.75) if one.what == "phase" and one.rank == 2 else one for one in said]
    found = signs([*said, error(69, 0, TIMED_OUT)], 4)
    assert [(sign.rank, sign.how) for sign in found] == [
        (2, "silent"),
        (1, "silent"),
        (3, "silent"),
        (0, "timeout"),
    ]
    assert found[0].text == "rank 2 stopped answering in step 30, 60.2 s before rank 0 gave up"
    assert (found[0].t, found[0].event) == (8.75, None)


def test_a_rank_that_never_spoke_is_the_silent_one() -> None:
    said = [event(3, "phase", 0, phase="rendezvous"), error(9, 0, "wait timeout after 6000ms, keys: /x")]
    first, _ = signs(said, 2)
    assert (first.rank, first.how, first.t) == (1, "silent", 9)
    assert first.text == "rank 1 stopped answering in startup, 0.0 s before rank 0 gave up"


def test_a_rank_that_is_done_is_not_silent() -> None:
    done = [event(10, "end", 1), event(10.5, "exit", 1, code=0)]
    found = signs([*running(), *done, error(70, 0, CLOSED)], 2)
    assert [(sign.rank, sign.how) for sign in found] == [(0, "connection")]
    assert found[0].first


# --- who ended whom --------------------------------------------------------------------------------------

KILLED = event(10, "exit", 1, code=-9, pod=1)


@pytest.mark.parametrize(
    ("pods", "more", "by"),
    [
        (0, [event(12, "exit", 0, code=-9)], "by the launcher"),
        (0, [event(10.75, "exit", 0, code=-15)], "by the launcher"),
        (2, [event(10.75, "exit", 0, code=-15, pod=0)], "by torchrun in pod 0"),
        (2, [event(12, "exit", 0, code=None, pod=0)], "by torchrun in pod 0"),
        (
            2,
            [
                event(11, "pod_stop", pod=0, reason="gang"),
                event(12, "exit", 0, code=None, pod=0),
                event(12, "pod_exit", pod=0, attempt=0, code=137),
            ],
            "with its pod 0 by the gang restart",
        ),
        (
            2,
            [event(11, "pod_stop", pod=0, reason="end"), event(12, "exit", 0, code=-15, pod=0)],
            "by the launcher",
        ),
        (
            2,
            [event(12, "exit", 0, code=-15, pod=0), event(12.1, "pod_exit", pod=0, attempt=0, code=1)],
            "with its pod 0",
        ),
    ],
)
def test_who_ended_a_rank_that_had_no_trouble(pods: int, more: list[Event], by: str) -> None:
    found = signs([*running(pods=pods), KILLED, detected(10, 1), *more], 2)
    assert (found[0].rank, found[0].how) == (1, "killed")
    assert told(found[1:2]) == [(0, "ended", f"rank 0 was ended {by} in step 30")]


def test_torchrun_ends_the_others_in_a_pod_before_anyone_has_looked() -> None:
    """Rank 2 fails; torchrun ends rank 3 beside it, and the launcher sees that first."""
    said = [error(10, 2, "bad", "ValueError"), event(10.1, "exit", 3, code=-15, pod=1)]
    found = signs([*running(4, pods=2), *said, detected(10.2, 3), event(10.3, "exit", 2, code=1, pod=1)], 4)
    assert [(sign.rank, sign.how) for sign in found] == [(2, "raised"), (3, "ended")]


def test_all_ranks_of_a_lost_pod_are_killed_with_it_whether_or_not_they_were_seen_to_end() -> None:
    lost = [event(10, "pod_exit", pod=1, attempt=0, code=137), event(10.1, "exit", 2, code=None, pod=1)]
    found = signs([*running(4, pods=2), *lost, detected(10)], 4)
    assert told(found) == [
        (2, "killed", "rank 2 was killed with its pod 1 in step 30"),
        (3, "killed", "rank 3 was killed with its pod 1 in step 30"),
        (None, "pod_exit", "the container of pod 1 was killed by SIGKILL"),
    ]


def test_containers_and_agents_that_end_before_a_rank_has_said_anything() -> None:
    gave_up = event(6, "gave_up", pod=0, error="DistStoreError: wait timeout after 6000ms, keys: /x")
    ended = event(6.5, "pod_exit", pod=0, attempt=0, code=1)
    found = signs([gave_up, ended, detected(6.5)], 2)
    assert told(found) == [
        (None, "gave_up", "torchrun in pod 0 gave up: DistStoreError: wait timeout after 6000ms, keys: /x"),
        (None, "pod_exit", "the container of pod 0 ended with code 1"),
    ]
    assert found[0].first


def test_torchrun_that_is_asked_to_end_does_not_give_up() -> None:
    said = [event(11, "pod_stop", pod=0, reason="gang")]
    said += [event(11.1, "gave_up", pod=0, error="torch.distributed.elastic.api.SignalException: signal: 15")]
    assert [sign.how for sign in signs([*running(pods=2), KILLED, detected(10, 1), *said], 2)] == ["killed"]
    found = signs([*running(pods=2), KILLED, detected(10, 1), said[1]], 2)
    assert found[1].text == "torchrun in pod 0 gave up: SignalException: signal: 15"


def test_a_container_that_completes_is_no_sign() -> None:
    assert signs([*running(), event(10, "pod_exit", pod=0, attempt=0, code=0)], 2) == ()


# --- while it goes on ------------------------------------------------------------------------------------


def test_nothing_is_wrong() -> None:
    assert signs([], 2) == () == signs(running(), 2)
    done = [event(10, "end", rank) for rank in (0, 1)] + [event(11, "exit", rank, code=0) for rank in (0, 1)]
    assert signs([*running(), *done], 2) == ()


@pytest.mark.parametrize("kind", ["stop", "net", "slow", "pid1"])
def test_a_fault_that_the_ranks_go_on_after_is_no_sign(kind: str) -> None:
    fault = event(9.5, "fault", 1, 30, kind=kind, id="x", source="outside", pod=1)
    assert [sign.how for sign in signs([*running(), fault], 2)] == ["injected"]
    same = event(10, "step", 1, 30, loss=1.0)
    assert [sign.how for sign in signs([*running(), fault, same], 2)] == ["injected"]
    next_one = [event(10, "phase", 1, 31, phase="step"), event(11, "step", 1, 31, loss=1.0)]
    assert signs([*running(), fault, same, *next_one], 2) == ()


def test_a_fault_that_still_lasts_is_the_cause_before_silence_and_echoes_but_after_a_rank_s_own() -> None:
    fault = event(9.5, "fault", 1, 30, kind="slow", id="slow@30:1", source="outside", pod=1)
    on = [event(10, "phase", 1, 31, phase="step"), event(11, "step", 1, 31, loss=1.0)]
    echo = error(70, 0, TIMED_OUT)
    first = signs([*running(), fault, *on, echo], 2)[0]
    assert (first.rank, first.how, first.t) == (1, "injected", 11)
    own = event(60, "exit", 0, code=-11)
    assert signs([*running(), fault, *on, own, error(60, 1, CLOSED)], 2)[0].event == own
    over = event(20, "repaired", pod=1, id="slow@30:1")
    later = [event(21, "phase", 1, 32, phase="step"), event(22, "step", 1, 32, loss=1.0)]
    assert signs([*running(), fault, *on, over, *later, echo], 2)[0].how != "injected"


def test_what_a_launcher_does_that_has_waited_long_enough_is_no_cause() -> None:
    """A time limit, or Ctrl-C: it names no rank."""
    said = [*running(), event(60, "detected", cause="no end within 60 s")]
    after = [
        event(60.5, "exit", 0, code=-15),
        error(60.5, 1, "", "KeyboardInterrupt"),
        event(61, "exit", 1, code=1),
    ]
    found = signs([*said, *after], 2)
    assert [(sign.how, sign.first) for sign in found] == [("ended", False), ("ended", False)]
    assert {sign.text for sign in found} == {
        "rank 0 was ended by the launcher in step 30",
        "rank 1 was ended by the launcher",
    }


def test_a_finished_launch_has_no_signs() -> None:
    events = [*struck("kill", 1, 0), event(99, "launch_end", outcome="finished")]
    assert signs(events, 2) == ()


def test_signs_do_not_depend_on_the_order_in_which_events_are_read() -> None:
    for kind in AFTERWARDS:
        events = struck(kind, 1, pods=2)
        assert told(signs(events[::-1], 2)) == told(signs(events, 2))


# --- more than one rank in a pod -------------------------------------------------------------------------


def _four(*events: Event) -> list[Event]:
    """Four ranks in step 3, in two pods."""
    spawned = [Event(1, "spawn", rank, attributes={"pod": rank // 2}) for rank in range(4)]
    steps = [Event(9, "phase", rank, step=3, attributes={"phase": "step"}) for rank in range(4)]
    return sorted([*spawned, *steps, *events], key=lambda event: event.t)


def test_a_rank_that_its_agent_ended_before_it_could_speak_is_not_the_silent_one() -> None:
    """Rank 3 hangs; rank 0 gives up; its agent ends rank 1 before that has given up too."""
    events = _four(
        Event(14, "error", 0, attributes={"type": "RuntimeError", "message": "Timed out waiting 5000ms"}),
        Event(14.1, "detected", 0, attributes={"cause": ""}),
        Event(14.1, "exit", 0, attributes={"code": 1, "pod": 0}),
        Event(14.3, "exit", 1, attributes={"code": -15, "pod": 0}),
        Event(14.05, "error", 2, attributes={"type": "RuntimeError", "message": "Timed out waiting 5000ms"}),
        Event(14.2, "exit", 2, attributes={"code": 1, "pod": 1}),
        Event(15, "exit", 3, attributes={"code": None, "pod": 1}),
    )
    first, *rest = signs(events, 4)
    assert "rank 1" not in first.text
    assert any(sign.rank == 1 and sign.how == "ended" for sign in rest)


def test_a_socket_of_pythons_own_is_a_trouble_of_its_rank() -> None:
    """Storage that refuses a connection is no sign that another rank is gone."""
    message = "connection refused: the storage is away"
    events = _four(
        Event(10, "error", 2, attributes={"type": "ConnectionError", "message": message}),
        Event(10.1, "exit", 2, attributes={"code": 1, "pod": 1}),
        Event(10.1, "detected", 2, attributes={"cause": ""}),
        Event(10.2, "exit", 3, attributes={"code": -15, "pod": 1}),
    )
    first, *_ = signs(events, 4)
    assert (first.rank, first.how) == (2, "raised")
