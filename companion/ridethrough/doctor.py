"""Is this machine fit for the book? Each check says what was found, and what to do if it is not enough."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import statistics
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from ridethrough import machine, spawn
from ridethrough.errors import RunError
from ridethrough.restart import sandbox

GIB = 1 << 30

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what.
        status: `ok`; `warn`: works, with limits; `fail`: runs cannot work.
        found: what is there.
        advice: what to do, or what it means; may be empty.
    """

    name: str
    status: Status
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: `check`, `status`, `found`, `advice`."""
        return {"check": self.name, "status": self.status, "found": self.found, "advice": self.advice}


@dataclass(frozen=True)
class Nvrx:
    """One release of NVIDIA Resiliency Extension: where its wheels can be installed, and what it lacks."""

    version: str
    glibc: str
    pythons: tuple[str, ...]
    lacks: str

    def refused(self, python: str, glibc: str | None) -> str:
        """Why pip does not take this release here; empty if it does."""
        if python not in self.pythons:
            return f"needs Python {' or '.join(self.pythons)}"
        if glibc is None or _numbers(glibc) < _numbers(self.glibc):
            return f"needs glibc {self.glibc}"
        return ""


#: The releases, oldest first, by the tags of their x86-64 wheels.
NVRX = (
    Nvrx(
        "0.4.1",
        "2.31",
        ("3.10", "3.11", "3.12"),
        "no asynchronous save through shared CPU memory and no barrier rendezvous with hot spares (0.6 has "
        "both), no GPU and NIC health checks at restart (0.5), and saves alias live CPU tensors (0.7 copies)",
    ),
    Nvrx(
        "0.5.0",
        "2.39",
        ("3.10", "3.11", "3.12"),
        "no asynchronous save through shared CPU memory (0.6), and saves alias live CPU tensors (0.7 copies)",
    ),
    Nvrx(
        "0.6.0",
        "2.39",
        ("3.10", "3.11", "3.12"),
        "saves alias live CPU tensors (0.7 copies), and in-process restart works but is deprecated",
    ),
    Nvrx("0.7.0", "2.39", ("3.12",), "in-process restart works but is deprecated"),
)


def examine(runs: Path | str = "runs") -> list[Check]:
    """Look at everything a run needs; takes a few seconds, most of them to import torch.

    Args:
        runs: folder that runs will be written to; it is not made, its nearest existing parent is tried.
    """
    folder = _existing(Path(runs).absolute())
    checks: tuple[Callable[[], Check], ...] = (
        _python,
        _torch,
        _nvrx,
        _gpu,
        _cores,
        _memory,
        _shared_memory,
        _port,
        _pods,
        lambda: _space(folder),
        lambda: _fsync(folder),
    )
    return [check() for check in checks]


def format_checks(checks: list[Check]) -> str:
    """The checks as plain text, at most 100 columns wide."""
    return "\n".join(line for check in checks for line in _lines(check))


def _lines(check: Check) -> Iterator[str]:
    head = f"{check.status:<6}{check.name:<23}"
    yield from textwrap.wrap(check.found, 100, initial_indent=head, subsequent_indent=" " * len(head))
    indent = " " * (len(head) + 2)
    yield from textwrap.wrap(check.advice, 100, initial_indent=indent, subsequent_indent=indent)


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Check(
            "python", "warn", found, "Everything is tested on Linux alone; elsewhere some faults differ."
        )
    return Check("python", "ok", found)


def _torch() -> Check:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # NVRx 0.4.1 brings a pynvml that torch warns of
            torch = importlib.import_module("torch")
        distributed = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    except (ImportError, OSError) as error:
        return Check("torch", "fail", f"cannot be imported: {error}", "Install it again: pip install torch")
    if not distributed:
        return Check(
            "torch", "fail", f"{torch.__version__} without gloo", "Install a build with torch.distributed."
        )
    return Check("torch", "ok", torch.__version__)


def _nvrx() -> Check:
    """Which NVRx, and why pip took that one: it passes over newer wheels without a word."""
    installed = machine.versions()["nvidia-resiliency-ext"]
    if installed is None:
        return Check("nvidia-resiliency-ext", "fail", "not installed", "pip install nvidia-resiliency-ext")
    python, glibc = ".".join(platform.python_version_tuple()[:2]), machine.glibc()
    return explain_nvrx(installed, python, glibc)


def explain_nvrx(installed: str, python: str, glibc: str | None) -> Check:
    """The check for an installed release of NVRx, a Python (`3.11`) and a C library (`2.36`)."""
    newer = [release for release in NVRX if _numbers(release.version) > _numbers(installed)]
    passed_over = [f"{r.version} ({why})" for r in newer if (why := r.refused(python, glibc))]
    possible = [release.version for release in newer if not release.refused(python, glibc)]
    known = [release for release in NVRX if _numbers(release.version) <= _numbers(installed)]
    advice = f"In {installed}: {known[-1].lacks}." if known else "The book is written for 0.4.1 and later."
    if possible:
        advice += f" This machine can have {possible[-1]}."
    found = f"{installed} on Python {python}, {f'glibc {glibc}' if glibc else 'no glibc'}"
    if passed_over:
        found += f"; pip passes over {', '.join(passed_over)}"
    return Check("nvidia-resiliency-ext", "ok" if known else "warn", found, advice)


def _gpu() -> Check:
    try:
        cuda = importlib.import_module("torch").cuda
    except (ImportError, OSError):
        return Check("gpu", "warn", "unknown without torch")
    if not cuda.is_available():
        return Check("gpu", "ok", "none: ranks compute on the CPU and talk by gloo")
    names = [cuda.get_device_name(number) for number in range(cuda.device_count())]
    advice = "" if len(names) > 1 else "NCCL takes one rank a GPU: two ranks compute on the CPU here."
    return Check("gpu", "warn" if advice else "ok", f"{len(names)} × {names[0]}", advice)


def _cores() -> Check:
    cores = machine.cores()
    found = f"{cores:g} × {machine.cpu_model()}"
    if cores < 2:
        return Check(
            "cores", "warn", found, "Two ranks take turns on one core: everything works, half as fast."
        )
    return Check("cores", "ok", found)


def _memory() -> Check:
    available = min(psutil.virtual_memory().available, machine.memory_bytes())
    found = f"{available / GIB:.1f} GiB available of {machine.memory_bytes() / GIB:.1f}"
    if available < 2 * GIB:
        return Check(
            "memory", "warn", found, "Each rank holds torch and its part of the model; close other programs."
        )
    return Check("memory", "ok", found)


def _shared_memory() -> Check:
    """Asynchronous saves and data loaders hand tensors over in /dev/shm; a full one is a bus error."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check(
            "/dev/shm", "warn", "is not there", "Asynchronous checkpoints need it; use Linux for them."
        )
    total = shutil.disk_usage(folder).total
    if total < GIB:
        advice = (
            "Give it 1 GiB: `docker run --shm-size 1g`, or in Kubernetes an emptyDir of medium Memory there."
        )
        return Check("/dev/shm", "warn", f"{total / GIB:.2f} GiB", advice)
    return Check("/dev/shm", "ok", f"{total / GIB:.1f} GiB")


