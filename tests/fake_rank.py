"""A rank without torch, for tests of the launcher: it does what a script says and speaks as a rung does.

    python -m fake_rank DIRECTORY '{"0": ["step 1", "sleep 60"], "1": ["raise"], "1@0": ["exit 3"]}'

A script may be for one life of the rank only, counted from 0. A rank without a script, or at the end of one,
emits `end` and leaves.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

from fake_rung import life
from ridethrough.events import EventLog
from ridethrough.faults import FaultInjector

RANK = int(os.environ["RANK"])
DIRECTORY = Path(sys.argv[1])


def _deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _note_sigterm() -> None:
    def handler(number: int, frame: object) -> None:
        (DIRECTORY / f"sigterm-{RANK}").touch()
        os._exit(3)

    signal.signal(signal.SIGTERM, handler)


def _child(new_session: bool) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=new_session)
    (DIRECTORY / f"child-{RANK}").write_text(str(child.pid))


def _raise_when_gone(rank: int) -> None:
    """Like a peer whose connection breaks: at once, long before anyone has looked at the process."""
    file = DIRECTORY / f"pid-{rank}"
    while not file.exists() or not file.read_text():
        time.sleep(0.001)
    fd = os.pidfd_open(int(file.read_text()))
    import select

    select.select([fd], [], [])
    raise ConnectionError("connection reset by peer")


def _inject(kind: str, events: EventLog) -> None:
    """As a rung does, once in all lives."""
    run = SimpleNamespace(faults_dir=DIRECTORY / "faults", faults=[f"{kind}@1:{RANK}"])
    FaultInjector(run, RANK, events).at_step(1)


def act(word: str, events: EventLog) -> None:
    verb, _, rest = word.partition(" ")
    if verb == "step":
        events.phase("step", int(rest))
        events.emit("step", step=int(rest), loss=1.0)
    elif verb == "enter":
        events.phase("step", int(rest))
    elif verb == "phase":
        events.phase(rest)
    elif verb == "fault":
        events.emit("fault", step=2, kind="kill", id=f"kill@2:{RANK}", source="inside")
    elif verb == "inject":
        _inject(rest, events)
    elif verb == "print":
        print(rest)
    elif verb == "raise":
        raise ValueError("the fake is broken")
    elif verb == "say-error":
        events.emit("error", type="ValueError", message="stuck at the door", traceback="ValueError\n")
    elif verb == "exit":
        os._exit(int(rest))
    elif verb == "signal":
        os.kill(os.getpid(), signal.Signals[rest])
    elif verb == "sleep":
        time.sleep(float(rest))
    elif verb == "end-and-hang":
        events.emit("end", steps=1, weights_sha256=None, state_sha256=None)
        _deaf()
        time.sleep(60)
    elif verb == "deaf":
        _deaf()
    elif verb == "note-sigterm":
        _note_sigterm()
    elif verb == "child":
        _child(new_session=rest == "stray")
    elif verb == "pid":
        (DIRECTORY / f"pid-{RANK}").write_text(str(os.getpid()))
    elif verb == "raise-when-gone":
        _raise_when_gone(int(rest))
    elif verb == "environment":
        (DIRECTORY / f"environment-{RANK}.json").write_text(json.dumps(dict(os.environ)))
    elif verb == "listen":
        listener = socket.create_server(("", int(os.environ["MASTER_PORT"])))
        (DIRECTORY / "port").write_text(str(listener.getsockname()[1]))
        globals()["listener"] = listener
    else:
        raise AssertionError(f"the fake knows no {verb!r}")


def main() -> None:
    generation = life(DIRECTORY / "events", RANK)
    events = EventLog(DIRECTORY / "events", f"rank-{RANK}", RANK, generation)
    events.phase("startup")
    scripts = json.loads(sys.argv[2])
    try:
        for word in scripts.get(f"{RANK}@{generation}", scripts.get(str(RANK), [])):
            if word == "leave":
                return
            act(word, events)
    except Exception as error:
        text = traceback.format_exc()
        events.emit("error", type=type(error).__name__, message=str(error), traceback=text)
        raise
    events.emit("end", steps=0, weights_sha256=None, state_sha256=None)


if __name__ == "__main__":
    main()
