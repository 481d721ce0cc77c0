"""Which processes belong to a launch, and how none of them is left behind.

Each rank carries its launch's token in its environment, and whatever it starts inherits it, even in
another session or after its parent has died. So "the processes of this launch" is a question that can be
asked of the operating system at any time, by anyone.

Run as a program, this module is the *guard* of one launch: it waits until the launcher closes its pipe,
on purpose or by dying from SIGKILL, and then ends whatever still carries the token. A rank asking the
kernel to be killed with its parent (`PR_SET_PDEATHSIG`) would not do: that signal follows the thread
that started the rank, works on Linux alone, and never reaches what the rank has started itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ridethrough.errors import RunError

#: Environment variable that holds the token of the launch.
TOKEN = "RIDETHROUGH_LAUNCH"

#: Environment variable that holds the number of the pod, in the containers of one.
POD = "RIDETHROUGH_POD"

#: Seconds after which a process that SIGKILL does not end is given up (it hangs in the kernel).
SWEEP_S = 5.0

#: Seconds between two looks at whether the parent still lives, where the kernel does not tell.
WATCH_S = 0.25
_PR_SET_PDEATHSIG = 1


def carriers(token: str, marks: Mapping[str, str] | None = None) -> list[int]:
    """Process ids of all living processes of the launch `token`, grandchildren included.

    Args:
        token: the launch.
        marks: other environment variables that they must have, with these values.
    """
    wanted = {TOKEN: token, **(marks or {})}.items()
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, a zombie, or another user's
            if wanted <= process.environ().items():
                found.append(process.pid)
    return found


def is_rank(pid: int, token: str, rank: int) -> bool:
    """Whether process `pid` is alive and really is rank `rank` of launch `token`, not a reused number."""
    try:
        environment: dict[str, str] = psutil.Process(pid).environ()
    except psutil.Error:
        return False
    return environment.get(TOKEN) == token and environment.get("RANK") == str(rank)


def led(token: str, launcher: int) -> bool:
    """Whether the launcher of the launch `token` lives: a process of it has that process as its parent."""
    for pid in carriers(token):
        with suppress(psutil.Error):
            if psutil.Process(pid).ppid() == launcher:
                return True
    return False


def end_group(group: int) -> None:
    """SIGKILL a whole process group; nothing happens if it has gone."""
    if group != os.getpgrp():
        with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            os.killpg(group, signal.SIGKILL)


def sweep(token: str, within_s: float = SWEEP_S, marks: Mapping[str, str] | None = None) -> list[int]:
    """SIGKILL all `carriers` with their groups; returns those still there after `within_s`."""
    deadline = time.monotonic() + within_s
    while (left := carriers(token, marks)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                end_group(os.getpgid(pid))
        time.sleep(0.02)
    return left


@contextmanager
def guard(token: str, scratch: Path) -> Iterator[None]:
    """Hold while a launch lives: on leaving, or if this process dies, every process of it is ended.

    Args:
        token: the launch.
        scratch: a folder for its temporary files, made now and removed after that.

    Raises:
        RunError: on leaving, if a process of the launch could not be ended; names its id.
    """
    scratch.mkdir(mode=0o700)
    guardian = subprocess.Popen(
        [sys.executable, "-m", __name__, token, str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C or a SIGKILL for the launcher's group must not take it along
    )
    try:
        yield
    finally:
        answer, _ = guardian.communicate(timeout=SWEEP_S + 25)
        left = json.loads(answer) if guardian.returncode == 0 else _end(token, scratch)
        if left:
            raise RunError(
                f"processes {left} of this launch do not end, not even by SIGKILL; see `ps -o stat,wchan`"
            )


def die_with(parent: int, by_main_thread: bool) -> None:
    """See that this process, which `parent` has just started, ends when `parent` does, whatever ends it.

    The kernel's signal comes at once, also to a process that is stopped, but it is Linux's and follows the
    thread that started this process, so it is asked for only if that was the main thread.
    """
    if sys.platform == "linux" and by_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)


def _end(token: str, scratch: Path) -> list[int]:
    left = sweep(token)
    shutil.rmtree(scratch, ignore_errors=True)
    return left


if __name__ == "__main__":
    sys.stdin.read()
    left_over = _end(sys.argv[1], Path(sys.argv[2]))
    with suppress(BrokenPipeError):  # a launcher that was killed does not hear the answer
        print(json.dumps(left_over), flush=True)
    os._exit(0)
