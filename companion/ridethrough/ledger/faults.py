"""Faults: what came first, how it spread, how long each part of the recovery took, what it cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ridethrough.events import Event
from ridethrough.ledger.lanes import Lane
from ridethrough.ledger.launches import Launch, Life
from ridethrough.ledger.spread import Sign

#: The parts of a recovery, in their order.
RECOVERY = ("detect", "abort", "restart", "rendezvous", "build", "restore", "recompute")

# On the way back, the buckets that are no part of RECOVERY count as the part they delay. The first new step
# ends the recovery, so its own time is the last piece of it.
_PART = {
    **{part: part for part in RECOVERY},
    "startup": "restart",
    "shutdown": "abort",
    "useful": "recompute",
    "checkpoint_stall": "recompute",
    "idle": "recompute",
}


@dataclass(frozen=True)
class Fault:
    """One fault, injected or not, and what it cost.

    Attributes:
        t: its instant: what the injector wrote before it fired, or the first sign of a failure.
        generation: the life of the ranks it hit.
        kind: `kill`, `exit`, `exception`, `hang`, `stop`, …; or, of a loss that nobody injected, that of its
            `ledger.Loss`.
        rank: the rank it hit; None if it was not one rank.
        step: the step that rank was in; None outside of steps.
        first_cause: what came first, in a sentence.
        tier: what brought the run back: `torchrun` (workers alone), `pods` (containers too), `relaunch`;
            `outlived` if nothing had to; None if nothing has yet.
        phases_s: seconds in each part of the recovery, the mean over the ranks; up to the last event if the
            run has not recovered.
        mttr_s: from the fault to the first new step finished on all ranks, without the pauses between
            launches; None if that has not happened, or nothing had to recover. Where the ranks could still
            make steps after the fault, it counts from the last of them.
        between_launches_s: those pauses: how long it took somebody to start the run again.
        lost_steps: finished steps that had to be done again; None if the run has not been restored.
        spread: all that went wrong in the life it hit, and what containers and torchrun made of it.
        wasted_rank_s: rank-seconds that were not useful, over all ranks, from the fault to the first new
            step; up to the last event if the run has not recovered.
        backoff_s: the part of the recovery in which some pod only waited for Kubernetes' back-off.
        assumed_s: the part of it in which some pod only waited because a cluster is assumed to.
    """

    t: float
    generation: int
    kind: str
    rank: int | None
    step: int | None
    first_cause: str
    tier: str | None = "outlived"
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RECOVERY, 0.0))
    mttr_s: float | None = None
    between_launches_s: float = 0.0
    lost_steps: int | None = 0
    spread: tuple[Sign, ...] = ()
    wasted_rank_s: float = 0.0
    backoff_s: float = 0.0
    assumed_s: float = 0.0


def find_faults(launches: Sequence[Launch], lanes: Sequence[Lane]) -> list[Fault]:
    """Each injected fault, and each loss of a life that had another cause, in the order of time."""
    history = _History(launches, lanes)
    found: list[Fault] = []
    for number, life in enumerate(history.lives):
        for fault, fatal in _causes(life):
            found.append(history.follow(fault, number) if fatal else fault)
    return sorted(found, key=lambda fault: fault.t)


def _causes(life: Life) -> Iterator[tuple[Fault, bool]]:
    """The faults of a life as if they had cost nothing, and whether each had a part in losing it."""
    loss = life.loss
    for event in life.said("fault"):
        step, text = life.injected(event)
        kind = str(event.attributes.get("kind"))
        fault = Fault(life.clip(event.t), life.generation, kind, event.rank, step, text)
        yield fault, loss is not None and not life.outlived(event)
    if loss and loss.fault is None:
        yield Fault(loss.start, life.generation, loss.kind, loss.rank, loss.step, loss.text), True


# --- the way back ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """The part of a launch that belongs to a recovery."""

    launch: Launch
    start: float
    end: float

    def overlap(self, start: float, end: float) -> float:
        return max(0.0, min(end, self.end) - max(start, self.start))


class _History:
    """All lives of a run, one after another."""

    def __init__(self, launches: Sequence[Launch], lanes: Sequence[Lane]) -> None:
        self.launches = launches
        self.lives = [life for launch in launches for life in launch.lives]
        self.of = [number for number, launch in enumerate(launches) for _ in launch.lives]
        self.lanes = {(lane.generation, lane.rank): lane for lane in lanes}

    def follow(self, fault: Fault, number: int) -> Fault:
        """Follow a fault that cost life `number` to the first new step, or as far as the run has got."""
        life, loss = self.lives[number], self.lives[number].loss
        assert loss
        recovery = self.first_new_step(number)
        back, until = recovery or (len(self.lives) - 1, self.launches[-1].end)
        windows = self.windows(number, max(fault.t, loss.start), back, until)
        pauses = (after.launch.start - before.launch.end for before, after in itertools.pairwise(windows))
        later = self.lives[number + 1 :]
        restored = next((one.restored for one in later if one.restored is not None), None)
        backoff, assumed = _waits(windows)
        return replace(
            fault,
            first_cause=loss.text,
            tier=self.tier(number, back, windows),
            phases_s=self.phases(windows),
            mttr_s=sum(window.end - window.start for window in windows) if recovery else None,
            between_launches_s=sum(max(0.0, pause) for pause in pauses),
            lost_steps=None if restored is None else max(0, life.reached - restored),
            spread=(*life.signs, *_of_pods(self.lives[number + 1 : back + 1], until)),
            wasted_rank_s=self.wasted(windows),
            backoff_s=backoff,
            assumed_s=assumed,
        )

    def first_new_step(self, number: int) -> tuple[int, float] | None:
        """In which life after `number`, and when, the first new step was finished by all ranks."""
        before = max(life.reached for life in self.lives[: number + 1])
        for later in range(number + 1, len(self.lives)):
            steps = self.lives[later].finished_steps
            if new := [step for step in steps if step > before]:
                return later, steps[min(new)]
        return None

    def windows(self, number: int, start: float, back: int, until: float) -> list[_Window]:
        """From an instant in life `number` to one in life `back`, launch by launch."""
        way = [_Window(one, one.start, one.end) for one in self.launches[self.of[number] : self.of[back] + 1]]
        way[0] = replace(way[0], start=start)
        way[-1] = replace(way[-1], end=until)
        return way

    def tier(self, number: int, back: int, windows: Sequence[_Window]) -> str | None:
        if number == len(self.lives) - 1:
            return None
        if len(windows) > 1:
            return "relaunch"
        (window,) = windows
        started = (event.t for event in window.launch.said("pod_start"))
        return "pods" if any(window.start < t <= window.end for t in started) else "torchrun"

    def phases(self, windows: Iterable[_Window]) -> dict[str, float]:
        """The mean over the ranks: which of them is the last to come back is decided by a millisecond."""
        phases = dict.fromkeys(RECOVERY, 0.0)
        for window in windows:
            for rank in range(window.launch.ranks):
                for bucket, seconds in self.spent(window, rank):
                    phases[_PART[bucket]] += seconds / window.launch.ranks
        return phases

    def wasted(self, windows: Iterable[_Window]) -> float:
        return sum(
            seconds
            for window in windows
            for rank in range(window.launch.ranks)
            for bucket, seconds in self.spent(window, rank)
            if bucket != "useful"
        )

    def spent(self, window: _Window, rank: int) -> Iterator[tuple[str, float]]:
        lane = self.lanes.get((window.launch.generation, rank))
        for span in lane.spans if lane else ():
            yield span.bucket, window.overlap(span.start, span.end)


def _of_pods(lives: Iterable[Life], until: float) -> list[Sign]:
    """What became of containers on the way back, through further lives if it took some."""
    told = (sign for life in lives for sign in life.signs if sign.how in ("pod_exit", "gave_up"))
    return [replace(sign, first=False) for sign in told if sign.t <= until]


# --- waits -----------------------------------------------------------------------------------------------

_Stretch = tuple[float, float]


def _waits(windows: Iterable[_Window]) -> tuple[float, float]:
    """For how long some pod only waited: for the back-off, and else for what a cluster is assumed to add."""
    backoff = either = 0.0
    for window in windows:
        waits = [wait for events in window.launch.pods.values() for wait in _pod_waits(events)]
        backoff += _together(window, [first for first, _ in waits])
        either += _together(window, [stretch for wait in waits for stretch in wait])
    return backoff, either - backoff


def _pod_waits(events: Sequence[Event]) -> Iterator[tuple[_Stretch, _Stretch]]:
    """The back-off and the assumed part of each wait of a pod, which a start cuts short."""
    for number, event in enumerate(events):
        if event.what == "pod_wait":
            over = next((one.t for one in events[number:] if one.what == "pod_start"), inf)
            middle = event.t + event.attributes.get("backoff_s", 0.0)
            end = middle + event.attributes.get("assumed_s", 0.0)
            yield (event.t, min(middle, over)), (min(middle, over), min(end, over))


def _together(window: _Window, stretches: Iterable[_Stretch]) -> float:
    """How much of a window lies in at least one of some stretches of time."""
    total, reached = 0.0, window.start
    for start, end in sorted(stretches):
        total += window.overlap(max(start, reached), end)
        reached = max(reached, end)
    return total
