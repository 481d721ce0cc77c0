"""Ranks as this process's own children: when one is lost, all are ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from ridethrough import spawn
from ridethrough.events import EventLog
from ridethrough.launcher.group import LEAVE_S, OUTPUT_S, SETTLE_S, Ending, Task, Watcher, interrupted
from ridethrough.launcher.progress import Progress
from ridethrough.launcher.story import Exit
from ridethrough.ledger.spread import Sign, signs


class DirectRanks(Watcher):
    """The ranks of one launch; implements `Group`."""

    def __init__(self, task: Task, log: EventLog, progress: Progress, environment: Mapping[str, str]) -> None:
        super().__init__(task, log, progress)
        self._environment = environment
        self._ranks: list[spawn.Process] = []
        self._detected_at: float | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What the `launch` event says of the way in which they are started."""
        return {"launcher": "direct"}

    def start(self) -> None:
        """Start every rank."""
        task, port = self.task, spawn.free_port()
        command = spawn.python_module(task.module, task.arguments)
        for number in range(task.ranks):
            own = spawn.rank_environment(rank=number, ranks=task.ranks, port=port, generation=task.generation)
            log, header = self.logs / f"rank-{number}.log", f"generation {task.generation}"
            environment = {**self._environment, **own}
            rank = spawn.Process(number, command, environment, log, header, self.lines)
            self._ranks.append(rank)
            self.record("spawn", rank=number, pid=rank.pid)

    def watch(self, timeout_s: float, told: list[signal.Signals]) -> Ending | None:
        """Wait until all have ended well (None), or for the first reason why they will not."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.turn()
            if any(map(self.is_lost, self.stories)):
                return self._failure()
            if self._all_ended():
                return None
            if self.all_done:
                # All is done and saved. A rank that hangs on its way out must not hold up the others.
                self.turns(LEAVE_S, lambda: not self._all_ended())
                return self._failure() if any(map(self.is_lost, self.stories)) else None
            if told:
                return interrupted(told)
            if time.monotonic() > deadline:
                self._detected_at = time.time()
                return self.timeout(timeout_s, [rank.log for rank in self._ranks])

    def end(self, ending: Ending | None) -> None:
        """End what still runs, and record it all."""
        if ending:
            self.record("detected", rank=ending.rank, t=self._detected_at, cause=ending.cause)
        for rank in self._ranks:
            rank.terminate()
        self.turns(self.task.grace_s, lambda: not self._all_ended())
        for rank in self._ranks:
            rank.kill()
        self.turn()
        if ending:
            self.record("aborted")

    def finish_output(self) -> None:
        """Take in the last of the output, once nothing is left that could write more."""
        self.turns(OUTPUT_S, lambda: not self.lines.empty() or any(rank.talking for rank in self._ranks))

    def show_line(self, number: int, line: str) -> None:
        """With the rank in front."""
        self.progress.line(f"[rank {number}] {line}")

    def note_ends(self) -> None:
        """Ask each process."""
        for rank in self._ranks:
            if rank.number not in self.exits and (code := rank.poll()) is not None:
                assert rank.ended_at is not None
                self.exits[rank.number] = Exit(code, rank.ended_at)
                self.record("exit", rank=rank.number, t=rank.ended_at, code=code)

    def _all_ended(self) -> bool:
        return len(self.exits) == len(self._ranks)

    def _failure(self) -> Ending:
        """The first cause, once the other ranks have had a moment to say what they saw."""
        self._detected_at = time.time()
        self.turns(SETTLE_S, lambda: not self._all_ended())
        first, *others = signs(self.heard, self.task.ranks)
        assert first.rank is not None
        rank, error = self._ranks[first.rank], self.stories[first.rank].error
        last = error["traceback"].splitlines() if error else list(rank.tail)
        details = [f"  {line}" for line in last[-20:]]
        details += [self._effect(number, others) for number in range(self.task.ranks) if number != first.rank]
        return Ending("failed", first.text, first.rank, "\n".join([*details, f"log: {rank.log}"]))

    def _effect(self, number: int, others: list[Sign]) -> str:
        """What became of a rank because of another."""
        for sign in others:
            if sign.rank == number:
                return sign.text
        exited = number in self.exits
        return f"rank {number} had ended" if exited else f"rank {number} was {self.stories[number].silence}"
