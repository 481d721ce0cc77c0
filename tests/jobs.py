"""Small real jobs for tests, on whatever ranks the caller has."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ridethrough.checkpoint.store import Store
from ridethrough.checkpoint.sync import SyncCheckpointer
from ridethrough.config import JobConfig
from ridethrough.job.corpus import load_corpus
from ridethrough.job.loop import Job
from ridethrough.run import Run
from torch.distributed.device_mesh import init_device_mesh

TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 40


def make_run(path: Path, **settings: Any) -> Run:
    """A run directory whose job is small: 24 samples of 32 bytes a batch of 4."""
    text = path.parent / "text"
    text.mkdir(exist_ok=True)
    (text / "a.txt").write_text(TEXT)
    config = JobConfig(**{"seq_len": 32, "global_batch": 4, "data": str(text), "steps": 8, **settings})
    return Run.create(path, "sync", 2, config, (), {"corpus": load_corpus(config.data).describe()})


def make_job(run: Run) -> tuple[Job, SyncCheckpointer]:
    """The job of `run` and its checkpointer; every rank of the default group calls it."""
    events = run.log(f"rank-{dist.get_rank()}", dist.get_rank())
    before = signal.getsignal(signal.SIGUSR1)
    job = Job(run, init_device_mesh("cpu", (dist.get_world_size(),)), events)
    signal.signal(signal.SIGUSR1, before)
    return job, SyncCheckpointer(Store(run.checkpoints, run.id, run.config.keep), events, timeout_s=30)


def train(run: Run, until: int) -> dict[str, Any]:
    """Restore, step to `until`, saving when due; returns losses, sample ids and hashes."""
    job, checkpointer = make_job(run)
    job.restore(checkpointer)
    losses, ids = {}, []
    while job.state.step < until:
        loss = job.step()
        losses[job.state.step] = loss
        ids += job.batches.last_ids
        if job.checkpoint_due:
            job.save(checkpointer)
    return {"losses": losses, "ids": ids, "hashes": job.state.hashes()}
