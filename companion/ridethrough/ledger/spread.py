"""How a fault spread: who was in trouble first, who noticed and how, who was ended by whom.

The loudest rank is seldom the first: most errors only say that another rank is gone or late. Such *echoes*
are told from troubles of a rank's own by what they say, and a rank that said nothing at all, while the others
waited for it in vain, comes before them.
"""

from __future__ import annotations

import re
import signal
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, takewhile
from math import inf

from ridethrough.events import Event
from ridethrough.faults import EXIT_CODE, POD_KINDS

#: A death is noticed up to this many seconds after the other ranks feel it: a launcher looks at processes
#: many times a second, while a peer of a dead rank gets its connection error at once.
NOTICED_LATE_S = 0.25

#: Errors that only say that a peer is gone or late: of gloo, of torch's TCPStore, of Python's sockets, of
#: this package; those of NCCL are as torch words them, none of them seen on a GPU yet.
ECHOES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "timeout",
        re.compile(
            r"timed out waiting|timed out after|application timeout caused pair closure|wait timeout|"
            r"socket has timed out|timed out connecting|connection timed out|\btimed out \(try=|"
            r"watchdog caught collective operation timeout",
            re.I,
        ),
    ),
    (
        "connection",
        re.compile(
            r"connection closed by peer|connection reset by peer|connection refused|broken pipe|"
            r"\bread error\b|connection was likely closed|a rank is gone or late|"
            r"NCCL communicator was aborted|remote process exited or there was a network error|"
            r"ncclRemoteError|ncclSystemError",
            re.I,
        ),
    ),
)

_PYTHONS_OWN = frozenset(
    {
        *("OSError", "TimeoutError", "BrokenPipeError", "ConnectionError", "ConnectionResetError"),
        *("ConnectionRefusedError", "ConnectionAbortedError"),
    }
)

# What was done to a rank, by kind of fault: alone, or with its pod.
_DEEDS = {
    "kill": "was killed by SIGKILL in {where}",
    "exit": f"failed first: it ended with code {EXIT_CODE} in {{where}}",
    "exception": "failed first: InjectedFault: {id} ({where})",
    "hang": "stopped answering in {where}",
    "stop": "stopped answering in {where}",
    "pod": "was killed with {pod} in {where}",
    "net": "was cut off with the network of {pod} in {where}",
    "slow": "was slowed down with the network of {pod} in {where}",
    "drain": "was drained with {pod} in {where}",
    "pid1": "lost its launcher in {where}: the first process of {pod} was stopped",
}

_BY = {"gang": "the gang restart", "drain": "the drain", "end": "the launcher"}

# How a container says that SIGKILL ended it: by itself, or through a shell or a runtime.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class Sign:
    """One thing that went wrong in a life of the ranks, as somebody could see it.

    Attributes:
        t: when; not later than what came of it.
        rank: whom it befell; None if it was not one rank.
        pod: the pod that is, or that this rank was in; None where there are no pods.
        how: `injected`; a rank's own `raised`, `killed`, `exited`; the echoes `connection`, `timeout`;
            `silent`: others waited for it in vain; `ended`: on purpose, because of the rest; `pod_exit`,
            `gave_up`: of a container, of the torchrun in it.
        text: the same as a sentence.
        event: what says so; None for silence.
        first: whether it is the first cause.
    """

    t: float
    rank: int | None
    pod: int | None
    how: str
    text: str
    event: Event | None
    first: bool = False


def signs(events: Iterable[Event], ranks: int, earlier: Sequence[Event] = ()) -> tuple[Sign, ...]:
    """What went wrong in a life of the ranks: the first cause first, then in the order of time.

    Works while the ranks still run, on what has been heard so far. There may be no first cause, where a
    launcher ended ranks for reasons of its own.

    Args:
        events: of this life: what its ranks said, and what their launcher did.
        ranks: the world size.
        earlier: events before this life that say in which pod a rank is and which address a pod has.

    Returns:
        Nothing if nothing is wrong.
    """
    found = sorted(_Life(events, ranks, earlier).troubles(), key=lambda trouble: trouble.sign.t)
    if not found:
        return ()
    cause = min(found, key=lambda trouble: (trouble.weight, trouble.began))
    rest = [replace(trouble.sign, text=trouble.then) for trouble in found if trouble is not cause]
    if cause.weight is _Weight.NONE:
        return tuple(trouble.sign for trouble in found)
    # A death is often noticed after the errors that it causes.
    felt = [one.sign.t for one in found if one.weight in (_Weight.OWN, _Weight.ECHO)]
    return (replace(cause.sign, t=min([cause.sign.t, *felt]), first=True), *rest)


