"""Run a rung on this machine: start its ranks, show what they do, name the first failure, leave nothing.

`run_rung` makes or continues a run and returns its report; `launch` is the part below, which starts the
ranks of any module. Both work the same from a program, the command line and a notebook cell.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty
from typing import Any, TextIO

from ridethrough import faults as injection
from ridethrough import machine, processes, report, spawn
from ridethrough.config import JobConfig
from ridethrough.errors import RunError, UsageError
from ridethrough.events import Event, EventLog, read_events
from ridethrough.job.corpus import load_corpus
from ridethrough.progress import Progress
from ridethrough.run import Run
from ridethrough.rungs import RUNGS
from ridethrough.story import Exit, Follower, Story, failed, first_to_fail, sentence

#: Seconds after the first failure in which other ranks' errors are awaited, to tell cause from effect.
SETTLE_S = 0.5

#: Seconds that a rank whose job raised may take to end by itself.
LEAVE_S = 10.0

#: Seconds that output may take to arrive once all ranks are gone.
OUTPUT_S = 2.0

_TURN_S = 0.05


def run_rung(
    rung: str,
    *,
    out: Path | str,
    ranks: int | None = None,
    resume: bool = False,
    faults: Iterable[str] = (),
    timeout_s: float = 3600.0,
    quiet: bool = False,
    console: TextIO | None = None,
    config: JobConfig | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run a rung to its end on this machine, or continue a run that was lost.

    Args:
        rung: a name from `ridethrough.rungs.RUNGS`, such as `sync`.
        out: the run's directory, new or (with `resume`) existing.
        ranks: ranks to start; 2, or what the run had. A resumed run may have more or fewer.
        resume: continue the run in `out`; one that does not exist yet starts, one that is finished stays
            as it is and only its report is returned.
        faults: faults to inject, as `kind@step:rank`; on a resume they are added to the earlier ones.
        timeout_s: longest time this launch may take, in seconds.
        quiet: show neither output nor progress; both are in the run's `logs` and `events` all the same.
        console: where to show them; standard output by default.
        config: what the job computes.
        **settings: single settings of `JobConfig`, which go before those of `config`.

    Returns:
        The run's report, as it is in its `report.json`.

    Raises:
        UsageError: if what is asked for cannot be run; nothing has been started.
        RunError: if a rank failed, time ran out or the launcher was told to stop. The report is written.
    """
    console = None if quiet else (console or sys.stdout)
    faults = [faults] if isinstance(faults, str) else list(faults)
    settings = {**(config.to_dict() if config else {}), **settings}
    if settings.get("data", "stdlib") != "stdlib":
        settings["data"] = str(Path(settings["data"]).expanduser().absolute())  # a resume may start elsewhere
    if rung not in RUNGS:
        raise UsageError(f"there is no rung {rung!r}; one of {', '.join(RUNGS)}")
    if not str(out):
        raise UsageError("out: the name of the run's folder is empty")
    path = Path(out).absolute()
    existing = Run.open(path) if resume and (path / "run.json").exists() else None
    if existing:
        _same(existing, rung, settings)
    job = existing.config if existing else JobConfig.from_dict(settings, "settings")
    if ranks is None:
        ranks = existing.ranks if existing else 2
    due = _check(job, ranks, timeout_s, faults)
    run = existing or _create(path, rung, ranks, job, due)
    with _exclusive(run):
        return _go(Run.open(run.path), ranks, due, timeout_s, console)


def _check(job: JobConfig, ranks: int, timeout_s: float, faults: Iterable[str]) -> tuple[str, ...]:
    """Refuse what cannot be launched; returns the faults as they are kept."""
    if not timeout_s > 0:
        raise UsageError(f"timeout: {timeout_s} must be above 0 seconds")
    if ranks < 1:
        raise UsageError(f"ranks: {ranks} must be at least 1")
    job.share(ranks)
    return tuple(fault.id for fault in injection.check(faults, ranks=ranks, steps=job.steps))


