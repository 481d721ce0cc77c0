"""What a fault cost: how it spread, which part of the recovery took how long, the bill.

All of it is read from reports, so runs can be compared long after they were made. A run stands for its first
fault that was not outlived: what went wrong later may well have come of that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from ridethrough.errors import UsageError
from ridethrough.lab.parts import axes, bucket_legend, draw_bars, name_rows
from ridethrough.lab.show import Markdown, table
from ridethrough.ledger import RECOVERY

Report = Mapping[str, Any]  # what `report.json` holds
Fault = Mapping[str, Any]  # an entry of its `faults`


def spread(fault: Fault) -> Markdown:
    """How a fault went from rank to rank: the first cause first, then in the order of time.

    Args:
        fault: an entry of `faults` in a `report.json`.
    """
    return table(
        [
            {
                "after (s)": round(sign["after_s"], 2),
                "who": _who(sign["rank"], sign["pod"]),
                "how": sign["how"].replace("_", " "),
                "what": sign["text"],
            }
            for sign in fault["spread"]
        ]
    )


def recovery_bars(reports: Mapping[str, Report]) -> Figure:
    """What the recovery from each run's first fault was made of, with the MTTR at the end of each bar.

    Where a run has not recovered, the bar shows how its time has passed since.

    Args:
        reports: what to call a run → its `report.json`.
    """
    faults = [_first(report) for report in reports.values()]
    phases: list[dict[str, float]] = [fault["phases_s"] if fault else {} for fault in faults]
    with axes(height=1.2 + 0.45 * len(reports)) as (figure, ax):
        for row, (fault, parts) in enumerate(zip(faults, phases, strict=True)):
            left = 0.0
            for part in RECOVERY:
                draw_bars(ax, part, [(left, left + parts.get(part, 0.0), row)])
                left += parts.get(part, 0.0)
            ax.annotate(
                _total(fault, left), (left, row), (4, 0), textcoords="offset points", va="center", fontsize=9
            )
        longest = max((sum(parts.values()) for parts in phases), default=0.0)
        ax.set(xlabel="seconds from the fault to the first new step", xlim=(0, longest or 1))
        name_rows(ax, list(reports))
        bucket_legend(figure, {part for parts in phases for part, seconds in parts.items() if seconds})
    return figure


def bill(
    reports: Mapping[str, Report], *, gpus: int, dollars_per_gpu_hour: float, faults_a_day: float
) -> list[dict[str, object]]:
    """What a fault like each run's first one would cost on a cluster, as rows for `table`.

    Each rank of the run stands for an equal share of the GPUs. There are no figures for a run that has not
    recovered.

    Args:
        reports: what to call a run → its `report.json`.
        gpus: how many GPUs the job would hold.
        dollars_per_gpu_hour: what one of them costs.
        faults_a_day: how many such faults a day brings on so many GPUs.

    Raises:
        UsageError: for an argument that is no amount.
    """
    _check(gpus=gpus, dollars_per_gpu_hour=dollars_per_gpu_hour, faults_a_day=faults_a_day)
    rows: list[dict[str, object]] = []
    for name, report in reports.items():
        fault = _first(report) or {}
        mttr, wasted = fault.get("mttr_s"), fault.get("wasted_rank_s")
        hours = None if mttr is None or wasted is None else wasted / report["ranks"] * gpus / 3600
        daily = None if hours is None else hours * faults_a_day
        rows.append(
            {
                "run": name,
                "MTTR (s)": mttr,
                "of it assumed (s)": fault.get("waits_s", {}).get("assumed"),
                "wasted rank-seconds": None if mttr is None else wasted,
                "GPU-hours a fault": hours,
                "GPU-hours a day": daily,
                "$ a day": None if daily is None else daily * dollars_per_gpu_hour,
            }
        )
    return rows


def _first(report: Report) -> Fault | None:
    return next((fault for fault in report["faults"] if fault["tier"] != "outlived"), None)


def _who(rank: int | None, pod: int | None) -> str:
    names = [f"{what} {number}" for what, number in (("rank", rank), ("pod", pod)) if number is not None]
    return ", ".join(names) or "all"


def _total(fault: Fault | None, seconds: float) -> str:
    """The figure at the end of a bar, with what is not measured or not in it."""
    if fault is None:
        return "no fault"
    if fault["mttr_s"] is None:
        return f"not recovered after {seconds:.1f} s"
    assumed, pause = fault.get("waits_s", {}).get("assumed", 0.0), fault["between_launches_s"]
    text = f"{fault['mttr_s']:.1f} s"
    text += f", {assumed:.1f} s of it assumed" if assumed else ""
    return text + (f" + {pause:.1f} s between launches" if pause else "")


def _check(**amounts: float) -> None:
    for name, value in amounts.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise UsageError(f"{name}: {value!r} must be a number, 0 or more")
        if name == "gpus" and (value < 1 or value != int(value)):
            raise UsageError(f"gpus: {value!r} must be a whole number, 1 or more")
