"""Figures draw what the ledger says and read in grey; listings are the code that runs."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import ridethrough
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from ridethrough import run
from ridethrough.errors import UsageError
from ridethrough.events import Event
from ridethrough.lab import (
    bill,
    buckets_bar,
    check_versions,
    explore,
    fresh_runs,
    losses,
    recovery_bars,
    show_diff,
    show_source,
    spread,
    stall_plot,
    table,
    timeline,
)
from ridethrough.lab.style import INK, LOOKS
from ridethrough.ledger import BUCKETS, RECOVERY, Ledger

RANKS = 2


def launch(
    start: float, generation: int, steps: range, killed: int | None = None, ranks: int = RANKS
) -> Iterator[Event]:
    """One launch of ranks that save after every tenth step; the last rank is killed in step `killed`."""

    def event(t: float, what: str, rank: int | None = None, step: int | None = None, **more: Any) -> Event:
        return Event(start + t, what, rank, generation, step, more)

    yield event(0, "launch", ranks=ranks)
    for rank in range(ranks):
        for t, phase in ((0.5, "startup"), (1.0, "rendezvous"), (1.5, "build"), (2.0, "restore")):
            yield event(t + 0.2 * rank / ranks, "phase", rank, phase=phase)
    t = 3.0
    for step in steps:
        for rank in range(ranks):
            yield event(t, "phase", rank, step, phase="step")
        if step == killed:
            last = ranks - 1
            yield event(t + 0.5, "fault", last, step, kind="kill", id=f"kill@{step}:{last}", source="inside")
            break
        t += 1
        for rank in range(ranks):
            yield event(t, "step", rank, step, loss=5.0 / step)
            if step % 10 == 0:
                yield event(t, "phase", rank, step, phase="checkpoint_stall")
                yield event(t + 0.5 * (rank + 1) / ranks, "phase", rank, phase="idle")
        t += 0.5 if step % 10 == 0 else 0
    yield event(t + 1, "detected" if killed else "end", ranks - 1, cause="killed")
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


def drawn(ax: Axes) -> dict[str, list[tuple[float, float, int]]]:
    """The bars of each bucket: from, to, row."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for patch in ax.patches:
        corners = patch.get_path().vertices.reshape(-1, 5, 2)
        bars = [(c[0, 0], c[1, 0], round(c[:4, 1].mean())) for c in corners]
        found.setdefault(patch.get_label(), []).extend(bars)
    return found


def labels(ax: Axes) -> dict[str, Bbox]:
    """What is written beside the faults, and where."""
    ax.figure.draw_without_rendering()
    return {text.get_text(): text.get_window_extent() for text in ax.texts if text.get_text()}


