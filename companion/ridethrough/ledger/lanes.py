"""From launches to lanes: what each rank did with each second.

A *lane* is one rank slot in one launch. It is cut into spans that touch and never overlap, from the launch
to its end, so the buckets sum to wall clock × ranks by construction. Time between two launches, when nobody
holds the ranks, lies in no lane.

Two rules decide what a rank gets credit for:

- A step is `useful` the first time the rank finishes it. It is `recompute` when it had been finished before,
  by this rank or by all ranks of an earlier launch (whose world size may have been another), and when it is
  never finished: what was begun is done again.
- When a launch is lost, nothing after that instant counts: all lanes are `detect` until the launcher knows,
  then `abort` until the launch ends, whatever the surviving ranks still say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridethrough.errors import UsageError
from ridethrough.events import PHASES
from ridethrough.ledger.launches import Launch, Loss

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
        generation: the launch it lies in.
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
    """All the time of one rank in one launch: spans without a gap from the launch to its end."""

    rank: int
    generation: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Mark:
    """From `t` on, the rank is in `bucket`."""

    t: float
    bucket: str
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
        for rank in range(launch.ranks):
            done[rank] |= done_by_all
            marks = _cut(_marks(launch, rank, first, done[rank]), launch.loss)
            found.append(Lane(rank, launch.generation, _spans(launch, rank, marks)))
        done_by_all |= launch.finished_steps.keys()
        first = "restart" if launch.loss else "startup"
    return found


def _marks(launch: Launch, rank: int, first: str, done: set[int]) -> list[_Mark]:
    """What the rank said of itself. Adds the steps that it finishes to `done`."""
    marks = [_Mark(launch.start, first)]
    for event in launch.said("phase", "step", "end", rank=rank):
        if event.what == "phase":
            marks.append(_Mark(event.t, _bucket(event.attributes.get("phase"), first), event.step))
        elif event.what == "end":
            marks.append(_Mark(event.t, "shutdown"))
        elif event.step is not None and event.step not in done:
            done.add(event.step)
            if (marks[-1].bucket, marks[-1].step) == ("recompute", event.step):
                marks[-1] = replace(marks[-1], bucket="useful")
    return marks


def _bucket(phase: object, first: str) -> str:
    """The bucket of a phase; a step has to be finished to be better than `recompute`."""
    if phase not in PHASES:
        raise UsageError(f"phase {phase!r} in the events is unknown; it is one of {', '.join(PHASES)}")
    return {"startup": first, "step": "recompute"}.get(str(phase), str(phase))


def _cut(marks: list[_Mark], loss: Loss | None) -> list[_Mark]:
    if loss is None:
        return marks
    before = [mark for mark in marks if mark.t < loss.start]
    return [*before, _Mark(loss.start, "detect"), _Mark(loss.detected, "abort")]


def _spans(launch: Launch, rank: int, marks: list[_Mark]) -> tuple[Span, ...]:
    spans: list[Span] = []
    start = launch.start
    ends = [*(mark.t for mark in marks[1:]), launch.end]
    for mark, until in zip(marks, ends, strict=True):
        end = max(start, launch.clip(until))
        if end == start:
            continue
        if spans and (spans[-1].bucket, spans[-1].step) == (mark.bucket, mark.step):
            spans[-1] = replace(spans[-1], end=end)
        else:
            spans.append(Span(start, end, mark.bucket, rank, launch.generation, mark.step))
        start = end
    return tuple(spans)
