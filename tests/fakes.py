"""What tests of the launcher share: how to have its ranks run a fake, and how to wait for what they do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ridethrough import processes
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


# --- what a launch leaves --------------------------------------------------------------------------------

#: A launcher of fake ranks in pods: DIRECTORY SCRIPTS POD-SETTINGS.
LAUNCHER = """
import json, sys
from pathlib import Path
from ridethrough.config import PodConfig
from ridethrough.launch import launch
directory, scripts, pods = Path(sys.argv[1]), sys.argv[2], PodConfig(**json.loads(sys.argv[3]))
launch("fake_rank", (str(directory), scripts), ranks=2, directory=directory, grace_s=1, pods=pods)
"""


def launcher(directory: Path, scripts: dict[str, list[str]], **pods: object) -> subprocess.Popen[str]:
    """A launcher of pods in a process of its own; Ctrl-C for the test isn't for it."""
    command = [sys.executable, "-c", LAUNCHER, str(directory), json.dumps(scripts), json.dumps(pods)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def on_the_machine() -> dict[str, list[str]]:
    """What a pod could leave that has a name on this machine: links, mounts, shared memory."""
    return {
        "links": sorted(name for _, name in socket.if_nameindex()),
        "mounts": sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "shared memory": sorted(path.name for path in Path("/dev/shm").glob("*")),
    }


def carriers(run: Path) -> list[int]:
    """The living processes of all launches of a run."""
    return [pid for event in said(run, "launch") for pid in processes.carriers(event["id"])]
