"""Pods of this machine: containers that run, fail, are killed and start again, as under a kubelet."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ridethrough import processes
from ridethrough.errors import RunError
from ridethrough.restart.sandbox import Sandbox, Sandboxes
from ridethrough.spawn import Process


class Pod:
    """One pod: what it has for itself, and the container that runs in it.

    Args:
        number: which pod, from 0.
        sandboxes: where its surroundings come from.
        environment: the environment of its containers.
        scratch: gets the pod's TMPDIR; somebody else removes it.
        log: the file to which its containers' output is appended.
        lines: gets (pod, line) for each line of output.

    Attributes:
        sandbox: its surroundings.
        attempt: counts its containers from 0; -1 before the first.
        container: the newest container.
        started_at: when that was started, seconds since the epoch.
        running: whether it has started and `poll` has not seen its end.
    """

    def __init__(
        self,
        number: int,
        sandboxes: Sandboxes,
        environment: Mapping[str, str],
        scratch: Path,
        log: Path,
        lines: queue.Queue[tuple[int, str]],
    ) -> None:
        self.number, self.attempt, self.started_at = number, -1, 0.0
        self.container: Process | None = None
        self.running = False
        self._sandboxes, self._log, self._lines = sandboxes, log, lines
        self._token = environment[processes.TOKEN]
        self._temporary = scratch / f"pod-{number}"
        self._temporary.mkdir()
        self._environment = {
            **environment,
            processes.POD: str(number),
            "TMPDIR": str(self._temporary),
            "JOB_COMPLETION_INDEX": str(number),
        }
        self.sandbox: Sandbox = sandboxes.make(number)

    def recreate(self) -> None:
        """Replace the pod, whose container has ended, by a new one."""
        self.sandbox.close()
        shutil.rmtree(self._temporary, ignore_errors=True)  # as an emptyDir it outlives containers, not pods
        self._temporary.mkdir(exist_ok=True)
        self.sandbox = self._sandboxes.make(self.number)

    def start(self, command: list[str]) -> None:
        """Start a container that runs `command`."""
        self.attempt += 1
        self.started_at = time.time()
        environment = {
            **self._environment,
            "GLOO_SOCKET_IFNAME": self.sandbox.interface,
            "NCCL_SOCKET_IFNAME": self.sandbox.interface,
            "POD_IP": self.sandbox.address,
        }
        header = f"pod {self.number}, container {self.attempt}"
        self.container = Process(
            self.number, self.sandbox.command(command), environment, self._log, header, self._lines
        )
        self.running = True

    def poll(self) -> int | None:
        """The container's exit code, once, when it has ended (negative: a signal); else None.

        Nothing that it has started outlives it; process namespaces see to that, and without them we do.
        """
        if not self.running:
            return None
        assert self.container
        if (code := self.container.poll()) is not None:
            self.running = False
            self._sweep()
        return code

    def terminate(self) -> None:
        """Ask the container to end: SIGTERM to its first process, as the kubelet does."""
        self._signal(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop the container's first process; what it has started goes on."""
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        """End the container, all of it and at once."""
        if self.running:
            assert self.container
            self.container.kill()
            self._sweep()

    def close(self) -> None:
        """End the pod."""
        self.kill()
        self.sandbox.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            assert self.container
            first = self.sandbox.first_process(self.container.pid)
            with suppress(ProcessLookupError):
                os.kill(first or self.container.pid, number)

    def _sweep(self) -> None:
        if left := processes.sweep(self._token, marks={processes.POD: str(self.number)}):
            raise RunError(f"processes {left} of pod {self.number} do not end, not even by SIGKILL")
