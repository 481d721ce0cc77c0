"""The command line: what it takes, what it says, which code it ends with."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ridethrough import __version__
from ridethrough.checkpoint.store import FileRecord, Store
from ridethrough.cli import main
from ridethrough.config import JobConfig
from ridethrough.faults import KINDS
from ridethrough.run import Run

from tests.fakes import going_on, install, said, wait_for, write_text

Outputs = pytest.CaptureFixture[str]

#: The command line in a process of its own, with the fake rung.
PROGRAM = (
    "import sys; from ridethrough import cli, rungs; rungs.RUNGS['fake'] = 'fake_rung'; sys.exit(cli.main())"
)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rung without torch, text for it, and an empty working directory."""
    install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text")


def run(*arguments: str, out: str = "a", steps: int = 4) -> int:
    return main(["run", "fake", "--data", "text", "--steps", str(steps), "--out", out, *arguments])


def complaint(outputs: Outputs) -> str:
    """The one line on standard error."""
    out, err = outputs.readouterr()
    assert out == ""
    assert re.fullmatch(r"ridethrough: .+\n", err), err
    return err


# --- help ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "report", "fault", "checkpoint", "doctor"])
def test_help_reads_like_a_manual(command: str, capsys: Outputs) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for part in ("usage: ridethrough", "examples:", f"ridethrough {command}", "exit codes:", "--json [FILE]"):
        assert part in text


def test_every_setting_is_a_flag_with_its_default(capsys: Outputs) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(JobConfig):
        assert f"--{field.name.replace('_', '-')}" in text
        assert f"(default: {field.default})" in text
    assert all(kind in text for kind in KINDS)


def test_the_examples_of_the_help_are_understood(capsys: Outputs) -> None:
    from ridethrough.cli import _parser

    for command in ("run", "report", "fault", "checkpoint", "doctor"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = capsys.readouterr().out
        examples = re.findall(r"^  ridethrough (\S.*?)(?:\s{2,}.*|\s[|>].*)?$", text, re.M)
        assert examples
        for example in examples:
            assert _parser().parse_args(example.split()).command


def test_the_module_and_the_version(capsys: Outputs) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ridethrough", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"ridethrough {__version__}\n")


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "required: COMMAND; see `ridethrough --help`"),
        ("train", "invalid choice: 'train'"),
        ("run", "required: RUNG; see `ridethrough run --help`"),
        ("run syncc", "there is no rung 'syncc'; one of sync"),
        ("run fake --stepz 3", "unrecognized arguments: --stepz 3"),
        ("run fake --step 3", "unrecognized arguments: --step 3"),
        ("run fake --steps many", "argument --steps: invalid int value: 'many'"),
        ("run fake --steps 0", "steps: 0 must be at least 1"),
        ("run fake --size huge", "size: 'huge' is not one of tiny, small"),
        ("run fake --device tpu", "argument --device: invalid choice: 'tpu'"),
        ("run fake --ranks 3", "global_batch: 8 sequences cannot be shared equally by 3 ranks"),
        ("run fake --fault kill", "fault 'kill' is not of the form KIND@STEP:RANK"),
        ("run fake --fault kill@1:2", "fault 'kill@1:2': there is no rank 2"),
        ("run fake --timeout -1", "timeout: -1.0 must be above 0 seconds"),
        ("run fake --resume", "--resume needs --out"),
        ("run fake --data nowhere", "is neither 'stdlib' nor a folder of text files"),
        ("run fake --json no/such/folder.json", "argument --json: no/such/folder.json is not a file in an"),
        ("run fake --out text", "text is not an empty folder; choose another --out"),
        ("run fake --config none.toml", "none.toml cannot be read: No such file or directory"),
        ("report nowhere", "nowhere/run.json does not exist"),
        ("fault nowhere kill:1", "nowhere/run.json does not exist"),
        ("checkpoint ls nowhere", "nowhere is not a folder"),
        ("checkpoint verify step-00000001", "step-00000001 is not a checkpoint folder"),
        ("checkpoint rm text", "invalid choice: 'rm'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(command: str, message: str, capsys: Outputs) -> None:
    assert main(command.split()) == 2
    assert message in complaint(capsys)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stepz = 3", "job.toml: 'stepz' is not a setting; known: assumed_s"),
        ('steps = "3"', "job.toml: steps = '3' should be of type int"),
        ("steps = 0", "job.toml: steps: 0 must be at least 1"),
        ("[job]\nsteps = 3", "job.toml: 'job' is not a setting"),
        ("steps = ", "job.toml is not TOML: "),
        ('ranks = "2"', "job.toml: ranks = '2' should be a whole number"),
        ("ranks = true", "job.toml: ranks = True should be a whole number"),
        (
            'fault = "kill@1:1"',
            "job.toml: fault = 'kill@1:1' should be a list of texts, as in [\"kill@37:1\"]",
        ),
        ('timeout = "1"', "job.toml: timeout = '1' should be a number of seconds"),
    ],
)
def test_a_bad_file_is_named(content: str, message: str, capsys: Outputs) -> None:
    Path("job.toml").write_text(content)
    assert main(["run", "fake", "--config", "job.toml"]) == 2
    assert message in complaint(capsys)


