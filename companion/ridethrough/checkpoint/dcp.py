"""PyTorch Distributed Checkpoint (DCP) files: written with checksums, read without trust.

What is written is plain DCP: `torch.distributed.checkpoint.load` alone can read it. What is added is what
DCP leaves out: a checksum of each file as it is written, a check that the metadata and the files cover
every element of every tensor, and a strict comparison before a load.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ridethrough.checkpoint.store import FileRecord
from ridethrough.errors import CheckpointError

METADATA = ".metadata"
_BUFFER = 1 << 20  # bytes gathered before a write call; DCP itself writes in small pieces
#: State that belongs to one rank is kept under `rank.<r>.…`, so that ranks never overwrite each other's.
RANK_PREFIX = "rank."

# All that a `.metadata` of tensors is made of. A pickle can name any callable; this reader admits no other.
_ADMITTED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "BytesStorageMetadata",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip


def write(state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> dict[str, FileRecord]:
    """Write this rank's part of `state` into `folder`; all ranks of `group` together.

    Returns:
        Name → size and checksum of each file this rank wrote, flushed to stable storage.

    Raises:
        CheckpointError: on every rank, if any rank failed; names rank, file and cause.
    """
    files = HashingFileSystem()
    # One thread: with more, DCP loses an exception of a writer thread and publishes the metadata.
    # The stream flushes to stable storage itself, so that an error there names the file.
    writer = FileSystemWriter(folder, sync_files=False, thread_count=1, overwrite=False)
    writer.fs = files
    try:
        dcp_save(dict(state), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"saving into {folder.name} failed: {failures(error)}") from error
    return files.written


def load(state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    """Read `folder` into the tensors of `state` in place; all ranks of `group` together.

    Call `compare` first: this reads what is there.

    Raises:
        CheckpointError: on every rank, if any rank failed.
    """
    try:
        dcp_load(dict(state), storage_reader=_SafeReader(folder), process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"restoring from {folder.name} failed: {failures(error)}") from error


def read_metadata(folder: Path) -> Metadata:
    """The `.metadata` of a DCP folder, without running any code that its pickle may ask for.

    Raises:
        CheckpointError: if it is missing, not such a pickle, or names anything but DCP's own classes.
    """
    file = folder / METADATA
    try:
        with file.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except Exception as error:  # a broken pickle raises almost anything
        raise CheckpointError(f"{file}: is not DCP metadata: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file}: is not DCP metadata but {type(metadata).__name__}")
    return metadata


def coverage_problems(metadata: Metadata, files: Mapping[str, FileRecord]) -> list[str]:
    """What of the tensors that `metadata` promises is not in `files`, a sentence each; [] if all is there."""
    stored = {(index.fqn, _key(index.offset)): info for index, info in (metadata.storage_data or {}).items()}
    problems = []
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name}: is a pickled object, not a tensor")
            continue
        if any(not len(chunk.offsets) == len(chunk.sizes) == len(entry.size) for chunk in entry.chunks):
            problems.append(f"{name}: its chunks have other dimensions than it has")
            continue
        problems += [f"{name}: {problem}" for problem in _tiling_problems(entry.size, entry.chunks)]
        for chunk in entry.chunks:
            info = stored.get((name, _key(chunk.offsets)))
            if info is None:
                problems.append(f"{name}: the chunk at {tuple(chunk.offsets)} is in no file")
            elif info.relative_path not in files:
                problems.append(f"{name}: its file {info.relative_path} is missing")
            elif info.offset + info.length > files[info.relative_path].bytes:
                problems.append(f"{name}: its file {info.relative_path} is too short")
    return problems


def compare(state: Mapping[str, Tensor], metadata: Metadata) -> list[str]:
    """How the checkpoint differs from what this rank would restore, a sentence each; [] if in nothing.

    Every name must be on both sides, with the same shape and dtype; other ranks' own names are theirs.
    """
    saved = {n: entry for n, entry in metadata.state_dict_metadata.items() if owner(n) is None or n in state}
    problems = [f"{name}: is not in the checkpoint" for name in state.keys() - saved.keys()]
    problems += [f"{name}: is in the checkpoint but not in the job" for name in saved.keys() - state.keys()]
    for name in state.keys() & saved.keys():
        target, entry = state[name], saved[name]
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{name}: is a pickled object, not a tensor")
        elif target.shape != entry.size:
            problems.append(f"{name}: has shape {tuple(entry.size)}, the job needs {tuple(target.shape)}")
        elif target.dtype != entry.properties.dtype:
            problems.append(f"{name}: has dtype {entry.properties.dtype}, the job needs {target.dtype}")
    return sorted(problems)


def owner(name: str) -> int | None:
    """The rank that a per-rank name belongs to, or None for state that all ranks share."""
    rank = name.removeprefix(RANK_PREFIX).partition(".")[0]
    return int(rank) if name.startswith(RANK_PREFIX) and rank.isdigit() else None


def _tiling_problems(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> list[str]:
    """Chunks must lie inside the tensor, not overlap, and add up to it."""
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    for chunk in chunks:
        if any(o < 0 or o + s > whole for o, s, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            return [f"the chunk at {tuple(chunk.offsets)} reaches outside the shape {tuple(size)}"]
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(size):
        return [f"{covered} of {math.prod(size)} elements are covered"]
    ordered = sorted(chunks, key=lambda chunk: tuple(chunk.offsets))
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if size and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break  # sorted by the first dimension: none further on can reach back
            if _overlap(one, other):
                return [f"the chunks at {tuple(one.offsets)} and {tuple(other.offsets)} overlap"]
    return []


def _overlap(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    return all(
        p < q + t and q < p + s for p, s, q, t in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _key(offsets: torch.Size | None) -> tuple[int, ...]:
    return tuple(offsets or ())


def failures(error: CheckpointException) -> str:
    """`rank 1: OSError: …` for each rank that failed; DCP's own text is a traceback for every rank."""
    causes = ((rank, failure[0]) for rank, failure in sorted(error.failures.items()))
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes)


