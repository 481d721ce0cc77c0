"""From events to launches: when each began and ended, which steps it finished, how it was lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ridethrough.events import Event


@dataclass(frozen=True)
class Loss:
    """How a launch was lost.

    Attributes:
        start: when it was; from here on nothing counts.
        detected: when the launcher knew; the end of the launch if it never did.
        cause: the `fault`, `error` or `exit` event behind it; the `detected` event if there is none of
            these (a time limit, Ctrl-C); None if nobody said a word (the machine went down).
    """

    start: float
    detected: float
    cause: Event | None


@dataclass(frozen=True)
class Launch:
    """One life of the ranks, with the events of its generation in the order of time.

    Attributes:
        generation: counts the launches of a run from 0.
        ranks: its world size.
        start: when the launcher began; the first event where no launcher wrote (under torchrun).
        end: when the launcher ended; the last event while it goes on, or if the launcher was killed.
        outcome: `finished`, `failed`, `timeout`, `interrupted`; None if the launcher has not said.
        last: whether no other launch has followed it.
        events: what was said in it.
    """

    generation: int
    ranks: int
    start: float
    end: float
    outcome: str | None
    last: bool
    events: tuple[Event, ...]

    def said(self, *whats: str, rank: int | None = None) -> list[Event]:
        """The events of some sorts, oldest first: about one rank, or about any."""
        events = self.events if rank is None else self._by_rank.get(rank, ())
        return [event for event in events if event.what in whats]

    def clip(self, t: float) -> float:
        """`t`, or the nearer end of the launch if a clock puts it outside."""
        return min(max(t, self.start), self.end)

    @cached_property
    def _by_rank(self) -> dict[int | None, list[Event]]:
        found: dict[int | None, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.rank].append(event)
        return found

    @cached_property
    def finished_steps(self) -> dict[int, tuple[float, int]]:
        """The steps that every rank finished: step → when the last rank did, and which rank that was."""
        times: dict[int, dict[int, float]] = defaultdict(dict)
        for rank in range(self.ranks):
            for event in self.said("step", rank=rank):
                if event.step is not None:
                    times[event.step].setdefault(rank, self.clip(event.t))
        return {
            step: max((t, rank) for rank, t in by_rank.items())
            for step, by_rank in times.items()
            if len(by_rank) == self.ranks
        }

    @cached_property
    def restored(self) -> int | None:
        """The step it continued from; None if it did not get that far."""
        return next((event.step for event in self.said("restored")), None)

    @cached_property
    def reached(self) -> int:
        """The last step that stood when it ended."""
        return max(self.finished_steps, default=self.restored or 0)

    @cached_property
    def loss(self) -> Loss | None:
        """How it was lost; None if it finished or still goes on."""
        if self.outcome == "finished":
            return None
        detected = next(iter(self.said("detected")), None)
        signs = [event for event in self._failures() if detected is None or event.t <= detected.t]
        signs += [detected] if detected else []
        if not signs:
            going_on = self.last and self.outcome is None
            return None if going_on else Loss(self.end, self.end, None)
        first = min(signs, key=lambda event: (event.t, event.what != "fault"))
        known = self.clip(detected.t) if detected else self.end
        return Loss(self.clip(first.t), known, self._cause(first, detected))

    def _cause(self, first: Event, detected: Event | None) -> Event:
        """The first sign; but if that is no injected fault, the first one of the rank the launcher blames.

        The launcher has heard all ranks out: a peer's "connection reset" is often written before it sees
        that a rank was killed.
        """
        if first.what in ("fault", "detected") or detected is None or detected.rank is None:
            return first
        blamed = [event for event in self._failures() if event.rank == detected.rank]
        return blamed[0] if blamed else first

    def outlived(self, fault: Event) -> bool:
        """Whether a fault did no lasting harm: a rank stopped and continued, say.

        It did none if its rank finished a step that it had entered after the fault, or if the launch
        finished all the same.
        """
        if self.outcome == "finished":
            return True
        own = [event for event in self.said("phase", "step") if event.rank == fault.rank]
        entered = {event.step for event in own if event.what == "phase" and event.t > fault.t}
        return any(event.what == "step" and event.step in entered for event in own)

    def _failures(self) -> Iterator[Event]:
        """Signs of failure. Code 0 before the job is done is one too: the other ranks wait for ever."""
        ended = {event.rank for event in self.said("end")}
        for event in self.said("fault", "error", "exit"):
            left = event.what == "exit" and event.attributes.get("code") == 0 and event.rank in ended
            if not left and not (event.what == "fault" and self.outlived(event)):
                yield event


def read_launches(events: Iterable[Event]) -> list[Launch]:
    """The launches of a run, in their order."""
    by_generation: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.t):
        by_generation[event.generation].append(event)
    found: list[Launch] = []
    for generation in sorted(by_generation, reverse=True):
        found.append(_launch(generation, by_generation[generation], found[-1] if found else None))
    return found[::-1]


def exit_signal(event: Event) -> int:
    """The signal that ended a process, from its `exit` event; 0 if none did."""
    code = event.attributes.get("code")
    return -code if isinstance(code, int) and code < 0 else 0


def _launch(generation: int, events: list[Event], following: Launch | None) -> Launch:
    begin = next((event for event in events if event.what == "launch"), None)
    finish = next((event for event in events if event.what == "launch_end"), None)
    start = begin.t if begin else events[0].t
    end = finish.t if finish else events[-1].t
    if finish is None and following and following.start > start:
        end = min(end, following.start)  # a rank that outlives its launcher may still write a line or two
    ranks = begin.attributes.get("ranks") if begin else None
    if ranks is None:
        ranks = 1 + max((event.rank for event in events if event.rank is not None), default=0)
    outcome = finish.attributes.get("outcome") if finish else None
    ended = {event.rank for event in events if event.what == "end"}
    if finish is None and ranks and ended >= set(range(ranks)):
        outcome = "finished"
    return Launch(generation, ranks, start, max(start, end), outcome, following is None, tuple(events))
