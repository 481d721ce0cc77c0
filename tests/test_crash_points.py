"""A save struck by a fault at each of its file-system operations, on each rank.

strace counts what a save does in the checkpoints folder; then a fault strikes at one of these calls, found
by its number. **Killed** at it, before it takes effect: what was committed stands, equals what was saved, and
the run resumes to the same bytes as one that was never struck. **An error** from it (disk full, I/O error):
every rank hears of it, nothing is committed, and the same processes' next save is whole. Once the commit is
flushed, what is left to do is to delete an old checkpoint: an error in that is a warning.

Every call that changes files or names is struck. Calls that only read are struck by an I/O error, each
different one once (a kill there leaves the disk as a kill at the next change does): whatever comes of it,
both ranks agree, and what is on disk is what they say.

No kill shows what a crash of the machine would lose: written, but not flushed. That is read off the order of
the calls.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from ridethrough.checkpoint import store
from ridethrough.run import Run

from tests import crash_trace
from tests.crash_ranks import Ranks, Reply, stop_server
from tests.crash_trace import CHANGES, Operation
from tests.jobs import make_run

pytestmark = pytest.mark.crash

STEPS = 100
LAST = 3  # of a resumed run
_TEMPORARY = re.compile(r"^\.(?=.*\.json)|(?<=\.json)\.\d+$")
LEFT = "saving-00000002-0123abcd"


@dataclass(frozen=True)
class Scenario:
    """A command to strike, and what it is up to.

    Attributes:
        prepare: commands before it.
        command: the one that is struck.
        before: the newest committed step until the commit; `after`, from then on.
        since: the rename from which on this scenario differs from `save`.
        anew: from whatever an error left to the next strike; None: only with a fresh run.
        keep: checkpoints that the run keeps.
    """

    prepare: Callable[[Ranks], None]
    command: str
    before: int
    after: int
    since: tuple[str, ...] = ()
    anew: Callable[[Ranks], None] | None = None
    keep: int = 1


def step_1_is_committed(ranks: Ranks) -> None:
    """The save commits step 2 and deletes step 1."""
    ranks.must("step", "save", "step")


def nothing_is_committed(ranks: Ranks) -> None:
    """The store is new; its first commit leaves a mark that it no longer is."""
    ranks.must("step")


def step_2_is_damaged(ranks: Ranks) -> None:
    """Step 2 was passed over and is saved again."""
    ranks.must("step", "save", "step", "save")
    (ranks.run.checkpoints / "step-00000002" / "__0_0.distcp").write_bytes(b"damaged")
    ranks.must("restore", "step")


def a_killed_save_is_left(ranks: Ranks) -> None:
    """The start clears it away before it restores step 1."""
    ranks.must("step", "save", "restore")  # a process's first restore imports modules: other calls to count
    leave_a_killed_save(ranks)


def leave_a_killed_save(ranks: Ranks) -> None:
    (newest, *_) = store.candidates(ranks.run.checkpoints)
    shutil.copytree(newest, ranks.run.checkpoints / LEFT, dirs_exist_ok=True)


SCENARIOS = {
    "save": Scenario(step_1_is_committed, "save", 1, 2, anew=lambda ranks: ranks.must("step")),
    "first": Scenario(nothing_is_committed, "save", 0, 1, since=("saving-*", "step-*")),
    "again": Scenario(step_2_is_damaged, "save", 1, 2, since=("step-*", "replaced-step-*"), keep=2),
    "start": Scenario(a_killed_save_is_left, "restore", 1, 1, anew=leave_a_killed_save),
}

#: Scenario and rank → the kinds of calls that are made there, and struck.
STRUCK = {
    ("save", 0): ["mkdir", "create", "write", "fsync", "rename", "delete", "read"],
    ("save", 1): ["mkdir", "create", "write", "fsync", "read"],
    ("first", 0): ["create", "write", "fsync", "rename"],
    ("again", 0): ["fsync", "rename"],
    ("start", 0): ["delete", "read"],
    ("start", 1): ["read"],
}
POINTS = [(name, rank, kind) for (name, rank), kinds in STRUCK.items() for kind in kinds]


@dataclass
class Plan:
    """What undisturbed runs do and compute: the calls of each scenario, and the state's hash at each step."""

    folder: Path
    sha256: dict[int, str]
    calls: dict[str, list[Operation]]
    runs: int = 0

    def run(self, scenario: str = "save") -> Run:
        """A new run directory."""
        self.runs += 1
        folder = self.folder / f"{scenario}-{self.runs}"
        return make_run(folder, steps=STEPS, keep=SCENARIOS[scenario].keep, dropout=0.1)

    def struck(self, scenario: str) -> list[Operation]:
        """The calls in which the scenario differs from others."""
        calls, since = self.calls[scenario], SCENARIOS[scenario].since
        start = next(i for i, call in enumerate(calls) if not since or call.pattern == since)
        return calls[start:]

    def points(self, scenario: str, rank: int, kind: str) -> list[Operation]:
        """The calls to strike; of those that read, each different one once."""
        calls = [call for call in self.struck(scenario) if (call.rank, call.kind) == (rank, kind)]
        if kind == "read":
            calls = list({(call.call, call.pattern): call for call in reversed(calls)}.values())
        return sorted(calls, key=lambda call: call.time)

    def commit(self, scenario: str) -> float:
        """When the commit was made; never, where nothing is saved."""
        return next((call.time for call in self.calls[scenario] if call.commits), float("inf"))

    def durable(self, scenario: str) -> float:
        """When the commit had become durable; what comes after is retention."""
        flushes = [c.time for c in self.calls[scenario] if c.kind == "fsync" and c.pattern == (".",)]
        return max(flushes, default=float("inf"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    if not shutil.which("strace"):
        pytest.skip("strace is not installed: `make test` installs it")
    plan = Plan(tmp_path_factory.mktemp("crash"), {}, {})
    try:
        with Ranks(plan.run()) as ranks:
            for step in range(1, STEPS + 1):
                ranks.must("step")
                plan.sha256[step] = ranks.must("sha256")
        for name, scenario in SCENARIOS.items():
            with Ranks(plan.run(name)) as ranks:
                scenario.prepare(ranks)
                plan.calls[name] = record(ranks, scenario.command, ranks.run.checkpoints, plan.folder)
        yield plan
    finally:
        stop_server()


def record(ranks: Ranks, command: str, folder: Path, logs: Path) -> list[Operation]:
    """The calls that `command` makes in `folder` if nothing disturbs it."""
    try:
        with crash_trace.recorded(ranks.pids, folder, logs) as calls:
            ranks.must(command)
    except AssertionError as error:
        if "not permitted" in str(error):
            pytest.skip(f"no process may be traced here: {error}")
        raise
    return calls


def steps(run: Run, status: str) -> list[int]:
    """The steps of the checkpoints that are `good` or `damaged`, newest first; every file is read."""
    return [entry.step for entry in store.scan(run.checkpoints) if entry.status == status]


def committed(run: Run) -> list[int]:
    return steps(run, "good")


def newest(run: Run) -> int:
    return max(committed(run), default=0)


def in_flight(run: Run) -> list[str]:
    return [entry.path.name for entry in store.scan(run.checkpoints) if entry.status == "in-flight"]


@contextmanager
def naming(effect: str, point: Operation) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{effect} at {point}: {error}") from error


def test_every_kind_of_call_is_struck(plan: Plan) -> None:
    for name in SCENARIOS:
        made = {(name, call.rank, call.kind) for call in plan.struck(name)}
        if SCENARIOS[name].since:
            made -= {(name, 0, "read")}  # they are those of `save`
        assert made == {point for point in POINTS if point[0] == name}


def test_what_is_committed_is_flushed(plan: Plan) -> None:
    """Before the commit, each file and the folder's names; before an old one goes, the commit itself."""
    for name in ("save", "first", "again"):
        unflushed: set[Path] = set()
        for call in plan.calls[name]:
            if call.kind == "delete" or call.pattern == ("step-*", "saving-*"):
                break  # an old one goes
            if call.commits:
                lost = [path for path in unflushed if path.is_relative_to(call.names[0])]
                assert not lost, f"{name}: committed before {lost} were flushed"
            follow(call, unflushed)
        lost = [path for path in unflushed if path in (Path(), Path(store.MARK))]
        assert not lost, f"{name}: over before {lost} were flushed"


def follow(call: Operation, unflushed: set[Path]) -> None:
    """Keep account of the files and of the folders' names that a crash of the machine could lose."""
    path = Path(call.names[-1])
    if call.kind in ("create", "write") or (call.kind == "rename" and Path(call.names[0]) in unflushed):
        unflushed.add(path)
    if call.kind in ("create", "mkdir", "rename"):
        unflushed.add(path.parent)
    if call.kind == "fsync":
        unflushed.discard(path)


@pytest.mark.parametrize(("scenario", "rank", "kind"), [point for point in POINTS if point[2] in CHANGES])
def test_killed(plan: Plan, scenario: str, rank: int, kind: str) -> None:
    before, after = SCENARIOS[scenario].before, SCENARIOS[scenario].after
    for point in plan.points(scenario, rank, kind):
        with naming("killed", point):
            run = plan.run(scenario)
            kill(plan, run, scenario, point)
            expected = before if point.time <= plan.commit(scenario) else after
            assert newest(run) == expected
            assert not steps(run, "damaged") or scenario == "again"
            resume(plan, run, expected)
            shutil.rmtree(run.path)


def kill(plan: Plan, run: Run, scenario: str, point: Operation) -> None:
    """Let a rank die at `point`; the other one must hear of it by itself."""
    with Ranks(run) as ranks:
        SCENARIOS[scenario].prepare(ranks)
        pid = ranks.pids[point.rank]
        with crash_trace.fault(pid, point, "signal=KILL", run.checkpoints, plan.folder):
            replies = ranks.call(SCENARIOS[scenario].command)
    victim, survivor = replies[point.rank], replies[1 - point.rank]
    assert victim.died, replies
    assert survivor.kind == "RunError" and "a rank is gone" in (survivor.error or ""), replies


def resume(plan: Plan, run: Run, expected: int) -> None:
    """A new start clears away what was left, and continues from step `expected` as if nothing had been."""
    with Ranks(run) as ranks:
        assert ranks.must("restore") == expected
        assert not expected or ranks.must("sha256") == plan.sha256[expected]
        assert in_flight(run) == []
        for _ in range(expected, LAST):
            ranks.must("step", "save")
        assert ranks.must("sha256") == plan.sha256[LAST]
    assert newest(run) == LAST


@pytest.mark.parametrize(("scenario", "rank", "kind"), POINTS)
def test_an_error(plan: Plan, scenario: str, rank: int, kind: str) -> None:
    errors = ["EIO"] if kind in ("delete", "read") else ["EIO", "ENOSPC"]
    strikes = [(point, error) for point in plan.points(scenario, rank, kind) for error in errors]
    while strikes:
        with Ranks(plan.run(scenario)) as ranks:
            SCENARIOS[scenario].prepare(ranks)
            strike(plan, ranks, scenario, *strikes.pop(0))
            while strikes and (anew := SCENARIOS[scenario].anew):
                anew(ranks)
                strike(plan, ranks, scenario, *strikes.pop(0))
        shutil.rmtree(ranks.run.path)


def strike(plan: Plan, ranks: Ranks, scenario: str, point: Operation, error: str) -> None:
    """Let `point` fail, hold what came of it against the contract, and go on with the same processes."""
    run, command = ranks.run, SCENARIOS[scenario].command
    with naming(error, point):
        before, pid = committed(run), ranks.pids[point.rank]
        with crash_trace.fault(pid, point, f"error={error}", run.checkpoints, plan.folder) as struck:
            replies = ranks.call(command)
        failed = replies[0].error is not None
        assert failed == (replies[1].error is not None), f"the ranks disagree: {replies}"
        if point.kind != "read" and not point.failed:  # a call that fails anyway is one that doesn't matter
            assert failed == (command == "save" and point.time <= plan.durable(scenario)), replies
        if failed:
            refused(replies, struck[0], error, command)
            assert committed(run) == before
            assert command != "save" or in_flight(run) == []
        elif point.kind in ("rename", "delete"):
            told(replies[0], struck[0])
        go_on(plan, ranks)


def refused(replies: list[Reply], struck: Operation, error: str, command: str) -> None:
    """Every rank is told what failed and where: of a save, rank and file; of a restore, the checkpoint."""
    names = {_TEMPORARY.sub("", Path("checkpoints", name).name) for name in struck.names}
    if command == "restore":
        names |= {part for name in struck.names for part in Path(name).parts}
    for reply in replies:
        text = reply.error or ""
        assert reply.kind == "CheckpointError", reply
        assert os.strerror(getattr(errno, error)) in text, text
        assert any(name in text for name in names), f"none of {names} is named: {text}"
        assert command != "save" or f"rank {struck.rank}" in text, text


def told(reply: Reply, struck: Operation) -> None:
    """What cannot be deleted is warned of, no more: the checkpoint that was asked for is there."""
    assert any(Path(name).name in text for name in struck.names for text in reply.warnings), reply


def go_on(plan: Plan, ranks: Ranks) -> None:
    """Back to the newest checkpoint, which is as it was saved, and on to another one."""
    step = newest(ranks.run)
    assert ranks.must("restore") == step
    assert in_flight(ranks.run) == []
    if step:
        assert ranks.must("sha256") == plan.sha256[step]
        ranks.must("step")
    ranks.must("save")
    assert newest(ranks.run) == step + 1
    assert ranks.must("sha256") == plan.sha256[step + 1]


def test_an_event_that_cannot_be_written_does_not_undo_a_commit(plan: Plan) -> None:
    """The run ends, since its account is no longer whole; but no rank is told that nothing was committed."""
    run = plan.run()
    with Ranks(run) as ranks:
        step_1_is_committed(ranks)
        calls = record(ranks, "save", run.events, plan.folder)
        (_, commit, _) = [call for call in calls if (call.rank, call.kind) == (0, "write")]
        ranks.must("step")
        with crash_trace.fault(ranks.pids[0], commit, "error=ENOSPC", run.events, plan.folder):
            replies = ranks.call("save")
    assert replies[0].kind == "RunError" and "step 3 is committed" in (replies[0].error or ""), replies
    assert replies[1].error and replies[1].kind != "CheckpointError", replies
    assert committed(run) == [3, 2]
    resume(plan, run, 3)
