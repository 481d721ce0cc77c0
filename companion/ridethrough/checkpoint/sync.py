"""Synchronous checkpoints: every rank stops until the checkpoint is durable and committed."""

from __future__ import annotations

import time

from ridethrough.checkpoint import dcp
from ridethrough.checkpoint.base import Ranks, commit, local_bytes, restore_newest
from ridethrough.checkpoint.store import Store
from ridethrough.errors import CheckpointError
from ridethrough.events import EventLog
from ridethrough.job.checkpointing import Checkpointer, Restored, Resumable


class SyncCheckpointer(Checkpointer):
    """Saves and restores with all ranks waiting; the simplest thing that is right.

    Make one on every rank, after `init_process_group` and at the same point of the program: it opens a
    process group. All ranks call each method together. The store must be one folder for all of them, so on
    more than one node a shared file system.

    Args:
        store: where checkpoints go; rank 0 alone writes to it beside the tensors.
        events: this rank's event file; gets a `commit` on rank 0.
        checksums: whether a restore reads and checks every file, or compares sizes only.
        timeout_s: longest wait for the slowest rank's writes.
    """

    def __init__(
        self, store: Store, events: EventLog, *, checksums: bool = True, timeout_s: float = 600
    ) -> None:
        self.store, self.events, self.checksums = store, events, checksums
        self.ranks = Ranks(timeout_s)

    def restore(self, state: Resumable) -> Restored:
        """Load the newest good checkpoint into `state`; step 0 if none was ever committed.

        Call it before the first save: it also clears away what killed saves left.

        Raises:
            CheckpointError: if there were checkpoints but none is good, or it does not fit the job.
        """
        self.ranks.on_rank_0("clear away what killed saves left", self.store.sweep)
        return restore_newest(self.store, state, self.ranks, self.checksums)

    def save(self, state: Resumable) -> int:
        """Write, verify and commit `state`; returns the bytes this rank wrote.

        Raises:
            CheckpointError: on every rank, if any rank failed. Then nothing is committed and the
                checkpoints before it stand.
            RunError: if a rank is gone or late; on rank 0, if the step is committed but its event cannot be
                written.
        """
        started = time.perf_counter()
        tensors = state.state_dict()
        sizes = self.ranks.gather("the sizes", local_bytes(tensors))
        staging = self.ranks.on_rank_0("make a folder", lambda: self.store.begin(state.step, sum(sizes)))
        try:
            with self.ranks.waiting(f"to write step {state.step} together"):
                files = dcp.write(tensors, staging, self.ranks.group)
            written = self.ranks.gather("the checksums", files)
            self.ranks.on_rank_0(
                "commit", lambda: commit(self.store, self.events, staging, state.step, written, started)
            )
        except CheckpointError:
            # All ranks wait for it: on a full disk, they need the room to report the failure.
            self.ranks.on_rank_0("clear away", lambda: self.store.discard(staging))
            raise
        return sum(record.bytes for record in written[self.ranks.rank].values())

    def close(self) -> None:
        """Nothing is in flight between two calls."""
