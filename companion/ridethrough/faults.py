"""Injected faults: the ways in which a rank or its pod is lost, at a chosen step or at any moment.

From inside, a rank's `FaultInjector` fires what `run.json` asks for at the start of a step, each fault
once per run however often the run is resumed. From outside, `request` does it to a running rank now.

To a rank:

    exception   raises InjectedFault in the rank's main thread
    kill        SIGKILL: the process is gone at once, as after an out-of-memory kill
    exit        os._exit(17): the process ends by itself, without a word
    hang        the main thread never goes on; other threads do
    stop        SIGSTOP: the whole process stands still, as on a frozen node

To the pod that a rank is in, where the launcher runs pods; the rank asks for it and waits until it is done:

    pod         SIGKILL for the container and all in it, as when memory runs out
    net         its network is cut
    slow        its network becomes slow
    drain       SIGTERM, a grace period, SIGKILL, as when a node is drained
    pid1        the container's first process, the agent that looks after the ranks, stands still
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from ridethrough import processes
from ridethrough.errors import RunError, UsageError
from ridethrough.events import Event, EventLog, read_events
from ridethrough.run import Run, read_json, write_json

#: What can be done to a rank.
RANK_KINDS = ("exception", "kill", "exit", "hang", "stop")

#: What can be done to a rank's pod.
POD_KINDS = ("pod", "net", "slow", "drain", "pid1")

#: Which of these need a pod with a network of its own.
NETWORK_KINDS = ("net", "slow")

#: What can be injected.
KINDS = RANK_KINDS + POD_KINDS

#: Seconds within which a launcher does what a rank asks it to do.
_TAKEN_UP_S = 30.0

#: Exit code of the fault `exit`.
EXIT_CODE = 17

#: Signals that are the fault by themselves; the others are carried out by the rank.
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class InjectedFault(RuntimeError):
    """Raised in a rank by the fault `exception`."""


@dataclass(frozen=True)
class Fault:
    """A fault of one kind, at the start of one step, on one rank."""

    kind: str
    step: int
    rank: int

    @property
    def id(self) -> str:
        """As it is written on the command line: `kill@37:1`."""
        return f"{self.kind}@{self.step}:{self.rank}"


def parse(text: str) -> Fault:
    """A fault from `KIND@STEP:RANK`.

    Raises:
        UsageError: one sentence that says which part is wrong.
    """
    match = re.fullmatch(r"([^@:]*)@([^@:]*):([^@:]*)", text)
    if not match:
        raise UsageError(f"fault {text!r} is not of the form KIND@STEP:RANK, as in kill@37:1")
    kind, step, rank = match.groups()
    fault = Fault(_kind(text, kind), _number(text, "step", step), _number(text, "rank", rank))
    if fault.step < 1:
        raise UsageError(f"fault {text!r}: steps count from 1")
    return fault


def check(texts: Iterable[str], *, ranks: int, steps: int) -> list[Fault]:
    """Faults that can all fire in a run of `steps` steps on `ranks` ranks.

    Raises:
        UsageError: for a malformed fault, one out of range, or one given twice.
    """
    faults: list[Fault] = []
    for text in texts:
        fault = parse(text)
        if fault.rank >= ranks:
            raise UsageError(f"fault {text!r}: there is no rank {fault.rank}; ranks are 0 to {ranks - 1}")
        if fault.step > steps:
            raise UsageError(f"fault {text!r}: the run ends after step {steps}")
        if fault in faults:
            raise UsageError(f"fault {text!r} is given twice; it fires once per run")
        faults.append(fault)
    return faults


def _kind(text: str, kind: str) -> str:
    if kind not in KINDS:
        raise UsageError(f"fault {text!r}: {kind!r} is not a kind; one of {', '.join(KINDS)}")
    return kind


def _number(text: str, name: str, digits: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", digits):
        raise UsageError(f"fault {text!r}: the {name} {digits!r} is not a whole number")
    if int(digits) < 0:
        raise UsageError(f"fault {text!r}: the {name} must not be negative")
    return int(digits)


class FaultInjector:
    """A rank's own side of fault injection: call `install` once, then `at_step` at the start of each step.

    Args:
        run: the run; its `faults` are what to fire, its `faults_dir` remembers what has fired.
        rank: the calling rank.
        log: the rank's events; a `fault` event is written just before a fault takes effect.
    """

    def __init__(self, run: Run, rank: int, log: EventLog) -> None:
        self._directory, self._rank, self._log = run.faults_dir, rank, log
        self._faults = [fault for fault in map(parse, run.faults) if fault.rank == rank]
        self._step = 0
        self._directory.mkdir(exist_ok=True)

    def install(self) -> None:
        """Listen for faults from outside (SIGUSR1). Main thread only; call before the first long wait.

        The fault then takes effect between two bytecodes of the main thread: while that thread is inside
        a long native call, such as a collective, it waits for the call to return.
        """
        signal.signal(signal.SIGUSR1, self._on_signal)

    def at_step(self, step: int) -> None:
        """Fire the faults due at `step` that have not fired yet in this run.

        Raises:
            InjectedFault: for the kind `exception`; the other kinds do not return, or, after `stop`,
                return once the process is continued.
        """
        self._step = step
        for fault in self._faults:
            if fault.step == step and self._first_time(fault):
                self._fire(fault, "inside")

    def _first_time(self, fault: Fault) -> bool:
        """Leave the fault's mark; False if an earlier life of the rank has left it."""
        try:
            os.close(os.open(self._directory / fault.id, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        file = _request_file(self._directory, self._rank)
        if file.exists():  # a SIGUSR1 from anyone else is none of ours
            kind = read_json(file)["kind"]
            file.unlink()
            self._fire(Fault(kind, self._step, self._rank), "outside")

    def _fire(self, fault: Fault, source: str) -> None:
        if fault.kind in POD_KINDS:
            if not _ask(self._directory, fault, source, _TAKEN_UP_S):
                raise RunError(f"no launcher of pods did {fault.id} within {_TAKEN_UP_S:g} s")
            return
        _tell(self._log, fault, source)
        if fault.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.kind])
        elif fault.kind == "exception":
            raise InjectedFault(fault.id)
        elif fault.kind == "exit":
            os._exit(EXIT_CODE)
        else:
            while True:  # only a signal whose handler raises, or that kills, ends this
                time.sleep(3600)


