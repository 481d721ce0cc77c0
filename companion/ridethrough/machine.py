"""What a run ran on: versions and hardware, asked without importing anything heavy.

A run records this in its `run.json`, so that a figure read later still says where it was measured.
No host or user name is taken: a report may be published.
"""

from __future__ import annotations

import os
import platform
import re
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

#: Distributions whose version decides how a run behaves.
PACKAGES = ("ridethrough", "torch", "nvidia-resiliency-ext", "numpy")


def about(command: list[str]) -> dict[str, Any]:
    """All that `run.json` says of where a run comes from: `created`, `command`, `versions`, `machine`."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"created": created, "command": command, "versions": versions(), "machine": machine()}


def versions() -> dict[str, str | None]:
    """Version of Python, of the C library and of each of `PACKAGES`; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "glibc": glibc()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Platform, CPU model, usable cores and memory in bytes."""
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
    }


def glibc() -> str | None:
    """Version of the GNU C library, which decides the wheels that pip may take; None elsewhere."""
    name, number = platform.libc_ver()
    return number if name == "glibc" else None


def cpu_model() -> str:
    """The processor's name, as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def cores() -> float:
    """Cores this process may use: those it is bound to, or fewer by the container's CPU limit."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _cgroup("cpu.max").partition(" ")
    return min(bound, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else bound


def memory_bytes() -> int:
    """Memory this process may use: the machine's, or the container's limit if that is lower."""
    total = int(psutil.virtual_memory().total)
    limit = _cgroup("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def available_bytes() -> int:
    """Memory this process could still take: of the machine's, or of the container's limit."""
    free = int(psutil.virtual_memory().available)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if not (limit.isdigit() and used.isdigit()):
        return free
    cached = re.search(r"^inactive_file (\d+)$", _cgroup("memory.stat"), re.M)
    return min(free, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def _cgroup(name: str) -> str:
    """A limit of this container (cgroup v2), or an empty string where there is none."""
    file = Path("/sys/fs/cgroup") / name
    return file.read_text().strip() if file.exists() else ""
