"""The command line: thin over `launch`, `report`, `faults`, `checkpoint.store` and `doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import shlex
import sys
import time
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NoReturn

from ridethrough import __version__, doctor, faults
from ridethrough.checkpoint import store
from ridethrough.config import JobConfig, PodConfig
from ridethrough.errors import CheckpointError, RunError, UsageError
from ridethrough.launch import run_rung
from ridethrough.report import build_report, format_report, write_report
from ridethrough.run import Run, read_json
from ridethrough.rungs import RUNGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXIT_CODES = """\
exit codes:
  0    done
  1    the run failed, or something that was checked is not good
  2    bad input; one line says what
  130  interrupted by Ctrl-C; nothing is left running
"""

RUN = """\
Train one rung of the ladder on ranks of this machine, show what they print, and account for every second.

The run directory holds everything: configuration, events, logs, checkpoints and report.json. A run that was
lost is continued by the same command with --resume; it restores the newest good checkpoint, and each fault
given by --fault fires only once. A finished run is left as it is.
"""

RUN_EXAMPLES = """\
examples:
  ridethrough run sync                                    60 steps on 2 ranks, into runs/sync-<time>
  ridethrough run sync --out runs/a --fault kill@37:1     kill rank 1 at the start of step 37 (exit code 1)
  ridethrough run sync --out runs/a --resume              continue it from the last checkpoint
  ridethrough run sync --config job.toml --steps 200      settings from a file; flags go before it
  ridethrough run sync --json > report.json               only the report on standard output
  ridethrough run sync --launcher torchrun --pods 2 --policy gang --fault pod@30:1
                                                          torchrun in two pods; one is lost, both made anew

A configuration file is TOML with the names of the flags, `_` or `-` alike:
  size = "small"
  steps = 200
  ranks = 2
  fault = ["kill@37:1"]

faults are KIND@STEP:RANK; KIND is one of
  exception  raised in the rank          kill  SIGKILL        exit  the process ends with code 17
  hang       the rank stops answering    stop  SIGSTOP: the whole process stands still
and with --launcher torchrun, to the pod that the rank is in,
  pod    SIGKILL for its container       net   its network is cut       slow  its network is slow
  drain  SIGTERM, a grace, SIGKILL       pid1  its first process, the torchrun agent, stands still
"""

REPORT = """\
Account for a run: what became of every rank-second, what each checkpoint and each fault cost.

Works on a run that is finished, lost or still going on, and brings report.json in the run's directory up to
date. The keys of report.json are documented in ridethrough.report.SCHEMA.
"""

REPORT_EXAMPLES = """\
examples:
  ridethrough report runs/a
  ridethrough report runs/a --json | jq .goodput
  ridethrough report runs/a --gpus 1024                   what the same seconds cost on 1,024 GPUs
"""

FAULT = """\
Do a fault to a rank of a run that is going on, from outside and now.

kill and stop are signals. exception, exit and hang are carried out by the rank itself as soon as its main
thread is back in Python code. A stopped rank goes on after `kill -CONT PID`. pod, net, slow, drain and pid1
happen to the pod that the rank is in, in a run with --launcher torchrun.
"""

FAULT_EXAMPLES = """\
examples:
  ridethrough fault runs/a kill:1       SIGKILL rank 1
  ridethrough fault runs/a hang:0       rank 0 stops answering
"""

CHECKPOINT = """\
Tell from outside what is good, what is damaged and why. Starts no rank and does not import torch.

ls compares names and sizes with each checkpoint's commit record. verify also reads every file and compares
its SHA-256, and fails if there is no good checkpoint at all.
"""

CHECKPOINT_EXAMPLES = """\
examples:
  ridethrough checkpoint ls runs/a                                  a run, or
  ridethrough checkpoint verify runs/a/checkpoints                  its checkpoints, or
  ridethrough checkpoint verify runs/a/checkpoints/step-00000040    one of them
  ridethrough checkpoint verify runs/a --no-checksums               sizes only
"""

DOCTOR = """\
Check this machine: versions (and why pip took this release of NVRx), GPU, cores, memory, /dev/shm, ports, and
how fast the disk makes data durable. Exits with code 1 only if runs cannot work.
"""

DOCTOR_EXAMPLES = """\
examples:
  ridethrough doctor
  ridethrough doctor --runs /mnt/scratch/runs      the disk that runs will be written to
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that cannot be printed is no error
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.command(arguments)
        sys.stdout.flush()
    except UsageError as error:
        return _complain(error, 2)
    except BrokenPipeError:
        return _nobody_reads()
    except (RunError, CheckpointError, OSError) as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _complain("interrupted; nothing is left running", 130)
    return code


def _complain(error: object, code: int) -> int:
    print(f"ridethrough: {error}", file=sys.stderr)
    return code