def describe(fault: Event, phases: Sequence[Event]) -> tuple[int | None, str]:
    """An injected fault: the step that its rank was in, and a sentence.

    Args:
        fault: the `fault` event.
        phases: the `phase` events of its rank, in that life.
    """
    step, where = place(phases, fault.t, fault)
    said = fault.attributes
    kind = str(said.get("kind"))
    name = str(said.get("id", kind))
    pod = "its pod" if said.get("pod") is None else f"its pod {said['pod']}"
    deed = _DEEDS.get(kind, f"had fault {kind!r} in {{where}}").format(where=where, id=name, pod=pod)
    injected = "" if kind == "exception" else f" (injected {name})"
    return step, f"{_who(fault.rank)} {deed}{injected}"


def place(phases: Iterable[Event], t: float, fault: Event | None = None) -> tuple[int | None, str]:
    """The step that a rank was in at `t`, and where it was, in words, from its `phase` events."""
    phase, entered = "startup", None
    for event in phases:
        if event.t > t:
            break
        phase, entered = str(event.attributes.get("phase")), event.step
    step = entered
    # Who injects from outside knows the step only from these same events.
    if fault and fault.step is not None and fault.attributes.get("source") != "outside":
        step = fault.step
    if step is None:
        return None, phase
    saving = phase == "checkpoint_stall" and step == entered
    return step, f"the save of step {step}" if saving else f"step {step}"


def which_pods(events: Iterable[Event], earlier: Iterable[Event]) -> dict[int | None, int]:
    """The pod of each rank in a life of the ranks; once it is lost, they may come back in others."""
    before_the_loss = takewhile(lambda event: event.what != "detected", events)
    told = [event for event in chain(earlier, before_the_loss) if event.what in ("spawn", "joined")]
    return {event.rank: pod for event in told if (pod := _pod(event)) is not None}


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- the pieces ------------------------------------------------------------------------------------------


class _Weight(IntEnum):
    """What is taken for the first cause: the lightest, and of these the earliest."""

    OWN = 0  # a rank's own trouble, or a fault that it did not survive
    LASTING = 1  # a fault that the ranks went on with for a while: a slow network
    SILENT = 2
    ECHO = 3
    POD = 4
    NONE = 5  # done on purpose: never a cause


@dataclass(frozen=True)
class _Trouble:
    sign: Sign
    weight: _Weight
    began: float  # what it is ranked by
    then: str  # its sentence when it is not the first cause


