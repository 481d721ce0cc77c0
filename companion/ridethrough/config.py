"""The job's configuration: one flat, frozen dataclass, the same names on the command line and in files."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass(frozen=True)
class JobConfig:
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

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "configuration") -> JobConfig:
        """Build from plain values; `source` names the file or command in errors.

        Raises:
            UsageError: for an unknown name, a value of the wrong type, or a value out of range.
        """
        hints = typing.get_type_hints(cls)
        known = {f.name for f in dataclasses.fields(cls)}
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


def _check_type(source: str, name: str, value: Any, hint: Any) -> None:
    if typing.get_origin(hint) in (Literal, types.UnionType):
        return  # __post_init__ names the choices
    allowed = (int, float) if hint is float else (hint,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool):
        raise UsageError(f"{source}: {name} = {value!r} should be of type {hint.__name__}")
