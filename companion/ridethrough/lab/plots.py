"""Figures of a run: where its time went, what each save cost, how the loss fell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ridethrough.lab.style import HATCH_INK, INK, LINES, LOOKS, style
from ridethrough.ledger import BUCKETS, Fault, Launch, Ledger, Span


def timeline(ledger: Ledger) -> Figure:
    """One lane a rank, coloured by bucket, with a mark at each fault.

    Launches stand side by side: the pause between two of them, when nobody holds the ranks, takes no room.
    """
    shift = _shifts(ledger.launches)
    ranks = 1 + max((span.rank for span in ledger.spans), default=0)
    with _axes(height=1.2 + 0.5 * ranks) as (figure, ax):
        for span in _merged(ledger.spans):
            _bar(ax, span.bucket, span.rank, span.seconds, span.start + shift[span.generation])
        for launch in ledger.launches[1:]:
            ax.axvline(launch.start + shift[launch.generation], color=INK, linewidth=1, linestyle=":")
        for fault in ledger.faults:
            _mark(ax, fault, fault.t + shift[fault.generation])
        ax.set(xlabel="seconds for which the run held its ranks", xlim=(0, ledger.wall_s or 1))
        _rows(ax, [f"rank {rank}" for rank in range(ranks)])
        _bucket_legend(figure, {span.bucket for span in ledger.spans})
    return figure


def stall_plot(ledger: Ledger) -> Figure:
    """How long each save kept each rank from training; a save that was repeated shows twice."""
    saves: dict[tuple[int, int | None], dict[int, float]] = {}
    for span in ledger.spans:
        if span.bucket == "checkpoint_stall":
            by_rank = saves.setdefault((span.generation, span.step), {})
            by_rank[span.rank] = by_rank.get(span.rank, 0.0) + span.seconds
    ranks = sorted({rank for by_rank in saves.values() for rank in by_rank})
    with _axes() as (figure, ax):
        width = 0.8 / max(len(ranks), 1)
        for place, (rank, (colour, _, _)) in enumerate(zip(ranks, cycle(LINES), strict=False)):
            x = [save + (place - (len(ranks) - 1) / 2) * width for save in range(len(saves))]
            milliseconds = [1000 * by_rank.get(rank, 0.0) for by_rank in saves.values()]
            bars = ax.bar(x, milliseconds, width, label=f"rank {rank}", color=colour)
            for bar in bars:
                bar.set(hatch="////" if place % 2 else "", edgecolor=HATCH_INK, linewidth=0)
        ax.set(xlabel="checkpoint after step", ylabel="stall (ms)")
        ax.set_xticks(range(len(saves)), [str(step) for _, step in saves])
        _line_legend(figure, ax)
    return figure


def buckets_bar(reports: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Where the rank-seconds of some runs went, in per cent of each run.

    Args:
        reports: what to call a run → its `report.json`.
    """
    with _axes(height=1.2 + 0.45 * len(reports)) as (figure, ax):
        for row, report in enumerate(reports.values()):
            total, left = sum(report["buckets_s"].values()) or 1.0, 0.0
            for bucket in BUCKETS:
                share = 100 * report["buckets_s"][bucket] / total
                _bar(ax, bucket, row, share, left)
                left += share
        ax.set(xlabel="% of all rank-seconds", xlim=(0, 100))
        _rows(ax, list(reports))
        _bucket_legend(figure, {b for report in reports.values() for b in BUCKETS if report["buckets_s"][b]})
    return figure


def losses(reports: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The loss after each step of some runs; those of equal runs lie on one another.

    Args:
        reports: what to call a run → its `report.json`.
    """
    with _axes() as (figure, ax):
        for (name, report), (colour, width, dashes) in zip(reports.items(), cycle(LINES), strict=False):
            points = sorted((int(step), loss) for step, loss in report["losses"].items())
            steps = [step for step, _ in points]
            values = [math.nan if loss is None else loss for _, loss in points]
            ax.plot(steps, values, color=colour, linewidth=width, linestyle=dashes, label=name)
        ax.set(xlabel="step", ylabel="loss (nats per byte)")
        _line_legend(figure, ax)
    return figure


@contextmanager
def _axes(height: float = 3.0) -> Iterator[tuple[Figure, Axes]]:
    with style():
        figure, ax = plt.subplots(figsize=(7.0, height))
        yield figure, ax
        plt.close(figure)  # pyplot forgets it, so a cell that ends with it shows it once


def _shifts(launches: Sequence[Launch]) -> dict[int, float]:
    """Generation → what to add to a time in it, so that the first launch starts at 0 and no pause shows."""
    shifts, held = {}, 0.0
    for launch in launches:
        shifts[launch.generation] = held - launch.start
        held += launch.end - launch.start
    return shifts


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Neighbours in one bucket as one: a hundred steps are one bar, not a hundred."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last and (last.rank, last.generation, last.bucket) == (span.rank, span.generation, span.bucket):
            merged[-1] = replace(last, end=span.end)
        else:
            merged.append(span)
    return merged


def _bar(ax: Axes, bucket: str, row: int, length: float, left: float) -> None:
    look = LOOKS[bucket]
    ax.barh(row, length, 0.6, left, color=look.colour, hatch=look.hatch, edgecolor=HATCH_INK, linewidth=0)


def _mark(ax: Axes, fault: Fault, x: float) -> None:
    row = (fault.rank or 0) - 0.36
    text = fault.kind if fault.step is None else f"{fault.kind}, step {fault.step}"
    ax.plot([x], [row], marker="v", color=INK, clip_on=False)
    ax.annotate(text, (x, row), xytext=(5, 2), textcoords="offset points", fontsize=8)


def _rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.7)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _bucket_legend(figure: Figure, shown: set[str]) -> None:
    patches = [
        Patch(facecolor=LOOKS[b].colour, hatch=LOOKS[b].hatch, edgecolor=HATCH_INK, linewidth=0, label=b)
        for b in BUCKETS
        if b in shown
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4)


def _line_legend(figure: Figure, ax: Axes) -> None:
    ax.grid(axis="y")
    handles, _ = ax.get_legend_handles_labels()
    if handles:
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