def _memory_format(kind: Any, name: Any) -> Any:
    """Stands in for `getattr`, by which Python 3.10 and early 3.11 pickle the member of an enumeration."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(
            f"it asks for {name!r} of {kind!r}, which no checkpoint of tensors needs"
        )
    return _MEM_FORMAT_ENCODING[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) in _ADMITTED or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint of tensors needs")


class _SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class HashingFileSystem(FileSystem):
    """DCP's file system, noting the size and checksum of what goes through it."""

    def __init__(self) -> None:
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """A file to write from start to end; on leaving it is durable, and in `written`."""
        path = Path(path)
        stream = _HashedStream(path.open(mode, buffering=_BUFFER), path)
        try:
            yield stream
            stream.close()
        except BaseException:
            stream.abandon()
            # torch.save turns a failed write into "unexpected pos 704 vs 598": raise what really happened.
            if stream.error:
                raise stream.error from None
            raise
        self.written[path.name] = stream.record()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file written before."""
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _HashedStream(io.RawIOBase):
    """A file being written from start to end; errors name the file, as the write call's own do not."""

    def __init__(self, raw: Any, path: Path) -> None:
        self._raw, self._path = raw, path
        self._digest, self._position = hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        with self._named_errors():
            written: int = self._raw.write(data)
        self._digest.update(data)
        self._position += written
        return written

    def close(self) -> None:
        """Make it durable. Closing twice does nothing, as for any file."""
        if not self.closed:
            super().close()
            with self._named_errors():
                self._raw.flush()
                os.fsync(self._raw.fileno())
                self._raw.close()

    def abandon(self) -> None:
        """Let go of the file without caring what becomes of it."""
        super().close()
        with suppress(OSError):
            self._raw.close()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def record(self) -> FileRecord:
        return FileRecord(self._position, self._digest.hexdigest())

    @contextmanager
    def _named_errors(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self._path))
            raise self.error from error
