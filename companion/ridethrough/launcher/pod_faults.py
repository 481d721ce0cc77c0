"""Faults that befall pods: done when a rank has come to them or somebody asks, mended when time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridethrough import faults
from ridethrough.restart.pods import Pod


@dataclass
class _Outage:
    """A network that is to be mended at some time."""

    pod: Pod
    fault: str
    until: float


class PodFaults:
    """Does what is due, turn by turn.

    Args:
        directory: where faults are asked for.
        outage_s: how long a network stays as a fault has left it, in seconds.
        record: writes an event of the launcher.
        pod_of: the pod that a rank is in.
        drain: begins to drain a pod.
    """

    def __init__(
        self,
        directory: Path,
        outage_s: float,
        record: Callable[..., Any],
        pod_of: Callable[[int], Pod],
        drain: Callable[[Pod], None],
    ) -> None:
        self._directory, self._outage_s = directory, outage_s
        self._record, self._pod_of, self._drain = record, pod_of, drain
        self._outages: list[_Outage] = []
        for stale in faults.take_due(directory):
            stale.done()  # asked for in a launch that is over

    def turn(self) -> None:
        """Do what is asked for, and mend what is due."""
        for due in faults.take_due(self._directory):
            self._do(due.fault, due.source)
            due.done()
        for outage in list(self._outages):
            if time.time() >= outage.until:
                outage.pod.sandbox.mend()
                self._outages.remove(outage)
                self._record("repaired", pod=outage.pod.number, id=outage.fault)

    def forget(self, pod: Pod) -> None:
        """A pod is made anew, and its network with it."""
        self._outages = [outage for outage in self._outages if outage.pod is not pod]

    def _do(self, fault: faults.Fault, source: str) -> None:
        pod = self._pod_of(fault.rank)
        about = {"kind": fault.kind, "id": fault.id, "source": source, "pod": pod.number}
        self._record("fault", rank=fault.rank, step=fault.step, **about)
        if fault.kind == "pod":
            pod.kill()
        elif fault.kind == "pid1":
            pod.freeze()
        elif fault.kind == "drain":
            self._drain(pod)
        else:
            (pod.sandbox.cut if fault.kind == "net" else pod.sandbox.throttle)()
            self._outages.append(_Outage(pod, fault.id, time.time() + self._outage_s))
