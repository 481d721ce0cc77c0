"""The frame around a rung's `train`: what every rank process does before and after."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ridethrough.errors import RunError, UsageError
from ridethrough.events import EventLog
from ridethrough.job.flight import dump
from ridethrough.run import Run


def rank_main(train: Callable[[Run, EventLog], None]) -> None:
    """Run `train` as the rank that the environment says this process is; the run directory is its argument.

    An exception is written to the events and printed before the process ends with code 1. It ends at once:
    taking the process group down in an orderly way would wait for ranks that may be gone.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {sys.modules['__main__'].__spec__.name} RUN_DIRECTORY")  # type: ignore[union-attr]
    try:
        run, rank = Run.open(Path(sys.argv[1])), _rank()
    except UsageError as error:
        print(f"ridethrough: {error}", file=sys.stderr)
        sys.exit(2)
    generation = os.environ.get("RIDETHROUGH_GENERATION")
    events = run.log(f"rank-{rank}", rank, None if generation is None else int(generation))
    events.phase("startup")
    own = events.next_generation()  # asked before a rank that fails early has begun one
    try:
        _check_launcher()
        train(run, events)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it goes into the events and ends the rank
        _fail(run, events, own, error)
    events.close()


def _rank() -> int:
    try:
        return int(os.environ["RANK"])
    except (KeyError, ValueError):
        raise UsageError(
            "RANK is not set: start ranks with `ridethrough run`, torchrun or ft_launcher"
        ) from None


def _check_launcher() -> None:
    """A launcher that was killed while this rank was still starting will never look after it."""
    launcher = os.environ.get("RIDETHROUGH_LAUNCHER_PID")
    if launcher and int(launcher) != os.getppid():
        raise RunError(f"the launcher (pid {launcher}) is gone")


def _fail(run: Run, events: EventLog, generation: int, error: BaseException) -> NoReturn:
    text = "".join(traceback.format_exception(error))
    try:
        print(text, file=sys.stderr, flush=True)
        events.emit("error", type=type(error).__name__, message=str(error), traceback=text)
        events.begin(generation)  # if it failed before the ranks could agree on one
        if flight := dump(run.path, f"{events.name}-g{events.generation}"):
            events.emit("flight", **flight)
        sys.stdout.flush()
    finally:  # also when the disk is full or nobody reads the output any more
        os._exit(1)
