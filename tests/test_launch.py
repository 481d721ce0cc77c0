"""The launcher, with real processes: what it shows, what it calls the first failure, that nothing is left."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ridethrough import launch as launching
from ridethrough import processes, spawn
from ridethrough.errors import RunError, UsageError
from ridethrough.launch import launch, run_rung
from ridethrough.launcher import direct, group
from ridethrough.launcher.progress import Progress
from ridethrough.run import Run
from ridethrough.rungs import RUNGS

from tests.fakes import going_on, install, said, wait_for, write_text

Scripts = dict[str, list[str]]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks find `fake_rank` and `fake_rung`; the latter is a rung."""
    install(monkeypatch)


def start(directory: Path, scripts: Scripts | None = None, **options: Any) -> None:
    options = {"ranks": 2, "timeout_s": 30, "grace_s": 1, **options}
    launch("fake_rank", (str(directory), json.dumps(scripts or {})), directory=directory, **options)


def token(directory: Path) -> str:
    return str(said(directory, "launch")[0]["id"])


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pids(directory: Path) -> list[int]:
    return [event["pid"] for event in said(directory, "spawn")]


def assert_nothing_left(directory: Path) -> None:
    assert pids(directory)
    assert processes.carriers(token(directory)) == []
    assert not [pid for pid in pids(directory) if alive(pid)]


# --- what it shows ---------------------------------------------------------------------------------------


def test_output_goes_to_console_with_the_rank_and_to_a_log_a_rank(tmp_path: Path) -> None:
    console = io.StringIO()
    start(tmp_path, {"0": ["print hello"], "1": ["print from one"]}, console=console)
    start(tmp_path, {"1": ["print again"]}, console=console, generation=1)
    assert {"[rank 0] hello", "[rank 1] from one", "[rank 1] again"} <= set(console.getvalue().splitlines())
    lines = (tmp_path / "logs/rank-1.log").read_text().splitlines()
    assert [line for line in lines if not line.startswith("---")] == ["from one", "again"]
    assert [line.split(",")[0] for line in lines if line.startswith("---")] == [
        "--- generation 0",
        "--- generation 1",
    ]
    assert said(tmp_path, "launch_end")[-1]["outcome"] == "finished"
    assert_nothing_left(tmp_path)


def test_without_a_console_nothing_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, {"0": ["print hello"]})
    assert capfd.readouterr() == ("", "")
    assert "hello" in (tmp_path / "logs/rank-0.log").read_text()


def test_a_rank_that_floods_its_output_loses_no_line_and_stops_nobody(tmp_path: Path) -> None:
    console = io.StringIO()
    script = ["print " + "y\n" * 30_000, "exit 3"]  # it dies with most of that in the pipe and in the queue
    with pytest.raises(RunError, match="it ended with code 3"):
        start(tmp_path, {"0": script}, console=console)
    assert console.getvalue().count("[rank 0] y\n") == 30_000
    assert (tmp_path / "logs/rank-0.log").read_text().count("y\n") == 30_000


def test_a_log_that_cannot_be_written_is_said_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.log").symlink_to("/dev/full")
    console = io.StringIO()
    start(tmp_path, {"0": ["print hello"]}, console=console)
    assert "[rank 0] hello" in console.getvalue()
    assert "No space left on device" in console.getvalue()


def test_a_console_that_nobody_reads_ends_the_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    console = os.fdopen(write, "w")
    with pytest.raises(BrokenPipeError):
        start(tmp_path, {"0": ["print hello", "sleep 60"]}, console=console)
    with pytest.raises(BrokenPipeError):
        console.close()
    assert_nothing_left(tmp_path)


def test_progress_in_a_file_is_a_line_every_tenth_from_the_restored_step_on() -> None:
    stream = io.StringIO()
    progress = Progress(stream, 60)
    progress.at(30)
    for step in range(31, 61):
        progress.at(step, 0.5)
    progress.close()
    assert stream.getvalue().splitlines() == [f"step {step}/60  loss 0.5000" for step in (36, 42, 48, 54, 60)]


