"""strace: which operations a process makes in a folder, and a fault at one of them."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

#: What changes files or names, by what it does; the names differ between machines.
CHANGES = {
    "mkdir": {"mkdir", "mkdirat"},
    "create": {"open", "openat", "creat"},
    "write": {"write", "pwrite64", "writev", "pwritev", "ftruncate", "truncate", "fallocate"},
    "fsync": {"fsync", "fdatasync"},
    "rename": {"rename", "renameat", "renameat2"},
    "delete": {"unlink", "unlinkat", "rmdir"},
}
#: What leaves them as they are, but may meet a bad disk.
READS = {
    "open", "openat", "read", "pread64", "getdents64", "stat", "lstat", "fstat", "newfstatat", "statx",
    "statfs", "access", "faccessat", "faccessat2", "close",
}  # fmt: skip
#: What never asks the disk.
HARMLESS = {"lseek", "fcntl", "ioctl", "dup"}

_LINE = re.compile(r"(?P<time>[\d.]+) (?P<call>\w+)\((?P<arguments>.*?)(\) += (?P<result>.*))?")
_NAME = re.compile(r'(?<!AT_FDCWD)<(?P<fd>/[^>]*)>|"(?P<text>[^"]+)"')
_CHANCE = re.compile(r"(?<=saving-)\d{8,}-[0-9a-f]{8}|(?<=step-)\d{8,}(-[0-9a-f]{8})?|(?<=\.json\.)\d+")


@dataclass(frozen=True)
class Operation:
    """One system call of a rank's main thread on files below a folder.

    Attributes:
        call: the system call; `nth` of its kind since the trace began, wherever it went.
        names: the paths in it, relative to the folder (`.` is the folder itself).
        kind: a key of `CHANGES`, or `read`.
        failed: it failed without any help.
    """

    rank: int
    call: str
    nth: int
    names: tuple[str, ...]
    kind: str
    time: float = field(compare=False)
    failed: bool = field(compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.call}({', '.join(self.pattern)})"

    @property
    def pattern(self) -> tuple[str, ...]:
        """The names without what differs from save to save."""
        return tuple(_CHANCE.sub("*", name) for name in self.names)

    @property
    def commits(self) -> bool:
        return self.kind == "rename" and self.pattern == ("saving-*", "step-*")


@contextmanager
def recorded(pids: list[int], folder: Path, logs: Path) -> Iterator[list[Operation]]:
    """The operations that processes `pids` make below `folder` meanwhile, in the order of time."""
    operations: list[Operation] = []
    bases = [logs / f"rank-{rank}" for rank in range(len(pids))]
    with (
        _strace(pids[0], bases[0], "-ff", "-e", "trace=%file,%desc"),
        _strace(pids[1], bases[1], "-ff", "-e", "trace=%file,%desc"),
    ):
        yield operations
    for rank, (pid, base) in enumerate(zip(pids, bases, strict=True)):
        operations += _parse(base.with_name(f"{base.name}.{pid}").read_text(), folder, rank)
        for log in base.parent.glob(f"{base.name}.*"):
            if log.suffix not in (f".{pid}", ".err"):
                assert str(folder) not in log.read_text(), f"{log} is of a thread that no fault would strike"
    operations.sort(key=lambda operation: operation.time)


@contextmanager
def fault(pid: int, at: Operation, effect: str, folder: Path, logs: Path) -> Iterator[list[Operation]]:
    """Let `effect` (`signal=KILL`, `error=EIO`) strike process `pid` when it is about to do `at`.

    Yields a list in which, at the end, the operation that was struck is found.
    """
    log, struck = logs / "fault", list[Operation]()
    options = ("-e", f"trace={at.call}", "-e", f"inject={at.call}:{effect}:when={at.nth}")
    with _strace(pid, log, *options, until_death="KILL" in effect):
        yield struck
    text = log.read_text()
    lines = [line for line in text.splitlines() if line[:1].isdigit()]
    assert len(lines) >= at.nth, f"was not reached: {text[-1000:]}"
    line = lines[at.nth - 1]
    assert line.endswith(("(INJECTED)", " = ?")), f"was not struck: {line}"
    struck += [call for call in _parse(text, folder, at.rank) if call.nth == at.nth]
    # The order in which a folder's files are looked at or deleted is the file system's choice.
    assert [call.kind for call in struck] == [at.kind], f"struck was {line}"
    assert at.kind in ("read", "delete") or struck[0].pattern == at.pattern, f"struck was {line}"


@contextmanager
def _strace(pid: int, log: Path, *options: str, until_death: bool = False) -> Iterator[None]:
    messages = log.with_suffix(".err")
    command = ["strace", "-y", "-ttt", "-s0", "-e", "signal=none", "-o", str(log), *options, "-p", str(pid)]
    with messages.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        deadline = time.monotonic() + 10
        while "attached" not in messages.read_text():
            assert process.poll() is None and time.monotonic() < deadline, (
                f"strace did not attach to {pid} within 10 s: {messages.read_text()}"
            )
            time.sleep(0.005)
        yield
        if until_death:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _parse(text: str, folder: Path, rank: int) -> list[Operation]:
    operations, made = [], dict[str, int]()
    for line in text.splitlines():
        if not (match := _LINE.fullmatch(line)):
            continue
        call, arguments = match["call"], match["arguments"]
        made[call] = made.get(call, 0) + 1
        if names := _names(arguments, folder):
            operations.append(
                Operation(
                    rank,
                    call,
                    made[call],
                    names,
                    _kind(call, arguments),
                    float(match["time"]),
                    failed=(match["result"] or "").startswith("-1"),
                )
            )
    return [operation for operation in operations if operation.kind]


def _names(arguments: str, folder: Path) -> tuple[str, ...]:
    names = [Path(match["fd"] or match["text"]) for match in _NAME.finditer(arguments)]
    if not any(name == folder or folder in name.parents for name in names):
        return ()
    return tuple(str(name.relative_to(folder)) if name.is_absolute() else str(name) for name in names)


def _kind(call: str, arguments: str) -> str:
    if call in CHANGES["create"]:
        return "create" if call == "creat" or re.search(r"O_(CREAT|WRONLY|RDWR|TRUNC)", arguments) else "read"
    for kind, calls in CHANGES.items():
        if call in calls:
            return kind
    assert call in READS | HARMLESS, f"{call}({arguments}): no fault is planned for this system call"
    return "read" if call in READS else ""