def _create(path: Path, rung: str, ranks: int, job: JobConfig, faults: tuple[str, ...]) -> Run:
    if job.data != "stdlib" and path.is_relative_to(job.data):
        raise UsageError(f"out: {path} lies in the folder of texts {job.data}, which must not change")
    corpus = load_corpus(job.data)
    corpus.samples(job.seq_len)  # refused here, not on every rank
    about = {**machine.about(sys.argv), "corpus": corpus.describe()}
    return Run.create(path, rung, ranks, job, faults, about)


def _go(
    run: Run, ranks: int, faults: tuple[str, ...], timeout_s: float, console: TextIO | None
) -> dict[str, Any]:
    """Launch a run that this process holds, unless it has finished; returns its report."""
    earlier = read_events(run.events)
    if earlier and (finished := report.build_report(run))["finished"]:
        _say(console, f"{run.path} is finished after {finished['steps']} steps; nothing was started")
        return report.write_report(run)
    try:
        _end_orphans(earlier)
        _add_faults(run, faults)
        launch(
            RUNGS[run.rung],
            (str(run.path),),
            ranks=ranks,
            directory=run.path,
            generation=1 + max((event.generation for event in earlier), default=-1),
            threads=run.config.threads,
            timeout_s=timeout_s,
            console=console,
            steps=run.config.steps,
            resume=bool(earlier),
        )
    except BaseException:
        with suppress(OSError):  # on a full disk: what came first is the news
            report.write_report(run)
        raise
    return report.write_report(run)


def _end_orphans(earlier: list[Event]) -> None:
    """End what an earlier launch has left: this launcher holds the run, so nobody else looks after it.

    Unless its launcher lives. Then this run is a copy, and the events speak of processes of the original.
    """
    for event in earlier:
        if event.what != "launch" or processes.led(event["id"], event["pid"]):
            continue
        if left := processes.sweep(event["id"]):
            raise RunError(f"processes {left} of an earlier launch do not end, not even by SIGKILL")


def _same(run: Run, rung: str, settings: dict[str, Any]) -> None:
    """Refuse to continue a run as something else than it was."""
    if rung != run.rung:
        raise UsageError(f"{run.path} is a run of rung {run.rung!r}; it cannot go on as {rung!r}")
    asked = JobConfig.from_dict({**run.config.to_dict(), **settings}, "settings").to_dict()
    changed = [
        f"{name} is {was!r} there and {asked[name]!r} here"
        for name, was in run.config.to_dict().items()
        if asked[name] != was
    ]
    if changed:
        raise UsageError(f"{run.path} cannot go on with other settings: {'; '.join(changed)}")


def _add_faults(run: Run, faults: tuple[str, ...]) -> None:
    """Add to the faults of a run those that it does not have yet; its ranks read them from its file."""
    both = tuple(dict.fromkeys([*run.faults, *faults]))
    if both != run.faults:
        replace(run, faults=both).write()


@contextmanager
def _exclusive(run: Run) -> Iterator[None]:
    """Hold the run for this launcher alone; the kernel lets go of it however this process ends.

    Raises:
        UsageError: if another launcher holds it or has made it anew, or the file system cannot tell.
    """
    path = run.path / "launcher.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{run.path} is being run by {_holder(path)}; wait for it or end it") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be locked ({error.strerror}); put --out elsewhere") from None
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n")
        file.flush()
        if Run.open(run.path).id != run.id:
            raise UsageError(f"{run.path} was made twice at the same moment; choose another --out")
        yield


def _holder(lock: Path) -> str:
    pid, _, host = lock.read_text().strip().partition(" ")
    return f"process {pid} on {host}" if host else "another launcher"


