"""Every kind of fault, done to real ranks in pods: is the first cause named, is the result the same to the
byte, and how long does it take.

The seconds are of this machine, with waits scaled as the policy says; what they are for is to be compared
with one another. The first cause is asked for twice: from all events, and from what is left when those that
announce the fault are taken away, as in production nobody announces one.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ridethrough import faults, machine
from ridethrough.config import PodConfig
from ridethrough.errors import RunError
from ridethrough.events import read_events
from ridethrough.launch import run_rung
from ridethrough.ledger import Ledger

#: The job: long enough for a checkpoint before the fault and steps to do again after it.
JOB: dict[str, Any] = {"steps": 16, "checkpoint_every": 8, "collective_timeout_s": 4.0}
STEP = 12

#: How long the faults of the network last, in seconds: longer than a collective waits for a network that is
#: cut, and a moment for one that is slow.
OUTAGE_S = {"net": 8.0, "slow": 2.0}

#: Longest time that one run may take, in seconds.
TIMEOUT_S = 180.0


def run(directory: Path, kinds: Sequence[str], policy: str, rounds: int) -> dict[str, Any]:
    """Do each kind of fault `rounds` times, to rank 1 and rank 0 in turn; leaves nothing in `directory`.

    Returns:
        `kinds` (kind → counts and seconds), the policy, and the machine.

    Raises:
        RunError: if a run does not come back, or comes back as something else.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="drills-", dir=directory) as folder:
        reference = run_rung("sync", out=Path(folder) / "reference", quiet=True, **JOB)
        drills = {
            kind: [_drill(Path(folder), kind, policy, number, reference) for number in range(rounds)]
            for kind in kinds
        }
    about = machine.about(["drills"])
    found = {kind: _summary(samples) for kind, samples in drills.items()}
    return {"schema": 1, "part": "drills", "policy": policy, "rounds": rounds, "kinds": found, **about}


def _drill(folder: Path, kind: str, policy: str, number: int, reference: dict[str, Any]) -> dict[str, Any]:
    """One run with one fault."""
    fault = f"{kind}@{STEP}:{(number + 1) % 2}"
    pods = PodConfig.from_dict({"policy": policy, "outage_s": OUTAGE_S.get(kind, 0.0)})
    out = folder / f"{kind}-{number}"
    report = run_rung("sync", out=out, faults=[fault], pods=pods, timeout_s=TIMEOUT_S, quiet=True, **JOB)
    for key in ("losses", "weights_sha256", "state_sha256"):
        if report[key] != reference[key]:
            raise RunError(f"{fault} under {policy}: {key} differs from that of the run without a fault")
    (told,) = report["faults"]
    return {
        "named": f"injected {fault}" in told["first_cause"]
        or f"InjectedFault: {fault}" in told["first_cause"],
        "found": _found(out, faults.parse(fault)),
        "tier": told["tier"],
        "mttr_s": told["mttr_s"],
        "phases_s": told["phases_s"],
        "wasted_rank_s": told["wasted_rank_s"],
    }


def _found(out: Path, fault: faults.Fault) -> bool | None:
    """Whether the rank is named without the events that announce the fault; None if nothing was lost."""
    silent = [event for event in read_events(out / "events") if event.what != "fault"]
    losses = [life.loss for life in Ledger.of(silent).lives if life.loss]
    return losses[0].rank == fault.rank if losses else None


def _summary(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [sample["mttr_s"] for sample in samples if sample["mttr_s"] is not None]
    found = [sample["found"] for sample in samples if sample["found"] is not None]
    return {
        "runs": len(samples),
        "named": sum(sample["named"] for sample in samples),
        "lost": len(found),
        "found_unannounced": sum(found),
        "tiers": sorted({sample["tier"] for sample in samples}),
        "mttr_s": _spread(seconds) if seconds else None,
        "wasted_rank_s": statistics.fmean(sample["wasted_rank_s"] for sample in samples),
        "samples": list(samples),
    }


def _spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
    }


def format_result(result: dict[str, Any]) -> str:
    """A table for the terminal."""
    lines = [
        f"restart policy {result['policy']}, {result['rounds']} runs a kind; {result['machine']['cpu']}",
        "",
        f"{'fault':12}{'named':>8}{'unannounced':>14}{'back by':>12}{'MTTR in s: median (min to max)':>34}",
    ]
    for kind, found in result["kinds"].items():
        s = found["mttr_s"]
        span = f"{s['median']:.2f} ({s['min']:.2f} to {s['max']:.2f})" if s else "nothing had to recover"
        named, unannounced = (
            f"{found['named']}/{found['runs']}",
            f"{found['found_unannounced']}/{found['lost']}",
        )
        lines.append(f"{kind:12}{named:>8}{unannounced:>14}{', '.join(found['tiers']):>12}{span:>34}")
    return "\n".join(lines)
