"""The job's loop: its schedule, its refusals, and what it says while it runs."""

from __future__ import annotations

import ast
import itertools
import math
import shutil
import time
from pathlib import Path

import pytest
import ridethrough
import torch
import torch.distributed as dist
from ridethrough.checkpoint.base import Ranks
from ridethrough.config import JobConfig
from ridethrough.errors import CheckpointError, RunError, UsageError
from ridethrough.events import read_events
from ridethrough.job import loop
from ridethrough.job.loop import learning_rate

from tests.jobs import make_job, make_run, train
from tests.ranks import run_ranks


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    config = JobConfig(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert all(before > after for before, after in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.55)  # half-way down the cosine


def test_no_warm_up_and_a_warm_up_longer_than_the_run_are_fine() -> None:
    assert learning_rate(1, JobConfig(steps=1, warmup_steps=0)) > 0
    assert learning_rate(5, JobConfig(steps=5, warmup_steps=10, learning_rate=1.0)) == 0.5


@pytest.mark.usefixtures("one_rank")
def test_a_loss_that_is_not_finite_ends_the_run_before_anything_is_saved(tmp_path: Path) -> None:
    job, checkpointer = make_job(make_run(tmp_path / "run"))
    job.restore(checkpointer)
    with torch.no_grad():
        job.model.norm.weight.fill_(math.inf)
    with pytest.raises(RunError, match="step 1 has a loss of nan"):
        job.step()
    assert job.state.step == 0


@pytest.mark.usefixtures("one_rank")
def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss may be finite and its gradient not: clipping it would make every weight NaN."""
    job, checkpointer = make_job(make_run(tmp_path / "run"))
    job.restore(checkpointer)
    weights, _ = job.state.hashes()
    original = loop.next_token_loss

    def poisoned(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = original(model, batch)
        return loss + torch.sqrt(loss - loss.detach())  # adds zero, with a slope that is not finite

    monkeypatch.setattr(loop, "next_token_loss", poisoned)
    with pytest.raises(RunError, match=r"step 1 has a loss of 5\..* and a gradient of norm nan"):
        job.step()
    assert job.state.hashes()[0] == weights


@pytest.mark.usefixtures("one_rank")
def test_a_last_save_that_fails_ends_the_run_under_either_policy(tmp_path: Path) -> None:
    """There is no later interval at which it could be tried again."""
    run = make_run(tmp_path / "run", steps=1, on_save_error="warn")
    job, checkpointer = make_job(run)
    job.restore(checkpointer)
    job.step()
    shutil.rmtree(run.checkpoints)
    run.checkpoints.write_text("in the way")
    with pytest.raises(CheckpointError, match="rank 0: "):
        job.save(checkpointer)


@pytest.mark.parametrize(
    ("asked", "ranks", "gpus", "device"),
    [
        ("auto", 2, 0, "cpu"),
        ("auto", 2, 1, "cpu"),
        ("auto", 2, 2, "cuda"),
        ("cpu", 1, 8, "cpu"),
        ("cuda", 8, 8, "cuda"),
    ],
)
def test_a_rank_has_a_gpu_of_its_own_or_all_take_the_cpu(
    asked: str, ranks: int, gpus: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert loop._device(asked, ranks) == device
    with pytest.raises(
        UsageError, match=f"{gpus + 1} ranks need {gpus + 1} GPUs on this node, it has {gpus}"
    ):
        loop._device("cuda", gpus + 1)


def silent_peer(seconds: float) -> str:
    """Rank 1 does not come to the collective that rank 0 waits in."""
    ranks = Ranks(timeout_s=2)
    try:
        if dist.get_rank() == 0:
            ranks.gather("the sizes", 1)
        else:
            time.sleep(seconds)
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_wait_for_another_rank_ends_and_says_what_it_was_for() -> None:
    message, _ = run_ranks(2, silent_peer, 4.0)
    assert (
        "rank 0 waited for the sizes of the other ranks, for 2 s at most; a rank is gone or late" in message
    )


@pytest.mark.usefixtures("one_rank")
def test_text_that_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "text" / "b.txt").write_text("more")
    from ridethrough.job.corpus import load_corpus

    load_corpus.cache_clear()
    with pytest.raises(RunError, match="is not what this run began with"):
        make_job(run)


@pytest.mark.usefixtures("one_rank")
def test_events_tell_the_story_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint_every=2)
    result = train(run, 4)
    events = read_events(run.events)
    phases = [(e["phase"], e.step) for e in events if e.what == "phase"]
    assert phases == [
        ("build", None), ("restore", None), ("step", 1), ("step", 2), ("checkpoint_stall", 2),
        ("step", 3), ("step", 4), ("checkpoint_stall", 4),
    ]  # fmt: skip
    assert {e.step: e["loss"] for e in events if e.what == "step"} == result["losses"]
    commits = [e for e in events if e.what == "commit"]
    assert [e.step for e in commits] == [2, 4]
    for commit in commits:
        folder = run.checkpoints / f"step-{commit.step:08d}"
        files = [f for f in folder.iterdir() if f.name != "commit.json"]
        assert commit["bytes"] == sum(f.stat().st_size for f in files)


def test_every_process_group_has_a_time_limit_of_its_own() -> None:
    """`new_group` does not inherit the default group's: a forgotten one waits for half an hour."""
    makers = ("new_group", "init_process_group")
    files = Path(ridethrough.__file__).parent.rglob("*.py")
    calls = [
        (file.name, node.func.attr, [keyword.arg for keyword in node.keywords])
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers
    ]
    assert len(calls) >= 2 and all("timeout" in keywords for _, _, keywords in calls), calls


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"size": "huge"}, "'huge' is not one of tiny, small, medium, base"),
        ({"steps": 0}, "steps: 0 must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate: 0.0 must be above 0 and finite"),
        ({"learning_rate": math.nan}, "learning_rate: nan must be above 0"),
        ({"dropout": 1.0}, "dropout: 1.0 must be in"),
        ({"step": 3}, "'step' is not a setting"),
        ({"steps": "3"}, "steps = '3' should be of type int"),
        ({"steps": True}, "steps = True should be of type int"),
        ({"verify_checksums": 1}, "verify_checksums = 1 should be of type bool"),
        ({"on_save_error": "ignore"}, "on_save_error: 'ignore' is not 'fail' or 'warn'"),
        ({"device": "tpu"}, "device: 'tpu' is not"),
    ],
)
def test_bad_settings_are_named(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match="here: ") as caught:
        JobConfig.from_dict(values, "here")
    assert sentence in str(caught.value)


def test_settings_survive_the_round_trip() -> None:
    config = JobConfig(steps=7, learning_rate=1, verify_checksums=False)
    assert JobConfig.from_dict(config.to_dict()) == config
