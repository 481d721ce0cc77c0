"""The only seam to NVRx: its versions, its differences between CPU and GPU, and its unbounded waits.

What runs is NVRx's own: its queue of asynchronous calls, its requests, its persistent worker's loop, its
planning and its write function. What is overridden here is why:

- **CPU.** NVRx (0.4.1 to 0.6.0) asks for CUDA in the worker and when ranks compare how far they are. Neither
  is needed when the bytes to write are staged in host memory: the worker here never touches a GPU.
- **Bounds.** NVRx joins queues without a limit; if the worker dies, the training waits for ever. Here every
  wait has a deadline, and a dead worker is an outcome that says so.
- **Nothing left.** NVRx's queues keep semaphores in /dev/shm, which a SIGKILL leaves there, and its worker
  outlives a rank that is killed. Here one socket replaces the queues, and the worker dies with its rank.

On a GPU nothing of this has been run yet.
"""

from __future__ import annotations

import inspect
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import save_state_dict_async_plan
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

#: Niceness of the worker: a third of the share of a training thread that wants the same core. At 10 it is a
#: tenth, and a checkpoint takes several times as long to become durable where every core trains.
NICENESS = 5
#: Seconds that a worker is given to end when asked, and again after SIGKILL.
END_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """What became of a request: what its function returned, or why it failed."""

    value: Any = None
    error: str | None = None


class Worker(core.PersistentAsyncCaller):  # type: ignore[misc]
    """NVRx's persistent worker: one process beside a rank that writes while the rank trains.

    The process starts when this is made, in a few milliseconds, and imports torch while the caller goes on:
    make it while the job builds, and the first save waits for nothing.

    Args:
        rank: the rank it works for, for messages.
        timeout_s: longest time a request may take.
        imports: modules that the worker imports before its first request.
        fds: descriptors that it inherits, under the same numbers.

    Attributes:
        process: the worker process.
        outcome: of the newest request; None until it is done.
    """

    def __init__(self, rank: int, timeout_s: float, imports: Sequence[str], fds: Sequence[int] = ()) -> None:
        # NVRx's own __init__ is not called: it makes the queues that this class replaces.
        self.rank, self.timeout_s = rank, timeout_s
        self.start_time: float | None = None
        self.cur_item, self.cur_idx = None, -1
        self.outcome: Outcome | None = None
        self._deadline, self._expected = 0.0, -1
        ours, theirs = _socket_pair(timeout_s)
        with theirs:
            self._connection = Connection(ours.detach())
            self.process = _start(theirs, rank, imports, fds)
        self.queue = _Requests(self._connection)

    @property
    def alive(self) -> bool:
        """Whether the process lives and can be given a request."""
        return not self._connection.closed and self.process.poll() is None

    def schedule_async_call(self, async_req: core.AsyncRequest) -> None:
        """Hand over a request; a worker that does not take it is an outcome, not an exception."""
        self.outcome, self._expected = None, async_req.call_idx
        self._deadline = time.monotonic() + self.timeout_s
        try:
            super().schedule_async_call(async_req)
        except OSError as error:
            self._give_up(f"took no request ({error})")

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the newest request has an outcome on this rank.

        Blocking, it waits no longer than `timeout_s` from the request on, after which the worker is killed
        and that is the outcome. The ranks compare theirs in what they finalize with.
        """
        while self.outcome is None:
            left = self._deadline - time.monotonic()
            if self._receive(min(left, 1.0) if blocking else 0.0):
                continue
            if self.process.poll() is not None and not self._receive(0.0):  # it may have replied, then died
                self._give_up("died")
            elif left <= 0:
                self._give_up(f"did not finish within {self.timeout_s:g} s")
            elif not blocking:
                return False
        return True

    def close(self, abort: bool = False) -> None:
        """End the process: on request, or by SIGKILL if it doesn't or `abort`; closing twice is fine.

        Returns after 2 `END_S` at most, with nothing of the worker left.
        """
        process = getattr(self, "process", None)
        if process is None or self._connection.closed:
            return
        if not abort and process.poll() is None:
            with suppress(OSError):
                self.queue.put("DONE")
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel: the kill takes effect later
            process.wait(END_S)
        self._connection.close()  # last: a thread that still waits for a reply has heard the worker end

    def _receive(self, within_s: float) -> bool:
        """Take one message if there is one; one of another request is dropped."""
        try:
            if not self._connection.poll(max(0.0, within_s)):
                return False
            call_idx, outcome = self._connection.recv()
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
            self._give_up("died")
            return True
        if call_idx == self._expected:
            self.outcome = outcome
        return True

    def _give_up(self, what: str) -> None:
        """Kill what is left of the worker: it must not go on writing when the save is taken for failed."""
        process = self.process
        code = process.poll()
        self.close(abort=True)
        how = "" if code is None else f" ({_exit(code)})"
        self.outcome = Outcome(error=f"the checkpoint worker (pid {process.pid}) {what}{how}")


class Queue(core.AsyncCallsQueue):  # type: ignore[misc]
    """NVRx's queue of asynchronous calls, with a `Worker` that is there from the beginning.

    Call `maybe_finalize_async_calls` with `no_dist=True`: NVRx's own comparison of ranks needs CUDA.

    Args:
        make_worker: makes the worker, now and whenever the last one is gone.
    """

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        super().__init__(persistent=True)
        self._make_worker = make_worker
        self.persistent_caller: Worker = make_worker()

    @property
    def worker(self) -> Worker:
        """The worker there is now."""
        return self.persistent_caller

    def renew(self) -> None:
        """See that there is a worker; call it on the main thread, with whose end the worker ends."""
        if not self.worker.alive:
            self.worker.close(abort=True)
            self.persistent_caller = self._make_worker()

    def _get_async_caller(self) -> Worker:
        return self.persistent_caller

    def close(self, abort: bool = False) -> None:
        """End the worker; a request still in the queue is forgotten."""
        abort = abort or bool(self.async_calls)
        self.async_calls.clear()
        if worker := getattr(self, "persistent_caller", None):
            worker.close(abort)


def request(
    function: Callable[..., Any], arguments: tuple[Any, ...], finalize: Callable[[], None]
) -> core.AsyncRequest:
    """A request to call `function` in the worker; its result, or its exception, is the worker's `outcome`."""
    return core.AsyncRequest(_perform, (function, arguments), [finalize], async_fn_kwargs={})


