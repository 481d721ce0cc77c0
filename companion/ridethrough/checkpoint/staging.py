"""Memory in which the state waits to be written: allocated once, shared with the worker, named nowhere.

It is an anonymous file (`memfd`), so it needs no room in /dev/shm, which a container has 64 MB of, and it is
gone with the last process that holds it, whatever ends that process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridethrough import machine
from ridethrough.errors import CheckpointError

_ALIGNMENT = 64
_POPULATE = getattr(
    mmap, "MAP_POPULATE", 0
)  # its pages are there before the first save, not faulted in by it


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in the memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Staging:
    """A rank's staging memory.

    Attributes:
        fd: the file behind it, for the worker to inherit.
        slots: name of each tensor → where it lies.
        bytes: size of all.
    """

    def __init__(self) -> None:
        self.fd = _anonymous_file()
        self.slots: dict[str, Slot] = {}
        self.bytes = 0
        self._tensors: dict[str, Tensor] = {}
        self._pinned = 0
        self._stream: torch.cuda.Stream | None = None

    def fit(self, parts: Mapping[str, Tensor]) -> bool:
        """Make room for `parts`, if they are not as they were; call it while nothing is staged.

        Returns:
            Whether anything changed.

        Raises:
            CheckpointError: if this machine, or this container, has too little memory.
        """
        slots, size = _lay_out(parts)
        if slots == self.slots:
            return False
        if size > self.bytes:
            _check_memory(size - self.bytes)
        self._unpin()
        self._tensors.clear()
        try:
            os.ftruncate(self.fd, size)
            os.posix_fallocate(self.fd, 0, size)
            memory = attach(self.fd, size)
        except OSError as error:
            raise CheckpointError(f"{size:,} bytes for staging cannot be had: {error.strerror}") from error
        self._tensors = {name: tensor_at(memory, slot) for name, slot in slots.items()}
        self.slots, self.bytes = slots, size
        if any(part.is_cuda for part in parts.values()):
            self._pin(memory)
        return True

    def copy(self, parts: Mapping[str, Tensor]) -> torch.cuda.Event | None:
        """Copy `parts` into their slots.

        Returns:
            From a GPU, what the copies end with: they run on a stream of their own, and the training's next
            kernels beside them. Not run on a GPU yet.
        """
        targets = [self._tensors[name] for name in parts]
        if not any(part.is_cuda for part in parts.values()):
            _copy(targets, list(parts.values()))
            return None
        self._stream = self._stream or _stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(targets, list(parts.values()))
            event: torch.cuda.Event = self._stream.record_event()
            return event

    def close(self) -> None:
        """Let go of the memory; the worker's end is its own."""
        self._unpin()
        self._tensors.clear()
        self.slots, self.bytes = {}, 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _pin(self, memory: mmap.mmap) -> None:
        """Let the GPU copy into it by itself. Not run on a GPU yet."""
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        problem = _cudart().cudaHostRegister(address, len(memory), 0)
        if int(problem) != 0:
            raise CheckpointError(f"{len(memory):,} bytes for staging cannot be pinned: CUDA error {problem}")
        self._pinned = address

    def _unpin(self) -> None:
        if self._pinned:
            _cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)


def attach(fd: int, size: int) -> mmap.mmap:
    """The memory behind a staging file, as it is in every process that holds the file."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | _POPULATE)


def tensor_at(memory: mmap.mmap, slot: Slot) -> Tensor:
    """The tensor in a slot; its storage is the slot and no more: what saves a tensor saves its storage."""
    shape = torch.Size(slot.shape)
    if not shape.numel():
        return torch.empty(shape, dtype=slot.dtype)
    flat = torch.frombuffer(memory, dtype=slot.dtype, count=shape.numel(), offset=slot.offset)
    return flat.view(shape)


def _lay_out(parts: Mapping[str, Tensor]) -> tuple[dict[str, Slot], int]:
    slots, end = {}, 0
    for name, part in parts.items():
        slots[name] = Slot(end, tuple(part.shape), part.dtype)
        end += -(-part.numel() * part.element_size() // _ALIGNMENT) * _ALIGNMENT
    return slots, max(end, 1)


def _check_memory(size: int) -> None:
    available = machine.available_bytes()
    if size > available:
        raise CheckpointError(
            f"staging this rank's state takes {size:,} bytes of host memory, {available:,} are available: "
            "use more ranks or synchronous checkpoints"
        )


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ridethrough-staging")
    with tempfile.TemporaryFile() as file:  # elsewhere than on Linux: a file that has no name any more
        return os.dup(file.fileno())