def _nobody_reads() -> int:
    """Whoever read our output has left, as `head` does: no fault, and not worth a traceback at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


# --- commands --------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    file = _read_settings(arguments.config) if arguments.config else {}
    settings = {name: value for name, value in file.items() if name in _fields()}
    settings |= {name: value for name in _fields() if (value := getattr(arguments, name)) is not None}
    pods = {name: value for name, value in file.items() if name in _fields(PodConfig)}
    pods |= {name: value for name in _fields(PodConfig) if (value := getattr(arguments, name)) is not None}
    if pods and "launcher" not in pods and not arguments.resume:
        raise UsageError(f"--{next(iter(pods)).replace('_', '-')} is for pods; add --launcher torchrun")
    out = _out(arguments)
    console = sys.stderr if arguments.json == "-" else sys.stdout
    try:
        report = run_rung(
            arguments.rung,
            out=out,
            ranks=_first(arguments.ranks, file.get("ranks")),
            resume=arguments.resume,
            faults=_first(arguments.fault, file.get("fault"), []),
            timeout_s=_first(arguments.timeout, file.get("timeout"), 3600.0),
            quiet=arguments.quiet,
            console=console,
            pods=_pods(out, pods) if pods else None,
            **settings,
        )
    except RunError as error:
        _emit(arguments.json, read_json(out / "report.json"))
        hint = f"continue with: ridethrough run {arguments.rung} --out {shlex.quote(str(out))} --resume"
        raise RunError(f"{error}\n{hint}") from error
    _emit(arguments.json, report)
    if not arguments.quiet:
        print(f"\n{format_report(report)}\n\nrun directory: {out}", file=console)
    return 0


def _pods(out: Path, asked: dict[str, Any]) -> PodConfig:
    """What is asked for, and for the rest what the run has, if it exists."""
    there = Run.open(out).pods if (out / "run.json").exists() else None
    return PodConfig.from_dict({**(there.to_dict() if there else {}), **asked}, "settings")


def _out(arguments: argparse.Namespace) -> Path:
    if arguments.out is None and arguments.resume:
        raise UsageError("--resume needs --out: which run shall go on?")
    return Path(arguments.out or Path("runs") / f"{arguments.rung}-{time.strftime('%Y%m%d-%H%M%S')}")


def _report(arguments: argparse.Namespace) -> int:
    run = Run.open(arguments.run)
    try:
        report = write_report(run)
    except OSError as error:
        print(f"ridethrough: report.json is not brought up to date: {error}", file=sys.stderr)
        report = build_report(run)
    if not _emit(arguments.json, report):
        print(format_report(report, arguments.gpus))
    return 0


def _fault(arguments: argparse.Namespace) -> int:
    done = faults.request(arguments.run, arguments.fault)
    if not _emit(arguments.json, done.to_dict()):
        state = "" if done.in_effect else "; it takes effect when the rank is back in Python code"
        fault = done.fault
        print(f"{fault.kind} on rank {fault.rank} (process {done.pid}) in step {fault.step}{state}")
    return 0


def _checkpoint(arguments: argparse.Namespace) -> int:
    checksums = arguments.action == "verify" and not arguments.no_checksums
    entries = _entries(arguments.directory.absolute(), checksums)
    if not _emit(arguments.json, [_entry(entry) for entry in entries]):
        print("\n".join(_entry_lines(entries)) or f"no checkpoint in {arguments.directory}")
    statuses = {entry.status for entry in entries}
    return int("damaged" in statuses or (arguments.action == "verify" and "good" not in statuses))


def _entries(directory: Path, checksums: bool) -> list[store.Entry]:
    """The checkpoints of a run, of a checkpoints folder, or the single one that `directory` is."""
    if (directory / "run.json").exists():
        run = Run.open(directory)
        return store.scan(run.checkpoints, checksums, run.id) if run.checkpoints.exists() else []
    if directory.name.startswith("step-"):
        return [store.verify(directory, checksums)]
    return store.scan(directory, checksums)


def _entry(entry: store.Entry) -> dict[str, Any]:
    return {**dataclasses.asdict(entry), "path": str(entry.path)}


def _entry_lines(entries: Iterable[store.Entry]) -> Iterable[str]:
    for entry in entries:
        ranks = "" if entry.world_size is None else f"{entry.world_size} ranks"
        size = f"{entry.bytes / 1e6:.3f} MB"
        yield f"{entry.status:<10}step {entry.step:<9}{size:>14}  {ranks:<9}{entry.path.name}"
        yield from (f"          {problem}" for problem in entry.problems)


def _doctor(arguments: argparse.Namespace) -> int:
    checks = doctor.examine(arguments.runs)
    if not _emit(arguments.json, [check.to_dict() for check in checks]):
        print(doctor.format_checks(checks))
    return int(any(check.status == "fail" for check in checks))


def _emit(target: str | None, values: dict[str, Any] | list[Any]) -> bool:
    """Write JSON to a file or (`-`) standard output; returns whether it went to standard output."""
    text = json.dumps(values, indent=1)
    if target == "-":
        print(text)
    elif target is not None:
        Path(target).write_text(text + "\n")
    return target == "-"


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


# --- settings --------------------------------------------------------------------------------------------


def _fields(config: type[JobConfig] | type[PodConfig] = JobConfig) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(config)}


#: What a configuration file may say besides the settings of the job.
_LAUNCH_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ranks": (lambda value: type(value) is int, "a whole number"),
    "fault": (
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        'a list of texts, as in ["kill@37:1"]',
    ),
    "timeout": (lambda value: type(value) in (int, float), "a number of seconds"),
}


def _read_settings(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, by the names of the flags.

    Raises:
        UsageError: if it cannot be read, or for an unknown name or unfit value; names the file.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    settings = {name.replace("-", "_"): value for name, value in values.items()}
    for name, value in settings.items():
        if name in _LAUNCH_SETTINGS:
            fits, wanted = _LAUNCH_SETTINGS[name]
            if not fits(value):
                raise UsageError(f"{path}: {name} = {value!r} should be {wanted}")
        elif name not in {**_fields(), **_fields(PodConfig)}:
            known = ", ".join(sorted([*_fields(), *_fields(PodConfig), *_LAUNCH_SETTINGS]))
            raise UsageError(f"{path}: {name!r} is not a setting; known: {known}")
    for config in (JobConfig, PodConfig):
        config.from_dict({n: value for n, value in settings.items() if n in _fields(config)}, str(path))
    return settings


# --- parser ----------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ridethrough",
        description="Fault-tolerant PyTorch FSDP training, one rung at a time.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ridethrough {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    report = _command(commands, "report", _report, "account for a run", REPORT, REPORT_EXAMPLES)
    report.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    report.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="say what each fault would waste on a cluster of N GPUs, in GPU-hours",
    )
    fault = _command(commands, "fault", _fault, "do a fault to a running rank", FAULT, FAULT_EXAMPLES)
    fault.add_argument("run", type=Path, metavar="RUN", help="the directory of a run that is going on")
    fault.add_argument("fault", metavar="KIND:RANK", help=f"KIND is one of {', '.join(faults.KINDS)}")
    _add_checkpoint(commands)
    check = _command(commands, "doctor", _doctor, "check this machine", DOCTOR, DOCTOR_EXAMPLES)
    check.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs will go (default: runs)"
    )
    return parser


def _command(
    commands: Any,
    name: str,
    command: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"{examples}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command)
    parser.add_argument(
        "--json",
        type=_json_file,
        nargs="?",
        const="-",
        metavar="FILE",
        help="JSON to FILE, or alone on standard output without it",
    )
    return parser


def _json_file(text: str) -> str:
    """Refuse at once what could not be written at the end of a long run."""
    if text != "-" and (Path(text).is_dir() or not Path(text).absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"{text} is not a file in an existing folder")
    return text


def _add_run(commands: Any) -> None:
    parser = _command(commands, "run", _run, "train on ranks of this machine", RUN, RUN_EXAMPLES)
    parser.add_argument("rung", metavar="RUNG", help=f"one of {', '.join(RUNGS)}")
    add = parser.add_argument_group("the run").add_argument
    add("--ranks", type=int, metavar="N", help="ranks to start (default: 2; on a resume, what the run had)")
    add("--fault", action="append", metavar="KIND@STEP:RANK", help="inject a fault; may be repeated")
    add("--out", metavar="DIR", help="run directory (default: runs/RUNG-<time>)")
    add("--resume", action="store_true", help="continue the run in --out, or start it if there is none")
    add("--config", type=Path, metavar="FILE", help="TOML file with settings; flags go before it")
    add("--timeout", type=float, metavar="S", help="longest time this launch may take (default: 3600)")
    add("--quiet", action="store_true", help="show neither output nor progress; the logs have both")
    _add_settings(parser.add_argument_group("the job"), JobConfig)
    _add_settings(parser.add_argument_group("pods, with --launcher torchrun"), PodConfig)


def _add_settings(group: argparse._ArgumentGroup, config: type[JobConfig] | type[PodConfig]) -> None:
    """A flag for each field of a configuration."""
    hints = typing.get_type_hints(config)
    for name, field in _fields(config).items():
        help = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, dest=name, default=None, help=help, **_kind(name, hints[name]))


def _kind(name: str, hint: Any) -> dict[str, Any]:
    """How argparse reads a setting of this type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    return {"type": hint, "metavar": name.rsplit("_", 1)[-1].upper()}


def _add_checkpoint(commands: Any) -> None:
    parser = _command(
        commands, "checkpoint", _checkpoint, "list or verify checkpoints", CHECKPOINT, CHECKPOINT_EXAMPLES
    )
    parser.add_argument("action", choices=("ls", "verify"), help="list them, or read and verify every file")
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="a run, a checkpoints folder, or one checkpoint"
    )
    parser.add_argument("--no-checksums", action="store_true", help="compare sizes only")
