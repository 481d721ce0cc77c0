"""The errors that reach a person: each is one sentence that says what is wrong and what to do."""

from __future__ import annotations


class UsageError(ValueError):
    """Bad input: a flag, a configuration value, a path. The command line exits with code 2."""


class RunError(RuntimeError):
    """A run failed: a rank died, raised or ran out of time. The command line exits with code 1."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, verified or restored. Names the rank, the file and the cause.

    Attributes:
        step: the step whose save failed, if that is not the one just made.
    """

    step: int | None = None
