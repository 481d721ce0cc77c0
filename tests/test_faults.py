"""Injected faults, fired in real processes: from inside at a step, from outside at any moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ridethrough.config import JobConfig
from ridethrough.errors import RunError, UsageError
from ridethrough.events import Event, read_events
from ridethrough.faults import KINDS, Fault, FaultInjector, InjectedFault, check, parse, request
from ridethrough.launch import launch, run_rung
from ridethrough.run import Run

from tests.fakes import going_on, install, said, wait_for, write_text

# --- what can be asked for -------------------------------------------------------------------------------


@given(st.sampled_from(KINDS), st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_fault_is_read_as_it_is_written(kind: str, step: int, rank: int) -> None:
    fault = Fault(kind, step, rank)
    assert parse(fault.id) == fault


def test_the_id_is_canonical() -> None:
    assert parse("kill@037:01").id == "kill@37:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not of the form KIND@STEP:RANK"),
        ("kill", "is not of the form KIND@STEP:RANK"),
        ("kill@37", "is not of the form KIND@STEP:RANK"),
        ("kill:1", "is not of the form KIND@STEP:RANK"),
        ("kill@37:1:2", "is not of the form KIND@STEP:RANK"),
        ("crash@37:1", "'crash' is not a kind; one of exception, kill, exit, hang, stop"),
        ("kill@x:1", "the step 'x' is not a whole number"),
        ("kill@3.5:1", "the step '3.5' is not a whole number"),
        ("kill@٣:1", "the step '٣' is not a whole number"),
        ("kill@37:", "the rank '' is not a whole number"),
        ("kill@37:-1", "the rank must not be negative"),
        ("kill@-1:1", "the step must not be negative"),
        ("kill@0:1", "steps count from 1"),
    ],
)
def test_a_malformed_fault_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(text)
    assert message in str(raised.value) and repr(text) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_faults_that_cannot_fire_are_refused() -> None:
    assert [f.id for f in check(["kill@3:1", "exit@3:1"], ranks=2, steps=3)] == ["kill@3:1", "exit@3:1"]
    for texts, message in {
        ("kill@3:2",): "there is no rank 2; ranks are 0 to 1",
        ("kill@4:1",): "the run ends after step 3",
        ("kill@3:1", "kill@03:1"): "given twice",
    }.items():
        with pytest.raises(UsageError, match=message):
            check(texts, ranks=2, steps=3)


# --- from inside -----------------------------------------------------------------------------------------


def make_run(path: Path, *texts: str) -> Run:
    return Run.create(path, "fake", 2, JobConfig(), texts, {})


def test_a_fault_fires_at_its_step_on_its_rank_once_per_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "exception@3:1")
    for rank in (0, 1):
        injector = FaultInjector(run, rank, run.log(f"rank-{rank}", rank))
        injector.at_step(2)
        if rank == 1:
            with pytest.raises(InjectedFault, match="exception@3:1"):
                injector.at_step(3)
        else:
            injector.at_step(3)
    FaultInjector(run, 1, run.log("rank-1", 1, 1)).at_step(3)  # the next life of the rank
    (event,) = said(run.path, "fault")
    assert (event.rank, event.step, event["kind"], event["id"], event["source"]) == (
        *(1, 3, "exception", "exception@3:1", "inside"),
    )


def test_two_faults_at_one_place_fire_one_a_life(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "exception@3:1", "exception@3:0", "exception@4:1")
    for step in (3, 4):
        with pytest.raises(InjectedFault, match=f"exception@{step}:1"):
            FaultInjector(run, 1, run.log("rank-1", 1)).at_step(step)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run the fake rung in `tmp_path/run`, 20 steps."""
    install(monkeypatch)
    text = write_text(tmp_path / "text")

    def run(**options: Any) -> dict[str, Any]:
        options = {"timeout_s": 40, "quiet": True, "steps": 20, "data": text, **options}
        return run_rung("fake", out=tmp_path / "run", **options)

    return run


Fake = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("exception", r"rank 1 failed first: InjectedFault: exception@5:1 \(step 5\)"),
        ("kill", r"rank 1 was killed by SIGKILL in step 5 \(injected kill@5:1\)"),
        ("exit", r"rank 1 failed first: it ended with code 17 in step 5 \(injected exit@5:1\)"),
        ("hang", r"rank 1 was in step 5, silent for .* \(injected hang@5:1\)"),
        ("stop", r"rank 1 was in step 5, silent for .* \(injected stop@5:1\)"),
    ],
)
def test_each_kind_costs_the_run_and_is_named_and_not_again_after_the_resume(
    fake: Fake, tmp_path: Path, kind: str, cause: str
) -> None:
    with pytest.raises(RunError, match=cause):
        fake(faults=[f"{kind}@5:1"], timeout_s=4 if kind in ("hang", "stop") else 40)
    report = fake(resume=True)
    assert report["finished"] and report["steps"] == 20
    assert [(f["kind"], f["rank"], f["step"], f["tier"]) for f in report["faults"]] == [
        (kind, 1, 5, "relaunch")
    ]
    assert len(fault_events(tmp_path)) == 1


def fault_events(tmp_path: Path) -> list[Event]:
    return said(tmp_path / "run", "fault")


# --- from outside ----------------------------------------------------------------------------------------


