"""Asynchronous saves: never a wrong byte, never a hang, nothing left, whatever dies or fails meanwhile."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import save_state_dict_async_plan
from ridethrough import machine, nvrx
from ridethrough.checkpoint import dcp, store
from ridethrough.checkpoint.async_nvrx import AsyncCheckpointer
from ridethrough.checkpoint.staging import Staging
from ridethrough.checkpoint.store import Store
from ridethrough.errors import CheckpointError, RunError
from ridethrough.events import Event, read_events
from ridethrough.job.loop import Job
from ridethrough.job.state import local_part
from ridethrough.launch import run_rung
from ridethrough.run import Run

from tests.jobs import make_job, make_run
from tests.ranks import _rank, run_ranks

pytestmark = pytest.mark.ranks


def make_async(run: Run, **options: Any) -> tuple[Job, AsyncCheckpointer]:
    job, sync = make_job(run)
    options = {"timeout_s": 30, "overlap_staging": run.config.overlap_staging, **options}
    return job, AsyncCheckpointer(Store(run.checkpoints, run.id, run.config.keep), sync.events, **options)


def train(path: Path, until: int, **options: Any) -> dict[str, Any]:
    """As the rung does; returns losses and hashes."""
    job, checkpointer = make_async(Run.open(path), **options)
    job.restore(checkpointer)
    losses = {}
    while job.state.step < until:
        loss = job.step(checkpointer)
        losses[job.state.step] = loss
        if job.checkpoint_due:
            job.save(checkpointer)
    checkpointer.close()
    return {"losses": losses, "hashes": job.state.hashes()}


def restore(path: Path) -> dict[str, Any]:
    job, checkpointer = make_job(Run.open(path))
    restored = checkpointer.restore(job.state)
    return {"step": restored.step, "hashes": job.state.hashes(), "rng": torch.get_rng_state()}


def said(run: Run, what: str) -> list[Event]:
    return [event for event in read_events(run.events) if event.what == what]


def worker(checkpointer: AsyncCheckpointer) -> Any:
    return checkpointer._queue.worker.process


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@contextmanager
def stopped(checkpointer: AsyncCheckpointer) -> Iterator[int]:
    """While this lasts, nothing is written."""
    process = worker(checkpointer)
    process.send_signal(signal.SIGSTOP)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGCONT)


def fill(job: Job, value: float) -> None:
    for name, tensor in job.state.state_dict().items():
        if tensor.is_floating_point() and name in job.state.held_until_update():
            local_part(tensor).fill_(value)


def values_on_disk(folder: Path, job: Job) -> set[float]:
    """The distinct values of what `fill` sets, as the newest checkpoint has them."""
    tensors = {
        name: torch.empty_like(tensor)
        for name, tensor in job.state.state_dict().items()
        if tensor.is_floating_point() and name in job.state.held_until_update()
    }
    dcp.load(tensors, folder, dist.group.WORLD)
    return {float(v) for tensor in tensors.values() for v in local_part(tensor).unique()}


def overwrite_right_after_each_save(path: Path, saves: int, overlap: bool, hold: bool) -> int:
    """Returns how many of the checkpoints hold anything else than the state at the save."""
    job, checkpointer = make_async(Run.open(path), overlap_staging=overlap)
    job.restore(checkpointer)
    wrong = 0
    for step in range(1, saves + 1):
        fill(job, step)
        job.state.step = step
        checkpointer.save(job.state)
        if hold:
            checkpointer.before_update()
        fill(job, -step)
        checkpointer.poll(wait=True)
        wrong += values_on_disk(store.candidates(Run.open(path).checkpoints)[0], job) != {float(step)}
    checkpointer.close()
    return wrong


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_written_is_the_state_at_the_save(tmp_path: Path, overlap: bool) -> None:
    run = make_run(tmp_path / "run")
    assert run_ranks(2, overwrite_right_after_each_save, run.path, 20, overlap, True) == [0, 0]


def test_overlapped_staging_needs_the_update_to_wait(tmp_path: Path) -> None:
    """The negative control: the test above would notice."""
    run = make_run(tmp_path / "run", size="small")
    assert sum(run_ranks(2, overwrite_right_after_each_save, run.path, 5, True, False)) > 0


class _AsShipped(core.PersistentAsyncCaller):
    """NVRx's own worker and queues; its one question to CUDA in the trainer is not asked."""

    def sync_all_async_calls(self, is_alive: int) -> bool:
        return not is_alive


