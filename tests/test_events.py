"""Events: whole lines whatever happens to the writer, and errors that name file and line."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ridethrough.errors import UsageError
from ridethrough.events import PHASES, Event, EventLog, parse, read_events

WRITER = """
import sys
from pathlib import Path
from ridethrough.events import EventLog
log = EventLog(Path(sys.argv[1]), f"rank-{sys.argv[2]}", int(sys.argv[2]))
for step in range(1, 10_000_000):
    log.emit("step", step=step, loss=1 / step, padding="x" * (step % 5000))
"""


def test_what_is_emitted_is_read_back(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank-1", rank=1, generation=2)
    said = [
        log.emit("step", step=7, loss=0.1 + 0.2),
        log.emit("fault", step=8, rank=0, kind="kill", id="kill@8:0"),
        log.emit("error", message='two\nlines, "quotes", ünï\u2028code and \x85'),
    ]
    log.close()
    assert read_events(tmp_path) == said
    assert said[0].rank == 1 and said[0].generation == 2 and said[0]["loss"] == 0.1 + 0.2
    assert said[1].rank == 0


@settings(deadline=None)
@given(
    t=st.floats(0, 4e9),
    step=st.none() | st.integers(0, 10**9),
    rank=st.none() | st.integers(0, 10**5),
    attributes=st.dictionaries(
        st.text().map(lambda name: "a_" + name),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.lists(st.text()),
    ),
)
def test_any_attribute_survives(
    tmp_path_factory: pytest.TempPathFactory,
    t: float,
    step: int | None,
    rank: int | None,
    attributes: dict[str, object],
) -> None:
    directory = tmp_path_factory.mktemp("events")
    log = EventLog(directory, "rank")
    said = log.emit("save", t=t, step=step, rank=rank, **attributes)
    log.close()
    assert read_events(directory) == [said] == [Event(t, "save", rank, 0, step, attributes)]


def test_events_of_all_processes_come_in_the_order_of_time(tmp_path: Path) -> None:
    one, two = EventLog(tmp_path, "rank-0", 0), EventLog(tmp_path, "rank-1", 1)
    for t in (1.0, 4.0):
        one.emit("step", t=t)
    for t in (2.0, 3.0):
        two.emit("step", t=t)
    assert [(e.t, e.rank) for e in read_events(tmp_path)] == [(1, 0), (2, 1), (3, 1), (4, 0)]


def test_a_clock_that_is_set_back_does_not_reorder_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 40.0, 100.5])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    log = EventLog(tmp_path, "rank-0", 0)
    for what in ("first", "second", "third"):
        log.emit(what)
    assert [(e.what, e.t) for e in read_events(tmp_path)] == [
        ("first", 100),
        ("second", 100),
        ("third", 100.5),
    ]


def test_an_unknown_phase_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank-0", 0)
    with pytest.raises(ValueError, match="'training' is not a phase; one of startup, rendezvous"):
        log.phase("training")
    for name in PHASES:
        log.phase(name, step=3)
    assert [e["phase"] for e in read_events(tmp_path)] == list(PHASES)


def test_what_is_emitted_after_close_is_dropped(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank-0", 0)
    log.emit("step", step=1)
    log.close()
    log.close()
    log.emit("step", step=2)
    assert [e.step for e in read_events(tmp_path)] == [1]


def test_a_run_that_has_not_begun_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "nowhere") == []


@pytest.mark.parametrize("keep", [1, 20, -2, -1])
def test_a_last_line_that_was_cut_short_is_passed_over(tmp_path: Path, keep: int) -> None:
    log = EventLog(tmp_path, "rank-0", 0)
    for step in (1, 2):
        log.emit("step", step=step, loss=1.5)
    first, second = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(first + second[:keep])
    assert [e.step for e in read_events(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (b'{"t": 1.0, "what": "st', "Unterminated string"),
        (b"", "Expecting value"),
        (b"\x00\x00\x00", "Expecting value"),
        (b'"\xff"', "can't decode byte 0xff"),
        (b"[1, 2]", "no JSON object"),
        (b"3", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"t": 1.0, "what": "step", "rank": 0, "generation": 0}', "'step' is missing"),
        (b'{"t": "1", "what": "step", "rank": 0, "generation": 0, "step": 1}', "'t' is '1'"),
        (b'{"t": NaN, "what": "step", "rank": 0, "generation": 0, "step": 1}', "'t' is nan"),
        (b'{"t": 1.0, "what": "step", "rank": true, "generation": 0, "step": 1}', "'rank' is True"),
        (b'{"t": 1.0, "what": "step", "rank": 0, "generation": null, "step": 1}', "'generation' is None"),
    ],
)
def test_any_other_bad_line_is_an_error_that_names_it(tmp_path: Path, garbage: bytes, why: str) -> None:
    log = EventLog(tmp_path, "rank-0", 0)
    for step in (1, 2):
        log.emit("step", step=step, loss=1.5)
    first, second = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(first + garbage + b"\n" + second)
    with pytest.raises(UsageError) as caught:
        read_events(tmp_path)
    assert str(caught.value).startswith(f"{log.path}:2 is not an event: ")
    assert why in str(caught.value)


def test_parse_takes_a_line_with_or_without_its_end() -> None:
    line = '{"t": 1, "what": "x", "rank": null, "generation": 0, "step": null, "more": [1]}'
    assert parse(line) == parse(line.encode() + b"\n") == Event(1, "x", None, 0, None, {"more": [1]})


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path: Path) -> None:
    """A real limit of the kernel's: a write over it is cut short, the next one fails."""
    code = f"""
from ridethrough.events import EventLog
from pathlib import Path
log = EventLog(Path({str(tmp_path)!r}), "rank-0", 0)
try:
    for step in range(1000):
        log.emit("step", step=step, padding="x" * 100)
except OSError as error:
    print(error)
log.emit("x")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
    )
    (file,) = tmp_path.iterdir()
    assert f"File too large: '{file}'" in done.stdout
    assert file.read_bytes().endswith(b"}\n")
    events = read_events(tmp_path)
    assert [e.step for e in events[:-1]] == list(range(len(events) - 1)) and len(events) > 20
    assert events[-1].what in ("step", "x")  # the short last one fitted, or not; never half of it


def test_sigkill_leaves_whole_lines(tmp_path: Path) -> None:
    """Two processes write as fast as they can; each is killed somewhere in the middle."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(rank)]) for rank in range(2)
    ]
    try:
        _wait_until(lambda: len(read_events(tmp_path)) > 300 and len(_by_rank(tmp_path)) == 2)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
    finally:
        for writer in writers:
            writer.kill()
            assert writer.wait(30) == -signal.SIGKILL
    for rank, steps in _by_rank(tmp_path).items():
        assert steps == list(range(1, len(steps) + 1)), f"rank {rank} lost or mixed a line"
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        for line in file.read_text().splitlines():
            assert json.loads(line)["what"] == "step"


def _by_rank(directory: Path) -> dict[int | None, list[int | None]]:
    steps: dict[int | None, list[int | None]] = {}
    for event in read_events(directory):
        steps.setdefault(event.rank, []).append(event.step)
    return steps


def _wait_until(true: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"the writers wrote too little within {limit_s} s"
        time.sleep(0.01)
