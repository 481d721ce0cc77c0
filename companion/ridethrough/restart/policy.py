"""What Kubernetes does when a container has failed: which pods it starts again, and how long it waits.

The delays are Kubernetes' own. The kubelet restarts a container at once the first time, then after 10, 20,
40 s … and at most 300 s, and forgets after 10 minutes without a failure. The Job controller makes a failed
pod anew after 10, 20, 40 s … and at most 360 s, and with `backoffLimitPerIndex` counts for each index alone.
A JobSet whose `maxRestarts` is above 0 makes all pods anew, without a delay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ridethrough.config import PodConfig

_FIRST_S = 10.0
_CONTAINER_MOST_S = 300.0
_POD_MOST_S = 360.0
_FORGOTTEN_S = 600.0


@dataclass(frozen=True)
class Restart:
    """What to do about a failure.

    Attributes:
        pods: the pods to start again; any of them that still runs is ended first.
        recreate: whether they become new pods, with new addresses, or only their containers are started.
        backoff_s: how long Kubernetes waits first, already scaled, in seconds.
        assumed_s: what a real cluster is assumed to need for a new pod on top, already scaled, in seconds.
    """

    pods: tuple[int, ...]
    recreate: bool
    backoff_s: float
    assumed_s: float


class Policy:
    """Decides, failure by failure.

    Args:
        config: the policy and its figures.
    """

    def __init__(self, config: PodConfig) -> None:
        self._config = config
        self._failures: Counter[int] = Counter()  # of each pod, for the delay
        self._restarts: Counter[int | None] = Counter()  # of each index, or (None) of the job, for the limit

    def failed(self, pod: int, ran_s: float, gone: bool = False) -> Restart | None:
        """The answer to the failure of a pod; None if the job, or this index of it, has no restart left.

        Args:
            pod: which one.
            ran_s: how long its container had run, in seconds.
            gone: whether the pod itself is lost, as on a drained node, so that a new one is needed anyway.
        """
        config, scale = self._config, self._config.time_scale
        counted = pod if config.policy == "index" else None
        self._restarts[counted] += 1
        if self._restarts[counted] > config.pod_restarts:
            return None
        if config.policy == "gang":
            return Restart(tuple(range(config.pods)), True, 0.0, config.assumed_s * scale)
        if config.policy == "each" and ran_s > _FORGOTTEN_S * scale:
            self._failures[pod] = 0
        self._failures[pod] += 1
        if config.policy == "index":
            backoff = _delay(self._failures[pod], _POD_MOST_S)
            return Restart((pod,), True, backoff * scale, config.assumed_s * scale)
        if gone:
            self._failures[pod] = 0  # the kubelet's count goes with the pod
            return Restart((pod,), True, 0.0, config.assumed_s * scale)
        backoff = _delay(self._failures[pod] - 1, _CONTAINER_MOST_S)
        return Restart((pod,), False, backoff * scale, 0.0)


def _delay(failures: int, most_s: float) -> float:
    """0 before the first counted failure, then 10 s, doubled with each."""
    return min(most_s, _FIRST_S * 2 ** (failures - 1)) if failures else 0.0