def plan(
    state: dict[str, Tensor], folder: Path, group: dist.ProcessGroup
) -> tuple[list[WriteItem], str, Metadata | None]:
    """Agree on who writes what of `state`; all ranks of `group` together.

    Returns:
        What this rank writes, the prefix of its files' names, and on rank 0 the metadata of all.

    Raises:
        CheckpointException: on every rank, if any rank failed.
    """
    writer = _Planner(folder, sync_files=False, thread_count=1)
    _, metadata, _ = save_state_dict_async_plan(state, writer, group, 0, DefaultSavePlanner())
    assert writer.plan is not None
    return writer.plan.items, writer.plan.storage_data.prefix, metadata


def write(
    file: Path, data: list[tuple[WriteItem, Tensor]], open_file: Callable[[str, str], Any]
) -> list[WriteResult]:
    """Write tensors in host memory into one file, by NVRx's write function; returns where each went.

    Args:
        file: the file.
        data: the tensors; none may share its storage with other data.
        open_file: opens a file for writing, as a context; it must make the file durable when it closes it.

    Raises:
        OSError: of the file system.
    """
    results: queue.Queue[Any] = queue.Queue()
    running: queue.Queue[int] = queue.Queue()
    running.put(0)  # 0.4.1 takes one out when it is done
    function = filesystem_async.FileSystemWriterAsync.write_preloaded_data
    arguments: list[Any] = [[filesystem_async._StorageWriterTransforms()]]
    if "open_file" in inspect.signature(function).parameters:
        arguments.append(open_file)
    else:  # 0.4.1 knows no other `open` than the one it finds by that name
        filesystem_async.open = open_file
    function(*arguments, 0, (str(file), file.name, ([], data)), results, running, use_fsync=False)
    (_, outcome) = results.get_nowait()
    if isinstance(outcome, BaseException):
        raise outcome
    return list(outcome)


def finish(folder: Path, metadata: Metadata, results: list[list[WriteResult]], file_system: Any) -> None:
    """Write the `.metadata` of a folder through `file_system`, a DCP file system; rank 0 alone.

    Raises:
        OSError: of the file system.
    """
    writer = filesystem_async.FileSystemWriterAsync(folder, sync_files=False, thread_count=1)
    writer.fs = file_system
    writer.finish(metadata, results)


class _Planner(filesystem_async.FileSystemWriterAsync):  # type: ignore[misc]
    """Keeps the plan; the data is staged elsewhere."""

    plan: SavePlan | None = None

    def prepare_write_data(self, plan: SavePlan, planner: DefaultSavePlanner) -> None:
        self.plan = plan


class _Requests:
    """The trainer's end of what NVRx takes for its queue of requests."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, item: Any) -> None:
        self._connection.send(item)


def _socket_pair(timeout_s: float) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; on the first, no call waits longer than `timeout_s` for a stopped worker."""
    ours, theirs = socket.socketpair()
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, limit)
    return ours, theirs


def _start(
    theirs: socket.socket, rank: int, imports: Sequence[str], fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    fd = theirs.fileno()
    by_main_thread = threading.current_thread() is threading.main_thread()
    # Before the seconds that it takes to import torch, in which the rank may die as well.
    die = f"from ridethrough.processes import die_with; die_with({os.getpid()}, {by_main_thread})"
    work = f"from ridethrough.nvrx import work; work({fd}, {rank}, {tuple(imports)!r})"
    return subprocess.Popen(
        [sys.executable, "-c", f"{die}\n{work}"],
        pass_fds=(fd, *fds),
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
    )


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


# What follows runs in the worker.

_outcome: Outcome | None = None


def work(fd: int, rank: int, imports: tuple[str, ...]) -> None:
    """The worker process, from start to end: NVRx's loop over requests that come in on socket `fd`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the rank, which then ends its worker
    for name in imports:
        import_module(name)
    os.nice(NICENESS)  # from here on: until it is warm, the job that builds beside it has nothing of it
    ends = _WorkerEnd(Connection(fd))
    caller = core.PersistentAsyncCaller
    loop = getattr(caller, "async_loop_for_daemon_worker", caller.async_loop)
    options = {"cpu_priority": None, "cpu_shm_mode": True}  # 0.6: not again nicer, and no CUDA
    known = inspect.signature(loop).parameters
    with suppress(EOFError, ConnectionError):  # the rank has closed its end
        loop(rank, ends, None, ends, **{name: value for name, value in options.items() if name in known})


class _WorkerEnd:
    """The worker's end of what NVRx takes for its queues of requests and of completions."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self) -> Any:
        return self._connection.recv()

    def put(self, call_idx: int) -> None:
        self._connection.send((call_idx, _outcome))

    def task_done(self) -> None:
        """The completion says it."""


def _perform(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call it and keep what became of it, as the loop of NVRx does not, for the completion."""
    global _outcome
    try:
        _outcome = Outcome(function(*arguments))
    except Exception as error:  # noqa: BLE001 - whatever it is, the rank raises it
        _outcome = Outcome(error=f"{type(error).__name__}: {error}")
