"""What every checkpointer has in common: its process group, the commit and the restore."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from ridethrough.checkpoint import dcp, store
from ridethrough.errors import CheckpointError, RunError, UsageError
from ridethrough.events import EventLog
from ridethrough.job.checkpointing import Restored, Resumable
from ridethrough.job.state import local_part

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Ranks:
    """The ranks that checkpoint together, talking over a process group of their own.

    Its own, since a save must never mix with the training's collectives; and gloo, since what is exchanged
    are small Python objects in host memory, also when the training runs on NCCL.

    Args:
        timeout_s: longest wait for the slowest rank. It must exceed the time that the slowest rank needs to
            write its files, and is not inherited from the training's group.
    """

    def __init__(self, timeout_s: float) -> None:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert group is not None  # every rank is a member
        self.group: dist.ProcessGroup = group
        self.rank, self.size, self.timeout_s = dist.get_rank(), dist.get_world_size(), timeout_s

    def gather(self, what: str, value: T) -> list[T]:
        """Every rank's value, on every rank, in rank order; `what` is for the message if one is missing."""
        values: list[Any] = [None] * self.size
        with self.waiting(f"for {what} of the other ranks"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def on_rank_0(self, what: str, call: Callable[[], T]) -> T:
        """Let rank 0 alone call; every rank gets its result, or its `CheckpointError`."""
        outcome: list[Any] = [None]
        if self.rank == 0:
            try:
                outcome = [(call(), None)]
            except (CheckpointError, OSError) as error:
                outcome = [(None, f"rank 0: {error}")]
        with self.waiting(f"for rank 0 to {what}"):
            dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, problem = outcome[0]
        if problem:
            raise CheckpointError(problem)
        return result  # type: ignore[no-any-return]

    @contextmanager
    def waiting(self, whom: str) -> Iterator[None]:
        """Say in an error of the process group what this rank was waiting for; gloo itself does not.

        Raises:
            RunError: if a rank is gone, or did not answer in time.
        """
        try:
            yield
        except CheckpointError:  # of all ranks: none is missing
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RunError(
                f"rank {self.rank} waited {whom}, for {self.timeout_s:g} s at most; "
                f"a rank is gone or late: {reason}"
            ) from error


def restore_newest(from_: store.Store, state: Resumable, ranks: Ranks, checksums: bool) -> Restored:
    """Load the newest good checkpoint that the store's run has written; all ranks take the same one.

    A damaged checkpoint is logged and passed over for the one before it. One that is whole but does not fit
    the job is an error: an older one would not fit either.

    Raises:
        CheckpointError: on every rank, if checkpoints were committed here but none is good, or the newest
            good one does not fit the job.
    """
    directory, skipped = from_.directory, list[tuple[int, str]]()
    for folder in ranks.on_rank_0("list the checkpoints", lambda: store.candidates(directory)):
        tensors = state.state_dict()
        problems = _try_load(folder, from_.run, tensors, ranks, checksums)
        step = int(folder.name.removeprefix("step-"))
        if not problems:
            state.load_state_dict(tensors)
            if state.step != step:
                raise CheckpointError(f"{folder}: the state in it is of step {state.step}, not {step}")
            return Restored(step, tuple(skipped))
        skipped.append((step, _first_few(problems)))
        if ranks.rank == 0:
            logger.warning("%s is no good and passed over: %s", folder, _first_few(problems))
    if not skipped and not ranks.on_rank_0(
        "look for a first commit", lambda: store.ever_committed(directory)
    ):
        return Restored(0)
    reasons = "; ".join(f"step {number}: {reason}" for number, reason in skipped) or "all are gone"
    raise CheckpointError(
        f"{directory} held checkpoints but no good one is left ({reasons}); "
        "put one back, or empty the folder to start from step 0"
    )


def commit(
    to: store.Store,
    events: EventLog,
    staging: Path,
    step: int,
    written: list[dict[str, store.FileRecord]],
    started: float,
) -> None:
    """Check what all ranks wrote into `staging` against its metadata, commit and retain; rank 0 alone.

    Raises:
        CheckpointError: if anything is missing or the file system fails; then nothing is committed.
        RunError: if the step is committed but its event cannot be written.
    """
    files = {name: record for part in written for name, record in part.items()}
    if problems := dcp.coverage_problems(dcp.read_metadata(staging), files):
        raise CheckpointError(f"step {step} is not committed: {problems[0]}")
    to.commit(staging, step, files, world_size=len(written))
    try:
        events.emit(
            "commit",
            step=step,
            durable_s=time.perf_counter() - started,
            bytes=sum(record.bytes for record in files.values()),
            save_id=staging.name,
        )
    except OSError as error:  # not one of the save: no rank may take the step for not committed
        raise RunError(f"step {step} is committed, but its event is not written: {error}") from error
    try:
        to.retain(step)
    except OSError as error:
        logger.warning("old checkpoints could not be deleted: %s", error)


def local_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(part.numel() * part.element_size() for part in map(local_part, tensors.values()))


def _try_load(folder: Path, run: str, tensors: dict[str, Tensor], ranks: Ranks, checksums: bool) -> list[str]:
    """Verify, compare and load one checkpoint in place; returns its damage, the same on every rank.

    Raises:
        CheckpointError: if it is whole but does not fit the job.
    """
    problems, record, metadata = _examine(folder, run, ranks, checksums)
    if problems := _gathered(ranks, problems):
        return problems
    assert record and metadata  # without one of them there would be a problem
    # What a rank that is new since the save finds nothing for, it must make up itself.
    saved_by = record.world_size
    for name in [n for n in tensors if (owner := dcp.owner(n)) is not None and owner >= saved_by]:
        del tensors[name]
    if misfits := _gathered(ranks, dcp.compare(tensors, metadata)):
        raise CheckpointError(f"{folder} does not fit this job: {_first_few(misfits)}")
    try:
        with ranks.waiting(f"to read {folder.name} together"):
            dcp.load(tensors, folder, ranks.group)
    except CheckpointError as error:
        return [str(error)]
    return _gathered(ranks, _not_finite(tensors))


def _examine(
    folder: Path, run: str, ranks: Ranks, checksums: bool
) -> tuple[list[str], store.Record | None, Metadata | None]:
    """What this rank finds wrong, and what describes the checkpoint; raises nothing, as the others wait."""
    try:
        problems = list(store.verify(folder, checksums, (ranks.rank, ranks.size), run).problems)
        if problems:
            return problems, None, None
        record, metadata = store.load_record(folder), dcp.read_metadata(folder)
    except (CheckpointError, UsageError, OSError) as error:
        return [str(error)], None, None
    return dcp.coverage_problems(metadata, record.files), record, metadata


def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Weights with a NaN in them restore faithfully and fail again a few steps on: they are no good."""
    bad = []
    for name, tensor in tensors.items():
        part = local_part(tensor)
        if part.is_floating_point() and not bool(torch.isfinite(part).all()):
            bad.append(f"{name}: holds values that are not finite")
    return bad


def _gathered(ranks: Ranks, problems: list[str]) -> list[str]:
    """Every rank's problems, each once, in a fixed order."""
    found = ranks.gather("what is wrong with a checkpoint", problems)
    return sorted({problem for part in found for problem in part})


def _first_few(problems: list[str], most: int = 3) -> str:
    more = f" (and {len(problems) - most} more)" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more
