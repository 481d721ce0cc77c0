"""What each rank of a running launch has said so far, and which of them failed first."""

from __future__ import annotations

import signal
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ridethrough.errors import RunError
from ridethrough.events import Event, parse
from ridethrough.ledger.faults import signal_name

#: A death is noticed up to this many seconds after the other ranks feel it: the launcher looks at
#: processes many times a second, while a peer of a dead rank gets its connection error at once.
NOTICED_LATE_S = 0.25


class Follower:
    """Reads the events of one generation while they are being written."""

    def __init__(self, directory: Path, generation: int) -> None:
        self._directory, self._pattern = directory, f"*-g{generation}-*.jsonl"
        self._read: dict[Path, int] = {}

    def new(self) -> list[Event]:
        """What ranks and fault injectors wrote since the last call, in the order of time.

        Raises:
            RunError: for a line that is not an event, naming its file.
        """
        events = [event for path in self._files() for event in self._more(path)]
        return sorted(events, key=lambda event: event.t)

    def _files(self) -> Iterator[Path]:
        return (path for path in self._directory.glob(self._pattern) if not path.name.startswith("launcher"))

    def _more(self, path: Path) -> list[Event]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
        try:
            return [parse(line) for line in whole.splitlines()]
        except ValueError as error:
            raise RunError(f"{path}: a line is not an event: {error}") from error


@dataclass
class Story:
    """What one rank was last known to do, from its events."""

    rank: int
    phase: str = "startup"
    step: int | None = None
    heard: float = field(default_factory=time.time)
    fault: Event | None = None
    error: Event | None = None
    ended: bool = False

    def tell(self, event: Event) -> None:
        """Take in one event; a step that finishes shows that an earlier fault or error was survived."""
        self.heard = max(self.heard, event.t)
        if event.step is not None:
            self.step = event.step
        if event.what == "phase":
            self.phase = event["phase"]
        elif event.what == "step":
            self.fault = self.error = None
        elif event.what == "fault":
            self.fault = self.fault or event
        elif event.what == "error":
            self.error = self.error or event
        elif event.what == "end":
            self.ended = True

    @property
    def where(self) -> str:
        """As in `step 37`, `the save of step 40`, `restore`."""
        if self.phase == "step":
            return f"step {self.step}"
        return f"the save of step {self.step}" if self.phase == "checkpoint_stall" else self.phase

    @property
    def silence(self) -> str:
        """As in `in step 37, silent for 12.0 s`."""
        return f"in {self.where}, silent for {max(0.0, time.time() - self.heard):.1f} s"


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended, and when that was noticed."""

    code: int
    t: float


def failed(story: Story, exit: Exit | None) -> bool:
    """Whether a rank is lost: it ended in any other way than with code 0 after its `end`."""
    return exit is not None and (exit.code != 0 or not story.ended)


def first_to_fail(stories: Sequence[Story], exits: Mapping[int, Exit]) -> Story | None:
    """The rank whose trouble began first; the others mostly fail because of it.

    A death is dated a little earlier than it was noticed, so that a rank killed without a word comes
    before the peers that then raise connection errors; SIGABRT is how libraries end a process that has had
    such an error. None if no rank is in trouble.
    """
    began = {story.rank: _trouble_began(story, exits.get(story.rank)) for story in stories}
    troubled = [story for story in stories if began[story.rank] is not None]
    return min(troubled, key=lambda story: began[story.rank] or 0.0, default=None)


def _trouble_began(story: Story, exit: Exit | None) -> float | None:
    if story.fault:
        return story.fault.t
    if story.error:
        return story.error.t
    if exit is None or not failed(story, exit):
        return None
    return exit.t if exit.code == -signal.SIGABRT else exit.t - NOTICED_LATE_S


def sentence(story: Story, exit: Exit | None, when: str = "first") -> str:
    """What happened to a rank, in one line; `when` is `first` or `then`."""
    rank, where = f"rank {story.rank}", f"in {story.where}"
    if story.fault:
        where += f" (injected {story.fault['id']})"
    if story.error:
        message = str(story.error["message"]).strip().partition("\n")[0]
        if when != "first":
            message = textwrap.shorten(message, 120)  # an echo; all of it is in that rank's log
        return f"{rank} failed {when}: {story.error['type']}: {message} ({story.where})"
    if exit is None:
        return f"{rank} stopped answering {where}"
    if exit.code < 0:
        return f"{rank} was killed by {signal_name(-exit.code)} {where}"
    if exit.code == 0:
        return f"{rank} left early: it ended with code 0 {where}, before its work was done"
    return f"{rank} failed {when}: it ended with code {exit.code} {where}"
