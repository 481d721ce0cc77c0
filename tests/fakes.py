"""What tests of the launcher share: how to have its ranks run a fake, and how to wait for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ridethrough.events import Event, read_events
from ridethrough.rungs import RUNGS


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks find the modules `fake_rank` and `fake_rung`, and make the latter the rung `fake`."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setitem(RUNGS, "fake", "fake_rung")


def write_text(folder: Path) -> str:
    """A folder of text to train on, which takes no time to read."""
    folder.mkdir()
    (folder / "a.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    return str(folder)


def said(run: Path, *whats: str) -> list[Event]:
    """The events of a run, of some sorts, oldest first."""
    return [event for event in read_events(run / "events") if event.what in whats]


def going_on(run: Path) -> bool:
    """Whether both ranks have made their second step."""
    return sum(event.step == 2 for event in said(run, "step")) == 2


def wait_for(true: Callable[[], object], what: str, within_s: float = 20) -> None:
    """Wait until something is true, or fail saying what it was."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"waited {within_s} s in vain for {what}"
        time.sleep(0.02)