def test_progress_of_a_run_shorter_than_ten_steps_has_a_line_a_step() -> None:
    stream = io.StringIO()
    progress = Progress(stream, 3)
    for step in (1, 2, 3):
        progress.at(step, 0.5)
    assert len(stream.getvalue().splitlines()) == 3


def test_progress_in_a_terminal_is_a_bar_below_the_output() -> None:
    reader, writer = pty.openpty()  # of size 0 × 0, as some containers have
    with os.fdopen(writer, "w") as terminal:
        progress = Progress(terminal, 4)
        progress.at(1, 2.5)
        progress.line("[rank 0] hello")
        progress.at(4, 1.5)
        progress.close()
    shown = b""
    with suppress(OSError):  # how a terminal says that nobody writes to it any more
        while part := os.read(reader, 1 << 16):
            shown += part
    os.close(reader)
    assert b"\r[rank 0] hello\r\n" in shown  # not glued to the bar
    assert b"4/4" in shown.splitlines()[-1] and b"loss=1.5000" in shown.splitlines()[-1]


# --- first cause -----------------------------------------------------------------------------------------


def test_a_failing_rank_raises_with_its_own_traceback_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        start(tmp_path, {"0": ["sleep 60"], "1": ["step 1", "enter 2", "raise"]})
    text = str(raised.value)
    assert text.startswith("rank 1 failed first: ValueError: the fake is broken (step 2)\n")
    assert "fake_rank.py" in text and "raise ValueError" in text
    assert str(tmp_path / "logs/rank-1.log") in text
    assert said(tmp_path, "detected")[0].rank == 1
    assert said(tmp_path, "launch_end")[0]["outcome"] == "failed"
    assert {event.rank: event["code"] for event in said(tmp_path, "exit")} == {0: -signal.SIGTERM, 1: 1}
    assert_nothing_left(tmp_path)


def test_a_module_that_does_not_start_shows_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank \d failed first: it ended with code 1 in startup\n.*No module"):
        launch("no_such_module_at_all", ranks=2, directory=tmp_path, timeout_s=30)


def test_a_killed_rank_comes_before_the_peer_that_feels_it(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        start(tmp_path, {"0": ["raise-when-gone 1"], "1": ["pid", "enter 3", "sleep 0.3", "signal SIGKILL"]})
    first, *rest = str(raised.value).splitlines()
    assert first == "rank 1 was killed by SIGKILL in step 3"
    assert "rank 0 failed then: ConnectionError: connection reset by peer (startup)" in rest


def test_a_rank_that_leaves_early_with_code_0_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="rank 1 left early: it ended with code 0 in step 1, before its work"):
        start(tmp_path, {"0": ["sleep 60"], "1": ["step 1", "leave"]})
    assert_nothing_left(tmp_path)


def test_all_ranks_leaving_early_with_code_0_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="left early"):
        start(tmp_path, {"0": ["leave"], "1": ["leave"]})


def test_a_rank_whose_job_raised_but_which_does_not_leave_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "LEAVE_S", 0.3)
    with pytest.raises(RunError, match="rank 0 failed first: ValueError: stuck at the door"):
        start(tmp_path, {"0": ["say-error", "sleep 60"], "1": ["sleep 60"]})
    assert_nothing_left(tmp_path)


