"""Asynchronous checkpoints with NVRx: a rank stops only while its state is copied in memory.

    training  ── step ── save: copy ── step ── step ── step ── poll: it is durable ── step ──
    a thread                  └ plan · hand over · wait ········ gather · commit ┘
    the worker process                          └ write · hash · flush ┘

The state is copied into memory that the worker shares; what the training does to it afterwards, the
checkpoint never sees. On disk it is what a synchronous save leaves: the same files, the same commit record,
the same rename. Either kind restores the other's.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ridethrough import nvrx
from ridethrough.checkpoint import dcp
from ridethrough.checkpoint.base import Ranks, commit, restore_newest
from ridethrough.checkpoint.staging import Slot, Staging, attach, tensor_at
from ridethrough.checkpoint.store import FileRecord, Store
from ridethrough.errors import CheckpointError, RunError
from ridethrough.events import EventLog
from ridethrough.job.checkpointing import Checkpointer, Restored, Resumable
from ridethrough.job.state import local_part

#: What a rank wrote: where each tensor went, and the files.
Written: TypeAlias = tuple[list[WriteResult], dict[str, FileRecord]]


@dataclass(frozen=True)
class Part:
    """What a worker is asked to write: one rank's part of a checkpoint, staged in `fd`.

    Attributes:
        folder: where to.
        prefix: of the file's name.
        fd: the staging memory.
        bytes: its size.
        items: what to write, with the slot that each is in; None: the same as last time.
    """

    folder: Path
    prefix: str
    fd: int
    bytes: int
    items: list[tuple[WriteItem, Slot]] | None


@dataclass
class Plan:
    """Who writes what; it holds as long as no rank's tensors change.

    Attributes:
        items: this rank's.
        prefix: of the names of its files.
        metadata: of all ranks; on rank 0.
        told: the worker that has been given the items.
    """

    items: list[WriteItem]
    prefix: str
    metadata: Metadata | None
    told: nvrx.Worker | None = None


@dataclass
class Save:
    """One save on its way from the live state to its commit.

    Attributes:
        step: finished steps in it.
        tensors: the live state; after the copy, only names, shapes and sharding of it are used.
        bytes: of this rank's part.
        problem: why this rank cannot stage it.
        later: what is to be copied beside the step.
        copied: on a GPU, what its copies end with.
        staged: set when the copy is whole.
        error: why there is no checkpoint of it.
        thread: what sees it through.
    """

    step: int
    tensors: dict[str, Tensor]
    bytes: int
    problem: str | None
    started: float
    later: dict[str, Tensor] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None
    staged: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether it is durable or has failed; every rank comes to the same."""
        return self.thread is not None and not self.thread.is_alive()


