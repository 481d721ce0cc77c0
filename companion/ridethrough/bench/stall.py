"""How long a checkpoint keeps a rank from training, as a ratio to the least that it could take.

Seconds on a shared machine swing by factors; ratios to a floor measured just before, in the same process,
hold still. Two floors: copying this rank's bytes in memory, which no snapshot can beat, and writing them to a
file and flushing it, which no synchronous save can beat. All arms run in one process group, in turn, in
rounds. An arm is reported only if it is isolated: what it saved is the state at the save, whatever came
after. On CPUs only, so far: a GPU's copies run beside the thread that asks for them, and need other clocks.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridethrough import machine
from ridethrough.config import JobConfig
from ridethrough.errors import RunError
from ridethrough.events import Event, read_events
from ridethrough.job.corpus import load_corpus
from ridethrough.launch import launch
from ridethrough.run import Run

#: Longest time a benchmark may take, in seconds.
TIMEOUT_S = 1800.0


def run(directory: Path, size: str, ranks: int, rounds: int, repetitions: int) -> dict[str, Any]:
    """Measure on `ranks` new ranks, writing below `directory`; leaves nothing there.

    Returns:
        `arms` (arm → seconds and ratios), the ratios by name, every sample, and the machine.

    Raises:
        RunError: if a rank fails, or an arm turns out not to be isolated.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = JobConfig(size=size, steps=1, keep=1, global_batch=2 * ranks, device="cpu")
    plan = {"rounds": rounds, "repetitions": repetitions}
    about = {**machine.about(["stall"]), "corpus": load_corpus(config.data).describe(), "bench": plan}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as folder:
        made = Run.create(Path(folder) / "run", "bench", ranks, config, (), about)
        launch(
            "ridethrough.bench.stall_rank",
            (str(made.path),),
            ranks=ranks,
            directory=made.path,
            timeout_s=TIMEOUT_S,
            threads=config.threads,
        )
        return {"schema": 1, "part": "stall", **plan, **_summary(read_events(made.events), ranks), **about}


def _summary(events: list[Event], ranks: int) -> dict[str, Any]:
    """Ratios of the slowest rank's time in each sample to the slowest rank's floor of that sample."""
    torn = sorted({e["arm"] for e in events if e.what == "isolation" and not e["isolated"]})
    if torn:
        raise RunError(f"not isolated, so not reported: {', '.join(torn)}")
    samples: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        if event.what == "sample":
            samples.setdefault((event["arm"], event["number"]), []).append(event)
    rows = [_sample(arm, number, parts, ranks) for (arm, number), parts in samples.items()]
    arms = {
        arm: _arm([row for row in rows if row["arm"] == arm]) for arm in dict.fromkeys(r["arm"] for r in rows)
    }
    bytes_a_rank = max(e["bytes"] for e in events if e.what == "sample")
    return {
        "ranks": ranks,
        "bytes_a_rank": bytes_a_rank,
        "arms": arms,
        "sync_over_memcpy": arms["sync"]["over_memcpy"]["median"],
        "sync_over_raw_fsync": arms["sync"]["seconds"]["median"] / arms["raw_fsync"]["seconds"]["median"],
        "samples": rows,
    }


def _sample(arm: str, number: int, parts: list[Event], ranks: int) -> dict[str, Any]:
    if len(parts) != ranks:
        raise RunError(f"sample {number} of {arm} was taken by {len(parts)} of {ranks} ranks")
    seconds, floor = max(p["seconds"] for p in parts), max(p["floor_s"] for p in parts)
    cpu = max(p["cpu_s"] / p["floor_cpu_s"] for p in parts)
    return {
        "arm": arm, "number": number, "seconds": seconds, "floor_s": floor,
        "over_memcpy": seconds / floor, "cpu_over_memcpy": cpu,
    }  # fmt: skip


def _arm(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {key: _spread([row[key] for row in rows]) for key in ("seconds", "over_memcpy", "cpu_over_memcpy")}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def format_result(result: dict[str, Any]) -> str:
    """A table for the terminal."""
    lines = [
        f"{result['bytes_a_rank'] / 1e6:.0f} MB a rank, {result['ranks']} ranks, "
        f"{result['rounds']} rounds of {result['repetitions']}; {result['machine']['cpu']}",
        "",
        f"{'arm':12}{'seconds: median (min to max)':>32}{'÷ memcpy':>12}{'CPU ÷ memcpy':>16}",
    ]
    for arm, values in result["arms"].items():
        s = values["seconds"]
        span = f"{s['median']:.3f} ({s['min']:.3f} to {s['max']:.3f})"
        ratio, cpu = values["over_memcpy"]["median"], values["cpu_over_memcpy"]["median"]
        lines.append(f"{arm:12}{span:>32}{ratio:>12.1f}{cpu:>16.1f}")
    lines += [
        "",
        f"a synchronous save takes {result['sync_over_raw_fsync']:.1f} times as long as its bytes need",
    ]
    return "\n".join(lines)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a call in this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - wall, time.thread_time() - cpu


def write_and_flush(file: Path, parts: list[memoryview]) -> None:
    """The least that makes bytes durable: write them to a new file, in large pieces, and flush it."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for part in parts:
            while part:
                part = part[os.write(fd, part) :]
        os.fsync(fd)
    finally:
        os.close(fd)