@dataclass(frozen=True)
class Due:
    """A fault that a launcher of pods has been asked to do: do it, then call `done`."""

    fault: Fault
    source: str
    _file: Path

    def done(self) -> None:
        """Tell whoever has asked."""
        self._file.unlink(missing_ok=True)


def take_due(directory: Path) -> Iterator[Due]:
    """The faults that a launcher of pods has been asked to do and has not done."""
    for file in sorted(directory.glob("due-*.json")):
        asked = read_json(file)
        yield Due(Fault(asked["kind"], asked["step"], asked["rank"]), asked["source"], file)


def _ask(directory: Path, fault: Fault, source: str, wait_s: float) -> bool:
    """Ask the launcher to do a fault, and say whether it has within `wait_s` seconds."""
    file = directory / f"due-{fault.id}.json"
    write_json(file, {**asdict(fault), "source": source})
    done = _until(lambda: not file.exists(), wait_s)
    file.unlink(missing_ok=True)
    return done


@dataclass(frozen=True)
class Injected:
    """What `request` did.

    Attributes:
        fault: the fault, with the step the rank was in.
        pid: the process it was done to.
        in_effect: False if the rank had not taken it up yet: its main thread is in a native call and the
            fault happens when that returns.
    """

    fault: Fault
    pid: int
    in_effect: bool

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {"id": self.fault.id, **asdict(self.fault), "pid": self.pid, "in_effect": self.in_effect}


@dataclass(frozen=True)
class _Target:
    pid: int
    rank: int
    generation: int
    step: int