class AsyncCheckpointer(Checkpointer):
    """Saves while the training goes on; one save at a time.

    Make one on every rank, after `init_process_group`, at the same point of the program and on the main
    thread: it opens two process groups and starts a worker, which dies with the rank. Make it early: the
    worker imports torch while the job builds. All ranks call each method together.

    A save that fails on any rank commits nothing, leaves the checkpoints before it, and is a
    `CheckpointError` on every rank at the same `poll`, `save` or `close`.

    Args:
        store: where checkpoints go; rank 0 alone writes to it beside the tensors.
        events: this rank's event file; gets `staging`, and on rank 0 `commit`.
        checksums: whether a restore reads and checks every file, or compares sizes only.
        timeout_s: longest time for a rank's writes.
        overlap_staging: copy beside the next forward and backward pass; `before_update` must be called.
    """

    def __init__(
        self,
        store: Store,
        events: EventLog,
        *,
        checksums: bool = True,
        timeout_s: float = 600,
        overlap_staging: bool = False,
    ) -> None:
        self.store, self.events, self.checksums = store, events, checksums
        self.overlap_staging = overlap_staging
        self.ranks = Ranks(timeout_s)
        # What the thread of a save exchanges with the other ranks' must not mix with what this one does;
        # and it waits for workers that may take all of their time.
        self._background = Ranks(timeout_s * 1.25 + 5)
        self._staging = Staging()
        make = partial(nvrx.Worker, self.ranks.rank, timeout_s, [__name__], [self._staging.fd])
        self._queue = nvrx.Queue(make)
        self._plan: Plan | None = None
        self._save: Save | None = None
        self._vote: tuple[dist.Work, Tensor] | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight, as far as all ranks have heard."""
        return self._save is not None

    def restore(self, state: Resumable) -> Restored:
        """Load the newest good checkpoint into `state`; step 0 if none was ever committed.

        Call it before the first save: it also clears away what killed saves left, and allocates the memory.

        Raises:
            CheckpointError: if there were checkpoints but none is good, it does not fit the job, or on some
                rank there is too little memory to stage the state.
        """
        self.ranks.on_rank_0("clear away what killed saves left", self.store.sweep)
        restored = restore_newest(self.store, state, self.ranks, self.checksums)
        parts = {name: local_part(tensor) for name, tensor in state.state_dict().items()}
        _raise_if_any(self.ranks.gather("room for staging", self._allocate(parts)))
        self.events.emit("staging", bytes=self._staging.bytes, overlap=self.overlap_staging)
        return restored

    def save(self, state: Resumable) -> int:
        """Copy `state`, and let it be written; returns the bytes this rank stages.

        With `overlap_staging` the copy goes on after the return, until `before_update`.

        Raises:
            CheckpointError: on every rank, if the save before was in flight and failed.
            RunError: if a rank is gone or late.
        """
        started = time.perf_counter()
        self.poll(wait=True)
        tensors = state.state_dict()
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        problem = self._allocate(parts)
        self._queue.renew()
        self._save = save = Save(state.step, tensors, _size(parts), problem, started)
        if not problem:
            self._copy(save, parts, state.held_until_update() if self.overlap_staging else set())
        save.thread = threading.Thread(target=self._see_through, args=(save,), name="save", daemon=True)
        save.thread.start()
        return save.bytes

    def before_update(self) -> None:
        """Wait for the copy that `overlap_staging` runs beside the step; on a GPU, let its stream wait."""
        save = self._save
        if save is None or save.staged.is_set():
            return
        if save.copied is not None:
            torch.cuda.current_stream().wait_event(save.copied)
            return
        self.events.phase("checkpoint_stall", save.step)
        if not save.staged.wait(self.ranks.timeout_s):
            raise RunError(
                f"rank {self.ranks.rank} waited for its own copy of step {save.step} "
                f"for {self.ranks.timeout_s:g} s"
            )
        self.events.phase("step", save.step + 1)

    def poll(self, wait: bool = False) -> None:
        """Hear what became of the save in flight, if any; costs microseconds unless `wait`.

        The ranks compare what they know by an exchange that is begun in one call and read in the next, so
        that none waits for another; all of them hear of a failure in the same call.

        Raises:
            CheckpointError: on every rank, if it failed; its `step` is that of the save.
            RunError: if a rank is gone or late; on rank 0, if the step is committed but its event cannot be
                written.
        """
        save = self._save
        if save is None:
            return
        if wait:
            self._read_vote()
            self._join(save)
        elif not isinstance(save.error, RunError) and not self._all_done(save):
            return
        self._save = None
        if isinstance(save.error, CheckpointError):
            save.error.step = save.step
        if save.error is not None:
            raise save.error

    def close(self) -> None:
        """Wait for the save in flight, then end the worker and free the memory.

        Raises:
            CheckpointError: on every rank, if that save failed.
        """
        try:
            self.poll(wait=True)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Drop the save in flight without a word to the other ranks, and leave nothing of it running."""
        self._save = None
        self._queue.close(abort=True)  # at once: an idle worker has nothing to lose, a busy one must stop
        self._staging.close()

    def _allocate(self, parts: dict[str, Tensor]) -> str | None:
        """Make room; returns what keeps this rank from it: the others wait to hear of it."""
        try:
            if self._staging.fit(parts):
                self._plan = None
        except CheckpointError as error:
            return str(error)
        return None

    def _copy(self, save: Save, parts: dict[str, Tensor], held: set[str]) -> None:
        """Copy what may change before the update; begin with the rest, or leave it to the save's thread."""
        save.later = {name: part for name, part in parts.items() if name in held}
        event = self._staging.copy({name: part for name, part in parts.items() if name not in held})
        if event is not None:
            event.synchronize()
        if any(part.is_cuda for part in save.later.values()):
            save.copied, save.later = self._staging.copy(save.later), {}
        elif not held:
            save.staged.set()

    def _see_through(self, save: Save) -> None:
        """What the thread of a save does, on every rank: from the copy to the commit."""
        try:
            try:
                if save.copied is not None:
                    save.copied.synchronize()
                self._staging.copy(save.later)
            finally:
                save.staged.set()
            self._write(save)
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            save.error = error
        save.tensors, save.later = {}, {}

    def _write(self, save: Save) -> None:
        """Plan if anything changed, have the worker write, and commit."""
        told = self._background.gather("the sizes", (save.bytes, self._plan is None, save.problem))
        _raise_if_any([problem for *_, problem in told])
        size = sum(part for part, *_ in told)
        folder = self._background.on_rank_0("make a folder", lambda: self.store.begin(save.step, size))
        try:
            if any(unplanned for _, unplanned, _ in told):
                self._plan = self._agree(save, folder)
            self._queue.schedule_async_request(
                nvrx.request(write_part, (self._part(folder),), partial(self._commit, save, folder))
            )
            with self._background.waiting(f"to write step {save.step} together"):
                self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        except CheckpointError:
            # All ranks wait for it: on a full disk, they need the room to report the failure.
            self._background.on_rank_0("clear away", lambda: self.store.discard(folder))
            raise

    def _agree(self, save: Save, folder: Path) -> Plan:
        try:
            with self._background.waiting(f"to plan step {save.step} together"):
                return Plan(*nvrx.plan(save.tensors, folder, self._background.group))
        except CheckpointException as error:
            raise CheckpointError(f"planning step {save.step} failed: {dcp.failures(error)}") from error

    def _part(self, folder: Path) -> Part:
        """What to ask of the worker; the items only if it is new or they are."""
        plan, worker, staging = self._plan, self._queue.worker, self._staging
        assert plan is not None
        items = None
        if plan.told is not worker:
            items, plan.told = [(item, staging.slots[item.index.fqn]) for item in plan.items], worker
        return Part(folder, plan.prefix, staging.fd, staging.bytes, items)

    def _commit(self, save: Save, folder: Path) -> None:
        """What NVRx calls on every rank when its worker is done: compare, and commit on rank 0."""
        outcomes = self._background.gather("what they wrote", self._queue.worker.outcome)
        done = [outcome or nvrx.Outcome(error="no outcome") for outcome in outcomes]
        _raise_if_any([outcome.error for outcome in done], f"saving into {folder.name} failed: ")
        parts = [outcome.value for outcome in done]
        self._background.on_rank_0("commit", lambda: self._publish(save, folder, parts))

    def _publish(self, save: Save, folder: Path, parts: list[Written]) -> None:
        assert self._plan is not None and self._plan.metadata is not None
        own = dcp.HashingFileSystem()
        nvrx.finish(folder, self._plan.metadata, [results for results, _ in parts], own)
        written = [files for _, files in parts]
        written[0] = {**written[0], **own.written}
        commit(self.store, self.events, folder, save.step, written, save.started)

    def _all_done(self, save: Save) -> bool:
        """Whether every rank was done when it last polled."""
        if self._read_vote():
            return True
        mine = torch.tensor([save.done], dtype=torch.int32)
        work = dist.all_reduce(mine, dist.ReduceOp.MIN, self.ranks.group, async_op=True)
        assert work is not None
        self._vote = work, mine
        return False

    def _read_vote(self) -> bool:
        vote, self._vote = self._vote, None
        if vote is None:
            return False
        with self.ranks.waiting("for the other ranks to poll"):
            vote[0].wait()
        return bool(vote[1])

    def _join(self, save: Save) -> None:
        """Wait for the thread, whose own waits are all bounded."""
        assert save.thread is not None
        limit = 6 * self._background.timeout_s
        save.thread.join(limit)
        if not save.done:
            raise RunError(f"rank {self.ranks.rank} waited for its save of step {save.step} for {limit:g} s")


def _size(parts: dict[str, Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts.values())


def _raise_if_any(problems: list[str | None], what: str = "") -> None:
    found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
    if found:
        raise CheckpointError(what + "; ".join(found))


# What follows runs in the worker.

_memory: mmap | None = None
_items: list[tuple[WriteItem, Slot]] = []


def write_part(part: Part) -> Written:
    """Write one rank's part, flushed to stable storage; returns where everything is, and in which files."""
    global _memory, _items
    if _memory is None or len(_memory) != part.bytes:
        _memory = attach(part.fd, part.bytes)
    if part.items is not None:
        _items = part.items
    files = dcp.HashingFileSystem()
    data = [(item, tensor_at(_memory, slot)) for item, slot in _items]
    results = nvrx.write(part.folder / f"{part.prefix}0.distcp", data, files.create_stream)
    return results, files.written
