"""What several figures share: axes without a ground, rows of bars coloured by bucket, legends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from ridethrough.lab.style import LOOKS, style
from ridethrough.ledger import BUCKETS

Bar = tuple[float, float, float]  # from, to, row

_RECTANGLE = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)


@contextmanager
def axes(height: float = 3.0) -> Iterator[tuple[Figure, Axes]]:
    """A figure of the book's width and look, with one pair of axes."""
    with style():
        figure, ax = plt.subplots(figsize=(7.0, height))
        yield figure, ax
        plt.close(figure)  # pyplot forgets it, so a cell that ends with it shows it once


def draw_bars(ax: Axes, bucket: str, bars: Sequence[Bar], height: float = 0.6) -> None:
    """The bars of a bucket as one patch: thousands of them are drawn as fast as one."""
    left, right, row = np.array(bars, dtype=float).reshape(-1, 3).T
    low, high = row - height / 2, row + height / 2
    x = np.stack([left, right, right, left, left], axis=-1)
    y = np.stack([low, low, high, high, low], axis=-1)
    path = Path(np.stack([x, y], axis=-1).reshape(-1, 2), np.tile(_RECTANGLE, len(bars)))
    patch = PathPatch(path, **_look(bucket))
    patch.set_snap(True)  # else the page shines through between two bars that touch
    ax.add_patch(patch)


def _look(bucket: str) -> dict[str, Any]:
    look = LOOKS[bucket]
    return {
        "facecolor": look.colour,
        "hatch": look.hatch,
        "edgecolor": look.hatch_ink,
        "linewidth": 0,
        "label": bucket,
    }


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Rows from top to bottom, each with its name on the left."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(max(len(names), 1) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def bucket_legend(figure: Figure, shown: Iterable[str]) -> None:
    """What the colours mean, for the buckets that are shown."""
    seen = set(shown)
    patches = [Patch(**_look(bucket)) for bucket in BUCKETS if bucket in seen]
    figure.legend(handles=patches, loc="outside lower center", ncols=4)


def line_legend(figure: Figure, ax: Axes) -> None:
    """What the lines or bars of a plot are called."""
    ax.grid(axis="y")
    handles, _ = ax.get_legend_handles_labels()
    if handles:
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
