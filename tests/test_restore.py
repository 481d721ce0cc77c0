"""Restoring: strict, from the newest good checkpoint, never silently from anything else."""

from __future__ import annotations

import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from ridethrough.checkpoint import dcp, store
from ridethrough.checkpoint.base import Ranks, restore_newest
from ridethrough.checkpoint.store import FileRecord
from ridethrough.errors import CheckpointError
from ridethrough.job.state import tensors_sha256
from ridethrough.run import Run
from torch import Tensor

from tests.jobs import make_job, make_run, train

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of eight steps with checkpoints after 2, 4, 6 and 8, of which the newest three are kept."""
    run = make_run(tmp_path / "run", checkpoint_every=2)
    train(run, 8)
    assert [path.name[-1] for path in store.candidates(run.checkpoints)] == ["8", "6", "4"]
    return run


def step(run: Run, number: int) -> Path:
    return run.checkpoints / f"step-{number:08d}"


def reseal(folder: Path) -> None:
    """Write a commit record that matches the files as they are: what a hostile or careless tool could do."""
    files = {
        p.name: FileRecord(p.stat().st_size, _sha(p)) for p in folder.iterdir() if p.name != store.RECORD
    }
    old = store.load_record(folder)
    (folder / store.RECORD).unlink()
    record = store.Record(old.run, old.step, old.world_size, old.created, files)
    store.write_json(folder / store.RECORD, store.seal({"schema": store.SCHEMA, **store.asdict(record)}))


def _sha(path: Path) -> str:
    return store.hashlib.sha256(path.read_bytes()).hexdigest()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {os.environ['HOSTILE_MARK']}",))


def hostile_pickle(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))
    reseal(folder)


class GetAttribute:
    """Reaches for what can be had from an admitted class, as an old pickle of an enumeration does."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, self.arguments)


def reaching_pickle(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(GetAttribute(dcp.Metadata, "__init__")))
    reseal(folder)