class _Life:
    """What is known of one life of the ranks, arranged to be asked."""

    def __init__(self, events: Iterable[Event], ranks: int, earlier: Sequence[Event]) -> None:
        self.events, self.ranks = sorted(events, key=lambda event: event.t), ranks
        self.of: dict[str, list[Event]] = defaultdict(list)
        self.words: dict[int | None, list[Event]] = defaultdict(list)
        for event in self.events:
            self.of[event.what].append(event)
            if event.what not in ("spawn", "exit", "detected") and "pod" not in event.attributes:
                self.words[event.rank].append(event)
        self.detected = next(iter(self.of["detected"]), None)
        before = [*earlier, *self.events]
        self.pods = which_pods(self.events, earlier)
        self.addresses: dict[str, set[int | None]] = defaultdict(set)
        for event in before:
            if event.what == "pod_start":
                self.addresses[str(event.attributes.get("ip"))].add(_pod(event))
        self.errors = {event.rank: event for event in reversed(self.of["error"])}
        self.exits = {event.rank: event for event in reversed(self.of["exit"])}
        self.ended = {event.rank for event in self.of["end"]}

    def troubles(self) -> list[_Trouble]:
        """All that went wrong."""
        if any(event.attributes.get("outcome") == "finished" for event in self.of["launch_end"]):
            return []
        injected = list(self.faults())
        hit = {one.sign.rank: one.sign.t for one in injected if one.weight is _Weight.OWN}
        own = [*self.raised(), *self.gone()]
        own = [one for one in own if not (_is_own(one) and one.sign.t >= hit.get(one.sign.rank, inf))]
        found = [self.unless_the_launcher_had_enough(one) for one in [*injected, *own, *self.containers()]]
        lasting = [one for one in found if one.weight is _Weight.LASTING]
        if len(found) == len(lasting) and not self.detected:
            return []  # the ranks go on all the same
        if not any(one.weight < _Weight.SILENT for one in found):
            found += self.silent([one for one in found if one.weight is _Weight.ECHO])
        return found

    # --- injected ---

    def faults(self) -> Iterator[_Trouble]:
        for fault in self.of["fault"]:
            weight, t = self.harm(fault)
            if weight is not _Weight.NONE:
                text = describe(fault, self.phases(fault.rank))[1]
                pod = self.pods.get(fault.rank) if _pod(fault) is None else _pod(fault)
                sign = Sign(t, fault.rank, pod, "injected", text, fault)
                yield _Trouble(sign, weight, t - NOTICED_LATE_S, _then(text))

    def harm(self, fault: Event) -> tuple[_Weight, float]:
        """What a fault weighs, and from when on its rank made no step."""
        kind, went_on = fault.attributes.get("kind"), self.went_on(fault, fault.t)
        if went_on is None or kind in ("pod", "drain"):
            return _Weight.OWN, went_on or fault.t
        over = [event.t for event in self.of["repaired"] if _same_id(event, fault)]
        if kind not in POD_KINDS or (over and self.went_on(fault, over[-1]) is not None):
            return _Weight.NONE, fault.t
        return _Weight.LASTING, went_on

    def went_on(self, fault: Event, since: float) -> float | None:
        """When its rank last finished what it had begun after `since`; None if it did not."""
        entered, last = set[int | None](), None
        for event in self.words[fault.rank]:
            if event.t > since and event.what == "phase":
                entered.add(event.step)
            elif event.t > since and (
                event.what == "end" or (event.what == "step" and event.step in entered)
            ):
                last = event.t
        return last

    # --- what ranks said, and how they ended ---

    def raised(self) -> Iterator[_Trouble]:
        for rank, error in self.errors.items():
            where = place(self.phases(rank), error.t)[1]
            how, message = _echo(error), _message(error)
            if how is None:
                yield self.trouble(error, "raised", f"failed first: {message} ({where})", _Weight.OWN)
                continue
            peer = self.peer(rank, message)
            lost = f"lost its connection to {peer}" if peer else "lost a connection"
            vain = f"waited in vain for {peer}" if peer else "waited in vain"
            text = f"{lost if how == 'connection' else vain} in {where}: {message}"
            yield self.trouble(error, how, text, _Weight.ECHO)

    def gone(self) -> Iterator[_Trouble]:
        """Ranks that ended without an error of their own."""
        for rank in [*range(self.ranks), *(set(self.exits) - set(range(self.ranks)))]:
            exit, code = self.exits.get(rank), _code(self.exits.get(rank))
            if rank in self.errors or (rank in self.ended and (exit is None or code == 0)):
                continue
            where = place(self.phases(rank), exit.t if exit else inf)[1]
            if death := self.pod_death(rank, exit):
                yield self.with_pod(rank, exit, death, where)
            elif exit and (by := self.ended_by(exit)):
                yield self.trouble(exit, "ended", f"was ended {by} in {where}", _Weight.NONE)
            elif exit:
                yield self.left(exit, where)

    def left(self, exit: Event, where: str) -> _Trouble:
        code = _code(exit)
        if code is None:
            return self.trouble(exit, "exited", f"was gone without a word in {where}", _Weight.OWN)
        if code < 0:
            weight = _Weight.ECHO if -code == signal.SIGABRT and not self.on_gloo else _Weight.OWN
            return self.trouble(exit, "killed", f"was killed by {signal_name(-code)} in {where}", weight)
        if code == 0:
            text = f"left early: it ended with code 0 in {where}, before its work was done"
        else:
            text = f"failed first: it ended with code {code} in {where}"
        return self.trouble(exit, "exited", text, _Weight.ECHO if self.after(exit) else _Weight.OWN)

    def with_pod(self, rank: int | None, exit: Event | None, death: Event, where: str) -> _Trouble:
        deed = "drained" if death.what == "pod_stop" else "killed"
        t = min(death.t, exit.t) if exit else death.t
        event = replace(death, t=t, rank=rank)
        return self.trouble(event, "killed", f"was {deed} with its pod {_pod(death)} in {where}", _Weight.OWN)

    @property
    def on_gloo(self) -> bool:
        """With NCCL, SIGABRT is how its watchdog ends a process that has waited in vain."""
        return any(event.attributes.get("backend") == "gloo" for event in self.of["joined"])

    def pod_death(self, rank: int | None, exit: Event | None) -> Event | None:
        """What ended a rank together with its pod, if it was not done because of another failure."""
        pod = self.pods.get(rank)
        for event in self.events if pod is not None else ():
            if _pod(event) != pod:
                continue
            if event.what == "pod_stop" and (exit is None or event.t <= exit.t):
                return event if event.attributes.get("reason") == "drain" else None
            killed = event.what == "pod_exit" and _code(event) in _KILLED
            if killed and (exit is None or event.t <= exit.t + 4 * NOTICED_LATE_S):
                return event
        return None

    def ended_by(self, exit: Event) -> str:
        """Who ended a rank because of what had happened before; empty if it ended by itself."""
        pod, code = self.pods.get(exit.rank), _code(exit)
        asked = code in (None, -signal.SIGTERM, -signal.SIGKILL)
        if pod is None:
            return "by the launcher" if self.after(exit) and (asked or (code or 0) >= 0) else ""
        if stop := self.stop_before(exit, pod):
            by = _by(stop)
            return f"with its pod {pod} by {by}" if by != _BY["end"] else f"by {by}"
        known = self.after(exit, 0 if code == -signal.SIGTERM else NOTICED_LATE_S)
        if not asked or not (known or (code == -signal.SIGTERM and self.mate_failed(exit))):
            return ""
        over = [event.t for event in self.of["pod_exit"] if _pod(event) == pod]
        together = any(abs(t - exit.t) <= NOTICED_LATE_S for t in over)
        return f"with its pod {pod}" if together else f"by torchrun in pod {pod}"

    def mate_failed(self, exit: Event) -> bool:
        """Whether another rank in its pod had failed before: torchrun then ends all others there."""
        mates = {rank for rank, pod in self.pods.items() if pod == self.pods[exit.rank]} - {exit.rank}
        failed = [*self.errors.values(), *(event for event in self.exits.values() if _code(event) != 0)]
        return any(event.rank in mates and event.t <= exit.t for event in failed)

    # --- silence ---

    def silent(self, echoes: Sequence[_Trouble]) -> Iterator[_Trouble]:
        """The ranks that said nothing while all others only told of each other."""
        if not echoes:
            return
        echo = min(echoes, key=lambda one: one.began).sign
        spoke = {one.sign.rank for one in echoes} | self.ended_with_their_mates()
        for rank in set(range(self.ranks)) - self.ended - spoke:
            words = self.words[rank]
            t = words[-1].t if words else echo.t
            if t <= echo.t:
                where = place(self.phases(rank), t)[1]
                text = f"stopped answering in {where}, {echo.t - t:.1f} s before {_who(echo.rank)} gave up"
                heard = Event(t, "silence", rank)
                trouble = self.trouble(heard, "silent", text, _Weight.SILENT)
                yield replace(trouble, sign=replace(trouble.sign, event=None), began=t if words else -inf)

    def ended_with_their_mates(self) -> set[int | None]:
        """Ranks that torchrun ended, since another one in their pod had failed, before they could speak."""
        alone = {rank for rank, pod in self.pods.items() if pod is not None}
        return {rank for rank in alone & self.exits.keys() if self.mate_failed(self.exits[rank])}

    # --- containers ---

    def containers(self) -> Iterator[_Trouble]:
        for event in [*self.of["pod_exit"], *self.of["gave_up"]]:
            stop = self.stop_before(event, _pod(event))
            if event.what == "pod_exit" and _code(event) != 0:
                text = f"the container of pod {_pod(event)} {self.how_ended(event, stop)}"
            elif event.what == "gave_up" and not stop:
                error = re.sub(r"^[\w.]*\.(?=\w+:)", "", str(event.attributes.get("error")))
                short = textwrap.shorten(error, 160, placeholder=" …")
                text = f"torchrun in pod {_pod(event)} gave up: {short}"
            else:
                continue  # it completed, or was asked to end
            weight = _Weight.NONE if stop or self.after(event) else _Weight.POD
            sign = Sign(event.t, None, _pod(event), event.what, text, event)
            yield _Trouble(sign, weight, event.t, text)

    def how_ended(self, event: Event, stop: Event | None) -> str:
        if stop:
            return f"was ended by {_by(stop)}"
        code = _code(event)
        if code is None:
            return "ended"
        number = -code if code < 0 else code - 128
        return f"was killed by {signal_name(number)}" if number > 0 else f"ended with code {code}"

    def stop_before(self, event: Event, pod: int | None) -> Event | None:
        """Why a pod was being ended at the time of an event; None if it was not."""
        stops = [one for one in self.of["pod_stop"] if _pod(one) == pod and one.t <= event.t]
        return stops[-1] if stops else None

    # --- the rest ---

    def trouble(self, event: Event, how: str, deed: str, weight: _Weight) -> _Trouble:
        text = f"{_who(event.rank)} {deed}"
        sign = Sign(event.t, event.rank, self.pods.get(event.rank), how, text, event)
        died = event.what not in ("error", "silence")
        return _Trouble(sign, weight, event.t - NOTICED_LATE_S if died else event.t, _then(text))

    def unless_the_launcher_had_enough(self, one: _Trouble) -> _Trouble:
        """What comes after a launcher lost patience, or was told to stop, is its own doing."""
        known = self.detected
        if not known or known.rank is not None or _pod(known) is not None or one.sign.t <= known.t:
            return one
        if one.sign.rank is None or one.sign.how in ("ended", "injected"):
            return replace(one, weight=_Weight.NONE)
        text = f"{_who(one.sign.rank)} was ended by the launcher"
        return replace(one, sign=replace(one.sign, how="ended", text=text), weight=_Weight.NONE, then=text)

    def phases(self, rank: int | None) -> list[Event]:
        return [event for event in self.words[rank] if event.what == "phase"]

    def after(self, event: Event, late: float = NOTICED_LATE_S) -> bool:
        """Whether something happened after the loss was known."""
        return self.detected is not None and event.t > self.detected.t + late

    def peer(self, rank: int | None, message: str) -> str:
        """The ranks at the other end of a connection, if a message has the address of their pod."""
        for address in re.findall(r"\d+\.\d+\.\d+\.\d+", message):
            pods = self.addresses.get(address, set())
            if len(pods) == 1 and not pods & {self.pods.get(rank)}:
                (pod,) = pods
                there = sorted(r for r, p in self.pods.items() if p == pod and r is not None)
                if len(there) == 1:
                    return f"rank {there[0]} in pod {pod}"
                return f"pod {pod}" + (f" (ranks {', '.join(map(str, there))})" if there else "")
        return ""


