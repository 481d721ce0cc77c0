"""The store on its own: layout, record, verification, retention; plain files stand in for tensors."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ridethrough.checkpoint import store
from ridethrough.checkpoint.store import FileRecord, Store
from ridethrough.errors import CheckpointError, UsageError

CONTENT = {"__0_0.distcp": b"zero" * 100, "__1_0.distcp": b"one" * 100, ".metadata": b"meta"}


def fill(folder: Path) -> dict[str, FileRecord]:
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    return {n: FileRecord(len(c), hashlib.sha256(c).hexdigest()) for n, c in CONTENT.items()}


def save(one: Store, step: int) -> Path:
    staging = one.begin(step, 1000)
    return one.commit(staging, step, fill(staging), world_size=2)


def statuses(directory: Path, checksums: bool = True) -> list[tuple[int, str]]:
    return [(entry.step, entry.status) for entry in store.scan(directory, checksums)]


@pytest.fixture
def three(tmp_path: Path) -> Store:
    one = Store(tmp_path / "checkpoints", run="mine", keep=3)
    for step in (10, 20, 30):
        save(one, step)
    return one


def test_a_committed_step_is_good_and_described(three: Store) -> None:
    entry = store.scan(three.directory)[0]
    assert (entry.step, entry.status, entry.problems, entry.world_size, entry.run) == (
        30,
        "good",
        (),
        2,
        "mine",
    )
    assert entry.bytes == sum(map(len, CONTENT.values())) + (entry.path / store.RECORD).stat().st_size
    assert not list(three.directory.glob("saving-*"))


def test_before_the_commit_there_is_no_checkpoint(three: Store) -> None:
    staging = three.begin(40, 1000)
    fill(staging)
    assert store.candidates(three.directory)[0].name == "step-00000030"
    entry = store.scan(three.directory)[0]
    assert (entry.step, entry.status) == (40, "in-flight") and "not committed" in entry.problems[0]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda p: os.truncate(p / "__1_0.distcp", 100), "__1_0.distcp: has 100 bytes instead of 300"),
        (lambda p: (p / "__0_0.distcp").write_bytes(b"zerO" * 100), "__0_0.distcp: its content changed"),
        (lambda p: (p / ".metadata").write_bytes(b"atem"), ".metadata: its content changed"),
        (lambda p: (p / "__1_0.distcp").unlink(), "__1_0.distcp: is missing"),
        (lambda p: (p / "__2_0.distcp").write_bytes(b"x"), "__2_0.distcp: does not belong"),
        (lambda p: (p / "notes.txt").write_bytes(b"x"), "notes.txt: does not belong"),
        (lambda p: (p / store.RECORD).unlink(), "commit.json does not exist"),
        (lambda p: (p / store.RECORD).write_text("{"), "cannot be read as JSON"),
        (lambda p: edit(p, step=31), "was changed after the commit"),
        (lambda p: edit(p, schema=9), "schema 9 is not 1"),
        (lambda p: edit(p, seal=True, step=31), "says step 31, but the folder says 30"),
        (lambda p: edit(p, seal=True, files=3), "is not a commit record"),
        (lambda p: (p / ".metadata").unlink() or (p / ".metadata").mkdir(), ".metadata: is missing"),
    ],
)  # fmt: skip
def test_damage_is_found_and_named(three: Store, damage, named: str) -> None:  # type: ignore[no-untyped-def]
    path = three.directory / "step-00000030"
    damage(path)
    entry = store.verify(path)
    assert entry.status == "damaged"
    assert any(named in problem for problem in entry.problems), entry.problems
    assert statuses(three.directory)[1:] == [(20, "good"), (10, "good")]


def edit(path: Path, seal: bool = False, **values: object) -> None:
    record = {**json.loads((path / store.RECORD).read_text()), **values}
    (path / store.RECORD).write_text(json.dumps(store.seal(record) if seal else record))


def test_without_checksums_only_sizes_are_checked(three: Store) -> None:
    (three.directory / "step-00000030" / "__0_0.distcp").write_bytes(b"zerO" * 100)
    assert statuses(three.directory, checksums=False)[0] == (30, "good")


def test_ranks_share_the_reading_of_files(three: Store) -> None:
    path = three.directory / "step-00000030"
    for name, content in CONTENT.items():
        (path / name).write_bytes(bytes(len(content)))
    found = [store.verify(path, part=(rank, 2)).problems for rank in range(2)]
    assert [len(problems) for problems in found] == [2, 1]
    assert set(found[0]) | set(found[1]) == set(store.verify(path).problems)


def test_files_that_do_not_match_their_report_are_not_committed(three: Store) -> None:
    staging = three.begin(40, 1000)
    files = fill(staging)
    os.truncate(staging / "__1_0.distcp", 7)
    with pytest.raises(CheckpointError, match=r"step 40 is not committed.*__1_0.distcp: has 7 bytes"):
        three.commit(staging, 40, files, 2)
    three.discard(staging)
    assert statuses(three.directory) == [(30, "good"), (20, "good"), (10, "good")]


def test_retention_keeps_the_newest(three: Store) -> None:
    save(three, 40)
    assert [path.name for path in three.retain(40)] == ["step-00000010"]
    assert statuses(three.directory) == [(40, "good"), (30, "good"), (20, "good")]


def test_retention_deletes_only_its_own(tmp_path: Path) -> None:
    """Backups, strangers' folders, other runs' checkpoints, a save in flight and damaged ones all stay."""
    mine = Store(tmp_path, run="mine", keep=1)
    save(Store(tmp_path, run="other", keep=1), 5)
    for step in (10, 20, 30):
        save(mine, step)
    os.truncate(tmp_path / "step-00000020" / ".metadata", 0)
    stay = ["step-10", "step-00000010.backup", "foo-step-00000010", "step-0000000010", "step-00000010 copy"]
    for name in stay:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").symlink_to(tmp_path / "step-10")
    staging = mine.begin(40, 1)
    assert [path.name for path in mine.retain(30)] == ["step-00000010"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        *stay, "step-00000099", "step-00000005", "step-00000020", "step-00000030", staging.name, store.MARK,
    }  # fmt: skip


def test_retention_does_not_count_later_steps_that_a_restore_passed_over(tmp_path: Path) -> None:
    one = Store(tmp_path, run="mine", keep=1)
    save(one, 60)
    save(one, 55)
    one.retain(55)
    assert statuses(tmp_path) == [(60, "good"), (55, "good")]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True), st.integers(1, 4))
def test_the_step_just_committed_always_stays(tmp_path_factory, steps: list[int], keep: int) -> None:  # type: ignore[no-untyped-def]
    one = Store(tmp_path_factory.mktemp("store"), run="mine", keep=keep)
    for step in steps:
        save(one, step)
        one.retain(step)
        assert (step, "good") in statuses(one.directory)
        assert sum(saved <= step for saved, _ in statuses(one.directory)) <= keep


def test_a_step_saved_again_replaces_the_damaged_one_and_keeps_it(three: Store) -> None:
    os.truncate(three.directory / "step-00000030" / ".metadata", 0)
    save(three, 30)
    assert statuses(three.directory)[0] == (30, "good")
    (aside,) = three.directory.glob("replaced-step-00000030-*")
    assert (aside / ".metadata").stat().st_size == 0


def test_sweep_deletes_what_killed_saves_left_and_nothing_else(three: Store) -> None:
    staging = three.begin(40, 1000)
    other = three.directory / "saving-notes"
    other.mkdir()
    assert three.sweep() == [staging] and other.exists() and len(statuses(three.directory)) == 3


def test_too_little_room_is_an_error_before_anything_is_written(three: Store) -> None:
    with pytest.raises(CheckpointError, match="bytes free; a checkpoint of"):
        three.begin(40, 1 << 60)
    assert not list(three.directory.glob("saving-*"))


def test_a_store_whose_checkpoints_are_gone_is_not_new(three: Store, tmp_path: Path) -> None:
    assert store.ever_committed(three.directory)
    for path in store.candidates(three.directory):
        path.rename(tmp_path / path.name)
    assert store.ever_committed(three.directory)
    assert not store.ever_committed(Store(tmp_path / "new", "mine", 1).directory)


def test_names_that_are_not_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a checkpoint folder"):
        store.verify(tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        store.scan(tmp_path / "nowhere")


def test_the_store_imports_no_torch() -> None:
    code = "import sys, ridethrough.checkpoint.store; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
