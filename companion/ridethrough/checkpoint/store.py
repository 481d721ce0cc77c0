"""Checkpoints on disk: layout, commit, verification, retention. Imports no torch.

    checkpoints/
      step-00000040/               committed: whole, durable, described by its record
        __0_0.distcp … .metadata   PyTorch DCP files
        commit.json                the record: every file's size and SHA-256
      saving-00000050-1f3a9c02/    a save in flight, or what a killed one left
      store.json                   written with the first commit: a store without checkpoints isn't new

A save writes into a `saving-` folder of its own, which no reader takes for a checkpoint. When every rank's
files are flushed and the metadata covers every element, the record goes in, and the folder is renamed to
`step-…`. **That rename is the commit**: one atomic operation, before which there is no checkpoint of that
step and after which there is a whole one. A writer that outlives its job can only write into its own dead
folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ridethrough.errors import CheckpointError, UsageError
from ridethrough.run import fsync_directory, read_json, seal, write_json

SCHEMA = 1
RECORD = "commit.json"
MARK = "store.json"
_STEP = re.compile(r"step-(\d{8,})")
_SAVING = re.compile(r"saving-(\d{8,})-[0-9a-f]{8}")
_REPLACED = re.compile(r"replaced-step-\d{8,}-[0-9a-f]{8}")
_FREE_SPACE_MARGIN = 1.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileRecord:
    """What the commit record says of one file: its size in bytes and the SHA-256 of its content."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """A commit record: what was saved, by whom, in which files."""

    run: str
    step: int
    world_size: int
    created: float
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class Entry:
    """One folder of a store, as found on disk.

    Attributes:
        path: the folder.
        step: finished optimizer steps in it.
        status: `good` (record verifies), `damaged`, or `in-flight` (not committed; maybe abandoned).
        problems: what is wrong, a sentence each, naming the file.
        bytes: size of its files.
        age_s: seconds since it was last changed.
        world_size: ranks that wrote it, if its record can be read.
        run: id of the run that wrote it, if its record can be read.
    """

    path: Path
    step: int
    status: Literal["good", "damaged", "in-flight"]
    problems: tuple[str, ...] = ()
    bytes: int = 0
    age_s: float = 0.0
    world_size: int | None = None
    run: str | None = None


@dataclass
class Store:
    """The checkpoints of one run. Every rank may make one; rank 0 alone calls its methods.

    Args:
        directory: the `checkpoints/` folder; made if it isn't there.
        run: id of the run; only its own checkpoints are ever deleted.
        keep: committed checkpoints to keep.
    """

    directory: Path
    run: str
    keep: int

    def __post_init__(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be made: {error.strerror}") from error

    def begin(self, step: int, size: int) -> Path:
        """A fresh folder for the files of `step`, about `size` bytes over all ranks.

        Raises:
            CheckpointError: if the file system has too little room or refuses the folder.
        """
        free = shutil.disk_usage(self.directory).free
        if free < size * _FREE_SPACE_MARGIN:
            raise CheckpointError(
                f"{self.directory} has {free:,} bytes free; a checkpoint of {size:,} bytes needs "
                f"{int(size * _FREE_SPACE_MARGIN):,}: free some space or lower --keep"
            )
        staging = self.directory / f"saving-{step:08d}-{uuid.uuid4().hex[:8]}"
        try:
            staging.mkdir()
        except OSError as error:
            raise CheckpointError(f"{staging} cannot be made: {error.strerror}") from error
        return staging

    def commit(self, staging: Path, step: int, files: dict[str, FileRecord], world_size: int) -> Path:
        """Make the files in `staging` the checkpoint of `step`; returns its folder.

        Every file must be flushed by the rank that wrote it. Their sizes are compared with what the ranks
        reported before anything is renamed.

        Raises:
            CheckpointError: if a file is missing or of another size, or the file system fails; then
                nothing is committed.
        """
        for problem in _compare(staging, files, checksums=False):
            raise CheckpointError(f"step {step} is not committed: {problem}")
        final = self.directory / f"step-{step:08d}"
        try:
            record = Record(self.run, step, world_size, time.time(), dict(sorted(files.items())))
            write_json(staging / RECORD, seal({"schema": SCHEMA, **asdict(record)}))
            self._set_aside(final)
            staging.rename(final)
        except OSError as error:
            raise CheckpointError(f"step {step} is not committed: {error}") from error
        try:
            fsync_directory(self.directory)
            self._mark()
        except OSError as error:
            # Visible but perhaps not durable: take it back, so that an error always means no commit.
            final.rename(staging)
            raise CheckpointError(f"step {step} is not committed: {error}") from error
        return final

    def _mark(self) -> None:
        mark = self.directory / MARK
        if not mark.exists():
            try:
                write_json(mark, {"schema": SCHEMA, "run": self.run})
            except OSError:
                # The commit is taken back: with a mark the store would refuse a fresh start.
                mark.unlink(missing_ok=True)
                raise

    def _set_aside(self, final: Path) -> None:
        """A step is saved again only after its checkpoint was passed over; that one keeps its files."""
        if final.exists():
            aside = final.with_name(f"replaced-{final.name}-{uuid.uuid4().hex[:8]}")
            logger.warning("%s exists already; it is kept as %s", final, aside.name)
            final.rename(aside)

    def discard(self, staging: Path) -> None:
        """Delete a save that will not be committed; what cannot be deleted is logged and left to `sweep`."""
        shutil.rmtree(staging, ignore_errors=True)
        if os.path.lexists(staging):
            logger.warning("%s cannot be deleted; the next start tries again", staging)

    def sweep(self) -> list[Path]:
        """Delete what killed saves left, and say what; call it only while no save is in flight."""
        left = [path for path in _folders(self.directory) if _SAVING.fullmatch(path.name)]
        for path in left:
            logger.warning("%s was never committed and is deleted", path)
            self.discard(path)
        return left

    def retain(self, step: int) -> list[Path]:
        """Delete all but the newest `keep` checkpoints of this run up to `step`, the one just committed.

        Of the folders that `commit` set aside, as many are kept.

        A folder goes only if its name is canonical, its record says that this run wrote it, and its files
        have their sizes: backups, strangers' folders, damaged checkpoints and those of later steps, which
        the last restore passed over, are neither counted nor deleted.

        Returns:
            What was deleted.
        """
        aside = (path for path in _folders(self.directory) if _REPLACED.fullmatch(path.name))
        replaced = [path for path in aside if _written_by(path) == self.run]
        for path in sorted(replaced, key=_age)[self.keep :]:
            self.discard(path)
        own = [
            path
            for path, saved in _steps(self.directory)
            if saved <= step
            and (entry := verify(path, checksums=False)).status == "good"
            and entry.run == self.run
        ]
        for path in own[self.keep :]:
            # Renamed first: a crash half-way through the deletion must not leave a half checkpoint.
            doomed = self.directory / f"saving-{path.name.removeprefix('step-')}-{uuid.uuid4().hex[:8]}"
            path.rename(doomed)
            self.discard(doomed)
        return own[self.keep :]


def scan(directory: Path, checksums: bool = True, run: str | None = None) -> list[Entry]:
    """Every checkpoint of a store and every save in flight, newest step first; arguments as of `verify`.

    Raises:
        UsageError: if there is no such folder.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a folder")
    entries = [verify(path, checksums, run=run) for path, _ in _steps(directory)]
    for path in _folders(directory):
        if match := _SAVING.fullmatch(path.name):
            problem = f"not committed: in flight, or left by a save that was killed {_age(path):.0f} s ago"
            entries.append(Entry(path, int(match[1]), "in-flight", (problem,), _size(path), _age(path)))
    return sorted(entries, key=lambda entry: (-entry.step, entry.status))


