"""Sliders where a reader can move them, a row of still figures everywhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ridethrough.lab.style import style


def explore(
    draw: Callable[..., None],
    *,
    live: bool,
    stills: Mapping[str, Sequence[Any]],
    **sliders: Any,
) -> Any:
    """What `draw` draws, with sliders if `live`.

    Args:
        draw: takes an `Axes` and one keyword a slider.
        live: whether there is a kernel for the sliders to talk to; a page of the built site has none.
        stills: the one keyword to vary without sliders → the values to draw it at; `draw`'s own defaults
            hold for the others.
        **sliders: ranges, as `ipywidgets.interact` takes them.

    Returns:
        A widget, or the stills as a figure.
    """
    return _sliders(draw, sliders) if live else _stills(draw, stills)


def _sliders(draw: Callable[..., None], sliders: Mapping[str, Any]) -> Any:
    import ipywidgets

    def redraw(**values: Any) -> None:
        with style():
            _, ax = plt.subplots()
            draw(ax, **values)
            plt.show()

    return ipywidgets.interactive(redraw, **sliders)


def _stills(draw: Callable[..., None], stills: Mapping[str, Sequence[Any]]) -> Figure:
    ((name, values),) = stills.items()
    with style():
        figure, row = plt.subplots(1, len(values), figsize=(7.0, 2.6), sharey=True, squeeze=False)
        axes: list[Axes] = list(row[0])
        for ax, value in zip(axes, values, strict=True):
            draw(ax, **{name: value})
            ax.set_title(f"{name} = {value}", fontsize=9)
            ax.label_outer()
        plt.close(figure)
    return figure
