"""What every way of running ranks has in common: hear them, show what they print, tell how they are lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any, Protocol

from ridethrough import spawn
from ridethrough.events import Event, EventLog
from ridethrough.launcher.progress import Progress
from ridethrough.launcher.story import Exit, Follower, Story, failed

#: Seconds after the first failure in which other ranks' errors are awaited, to tell cause from effect.
SETTLE_S = 0.5

#: Seconds that a rank whose job raised, or whose work is done, may take to end by itself.
LEAVE_S = 10.0

#: Seconds that output may take to arrive once all ranks are gone.
OUTPUT_S = 2.0

_TURN_S = 0.05


@dataclass(frozen=True)
class Task:
    """What to run on how many ranks.

    Attributes:
        module: what each rank runs.
        arguments: its command line.
        ranks: how many.
        directory: gets `logs/`, `events/` and `faults/`.
        generation: the first life of these ranks.
        threads: CPU threads a rank.
        grace_s: seconds between asking a rank to end (SIGTERM) and ending it (SIGKILL).
    """

    module: str
    arguments: tuple[str, ...]
    ranks: int
    directory: Path
    generation: int = 0
    threads: int = 1
    grace_s: float = 2.0


@dataclass(frozen=True)
class Ending:
    """Why a launch is lost: how it ends, in one line why, and what a reader needs besides."""

    outcome: str
    cause: str
    rank: int | None = None
    details: str = ""

    @property
    def message(self) -> str:
        """All of it."""
        return f"{self.cause}\n{self.details}".rstrip()


class Group(Protocol):
    """Ranks that run, in one way or another."""

    @property
    def about(self) -> dict[str, Any]:
        """What the `launch` event says of the way in which they are started."""
        ...

    def start(self) -> None:
        """Start them."""
        ...

    def watch(self, timeout_s: float, told: list[signal.Signals]) -> Ending | None:
        """Wait until all have ended well (None), or until they are lost for good.

        Args:
            timeout_s: longest wait, in seconds.
            told: signals that this process gets meanwhile; any of them ends the wait.
        """
        ...

    def end(self, ending: Ending | None) -> None:
        """End what still runs, and record it all."""
        ...

    def finish_output(self) -> None:
        """Take in the last of the output, once nothing is left that could write more."""
        ...


class Watcher:
    """What is known of ranks that run: their output, events and ends.

    Args:
        task: what they run.
        log: the launcher's events.
        progress: where to show what they print.
    """

    def __init__(self, task: Task, log: EventLog, progress: Progress) -> None:
        self.task, self.log, self.progress = task, log, progress
        self.lines = spawn.output_queue()
        self.follower = Follower(task.directory / "events", task.generation)
        self.stories = [Story(rank, task.generation) for rank in range(task.ranks)]
        self.exits: dict[int, Exit] = {}
        self.heard: list[Event] = []
        self.logs = task.directory / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def turn(self) -> None:
        """Show what was printed, note who ended, hear what was said; in this order, so that a rank's
        last words are known once it has ended."""
        self.show()
        self.note_ends()
        for event in self.follower.new():
            self.hear(event)

    def turns(self, within_s: float, more: Callable[[], bool]) -> None:
        """Go on for `within_s` seconds, or until there is nothing more to wait for."""
        deadline = time.monotonic() + within_s
        while more() and time.monotonic() < deadline:
            self.turn()
        self.turn()

    def show(self) -> None:
        """Show what was printed since the last time; waits a moment if nothing was."""
        wait: float = _TURN_S
        with suppress(Empty):
            for _ in range(1000):  # then the processes have their turn, however much is printed
                number, line = self.lines.get(timeout=wait)
                self.show_line(number, line)
                wait = 0

    def show_line(self, number: int, line: str) -> None:
        """Show one line that rank or pod `number` has printed."""
        raise NotImplementedError

    def note_ends(self) -> None:
        """Look which processes have ended."""
        raise NotImplementedError

    def hear(self, event: Event) -> None:
        """Take in one event of a rank or a fault injector."""
        self.heard.append(event)
        if event.rank is not None and event.rank < len(self.stories):
            self.stories[event.rank].tell(event)
        if event.rank == 0 and event.what in ("step", "restored") and event.step is not None:
            self.progress.at(event.step, event.attributes.get("loss"))

    def record(
        self,
        what: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        t: float | None = None,
        **said: Any,
    ) -> Event:
        """Write an event of the launcher, and remember it as the ranks' are remembered."""
        event = self.log.emit(what, step=step, rank=rank, t=t, **said)
        self.heard.append(event)
        return event

    @property
    def all_done(self) -> bool:
        """Whether every rank has finished its work."""
        return all(story.ended for story in self.stories)

    def is_lost(self, story: Story) -> bool:
        """Whether a rank is lost; one whose job raised may first leave by itself."""
        error = story.error
        return failed(story, self.exits.get(story.rank)) or bool(error and time.time() - error.t > LEAVE_S)

    def timeout(self, timeout_s: float, logs: list[Path]) -> Ending:
        """How it stood when time ran out."""
        states = [
            f"rank {story.rank} "
            + ("had ended" if story.rank in self.exits else f"was {story.silence}")
            + (f" (injected {story.fault['id']})" if story.fault else "")
            for story in self.stories
        ]
        cause = f"no end within {timeout_s:g} s: {'; '.join(states)}"
        return Ending("timeout", cause, details="\n".join(f"log: {log}" for log in logs))


def interrupted(told: list[signal.Signals]) -> Ending:
    """How a launch ends when its launcher is told to stop."""
    return Ending("interrupted", f"interrupted: the launcher got {told[0].name}")
