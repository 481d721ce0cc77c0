"""The timeline of a run: what each rank did with each second, and what went wrong when."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation

from ridethrough.errors import UsageError
from ridethrough.lab.parts import Bar, axes, bucket_legend, draw_bars, name_rows
from ridethrough.lab.style import DARK_INK, INK
from ridethrough.ledger import Fault, Ledger

_TALLEST_IN = 9.0  # what a page or a screen shows at once
_LINE_PT = 12.0  # from one line of labels to the next
_TICK = 1e-6  # how exact sums of times since the epoch are, in seconds


@dataclass(frozen=True)
class _Flag:
    """A fault as it is drawn: a pole from its label down to its lane."""

    x: float
    rank: int | None
    text: str


def timeline(ledger: Ledger, *, window: tuple[float, float] | Fault | None = None) -> Figure:
    """One lane a rank, coloured by bucket, with a flag at each fault and a mark in the lane of its rank.

    Launches stand side by side: the pause between two of them, when nobody holds the ranks, takes no room.

    Args:
        ledger: the account of the run.
        window: the part to show: from and to in seconds for which the run held its ranks, or one of its
            faults, shown with the recovery from it; seconds are then counted from the fault.

    Raises:
        UsageError: for a window in which there is nothing, or for a fault of another run.
    """
    shifts = _shifts(ledger)
    start, end, zero = _view(ledger, shifts, window)
    bars = _bars(ledger, shifts, start, end, zero)
    ranks = 1 + max((span.rank for span in ledger.spans), default=0)
    faults = [(fault.t + shifts[fault.generation], fault) for fault in ledger.faults]
    with axes(height=1.2 + _lanes_in(ranks)) as (figure, ax):
        for bucket, some in bars.items():
            draw_bars(ax, bucket, some, _bar_height(ranks))
        _name_lanes(ax, ranks)
        since = "since the fault" if isinstance(window, Fault) else "for which the run held its ranks"
        ax.set(xlabel=f"seconds {since}", xlim=(start - zero, end - zero))
        for launch in ledger.launches[1:]:
            x = launch.start + shifts[launch.generation] - zero
            ax.axvline(x, color=DARK_INK, linewidth=1, linestyle=":", path_effects=_CASED)
        bucket_legend(figure, bars)
        _raise_flags(
            figure,
            ax,
            _flags([(t - zero, fault) for t, fault in faults if start - _TICK <= t <= end + _TICK]),
        )
    return figure


# --- what is to be seen ----------------------------------------------------------------------------------


def _shifts(ledger: Ledger) -> dict[int, float]:
    """Generation → what to add to a time in it, so that the first launch starts at 0 and no pause shows.

    A launch may hold several lives of the ranks, each a generation: they lie between its own and the next's.
    """
    held, by_launch = 0.0, []
    for launch in ledger.launches:
        by_launch.append(held - launch.start)
        held += launch.end - launch.start
    firsts = [launch.generation for launch in ledger.launches]
    lives = {*firsts, *(span.generation for span in ledger.spans), *(f.generation for f in ledger.faults)}
    return {life: by_launch[max(0, bisect_right(firsts, life) - 1)] for life in lives}


def _view(
    ledger: Ledger, shifts: dict[int, float], window: tuple[float, float] | Fault | None
) -> tuple[float, float, float]:
    """From when to when, and which instant is called 0."""
    whole = ledger.wall_s or 1.0
    if isinstance(window, Fault):
        if window not in ledger.faults:
            raise UsageError("window: this is a fault of another run; take one of the ledger's `faults`")
        zero = window.t + shifts[window.generation]
        length = window.mttr_s or sum(window.phases_s.values())
        margin = 0.15 * length or 0.05 * whole
        return max(0.0, zero - margin), min(whole, zero + length + margin), zero
    start, end = window or (0.0, whole)
    if not (start < end and start < whole and end > 0):
        raise UsageError(f"window: {start:g} to {end:g} s shows nothing of a run of {whole:.3g} s")
    return start, end, 0.0


def _bars(
    ledger: Ledger, shifts: dict[int, float], start: float, end: float, zero: float
) -> dict[str, list[Bar]]:
    """The bars of each bucket that are in view. Neighbours are one: a hundred steps are one bar."""
    bars: dict[str, list[Bar]] = defaultdict(list)
    before = None
    for span in ledger.spans:
        shift = shifts[span.generation]
        left, right = max(start, span.start + shift) - zero, min(end, span.end + shift) - zero
        if left >= right:
            continue
        some = bars[span.bucket]
        if before == (span.rank, span.bucket) and some[-1][1] >= left:
            left = some.pop()[0]
        some.append((left, right, span.rank))
        before = (span.rank, span.bucket)
    return bars


def _flags(faults: Sequence[tuple[float, Fault]]) -> list[_Flag]:
    """The faults in view; where there are many, the mark alone says on which rank each was."""
    flags = []
    for x, fault in faults:
        where = [] if fault.rank is None else [f"rank {fault.rank}"]
        where += [] if fault.step is None else [f"step {fault.step}"]
        cost = "not recovered" if fault.mttr_s is None else f"back in {fault.mttr_s:.1f} s"
        cost = "outlived" if fault.tier == "outlived" else cost
        name = ", ".join([fault.kind, *where] if len(faults) <= 4 else [fault.kind])
        flags.append(_Flag(x, fault.rank, f"{name}: {cost}"))
    return flags


# --- lanes -----------------------------------------------------------------------------------------------


def _lanes_in(ranks: int) -> float:
    """The height of all lanes, in inches: half an inch each while there are few, then less and less."""
    return min(0.5 * ranks, 2.0 + 0.08 * max(0, ranks - 4), 6.8)


def _bar_height(ranks: int) -> float:
    """Lanes too thin to be told apart touch, so that a hatch has room over many of them."""
    return 0.6 if ranks <= 8 else 0.8 if ranks <= 16 else 1.0


def _name_lanes(ax: Axes, ranks: int) -> None:
    name_rows(ax, [f"rank {rank}" for rank in range(ranks)])
    ax.set_ylim(top=-_bar_height(ranks) / 2)
    if ranks <= 16:
        return
    every = 1 << ((ranks - 1) // 8).bit_length()
    named = [rank for rank in range(0, ranks, every) if ranks - 1 - rank >= every / 2] + [ranks - 1]
    ax.set_yticks(named, [f"rank {rank}" for rank in named])
    ax.tick_params(axis="y", length=3)


# --- flags -----------------------------------------------------------------------------------------------

# Dark in a light case: to be seen on the colour of any bucket.
_CASED = [withStroke(linewidth=2.2, foreground="white")]


def _raise_flags(figure: Figure, ax: Axes, flags: Sequence[_Flag]) -> None:
    """A label above the lanes for each fault, as high as it takes for none to cover another."""
    bottom, top = ax.get_ylim()
    labels = [
        ax.annotate(flag.text, (flag.x, top), (0, 0), textcoords="offset points", fontsize=8)
        for flag in flags
    ]
    for flag in flags:
        foot = bottom if flag.rank is None else flag.rank
        ax.plot([flag.x] * 2, [top, foot], color=DARK_INK, linewidth=1, path_effects=_CASED)
        if flag.rank is not None:
            ax.plot(flag.x, flag.rank, "v", color=DARK_INK, markersize=6, path_effects=_CASED, clip_on=False)
    lines = _arrange(figure, ax, flags, labels)
    figure.set_figheight(
        min(_TALLEST_IN, figure.get_figheight() + (1 + max(lines, default=-1)) * _LINE_PT / 72)
    )


def _arrange(figure: Figure, ax: Axes, flags: Sequence[_Flag], labels: Sequence[Annotation]) -> list[int]:
    """Put each label beside the head of its pole; which line each is on."""
    figure.draw_without_rendering()
    to_pt = 72 / figure.dpi
    width = to_pt * ax.get_window_extent().width
    left, right = ax.get_xlim()
    poles = [(flag.x - left) / (right - left) * width for flag in flags]
    widths = [4 + to_pt * label.get_window_extent().width for label in labels]
    places = _stack(poles, widths, width)
    for flag, label, (before, line) in zip(flags, labels, places, strict=True):
        label.set(ha="right" if before else "left")
        label.xyann = (-4 if before else 4, 3 + line * _LINE_PT)
        pole = {"arrowstyle": "-", "color": INK, "shrinkA": 0, "shrinkB": 0}
        head = (0, 1 + (line + 1) * _LINE_PT)
        ax.annotate("", (flag.x, ax.get_ylim()[1]), head, textcoords="offset points", arrowprops=pole)
    return [line for _, line in places]


def _stack(poles: Sequence[float], widths: Sequence[float], right: float) -> list[tuple[bool, int]]:
    """For each label whether it goes before its pole, and on which line above the lanes.

    What a pole would cross is put higher than the pole's own label.
    """
    before = _before(poles, widths, right)
    reach = _reach(poles, widths, before)
    lines: dict[int, int] = {}
    while left := [i for i in range(len(poles)) if i not in lines]:
        free = [i for i in left if not any(i in _crossed(poles[j], reach) for j in left)]
        i = (free or left)[0]
        below = [line for j, line in lines.items() if reach[j][0] < reach[i][1] and reach[i][0] < reach[j][1]]
        lines[i] = 1 + max(below, default=-1)
    return [(i in before, lines[i]) for i in range(len(poles))]


def _before(poles: Sequence[float], widths: Sequence[float], right: float) -> set[int]:
    """The labels with no room after their poles, and those that would cross one another with these."""
    before: set[int] = set()
    more = {i for i, (x, width) in enumerate(zip(poles, widths, strict=True)) if x + width > right}
    while more:
        before |= more
        crossed = [_crossed(x, _reach(poles, widths, before)) for x in poles]
        more = {i for i, others in enumerate(crossed) for j in others if i in crossed[j]} - before
    return before


def _reach(poles: Sequence[float], widths: Sequence[float], before: set[int]) -> list[tuple[float, float]]:
    """From where to where each label goes."""
    both = enumerate(zip(poles, widths, strict=True))
    return [(x - width, x) if i in before else (x, x + width) for i, (x, width) in both]


def _crossed(pole: float, reach: Sequence[tuple[float, float]]) -> set[int]:
    """The labels that a pole would cross if it came from above."""
    return {i for i, (left, right) in enumerate(reach) if left < pole < right}