def candidates(directory: Path) -> list[Path]:
    """Folders that claim to be checkpoints, newest step first; verify each before use."""
    return [path for path, _ in _steps(directory)]


def ever_committed(directory: Path) -> bool:
    """Whether a checkpoint was ever committed here, even if all are gone."""
    return (directory / MARK).exists() or bool(_steps(directory))


def verify(
    path: Path, checksums: bool = True, part: tuple[int, int] = (0, 1), run: str | None = None
) -> Entry:
    """Hold one checkpoint folder against its commit record.

    Sizes, names and the record's own seal are always checked; each file's SHA-256 if `checksums`.

    Args:
        path: the folder.
        checksums: whether to read the files.
        part: (r, n): of the files, read every n-th from the r-th on; so that n ranks share the reading.
        run: id of the run that must have written it; any run if None.

    Raises:
        UsageError: if the name isn't that of a checkpoint folder.
    """
    match = _STEP.fullmatch(path.name)
    if not match or not path.is_dir():
        raise UsageError(f"{path} is not a checkpoint folder (step-00000040 or the like)")
    step = int(match[1])
    try:
        record = load_record(path)
    except CheckpointError as error:
        return Entry(path, step, "damaged", (str(error),), _size(path), _age(path))
    try:
        problems = _compare(path, record.files, checksums, part)
    except OSError as error:
        problems = [f"{error.filename}: cannot be read: {error.strerror}"]
    if record.step != step:
        problems.append(f"{path / RECORD}: says step {record.step}, but the folder says {step}")
    if run is not None and record.run != run:
        problems.append(f"{path / RECORD}: was written by run {record.run}, not by this one")
    status: Literal["good", "damaged"] = "damaged" if problems else "good"
    return Entry(path, step, status, tuple(problems), _size(path), _age(path), record.world_size, record.run)