def launch(
    module: str,
    arguments: tuple[str, ...] = (),
    *,
    ranks: int,
    directory: Path,
    generation: int = 0,
    threads: int = 1,
    timeout_s: float = 3600.0,
    grace_s: float = 2.0,
    console: TextIO | None = None,
    steps: int | None = None,
    resume: bool = False,
) -> None:
    """Start ranks of a module, each as `python -m MODULE ARGUMENTS`, and wait until all have ended.

    The module says what it does by events in `directory/events` and ends with an `end` event; a rank that
    leaves without one is a failure, whatever its exit code. When the first rank fails the others are
    asked to end, then ended, with all that they have started.

    Args:
        module: what each rank runs.
        arguments: its command line.
        ranks: how many to start.
        directory: gets `logs/rank-N.log` and `events/`.
        generation: counts the lives of these ranks, from 0.
        threads: CPU threads a rank.
        timeout_s: longest time until all have ended, in seconds.
        grace_s: seconds between asking a rank to end (SIGTERM) and ending it (SIGKILL).
        console: where to show output and progress; None shows nothing.
        steps: steps in the whole run, for the progress.
        resume: whether this continues earlier work; only recorded.

    Raises:
        RunError: if a rank failed, time ran out or this process got SIGTERM or SIGHUP. Names the rank
            that failed first, with its traceback or last output and the path of its log.
        KeyboardInterrupt: on Ctrl-C or a kernel's interrupt, when nothing runs any more.
    """
    token = uuid.uuid4().hex
    with (
        closing(EventLog(directory / "events", "launcher", generation=generation)) as log,
        closing(Progress(console, steps)) as progress,
    ):
        log.emit("launch", ranks=ranks, pid=os.getpid(), timeout_s=timeout_s, resume=resume, id=token)
        group = _Group(directory, ranks, generation, log, progress)
        loss: _Loss | None = _Loss("interrupted", "the launcher was interrupted")
        try:
            with processes.guard(token), _noted(signal.SIGTERM, signal.SIGHUP) as told:
                try:
                    group.start(spawn.python_module(module, arguments), threads, token)
                    loss = group.watch(timeout_s, told)
                finally:
                    with _noted(signal.SIGINT):  # a second Ctrl-C must not leave half of it running
                        group.end(loss, grace_s)
        finally:
            with _noted(signal.SIGINT):
                group.finish_output()
                log.emit("launch_end", outcome=loss.outcome if loss else "finished")
    if loss:
        raise RunError(loss.message)


@dataclass(frozen=True)
class _Loss:
    """Why a generation is lost: in one line, by which rank, and what a reader needs besides."""

    outcome: str
    cause: str
    rank: int | None = None
    details: str = ""

    @property
    def message(self) -> str:
        return f"{self.cause}\n{self.details}".rstrip()


