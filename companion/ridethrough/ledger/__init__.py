"""The account of a run's time: every second of every rank, in exactly one bucket.

`launches` reads the events as launches and the lives of the ranks in them, `spread` says what went wrong in
a life and what came first, `lanes` cuts the ranks' time into spans, `faults` follows each fault to the first
new step. `Ledger` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ridethrough.events import Event
from ridethrough.ledger.faults import RECOVERY, Fault, find_faults
from ridethrough.ledger.lanes import BUCKETS, Lane, Span, cut_lanes
from ridethrough.ledger.launches import Launch, Life, Loss, read_launches
from ridethrough.ledger.spread import Sign, signs

__all__ = [
    "BUCKETS",
    "RECOVERY",
    "Fault",
    "Lane",
    "Launch",
    "Ledger",
    "Life",
    "Loss",
    "Sign",
    "Span",
    "signs",
]


@dataclass(frozen=True)
class Ledger:
    """The account of one run: `Ledger.of(read_events(run.events))`."""

    launches: tuple[Launch, ...]
    lanes: tuple[Lane, ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> Ledger:
        """Account for a run that finished, failed or still goes on.

        Raises:
            UsageError: for a phase that this version does not know.
        """
        launches = read_launches(events)
        return cls(tuple(launches), tuple(cut_lanes(launches)))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of all lanes, lane by lane."""
        return tuple(span for lane in self.lanes for span in lane.spans)

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """The lives of the ranks, over all launches."""
        return tuple(life for launch in self.launches for life in launch.lives)

    @cached_property
    def wall_s(self) -> float:
        """How long the run held its ranks: the sum over its launches."""
        return sum(launch.end - launch.start for launch in self.launches)

    @cached_property
    def buckets_s(self) -> dict[str, float]:
        """Rank-seconds in each bucket; all buckets are there."""
        seconds = dict.fromkeys(BUCKETS, 0.0)
        for span in self.spans:
            seconds[span.bucket] += span.seconds
        return seconds

    @cached_property
    def goodput(self) -> float:
        """The share of useful rank-seconds, 0 to 1; 0 for a run that has not begun."""
        total = sum(self.buckets_s.values())
        return self.buckets_s["useful"] / total if total else 0.0

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """What went wrong, in the order of time."""
        return tuple(find_faults(self.launches, self.lanes))
