"""Saving on several ranks: resharding, per-rank state, and failures that every rank hears of."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ridethrough.checkpoint import dcp, store
from ridethrough.errors import CheckpointError
from ridethrough.events import read_events
from ridethrough.run import Run

from tests.jobs import make_job, make_run, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def restore(path: Path) -> dict[str, Any]:
    job, checkpointer = make_job(Run.open(path))
    checkpointer.restore(job.state)
    return {
        "hashes": job.state.hashes(),
        "rng": torch.get_rng_state(),
        "next_sample": job.batches.next_sample,
        "more": train(Run.open(path), 6)["losses"],
    }


def train_run(path: Path, until: int) -> dict[str, Any]:
    result = train(Run.open(path), until)
    return {**result, "rng": torch.get_rng_state()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_checkpoint_of_two_ranks_restores_on_any_number(tmp_path: Path, ranks: int) -> None:
    run = make_run(tmp_path / "run", checkpoint_every=4, dropout=0.1)
    saved = run_ranks(2, train_run, run.path, 4)
    loaded = run_ranks(ranks, restore, run.path)
    assert len({r["rng"].numpy().tobytes() for r in saved}) == 2  # each rank has random numbers of its own
    for rank, result in enumerate(loaded):
        assert result["hashes"] == saved[0]["hashes"]
        assert result["next_sample"] == 4 * run.config.global_batch
        if rank < 2:
            assert torch.equal(result["rng"], saved[rank]["rng"])
    assert len({result["rng"].numpy().tobytes() for result in loaded}) == ranks


def test_one_rank_and_two_ranks_compute_the_same_losses(tmp_path: Path) -> None:
    one = run_ranks(1, train_run, make_run(tmp_path / "one").path, 8)[0]
    two = run_ranks(2, train_run, make_run(tmp_path / "two").path, 8)[0]
    assert list(one["losses"]) == list(two["losses"]) == list(range(1, 9))
    for step, loss in one["losses"].items():
        assert loss == pytest.approx(two["losses"][step], rel=1e-5), step


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A real write error of this process alone: its files cannot grow beyond `size` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_with_a_failing_rank(path: Path, failing: int, policy: str) -> dict[str, Any]:
    """Steps 1 and 3 save well; step 2 fails on one rank."""
    job, checkpointer = make_job(Run.open(path))
    job.restore(checkpointer)
    job.step()
    job.save(checkpointer)
    job.step()
    error = None
    try:
        if dist.get_rank() == failing:
            with largest_file(100_000):
                job.save(checkpointer)
        else:
            job.save(checkpointer)
    except CheckpointError as caught:
        error = str(caught)
    entries = [(entry.step, entry.status) for entry in store.scan(job_checkpoints(path))]
    dist.barrier()
    job.step()
    job.save(checkpointer)
    return {"error": error, "entries": entries, "hashes": job.state.hashes()}


def job_checkpoints(path: Path) -> Path:
    return Run.open(path).checkpoints


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("policy", ["fail", "warn"])
def test_a_write_error_on_one_rank(tmp_path: Path, failing: int, policy: str) -> None:
    """Every rank hears of it, with rank, file and cause; nothing is committed; the next save is whole."""
    run = make_run(tmp_path / "run", checkpoint_every=1, on_save_error=policy)
    results = run_ranks(2, save_with_a_failing_rank, run.path, failing, policy)
    expected = rf"rank {failing}: OSError: \[Errno {errno.EFBIG}\] .*__{failing}_0.distcp"
    (failed, also) = [e for e in read_events(run.events) if e.what == "save_failed"]
    for text in (
        failed["error"],
        also["error"],
        *([r["error"] for r in results] if policy == "fail" else []),
    ):
        assert re.search(expected, text), text
    if policy == "warn":
        assert [r["error"] for r in results] == [None, None]
    assert results[0]["entries"] == [(1, "good")]
    assert [(e.step, e.status) for e in store.scan(run.checkpoints)] == [(3, "good"), (1, "good")]
    assert run_ranks(1, restore, run.path)[0]["hashes"] == results[0]["hashes"]


def fail_three_times(path: Path) -> list[str]:
    job, checkpointer = make_job(Run.open(path))
    errors = []
    with largest_file(100_000):
        for _ in range(3):
            job.step()
            try:
                job.save(checkpointer)
                errors.append("")
            except CheckpointError as error:
                errors.append(str(error))
    return errors


def test_a_third_failed_save_in_a_row_ends_the_run_under_either_policy(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", on_save_error="warn")
    (errors,) = run_ranks(1, fail_three_times, run.path)
    assert errors[:2] == ["", ""] and "File too large" in errors[2]
    assert [e["consecutive"] for e in read_events(run.events) if e.what == "save_failed"] == [1, 2, 3]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    """Room for one checkpoint, not for two: refused beforehand, and met while writing."""
    (tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", tmp_path / "disk"], check=True)
    try:
        run = make_run(tmp_path / "disk" / "run", checkpoint_every=1)
        refused, full, left = run_ranks(2, fill_the_disk, run.path)[0]
        assert "bytes free; a checkpoint of" in refused
        assert "No space left on device" in full and ".distcp" in full
        assert left == [(1, "good")]
        assert run_ranks(1, restore_only, run.path) == [1]
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


def restore_only(path: Path) -> int:
    job, checkpointer = make_job(Run.open(path))
    return checkpointer.restore(job.state).step


def fill_the_disk(path: Path) -> tuple[str, str, list[tuple[int, str]]]:
    job, checkpointer = make_job(Run.open(path))
    job.restore(checkpointer)
    messages = []
    job.step()
    job.save(checkpointer)
    for margin in (store._FREE_SPACE_MARGIN, 0.0):
        store._FREE_SPACE_MARGIN = margin
        try:
            job.save(checkpointer)
        except CheckpointError as error:
            messages.append(str(error))
    return messages[0], messages[1], [(e.step, e.status) for e in store.scan(job_checkpoints(path))]


def write_with_two_threads_of_which_one_fails(path: Path) -> str:
    """PyTorch's writer loses an error of its second thread and publishes the metadata all the same."""
    job, checkpointer = make_job(Run.open(path))
    job.step()
    original = dcp.HashingFileSystem.create_stream

    def full_off_the_main_thread(self: Any, file: Any, mode: str) -> Any:
        if threading.current_thread() is not threading.main_thread() and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, file, mode)

    dcp.HashingFileSystem.create_stream = full_off_the_main_thread
    writer = dcp.FileSystemWriter
    dcp.FileSystemWriter = lambda *a, **k: writer(*a, **{**k, "thread_count": 2})
    threading.excepthook = lambda _: None
    try:
        checkpointer.save(job.state)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_shard_that_a_writer_thread_lost_is_not_committed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    errors = run_ranks(2, write_with_two_threads_of_which_one_fails, run.path)
    for error in errors:
        assert "step 1 is not committed" in error and re.search(r"is in no file|is missing", error), errors
    assert store.scan(run.checkpoints) == []


def damage_seen_by_one_rank(path: Path) -> tuple[int, str]:
    job, checkpointer = make_job(Run.open(path))
    restored = checkpointer.restore(job.state)
    return restored.step, restored.skipped[0][1]


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    """Each rank checks part of the files; what one finds, all act on."""
    run = make_run(tmp_path / "run", checkpoint_every=2)
    run_ranks(2, train_run, run.path, 4)
    newest = store.candidates(run.checkpoints)[0]
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        content = (newest / name).read_bytes()
        (newest / name).write_bytes(content[:-1] + bytes([content[-1] ^ 255]))
        results = run_ranks(2, damage_seen_by_one_rank, run.path)
        assert (
            results[0] == results[1]
            and results[0][0] == 2
            and f"{name}: its content changed" in results[0][1]
        )
        (newest / name).write_bytes(content)
