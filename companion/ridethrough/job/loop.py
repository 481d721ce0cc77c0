"""One job on one rank: build it, restore it, step it, save it, and say in events what it is doing."""

from __future__ import annotations

import logging
import math
import os
import resource
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ridethrough.config import JobConfig
from ridethrough.errors import CheckpointError, RunError, UsageError
from ridethrough.events import EventLog
from ridethrough.faults import FaultInjector
from ridethrough.job.checkpointing import Checkpointer
from ridethrough.job.corpus import load_corpus
from ridethrough.job.data import Batches
from ridethrough.job.model import build_model, next_token_loss
from ridethrough.job.state import TrainState
from ridethrough.processes import POD
from ridethrough.run import Run

logger = logging.getLogger(__name__)

MOST_FAILED_SAVES = 3


def rendezvous(config: JobConfig, events: EventLog) -> DeviceMesh:
    """Join the other ranks; call it on all of them. The device is chosen here and nowhere else.

    Returns:
        A mesh over all ranks, on `cuda` with NCCL or on `cpu` with gloo.

    Raises:
        UsageError: if GPUs are asked for and there are fewer than ranks on this node.
    """
    events.phase("rendezvous")
    torch.set_num_threads(config.threads)
    device = _device(config.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=config.collective_timeout_s))
    if events.generation is None:  # started by no launcher of ours: rank 0 counts the lives of the ranks
        generation = [events.next_generation()]
        dist.broadcast_object_list(generation, src=0)
        events.begin(generation[0])
    pod = os.environ.get(POD)
    events.emit("joined", device=device, backend=backend, pod=None if pod is None else int(pod))
    return init_device_mesh(device, (dist.get_world_size(),))


def _device(asked: str, local_ranks: int) -> str:
    """`auto` takes GPUs if every rank of the node can have one of its own, as NCCL demands."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and gpus < local_ranks:
        raise UsageError(f"device: {local_ranks} ranks need {local_ranks} GPUs on this node, it has {gpus}")
    if asked == "auto":
        return "cuda" if gpus >= local_ranks else "cpu"
    return asked


def learning_rate(step: int, config: JobConfig) -> float:
    """Rate of step `step` (from 1): linear warm-up, then a cosine down to a tenth of the peak.

    A function of the step alone: there is no scheduler whose state could be lost, doubled or saved too early.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


class Job:
    """The model, its optimizer and its data on this rank, and the step that trains them.

    Make it on every rank together, after `rendezvous`.

    Args:
        run: what to train.
        mesh: the ranks.
        events: this rank's event file.

    Attributes:
        state: all that a resume needs.
    """

    def __init__(self, run: Run, mesh: DeviceMesh, events: EventLog) -> None:
        events.phase("build")
        self.config, self.events, self.mesh = run.config, events, mesh
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.faults = FaultInjector(run, rank, events)
        self.faults.install()
        corpus = load_corpus(self.config.data)
        if corpus.sha256 != run.corpus["sha256"]:
            raise RunError(
                f"the text in {corpus.source!r} is not what this run began with ({corpus.files} files, "
                f"then {run.corpus['files']}); put it back or start a new run"
            )
        self.batches = Batches(corpus, self.config, rank, world_size)
        self.model = build_model(self.config, mesh)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.config.learning_rate, weight_decay=self.config.weight_decay
        )
        self.state = TrainState(self.model, self.optimizer, self.batches, rank, self.config.seed)
        self._failed_saves = 0

    @property
    def done(self) -> bool:
        """Whether every step is made."""
        return self.state.step >= self.config.steps

    @property
    def checkpoint_due(self) -> bool:
        """Whether the step just made is one to save after; the last one always is."""
        return self.state.step % self.config.checkpoint_every == 0 or self.done

    def restore(self, checkpointer: Checkpointer) -> None:
        """Continue from the newest good checkpoint, or from the beginning if there never was one."""
        self.events.phase("restore")
        restored = checkpointer.restore(self.state)
        skipped = [{"step": step, "reason": reason} for step, reason in restored.skipped]
        self.events.emit("restored", step=restored.step, skipped=skipped)
        if restored.step and dist.get_rank() == 0:
            logger.info("restored step %d", restored.step)

    def step(self, checkpointer: Checkpointer | None = None) -> float:
        """Make one optimizer step; returns the loss, averaged over all ranks.

        Args:
            checkpointer: one whose saves go on while the training does: it is heeded and listened to.

        Raises:
            RunError: if the loss or a gradient is not finite; the weights are as after the step before.
            CheckpointError: as of `save`, for a save that was in flight.
        """
        step = self.state.step + 1
        self.events.phase("step", step)
        self.faults.at_step(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config)
        batch = self.batches.next().to(self.mesh.device_type)
        loss = next_token_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        mean = self._mean(loss.detach())
        if not math.isfinite(mean) or not bool(norm.isfinite()):
            raise RunError(
                f"step {step} has a loss of {mean} and a gradient of norm {float(norm)}; "
                "the newest checkpoint is from before it"
            )
        if checkpointer:
            checkpointer.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.step = step
        self.events.emit("step", step=step, loss=mean)
        if checkpointer:
            self._listen(checkpointer)
        return mean

    def save(self, checkpointer: Checkpointer) -> None:
        """Save the state after the step just made, on all ranks together.

        Raises:
            CheckpointError: if the save failed and `on_save_error` is `fail`, it was the third in a row, or
                there is no later one.
        """
        step = self.state.step
        if checkpointer.busy and self.config.when_busy == "skip" and not self.done:
            self.events.emit("save_skipped", step=step)
            return
        self.events.phase("checkpoint_stall", step)
        started = time.perf_counter()
        self._listen(checkpointer, wait=True)
        try:
            written = checkpointer.save(self.state)
        except CheckpointError as error:
            self._not_saved(step, error)
        else:
            if not checkpointer.busy:  # a save in flight is not yet a good one
                self._failed_saves = 0
            self.events.emit("save", step=step, stall_s=time.perf_counter() - started, bytes=written)

    def finish(self, checkpointer: Checkpointer) -> None:
        """Drain the checkpointer, put a hash on what was trained, and part from the other ranks."""
        if checkpointer.busy:
            self.events.phase("checkpoint_stall", self.state.step)
            self._listen(checkpointer, wait=True)
        self.events.phase("shutdown")
        checkpointer.close()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        weights, state = self.state.hashes()
        self.events.emit(
            "end",
            steps=self.state.step,
            weights_sha256=weights,
            state_sha256=state,
            peak_memory_bytes=peak,
        )
        dist.destroy_process_group()

    def _listen(self, checkpointer: Checkpointer, wait: bool = False) -> None:
        """Hear what became of the save in flight, if any."""
        busy = checkpointer.busy
        try:
            checkpointer.poll(wait)
        except CheckpointError as error:
            self._not_saved(self.state.step if error.step is None else error.step, error)
        else:
            if busy and not checkpointer.busy:
                self._failed_saves = 0

    def _not_saved(self, step: int, error: CheckpointError) -> None:
        self._failed_saves += 1
        self.events.emit("save_failed", step=step, error=str(error), consecutive=self._failed_saves)
        last = step >= self.config.steps
        if self.config.on_save_error == "fail" or self._failed_saves >= MOST_FAILED_SAVES or last:
            raise error
        logger.warning("step %d is not saved, training goes on: %s", step, error)

    def _mean(self, loss: torch.Tensor) -> float:
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()