def _is_own(one: _Trouble) -> bool:
    return one.sign.how in ("raised", "killed", "exited") and one.weight is _Weight.OWN


def _echo(error: Event) -> str | None:
    """How an error echoes another rank's trouble; None if it is its rank's own.

    Python's own errors of sockets and files are its own: it was not the ranks' network that they met with.
    """
    if error.attributes.get("type") in _PYTHONS_OWN:
        return None
    said = f"{error.attributes.get('type')}: {error.attributes.get('message')}"
    return next((how for how, pattern in ECHOES if pattern.search(said)), None)


def _message(error: Event) -> str:
    """Type and message on one line, without the C++ frames and build paths that torch adds."""
    message = str(error.attributes.get("message", "")).partition("Exception raised from ")[0]
    message = re.sub(r"\[/\S*/(?=gloo/transport/)", "[", message)
    return f"{error.attributes.get('type')}: {' '.join(message.split())}"


def _then(text: str) -> str:
    """A sentence on an effect: all of it is in that rank's log."""
    return textwrap.shorten(text.replace(" failed first: ", " failed then: ", 1), 200, placeholder=" …")


def _who(rank: int | None) -> str:
    return "the job" if rank is None else f"rank {rank}"


def _by(stop: Event) -> str:
    reason = str(stop.attributes.get("reason"))
    return _BY.get(reason, reason)


def _same_id(one: Event, other: Event) -> bool:
    return bool(one.attributes.get("id") == other.attributes.get("id"))


def _pod(event: Event) -> int | None:
    pod: int | None = event.attributes.get("pod")
    return pod


def _code(event: Event | None) -> int | None:
    code = event.attributes.get("code") if event else None
    return code if isinstance(code, int) else None
