"""Figures draw what the ledger says and read in grey; listings are the code that runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest

matplotlib.use("agg")
import matplotlib.pyplot as plt
import ridethrough
from matplotlib.colors import to_rgb
from ridethrough import run
from ridethrough.errors import UsageError
from ridethrough.events import Event
from ridethrough.lab import (
    buckets_bar,
    check_versions,
    explore,
    fresh_runs,
    losses,
    show_diff,
    show_source,
    stall_plot,
    table,
    timeline,
)
from ridethrough.lab.style import INK, LOOKS
from ridethrough.ledger import BUCKETS, Ledger

RANKS = 2


def launch(start: float, generation: int, steps: range, killed: int | None = None) -> Iterator[Event]:
    """One launch of two ranks that save after every tenth step; rank 1 is killed in step `killed`."""

    def event(t: float, what: str, rank: int | None = None, step: int | None = None, **more: Any) -> Event:
        return Event(start + t, what, rank, generation, step, more)

    yield event(0, "launch", ranks=RANKS)
    for rank in range(RANKS):
        yield event(1, "phase", rank, phase="startup")
        yield event(2, "phase", rank, phase="build")
    t = 3.0
    for step in steps:
        for rank in range(RANKS):
            yield event(t, "phase", rank, step, phase="step")
        if step == killed:
            yield event(t + 0.5, "fault", 1, step, kind="kill", id=f"kill@{step}:1", source="inside")
            break
        t += 1
        for rank in range(RANKS):
            yield event(t, "step", rank, step, loss=5.0 / step)
            if step % 10 == 0:
                yield event(t, "phase", rank, step, phase="checkpoint_stall")
                yield event(t + 0.25 * (rank + 1), "phase", rank, phase="idle")
        t += 0.5 if step % 10 == 0 else 0
    yield event(t + 1, "detected" if killed else "end", 1, cause="killed")
    yield event(t + 2, "launch_end", outcome="failed" if killed else "finished")


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return Ledger.of([*launch(100, 0, range(1, 31), killed=25), *launch(900, 1, range(21, 31))])


def report(ledger: Ledger) -> dict[str, Any]:
    return {"buckets_s": ledger.buckets_s, "losses": {"1": 5.0, "10": 0.5, "2": None}}


def luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_bucket_has_a_look_and_no_two_are_alike_in_grey() -> None:
    assert set(LOOKS) == set(BUCKETS)
    for one, other in itertools.combinations(LOOKS.values(), 2):
        assert one.hatch != other.hatch or contrast(one.colour, other.colour) > 1.5, (one, other)


@pytest.mark.parametrize("ground", ["#ffffff", "#121212"])
def test_ink_reads_on_light_and_dark(ground: str) -> None:
    assert contrast(INK, ground) > 4


def test_timeline_shows_every_rank_second_once(ledger: Ledger) -> None:
    ax = timeline(ledger).axes[0]
    bars = [bar for container in ax.containers for bar in container]
    assert sum(bar.get_width() for bar in bars) == pytest.approx(ledger.wall_s * RANKS)
    for rank in range(RANKS):
        lane = sorted((b.get_x(), b.get_x() + b.get_width()) for b in bars if round(b.get_y() + 0.3) == rank)
        assert lane[0][0] == pytest.approx(0) and lane[-1][1] == pytest.approx(ledger.wall_s)
        assert all(one[1] == pytest.approx(other[0]) for one, other in itertools.pairwise(lane))
    assert len(bars) < len(ledger.spans), "neighbours in one bucket should be one bar"


def test_timeline_marks_the_fault_at_its_instant_and_rank(ledger: Ledger) -> None:
    ax = timeline(ledger).axes[0]
    (mark,) = [line for line in ax.lines if line.get_marker() == "v"]
    assert mark.get_xdata()[0] == pytest.approx(ledger.faults[0].t - 100)
    assert round(float(mark.get_ydata()[0])) == 1
    assert [text.get_text() for text in ax.texts] == ["kill, step 25"]


def test_stall_plot_has_each_save_on_each_rank(ledger: Ledger) -> None:
    ax = stall_plot(ledger).axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["10", "20", "30"]
    heights = [[bar.get_height() for bar in container] for container in ax.containers]
    assert heights == [pytest.approx([250.0] * 3), pytest.approx([500.0] * 3)]


def test_buckets_bar_fills_the_whole_width(ledger: Ledger) -> None:
    figure = buckets_bar({"one": report(ledger), "two": report(ledger)})
    bars = [bar for container in figure.axes[0].containers for bar in container]
    assert sum(bar.get_width() for bar in bars) == pytest.approx(200)
    shown = {text.get_text() for text in figure.legends[0].texts}
    assert shown == {bucket for bucket, seconds in ledger.buckets_s.items() if seconds}


def test_losses_are_in_the_order_of_steps_with_a_gap_where_one_was_not_finite(ledger: Ledger) -> None:
    (line,) = losses({"a": report(ledger)}).axes[0].lines
    assert list(line.get_xdata()) == [1, 2, 10]
    assert [str(y) for y in line.get_ydata()] == ["5.0", "nan", "0.5"]


def test_a_figure_is_shown_once(ledger: Ledger) -> None:
    """Jupyter shows what pyplot still holds after a cell, and the cell's value besides."""
    for figure in (timeline(ledger), stall_plot(ledger), losses({}), buckets_bar({})):
        figure.canvas.draw()
    assert plt.get_fignums() == []


