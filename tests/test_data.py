"""Every sample exactly once an epoch, whatever the restarts and the world sizes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ridethrough.config import JobConfig
from ridethrough.errors import UsageError
from ridethrough.job.corpus import Corpus, load_corpus
from ridethrough.job.data import Batches, Sampler


def batches(samples: int, global_batch: int, rank: int, world_size: int, seed: int = 0) -> Batches:
    corpus = Corpus(bytes(i % 256 for i in range(samples * 4 + 1)), "test", 1, "")
    return Batches(corpus, JobConfig(seq_len=4, global_batch=global_batch, seed=seed), rank, world_size)


@given(
    samples=st.integers(1, 50),
    share=st.integers(1, 4),
    segments=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 8)), min_size=1, max_size=5),
    seed=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_restarts_on_any_world_size_read_the_same_sequence(
    samples: int, share: int, segments: list[tuple[int, int]], seed: int
) -> None:
    """Train some steps on each world size in turn, carrying `next_sample` only."""
    global_batch, position, read = 12 * share, 0, []
    for world_size, steps in segments:
        ranks = [batches(samples, global_batch, r, world_size, seed) for r in range(world_size)]
        for one in ranks:
            one.next_sample = position
        for _ in range(steps):
            for one in ranks:
                one.next()
                read += one.last_ids
        position = ranks[0].next_sample
    assert read == Sampler(samples, seed).ids(0, position)
    for epoch in range(len(read) // samples):
        assert Counter(read[epoch * samples : (epoch + 1) * samples]) == Counter(range(samples))


def test_epochs_are_shuffled_differently_and_by_seed() -> None:
    sampler = Sampler(100, seed=0)
    first, second = sampler.ids(0, 100), sampler.ids(100, 100)
    assert first != second != list(range(100))
    assert first != Sampler(100, seed=1).ids(0, 100)
    assert sampler.ids(0, 100) == first  # going back, as a restart does


def test_a_batch_holds_the_text_of_its_samples() -> None:
    one = batches(10, 2, 0, 1)
    batch = one.next()
    assert batch.shape == (2, 5)
    assert [row[0].item() // 4 for row in batch] == one.last_ids
    assert all((row[1:] - row[:-1] == 1).all() for row in batch)


def test_ranks_must_share_a_batch_equally() -> None:
    with pytest.raises(UsageError, match="8 sequences cannot be shared equally by 3 ranks"):
        batches(10, 8, 0, 3)


def test_the_corpus_is_pythons_own_source() -> None:
    corpus = load_corpus("stdlib")
    assert b"def namedtuple(" in corpus.text and len(corpus.text) > 1_000_000
    load_corpus.cache_clear()
    assert load_corpus("stdlib").sha256 == corpus.sha256


def test_a_folder_is_read_whole_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / ".hidden").write_text("no")
    assert load_corpus(str(tmp_path)).text == b"first\0second\0"


def test_folders_of_any_name_are_read_but_pipes_are_not(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "x").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    assert load_corpus(str(tmp_path)).text == b"text\0"


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        load_corpus(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="holds no text"):
        load_corpus(str(tmp_path))
