"""Event files of runs that never were: written by the real `EventLog`, with times of the test's choosing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridethrough.events import EventLog, read_events
from ridethrough.ledger import Ledger

#: Times in tests are seconds after this; quarters of a second stay exact in a float of this size.
EPOCH = 1_700_000_000.0


class Logs:
    """The event files of one run, a launch at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.generation, self.first = directory, -1, 0
        self._open: dict[str, EventLog] = {}

    def launch(self, t: float, ranks: int, **about: Any) -> None:
        """A new launch: the events that follow are of its generation."""
        self.life()
        self.first = self.generation
        self.launcher(t, "launch", ranks=ranks, pid=1, timeout_s=60, resume=self.generation > 0, **about)

    def life(self) -> None:
        """A new life of the ranks, in the same launch: what ranks say is of its generation."""
        self.close()
        self.generation += 1

    def launcher(self, t: float, what: str, rank: int | None = None, **attributes: Any) -> None:
        """An event from the launcher."""
        self._log("launcher", None).emit(what, rank=rank, t=EPOCH + t, **attributes)

    def rank(self, rank: int, t: float, what: str, step: int | None = None, **attributes: Any) -> None:
        """An event from a rank."""
        self._log(f"rank-{rank}", rank).emit(what, step=step, t=EPOCH + t, **attributes)

    def phase(self, rank: int, t: float, name: str, step: int | None = None) -> None:
        """A rank enters a phase."""
        self.rank(rank, t, "phase", step, phase=name)

    def step(self, rank: int, t: float, end: float, step: int, loss: float | None = None) -> None:
        """A rank does a step from `t` to `end`."""
        self.phase(rank, t, "step", step)
        self.rank(rank, end, "step", step, loss=10.0 / step if loss is None else loss)

    def fault(self, rank: int, t: float, kind: str, step: int, source: str = "inside") -> None:
        """A fault fires."""
        self.rank(rank, t, "fault", step, kind=kind, id=f"{kind}@{step}:{rank}", source=source)

    def lost(self, detected: float, rank: int | None, aborted: float, end: float, outcome: str) -> None:
        """The launcher notices, ends the ranks and gives up."""
        self.launcher(detected, "detected", rank, cause=f"cause {outcome}")
        self.launcher(aborted, "aborted")
        self.launcher(end, "launch_end", outcome=outcome)

    def ledger(self) -> Ledger:
        """The account of it all."""
        return Ledger.of(read_events(self.directory))

    def close(self) -> None:
        """Close the files."""
        for log in self._open.values():
            log.close()
        self._open = {}

    def _log(self, name: str, rank: int | None) -> EventLog:
        if name not in self._open:
            generation = self.generation if rank is not None else self.first
            self._open[name] = EventLog(self.directory, name, rank, max(0, generation))
        return self._open[name]
