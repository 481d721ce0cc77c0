"""Rung `async`: FSDP2 training with asynchronous checkpoints.

A rank stops only while its state is copied in memory; a process beside it writes. A fault anywhere ends the
run; started again on the same run directory, it continues from the newest good checkpoint as if it had never
stopped.

    $ ridethrough run async --out runs/demo
    $ torchrun --nproc-per-node 2 -m ridethrough.rungs.async_checkpoint runs/demo

The second form runs the same code on a run directory that exists. Logs are in `runs/demo/logs`. If a rank
hangs, the others give up after `collective_timeout_s`, or in a save after `save_timeout_s`.
"""

from ridethrough.checkpoint.async_nvrx import AsyncCheckpointer
from ridethrough.checkpoint.store import Store
from ridethrough.events import EventLog
from ridethrough.job.loop import Job, rendezvous
from ridethrough.job.rank import rank_main
from ridethrough.run import Run


def train(run: Run, events: EventLog) -> None:
    """Train `run` to its last step on this rank."""
    config = run.config
    mesh = rendezvous(config, events)
    checkpointer = AsyncCheckpointer(
        Store(run.checkpoints, run.id, config.keep),
        events,
        checksums=config.verify_checksums,
        timeout_s=config.save_timeout_s,
        overlap_staging=config.overlap_staging,
    )
    job = Job(run, mesh, events)
    job.restore(checkpointer)
    while not job.done:
        job.step(checkpointer)
        if job.checkpoint_due:
            job.save(checkpointer)
    job.finish(checkpointer)


if __name__ == "__main__":
    rank_main(train)
