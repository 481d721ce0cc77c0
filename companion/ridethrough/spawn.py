"""A rank or a container as a process: its environment, its port, its output, its end."""

from __future__ import annotations

import errno
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ridethrough import processes
from ridethrough.errors import RunError

#: Settings of the calling process that say who *it* is, or how it computes: none of a rank's business.
#: A notebook, a test or a torchrun around us has its own.
FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PET_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("PYTEST_", "JPY_", "JUPYTER_", "IPY", "MPLBACKEND", "PAPERMILL_"),
)

#: Lines of a rank that wait to be shown before the rank itself has to wait.
_BACKLOG = 10_000

#: Last lines of a rank's output that an error repeats.
_TAIL = 20


def environment(base: Mapping[str, str], *, token: str, threads: int) -> dict[str, str]:
    """What every process of a launch gets: `base` without what is foreign, and how to compute and talk.

    Args:
        base: the environment of the launcher.
        token: the launch.
        threads: CPU threads a rank.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(FOREIGN)}
    warnings = [kept.get("PYTHONWARNINGS"), "ignore::FutureWarning"]  # torch's note on pynvml, once a rank
    return {
        **kept,
        "TORCH_CPP_LOG_LEVEL": kept.get("TORCH_CPP_LOG_LEVEL", "error"),
        "GLOO_SOCKET_IFNAME": loopback(),  # all ranks are here, whatever a cluster's setting says
        "TORCH_FR_BUFFER_SIZE": kept.get("TORCH_FR_BUFFER_SIZE", "2000"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": kept.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        "PYTHONWARNINGS": ",".join(filter(None, warnings)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        processes.TOKEN: token,
    }


def rank_environment(*, rank: int, ranks: int, port: int, generation: int) -> dict[str, str]:
    """What `torch.distributed` asks for, for a rank that this launcher starts itself."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RIDETHROUGH_GENERATION": str(generation),
        "RIDETHROUGH_LAUNCHER_PID": str(os.getpid()),
    }


def loopback() -> str:
    """The name of this machine's loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def free_port() -> int:
    """A free TCP port below those that the kernel hands out itself, so that no client socket takes it.

    Raises:
        RunError: if there is none.
    """
    candidates = list(range(20_000, max(_first_ephemeral(), 20_100)))
    random.SystemRandom().shuffle(candidates)  # two launchers at once look at different ports first
    for port in candidates[:200]:
        if is_free(port):
            return port
    raise RunError(f"no free port between 20000 and {max(candidates)}; see `ss -lt` for who holds them")


def _first_ephemeral() -> int:
    settings = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(settings.read_text().split()[0]) if settings.exists() else 32_768


def is_free(port: int) -> bool:
    """Whether nobody listens on a TCP port, on any address of this machine."""
    return all(_can_listen(family, port) for family in (socket.AF_INET, socket.AF_INET6))


def _can_listen(family: socket.AddressFamily, port: int) -> bool:
    """Whether `port` can be bound; a family that the machine hasn't got is in nobody's way."""
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return True
    with listener:
        try:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(("", port))
        except OSError as error:
            return family == socket.AF_INET6 and error.errno != errno.EADDRINUSE
    return True


class Process:
    """A started rank or container. Its output goes to its log, line by line, and into a queue to be shown.

    Args:
        number: which rank or pod it is.
        command: what to run.
        environment: all of its environment.
        log: the file to which its output is appended.
        header: what the log says first.
        lines: gets (number, line) for each line of output.
    """

    def __init__(
        self,
        number: int,
        command: list[str],
        environment: Mapping[str, str],
        log: Path,
        header: str,
        lines: queue.Queue[tuple[int, str]],
    ) -> None:
        self.number, self.log = number, log
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.code: int | None = None
        self.ended_at: float | None = None
        self._lines = lines
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the launcher, and the whole group can be ended
        )
        self.pid = self._process.pid
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self._header = f"--- {header}, process {self.pid}, {started}: {' '.join(command)}\n"
        self._reader = threading.Thread(target=self._read, name=f"output-{number}", daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: the signal), else None; its children end with it."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code, self.ended_at = code, time.time()
            processes.end_group(self.pid)
        return self.code

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        if self.code is None:
            self._process.terminate()

    def kill(self, within_s: float = processes.SWEEP_S) -> None:
        """End it and its children now, and take note of the exit code; stopped and hung ones too."""
        if self.code is None:
            processes.end_group(self.pid)
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: the guard reports it
                self._process.wait(within_s)
            self.poll()

    @property
    def talking(self) -> bool:
        """Whether more output may come: also true if a stray process holds the pipe open."""
        return self._reader.is_alive()

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with pipe, _Log(self.log) as log:
            log.write(self._header.encode(errors="surrogateescape"))  # a path may be no Unicode
            for line in iter(lambda: pipe.readline(1 << 16), b""):
                log.write(line)
                self._show(line.decode(errors="replace").rstrip("\n"))
            if log.error:
                self._show(f"the launcher could not write {self.log}: {log.error}")

    def _show(self, line: str) -> None:
        self.tail.append(line)
        self._lines.put((self.number, line))


class _Log:
    """A log that stops at its first error: whoever reads a pipe has to go on, or the writer stands still."""

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._path = path
        self._fd = -1

    def __enter__(self) -> _Log:
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            self.error = error
        return self

    def write(self, data: bytes) -> None:
        if self.error is None:
            try:
                os.write(self._fd, data)
            except OSError as error:
                self.error = error

    def __exit__(self, *exception: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def output_queue() -> queue.Queue[tuple[int, str]]:
    """What the ranks or containers of a launch print: (number, line)."""
    return queue.Queue(_BACKLOG)


def python_module(module: str, arguments: tuple[str, ...]) -> list[str]:
    """The command that runs a module with this Python."""
    return [sys.executable, "-m", module, *arguments]