def grey(figure: Figure, ground: str) -> np.ndarray:
    """What a printer without colour makes of a figure on a page: lightness from 0 to 100, row by row."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba()) / 255
    opaque = pixels[..., 3:]
    colours = pixels[..., :3] * opaque + np.array(to_rgb(ground)) * (1 - opaque)
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return 116 * np.cbrt(linear @ [0.2126, 0.7152, 0.0722]) - 16


def test_timeline_shows_every_rank_second_once(ledger: Ledger) -> None:
    bars = [bar for some in drawn(timeline(ledger).axes[0]).values() for bar in some]
    assert sum(right - left for left, right, _ in bars) == pytest.approx(ledger.wall_s * RANKS)
    for rank in range(RANKS):
        lane = sorted((left, right) for left, right, row in bars if row == rank)
        assert lane[0][0] == pytest.approx(0) and lane[-1][1] == pytest.approx(ledger.wall_s)
        assert all(one[1] == pytest.approx(other[0]) for one, other in itertools.pairwise(lane))
    assert len(bars) < len(ledger.spans), "neighbours in one bucket should be one bar"


def test_timeline_marks_the_fault_at_its_instant_and_rank(ledger: Ledger) -> None:
    ax = timeline(ledger).axes[0]
    (mark,) = [line for line in ax.lines if line.get_marker() == "v"]
    assert mark.get_xdata()[0] == pytest.approx(ledger.faults[0].t - 100)
    assert mark.get_ydata()[0] == 1
    assert list(labels(ax)) == [f"kill, rank 1, step 25: back in {ledger.faults[0].mttr_s:.1f} s"]


def test_timeline_holds_all_lives_of_a_launch_together(ledger: Ledger) -> None:
    """A later life has a generation of its own, and no launch of that number."""
    lanes = [
        dataclasses.replace(
            lane,
            spans=tuple(dataclasses.replace(s, generation=7) if s.start > 910 else s for s in lane.spans),
        )
        for lane in ledger.lanes
    ]
    assert drawn(timeline(Ledger(ledger.launches, tuple(lanes))).axes[0]) == drawn(timeline(ledger).axes[0])


def test_timeline_of_a_fault_shows_its_recovery_and_counts_from_it(ledger: Ledger) -> None:
    (fault,) = ledger.faults
    figure = timeline(ledger, window=fault)
    ax = figure.axes[0]
    assert fault.mttr_s is not None
    left, right = ax.get_xlim()
    assert left < 0 < fault.mttr_s < right < 1.5 * fault.mttr_s
    assert ax.get_xlabel() == "seconds since the fault"
    bars = drawn(ax)
    assert [bar[0] for bar in bars["detect"]] == [pytest.approx(0)] * RANKS
    assert set(RECOVERY) <= set(bars) and "startup" not in bars
    assert {text.get_text() for text in figure.legends[0].texts} == set(bars)


def test_timeline_of_a_window_shows_that_part_alone(ledger: Ledger) -> None:
    ax = timeline(ledger, window=(5, 8)).axes[0]
    assert ax.get_xlim() == (5, 8)
    assert drawn(ax) == {"useful": [(5, 8, 0), (5, 8, 1)]} and not labels(ax)


def test_timeline_refuses_a_window_that_shows_nothing(ledger: Ledger) -> None:
    for window in ((3.0, 3.0), (-2.0, -1.0), (1000.0, 2000.0), (float("nan"), 1.0)):
        with pytest.raises(UsageError, match=r"window: .* shows nothing of a run of"):
            timeline(ledger, window=window)
    with pytest.raises(UsageError, match="window: this is a fault of another run"):
        timeline(ledger, window=dataclasses.replace(ledger.faults[0], t=0.0))


@pytest.fixture(scope="module")
def many() -> Ledger:
    """64 ranks, lost three times."""
    plan = [(range(1, 31), 25), (range(21, 61), 55), (range(51, 91), 85), (range(81, 101), None)]
    events = [launch(1000 * i, i, steps, killed, 64) for i, (steps, killed) in enumerate(plan)]
    return Ledger.of(itertools.chain.from_iterable(events))


def test_timeline_of_64_lanes_is_quick_and_fits_on_a_screen(many: Ledger) -> None:
    spans = many.spans
    assert len(spans) > 5000 and len(many.faults) == 3
    begin = time.process_time()
    figure = timeline(many)
    FigureCanvasAgg(figure).draw()
    assert time.process_time() - begin < 3
    assert figure.get_figheight() <= 9
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [f"rank {rank}" for rank in (*range(0, 64, 8), 63)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 16, 17, 24, 64, 100])
def test_names_of_lanes_never_touch(ranks: int) -> None:
    figure = timeline(Ledger.of(launch(0, 0, range(1, 3), ranks=ranks)))
    figure.draw_without_rendering()
    names = figure.axes[0].get_yticklabels()
    assert names[-1].get_text() == f"rank {ranks - 1}"
    for upper, lower in itertools.pairwise(name.get_window_extent() for name in names):
        assert upper.y0 >= lower.y1
    assert figure.get_figheight() <= 9


@pytest.mark.parametrize("seed", range(8))
def test_labels_of_faults_touch_neither_one_another_nor_a_pole(seed: int) -> None:
    rand = random.Random(seed)
    times = [rand.uniform(9 * (seed % 2), 15) for _ in range(rand.randint(2, 8))]
    times += [times[0], 15.4][: seed % 3]  # two at one place; one at the very end
    events = list(launch(0, 0, range(1, 11)))
    for number, t in enumerate(times):
        events.append(Event(t, "fault", number % 2, 0, 5, {"kind": f"kind{number}", "source": "inside"}))
    figure = timeline(Ledger.of(events))
    ax = figure.axes[0]
    boxes = labels(ax)
    assert len(boxes) == len(times)
    for one, other in itertools.combinations(boxes.values(), 2):
        assert not one.overlaps(other)
    poles = [text.arrow_patch.get_window_extent() for text in ax.texts if not text.get_text()]
    assert len(poles) == len(times)
    assert not [1 for pole in poles for box in boxes.values() if pole.overlaps(box)]
    page = figure.bbox
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and box.y1 <= page.y1 for box in boxes.values())
    assert ax.get_window_extent().x1 > page.x1 - 15, "a label at the end should not make the lanes shorter"


@pytest.mark.parametrize("ground", ["#ffffff", "#121212"])
@pytest.mark.parametrize("lanes", [2, 64])
def test_buckets_that_touch_differ_in_grey(ledger: Ledger, many: Ledger, lanes: int, ground: str) -> None:
    """On average over a bar, hatch and all, so that it holds where a lane is too thin for a hatch."""
    whole = ledger if lanes == 2 else many
    figure = timeline(whole, window=whole.faults[0])
    ax, page = figure.axes[0], grey(figure, ground)
    row = page[round(len(page) - ax.transData.transform((0, 0))[1]) - 1 :][:3]
    means = []
    for left, right in sorted((bar[0], bar[1]) for bars in drawn(ax).values() for bar in bars if bar[2] == 0):
        x0, x1 = (ax.transData.transform((x, 0))[0] for x in (left, right))
        means.append(row[:, round(x0) + 1 : round(x1) - 1].mean())
    assert len(means) > len(RECOVERY)
    assert all(abs(one - other) > 8 for one, other in itertools.pairwise(means)), means


# What can follow what, in a recovery and in a run without a fault.
AFTER = {
    "useful": ("checkpoint_stall", "detect", "shutdown"),
    "checkpoint_stall": ("useful", "recompute", "detect"),
    "detect": ("abort", "restart", "rendezvous"),
    "abort": ("restart", "rendezvous"),
    "restart": ("rendezvous", "detect"),
    "startup": ("rendezvous", "detect"),
    "rendezvous": ("build", "restart", "detect"),
    "build": ("restore", "detect"),
    "restore": ("recompute", "useful", "detect"),
    "recompute": ("useful", "detect"),
}


def test_buckets_that_follow_one_another_differ_in_lightness_alone() -> None:
    def lightness(bucket: str) -> float:
        return 116 * luminance(LOOKS[bucket].colour) ** (1 / 3) - 16

    near = {
        (one, other): round(abs(lightness(one) - lightness(other)), 1)
        for one, others in AFTER.items()
        for other in others
    }
    assert min(near.values()) >= 12, near


def test_stall_plot_has_each_save_on_each_rank(ledger: Ledger) -> None:
    ax = stall_plot(ledger).axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["10", "20", "30"]
    heights = [[bar.get_height() for bar in container] for container in ax.containers]
    assert heights == [pytest.approx([250.0] * 3), pytest.approx([500.0] * 3)]


def test_buckets_bar_fills_the_whole_width(ledger: Ledger) -> None:
    figure = buckets_bar({"one": report(ledger), "two": report(ledger)})
    bars = [bar for some in drawn(figure.axes[0]).values() for bar in some]
    assert sum(right - left for left, right, _ in bars) == pytest.approx(200)
    shown = {text.get_text() for text in figure.legends[0].texts}
    assert shown == {bucket for bucket, seconds in ledger.buckets_s.items() if seconds}


def test_losses_are_in_the_order_of_steps_with_a_gap_where_one_was_not_finite(ledger: Ledger) -> None:
    (line,) = losses({"a": report(ledger)}).axes[0].lines
    assert list(line.get_xdata()) == [1, 2, 10]
    assert [str(y) for y in line.get_ydata()] == ["5.0", "nan", "0.5"]


def lost(mttr_s: float | None, phases_s: list[float], **more: Any) -> dict[str, Any]:
    """A report of two ranks that outlived one fault and were lost to another."""
    second = {
        "kind": "pod",
        "tier": "pods",
        "mttr_s": mttr_s,
        "phases_s": dict(zip(RECOVERY, phases_s, strict=True)),
        "between_launches_s": 0.0,
        "wasted_rank_s": 2 * sum(phases_s),
        "waits_s": {"backoff": 1.0, "assumed": 0.0},
        "spread": [],
    }
    first = {"kind": "stop", "tier": "outlived", "mttr_s": None, "phases_s": dict.fromkeys(RECOVERY, 0.0)}
    return {"ranks": 2, "faults": [first, {**second, **more}]}


GANG = lost(9.0, [0.5, 0.5, 1, 1, 1, 2, 3])
INDEX = lost(18.0, [0.5, 0.5, 10, 1, 1, 2, 3], waits_s={"backoff": 1.0, "assumed": 2.5})
HAND = lost(9.0, [0.5, 0.5, 1, 1, 1, 2, 3], between_launches_s=31.04)
EACH = lost(None, [0.5, 3, 10, 20, 0, 0, 0])
RUNS = {"gang": GANG, "index": INDEX, "by hand": HAND, "each": EACH, "quiet": {"ranks": 2, "faults": []}}


def test_recovery_bars_are_as_long_as_the_recovery_and_say_so() -> None:
    figure = recovery_bars(RUNS)
    ax = figure.axes[0]
    bars = drawn(ax)
    for row, seconds in enumerate((9, 18, 9, 33.5, 0)):
        parts = [(left, right) for part in RECOVERY for left, right, r in bars[part] if r == row]
        assert parts[0][0] == 0 and parts[-1][1] == pytest.approx(seconds)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
    assert list(labels(ax)) == [
        "9.0 s",
        "18.0 s, 2.5 s of it assumed",
        "9.0 s + 31.0 s between launches",
        "not recovered after 33.5 s",
        "no fault",
    ]
    assert all(box.x1 <= figure.bbox.x1 for box in labels(ax).values())


def test_spread_is_a_table_of_who_said_what_when() -> None:
    signs = [
        {"after_s": 0.0, "rank": 1, "pod": 1, "how": "injected", "text": "pod@25:1: pod 1 was killed"},
        {"after_s": 0.0512, "rank": 0, "pod": None, "how": "connection", "text": "rank 0 lost rank 1"},
        {"after_s": 6.0, "rank": None, "pod": 0, "how": "gave_up", "text": "torchrun gave up"},
        {"after_s": 6.5, "rank": None, "pod": None, "how": "ended", "text": "the job was ended"},
    ]
    assert spread({"spread": signs}).text.splitlines()[2:] == [
        "| 0 | rank 1, pod 1 | injected | pod@25:1: pod 1 was killed |",
        "| 0.05 | rank 0 | connection | rank 0 lost rank 1 |",
        "| 6 | pod 0 | gave up | torchrun gave up |",
        "| 6.5 | all | ended | the job was ended |",
    ]


def test_bill_is_what_the_arguments_make_of_the_report() -> None:
    rows = bill(RUNS, gpus=7200, dollars_per_gpu_hour=2.0, faults_a_day=3)
    assert rows[0] == {
        "run": "gang",
        "MTTR (s)": 9.0,
        "of it assumed (s)": 0.0,
        "wasted rank-seconds": 18.0,
        "GPU-hours a fault": 18.0,
        "GPU-hours a day": 54.0,
        "$ a day": 108.0,
    }
    assert rows[1]["of it assumed (s)"] == 2.5 and rows[1]["$ a day"] == 216.0
    for row in rows[3:]:
        assert [row[name] for name in ("MTTR (s)", "wasted rank-seconds", "$ a day")] == [None] * 3
    assert "108" in table(rows).plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpus", 0),
        ("gpus", 1.5),
        ("gpus", True),
        ("dollars_per_gpu_hour", -1),
        ("dollars_per_gpu_hour", "2"),
        ("faults_a_day", float("nan")),
        ("faults_a_day", float("inf")),
    ],
)
def test_bill_refuses_what_is_no_amount(name: str, value: object) -> None:
    amounts: dict[str, Any] = {"gpus": 8, "dollars_per_gpu_hour": 2.0, "faults_a_day": 1, name: value}
    with pytest.raises(UsageError, match=f"^{name}: {value!r} must be a"):
        bill(RUNS, **amounts)


def test_a_figure_is_shown_once(ledger: Ledger) -> None:
    """Jupyter shows what pyplot still holds after a cell, and the cell's value besides."""
    for figure in (timeline(ledger), stall_plot(ledger), losses({}), buckets_bar({}), recovery_bars({})):
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
