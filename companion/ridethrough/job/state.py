"""All that a resume needs, as one flat mapping of tensors: nothing in it can run code or be half loaded.

| name                | what                                                        | whose              |
|---------------------|-------------------------------------------------------------|--------------------|
| `model.<name>`      | parameters and persistent buffers                           | sharded over ranks |
| `optim.<name>.<key>`| the optimizer's tensors for that parameter                  | sharded over ranks |
| `job.step`          | finished optimizer steps; the learning rate follows from it | all ranks the same |
| `job.next_sample`   | samples consumed by all ranks together                      | all ranks the same |
| `rank.<r>.rng`      | the CPU generator of rank r                                 | rank r             |
| `rank.<r>.cuda_rng` | its GPU's generator                                         | rank r             |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ridethrough.errors import CheckpointError
from ridethrough.job.data import Batches


class TrainState(Stateful):
    """Model, optimizer, position and random numbers of a job, on each rank.

    Args:
        model: the sharded model.
        optimizer: over `model`'s parameters; its state is given its tensors here, so that they can be
            restored before the first step.
        batches: the data; its position is part of the state.
        rank: this rank.
        seed: of the random numbers of ranks that have none to restore.

    Attributes:
        step: finished optimizer steps.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, rank: int, seed: int
    ) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.rank, self.seed, self.step = rank, seed, 0
        _materialise(optimizer)
        self._seed_rng()

    def state_dict(self) -> dict[str, Tensor]:
        """Name → tensor. Model and optimizer tensors are the live ones: copy before you step."""
        state = self._shared_tensors()
        state["job.step"] = torch.tensor(self.step)
        state["job.next_sample"] = torch.tensor(self.batches.next_sample)
        state[f"rank.{self.rank}.rng"] = torch.get_rng_state()
        if torch.cuda.is_available() and self._device().type == "cuda":
            state[f"rank.{self.rank}.cuda_rng"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, whose parts must agree on the step.

        A rank without random numbers of its own in it (the world grew) draws them from the seed, its
        rank and the step.

        Raises:
            CheckpointError: if the optimizer has made another number of steps than `job.step` says.
        """
        self.step = int(state_dict["job.step"])
        self.batches.next_sample = int(state_dict["job.next_sample"])
        for name, tensor in self._shared_tensors().items():
            source = state_dict[name]
            if not _same_memory(tensor, source):
                tensor.copy_(source)
        self._check_optimizer_step()
        if (rng := state_dict.get(f"rank.{self.rank}.rng")) is None:
            self._seed_rng()
        else:
            torch.set_rng_state(rng)
        if (rng := state_dict.get(f"rank.{self.rank}.cuda_rng")) is not None:
            torch.cuda.set_rng_state(rng)

    def held_until_update(self) -> set[str]:
        """Parameters and optimizer state; a buffer may change in a forward pass, the position in a batch."""
        parameters = {f"model.{name}" for name, _ in self.model.named_parameters()}
        return parameters | {name for name in self._shared_tensors() if name.startswith("optim.")}

    def hashes(self) -> tuple[str, str]:
        """SHA-256 of the weights and of all that ranks share; all ranks call it together.

        They depend on neither the world size nor the sharding.
        """
        state = self._shared_tensors()
        weights = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
        state["job.step"] = torch.tensor(self.step)
        state["job.next_sample"] = torch.tensor(self.batches.next_sample)
        return tensors_sha256(weights), tensors_sha256(state)

    def _shared_tensors(self) -> dict[str, Tensor]:
        state = {f"model.{name}": value.detach() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                state[f"optim.{name}.{key}"] = value
        return state

    def _check_optimizer_step(self) -> None:
        for name, parameter in self.model.named_parameters():
            made = self.optimizer.state[parameter].get("step")
            if made is not None and int(made) != self.step:
                raise CheckpointError(
                    f"job.step is {self.step} but the optimizer made {int(made)} steps on {name}: "
                    "the parts of this checkpoint are not of one step"
                )

    def _seed_rng(self) -> None:
        digest = hashlib.sha256(f"{self.seed}:rng:{self.rank}:{self.step}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of full tensors in name order.

    With sharded tensors all their ranks must call it together; each gathers one tensor at a time.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
        digest.update(f"{name} {full.dtype} {tuple(full.shape)}\n".encode())
        digest.update(full.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Let a fresh optimizer allocate its state by a step that moves nothing, then set it back to zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharded or not; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return local_part(a).data_ptr() == local_part(b).data_ptr()
