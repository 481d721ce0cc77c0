"""The job's loop: its schedule, its refusals, and what it says while it runs."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path

import pytest
import ridethrough
import torch
from ridethrough.config import JobConfig
from ridethrough.errors import RunError, UsageError
from ridethrough.events import read_events
from ridethrough.job.loop import learning_rate

from tests.jobs import make_job, make_run, train


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
    with pytest.raises(RunError, match="the loss is nan at step 1"):
        job.step()
    assert job.state.step == 0


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
        ({"learning_rate": 0.0}, "learning_rate: 0.0 must be above 0"),
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
