"""The report of a run: one JSON object with a documented schema, and the same as a table for a terminal.

`report.json` has the keys of `SCHEMA`, all of them, always. Keys may be added within a schema version;
none changes its meaning or goes without a new one.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from ridethrough.events import Event, read_events
from ridethrough.ledger import BUCKETS, RECOVERY, Fault, Ledger, Sign, Span
from ridethrough.run import Run, write_json

VERSION = 1

#: What each key of `report.json` means. `[]` stands for each entry of a list, `*` for any key. Times are in
#: seconds, rounded to a microsecond; rank-seconds are seconds summed over the ranks.
SCHEMA: dict[str, str] = {
    "schema": "version of this description: 1",
    "run": "id of the run",
    "rung": "name of the training script",
    "ranks": "world size asked for at the first launch",
    "config": "the job's configuration",
    "steps": "highest step that all ranks finished",
    "finished": "whether the last launch finished the job",
    "launcher": "how the ranks were started: direct, or torchrun with the settings of its pods and the "
    "isolation that they had (waits of Kubernetes and torchrun are time_scale times what they are on a "
    "cluster; assumed_s is not measured, but what a cluster is assumed to add)",
    "launches": "how many times the run was launched",
    "lives": "how many times the ranks were started, by a launch or by what brought them back in it",
    "losses": "loss by step",
    "losses.*": "loss of the last execution of that step, mean over all ranks; null if it was not finite",
    "recompute_mismatch": "steps that gave another loss when run again on as many ranks: [] is right",
    "weights_sha256": "SHA-256 of the final weights, unsharded, in the order of names; null until finished",
    "state_sha256": "SHA-256 of the whole final state; null until finished",
    "wasted_rank_s": "rank-seconds in all buckets but useful",
    "wall_s": "wall clock that the run held its ranks for: the sum over its launches, from start to end",
    "goodput": "useful rank-seconds, as a share of all, 0 to 1",
    "buckets_s": "rank-seconds by bucket; they sum to wall clock × ranks, launch by launch",
    "buckets_s.useful": "in steps finished for the first time",
    "buckets_s.checkpoint_stall": "in save(), while training waits",
    "buckets_s.detect": "from a fault until the launcher knew",
    "buckets_s.abort": "from then until all ranks were gone, or the rank itself, where it is brought back",
    "buckets_s.restart": "back-off, starting containers and processes, importing, after a loss",
    "buckets_s.rendezvous": "ranks finding each other",
    "buckets_s.build": "making model, optimizer and data",
    "buckets_s.restore": "choosing, checking and loading a checkpoint",
    "buckets_s.recompute": "in steps that had been finished before, or that a fault cut short",
    "buckets_s.idle": "waiting without work",
    "buckets_s.startup": "starting processes and importing, in a launch after none or after a finished one",
    "buckets_s.shutdown": "after the last step",
    "checkpoints": "one entry for each attempt to commit one, in the order of time",
    "checkpoints[].step": "the state after so many finished steps",
    "checkpoints[].stall_s": "how long training waited in save(), on the slowest rank",
    "checkpoints[].durable_s": "from the start of the save to its commit; null without a commit",
    "checkpoints[].bytes": "bytes written, over all ranks",
    "checkpoints[].committed": "whether its commit was recorded: from then on a restart may continue from it",
    "checkpoints[].error": "why not, if the save said so; else null",
    "faults": "each injected fault, and each other loss of the ranks, in the order of time",
    "faults[].kind": "kill, exit, exception, hang, stop, pod, net, slow, drain, pid1; silent (a rank said no "
    "more), pod_exit, gave_up (torchrun); timeout, interrupted, failed, lost if none of these",
    "faults[].rank": "the rank it hit; null if it was not one rank",
    "faults[].step": "the step that rank was in; null outside of steps",
    "faults[].tier": "what brought the run back: torchrun (workers alone), pods (containers too), relaunch; "
    "outlived if nothing had to; null if not yet",
    "faults[].phases_s": "the parts of mttr_s, the mean over the ranks; so far, while mttr_s is null",
    "faults[].phases_s.detect": "from the fault until the launcher knew",
    "faults[].phases_s.abort": "until the rank was gone; until the launcher ended, if it was to start again",
    "faults[].phases_s.restart": "back-off, containers, processes, until the first line of the job",
    "faults[].phases_s.rendezvous": "ranks finding each other",
    "faults[].phases_s.build": "making model, optimizer and data",
    "faults[].phases_s.restore": "choosing, checking and loading a checkpoint",
    "faults[].phases_s.recompute": "steps done again, saves among them, and the first new step",
    "faults[].mttr_s": "from the fault to the first new step finished on all ranks, pauses between launches "
    "left out; null if that has not happened or nothing had to recover",
    "faults[].between_launches_s": "those pauses: how long it took somebody to start the run again",
    "faults[].lost_steps": "finished steps that had to be done again; null until the run has been restored",
    "faults[].first_cause": "what came first, in a sentence",
    "faults[].spread": "all that went wrong in the life of the ranks it hit, the first cause first, then in "
    "the order of time; and what became of containers and of torchrun on the way back",
    "faults[].spread[].after_s": "seconds after the fault",
    "faults[].spread[].rank": "whom it befell; null if it was not one rank",
    "faults[].spread[].pod": "the pod that is, or that rank was in; null where there are no pods",
    "faults[].spread[].how": "injected; raised, killed, exited: by itself; connection, timeout: echoes of "
    "others; silent; ended: because of the rest; pod_exit, gave_up: of a container, of its torchrun",
    "faults[].spread[].text": "the same in a sentence",
    "faults[].wasted_rank_s": "rank-seconds in all buckets but useful, over all ranks, from the fault to the "
    "first new step; so far, while mttr_s is null",
    "faults[].waits_s": "parts of that time in which some pod only waited",
    "faults[].waits_s.backoff": "for Kubernetes' back-off",
    "faults[].waits_s.assumed": "else, for what a cluster is assumed to add to a new pod",
    "device": "what the ranks computed on last: cpu (gloo) or cuda (NCCL); null before they joined",
    "versions": "of Python, of the packages",
    "machine": "what the figures were measured on",
}


def write_report(run: Run) -> dict[str, Any]:
    """Account for a run and write its `report.json`, all at once.

    Raises:
        UsageError: if a line in its events is no event.
    """
    report = build_report(run)
    write_json(run.path / "report.json", report)
    return report


def build_report(run: Run) -> dict[str, Any]:
    """The account of a run that finished, failed or still goes on, as plain JSON values.

    Raises:
        UsageError: if a line in its events is no event.
    """
    events = read_events(run.events)
    ledger = Ledger.of(events)
    steps = {step for life in ledger.lives for step in life.finished_steps}
    return {
        "schema": VERSION,
        "run": run.id,
        "rung": run.rung,
        "ranks": run.ranks,
        "config": run.config.to_dict(),
        "steps": max(steps, default=0),
        "finished": bool(ledger.launches) and ledger.launches[-1].outcome == "finished",
        "launcher": _launcher(run, events),
        "launches": len(ledger.launches),
        "lives": len(ledger.lives),
        "losses": _losses(ledger, steps),
        "recompute_mismatch": _mismatches(ledger),
        **_hashes(events),
        "wasted_rank_s": _round(sum(ledger.buckets_s.values()) - ledger.buckets_s["useful"]),
        "wall_s": _round(ledger.wall_s),
        "goodput": _round(ledger.goodput),
        "buckets_s": {bucket: _round(s) for bucket, s in ledger.buckets_s.items()},
        "checkpoints": list(_checkpoints(ledger)),
        "faults": [_fault(fault) for fault in ledger.faults],
        "device": next((e.attributes.get("device") for e in reversed(events) if e.what == "joined"), None),
        "versions": run.about.get("versions", {}),
        "machine": run.about.get("machine", {}),
    }


def _launcher(run: Run, events: Iterable[Event]) -> dict[str, Any]:
    if run.pods is None:
        return {"launcher": "direct"}
    launches = [event.attributes for event in events if event.what == "launch"]
    asked = run.pods.to_dict()
    return {**asked, "isolation": launches[-1].get("isolation") if launches else None}


def _losses(ledger: Ledger, steps: Iterable[int]) -> dict[str, float | None]:
    last: dict[int | None, float | None] = {}
    for launch in ledger.launches:
        last |= {event.step: event.attributes.get("loss") for event in launch.said("step")}
    return {str(step): _finite(last[step]) for step in sorted(steps)}


def _finite(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def _mismatches(ledger: Ledger) -> list[int]:
    """Equal world sizes only: another one sums in another order, and may differ in the last bits."""
    seen: dict[tuple[int, int], set[str]] = defaultdict(set)
    for launch in ledger.launches:
        for event in launch.said("step"):
            if event.step is not None:
                seen[event.step, launch.ranks].add(repr(event.attributes.get("loss")))
    return sorted({step for (step, _), losses in seen.items() if len(losses) > 1})


def _hashes(events: Iterable[Event]) -> dict[str, str | None]:
    hashes: dict[str, str | None] = {"weights_sha256": None, "state_sha256": None}
    for event in events:
        if event.what == "end" and event.attributes.get("weights_sha256"):
            hashes = {name: event.attributes.get(name) for name in hashes}
    return hashes


def _checkpoints(ledger: Ledger) -> Iterator[dict[str, Any]]:
    stalls: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in ledger.spans:
        if span.bucket == "checkpoint_stall" and span.step is not None:
            stalls[span.generation, span.step].append(span)
    for life in ledger.lives:
        attempts: dict[int, list[Event]] = defaultdict(list)
        for event in life.said("phase", "save", "commit", "save_failed"):
            saving = event.what != "phase" or event.attributes.get("phase") == "checkpoint_stall"
            if saving and event.step is not None:
                attempts[event.step].append(event)
        for step, events in attempts.items():
            yield _checkpoint(step, events, stalls[life.generation, step])


def _checkpoint(step: int, events: list[Event], stalls: list[Span]) -> dict[str, Any]:
    saves = [event.attributes for event in events if event.what == "save"]
    commit = next((event.attributes for event in events if event.what == "commit"), None)
    error = next((event.attributes.get("error") for event in events if event.what == "save_failed"), None)
    # A save that was cut short has no figure of its own; the phases have.
    waits = [save["stall_s"] for save in saves] or [span.seconds for span in stalls]
    return {
        "step": step,
        "stall_s": _round(max(waits, default=0.0)),
        "durable_s": _round(commit["durable_s"]) if commit else None,
        "bytes": commit["bytes"] if commit else sum(save["bytes"] for save in saves),
        "committed": commit is not None,
        "error": None if commit else error,
    }


def _fault(fault: Fault) -> dict[str, Any]:
    return {
        "kind": fault.kind,
        "rank": fault.rank,
        "step": fault.step,
        "tier": fault.tier,
        "phases_s": {part: _round(seconds) for part, seconds in fault.phases_s.items()},
        "mttr_s": None if fault.mttr_s is None else _round(fault.mttr_s),
        "between_launches_s": _round(fault.between_launches_s),
        "lost_steps": fault.lost_steps,
        "first_cause": fault.first_cause,
        "spread": [_sign(sign, fault.t) for sign in fault.spread],
        "wasted_rank_s": _round(fault.wasted_rank_s),
        "waits_s": {"backoff": _round(fault.backoff_s), "assumed": _round(fault.assumed_s)},
    }


def _sign(sign: Sign, since: float) -> dict[str, Any]:
    return {
        "after_s": _round(sign.t - since),
        "rank": sign.rank,
        "pod": sign.pod,
        "how": sign.how,
        "text": sign.text,
    }


def _round(seconds: float) -> float:
    return round(seconds, 6)


# --- for a terminal --------------------------------------------------------------------------------------

_WIDTH = 100
_SHOWN = 12


def format_report(report: dict[str, Any], gpus: int | None = None) -> str:
    """A report as plain text, at most 100 columns wide; takes what `report.json` holds.

    Args:
        report: the report.
        gpus: say also how many GPU-hours were wasted if each rank stood for an equal share of so many GPUs.
    """
    parts = [_head(report), _time(report, gpus), _checkpoint_table(report), _fault_list(report, gpus)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _head(report: dict[str, Any]) -> list[str]:
    state = "finished" if report["finished"] else "not finished"
    ranks, launches = _count(report["ranks"], "rank"), _count(report["launches"], "launch", "launches")
    if report["lives"] != report["launches"]:
        launches += f", {_count(report['lives'], 'life', 'lives')} of the ranks"
    steps = f"{report['steps']} of {report['config']['steps']} steps"
    lines = [
        f"{report['rung']} on {ranks}: {steps}, {state}, {launches}",
        f"wall clock {report['wall_s']:.2f} s, goodput {report['goodput']:.1%}",
        *_pods(report["launcher"]),
    ]
    if report["losses"]:
        step, loss = list(report["losses"].items())[-1]
        lines.append(f"loss {'not finite' if loss is None else f'{loss:.4f}'} at step {step}")
    if report["weights_sha256"]:
        lines.append(f"weights {report['weights_sha256']}")
    if report["recompute_mismatch"]:
        steps = ", ".join(map(str, report["recompute_mismatch"]))
        lines += _wrap(f"NOT REPEATABLE: run again, these steps gave another loss: {steps}", "")
    return lines


def _pods(launcher: dict[str, Any]) -> list[str]:
    """How pods ran, and what is not as on a cluster."""
    if launcher["launcher"] == "direct":
        return []
    pods, scale = _count(launcher["pods"], "pod"), launcher["time_scale"]
    how = f"{launcher['launcher']} in {pods} ({launcher['isolation']}), restart policy {launcher['policy']}"
    waits = "" if scale == 1 else f", waits × {scale:g}"
    assumed = launcher["assumed_s"]
    return _wrap(how + waits + (f", {assumed:g} s assumed for each new pod" if assumed else ""), "")


def _time(report: dict[str, Any], gpus: int | None) -> list[str]:
    buckets = report["buckets_s"]
    total = sum(buckets.values())
    lines = [f"{'time':<20}{'rank-seconds':>14}{'share':>9}"]
    for bucket in BUCKETS:
        if buckets[bucket]:
            lines.append(f"  {bucket:<18}{buckets[bucket]:>14.2f}{buckets[bucket] / total:>9.1%}")
    lines.append(f"  {'total':<18}{total:>14.2f}{1 if total else 0:>9.1%}")
    return lines if gpus is None else [*lines, f"  {_bill(report['wasted_rank_s'], report, gpus)}"]


def _bill(wasted_rank_s: float, report: dict[str, Any], gpus: int) -> str:
    hours = wasted_rank_s / report["ranks"] * gpus / 3600
    return f"wasted {wasted_rank_s:.2f} rank-seconds; on {_count(gpus, 'GPU')} {hours:,.2f} GPU-hours"


def _checkpoint_table(report: dict[str, Any]) -> list[str]:
    rows = report["checkpoints"]
    if not rows:
        return []
    lines = [f"{'checkpoints':<14}{'stall s':>10}{'durable s':>12}{'MB':>12}"]
    if len(rows) > _SHOWN:
        lines.append(f"  (the first {len(rows) - _SHOWN} are in report.json)")
    for row in rows[-_SHOWN:]:
        durable = "-" if row["durable_s"] is None else f"{row['durable_s']:.3f}"
        figures = f"  step {row['step']:<7}{row['stall_s']:>10.3f}{durable:>12}{row['bytes'] / 1e6:>12.3f}"
        lines.append(figures + ("" if row["committed"] else "   not committed"))
        if row["error"]:
            lines += _wrap(row["error"], "    ")
    return lines


def _fault_list(report: dict[str, Any], gpus: int | None) -> list[str]:
    lines = ["faults"] if report["faults"] else []
    for fault in report["faults"]:
        where = "" if fault["rank"] is None else f" on rank {fault['rank']}"
        when = "" if fault["step"] is None else f" in step {fault['step']}"
        lines += _wrap(f"{fault['kind']}{where}{when}: {_outcome(fault)}", "  ")
        parts = [f"{part} {fault['phases_s'][part]:.2f}" for part in RECOVERY if fault["phases_s"][part]]
        lines += _wrap("seconds: " + ", ".join(parts), "    ") if parts else []
        lines += _waits(fault["waits_s"], report["launcher"])
        lines += _wrap(f"first cause: {fault['first_cause']}", "    ")
        lines += _spread(fault)
        if gpus is not None and fault["tier"] != "outlived":
            lines.append(f"    {_bill(fault['wasted_rank_s'], report, gpus)}")
    return lines


def _waits(waits: dict[str, float], launcher: dict[str, Any]) -> list[str]:
    """What of a recovery was not work, and how long it would be on a cluster."""
    scale = launcher.get("time_scale", 1)
    names = {"backoff": "back-off", "assumed": "assumed for new pods"}
    parts = [
        f"{waits[wait]:.2f} s {name}" + ("" if scale == 1 else f" ({waits[wait] / scale:.0f} s × {scale:g})")
        for wait, name in names.items()
        if waits[wait]
    ]
    return _wrap(f"of which {', '.join(parts)}", "    ") if parts else []


def _spread(fault: dict[str, Any]) -> list[str]:
    """What came of the first cause, in the order of time."""
    signs = [sign for sign in fault["spread"] if sign["text"] != fault["first_cause"]]
    lines: list[str] = []
    for sign in signs[:_SHOWN]:
        lines += textwrap.wrap(
            f"{sign['after_s']:+.2f} s  {sign['text']}",
            _WIDTH,
            initial_indent="      ",
            subsequent_indent=" " * 16,
        )
    if len(signs) > _SHOWN:
        lines.append(f"      ({len(signs) - _SHOWN} more are in report.json)")
    return lines


def _outcome(fault: dict[str, Any]) -> str:
    if fault["tier"] == "outlived":
        return "outlived, nothing had to recover"
    lost = "" if fault["lost_steps"] is None else f", {_count(fault['lost_steps'], 'step')} lost"
    if fault["mttr_s"] is None:
        return f"{fault['tier']}, no new step since{lost}" if fault["tier"] else f"not recovered{lost}"
    pause = f" + {fault['between_launches_s']:.2f} s between launches" if fault["between_launches_s"] else ""
    return f"{fault['tier']}, back in {fault['mttr_s']:.2f} s{pause}{lost}"


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")
