"""Append-only structured events: what every process of a run did, and when.

Each process writes its own file of whole JSON lines; nothing is rewritten, so a process may die at any
instant and what it had written stays (a rank under torchrun writes once the ranks have met and counted their
life). A rank says which *phase* it enters; as it is always in exactly one,
the phases partition its time and the ledger cannot count a second twice.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ridethrough.errors import UsageError

#: What a rank says it is doing (`phase` events). `step` becomes `useful` or `recompute` in the ledger.
PHASES = ("startup", "rendezvous", "build", "restore", "step", "checkpoint_stall", "shutdown", "idle")


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        t: wall-clock time, seconds since the epoch.
        what: `phase`, `step`, `save`, `commit`, `save_failed`, `restored`, `fault`, `error`, `end`, … from
            a rank; `launch`, `spawn`, `exit`, `launch_end`, … from the launcher.
        rank: the rank it is about, or None.
        generation: one life of the ranks between two restarts, counted from 0 over the whole run.
        step: the step it belongs to (1 is the first), or None.
        attributes: everything else.
    """

    t: float
    what: str
    rank: int | None = None
    generation: int = 0
    step: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """An attribute by name."""
        return self.attributes[name]


class EventLog:
    """The file one process appends to.

    A line is one `write` on a descriptor opened for appending: another process that reads the file
    sees whole lines, and a SIGKILL between two events loses neither.

    Args:
        directory: where; made if it isn't there.
        name: the process, such as `rank-0`.
        rank: the rank it is, if it is one.
        generation: the life of the ranks that it belongs to; None if that is still to be agreed on: events
            are held back until `begin` says it.
    """

    def __init__(
        self, directory: Path, name: str, rank: int | None = None, generation: int | None = 0
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.name, self.rank = directory, name, rank
        self.generation: int | None = None
        self._held: list[Event] = []
        self._fd: int | None = None
        self._latest = 0.0
        # A checkpoint may be committed by another thread; a signal handler may emit amid an event of its own.
        self._lock = threading.RLock()
        if generation is not None:
            self.begin(generation)

    def next_generation(self) -> int:
        """The first that no rank has begun here, and that is not before the newest launch."""
        found = (
            re.match(r"(launcher|rank-).*-g(\d+)-\d+\.jsonl$", path.name) for path in self.directory.iterdir()
        )
        return max((int(match[2]) + (match[1] == "rank-") for match in found if match), default=0)

    def begin(self, generation: int) -> None:
        """Write what was held back, and all that follows, as of this generation; the first call holds."""
        if self.generation is not None:
            return
        self.generation = generation
        self.path = self.directory / f"{self.name}-g{generation}-{os.getpid()}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for event in self._held:
            self._write(replace(event, generation=generation))
        self._held.clear()

    def emit(
        self,
        what: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        t: float | None = None,
        **attributes: Any,
    ) -> Event:
        """Append one event, now or at `t`; after `close` it is dropped, as a late signal handler may call.

        Raises:
            OSError: if the line cannot be written whole (a full disk); names the file.
        """
        event = Event(
            self._now() if t is None else t,
            what,
            self.rank if rank is None else rank,
            self.generation or 0,
            step,
            attributes,
        )
        if self.generation is None:
            self._held.append(event)
        else:
            self._write(event)
        return event

    def phase(self, name: str, step: int | None = None) -> None:
        """Say that this rank is in phase `name` from now on."""
        if name not in PHASES:
            raise ValueError(f"{name!r} is not a phase; one of {', '.join(PHASES)}")
        self.emit("phase", step=step, phase=name)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _now(self) -> float:
        """The wall clock, except that it never goes back: what a process says later happened later."""
        self._latest = max(self._latest, time.time())
        return self._latest

    def _write(self, event: Event) -> None:
        if self._fd is not None:
            head = {name: getattr(event, name) for name in _HEAD}
            line = (json.dumps({**head, **event.attributes}) + "\n").encode()
            with self._lock:
                self._append(self._fd, line)

    def _append(self, fd: int, line: bytes) -> None:
        size = os.fstat(fd).st_size
        try:
            while line:
                line = line[os.write(fd, line) :]
        except OSError as error:
            os.ftruncate(fd, size)  # a full disk takes part of a line: the next one must not be glued to it
            error.filename = str(self.path)
            raise


#: What stands at the head of every line, and of which type; all else is an attribute.
_HEAD: dict[str, tuple[type, ...]] = {
    "t": (int, float),
    "what": (str,),
    "rank": (int, type(None)),
    "generation": (int,),
    "step": (int, type(None)),
}


def parse(line: str | bytes) -> Event:
    """One event from its line.

    Raises:
        ValueError: if the line is no JSON object, or its head lacks a field or has one of a wrong type.
    """
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    for name, types in _HEAD.items():
        if name not in values:
            raise ValueError(f"{name!r} is missing")
        if not isinstance(values[name], types) or isinstance(values[name], bool):
            raise ValueError(f"{name!r} is {values[name]!r}")
    if values["generation"] < 0:
        raise ValueError(f"'generation' is {values['generation']}")
    if not math.isfinite(values["t"]):
        raise ValueError(f"'t' is {values['t']!r}")
    head = {name: values.pop(name) for name in _HEAD}
    return Event(**head, attributes=values)


def read_events(directory: Path) -> list[Event]:
    """All events of a run, oldest first; none if the directory isn't there yet.

    A last line without its newline is what a machine crash leaves; it is passed over.

    Raises:
        UsageError: for any other line that is not an event, naming file and line.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.name.endswith(".jsonl"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{directory} cannot be read: {error.strerror}") from None
    events = [event for name in names for event in _read_file(directory / name)]
    return sorted(events, key=lambda event: event.t)


def _read_file(path: Path) -> Iterator[Event]:
    *lines, _unfinished = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            yield parse(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is not an event: {error}") from error