def _port() -> Check:
    try:
        return Check("port", "ok", f"{spawn.free_port()} is free, and is one that the kernel hands to nobody")
    except RunError as error:
        return Check("port", "fail", str(error))


def _pods() -> Check:
    """Whether emulated pods can be kept apart as those of a cluster are."""
    if reason := sandbox.why_not():
        advice = (
            "Lessons on pods work all the same, but a pod's network cannot fail by itself; root on Linux can."
        )
        return Check("pods", "warn", f"processes alone: {reason}", advice)
    return Check("pods", "ok", "each can have its own network, processes and /dev/shm")


def _space(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"{folder} is not writable", "Choose another folder with --out.")
    if free < GIB:
        return Check(
            "disk",
            "warn",
            found,
            "A run keeps several checkpoints: choose a small --size, or another folder with --out.",
        )
    return Check("disk", "ok", found)


def _fsync(folder: Path) -> Check:
    """What a durable write costs there: every rank waits for it in a synchronous save."""
    try:
        rate, small = _measure(folder)
    except OSError as error:
        return Check(
            "fsync", "fail", f"a durable write to {folder} fails: {error.strerror}", "See `df` and `mount`."
        )
    found = f"{rate / 1e6:.0f} MB/s durable, {small * 1e3:.1f} ms for a small file"
    if small > 0.1 or rate < 20e6:
        return Check(
            "fsync", "warn", found, "Checkpoints will stall training visibly; a local disk is faster."
        )
    return Check("fsync", "ok", found)


def _measure(folder: Path, size: int = 32 << 20, times: int = 5) -> tuple[float, float]:
    """Bytes a second for one big durable file, and the median seconds for a small one."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as temporary:
        path = Path(temporary) / "file"
        rate = size / _write(path, os.urandom(size))  # random: some file systems store zeros for nothing
        return rate, statistics.median(_write(path, b"x") for _ in range(times))


def _write(path: Path, content: bytes) -> float:
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