def request(directory: Path, text: str, *, wait_s: float = 10.0) -> Injected:
    """Do a fault to a running rank, now and from outside.

    Args:
        directory: the run's directory.
        text: `KIND:RANK`, as in `kill:1`.
        wait_s: longest wait, each, for a rank that is still starting to listen, and for its taking the
            fault up.

    Raises:
        UsageError: if `text` is malformed, or no such rank is running.
    """
    kind, separator, rank = text.partition(":")
    if not separator:
        raise UsageError(f"fault {text!r} is not of the form KIND:RANK, as in kill:1")
    _kind(text, kind)
    run = Run.open(directory)
    target = _find(run, _number(text, "rank", rank))
    fault = Fault(kind, target.step, target.rank)
    if kind in POD_KINDS:
        if run.pods is None:
            raise UsageError(f"fault {text!r} happens to a pod, and {run.path} runs without pods")
        return Injected(fault, target.pid, in_effect=_ask(run.faults_dir, fault, "outside", wait_s))
    if kind in _SIGNALS:
        with closing(run.log("fault", target.rank, target.generation)) as log:
            _tell(log, fault, "outside")
        _send(target, _SIGNALS[kind])
        return Injected(fault, target.pid, in_effect=True)
    return Injected(fault, target.pid, in_effect=_hand_over(run, target, kind, wait_s))


def _find(run: Run, rank: int) -> _Target:
    """The living process of `rank` in the latest launch."""
    events = read_events(run.events)
    launches = [event for event in events if event.what == "launch"]
    if not launches:
        raise UsageError(f"{run.path} was never launched; start it with `ridethrough run`")
    launch = launches[-1]
    own = [event for event in events if event.t >= launch.t and event.rank == rank]
    spawned = [event for event in own if event.what == "spawn"]
    if not spawned:
        raise UsageError(f"{run.path} has no rank {rank}; its ranks are 0 to {launch['ranks'] - 1}")
    pid = spawned[-1]["pid"]
    if pid is None or not processes.is_rank(pid, launch["id"], rank):
        raise UsageError(f"rank {rank} of {run.path} is not running any more")
    return _Target(pid, rank, own[-1].generation, _latest_step(own))


def _latest_step(events: list[Event]) -> int:
    """The step a rank was last heard in; 0 before its first."""
    return next((event.step for event in reversed(events) if event.step is not None), 0)


def _hand_over(run: Run, target: _Target, kind: str, wait_s: float) -> bool:
    """Leave a request, signal the rank, and say whether it took the request up in time."""
    if not _until(lambda: _listens(target.pid), wait_s):
        raise UsageError(
            f"rank {target.rank} (process {target.pid}) did not get as far as listening for faults within "
            f"{wait_s:g} s; try again, or use kill or stop"
        )
    file = _request_file(run.faults_dir, target.rank)
    write_json(file, {"kind": kind})
    _send(target, signal.SIGUSR1)
    return _until(lambda: not file.exists(), wait_s)


def _listens(pid: int) -> bool:
    """Whether SIGUSR1 has a handler there, for without one it would simply end the process."""
    if not Path("/proc/self/status").exists():
        return True  # no way to ask on this system
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # it has ended
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.M)
    return bool(caught and int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def _until(true: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _send(target: _Target, number: signal.Signals) -> None:
    try:
        os.kill(target.pid, number)
    except ProcessLookupError:
        raise UsageError(f"rank {target.rank} (process {target.pid}) ended just before the fault") from None
    except PermissionError:
        raise UsageError(f"rank {target.rank} (process {target.pid}) belongs to another user") from None


def _request_file(directory: Path, rank: int) -> Path:
    """By rank: in a pod, a process has another number for itself than for those outside."""
    return directory / f"request-rank-{rank}.json"


def _tell(log: EventLog, fault: Fault, source: str) -> None:
    log.emit("fault", step=fault.step, rank=fault.rank, kind=fault.kind, id=fault.id, source=source)
