"""What a job asks of whatever saves and restores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Resumable(Protocol):
    """State that can be saved and continued from: a flat mapping of names to tensors, and its step."""

    step: int

    def state_dict(self) -> dict[str, Tensor]:
        """Name → live tensor, the same names on every restart."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from these tensors, most of them loaded in place already."""
        ...

    def held_until_update(self) -> set[str]:
        """Names of the tensors that only the optimizer's update changes: a copy may take until then."""
        ...


@dataclass(frozen=True)
class Restored:
    """What a restore did.

    Attributes:
        step: finished steps of the restored checkpoint; 0 is a fresh start.
        skipped: newer checkpoints that were passed over, as (step, reason).
    """

    step: int
    skipped: tuple[tuple[int, str], ...] = ()


class Checkpointer(Protocol):
    """Saves and restores a job. All ranks call each method together, at the same step."""

    @property
    def busy(self) -> bool:
        """Whether a save is not known to be durable yet; on all ranks the same."""
        return False

    def restore(self, state: Resumable) -> Restored:
        """Load the newest good checkpoint into `state`, or leave it fresh if none was ever committed."""
        ...

    def save(self, state: Resumable) -> int:
        """Save `state` as it is now; returns the bytes this rank writes."""
        ...

    def poll(self, wait: bool = False) -> None:
        """Hear what became of the save in flight, if any; call it after each step.

        Args:
            wait: until it is durable, or has failed.

        Raises:
            CheckpointError: on every rank, if it failed.
        """
        return

    def before_update(self) -> None:
        """Wait until the optimizer may change the weights; call it just before that."""
        return

    def close(self) -> None:
        """Finish what is in flight; nothing of the checkpointer outlives this."""
        ...