# --- run and report --------------------------------------------------------------------------------------


def test_run_and_report_tell_the_same(capsys: Outputs) -> None:
    assert run("--json", "a.json") == 0
    out = capsys.readouterr().out
    assert "step 4/4  loss 0.2500" in out and "fake on 2 ranks: 4 of 4 steps, finished" in out
    assert main(["report", "a", "--json", "b.json"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "fake on 2 ranks: 4 of 4 steps, finished, 1 launch"
    assert Path("a.json").read_text() == Path("b.json").read_text()


def test_json_is_alone_on_standard_output(capsys: Outputs) -> None:
    assert run("--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["finished"] and report["config"]["steps"] == 4
    assert "step 4/4" in err and "finished" in err
    assert main(["report", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report


def test_quiet_is_quiet(capsys: Outputs) -> None:
    assert run("--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_a_run_without_out_gets_a_name_with_the_time(capsys: Outputs) -> None:
    assert main(["run", "fake", "--data", "text", "--steps", "1", "--quiet"]) == 0
    (path,) = Path("runs").iterdir()
    assert re.fullmatch(r"fake-\d{8}-\d{6}", path.name)


def test_settings_come_from_the_file_and_flags_go_before_it() -> None:
    Path("job.toml").write_text(
        'data = "text"\nsteps = 5\ncheckpoint-every = 2\nlearning_rate = 1\nranks = 1\n'
        'fault = ["exception@2:0"]\ntimeout = 30\nverify_checksums = false\n'
    )
    assert main(["run", "fake", "--config", "job.toml", "--steps", "3", "--out", "a", "--quiet"]) == 1
    run = Run.open(Path("a"))
    assert (run.config.steps, run.config.checkpoint_every, run.config.verify_checksums) == (3, 2, False)
    assert (run.ranks, run.faults) == (1, ("exception@2:0",))
    (launch,) = said(run.path, "launch")
    assert launch["timeout_s"] == 30


def test_a_lost_run_ends_with_code_1_and_says_how_to_go_on(capsys: Outputs) -> None:
    assert run("--fault", "kill@3:1", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["finished"] is False
    assert "ridethrough: rank 1 was killed by SIGKILL in step 3 (injected kill@3:1)" in err
    assert f"log: {Path('a').absolute()}/logs/rank-1.log" in err
    (hint,) = re.findall(r"continue with: ridethrough (.*)", err)
    assert main([*hint.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["finished"] and report["launches"] == 2


def test_the_same_command_with_resume_goes_on(capsys: Outputs) -> None:
    assert run("--fault", "exit@3:0") == 1
    assert run("--fault", "exit@3:0", "--resume") == 0
    assert run("--fault", "exit@3:0", "--resume") == 0
    assert "is finished after 4 steps; nothing was started" in capsys.readouterr().out
    assert run("--resume", steps=5) == 2


# --- processes -------------------------------------------------------------------------------------------


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", PROGRAM, *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    )


def test_ctrl_c_ends_with_130() -> None:
    process = start("run", "fake", "--data", "text", "--steps", "4000", "--out", "a")
    wait_for(lambda: going_on(Path("a")), "the run")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "ridethrough: interrupted; nothing is left running\n")
    assert json.loads(Path("a/report.json").read_text())["faults"][0]["kind"] == "interrupted"


def test_a_fault_from_outside(capsys: Outputs) -> None:
    process = start("run", "fake", "--data", "text", "--steps", "4000", "--out", "a", "--quiet")
    wait_for(lambda: going_on(Path("a")), "the run")
    assert main(["fault", "a", "kill:1", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["kind"], done["rank"], done["in_effect"]) == ("kill", 1, True)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.startswith("ridethrough: rank 1 was killed by SIGKILL in step ")
    assert main(["fault", "a", "kill:1"]) == 2
    assert "is not running any more" in complaint(capsys)


@pytest.mark.parametrize("command", ["run fake --data text --steps 4000 --out a", "checkpoint ls ."])
def test_a_reader_that_leaves_is_no_traceback(command: str) -> None:
    read, write = os.pipe()
    os.close(read)
    process = start(*command.split(), stdout=write)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


# --- checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 and 20, and a save of 30 in flight."""
    run = Run.create(tmp_path / "r", "fake", 2, JobConfig(), (), {})
    store = Store(run.checkpoints, run.id, keep=3)
    for step in (10, 20, 30):
        staging = store.begin(step, 5)
        (staging / "__0_0.distcp").write_bytes(b"bytes")
        sha256 = "277089d91c0bdf4f2e6862ba7e4a07605119431f5d13f726dd352b06f1b206a9"
        if step < 30:
            store.commit(staging, step, {"__0_0.distcp": FileRecord(5, sha256)}, world_size=2)
    return run.path


def statuses(capsys: Outputs) -> dict[int, str]:
    return {entry["step"]: entry["status"] for entry in json.loads(capsys.readouterr().out)}


def test_checkpoints_are_listed_newest_first(store: Path, capsys: Outputs) -> None:
    assert main(["checkpoint", "ls", str(store)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.split()[:3] for line in lines] == [
        ["in-flight", "step", "30"],
        ["good", "step", "20"],
        ["good", "step", "10"],
    ]


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_a_run_and_its_checkpoints_folder_are_the_same(store: Path, where: str, capsys: Outputs) -> None:
    assert main(["checkpoint", "verify", str(store / where), "--json"]) == 0
    assert statuses(capsys) == {30: "in-flight", 20: "good", 10: "good"}


def test_a_flipped_bit_is_found_by_its_checksum(store: Path, capsys: Outputs) -> None:
    file = store / "checkpoints/step-00000020/__0_0.distcp"
    file.write_bytes(b"bytez")
    assert main(["checkpoint", "ls", str(store)]) == 0
    assert main(["checkpoint", "verify", str(store), "--no-checksums"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(store)]) == 1
    out = capsys.readouterr().out
    assert f"{file}: its content changed" in out
    assert main(["checkpoint", "verify", str(file.parent), "--json"]) == 1
    assert statuses(capsys) == {20: "damaged"}
    assert main(["checkpoint", "verify", str(file.parent.parent / "step-00000010"), "--json"]) == 0
    assert statuses(capsys) == {10: "good"}


def test_a_truncated_file_is_found_by_its_size(store: Path, capsys: Outputs) -> None:
    (store / "checkpoints/step-00000010/__0_0.distcp").write_bytes(b"by")
    assert main(["checkpoint", "ls", str(store), "--json", "list.json"]) == 1
    assert "has 2 bytes instead of 5" in capsys.readouterr().out
    assert [entry["status"] for entry in json.loads(Path("list.json").read_text())] == [
        "in-flight",
        "good",
        "damaged",
    ]


def test_nothing_to_verify_is_not_a_success(tmp_path: Path, capsys: Outputs) -> None:
    Run.create(tmp_path / "r", "fake", 2, JobConfig(), (), {})
    assert main(["checkpoint", "ls", "r"]) == 0
    assert main(["checkpoint", "verify", "r"]) == 1
    assert capsys.readouterr().out == "no checkpoint in r\n" * 2


def test_checkpoint_imports_no_torch(store: Path) -> None:
    code = "import sys; from ridethrough.cli import main; main(['checkpoint', 'verify', sys.argv[1]]); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(store)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "good" in done.stdout


# --- doctor ----------------------------------------------------------------------------------------------


def test_doctor_says_what_it_found(capsys: Outputs) -> None:
    assert main(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert all(check.keys() == {"check", "status", "found", "advice"} for check in checks)
    assert main(["doctor"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "} <= {
        "ok",
        "warn",
    }


def test_doctor_fails_where_runs_cannot_work(capsys: Outputs) -> None:
    assert main(["doctor", "--runs", "/proc"]) == 1
    assert re.search(r"^fail  fsync", capsys.readouterr().out, re.M)