def save_as_nvrx_does(path: Path) -> list[set[float]]:
    job, checkpointer = make_async(Run.open(path))
    options = {"cpu_shm_mode": True} if "cpu_shm_mode" in vars(core.AsyncCallsQueue()) else {}
    caller = _AsShipped(**options)
    calls = core.AsyncCallsQueue()
    calls._get_async_caller = lambda: caller
    found = []
    for step in (1.0, 2.0):
        fill(job, step)
        folder = path / f"as-shipped-{step:.0f}"
        writer = filesystem_async.FileSystemWriterAsync(folder, thread_count=1)
        planned = save_state_dict_async_plan(job.state.state_dict(), writer, None, 0)
        function, preload, arguments = writer.get_save_function_and_args()
        if not options:
            preload = partial(writer.preload_tensors, writer.write_buckets, False)
        calls.schedule_async_request(core.AsyncRequest(function, arguments, [], {}, preload))
        fill(job, -step)
        while not calls.maybe_finalize_async_calls(blocking=False, no_dist=True):
            time.sleep(0.01)
        writer.finish(planned[1], [writer.retrieve_write_results()])
        found.append(values_on_disk(folder, job))
    calls.close()
    checkpointer.abandon()
    return found


def test_nvrx_as_shipped_writes_what_the_training_makes_of_the_state(tmp_path: Path) -> None:
    """On a CPU it hands the live tensors to its worker: the reason for staging."""
    (found,) = run_ranks(1, save_as_nvrx_does, make_run(tmp_path / "run", size="small").path)
    assert any(value < 0 for values in found for value in values), found


@pytest.mark.parametrize("overlap", [False, True])
def test_both_kinds_restore_each_others_checkpoints(tmp_path: Path, overlap: bool) -> None:
    options = {"checkpoint_every": 4, "dropout": 0.1, "overlap_staging": overlap}
    run = make_run(tmp_path / "async", **options)
    saved = run_ranks(2, train, run.path, 4)
    loaded = run_ranks(2, restore, run.path)
    assert [r["hashes"] for r in loaded] == [r["hashes"] for r in saved]
    assert run_ranks(1, restore, run.path)[0]["hashes"] == saved[0]["hashes"]
    other = make_run(tmp_path / "sync", **options)
    run_ranks(2, train_and_save, other.path, 4)
    assert run_ranks(2, train, other.path, 4)[0]["hashes"] == saved[0]["hashes"]
    ours, theirs = (store.candidates(r.checkpoints)[0] for r in (run, other))
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    assert dcp.read_metadata(ours).state_dict_metadata == dcp.read_metadata(theirs).state_dict_metadata
    further = [run_ranks(2, train, r.path, 8)[0] for r in (run, other)]
    assert further[0] == further[1] and list(further[0]["losses"]) == [5, 6, 7, 8]


def train_and_save(path: Path, until: int) -> None:
    from tests.jobs import train as train_synchronously

    train_synchronously(Run.open(path), until)


def save_twice(path: Path) -> list[Any]:
    job, checkpointer = make_async(Run.open(path))
    job.restore(checkpointer)
    hashes = []
    for _ in range(4):
        job.step(checkpointer)
        job.save(checkpointer)
        hashes.append(job.state.hashes())
    checkpointer.close()
    return hashes


