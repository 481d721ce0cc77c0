"""What each rank of a running launch has said so far."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ridethrough.errors import RunError
from ridethrough.events import Event, parse


class Follower:
    """Reads the events of a generation, and of all after it, while they are being written."""

    def __init__(self, directory: Path, generation: int) -> None:
        self._directory, self._first = directory, generation
        self._read: dict[Path, int] = {}

    def new(self) -> list[Event]:
        """What ranks and fault injectors wrote since the last call, in the order of time.

        Raises:
            RunError: for a line that is not an event, naming its file.
        """
        events = [event for path in self._files() for event in self._more(path)]
        return sorted(events, key=lambda event: event.t)

    def _files(self) -> Iterator[Path]:
        for path in self._directory.glob("*.jsonl"):
            match = re.search(r"-g(\d+)-\d+\.jsonl$", path.name)
            if match and int(match[1]) >= self._first and not path.name.startswith("launcher"):
                yield path

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
    """What one rank was last known to do, from its events.

    Attributes:
        rank: which.
        generation: the newest of its lives; the rest is of that life.
        phase: what it is doing.
        step: the last step it has spoken of.
        heard: when it last spoke, seconds since the epoch.
        fault: the first fault injected into it, until it finishes a step.
        error: the first error it has raised, likewise.
        ended: whether its work is done.
    """

    rank: int
    generation: int = 0
    phase: str = "startup"
    step: int | None = None
    heard: float = field(default_factory=time.time)
    fault: Event | None = None
    error: Event | None = None
    ended: bool = False

    def tell(self, event: Event) -> None:
        """Take in one event; a step that finishes shows that an earlier fault or error was survived."""
        if event.generation > self.generation:
            self.generation, self.phase, self.step = event.generation, "startup", None
            self.fault, self.error, self.ended = None, None, False
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
    """How a rank's process ended (None: nobody knows), and when that was noticed."""

    code: int | None
    t: float


def failed(story: Story, exit: Exit | None) -> bool:
    """Whether a rank is lost: it ended in any other way than with code 0 after its `end`."""
    return exit is not None and (exit.code != 0 or not story.ended)