class _Group:
    """The ranks of one launch, and what is known of them."""

    def __init__(
        self, directory: Path, ranks: int, generation: int, log: EventLog, progress: Progress
    ) -> None:
        self._directory, self._generation = directory, generation
        self._log, self._progress = log, progress
        self._lines = spawn.output_queue()
        self._follower = Follower(directory / "events", generation)
        self._stories = [Story(rank) for rank in range(ranks)]
        self._ranks: list[spawn.Rank] = []
        self._exits: dict[int, Exit] = {}
        self._detected_at: float | None = None

    def start(self, command: list[str], threads: int, token: str) -> None:
        """Start every rank."""
        logs = self._directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        port = spawn.free_port()
        for number in range(len(self._stories)):
            environment = spawn.environment(
                os.environ,
                rank=number,
                ranks=len(self._stories),
                port=port,
                generation=self._generation,
                token=token,
                threads=threads,
            )
            rank = spawn.Rank(number, command, environment, logs / f"rank-{number}.log", self._lines)
            self._ranks.append(rank)
            self._log.emit("spawn", rank=number, pid=rank.pid)

    def watch(self, timeout_s: float, told: list[signal.Signals]) -> _Loss | None:
        """Wait until all have ended well (None), or for the first reason why they will not."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._turn()
            if self._lost():
                return self._failure()
            if len(self._exits) == len(self._ranks):
                return None
            if all(story.ended for story in self._stories):
                # All is done and saved. A rank that hangs on its way out must not hold up the others.
                self._turns(LEAVE_S, lambda: len(self._exits) < len(self._ranks))
                return self._failure() if self._lost() else None
            if told:
                return _Loss("interrupted", f"interrupted: the launcher got {told[0].name}")
            if time.monotonic() > deadline:
                return self._timeout(timeout_s)

    def end(self, loss: _Loss | None, grace_s: float) -> None:
        """End what still runs, and record it all."""
        if loss:
            self._log.emit("detected", rank=loss.rank, t=self._detected_at, cause=loss.cause)
        for rank in self._ranks:
            rank.terminate()
        self._turns(grace_s, lambda: len(self._exits) < len(self._ranks))
        for rank in self._ranks:
            rank.kill()
        self._turn()
        if loss:
            self._log.emit("aborted")

    def finish_output(self) -> None:
        """Take in the last of the output, once nothing is left that could write more."""
        self._turns(OUTPUT_S, lambda: not self._lines.empty() or any(rank.talking for rank in self._ranks))

    def _turns(self, within_s: float, more: Callable[[], bool]) -> None:
        deadline = time.monotonic() + within_s
        while more() and time.monotonic() < deadline:
            self._turn()
        self._turn()

    def _turn(self) -> None:
        """Show what was printed, note who ended, hear what was said; in this order, so that a rank's
        last words are known once it has ended."""
        self._show()
        for rank in self._ranks:
            if rank.number not in self._exits and (code := rank.poll()) is not None:
                assert rank.ended_at is not None
                self._exits[rank.number] = Exit(code, rank.ended_at)
                self._log.emit("exit", rank=rank.number, t=rank.ended_at, code=code)
        for event in self._follower.new():
            if event.rank is not None and event.rank < len(self._stories):
                self._stories[event.rank].tell(event)
            if event.rank == 0 and event.what in ("step", "restored") and event.step is not None:
                self._progress.at(event.step, event.attributes.get("loss"))

    def _show(self) -> None:
        wait: float = _TURN_S
        with suppress(Empty):
            for _ in range(1000):  # then the processes have their turn, however much is printed
                number, line = self._lines.get(timeout=wait)
                self._progress.line(f"[rank {number}] {line}")
                wait = 0

    def _lost(self) -> bool:
        """Whether a rank is lost; one whose job raised may first leave by itself."""
        now = time.time()
        return any(
            failed(story, self._exits.get(story.rank)) or (story.error and now - story.error.t > LEAVE_S)
            for story in self._stories
        )

    def _failure(self) -> _Loss:
        """The first cause, once the other ranks have had a moment to say what they saw."""
        self._detected_at = time.time()
        self._turns(SETTLE_S, lambda: len(self._exits) < len(self._ranks))
        first = first_to_fail(self._stories, self._exits)
        assert first is not None
        rank = self._ranks[first.rank]
        last = first.error["traceback"].splitlines() if first.error else list(rank.tail)
        details = [f"  {line}" for line in last[-20:]]
        details += [self._effect(story) for story in self._stories if story is not first]
        return _Loss(
            "failed",
            sentence(first, self._exits.get(first.rank)),
            first.rank,
            "\n".join([*details, f"log: {rank.log}"]),
        )

    def _effect(self, story: Story) -> str:
        exit = self._exits.get(story.rank)
        if story.error or failed(story, exit):
            return sentence(story, exit, "then")
        return f"rank {story.rank} was {story.silence}" if exit is None else f"rank {story.rank} had ended"

    def _timeout(self, timeout_s: float) -> _Loss:
        self._detected_at = time.time()
        states = [
            f"rank {story.rank} "
            + ("had ended" if story.rank in self._exits else f"was {story.silence}")
            + (f" (injected {story.fault['id']})" if story.fault else "")
            for story in self._stories
        ]
        details = "\n".join(f"log: {rank.log}" for rank in self._ranks)
        return _Loss("timeout", f"no end within {timeout_s:g} s: {'; '.join(states)}", details=details)


@contextmanager
def _noted(*numbers: signal.Signals) -> Iterator[list[signal.Signals]]:
    """Note these signals instead of obeying them; outside the main thread Python delivers none."""
    seen: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {
        number: signal.signal(number, lambda got, frame: seen.append(signal.Signals(got)))
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup stays nohup
    }
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _say(console: TextIO | None, text: str) -> None:
    if console:
        print(text, file=console)