@contextmanager
def running(fake: Fake, tmp_path: Path, steps: int = 4000, **options: Any) -> Iterator[list[BaseException]]:
    """The fake rung going on in a thread, both ranks past step 2; gives what its launcher raised."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            fake(steps=steps, **options)
        except RunError as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        wait_for(lambda: going_on(tmp_path / "run"), "both ranks to make step 2")
        yield raised
    finally:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("exception", "rank 1 failed first: InjectedFault: exception@"),
        ("kill", "rank 1 was killed by SIGKILL in step"),
        ("exit", "rank 1 failed first: it ended with code 17 in step"),
    ],
)
def test_a_fault_from_outside_hits_the_rank_at_once(
    fake: Fake, tmp_path: Path, kind: str, cause: str
) -> None:
    with running(fake, tmp_path) as raised:
        done = request(tmp_path / "run", f"{kind}:1")
    assert (done.fault.kind, done.fault.rank, done.in_effect) == (kind, 1, True) and done.fault.step >= 2
    assert str(raised[0]).startswith(cause)
    (event,) = fault_events(tmp_path)
    assert (event.rank, event["kind"], event["source"]) == (1, kind, "outside")
    assert event.step is not None and event.step >= done.fault.step
    assert event["id"] == f"{kind}@{event.step}:1"


def test_a_rank_hung_from_outside_stays_alive_and_a_second_fault_can_end_it(
    fake: Fake, tmp_path: Path
) -> None:
    with running(fake, tmp_path):
        done = request(tmp_path / "run", "hang:1")
        assert done.in_effect
        time.sleep(0.3)
        assert psutil.Process(done.pid).is_running()
        frozen = last_step(tmp_path, 1)
        time.sleep(0.3)
        assert last_step(tmp_path, 1) == frozen
        request(tmp_path / "run", "exception:1")
    assert [event["kind"] for event in fault_events(tmp_path)] == ["hang", "exception"]


def test_a_stopped_rank_goes_on_when_it_is_continued(fake: Fake, tmp_path: Path) -> None:
    with running(fake, tmp_path, steps=60) as raised:
        pid = request(tmp_path / "run", "stop:0").pid
        wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the rank to stop")
        frozen = last_step(tmp_path, 0)
        time.sleep(0.3)
        assert last_step(tmp_path, 0) == frozen
        os.kill(pid, signal.SIGCONT)
    assert raised == []
    (fault,) = json.loads((tmp_path / "run/report.json").read_text())["faults"]
    assert (fault["kind"], fault["rank"], fault["tier"]) == ("stop", 0, "outlived")


def last_step(tmp_path: Path, rank: int) -> int:
    return max(event.step or 0 for event in said(tmp_path / "run", "step") if event.rank == rank)


def test_a_fault_waits_for_a_native_call_to_return_and_says_so(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NATIVE_CALL", "1")
    with running(fake, tmp_path) as raised:
        wait_for(
            lambda: any(e.rank == 1 and e["phase"] == "idle" for e in said(tmp_path / "run", "phase")),
            "the call",
        )
        done = request(tmp_path / "run", "exception:1", wait_s=0.05)
    assert not done.in_effect
    assert str(raised[0]).startswith("rank 1 failed first: InjectedFault: exception@3:1")
    assert len(fault_events(tmp_path)) == 1


def test_a_rank_that_does_not_listen_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGUSR1 would end a process that has no handler for it: that is not the fault asked for."""
    install(monkeypatch)
    run = make_run(tmp_path / "run")
    scripts = json.dumps({"1": ["step 1", "sleep 2"]})
    ended: list[object] = []

    def body() -> None:
        launch("fake_rank", (str(run.path), scripts), ranks=2, directory=run.path, timeout_s=30)
        ended.append("well")

    thread = threading.Thread(target=body)
    thread.start()
    wait_for(lambda: said(run.path, "step"), "step 1")
    with pytest.raises(UsageError, match=r"did not get as far as listening for faults within 0\.1 s"):
        request(run.path, "exception:1", wait_s=0.1)
    thread.join(30)
    assert ended == ["well"]
    assert not fault_events(tmp_path)


def test_nobody_is_hit_when_the_rank_is_not_running(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was never launched"):
        request(make_run(tmp_path / "idle").path, "kill:1")
    fake()
    with pytest.raises(UsageError, match=r"rank 1 of .* is not running any more"):
        request(tmp_path / "run", "kill:1")
    with pytest.raises(UsageError, match="has no rank 2; its ranks are 0 to 1"):
        request(tmp_path / "run", "kill:2")


def test_a_process_number_that_now_belongs_to_another_is_spared(fake: Fake, tmp_path: Path) -> None:
    """The launcher was killed, so no exit was recorded, and the number has come round to someone else."""
    fake()
    bystander = psutil.Popen(["sleep", "30"])
    try:
        for file in (tmp_path / "run/events").glob("launcher-*"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            kept = [
                {**x, "pid": bystander.pid} if x["what"] == "spawn" else x
                for x in lines
                if x["what"] != "exit"
            ]
            file.write_text("".join(json.dumps(line) + "\n" for line in kept))
        with pytest.raises(UsageError, match="is not running any more"):
            request(tmp_path / "run", "kill:1")
        assert bystander.is_running() and bystander.status() != psutil.STATUS_ZOMBIE
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "is not of the form KIND:RANK, as in kill:1"),
        ("crash:1", "'crash' is not a kind"),
        ("kill:x", "the rank 'x' is not a whole number"),
        ("kill:-1", "the rank must not be negative"),
        ("kill@3:1", "'kill@3' is not a kind"),
    ],
)
def test_a_malformed_request_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(UsageError) as raised:
        request(run.path, text)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_sigusr1_from_anyone_else_does_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        FaultInjector(run, 0, run.log("rank-0", 0)).install()
        with suppress(InjectedFault):
            signal.raise_signal(signal.SIGUSR1)
            assert read_events(run.events) == []
            return
        pytest.fail("a fault fired that nobody asked for")
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_faults_and_the_launcher_import_no_torch() -> None:
    code = "import sys, ridethrough.faults, ridethrough.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
