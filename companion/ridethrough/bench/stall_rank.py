"""One rank of the benchmark `stall`: takes its samples and writes them as events."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ridethrough.bench.stall import timed, write_and_flush
from ridethrough.checkpoint.store import Store, candidates
from ridethrough.checkpoint.sync import SyncCheckpointer
from ridethrough.events import EventLog
from ridethrough.job.checkpointing import Checkpointer
from ridethrough.job.loop import Job, rendezvous
from ridethrough.job.rank import rank_main
from ridethrough.job.state import TrainState, local_part
from ridethrough.run import Run

FLOOR_COPIES = 5


def measure(run: Run, events: EventLog) -> None:
    """Every arm in turn, in rounds, each sample with a floor measured just before it."""
    mesh = rendezvous(run.config, events)
    job = Job(run, mesh, events)
    job.step()
    sync = SyncCheckpointer(Store(run.checkpoints, run.id, run.config.keep), events)
    parts = [local_part(tensor).detach() for tensor in job.state.state_dict().values()]
    copies = [part.clone() for part in parts]  # written once here, so that no sample pays for page faults
    raw = run.path / f"raw-{dist.get_rank()}"
    views = [part.contiguous().view(-1).view(torch.uint8).numpy().data for part in copies]
    arms: dict[str, Callable[[], object]] = {
        "raw_fsync": lambda: write_and_flush(raw, views),
        "sync": lambda: sync.save(job.state),
    }
    number = 0
    for _ in range(run.about["bench"]["rounds"]):
        for arm, call in arms.items():
            for _ in range(run.about["bench"]["repetitions"]):
                _take(arm, number, call, parts, copies, events)
                number += 1
                _clear(run)
    events.emit("isolation", arm="sync", isolated=_isolated(sync, job.state))
    job.finish(sync)


def _take(
    arm: str,
    number: int,
    call: Callable[[], object],
    parts: list[Tensor],
    copies: list[Tensor],
    events: EventLog,
) -> None:
    floors = [timed(lambda: _copy(parts, copies)) for _ in range(FLOOR_COPIES)]
    dist.barrier()
    seconds, cpu = timed(call)
    events.emit(
        "sample",
        arm=arm,
        number=number,
        seconds=seconds,
        cpu_s=cpu,
        floor_s=statistics.median(wall for wall, _ in floors),
        floor_cpu_s=statistics.median(cpu for _, cpu in floors),
        bytes=sum(part.numel() * part.element_size() for part in parts),
    )


def _clear(run: Run) -> None:
    """The same step is saved each time, and a disk that fills up would be measured as well."""
    if dist.get_rank() == 0:
        for folder in candidates(run.checkpoints):
            shutil.rmtree(folder)
    dist.barrier()


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _isolated(checkpointer: Checkpointer, state: TrainState) -> bool:
    """Fill with 1, save, fill with 2, restore: 1 must come back."""
    weights = [local_part(p.detach()) for p in state.model.parameters()]
    for value in (1.0, 2.0):
        for weight in weights:
            weight.fill_(value)
        if value == 1.0:
            checkpointer.save(state)
    checkpointer.restore(state)
    return all(bool((weight == 1.0).all()) for weight in weights)


if __name__ == "__main__":
    rank_main(measure)