def test_every_save_has_the_weights_of_its_own_step(tmp_path: Path) -> None:
    """The plan and the memory are those of the first save; the bytes are not."""
    run = make_run(tmp_path / "run", keep=4)
    hashes = run_ranks(2, save_twice, run.path)[0]
    assert len(set(hashes)) == 4
    for folder in store.candidates(run.checkpoints):
        assert run_ranks(1, restore, run.path)[0]["hashes"] == hashes.pop()
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def a_worker_that_fails(path: Path, how: str, failing: int) -> dict[str, Any]:
    """Step 1 is saved well, step 2 fails on one rank, step 3 is saved well."""
    run = Run.open(path)
    job, checkpointer = make_async(run, timeout_s=3 if how == "stop" else 30)
    job.restore(checkpointer)
    job.step(checkpointer)
    job.save(checkpointer)
    checkpointer.poll(wait=True)
    mine = dist.get_rank() == failing
    process = worker(checkpointer)
    if mine and how == "file size":
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    elif mine:
        process.send_signal(signal.SIGSTOP)
    job.step(checkpointer)
    job.save(checkpointer)
    if mine and how == "kill":
        process.kill()
    started, error, polls = time.monotonic(), None, 0
    try:
        while checkpointer.busy:
            checkpointer.poll()
            polls += 1
            dist.barrier()  # the ranks poll in step
            time.sleep(0.01)
    except CheckpointError as caught:
        error = (caught.step, str(caught))
    took = time.monotonic() - started
    entries = [(entry.step, entry.status) for entry in store.scan(run.checkpoints)]
    dist.barrier()
    if mine and how == "file size":
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    job.step(checkpointer)
    job.save(checkpointer)
    checkpointer.close()
    return {
        "error": error, "polls": polls, "took": took, "entries": entries, "hashes": job.state.hashes(),
        "pid": process.pid,
    }  # fmt: skip


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["kill", "stop", "file size"])
def test_a_worker_that_fails(tmp_path: Path, how: str, failing: int) -> None:
    """Every rank hears of it in the same poll, with rank and cause; the next save is whole."""
    run = make_run(tmp_path / "run")
    results = run_ranks(2, a_worker_that_fails, run.path, how, failing)
    expected = {
        "kill": rf"rank {failing}: the checkpoint worker \(pid {results[failing]['pid']}\) died \(SIGKILL\)",
        "stop": rf"rank {failing}: the checkpoint worker \(pid {results[failing]['pid']}\) did not finish "
        "within 3 s",
        "file size": rf"rank {failing}: OSError: \[Errno {errno.EFBIG}\] .*__{failing}_0.distcp",
    }[how]
    for result in results:
        assert result["error"][0] == 2 and re.search(expected, result["error"][1]), result
        assert result["entries"] == [(1, "good")] and result["took"] < 15
    assert results[0]["polls"] == results[1]["polls"]
    assert [(e.step, e.status) for e in store.scan(run.checkpoints)] == [(3, "good"), (1, "good")]
    assert run_ranks(1, restore, run.path)[0]["hashes"] == results[0]["hashes"]


