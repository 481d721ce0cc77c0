"""Faults: what came first, how long each part of the recovery took, what had to be done again."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridethrough.events import Event
from ridethrough.ledger.lanes import Lane
from ridethrough.ledger.launches import Launch, exit_signal

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

# What an injected fault did to its rank, by kind.
_DEEDS = {
    "kill": "killed by SIGKILL",
    "exit": "exited",
    "exception": "raised an exception",
    "hang": "hung",
    "stop": "stopped by SIGSTOP",
}


@dataclass(frozen=True)
class Fault:
    """One fault, injected or not, and what it cost.

    Attributes:
        t: its instant: what the injector wrote before it fired, or the first sign of a failure.
        generation: the launch it hit.
        kind: `kill`, `exit`, `exception`, `hang`, `stop`, …; or how a launch ended without any of these:
            `timeout`, `interrupted`, `failed`, `lost` (nobody said anything).
        rank: the rank it hit; None if it was not one rank.
        step: the step that rank was in; None outside of steps.
        first_cause: what came first, in a sentence.
        tier: what brought the run back: `relaunch`; `outlived` if nothing had to; None if nothing has yet.
        phases_s: seconds in each part of the recovery, on the path of the rank that was last to finish the
            first new step; up to the last event if the run has not recovered.
        mttr_s: from the fault to the first new step finished on all ranks, without the pauses between
            launches; None if that has not happened, or nothing had to recover.
        between_launches_s: those pauses: how long it took somebody to start the run again.
        lost_steps: finished steps that had to be done again; None if the run has not been restored.
    """

    t: float
    generation: int
    kind: str
    rank: int | None
    step: int | None
    first_cause: str
    tier: str | None
    phases_s: dict[str, float]
    mttr_s: float | None
    between_launches_s: float
    lost_steps: int | None


def find_faults(launches: Sequence[Launch], lanes: Sequence[Lane]) -> list[Fault]:
    """Each injected fault, and each loss of a launch that had another cause, in the order of time."""
    by_place = {(lane.generation, lane.rank): lane for lane in lanes}
    found: list[Fault] = []
    for number, launch in enumerate(launches):
        for cause, t, fatal in _causes(launch):
            fault = _outlived(launch, cause, t)
            found.append(_follow(fault, launches, number, by_place) if fatal else fault)
    return sorted(found, key=lambda fault: fault.t)


def _causes(launch: Launch) -> Iterator[tuple[Event | None, float, bool]]:
    """The faults of a launch: event, instant, and whether it had a part in losing the launch."""
    loss = launch.loss
    for event in launch.said("fault"):
        yield event, launch.clip(event.t), loss is not None and not launch.outlived(event)
    if loss and (loss.cause is None or loss.cause.what != "fault"):
        yield loss.cause, loss.start, True


def _outlived(launch: Launch, cause: Event | None, t: float) -> Fault:
    """A fault as it stands if it cost nothing."""
    kind, text = _describe(launch, cause, t)
    return Fault(
        t=t,
        generation=launch.generation,
        kind=kind,
        rank=cause.rank if cause else None,
        step=_place(launch, cause, t)[0],
        first_cause=text,
        tier="outlived",
        phases_s=dict.fromkeys(RECOVERY, 0.0),
        mttr_s=None,
        between_launches_s=0.0,
        lost_steps=0,
    )


# --- the way back ----------------------------------------------------------------------------------------


def _follow(
    fault: Fault, launches: Sequence[Launch], number: int, lanes: dict[tuple[int, int], Lane]
) -> Fault:
    """Follow a fault that cost launch `number` to the first new step, or as far as the run has got."""
    recovery = _first_new_step(launches, number)
    last, until, rank = recovery or (len(launches) - 1, launches[-1].end, 0)
    way = launches[number : last + 1]
    windows = [[launch.start, launch.end] for launch in way]
    windows[0][0], windows[-1][1] = fault.t, until
    phases = dict.fromkeys(RECOVERY, 0.0)
    for launch, (start, end) in zip(way, windows, strict=True):
        slot = rank if rank < launch.ranks else 0  # the world may have had another size
        for part, seconds in _parts(lanes.get((launch.generation, slot)), start, end):
            phases[part] += seconds
    pauses = (after.start - before.end for before, after in itertools.pairwise(way))
    restored = next((one.restored for one in launches[number + 1 :] if one.restored is not None), None)
    return replace(
        fault,
        first_cause=_first_cause(launches[number]),
        tier=None if launches[number].last else "relaunch",
        phases_s=phases,
        mttr_s=sum(end - start for start, end in windows) if recovery else None,
        between_launches_s=sum(max(0.0, pause) for pause in pauses),
        lost_steps=None if restored is None else max(0, launches[number].reached - restored),
    )


def _first_new_step(launches: Sequence[Launch], number: int) -> tuple[int, float, int] | None:
    """In which launch after `number`, when, and on which rank last, the first new step was finished."""
    before = max(launch.reached for launch in launches[: number + 1])
    for later in range(number + 1, len(launches)):
        steps = launches[later].finished_steps
        new = [step for step in steps if step > before]
        if new:
            return (later, *steps[min(new)])
    return None


def _parts(lane: Lane | None, start: float, end: float) -> Iterator[tuple[str, float]]:
    for span in lane.spans if lane else ():
        yield _PART[span.bucket], max(0.0, min(span.end, end) - max(span.start, start))


# --- in words --------------------------------------------------------------------------------------------


def _first_cause(launch: Launch) -> str:
    loss = launch.loss
    return _describe(launch, loss.cause, loss.start)[1] if loss else ""


def _describe(launch: Launch, cause: Event | None, t: float) -> tuple[str, str]:
    """The kind of a fault, and a sentence on what happened."""
    if cause is None:
        return "lost", "the launcher ended without a word: it was killed, or the machine went down"
    rank, said, where = f"rank {cause.rank}", cause.attributes, _place(launch, cause, t)[1]
    if cause.what == "fault":
        kind = str(said.get("kind"))
        return kind, f"{said.get('id', kind)}: {rank} {_DEEDS.get(kind, f'had fault {kind!r}')}{where}"
    if cause.what == "error":
        message = " ".join(str(said.get("message", "")).split())
        return "exception", f"{rank} raised {said.get('type')}{where}: {message}"
    if cause.what == "exit" and exit_signal(cause):
        return "kill", f"{rank} was killed by {signal_name(exit_signal(cause))}{where}"
    if cause.what == "exit":
        return "exit", f"{rank} exited with code {said.get('code')}{where}"
    kind = launch.outcome or "lost"
    return kind, str(said.get("cause", kind))


def _place(launch: Launch, cause: Event | None, t: float) -> tuple[int | None, str]:
    """The step a cause belongs to, and where its rank was, in words."""
    if cause is None or cause.rank is None:
        return None, ""
    said = [event for event in launch.said("phase", rank=cause.rank) if event.t <= t]
    phase, entered = (said[-1].attributes.get("phase"), said[-1].step) if said else ("startup", None)
    # Who injects from outside knows the step only from these same events.
    step = entered if cause.step is None or cause.attributes.get("source") == "outside" else cause.step
    if step is None:
        return None, f" in {phase}"
    saving = phase == "checkpoint_stall" and step == entered
    return step, f" in the save of step {step}" if saving else f" in step {step}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
