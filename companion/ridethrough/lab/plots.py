"""Figures of a run: what each save cost, where its time went, how the loss fell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from typing import Any

from matplotlib.figure import Figure

from ridethrough.lab.parts import axes, bucket_legend, draw_bars, line_legend, name_rows
from ridethrough.lab.style import HATCH_INK, LINES
from ridethrough.ledger import BUCKETS, Ledger


def stall_plot(ledger: Ledger) -> Figure:
    """How long each save kept each rank from training; a save that was repeated shows twice."""
    saves: dict[tuple[int, int | None], dict[int, float]] = {}
    for span in ledger.spans:
        if span.bucket == "checkpoint_stall":
            by_rank = saves.setdefault((span.generation, span.step), {})
            by_rank[span.rank] = by_rank.get(span.rank, 0.0) + span.seconds
    ranks = sorted({rank for by_rank in saves.values() for rank in by_rank})
    with axes() as (figure, ax):
        width = 0.8 / max(len(ranks), 1)
        for place, (rank, (colour, _, _)) in enumerate(zip(ranks, cycle(LINES), strict=False)):
            x = [save + (place - (len(ranks) - 1) / 2) * width for save in range(len(saves))]
            milliseconds = [1000 * by_rank.get(rank, 0.0) for by_rank in saves.values()]
            bars = ax.bar(x, milliseconds, width, label=f"rank {rank}", color=colour)
            for bar in bars:
                bar.set(hatch="////" if place % 2 else "", edgecolor=HATCH_INK, linewidth=0)
        ax.set(xlabel="checkpoint after step", ylabel="stall (ms)")
        ax.set_xticks(range(len(saves)), [str(step) for _, step in saves])
        line_legend(figure, ax)
    return figure


def buckets_bar(reports: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Where the rank-seconds of some runs went, in per cent of each run.

    Args:
        reports: what to call a run → its `report.json`.
    """
    with axes(height=1.2 + 0.45 * len(reports)) as (figure, ax):
        for row, report in enumerate(reports.values()):
            total, left = sum(report["buckets_s"].values()) or 1.0, 0.0
            for bucket in BUCKETS:
                share = 100 * report["buckets_s"][bucket] / total
                draw_bars(ax, bucket, [(left, left + share, row)])
                left += share
        ax.set(xlabel="% of all rank-seconds", xlim=(0, 100))
        name_rows(ax, list(reports))
        bucket_legend(figure, {b for report in reports.values() for b in BUCKETS if report["buckets_s"][b]})
    return figure


def losses(reports: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The loss after each step of some runs; those of equal runs lie on one another.

    Args:
        reports: what to call a run → its `report.json`.
    """
    with axes() as (figure, ax):
        for (name, report), (colour, width, dashes) in zip(reports.items(), cycle(LINES), strict=False):
            points = sorted((int(step), loss) for step, loss in report["losses"].items())
            steps = [step for step, _ in points]
            values = [math.nan if loss is None else loss for _, loss in points]
            ax.plot(steps, values, color=colour, linewidth=width, linestyle=dashes, label=name)
        ax.set(xlabel="step", ylabel="loss (nats per byte)")
        line_legend(figure, ax)
    return figure
