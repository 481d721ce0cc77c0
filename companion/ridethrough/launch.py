"""Run a rung on this machine: start its ranks, show what they do, name the first failure, leave nothing.

`run_rung` makes or continues a run and returns its report; `launch` is the part below, which starts the
ranks of any module, directly or in pods. Both work the same from a program, the command line and a notebook
cell.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ridethrough import faults as injection
from ridethrough import machine, processes, report, spawn
from ridethrough.config import JobConfig, PodConfig
from ridethrough.errors import RunError, UsageError
from ridethrough.events import Event, EventLog, read_events
from ridethrough.job.corpus import load_corpus
from ridethrough.launcher.direct import DirectRanks
from ridethrough.launcher.group import Ending, Group, Task
from ridethrough.launcher.progress import Progress
from ridethrough.launcher.torchrun import TorchrunPods
from ridethrough.restart import sandbox
from ridethrough.run import Run
from ridethrough.rungs import RUNGS


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
    pods: PodConfig | None = None,
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
        pods: run the ranks in containers, and start these again by a policy; what the run had, or directly.
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
    if existing:
        ranks, pods = ranks or existing.ranks, pods or existing.pods
    ranks = 2 if ranks is None else ranks
    due = _check(job, ranks, timeout_s, faults, pods, _unfired(existing) if existing else ())
    run = existing or _create(path, rung, ranks, job, due, pods)
    with _exclusive(run):
        return _go(Run.open(run.path), ranks, due, pods, timeout_s, console)


def _unfired(run: Run) -> tuple[str, ...]:
    """The faults of an existing run that are still to come."""
    return tuple(fault for fault in run.faults if not (run.faults_dir / fault).exists())


def _check(
    job: JobConfig,
    ranks: int,
    timeout_s: float,
    texts: Iterable[str],
    pods: PodConfig | None,
    unfired: tuple[str, ...],
) -> tuple[str, ...]:
    """Refuse what cannot be launched; returns the faults as they are kept."""
    if not timeout_s > 0:
        raise UsageError(f"timeout: {timeout_s} must be above 0 seconds")
    if ranks < 1:
        raise UsageError(f"ranks: {ranks} must be at least 1")
    job.share(ranks)
    faults = injection.check(texts, ranks=ranks, steps=job.steps)
    if pods:
        pods.share(ranks)
        coming = [*map(injection.parse, unfired), *faults]
        sandbox.check(pods.isolation, [fault.id for fault in coming if fault.kind in injection.NETWORK_KINDS])
    elif outer := [fault.id for fault in faults if fault.kind in injection.POD_KINDS]:
        raise UsageError(f"fault {outer[0]!r} happens to a pod; add --launcher torchrun")
    return tuple(fault.id for fault in faults)


def _create(
    path: Path, rung: str, ranks: int, job: JobConfig, faults: tuple[str, ...], pods: PodConfig | None
) -> Run:
    if job.data != "stdlib" and path.is_relative_to(job.data):
        raise UsageError(f"out: {path} lies in the folder of texts {job.data}, which must not change")
    corpus = load_corpus(job.data)
    corpus.samples(job.seq_len)  # refused here, not on every rank
    about = {**machine.about(sys.argv), "corpus": corpus.describe()}
    return Run.create(path, rung, ranks, job, faults, about, pods)


def _go(
    run: Run,
    ranks: int,
    faults: tuple[str, ...],
    pods: PodConfig | None,
    timeout_s: float,
    console: TextIO | None,
) -> dict[str, Any]:
    """Launch a run that this process holds, unless it has finished; returns its report."""
    earlier = read_events(run.events)
    if earlier and (finished := report.build_report(run))["finished"]:
        _say(console, f"{run.path} is finished after {finished['steps']} steps; nothing was started")
        return report.write_report(run)
    try:
        _end_orphans(earlier)
        run = _updated(run, faults, pods)
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
            pods=run.pods,
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
        shutil.rmtree(_scratch(event["id"]), ignore_errors=True)


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


def _updated(run: Run, faults: tuple[str, ...], pods: PodConfig | None) -> Run:
    """The run with the faults that it does not have yet and these pods; its ranks read it from its file."""
    both = tuple(dict.fromkeys([*run.faults, *faults]))
    changed = replace(run, faults=both, pods=pods)
    if changed != run:
        changed.write()
    return changed


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
    pods: PodConfig | None = None,
) -> None:
    """Start ranks of a module, each as `python -m MODULE ARGUMENTS`, and wait until all have ended.

    The module says what it does by events in `directory/events` and ends with an `end` event; a rank that
    leaves without one is a failure, whatever its exit code. Without pods, when the first rank fails the
    others are asked to end, then ended, with all that they have started. With pods, torchrun and the restart
    policy bring the ranks back until they have used up their restarts.

    Args:
        module: what each rank runs.
        arguments: its command line.
        ranks: how many to start.
        directory: gets `logs/rank-N.log` or `logs/pod-N.log`, and `events/`.
        generation: counts the lives of these ranks, from 0.
        threads: CPU threads a rank.
        timeout_s: longest time until all have ended, in seconds.
        grace_s: seconds between asking a rank to end (SIGTERM) and ending it (SIGKILL).
        console: where to show output and progress; None shows nothing.
        steps: steps in the whole run, for the progress.
        resume: whether this continues earlier work; only recorded.
        pods: how containers are started again; None starts each rank directly.

    Raises:
        UsageError: if pods are to have namespaces of their own and can't.
        RunError: if a rank failed for good, time ran out or this process got SIGTERM or SIGHUP. Names the
            rank that failed first, with its traceback or last output and the path of its log.
        KeyboardInterrupt: on Ctrl-C or a kernel's interrupt, when nothing runs any more.
    """
    token = uuid.uuid4().hex
    scratch = _scratch(token)
    task = Task(module, arguments, ranks, directory, generation, threads, grace_s)
    with (
        closing(EventLog(directory / "events", "launcher", generation=generation)) as log,
        closing(Progress(console, steps)) as progress,
    ):
        environment = spawn.environment(os.environ, token=token, threads=threads)
        group: Group = (
            TorchrunPods(task, log, progress, environment, pods, scratch)
            if pods
            else DirectRanks(task, log, progress, environment)
        )
        about: dict[str, Any] = {"ranks": ranks, "pid": os.getpid(), "timeout_s": timeout_s}
        log.emit("launch", **about, resume=resume, id=token, **group.about)
        ending: Ending | None = Ending("interrupted", "the launcher was interrupted")
        try:
            with processes.guard(token, scratch), _noted(signal.SIGTERM, signal.SIGHUP) as told:
                try:
                    group.start()
                    ending = group.watch(timeout_s, told)
                except Exception as error:
                    ending = Ending("failed", f"the launcher failed: {error}")
                    raise
                finally:
                    with _noted(signal.SIGINT):  # a second Ctrl-C must not leave half of it running
                        group.end(ending)
        finally:
            with _noted(signal.SIGINT):
                group.finish_output()
                log.emit("launch_end", outcome=ending.outcome if ending else "finished")
    if ending:
        raise RunError(ending.message)


def _scratch(token: str) -> Path:
    """The folder for the temporary files of a launch."""
    return Path(tempfile.gettempdir()) / f"ridethrough-{token}"


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
