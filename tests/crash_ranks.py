"""Ranks of a small job that wait for commands, so that a test can strike them at any point of one.

They are forked from a server that has imported torch once (`multiprocessing`'s forkserver): a pair of ranks
with a job is there in under a second instead of five.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from ridethrough.run import Run

REPLY_S = 60
PRELOAD = [
    "torch._dynamo",
    "ridethrough.checkpoint.async_nvrx",
    "ridethrough.job.loop",
    "torch.utils.serialization.config",
]
_PR_SET_PTRACER, _ANY = 0x59616D61, -1


@dataclass(frozen=True)
class Reply:
    """What became of a command on one rank.

    Attributes:
        value: what the call returned.
        error: the exception's text, or None.
        kind: the exception's type; `died` if the rank did not live to reply.
        warnings: what was logged meanwhile.
    """

    value: Any = None
    error: str | None = None
    kind: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def died(self) -> bool:
        return self.kind == "died"


class Ranks:
    """Two ranks of `run`, each with a job built and waiting: `restore`, `step`, `save` or `sha256`."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> Ranks:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory()
        self._processes, self._connections = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self.run.path, rank, f"{self._folder.name}/store"), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self.pids = [process.pid or 0 for process in self._processes]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None) -> None:
        """End both; a rank that does not end by itself is killed, and that is a failure of the test."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + REPLY_S / 4
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
        for rank in stuck:
            self._processes[rank].kill()
            self._processes[rank].join()
        self._folder.cleanup()
        assert kind is not None or not stuck, f"ranks {stuck} did not end after their last command"

    def call(self, command: str) -> list[Reply]:
        """Give both ranks a command and await what becomes of it on each."""
        for connection in self._connections:
            with suppress(BrokenPipeError):  # it has ended: that is its reply
                connection.send(command)
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + REPLY_S
        while waiting := {c: rank for rank, c in enumerate(self._connections) if rank not in replies}:
            ready = wait(list(waiting), deadline - time.monotonic())
            assert ready, f"ranks {list(waiting.values())} did not answer {command!r} within {REPLY_S} s"
            for connection in ready:
                replies[waiting[connection]] = _receive(connection)  # type: ignore[index,arg-type]
        return [replies[0], replies[1]]

    def must(self, *commands: str) -> Any:
        """Give commands that have to succeed on both ranks; returns rank 0's last value."""
        for command in commands:
            replies = self.call(command)
            assert all(reply.error is None for reply in replies), f"{command!r} failed: {replies}"
        return replies[0].value


def stop_server() -> None:
    """End the server that ranks are forked from; the next rank would start another."""
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _receive(connection: Connection) -> Reply:
    try:
        return connection.recv()  # type: ignore[no-any-return]
    except (EOFError, ConnectionError):
        return Reply(error="died", kind="died")


def _serve(connection: Connection, run: Path, rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    from tests.jobs import make_job

    # Where only an ancestor may trace (Yama): strace is no ancestor of a forked rank.
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANY), 0, 0, 0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    logged = _Logged()
    timeout = timedelta(seconds=REPLY_S / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    job, checkpointer = make_job(Run.open(run))
    commands: dict[str, Callable[[], Any]] = {
        "restore": lambda: checkpointer.restore(job.state).step,
        "step": job.step,
        "save": lambda: job.save(checkpointer),
        "sha256": lambda: job.state.hashes()[1],
    }
    while connection.poll(None):  # strace restarts the call it finds: let that be none of the counted ones
        try:
            command = connection.recv()
        except EOFError:
            return
        reply = _reply(commands[command], logged)
        connection.send(reply)
        if reply.kind not in ("", "CheckpointError"):
            return  # as a rank does: the others hear of it by its end


def _reply(call: Callable[[], Any], logged: _Logged) -> Reply:
    logged.messages.clear()
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return Reply(error=str(error), kind=type(error).__name__, warnings=tuple(logged.messages))
    return Reply(value, warnings=tuple(logged.messages))


class _Logged(logging.Handler):
    """Keeps the package's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("ridethrough").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
