"""A run on disk: what was asked for, what happened, what was saved.

runs/<name>/
  run.json        configuration, versions, machine, command: enough to run it again
  events/         one append-only file a process
  checkpoints/    what a restart continues from
  logs/           what each rank printed
  faults/         which injected faults have fired
  report.json     the account of it
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridethrough.config import JobConfig, PodConfig
from ridethrough.errors import UsageError
from ridethrough.events import EventLog

SCHEMA = 1


@dataclass(frozen=True)
class Run:
    """One run directory and what its `run.json` says.

    Attributes:
        path: the directory.
        id: unique for ever; checkpoints carry it, so that a store never deletes another run's.
        rung: name of the training script: `sync`, …
        ranks: world size asked for at the first launch.
        config: what the job computes.
        faults: faults to inject, as `kind@step:rank`.
        pods: how its containers are started; None if its ranks are started directly.
        about: corpus, versions, machine, command, creation time.
    """

    path: Path
    id: str
    rung: str
    ranks: int
    config: JobConfig
    faults: tuple[str, ...] = ()
    pods: PodConfig | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Write `run.json`, sealed."""
        values = {
            "schema": SCHEMA,
            "id": self.id,
            "rung": self.rung,
            "ranks": self.ranks,
            "config": self.config.to_dict(),
            "faults": list(self.faults),
            "pods": self.pods.to_dict() if self.pods else None,
            **self.about,
        }
        write_json(self.path / "run.json", seal(values))

    @property
    def corpus(self) -> dict[str, Any]:
        """What text the run began with: `source`, `files`, `bytes`, `sha256`."""
        try:
            corpus: dict[str, Any] = self.about["corpus"]
        except KeyError:
            raise UsageError(f"{self.path / 'run.json'}: 'corpus' is missing") from None
        return corpus

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        """Where events go."""
        return self.path / "events"

    @property
    def logs(self) -> Path:
        """Where the ranks' output goes."""
        return self.path / "logs"

    @property
    def faults_dir(self) -> Path:
        """Where fired faults leave their mark."""
        return self.path / "faults"

    def log(self, name: str, rank: int | None = None, generation: int | None = 0) -> EventLog:
        """An event file of its own for the calling process; see `EventLog` for a generation of None."""
        return EventLog(self.events, name, rank, generation)

    @classmethod
    def create(
        cls,
        path: Path,
        rung: str,
        ranks: int,
        config: JobConfig,
        faults: tuple[str, ...],
        about: dict[str, Any],
        pods: PodConfig | None = None,
    ) -> Run:
        """Make a new run directory.

        Raises:
            UsageError: if there is a run, or anything else, already.
        """
        path = path.absolute()
        if os.path.lexists(path / "run.json"):
            raise UsageError(f"{path} holds a run already; continue it with --resume or choose another --out")
        try:
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        except OSError as error:
            raise UsageError(f"{path} cannot be a folder: {error.strerror}; choose another --out") from None
        if taken:
            raise UsageError(f"{path} is not an empty folder; choose another --out")
        run = cls(path, uuid.uuid4().hex, rung, ranks, config, faults, pods, about)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path} cannot be made: {error.strerror}; choose another --out") from None
        run.write()
        return run

    @classmethod
    def open(cls, path: Path) -> Run:
        """Read an existing run directory.

        Raises:
            UsageError: if `run.json` is missing, unreadable or of another schema.
        """
        path = path.absolute()
        file = path / "run.json"
        values = read_json(file)
        if values.pop("schema", None) != SCHEMA:
            raise UsageError(
                f"{file}: not of schema {SCHEMA}; it was written by another version of ridethrough"
            )
        stamp = values.pop("seal", None)
        if seal({"schema": SCHEMA, **values})["seal"] != stamp:
            raise UsageError(f"{file} was edited after the run began; start a new run with other settings")
        try:
            return cls(
                path,
                values.pop("id"),
                values.pop("rung"),
                values.pop("ranks"),
                JobConfig.from_dict(values.pop("config"), str(file)),
                tuple(values.pop("faults")),
                PodConfig.from_dict(pods, str(file)) if (pods := values.pop("pods", None)) else None,
                values,
            )
        except KeyError as error:
            raise UsageError(f"{file}: {error} is missing") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UsageError: if it isn't there, isn't JSON or isn't an object.
    """
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a regular file")  # a pipe would be read for ever
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds no JSON object")
    return values


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """The same values with a hash of them, so that an edited file is noticed."""
    content = {name: value for name, value in values.items() if name != "seal"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "seal": hashlib.sha256(canonical.encode()).hexdigest()}


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write durably and all at once: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            json.dump(values, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a failed write or fsync names no file
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable.

    Raises:
        OSError: if that failed; names the directory.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        error.filename = str(path)
        raise