def fail_in_every_save(path: Path) -> tuple[int, str]:
    job, checkpointer = make_async(Run.open(path))
    job.restore(checkpointer)
    resource.prlimit(worker(checkpointer).pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        for _ in range(8):
            job.step(checkpointer)
            job.save(checkpointer)
        checkpointer.close()
    except CheckpointError as error:
        checkpointer.abandon()
        return job.state.step, str(error)
    return job.state.step, ""


@pytest.mark.parametrize(("policy", "fails"), [("fail", 1), ("warn", 3)])
def test_a_failed_save_is_met_by_the_policy(tmp_path: Path, policy: str, fails: int) -> None:
    run = make_run(tmp_path / "run", on_save_error=policy, checkpoint_every=1)
    (result, _) = run_ranks(2, fail_in_every_save, run.path)
    assert "File too large" in result[1] and result[0] in (fails, fails + 1)
    failed = [e for e in said(run, "save_failed") if e.rank == 0]
    assert [e["consecutive"] for e in failed] == list(range(1, fails + 1))
    assert [e.step for e in failed] == list(range(1, fails + 1))
    assert store.scan(run.checkpoints) == []


def due_while_busy(path: Path) -> tuple[list[int], float]:
    job, checkpointer = make_async(Run.open(path))
    job.restore(checkpointer)
    job.step(checkpointer)
    with stopped(checkpointer) as pid:
        job.save(checkpointer)
        job.step(checkpointer)
        if Run.open(path).config.when_busy == "wait":
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {pid}"])
        started = time.monotonic()
        job.save(checkpointer)
        took = time.monotonic() - started
    checkpointer.close()
    return [entry.step for entry in store.scan(Run.open(path).checkpoints)], took


def test_a_save_due_while_one_is_in_flight_is_skipped_or_waits(tmp_path: Path) -> None:
    run = make_run(tmp_path / "skip", when_busy="skip")
    ((steps, took), _) = run_ranks(2, due_while_busy, run.path)
    assert steps == [1] and took < 0.5
    assert [(e.rank, e.step) for e in said(run, "save_skipped")] in ([(0, 2), (1, 2)], [(1, 2), (0, 2)])
    run = make_run(tmp_path / "wait", when_busy="wait")
    ((steps, took), _) = run_ranks(2, due_while_busy, run.path)
    assert steps == [2, 1] and took > 0.5
    assert not said(run, "save_skipped")


def skip_all_but_the_last(path: Path) -> list[int]:
    job, checkpointer = make_async(Run.open(path))
    job.restore(checkpointer)
    while not job.done:
        job.step(checkpointer)
        if job.state.step == 2:
            worker(checkpointer).send_signal(signal.SIGSTOP)
        if job.state.step == 8:
            worker(checkpointer).send_signal(signal.SIGCONT)
        if job.checkpoint_due:
            job.save(checkpointer)
    checkpointer.close()
    return [entry.step for entry in store.scan(Run.open(path).checkpoints)]


def test_the_last_save_is_never_skipped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", when_busy="skip", checkpoint_every=2)
    assert run_ranks(1, skip_all_but_the_last, run.path) == [[8, 2]]
    assert [event.step for event in said(run, "save_skipped")] == [4, 6]


def stale_completion(path: Path) -> list[Any]:
    """Save A is abandoned; while B is still being written, what A's worker says must not commit B."""
    run = Run.open(path)
    job, first = make_async(run)
    job.restore(first)
    job.step(first)
    with stopped(first):
        job.save(first)
    job, second = make_async(run)
    job.step(second)
    job.step(second)
    with stopped(second):
        job.save(second)
        inner = second._queue.worker
        assert not inner._receive(0.0)
        deadline = time.monotonic() + 10
        while not (before := status_of(run, 2)) and time.monotonic() < deadline:
            time.sleep(0.01)
        first.abandon()
        time.sleep(0.5)
        after = status_of(run, 2)
    second.close()
    return [before, after, status_of(run, 2)]


def status_of(run: Run, step: int) -> list[str]:
    return [entry.status for entry in store.scan(run.checkpoints) if entry.step == step]


def test_a_save_is_not_committed_by_the_completion_of_another(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for before, after, end in run_ranks(2, stale_completion, run.path):
        assert before == after == ["in-flight"] and end == ["good"]


def echo(value: Any) -> Any:
    return value


def test_a_completion_of_another_request_is_dropped() -> None:
    made = nvrx.Worker(0, 20, ["tests.test_async"])
    try:
        calls = nvrx.Queue(lambda: made)
        for number in range(3):
            done: list[Any] = []
            if number == 1:  # one that comes too late for its own request
                made.queue.put(core.AsyncRequest(nvrx._perform, (echo, ("stale",)), [], {}, call_idx=77))
            calls.schedule_async_request(nvrx.request(echo, (number,), partial(done.append, number)))
            calls.maybe_finalize_async_calls(blocking=True, no_dist=True)
            assert done == [number] and made.outcome == nvrx.Outcome(number)
    finally:
        made.close()
    assert made.process.returncode == 0
    made.close()


def hang_up(delay: float) -> None:
    time.sleep(delay)
    os._exit(7)


def test_a_dead_worker_is_an_outcome_within_its_bound() -> None:
    made = nvrx.Worker(3, 20, ["tests.test_async"])
    calls = nvrx.Queue(lambda: made)
    done: list[int] = []
    started = time.monotonic()
    calls.schedule_async_request(nvrx.request(hang_up, (0.1,), partial(done.append, 1)))
    calls.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert done and made.outcome and "died (exit code 7)" in (made.outcome.error or "")
    assert time.monotonic() - started < 15
    calls.schedule_async_request(nvrx.request(echo, (1,), partial(done.append, 2)))  # nobody is there
    calls.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert "took no request" in (made.outcome.error or "")


def die(path: Path, how: str) -> None:
    run = Run.open(path)
    job, checkpointer = make_async(run)
    job.restore(checkpointer)
    job.step(checkpointer)
    job.save(checkpointer)
    (run.path / f"pids-{dist.get_rank()}").write_text(f"{os.getpid()} {worker(checkpointer).pid}")
    if how == "mid-save":
        worker(checkpointer).send_signal(signal.SIGSTOP)
    time.sleep(60)


@pytest.mark.parametrize("how", ["idle", "mid-save"])
def test_a_killed_rank_takes_its_worker_along(tmp_path: Path, how: str) -> None:
    run = make_run(tmp_path / "run")
    before = shared_memory()
    pids = kill_ranks(run, die, (run.path, how), when=lambda: all_written(run, 2), victims=(0, 1))
    assert len(pids) == 4
    deadline = time.monotonic() + 3
    while left := [pid for pid in pids if psutil.pid_exists(pid) and is_running(pid)]:
        assert time.monotonic() < deadline, f"{left} still run"
        time.sleep(0.02)
    assert shared_memory() <= before


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def all_written(run: Run, ranks: int) -> bool:
    files = [run.path / f"pids-{rank}" for rank in range(ranks)]
    return all(file.exists() and len(file.read_text().split()) == 2 for file in files)


def kill_ranks(
    run: Run,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    when: Callable[[], bool],
    victims: tuple[int, ...],
    delay: float = 0.0,
) -> list[int]:
    """Start two ranks, SIGKILL the victims `delay` after `when`, and then the others."""
    context = mp.start_processes(
        _rank, (function, args, 2, str(run.path)), nprocs=2, join=False, start_method="forkserver"
    )
    try:
        deadline = time.monotonic() + 30
        while not when():
            assert time.monotonic() < deadline, "the ranks did not come to the point"
            time.sleep(0.002)
        time.sleep(delay)
        for rank in victims:
            os.kill(context.pids()[rank], signal.SIGKILL)
        time.sleep(0.1)
    finally:
        for process in context.processes:
            process.kill()
            process.join(10)
        (run.path / "store").unlink(missing_ok=True)
    return [int(pid) for file in run.path.glob("pids-*") for pid in file.read_text().split()]


def train_to_the_end(path: Path) -> dict[str, Any]:
    return train(path, Run.open(path).config.steps)


def test_killed_at_any_instant_a_run_continues_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Saves follow each other without a pause, so nearly every instant is one of a save."""
    settings = {"checkpoint_every": 1, "steps": 16, "keep": 2}
    undisturbed = run_ranks(2, train_to_the_end, make_run(tmp_path / "reference", **settings).path)[0]
    before = shared_memory()
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    steps = []
    for attempt in range(10):
        run = make_run(tmp_path / f"run-{attempt}", **settings)
        victim, delay = chance.randrange(2), chance.uniform(0.0, 0.5)
        begun = lambda run=run: bool(said(run, "commit"))  # noqa: E731
        kill_ranks(run, train_to_the_end, (run.path,), begun, (victim,), delay)
        newest = [e.step for e in store.scan(run.checkpoints) if e.status == "good"]
        assert all(e.status in ("good", "in-flight") for e in store.scan(run.checkpoints)), f"seed {seed}"
        steps.append(max(newest, default=0))
        result = run_ranks(2, train_to_the_end, run.path)[0]
        assert result["hashes"] == undisturbed["hashes"], f"seed {seed}, attempt {attempt}"
        for step, loss in result["losses"].items():
            assert loss == undisturbed["losses"][step], f"seed {seed}, attempt {attempt}, step {step}"
    assert shared_memory() <= before
    assert len(set(steps)) > 2, f"all were killed at the same point: {steps}"


def test_the_rung_computes_what_the_synchronous_one_does(tmp_path: Path) -> None:
    """Killed and resumed, with copies beside the steps, and with saves left out; nothing stays behind."""
    settings: dict[str, Any] = {"size": "tiny", "steps": 20, "ranks": 2, "quiet": True}
    before = shared_memory()
    reference = run_rung("sync", out=tmp_path / "sync", **settings)
    overlapped = {"overlap_staging": True, "when_busy": "skip", "checkpoint_every": 1}
    reports = [run_rung("async", out=tmp_path / "overlapped", **settings, **overlapped)]
    with pytest.raises(RunError, match=r"injected kill@17:1"):
        run_rung("async", out=tmp_path / "killed", faults=["kill@17:1"], **settings)
    reports.append(run_rung("async", out=tmp_path / "killed", resume=True, quiet=True))
    for report in reports:
        assert report["finished"] and report["losses"] == reference["losses"]
        assert report["state_sha256"] == reference["state_sha256"]
    assert shared_memory() <= before
    assert not [p.pid for p in psutil.process_iter() if "ridethrough.nvrx" in " ".join(p.cmdline())]


def too_little_memory(path: Path) -> str:
    job, checkpointer = make_async(Run.open(path))
    if dist.get_rank() == 1:
        machine.available_bytes = lambda: 1000
    try:
        job.restore(checkpointer)
    except CheckpointError as error:
        return str(error)
    finally:
        checkpointer.abandon()
    return ""


def test_too_little_memory_for_staging_is_said_before_it_is_taken(tmp_path: Path) -> None:
    for error in run_ranks(2, too_little_memory, make_run(tmp_path / "run").path):
        assert re.search(
            r"rank 1: staging this rank's state takes [\d,]+ bytes .*, 1,000 are available", error
        )


def test_staging_is_allocated_once_and_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint_every=2)
    run_ranks(2, train, run.path, 8)
    assert {e.rank for e in said(run, "staging")} == {0, 1}
    saved = {e["bytes"] for e in said(run, "save")}
    assert all(e["bytes"] >= max(saved) for e in said(run, "staging"))
    assert len(said(run, "commit")) == 4


def test_staging_memory_keeps_each_tensor_apart(tmp_path: Path) -> None:
    staging = Staging()
    parts = {
        "a": torch.arange(5),
        "empty": torch.empty(0, 3),
        "b": torch.randn(3, 7).t(),
        "c": torch.tensor(2.0),
    }
    assert staging.fit(parts) and not staging.fit(parts)
    staging.copy(parts)
    for name, part in parts.items():
        copy = staging._tensors[name]
        assert torch.equal(copy, part)
        assert copy.untyped_storage().nbytes() == part.numel() * part.element_size()
        copy.zero_()
    assert torch.equal(parts["a"], torch.arange(5))
    assert staging.fit({"a": torch.randn(1000)})
    staging.close()
    staging.close()


def lose_a_rank_while_saving(path: Path) -> tuple[str, float]:
    job, checkpointer = make_async(Run.open(path), timeout_s=5)
    job.restore(checkpointer)
    job.step(checkpointer)
    with stopped(checkpointer):
        job.save(checkpointer)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        checkpointer.poll(wait=True)
    except (RunError, CheckpointError) as error:
        (path / "heard").write_text(f"{type(error).__name__} {time.monotonic() - started} {error}")
    os._exit(0)


def test_a_lost_rank_ends_the_wait_of_the_other(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    kill_ranks(run, lose_a_rank_while_saving, (run.path,), (run.path / "heard").exists, ())
    kind, took, text = (run.path / "heard").read_text().split(" ", 2)
    assert kind == "RunError" and "a rank is gone or late" in text and float(took) < 20
    assert all(e.status == "in-flight" for e in store.scan(run.checkpoints))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_fills_up_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", tmp_path / "disk"], check=True)
    try:
        run = make_run(tmp_path / "disk" / "run", checkpoint_every=1)
        refused, full, left = run_ranks(2, fill_the_disk, run.path)[0]
        assert "bytes free; a checkpoint of" in refused
        assert "No space left on device" in full and ".distcp" in full
        assert left == [(1, "good")]
        assert run_ranks(1, restore, run.path)[0]["step"] == 1
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


def fill_the_disk(path: Path) -> tuple[str, str, list[tuple[int, str]]]:
    job, checkpointer = make_async(Run.open(path))
    job.restore(checkpointer)
    job.step(checkpointer)
    job.save(checkpointer)
    messages = []
    for margin in (store._FREE_SPACE_MARGIN, 0.0):
        checkpointer.poll(wait=True)
        store._FREE_SPACE_MARGIN = margin
        checkpointer.save(job.state)
        try:
            checkpointer.poll(wait=True)
        except CheckpointError as error:
            messages.append(str(error))
    checkpointer.close()
    return messages[0], messages[1], [(e.step, e.status) for e in store.scan(Run.open(path).checkpoints)]
