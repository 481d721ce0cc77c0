"""What a job computes and how its ranks are kept alive: flat, frozen dataclasses, the same names on the
command line and in files."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ridethrough.errors import UsageError

#: Model sizes by name: (layers, width, heads). `tiny` has under a million parameters.
SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (2, 128, 4),
    "small": (6, 384, 6),
    "medium": (12, 512, 8),
    "base": (12, 768, 12),
}


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


Config = TypeVar("Config", bound="_Settings")


@dataclass(frozen=True)
class _Settings:
    """What all configurations can do."""

    @classmethod
    def from_dict(cls: type[Config], values: dict[str, Any], source: str = "configuration") -> Config:
        """Build from plain values; `source` names the file or command in errors.

        Raises:
            UsageError: for an unknown name, a value of the wrong type, or a value out of range.
        """
        hints = typing.get_type_hints(cls)
        known = {field.name for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise UsageError(f"{source}: {name!r} is not a setting; known: {', '.join(sorted(known))}")
            _check_type(source, name, value, hints[name])
        try:
            return cls(**values)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `from_dict` takes them."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class JobConfig(_Settings):
    """All that decides what a job computes, and how it protects it.

    On CPUs of one kind, two runs with equal configurations, corpora and world sizes compute the same bytes.
    """

    size: str = _option("tiny", f"model size: {', '.join(SIZES)}")
    steps: int = _option(60, "optimizer steps in the whole run")
    seed: int = _option(0, "seed of the weights, the shuffle and the dropout")
    global_batch: int = _option(8, "sequences a step, over all ranks; must be a multiple of the ranks")
    seq_len: int = _option(96, "tokens in a sequence (one token is one byte)")
    learning_rate: float = _option(1e-3, "peak learning rate")
    warmup_steps: int = _option(10, "steps of linear warm-up before the cosine decay")
    weight_decay: float = _option(0.1, "AdamW's weight decay")
    grad_clip: float = _option(1.0, "largest norm of the whole gradient")
    dropout: float = _option(0.0, "dropout probability; above 0 the job also depends on each rank's RNG")
    data: str = _option("stdlib", "'stdlib' (Python's own source files) or a folder of text files")
    checkpoint_every: int = _option(10, "steps between checkpoints")
    keep: int = _option(3, "committed checkpoints to keep")
    verify_checksums: bool = _option(True, "check every file's SHA-256 before a restore, not its size alone")
    on_save_error: Literal["fail", "warn"] = _option(
        "fail",
        "a failed save ends the run (fail) or is retried at the next interval (warn, at most 3 in a row)",
    )
    when_busy: Literal["wait", "skip"] = _option(
        "wait",
        "a save that is due while one is in flight waits for it (wait) or is left out (skip; never the last)",
    )
    overlap_staging: bool = _option(
        False, "copy the state beside the next step's passes instead of before it (asynchronous saves)"
    )
    device: Literal["auto", "cpu", "cuda"] = _option("auto", "'cpu' (gloo), 'cuda' (NCCL) or what is there")
    threads: int = _option(1, "CPU threads a rank computes with")
    collective_timeout_s: float = _option(60.0, "longest wait in a collective of the training, in s")
    save_timeout_s: float = _option(600.0, "longest wait for the slowest rank's save, in s")

    def __post_init__(self) -> None:
        """Refuse what cannot be trained, one sentence each."""
        if not self.data:
            raise UsageError("data: the name of the folder is empty")
        if self.size not in SIZES:
            raise UsageError(f"size: {self.size!r} is not one of {', '.join(SIZES)}")
        for name in ("steps", "global_batch", "seq_len", "checkpoint_every", "keep", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: {getattr(self, name)} must be at least 1")
        for name, most in (("threads", 1024), ("collective_timeout_s", 1e6), ("save_timeout_s", 1e6)):
            if getattr(self, name) > most:
                raise UsageError(f"{name}: {getattr(self, name)} must be at most {most:,.0f}")
        for name in ("learning_rate", "grad_clip", "collective_timeout_s", "save_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}: {getattr(self, name)} must be above 0 and finite")
        for name in ("seed", "warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}: {getattr(self, name)} must not be negative")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout: {self.dropout} must be in [0, 1)")
        if self.on_save_error not in ("fail", "warn"):
            raise UsageError(f"on_save_error: {self.on_save_error!r} is not 'fail' or 'warn'")
        if self.when_busy not in ("wait", "skip"):
            raise UsageError(f"when_busy: {self.when_busy!r} is not 'wait' or 'skip'")
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device: {self.device!r} is not 'auto', 'cpu' or 'cuda'")

    def share(self, ranks: int) -> int:
        """Sequences of a global batch that each of `ranks` ranks takes.

        Raises:
            UsageError: if they cannot share it equally.
        """
        if self.global_batch % ranks:
            raise UsageError(
                f"global_batch: {self.global_batch} sequences cannot be shared equally by {ranks} ranks; "
                f"choose a multiple of {ranks}"
            )
        return self.global_batch // ranks


@dataclass(frozen=True)
class PodConfig(_Settings):
    """How the containers of a job are started, and started again, on pods of this machine.

    Times of Kubernetes and torchrun are given as they are on a cluster and are waited for `time_scale` times
    as long, so that a lesson takes seconds; torchrun takes whole seconds, at least 1. What was scaled or
    assumed stands in `run.json` and the report.
    """

    launcher: Literal["torchrun"] = _option("torchrun", "what each container runs: torchrun")
    pods: int = _option(2, "pods, each with an equal share of the ranks")
    policy: Literal["each", "index", "gang"] = _option(
        "each",
        "after a container has failed: restart it in its pod, as restartPolicy OnFailure does (each), make "
        "its pod anew, as an Indexed Job does (index), or make all pods anew, as a JobSet can (gang)",
    )
    pod_restarts: int = _option(
        6, "restarts by the policy before the job is given up; with index, of each pod"
    )
    max_restarts: int = _option(3, "restarts of the workers by torchrun itself (its --max-restarts)")
    time_scale: float = _option(0.1, "waits of Kubernetes and torchrun are this many times as long as there")
    assumed_s: float = _option(
        0.0, "what a cluster adds to each new pod (scheduling, image, mounts), in s; scaled and shown apart"
    )
    share_store: bool = _option(
        False, "let torchrun share its rendezvous store with the ranks, as it does by default"
    )
    outage_s: float = _option(20.0, "how long the faults net and slow last, in s, not scaled")
    grace_s: float = _option(30.0, "between SIGTERM and SIGKILL for a pod (terminationGracePeriodSeconds)")
    shm_mb: int = _option(256, "size of each pod's /dev/shm, in MB")
    isolation: Literal["auto", "namespaces", "processes"] = _option(
        "auto",
        "a network, process tree and /dev/shm of its own for each pod (needs root), or processes alone",
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be run, one sentence each."""
        for name, least, most in (
            ("pods", 1, 64),
            ("pod_restarts", 0, 1000),
            ("max_restarts", 0, 1000),
            ("shm_mb", 1, 1 << 20),
        ):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name}: {getattr(self, name)} must be in {least} to {most:,}")
        if not 0 < self.time_scale <= 10:
            raise UsageError(f"time_scale: {self.time_scale} must be above 0 and at most 10")
        for name in ("assumed_s", "outage_s", "grace_s"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise UsageError(f"{name}: {getattr(self, name)} must be in 0 to 1,000,000")
        for name, hint in typing.get_type_hints(type(self)).items():
            choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
            if choices and getattr(self, name) not in choices:
                raise UsageError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(choices)}")

    def share(self, ranks: int) -> int:
        """Ranks in each pod.

        Raises:
            UsageError: if the pods cannot share them equally.
        """
        if ranks % self.pods:
            raise UsageError(f"pods: {ranks} ranks cannot be shared equally by {self.pods} pods")
        return ranks // self.pods


def _check_type(source: str, name: str, value: Any, hint: Any) -> None:
    if typing.get_origin(hint) in (Literal, types.UnionType):
        return  # __post_init__ names the choices
    allowed = (int, float) if hint is float else (hint,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool):
        raise UsageError(f"{source}: {name} = {value!r} should be of type {hint.__name__}")