def load_record(path: Path) -> Record:
    """The commit record of a checkpoint folder.

    Raises:
        CheckpointError: if it is missing, unreadable, of another schema, or was changed after the commit.
    """
    file = path / RECORD
    try:
        values = read_json(file)
    except UsageError as error:
        raise CheckpointError(f"no commit record: {error}") from None
    if values.get("schema") != SCHEMA:
        raise CheckpointError(f"{file}: schema {values.get('schema')!r} is not {SCHEMA}")
    if seal(values) != values:
        raise CheckpointError(f"{file}: was changed after the commit (its seal does not match)")
    try:
        files = {name: FileRecord(**file) for name, file in values["files"].items()}
        return Record(values["run"], values["step"], values["world_size"], values["created"], files)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: is not a commit record: {error!r}") from None


def _written_by(path: Path) -> str | None:
    """The run whose record a folder has; None if it has no valid one."""
    try:
        return load_record(path).run
    except CheckpointError:
        return None


def _compare(
    path: Path, files: dict[str, FileRecord], checksums: bool, part: tuple[int, int] = (0, 1)
) -> list[str]:
    """What differs between a folder and the files it should hold."""
    problems = []
    found = {entry.name: entry for entry in os.scandir(path)}
    for i, (name, record) in enumerate(files.items()):
        entry = found.get(name)
        if entry is None or not entry.is_file(follow_symlinks=False):
            problems.append(f"{path / name}: is missing")
        elif (size := entry.stat().st_size) != record.bytes:
            problems.append(f"{path / name}: has {size:,} bytes instead of {record.bytes:,}")
        elif checksums and i % part[1] == part[0]:
            problems += _compare_content(path / name, record)
    for name in sorted(found.keys() - files.keys() - {RECORD}):
        problems.append(f"{path / name}: does not belong to this checkpoint (not in its commit record)")
    return problems


def _compare_content(file: Path, record: FileRecord) -> list[str]:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        return [f"{file}: cannot be read: {error.strerror}"]
    return [] if digest.hexdigest() == record.sha256 else [f"{file}: its content changed (SHA-256 differs)"]


def _steps(directory: Path) -> list[tuple[Path, int]]:
    """Folders with a checkpoint's canonical name, newest first."""
    matches = [(path, _STEP.fullmatch(path.name)) for path in _folders(directory)]
    steps = [(path, int(match[1])) for path, match in matches if match]
    return sorted(
        ((path, step) for path, step in steps if path.name == f"step-{step:08d}"), key=lambda pair: -pair[1]
    )


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]


def _size(path: Path) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    except OSError:
        return 0  # a folder that cannot be listed is reported as such by `_compare`


def _age(path: Path) -> float:
    return max(0.0, time.time() - path.stat().st_mtime)
