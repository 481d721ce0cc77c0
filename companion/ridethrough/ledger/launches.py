"""From events to launches and the lives of the ranks in them: when each began and ended, how it was lost.

A *launch* holds the ranks from its launcher's first event to its last. A *life* of the ranks lies between two
restarts. A launcher that starts ranks once has one life a launch; one that brings them back has several.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from ridethrough.events import Event
from ridethrough.ledger.spread import Sign, describe, place, signs, which_pods

#: What a launcher says; the rest is from ranks.
_LAUNCHERS = frozenset(
    {
        *("launch", "spawn", "exit", "detected", "aborted", "launch_end", "repaired", "agent", "gave_up"),
        *("pod_start", "pod_exit", "pod_stop", "pod_wait"),
    }
)

# A loss that nobody injected, by how its first cause showed.
_KINDS = {"raised": "exception", "connection": "exception", "timeout": "exception"}
_KINDS |= {"killed": "kill", "exited": "exit"}
_WITH_POD = {"pod_exit": "pod", "pod_stop": "drain"}


@dataclass(frozen=True)
class Loss:
    """How a life was lost.

    Attributes:
        start: when it was; from here on nothing counts.
        detected: when the launcher knew; the end of the life if it never did.
        kind: of an injected fault; else `exception`, `kill`, `exit`, `pod`, `drain`, `silent`, `pod_exit`,
            `gave_up`; or how the launch ended without any of these: `timeout`, `interrupted`, `failed`,
            `lost` (nobody said anything).
        rank: the rank it began with; None if it was not one rank.
        step: the step that rank was in; None outside of steps.
        text: the first cause, in a sentence.
        fault: the injected fault behind it; None if there is none.
    """

    start: float
    detected: float
    kind: str
    rank: int | None
    step: int | None
    text: str
    fault: Event | None = None


@dataclass(frozen=True)
class Life:
    """One life of the ranks, with its events in the order of time.

    Attributes:
        generation: counts the lives of a run; there may be gaps.
        ranks: the world size.
        start: its first event; the start of the launch for the first life in it.
        end: where the next life begins, or the end of the launch.
        outcome: `finished`; how its launch ended, for the last life in it; None if nobody has said.
        going_on: whether it may still go on.
        events: what was said in it, by its ranks and by their launcher.
        earlier: what the launcher had said before.
    """

    generation: int
    ranks: int
    start: float
    end: float
    outcome: str | None
    going_on: bool
    events: tuple[Event, ...]
    earlier: tuple[Event, ...] = ()

    def said(self, *whats: str, rank: int | None = None) -> list[Event]:
        """The events of some sorts, oldest first: about one rank, or about any."""
        events = self.events if rank is None else self._by_rank.get(rank, ())
        return [event for event in events if event.what in whats]

    def clip(self, t: float) -> float:
        """`t`, or the nearer end of the life if a clock puts it outside."""
        return min(max(t, self.start), self.end)

    @cached_property
    def _by_rank(self) -> dict[int | None, list[Event]]:
        found: dict[int | None, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.rank].append(event)
        return found

    @cached_property
    def finished_steps(self) -> dict[int, float]:
        """The steps that every rank finished: step → when the last rank did."""
        times: dict[int, dict[int, float]] = defaultdict(dict)
        for rank in range(self.ranks):
            for event in self.said("step", rank=rank):
                if event.step is not None:
                    times[event.step].setdefault(rank, self.clip(event.t))
        return {step: max(by_rank.values()) for step, by_rank in times.items() if len(by_rank) == self.ranks}

    @cached_property
    def restored(self) -> int | None:
        """The step it continued from; None if it did not get that far."""
        return next((event.step for event in self.said("restored")), None)

    @cached_property
    def reached(self) -> int:
        """The last step that stood when it ended."""
        return max(self.finished_steps, default=self.restored or 0)

    @cached_property
    def signs(self) -> tuple[Sign, ...]:
        """What went wrong in it, the first cause first; nothing if it finished."""
        return () if self.outcome == "finished" else signs(self.events, self.ranks, self.earlier)

    @cached_property
    def loss(self) -> Loss | None:
        """How it was lost; None if it finished or still goes on."""
        detected = next(iter(self.said("detected")), None)
        known = self.clip(detected.t) if detected else self.end
        if self.signs and self.signs[0].first:
            return self._lost_by(self.signs[0], known)
        if self.outcome == "finished" or (self.going_on and not detected):
            return None
        if detected is None:
            text = "the launcher ended without a word: it was killed, or the machine went down"
            return Loss(known, known, "lost", None, None, text)
        kind = self.outcome or "lost"
        text = str(detected.attributes.get("cause", kind))
        return Loss(known, known, kind, detected.rank, self._step(detected.rank, known), text)

    @cached_property
    def pods(self) -> dict[int | None, int]:
        """The pod that each rank is in; nothing where there are no pods."""
        return which_pods(self.events, self.earlier)

    def _lost_by(self, sign: Sign, known: float) -> Loss:
        start = min(self.clip(sign.t), known)
        if sign.event and sign.event.what == "fault":
            step = self.injected(sign.event)[0]
            kind = str(sign.event.attributes.get("kind"))
            return Loss(start, known, kind, sign.rank, step, sign.text, sign.event)
        kind = _KINDS.get(sign.how, sign.how)
        if sign.how == "killed" and sign.event:
            kind = _WITH_POD.get(sign.event.what, kind)
        return Loss(start, known, kind, sign.rank, self._step(sign.rank, sign.t), sign.text)

    def _step(self, rank: int | None, t: float) -> int | None:
        return None if rank is None else place(self.said("phase", rank=rank), t)[0]

    def injected(self, fault: Event) -> tuple[int | None, str]:
        """The step that the rank of an injected fault was in, and a sentence on what happened."""
        phases = [] if fault.rank is None else self.said("phase", rank=fault.rank)
        return describe(fault, phases)

    def outlived(self, fault: Event) -> bool:
        """Whether a fault did no lasting harm: a rank stopped and continued, say.

        It did none if its rank finished a step that it had entered after the fault, or if the life finished
        all the same.
        """
        return all(sign.event is not fault for sign in self.signs)


@dataclass(frozen=True)
class Launch:
    """The ranks from one start of the launcher to its end.

    Attributes:
        generation: that of its first life; counts the launches of a run where each has one life.
        ranks: its world size.
        start: when the launcher began; the first event where no launcher wrote (under torchrun).
        end: when the launcher ended; the last event while it goes on, or if the launcher was killed.
        outcome: `finished`, `failed`, `timeout`, `interrupted`; None if the launcher has not said.
        last: whether no other launch has followed it.
        lives: the lives of its ranks, one after another; at least one.
        events: what was said in it.
    """

    generation: int
    ranks: int
    start: float
    end: float
    outcome: str | None
    last: bool
    lives: tuple[Life, ...]
    events: tuple[Event, ...]

    def said(self, *whats: str) -> list[Event]:
        """The events of some sorts, oldest first."""
        return [event for event in self.events if event.what in whats]

    @cached_property
    def pods(self) -> dict[int, list[Event]]:
        """What happened to each pod; nothing where ranks are started directly."""
        found: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.what.startswith("pod_") or event.what in ("agent", "gave_up"):
                found[event.attributes.get("pod", 0)].append(event)
        return found


def read_launches(events: Iterable[Event]) -> list[Launch]:
    """The launches of a run, in their order."""
    found: list[Launch] = []
    for generations in reversed(_by_launch(events)):
        found.append(_launch(generations, found[-1] if found else None))
    return found[::-1]


def _by_launch(events: Iterable[Event]) -> list[dict[int, list[Event]]]:
    """The events of each launch by generation, in the order of time."""
    by_generation: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=_time):
        by_generation[event.generation].append(event)
    found: list[dict[int, list[Event]]] = []
    for generation, said in sorted(by_generation.items()):
        if found and _continues(next(iter(found[-1].values())), said):
            found[-1][generation] = said
        else:
            found.append({generation: said})
    return found


def _continues(launch: Sequence[Event], said: Sequence[Event]) -> bool:
    """Whether a generation is another life in a launch, and not a launch of its own, by a plain torchrun."""
    begin, end = _first(launch, "launch"), _first(launch, "launch_end")
    if begin is None or _first(said, "launch"):
        return False
    if (
        end is None
    ):  # a launcher that starts its ranks once has nothing to do with what came after it was killed
        return bool(begin.attributes.get("launcher", "direct") != "direct")
    return said[0].t < end.t


def _launch(generations: dict[int, list[Event]], following: Launch | None) -> Launch:
    first, events = next(iter(generations)), sorted(chain(*generations.values()), key=_time)
    begin, finish = _first(generations[first], "launch"), _first(generations[first], "launch_end")
    start = begin.t if begin else events[0].t
    end = finish.t if finish else events[-1].t
    if finish is None and following and following.start > start:
        end = min(end, following.start)  # a rank that outlives its launcher may still write a line or two
    end = max(start, end)
    ranks = begin.attributes.get("ranks") if begin else None
    if ranks is None:
        ranks = 1 + max((event.rank for event in events if event.rank is not None), default=0)
    outcome = finish.attributes.get("outcome") if finish else None
    lives = _cut(generations, Life(first, ranks, start, end, None, False, tuple(events)))
    ended = {event.rank for event in lives[-1].said("end")}
    if finish is None and ranks and ended >= set(range(ranks)):
        outcome = "finished"
    going_on = outcome is None and following is None
    lives[-1] = replace(lives[-1], outcome=outcome, going_on=going_on)
    return Launch(first, ranks, start, end, outcome, following is None, tuple(lives), tuple(events))


def _cut(generations: dict[int, list[Event]], whole: Life) -> list[Life]:
    """The lives in a launch. A rank says which it belongs to; what its launcher does goes by time."""
    if len(generations) == 1:
        return [whole]
    words = _words(generations)
    starts = [whole.start, *(whole.clip(said[0].t) for _, said in words[1:])]
    launchers = [event for event in whole.events if _is_launchers(event)]
    cuts = [0, *(bisect_left(launchers, start, key=_time) for start in starts[1:]), len(launchers)]
    return [
        replace(
            whole,
            generation=generation,
            start=start,
            end=end,
            events=tuple(sorted([*said, *launchers[since:until]], key=_time)),
            earlier=tuple(launchers[:since]),
        )
        for (generation, said), start, end, since, until in zip(
            words, starts, [*starts[1:], whole.end], cuts, cuts[1:], strict=False
        )
    ]


def _words(generations: dict[int, list[Event]]) -> list[tuple[int, list[Event]]]:
    """What ranks said, life by life."""
    found: list[tuple[int, list[Event]]] = []
    for generation, events in generations.items():
        said = [event for event in events if not _is_launchers(event)]
        if said and found and _same_life(found[-1][1], said):
            found[-1] = found[-1][0], sorted([*found[-1][1], *said], key=_time)
        elif said:
            found.append((generation, said))
    return sorted(found, key=lambda life: life[1][0].t) or [(next(iter(generations)), [])]


def _same_life(one: Sequence[Event], other: Sequence[Event]) -> bool:
    """Whether ranks of one life count differently: those that fail before they could agree count alone."""
    apart = {event.rank for event in one}.isdisjoint(event.rank for event in other)
    return apart and one[0].t <= other[-1].t and other[0].t <= one[-1].t


def _is_launchers(event: Event) -> bool:
    return event.what in _LAUNCHERS or (event.what == "fault" and "pod" in event.attributes)


def _first(events: Iterable[Event], what: str) -> Event | None:
    return next((event for event in events if event.what == what), None)


def _time(event: Event) -> float:
    return event.t
