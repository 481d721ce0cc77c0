"""Rung `sync`: FSDP2 training with synchronous checkpoints.

Every rank stops while a checkpoint is written. A fault anywhere ends the run; started again on the same run
directory, it continues from the newest good checkpoint as if it had never stopped.

    $ ridethrough run sync --out runs/demo
    $ torchrun --nproc-per-node 2 -m ridethrough.rungs.sync_checkpoint runs/demo

The second form runs the same code on a run directory that exists. Logs are in `runs/demo/logs`. If a rank
hangs, the others give up after `collective_timeout_s`, or in a save after `save_timeout_s`.
"""

from ridethrough.checkpoint.store import Store
from ridethrough.checkpoint.sync import SyncCheckpointer
from ridethrough.events import EventLog
from ridethrough.job.loop import Job, rendezvous
from ridethrough.job.rank import rank_main
from ridethrough.run import Run


def train(run: Run, events: EventLog) -> None:
    """Train `run` to its last step on this rank."""
    config = run.config
    mesh = rendezvous(config, events)
    job = Job(run, mesh, events)
    checkpointer = SyncCheckpointer(
        Store(run.checkpoints, run.id, config.keep),
        events,
        checksums=config.verify_checksums,
        timeout_s=config.save_timeout_s,
    )
    job.restore(checkpointer)
    while not job.done:
        job.step()
        if job.checkpoint_due:
            job.save(checkpointer)
    job.finish(checkpointer)


if __name__ == "__main__":
    rank_main(train)
