"""A rung without torch, for tests: real run directory, real events, real faults; a file for a checkpoint.

As with a collective, no rank begins a step before all have made the one before.
"""

import hashlib
import os
import sys
import time
import traceback
from pathlib import Path

from ridethrough.faults import FaultInjector
from ridethrough.run import Run


def wait_for_all(directory: Path, step: int, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    for rank in range(int(os.environ["WORLD_SIZE"])):
        file = directory / f"saved-{rank}"
        while not file.exists() or int(file.read_text() or 0) < step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {within_s} s for rank {rank} to make step {step}")
            time.sleep(0.002)


def life(events: Path, rank: int) -> int:
    """Which life of the ranks this is: the launcher says it, or else each rank counts its own."""
    if (said := os.environ.get("RIDETHROUGH_GENERATION")) is not None:
        return int(said)
    newest = max(int(path.name.split("-g")[1].split("-")[0]) for path in events.glob("launcher-g*"))
    own = [int(path.name.split("-g")[1].split("-")[0]) for path in events.glob(f"rank-{rank}-g*")]
    return max([newest, *(generation + 1 for generation in own)])


def main() -> None:
    run, rank = Run.open(Path(sys.argv[1])), int(os.environ["RANK"])
    events = run.log(f"rank-{rank}", rank, life(run.events, rank))
    events.phase("startup")
    run.checkpoints.mkdir(exist_ok=True)
    saved = run.checkpoints / f"saved-{rank}"
    try:
        faults = FaultInjector(run, rank, events)
        faults.install()
        first = int(saved.read_text()) + 1 if saved.exists() else 1
        events.emit("restored", step=first - 1, skipped=[])
        for step in range(first, run.config.steps + 1):
            events.phase("step", step)
            faults.at_step(step)
            time.sleep(float(os.environ.get("FAKE_STEP_S", "0.005")))
            if step == 3 and os.environ.get("FAKE_NATIVE_CALL"):
                events.phase("idle", step)
                hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # no signal handler runs in this one call
            events.emit("step", step=step, loss=1 / step)
            saved.write_text(str(step))
            wait_for_all(run.checkpoints, step)
    except BaseException as error:
        text = traceback.format_exc()
        events.emit("error", type=type(error).__name__, message=str(error), traceback=text)
        raise
    events.phase("shutdown")
    events.emit("end", steps=run.config.steps, weights_sha256="w", state_sha256="s")


if __name__ == "__main__":
    main()