def test_a_line_that_is_no_event_is_an_error_naming_the_file(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events/rank-0-g0-1.jsonl").write_text("rubbish\n")
    with pytest.raises(RunError, match=r"rank-0-g0-1\.jsonl: a line is not an event"):
        start(tmp_path, {"0": ["sleep 60"]})


# --- nothing left ----------------------------------------------------------------------------------------


def test_a_hang_is_ended_at_the_time_limit_and_each_rank_accounted_for(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        start(
            tmp_path,
            {"0": ["deaf", "phase restore", "sleep 60"], "1": ["deaf", "enter 4", "sleep 60"]},
            timeout_s=2,
        )
    assert str(raised.value).startswith("no end within 2 s: rank 0 was in restore, silent for ")
    assert "rank 1 was in step 4, silent for " in str(raised.value)
    assert said(tmp_path, "launch_end")[0]["outcome"] == "timeout"
    assert {event["code"] for event in said(tmp_path, "exit")} == {-signal.SIGKILL}
    assert_nothing_left(tmp_path)


def test_a_stopped_rank_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no end within"):
        start(tmp_path, {"0": ["sleep 60"], "1": ["signal SIGSTOP"]}, timeout_s=2)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("kind", ["kept", "stray"])
@pytest.mark.parametrize("end", ["leaves", "fails"])
def test_what_a_rank_has_started_goes_with_it_and_its_open_pipe_stops_nobody(
    tmp_path: Path, kind: str, end: str
) -> None:
    """`stray` has a session of its own, so that ending the rank's process group does not reach it."""
    script = [f"child {kind}", *(["raise"] if end == "fails" else [])]
    began = time.monotonic()
    if end == "fails":
        with pytest.raises(RunError, match="the fake is broken"):
            start(tmp_path, {"0": script, "1": ["sleep 60"]})
    else:
        start(tmp_path, {"0": script})
    assert time.monotonic() - began < 25  # the child sleeps for 120
    assert not alive(int((tmp_path / "child-0").read_text()))
    assert_nothing_left(tmp_path)


LAUNCHER = """
import json, sys
from pathlib import Path
from ridethrough.launch import launch
directory, scripts = Path(sys.argv[1]), sys.argv[2]
launch("fake_rank", (str(directory), scripts), ranks=2, directory=directory, timeout_s=60, grace_s=1)
"""


def _launcher(directory: Path, scripts: Scripts) -> subprocess.Popen[str]:
    """A launcher in another process, with all ranks well on their way."""
    command = [sys.executable, "-c", LAUNCHER, str(directory), json.dumps(scripts)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: len(said(directory, "step")) == 2, "both ranks to make a step")
    return process


@pytest.mark.parametrize("target", ["launcher", "group"])
def test_sigkill_of_the_launcher_leaves_no_process(tmp_path: Path, target: str) -> None:
    scripts = {"0": ["deaf", "child stray", "step 1", "sleep 60"], "1": ["step 1", "signal SIGSTOP"]}
    process = _launcher(tmp_path, scripts)
    assert len(processes.carriers(token(tmp_path))) == 3
    (os.kill if target == "launcher" else os.killpg)(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    wait_for(lambda: not processes.carriers(token(tmp_path)), "the killed launcher's ranks to end", 10)
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


def test_ctrl_c_ends_everything_first(tmp_path: Path) -> None:
    process = _launcher(tmp_path, {"0": ["deaf", "step 1", "sleep 60"], "1": ["step 1", "sleep 60"]})
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)  # the impatient reader's second Ctrl-C
    _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors
    assert said(tmp_path, "launch_end")[0]["outcome"] == "interrupted"
    assert {event.rank: event["code"] for event in said(tmp_path, "exit")} == {
        0: -signal.SIGKILL,
        1: -signal.SIGTERM,
    }
    assert len(said(tmp_path, "aborted")) == 1
    assert_nothing_left(tmp_path)


def test_sigterm_is_passed_on_before_anything_is_killed(tmp_path: Path) -> None:
    process = _launcher(tmp_path, {rank: ["note-sigterm", "step 1", "sleep 60"] for rank in "01"})
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "RunError: interrupted: the launcher got SIGTERM" in errors
    assert (tmp_path / "sigterm-0").exists() and (tmp_path / "sigterm-1").exists()
    assert said(tmp_path, "launch_end")[0]["outcome"] == "interrupted"
    assert_nothing_left(tmp_path)


def test_signal_handlers_are_as_before(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    start(tmp_path)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_ranks_outlive_no_thread_but_also_need_no_main_thread(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def body() -> None:
        try:
            start(tmp_path, {"0": ["sleep 0.5"], "1": ["raise"]})
        except RunError as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(30)
    assert len(errors) == 1 and "the fake is broken" in str(errors[0])
    assert_nothing_left(tmp_path)


CELL = """
from pathlib import Path
from ridethrough.launch import launch
import sys
directory, scripts = Path({directory!r}), {scripts!r}
launch("fake_rank", (str(directory), scripts), ranks=2, directory=directory, console=sys.stdout, steps=4)
"""


def test_a_notebook_cell_shows_output_and_progress_and_its_interrupt_ends_everything(tmp_path: Path) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        scripts = json.dumps(
            {"0": ["print hello", "step 1", "sleep 60"], "1": ["step 1", "deaf", "sleep 60"]}
        )
        outputs: list[dict[str, Any]] = []
        cell = threading.Thread(
            target=client.execute_interactive,
            args=(CELL.format(directory=str(tmp_path), scripts=scripts),),
            kwargs={"output_hook": outputs.append, "timeout": 60},
        )
        cell.start()
        wait_for(lambda: len(said(tmp_path, "step")) == 2, "both ranks to make a step", 40)
        wait_for(lambda: any("1/4" in bar(output) for output in outputs), "the bar to move")
        manager.interrupt_kernel()
        cell.join(30)
        assert any(o["content"].get("ename") == "KeyboardInterrupt" for o in outputs)
        assert "[rank 0] hello" in "".join(output["content"].get("text", "") for output in outputs)
        assert said(tmp_path, "launch_end")[0]["outcome"] == "interrupted"
        assert_nothing_left(tmp_path)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def bar(output: dict[str, Any]) -> str:
    return str(output["content"].get("data", {}).get("text/plain", ""))


# --- environment and port --------------------------------------------------------------------------------


def test_the_callers_own_settings_do_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = {
        **{"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "7", "GROUP_RANK": "3", "ROLE_NAME": "trainer"},
        **{"MASTER_ADDR": "nowhere", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "PET_NNODES": "4"},
        **{"OMP_NUM_THREADS": "64", "OMP_PROC_BIND": "true", "MKL_DYNAMIC": "0", "KMP_AFFINITY": "x"},
        **{"JPY_PARENT_PID": "1", "MPLBACKEND": "module://x"},
    }
    kept = {"NCCL_DEBUG": "WARN", "HF_HOME": "/x", "TORCH_CPP_LOG_LEVEL": "info", "PYTHONWARNINGS": "error"}
    for name, value in {**foreign, **kept}.items():
        monkeypatch.setenv(name, value)
    assert "PYTEST_CURRENT_TEST" in os.environ
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    start(tmp_path, {"1": ["environment"]}, threads=3)
    seen = json.loads((tmp_path / "environment-1.json").read_text())
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    expected |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    expected |= {"RIDETHROUGH_GENERATION": "0", "RIDETHROUGH_LAUNCHER_PID": str(os.getpid())}
    expected |= {"NCCL_DEBUG": "WARN", "HF_HOME": "/x", "TORCH_CPP_LOG_LEVEL": "info"}
    expected |= {"PYTHONWARNINGS": "default,ignore::FutureWarning", "PYTHONUNBUFFERED": "1"}
    assert {name: seen.get(name) for name in expected} == expected
    assert seen["MASTER_PORT"] != "1"
    gone = [*foreign.keys() - expected.keys() - {"MASTER_PORT"}, "PYTEST_CURRENT_TEST"]
    assert [name for name in gone if name in seen] == []


def test_the_port_is_free_below_the_kernels_own_and_free_again_afterwards(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        start(tmp_path, {"0": ["listen", "sleep 60"], "1": ["sleep 0.5", "raise"]})
    port = int((tmp_path / "port").read_text())
    assert 20_000 <= port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.socket() as listener:
        listener.bind(("", port))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_not_free(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        try:
            taken.bind((address, spawn.free_port()))
        except OSError as error:
            pytest.skip(f"no {address} here: {error}")
        taken.listen()
        port = taken.getsockname()[1]
        assert not spawn.is_free(port)
    assert spawn.is_free(port)


def test_ports_differ_between_launchers_that_start_together() -> None:
    assert len({spawn.free_port() for _ in range(20)}) > 10


# --- runs ------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_text(tmp_path / "text")


@pytest.fixture
def fake(tmp_path: Path, text: str) -> Callable[..., dict[str, Any]]:
    """Run the fake rung in `tmp_path/run`."""

    def run(**options: Any) -> dict[str, Any]:
        options = {"out": tmp_path / "run", "quiet": True, "timeout_s": 30, **options}
        if not options.get("resume"):
            options = {"data": text, "steps": 8, **options}
        return run_rung(options.pop("rung", "fake"), **options)

    return run


Fake = Callable[..., dict[str, Any]]


def test_a_run_leaves_a_report_and_all_it_takes_to_run_it_again(fake: Fake, tmp_path: Path) -> None:
    report = fake(global_batch=6, ranks=3)
    assert report["finished"] and report["steps"] == 8 and report["launches"] == 1
    assert json.loads((tmp_path / "run/report.json").read_text()) == report
    run = Run.open(tmp_path / "run")
    assert (run.rung, run.ranks, run.config.global_batch, run.config.steps) == ("fake", 3, 6, 8)
    assert run.about["versions"]["ridethrough"] and run.about["machine"]["cores"] >= 1
    assert run.corpus["files"] == 1 and run.about["command"] and run.about["created"]
    assert report["versions"] == run.about["versions"]


def test_a_lost_run_is_continued_and_its_fault_fires_once(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL in step 5"):
        fake(faults=["kill@5:1"])
    lost = json.loads((tmp_path / "run/report.json").read_text())
    assert not lost["finished"]
    report = fake(resume=True, faults=["kill@5:1"])
    assert report["finished"] and report["launches"] == 2
    assert [(f["kind"], f["rank"], f["step"]) for f in report["faults"]] == [("kill", 1, 5)]
    assert [event.generation for event in said(tmp_path / "run", "launch")] == [0, 1]


def test_faults_of_a_resume_are_added(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        fake(faults=["exit@3:0"])
    with pytest.raises(RunError, match="rank 1 failed first: InjectedFault: exception@6:1"):
        fake(resume=True, faults=["exception@6:1"])
    assert Run.open(tmp_path / "run").faults == ("exit@3:0", "exception@6:1")
    assert fake(resume=True)["finished"]


def test_a_finished_run_is_left_as_it_is(fake: Fake, tmp_path: Path) -> None:
    first = fake()
    console = io.StringIO()
    again = fake(resume=True, quiet=False, console=console)
    assert again == first and len(said(tmp_path / "run", "launch")) == 1
    assert "is finished after 8 steps; nothing was started" in console.getvalue()


def test_a_resume_of_nothing_is_a_start(fake: Fake, text: str) -> None:
    assert fake(resume=True, data=text, steps=3)["finished"]


def test_a_resume_may_have_another_number_of_ranks(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        fake(faults=["kill@2:1"])
    assert fake(resume=True, ranks=1)["finished"]
    assert [event["ranks"] for event in said(tmp_path / "run", "launch")] == [2, 1]
    assert Run.open(tmp_path / "run").ranks == 2


def test_what_cannot_be_run_is_refused_before_anything_is_made(fake: Fake, tmp_path: Path) -> None:
    refused: dict[str, dict[str, Any]] = {
        "there is no rung 'syncc'; one of": {"rung": "syncc"},
        "global_batch: 8 sequences cannot be shared equally by 3 ranks": {"ranks": 3},
        "ranks: 0 must be at least 1": {"ranks": 0},
        "timeout: 0 must be above 0": {"timeout_s": 0},
        "steps: 0 must be at least 1": {"steps": 0},
        "'stepz' is not a setting": {"stepz": 1},
        "there is no rank 2; ranks are 0 to 1": {"faults": ["kill@1:2"]},
        "the run ends after step 8": {"faults": ["kill@9:1"]},
        "is given twice": {"faults": ["kill@3:1", "kill@3:1"]},
        "neither 'stdlib' nor a folder": {"data": "/no/such/folder"},
    }
    for message, options in refused.items():
        with pytest.raises(UsageError, match=message):
            fake(**options)
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_not_run_over(fake: Fake) -> None:
    fake(steps=1)
    with pytest.raises(UsageError, match="holds a run already; continue it with --resume"):
        fake(steps=1)


def test_a_run_does_not_go_on_as_something_else(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError):
        fake(faults=["exit@2:0"])
    with pytest.raises(
        UsageError, match="other settings: steps is 8 there and 9 here; seed is 0 there and 1"
    ):
        fake(resume=True, steps=9, seed=1)
    monkeypatch.setitem(RUNGS, "other", "fake_rung")
    with pytest.raises(UsageError, match="is a run of rung 'fake'; it cannot go on as 'other'"):
        fake(resume=True, rung="other")


def test_a_second_launcher_is_refused_and_told_who_holds_the_run(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.5")
    thread = threading.Thread(target=fake)
    thread.start()
    wait_for((tmp_path / "run/events").exists, "the first launcher to start")
    with pytest.raises(UsageError, match=f"is being run by process {os.getpid()} on {socket.gethostname()}"):
        fake(resume=True)
    thread.join(30)
    assert json.loads((tmp_path / "run/report.json").read_text())["launches"] == 1


def test_ranks_that_lost_launcher_and_guard_are_ended_before_the_run_goes_on(
    fake: Fake, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("FAKE_STEP_S", "0.5")
    code = "import sys; from ridethrough import cli, rungs; rungs.RUNGS['fake'] = 'fake_rung'; cli.main()"
    arguments = ["run", "fake", "--data", text, "--steps", "30", "--out", str(run), "--quiet"]
    launcher = subprocess.Popen([sys.executable, "-c", code, *arguments], start_new_session=True)
    wait_for(lambda: going_on(run), "the run")
    for guard in psutil.Process(launcher.pid).children():
        if "ridethrough.processes" in guard.cmdline():
            guard.kill()
    launcher.kill()
    launcher.wait(10)
    assert len(processes.carriers(token(run))) == 2
    monkeypatch.delenv("FAKE_STEP_S")
    assert fake(resume=True)["finished"]
    assert not (Path(tempfile.gettempdir()) / f"ridethrough-{token(run)}").exists()
    assert_nothing_left(run)


def test_a_relative_data_folder_is_kept_by_its_full_path(
    fake: Fake, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fake(data="text")
    assert Run.open(tmp_path / "run").config.data == text


def test_resuming_a_copy_of_a_live_run_leaves_the_original_alone(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.5")
    thread = threading.Thread(target=fake)
    thread.start()
    wait_for(lambda: going_on(tmp_path / "run"), "the run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    monkeypatch.delenv("FAKE_STEP_S")
    assert fake(out=tmp_path / "copy", resume=True)["finished"]
    thread.join(30)
    original = json.loads((tmp_path / "run/report.json").read_text())
    assert original["finished"] and original["launches"] == 1 and original["faults"] == []


def test_a_rank_that_hangs_after_its_work_is_done_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "LEAVE_S", 1.0)
    start(tmp_path, {"1": ["step 1", "end-and-hang"]})
    assert [event["outcome"] for event in said(tmp_path, "launch_end")] == ["finished"]
    assert_nothing_left(tmp_path)


def test_a_run_json_that_was_edited_is_refused(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        fake(faults=["exit@3:0"])
    file = tmp_path / "run/run.json"
    values = json.loads(file.read_text())
    for edited in (
        {"config": {**values["config"], "seed": 7}},
        {"faults": 5},
        {"ranks": "two"},
        {"config": []},
    ):
        file.write_text(json.dumps({**values, **edited}))
        with pytest.raises(UsageError, match="was edited after the run began"):
            fake(resume=True)


def test_a_run_inside_its_own_data_is_refused(fake: Fake, text: str) -> None:
    with pytest.raises(UsageError, match="lies in the folder of texts"):
        fake(out=Path(text) / "run")


def test_the_first_cause_is_told_though_the_report_cannot_be_written(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run: Run) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launching.report, "write_report", full)
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL in step 5"):
        fake(faults=["kill@5:1"])
