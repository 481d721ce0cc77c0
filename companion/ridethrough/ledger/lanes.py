"""From launches to lanes: what each rank did with each second.

A *lane* is one rank slot in one launch. It is cut into spans that touch and never overlap, from the launch
to its end, so the buckets sum to wall clock × ranks by construction. Time between two launches, when nobody
holds the ranks, lies in no lane.

Three rules decide what a rank gets credit for:

- A step is `useful` the first time the rank finishes it. It is `recompute` when it had been finished before,
  by this rank or by all ranks of an earlier life (whose world size may have been another), and when it is
  never finished: what was begun is done again.
- When a life is lost, nothing after that instant counts: all lanes are `detect` until the launcher knows,
  then `abort` until the rank's own process is gone, whatever the surviving ranks still say.
- Where the launcher brings the ranks back, a rank that is gone is in `restart`, or in `rendezvous` while the
  agent in its pod waits for the others, until it says something in its next life.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridethrough.errors import UsageError
from ridethrough.events import PHASES
from ridethrough.ledger.launches import Launch, Life, Loss

#: Where a rank-second can go. Only `useful` is goodput.
BUCKETS = (
    "useful",
    "checkpoint_stall",
    "detect",
    "abort",
    "restart",
    "rendezvous",
    "build",
    "restore",
    "recompute",
    "idle",
    "startup",
    "shutdown",
)


@dataclass(frozen=True)
class Span:
    """A stretch of one rank's time, in seconds since the epoch, spent in one bucket.

    Attributes:
        start: when it began; where the lane's previous span ended.
        end: when it ended, later than `start`.
        bucket: one of `BUCKETS`.
        rank: whose time.
        generation: the life of the ranks it lies in, the way back from its loss included.
        step: the step it belongs to, for `useful`, `recompute` and `checkpoint_stall`; else None.
    """

    start: float
    end: float
    bucket: str
    rank: int
    generation: int
    step: int | None = None

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class Lane:
    """All the time of one rank in one launch: spans without a gap from the launch to its end.

    Attributes:
        rank: whose.
        generation: that of the launch.
        spans: of all its lives.
    """

    rank: int
    generation: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Mark:
    """From `t` on, the rank is in `bucket`."""

    t: float
    bucket: str
    generation: int
    step: int | None = None


def cut_lanes(launches: Sequence[Launch]) -> list[Lane]:
    """One lane a rank and launch, launch by launch.

    Raises:
        UsageError: for a phase that this version does not know.
    """
    found: list[Lane] = []
    done: dict[int, set[int]] = defaultdict(set)
    done_by_all: set[int] = set()
    first = "startup"
    for launch in launches:
        lives: dict[int, list[_Mark]] = {rank: [] for rank in range(launch.ranks)}
        for life in launch.lives:
            for rank, marks in lives.items():
                done[rank] |= done_by_all
                marks[:] = _add_life(marks, launch, life, rank, first, done[rank])
            done_by_all |= life.finished_steps.keys()
            first = "restart" if life.loss else "startup"
        found += [Lane(rank, launch.generation, _spans(launch, rank, marks)) for rank, marks in lives.items()]
    return found


def _add_life(
    marks: list[_Mark], launch: Launch, life: Life, rank: int, first: str, done: set[int]
) -> list[_Mark]:
    """Go on with what a rank did in another life. Adds the steps that it finishes to `done`."""
    said = _said(life, rank, first, done)
    if not marks:  # the launch has just begun
        marks = [_Mark(launch.start, first, life.generation)]
    elif said:
        marks = [mark for mark in marks if mark.t < said[0].t]
    marks += said
    if life.loss is None:
        return marks
    before = [mark for mark in marks if mark.t < life.loss.start]
    return before + _way_back(launch, life, life.loss, rank)


def _said(life: Life, rank: int, first: str, done: set[int]) -> list[_Mark]:
    """What the rank said of itself."""
    marks: list[_Mark] = []
    for event in life.said("phase", "step", "end", rank=rank):
        if event.what == "phase":
            bucket = _bucket(event.attributes.get("phase"), first)
            marks.append(_Mark(event.t, bucket, life.generation, event.step))
        elif event.what == "end":
            marks.append(_Mark(event.t, "shutdown", life.generation))
        elif event.step is not None and event.step not in done:
            done.add(event.step)
            if marks and (marks[-1].bucket, marks[-1].step) == ("recompute", event.step):
                marks[-1] = replace(marks[-1], bucket="useful")
    return marks


def _bucket(phase: object, first: str) -> str:
    """The bucket of a phase; a step has to be finished to be better than `recompute`."""
    if phase not in PHASES:
        raise UsageError(f"phase {phase!r} in the events is unknown; it is one of {', '.join(PHASES)}")
    return {"startup": first, "step": "recompute"}.get(str(phase), str(phase))


def _way_back(launch: Launch, life: Life, loss: Loss, rank: int) -> list[_Mark]:
    """From the loss of a life to the rank's next one, as the launcher saw it."""
    generation = life.generation
    marks = [_Mark(loss.start, "detect", generation), _Mark(loss.detected, "abort", generation)]
    pod = life.pods.get(rank)
    if pod is None:
        return marks  # nobody brings it back: all end together
    here = [event for event in launch.pods.get(pod, ()) if event.t > loss.start]
    ends = [event for event in life.said("exit", rank=rank) if event.t >= loss.start]
    ends = ends or [event for event in here if event.what == "pod_exit"]
    if not ends:
        return marks
    gone = max(ends[0].t, loss.detected)
    marks.append(_Mark(gone, "restart", generation))
    for event in here:
        if event.what == "pod_stop" and event.attributes.get("reason") == "end":
            return [*marks, _Mark(max(event.t, gone), "abort", generation)]
        if event.what in ("agent", "pod_exit"):
            waits = event.attributes.get("state") == "rendezvous" and event.what == "agent"
            marks.append(_Mark(max(event.t, gone), "rendezvous" if waits else "restart", generation))
    return marks


def _spans(launch: Launch, rank: int, marks: list[_Mark]) -> tuple[Span, ...]:
    spans: list[Span] = []
    start = launch.start
    ends = [*(mark.t for mark in marks[1:]), launch.end]
    for mark, until in zip(marks, ends, strict=True):
        end = max(start, min(until, launch.end))
        if end == start:
            continue
        span = Span(start, end, mark.bucket, rank, mark.generation, mark.step)
        if spans and replace(spans[-1], start=start, end=end) == span:
            spans[-1] = replace(spans[-1], end=end)
        else:
            spans.append(span)
        start = end
    return tuple(spans)
