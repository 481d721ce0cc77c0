"""The look of every figure: it reads on a light page, on a dark page and in grey print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from cycler import cycler

#: Of all greys this one has the same contrast, 4.2 to 1, on the site's white and on its dark ground.
INK = "#7b7b7b"

#: What lies on colours, not on the page. Hatches are thin, so that a bucket keeps its lightness.
DARK_INK = "#202020"
HATCH_INK = "#20202090"
_HATCH_ON_DARK = "#ffffffa0"

RC: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=["#0072b2", "#d55e00", "#009e73", "#cc79a7"]),
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "font.size": 10,
    "figure.figsize": (7.0, 3.0),
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Look:
    """How a bucket of the ledger is drawn: the colour says its family, the hatch tells it apart in grey."""

    colour: str
    hatch: str = ""
    hatch_ink: str = HATCH_INK


# Hues after Okabe and Ito (2008) and Tol (2021): told apart with any common colour blindness. The lightness
# (CIE L*, on the right) is such that buckets that follow one another differ in grey without their hatch.
LOOKS: dict[str, Look] = {
    "useful": Look("#009e73"),  # 58
    "checkpoint_stall": Look("#f0ae2e", "////"),  # 75
    "detect": Look("#9e2800"),  # 36
    "abort": Look("#f4c9dd", "xxxx"),  # 85
    "restart": Look("#1f7dbf", "|||"),  # 50
    "rendezvous": Look("#56b4e9", "++"),  # 70
    "build": Look("#bfe3f5", "----"),  # 88
    "restore": Look("#332288", "....", _HATCH_ON_DARK),  # 22
    "recompute": Look("#f5ec5a", "\\\\\\\\"),  # 92
    "idle": Look("#cccccc"),  # 82
    "startup": Look("#777777", "||"),  # 50
    "shutdown": Look("#4a4a4a", "oooo", _HATCH_ON_DARK),  # 31
}

#: Lines of one plot, in order: colour, width, dashes. The first is broad, so that a second one with the
#: same values is seen to lie on it.
LINES: tuple[tuple[str, float, str], ...] = (
    ("#56b4e9", 5.0, "-"),
    ("#d55e00", 1.6, "-"),
    ("#009e73", 1.6, "--"),
    ("#cc79a7", 1.6, ":"),
)


@contextmanager
def style() -> Iterator[None]:
    """Make figures that are begun inside the `with` block look like the book's."""
    with plt.rc_context(RC):
        yield