def test_explore_without_a_kernel_draws_the_stills() -> None:
    drawn = []
    figure = explore(
        lambda ax, every=1: drawn.append(every), live=False, stills={"every": [1, 5]}, every=(1, 9)
    )
    assert drawn == [1, 5]
    assert figure is not None and [ax.get_title() for ax in figure.axes] == ["every = 1", "every = 5"]


def test_explore_with_a_kernel_draws_what_the_slider_says() -> None:
    drawn: list[int] = []
    widget = explore(lambda ax, every: drawn.append(every), live=True, stills={"every": [1]}, every=(1, 9))
    (slider,) = widget.kwargs_widgets
    slider.value = 7
    assert drawn[-1] == 7
    plt.close("all")


def test_shown_source_is_the_code_that_runs() -> None:
    shown = show_source(run.write_json)
    assert "os.fsync(file.fileno())" in shown.plain
    assert shown.text.startswith("`companion/ridethrough/run.py:") and shown.plain.rstrip() in shown.text
    assert shown._repr_markdown_() == shown.text


def test_shown_method_stands_at_the_left() -> None:
    assert show_source(run.Run.log).plain.startswith("def log(")


def test_diff_turns_one_into_the_other() -> None:
    assert show_diff(run.read_json, run.read_json).plain == ""
    lines = show_diff(run.read_json, run.write_json).plain.splitlines()[3:]
    for sign, source in (("-", run.read_json), ("+", run.write_json)):
        whole = [line[1:] for line in lines if line[0] in (" ", sign)]
        assert whole == show_source(source).plain.splitlines()


def test_table_aligns_numbers_and_survives_any_text() -> None:
    shown = table(
        [{"step": 10, "stall (s)": 0.12345, "why": "a|b"}, {"step": 2000, "stall (s)": None, "why": "c\nd"}]
    )
    assert shown.text.splitlines() == [
        "| step | stall (s) | why |",
        "| ---: | ---: | --- |",
        "| 10 | 0.123 | a\\|b |",
        "| 2,000 | – | c d |",
    ]
    assert repr(shown).splitlines()[1] == "   10      0.123  a|b"


def test_version_of_the_book_is_checked() -> None:
    check_versions(ridethrough.__version__)
    with pytest.raises(UsageError, match=r"is for ridethrough 9\.9\.9, but .* is installed: run"):
        check_versions("9.9.9")


def test_a_chapter_starts_with_an_empty_folder_however_often_it_is_run(tmp_path: Path) -> None:
    for _ in range(2):
        runs = fresh_runs(tmp_path / "runs")
        assert [path.name for path in runs.iterdir()] in ([], ["notes"])
        (runs / "one").mkdir()
        (runs / "one" / "run.json").write_text("{}")
        (runs / "notes").mkdir(exist_ok=True)