def half_covered(folder: Path) -> None:
    """As after a lost shard: the metadata promises a tensor, and names the chunks of half of it."""
    metadata = dcp.read_metadata(folder)
    entry = metadata.state_dict_metadata["model.embedding.weight"]
    chunk = entry.chunks[0]
    entry.chunks[0] = type(chunk)(chunk.offsets, torch.Size((chunk.sizes[0] // 2, chunk.sizes[1])))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(folder)


def other_dimensions(folder: Path) -> None:
    metadata = dcp.read_metadata(folder)
    chunk = metadata.state_dict_metadata["model.embedding.weight"].chunks[0]
    chunk.sizes = torch.Size((*chunk.sizes, 1))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(folder)


def outside_file(folder: Path) -> None:
    metadata = dcp.read_metadata(folder)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = type(info)("../../elsewhere.distcp", info.offset, info.length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(folder)


def with_nan(folder: Path) -> None:
    """A checkpoint that is whole and wrong: saved after the weights had gone bad."""
    state = whole(folder)
    state["model.norm.weight"][3] = float("nan")
    rewrite(folder, state)


def whole(folder: Path) -> dict[str, Tensor]:
    """What plain PyTorch, without this package, reads from a checkpoint."""
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    state = {
        n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in metadata.state_dict_metadata.items()
    }
    torch_dcp.load(state, checkpoint_id=folder)
    return state


def rewrite(folder: Path, state: dict[str, Any]) -> None:
    """Replace a checkpoint's content by plain PyTorch's save of `state`, with a matching record."""
    for path in folder.iterdir():
        if path.name != store.RECORD:
            path.unlink()
    torch_dcp.save(state, checkpoint_id=folder)
    reseal(folder)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda f: os.truncate(f / "__0_0.distcp", 1000), "__0_0.distcp: has 1,000 bytes"),
    "flipped bit": (lambda f: flip_a_bit(f / "__0_0.distcp"), "__0_0.distcp: its content changed"),
    "flipped bit in metadata": (lambda f: flip_a_bit(f / ".metadata"), ".metadata: its content changed"),
    "missing file": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: is missing"),
    "missing metadata": (lambda f: (f / ".metadata").unlink(), ".metadata: is missing"),
    "missing record": (lambda f: (f / store.RECORD).unlink(), "no commit record"),
    "foreign file": (lambda f: (f / "other.bin").write_bytes(b"?"), "other.bin: does not belong"),
    "old shard": (lambda f: shutil.copy(f / "__0_0.distcp", f / "__1_0.distcp"), "__1_0.distcp: does not"),
    "record nested too deep": (lambda f: (f / store.RECORD).write_text("[" * 100_000), "no commit record"),
    "record is a pipe": (lambda f: (f / store.RECORD).unlink() or os.mkfifo(f / store.RECORD), "not a reg"),
    "empty folder": (lambda f: shutil.rmtree(f) or f.mkdir(), "no commit record"),
    "hostile pickle": (hostile_pickle, "it asks for posix.system"),
    "reaching pickle": (reaching_pickle, "it asks for '__init__' of"),
    "garbage metadata": (lambda f: (f / ".metadata").write_bytes(b"?") and reseal(f), "is not DCP metadata"),
    "half-covered tensor": (half_covered, "model.embedding.weight: 16384 of 32768 elements are covered"),
    "other dimensions": (other_dimensions, "model.embedding.weight: its chunks have other dimensions"),
    "file outside": (outside_file, "its file ../../elsewhere.distcp is missing"),
    "not a number": (with_nan, "model.norm.weight: holds values that are not finite"),
    "truncated and resealed": (lambda f: os.truncate(f / "__0_0.distcp", 9000) or reseal(f), "is too short"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    run: Run, kind: str, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTILE_MARK", str(tmp_path / "code-was-run"))
    expected = tensors_sha256({n: t for n, t in whole(step(run, 6)).items() if n.startswith("model.")})
    damage, named = DAMAGE[kind]
    damage(step(run, 8))
    job, checkpointer = make_job(run)
    with caplog.at_level(logging.WARNING):
        restored = checkpointer.restore(job.state)
    assert restored.step == job.state.step == 6
    assert job.state.hashes()[0] == expected
    assert named in restored.skipped[0][1] and named in caplog.text and "step-00000008" in caplog.text
    assert not (tmp_path / "code-was-run").exists()


class OldPickler(pickle.Pickler):
    """As Python 3.10 and early 3.11 do it: the member of an enumeration by `getattr`."""

    def reducer_override(self, thing: Any) -> Any:
        old = isinstance(thing, dcp._MEM_FORMAT_ENCODING)
        return (getattr, (type(thing), thing.name)) if old else NotImplemented


def test_metadata_pickled_by_an_older_python_is_read(run: Run) -> None:
    metadata = dcp.read_metadata(step(run, 8))
    with (step(run, 8) / ".metadata").open("wb") as file:
        OldPickler(file).dump(metadata)
    assert b"getattr" in (step(run, 8) / ".metadata").read_bytes()
    reseal(step(run, 8))
    job, checkpointer = make_job(run)
    assert checkpointer.restore(job.state).step == 8


def test_nothing_good_is_an_error_that_names_every_reason(run: Run) -> None:
    for number in (8, 6):
        os.truncate(step(run, number) / "__0_0.distcp", 0)
    (step(run, 4) / store.RECORD).unlink()
    job, checkpointer = make_job(run)
    with pytest.raises(
        CheckpointError, match=r"no good one is left \(step 8: .* step 6: .* step 4: no commit record"
    ):
        checkpointer.restore(job.state)


def test_no_checkpoint_left_is_an_error_and_no_fresh_start(run: Run) -> None:
    for path in store.candidates(run.checkpoints):
        shutil.rmtree(path)
    job, checkpointer = make_job(run)
    with pytest.raises(CheckpointError, match="all are gone"):
        checkpointer.restore(job.state)


def test_never_committed_is_a_fresh_start_that_clears_leftovers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    left = run.checkpoints / "saving-00000002-0123abcd"
    left.mkdir(parents=True)
    job, checkpointer = make_job(run)
    assert checkpointer.restore(job.state).step == 0 and not left.exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.pop("model.norm.weight"), "model.norm.weight: is not in the checkpoint"),
        (lambda s: s.pop("optim.norm.weight.exp_avg"), "optim.norm.weight.exp_avg: is not in the checkpoint"),
        (
            lambda s: s.update({"model.extra": torch.ones(2)}),
            "model.extra: is in the checkpoint but not in the job",
        ),
        (lambda s: s.update({"model.norm.weight": torch.ones(4)}), "has shape (4,), the job needs (128,)"),
        (
            lambda s: s.update({"optim.norm.weight.exp_avg": s["optim.norm.weight.exp_avg"].bfloat16()}),
            "optim.norm.weight.exp_avg: has dtype torch.bfloat16, the job needs torch.float32",
        ),
        (lambda s: s.update({"job.step": torch.tensor(7)}), "job.step is 7 but the optimizer made 8 steps"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    run: Run, change: Callable[[Any], Any], named: str
) -> None:
    """Whole, but not this job's: falling back would hide it, as the older ones do not fit either."""
    state = whole(step(run, 8))
    change(state)
    rewrite(step(run, 8), state)
    job, checkpointer = make_job(run)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        checkpointer.restore(job.state)


def test_a_renamed_checkpoint_is_not_taken_for_another_step(run: Run) -> None:
    step(run, 8).rename(step(run, 9))
    job, checkpointer = make_job(run)
    restored = checkpointer.restore(job.state)
    assert restored.step == 6 and "says step 8, but the folder says 9" in restored.skipped[0][1]


def test_another_runs_checkpoint_is_not_taken(run: Run, tmp_path: Path) -> None:
    """Whole and of the same shapes, so nothing but its record tells that its weights are not this run's."""
    other = make_run(tmp_path / "other", checkpoint_every=5, steps=10, seed=7)
    train(other, 10)
    shutil.copytree(other.checkpoints / "step-00000010", run.checkpoints / "step-00000010")
    job, checkpointer = make_job(run)
    restored = checkpointer.restore(job.state)
    assert restored.step == 8 and f"was written by run {other.id}, not by this one" in restored.skipped[0][1]
    assert [e.status for e in store.scan(run.checkpoints, run=run.id)] == ["damaged", "good", "good", "good"]


def test_pickled_objects_are_refused(run: Run) -> None:
    rewrite(step(run, 8), {**whole(step(run, 8)), "model.note": "text"})
    job, checkpointer = make_job(run)
    restored = checkpointer.restore(job.state)
    assert restored.step == 6 and "model.note: is a pickled object" in restored.skipped[0][1]


def test_sizes_only_lets_a_flipped_bit_through_and_says_so_in_its_name(run: Run) -> None:
    """What `verify_checksums = false` gives up, so that nobody has to guess."""
    flip_a_bit(step(run, 8) / "__0_0.distcp")
    job, checkpointer = make_job(run)
    assert restore_newest(checkpointer.store, job.state, Ranks(30), checksums=True).step == 6
    assert store.verify(step(run, 8), checksums=False).status == "good"


def test_plain_pytorch_reads_the_files(run: Run) -> None:
    job, checkpointer = make_job(run)
    checkpointer.restore(job.state)
    state = whole(step(run, 8))
    assert tensors_sha256({n: t for n, t in state.items() if n.startswith("model.")}) == job.state.hashes()[0]
    assert int(state["job.step"]) == 8 and int(state["job.next_sample"]) == 8 * run.config.global_batch


def test_what_is_written_is_the_state_at_the_save(run: Run) -> None:
    job, checkpointer = make_job(run)
    checkpointer.restore(job.state)
    before = job.state.hashes()
    checkpointer.save(job.state)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(7.0)
    other, _ = make_job(run)
    checkpointer.restore(other.state)
    assert other.state.hashes() == before != job.state.hashes()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("stops", [[5], [3, 4], [8, 12]])
def test_resuming_equals_never_having_stopped(tmp_path: Path, dropout: float, stops: list[int]) -> None:
    """Within an epoch of 24 batches and after it; with dropout the random numbers must come back too."""
    settings = {"steps": 40, "checkpoint_every": 1, "dropout": dropout, "warmup_steps": 4, "global_batch": 8}
    reference = train(make_run(tmp_path / "reference", **settings), 16)
    run, losses, ids = make_run(tmp_path / "run", **settings), {}, []
    for until in [*stops, 16]:
        part = train(run, until)
        losses |= part["losses"]
        ids += part["ids"]
    assert losses == reference["losses"]
    assert ids == reference["ids"]
    assert part["hashes"] == reference["hashes"]
