"""Ranks under torchrun in pods: whatever is lost comes back, by whom, after how long, and bit for bit."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from ridethrough import spawn
from ridethrough.cli import main
from ridethrough.config import PodConfig
from ridethrough.errors import RunError, UsageError
from ridethrough.events import Event, read_events
from ridethrough.launch import launch, run_rung
from ridethrough.launcher import torchrun
from ridethrough.ledger import Ledger
from ridethrough.ledger.spread import signs
from ridethrough.restart import sandbox
from ridethrough.restart.pods import Pod
from ridethrough.run import Run
from ridethrough.rungs import RUNGS

from tests.fakes import carriers, going_on, install, launcher, said, wait_for, write_text

pytestmark = pytest.mark.ranks

REASON = sandbox.why_not()
namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))

STEPS, EVERY = 36, 5

#: Who brings a rank back from each kind; a cut network may or may not outlast torchrun's patience.
TIERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("exception", "kill", "exit", "hang"), ("torchrun",)),
    **dict.fromkeys(("pod", "drain"), ("pods",)),
    "net": ("torchrun", "pods"),
    **dict.fromkeys(("slow", "pid1"), ("outlived",)),
}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setitem(RUNGS, "slow", "slow_rung")


# --- with the real job -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same job without pods, torchrun or a fault."""
    return run_rung("sync", out=tmp_path_factory.mktemp("reference") / "run", steps=STEPS, quiet=True)


def train(out: Path, faults: list[str], pods: PodConfig, **settings: Any) -> dict[str, Any]:
    settings = {"steps": STEPS, "checkpoint_every": EVERY, "collective_timeout_s": 3.0, **settings}
    return run_rung("sync", out=out, faults=faults, pods=pods, timeout_s=240, quiet=True, **settings)


def same_result(report: dict[str, Any], reference: dict[str, Any]) -> None:
    """In one launch, whatever happened in it."""
    assert report["finished"] and report["launches"] == 1 and report["recompute_mismatch"] == []
    assert report["losses"] == reference["losses"] and len(report["losses"]) == STEPS
    assert report["weights_sha256"] == reference["weights_sha256"] is not None
    assert report["state_sha256"] == reference["state_sha256"]


def account_is_closed(report: dict[str, Any]) -> None:
    """Every rank-second is in a bucket, and so is every second until a fault was made good."""
    assert sum(report["buckets_s"].values()) == pytest.approx(report["wall_s"] * report["ranks"], rel=0.01)
    assert min(report["buckets_s"].values()) >= 0
    assert report["wasted_rank_s"] == pytest.approx(
        sum(report["buckets_s"].values()) - report["buckets_s"]["useful"], abs=0.01
    )
    for fault in report["faults"]:
        if fault["mttr_s"] is not None:
            assert sum(fault["phases_s"].values()) == pytest.approx(fault["mttr_s"], abs=0.01)
            assert fault["phases_s"]["recompute"] > 0 and fault["wasted_rank_s"] > 0


def faults_are(report: dict[str, Any], asked: list[str]) -> None:
    """Each as it was asked for, in order, with its first cause, and made good by whom it should be."""
    assert [f"{f['kind']}@{f['step']}:{f['rank']}" for f in report["faults"]] == asked
    for fault, name in zip(report["faults"], asked, strict=True):
        assert name in fault["first_cause"] and f"rank {fault['rank']}" in fault["first_cause"], fault
        assert fault["tier"] in TIERS[fault["kind"]], fault
        lost = 0 if fault["tier"] == "outlived" else (fault["step"] - 1) % EVERY
        assert fault["lost_steps"] == lost, fault
        assert (fault["mttr_s"] is None) == (fault["tier"] == "outlived"), fault


def named_without_the_injection(run: Path, report: dict[str, Any]) -> None:
    """A real failure announces itself with no event: the rank has to be found from its effects alone."""
    events = [event for event in read_events(run / "events") if event.what != "fault"]
    lives = Ledger.of(events).lives
    fatal = [fault for fault in report["faults"] if fault["tier"] != "outlived"]
    assert len(lives) == len(fatal) + 1
    for life, fault in zip(lives, fatal, strict=False):
        if fault["kind"] != "net":  # which of both sides was cut off cannot be told from within
            first = signs(life.events, life.ranks, life.earlier)[0]
            assert first.rank == fault["rank"], (fault, first)


@namespaces
def test_each_container_by_itself_ten_dead_workers_a_drained_pod_and_a_cut_network(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    """Ten deaths of workers in a row, on both ranks, by exceptions and kills: torchrun alone brings them
    back, as it does not reliably where it shares its rendezvous store with them."""
    kinds = [("exception", "kill")[number % 2] for number in range(10)]
    deaths = [f"{kind}@{3 * (n + 1)}:{n // 2 % 2}" for n, kind in enumerate(kinds)]
    faults = [*deaths, "drain@32:0", "net@34:1"]
    report = train(tmp_path / "run", faults, PodConfig(policy="each", max_restarts=20, outage_s=5))
    same_result(report, reference)
    account_is_closed(report)
    faults_are(report, faults)
    named_without_the_injection(tmp_path / "run", report)
    for fault in report["faults"][:10]:
        # The survivor does not wait for a collective's timeout, nor to take leave of a peer that is gone.
        assert fault["phases_s"]["detect"] + fault["phases_s"]["abort"] < 2.5, fault
        (peer,) = [sign for sign in fault["spread"] if sign["rank"] == 1 - fault["rank"]][:1]
        assert peer["how"] == "connection" and f"rank {fault['rank']}" in peer["text"]
    drained = after(tmp_path / "run", "drain@32:0")
    (new,) = [e for e in drained if e.what == "pod_start" and e["pod"] == 0]
    assert new["reason"] == "recreate"
    cut = report["faults"][-1]
    assert {sign["how"] for sign in cut["spread"][1:3]} == {"timeout"}
    assert any("Timed out waiting 3000ms" in sign["text"] for sign in cut["spread"])


def test_without_namespaces_the_real_job_comes_back_too(tmp_path: Path, reference: dict[str, Any]) -> None:
    """What a reader without root has: pods that are processes."""
    report = train(tmp_path / "run", ["pod@8:1", "kill@17:0"], PodConfig(isolation="processes"))
    same_result(report, reference)
    account_is_closed(report)
    faults_are(report, ["pod@8:1", "kill@17:0"])
    assert report["launcher"]["isolation"].startswith("processes: ")


@namespaces
def test_each_index_by_itself_and_a_rank_that_stops_answering(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    """The pod with the rendezvous is made anew, with another address: the other must find it by its name,
    and may be there first. A rank that hangs is noticed by the collective's timeout, which says so."""
    faults = ["pod@8:0", "exit@14:1", "hang@20:0", "slow@27:1"]
    pods = PodConfig(policy="index", outage_s=2, assumed_s=5)
    report = train(tmp_path / "run", faults, pods)
    same_result(report, reference)
    account_is_closed(report)
    faults_are(report, faults)
    named_without_the_injection(tmp_path / "run", report)
    gone, _, hung, slow = report["faults"]
    assert gone["waits_s"] == {"backoff": pytest.approx(1, abs=0.9), "assumed": pytest.approx(0.5, abs=0.45)}
    assert gone["waits_s"]["assumed"] > 0 and sum(gone["waits_s"].values()) < gone["mttr_s"]
    starts = [e for e in after(tmp_path / "run", "pod@8:0") if e.what == "pod_start"]
    assert starts[0]["pod"] == 0 and {e["reason"] for e in starts} == {"recreate"}
    assert starts[0]["ip"] != said(tmp_path / "run", "pod_start")[0]["ip"]
    assert 3 <= hung["phases_s"]["detect"] < 4.5
    assert any("Timed out waiting 3000ms" in sign["text"] for sign in hung["spread"])
    (repaired,) = said(tmp_path / "run", "repaired")
    assert repaired["id"] == "slow@27:1" and slow["spread"] == []
    assert report["launcher"]["policy"] == "index" and report["launcher"]["assumed_s"] == 5


@namespaces
def test_all_pods_together_and_an_agent_that_stands_still(
    tmp_path: Path, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that is lost takes the others along at once. An agent that stands still harms nobody while its
    ranks work, and does not hold up the end."""
    monkeypatch.setattr(torchrun, "LEAVE_S", 2.0)
    faults = ["pod@8:1", "exception@14:0", "drain@20:1", "net@26:0", "pid1@34:1"]
    report = train(tmp_path / "run", faults, PodConfig(policy="gang", outage_s=5, grace_s=10))
    same_result(report, reference)
    account_is_closed(report)
    faults_are(report, faults)
    named_without_the_injection(tmp_path / "run", report)
    for name in ("pod@8:1", "drain@20:1"):
        following = after(tmp_path / "run", name)
        starts = [event for event in following if event.what == "pod_start"]
        assert [(e["pod"], e["reason"]) for e in starts[:2]] == [(0, "recreate"), (1, "recreate")]
        assert starts[0].t - starts[1].t < 1
        (stop,) = [e for e in following if e.what == "pod_stop" and e.t < starts[0].t and e["pod"] == 0]
        assert stop["reason"] == "gang"
    assert not [e for e in said(tmp_path / "run", "gave_up") if "SignalException" not in e["error"]]
    assert [e["pod"] for e in after(tmp_path / "run", "pid1@34:1") if e.what == "pod_start"] == []
    assert carriers(tmp_path / "run") == []


def after(run: Path, fault: str) -> list[Event]:
    """What follows an injected fault, up to the first step of the next life, or to the end."""
    events = read_events(run / "events")
    (begin,) = [n for n, event in enumerate(events) if event.what == "fault" and event["id"] == fault]
    following = events[begin:]
    newest = max(event.generation for event in events[:begin])
    more = [n for n, e in enumerate(following) if e.what == "step" and e.generation > newest]
    return following[: more[0]] if more else following


@namespaces
def test_pods_that_restart_out_of_step_both_give_up_and_a_gang_does_not(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    """One pod comes back by itself; the other is in the middle of a rendezvous and waits for keys that nobody
    writes. Both launchers give up before the job comes back. A gang restart has no such wait."""
    pods = PodConfig(policy="each", share_store=True)
    mttr = {}
    for policy in ("each", "gang"):
        report = train(tmp_path / policy, ["pod@8:1"], replace(pods, policy=policy))
        same_result(report, reference)
        account_is_closed(report)
        faults_are(report, ["pod@8:1"])
        mttr[policy] = report["faults"][0]["mttr_s"]
    gave_up = said(tmp_path / "each", "gave_up")
    assert {event["pod"] for event in gave_up} == {0, 1}
    # The rendezvous' own timeout has its own message, unlike a collective's.
    assert any("DistStoreError: wait timeout after 6000ms" in event["error"] for event in gave_up)
    restarts = [event for event in said(tmp_path / "each", "pod_start") if event["reason"] == "restart"]
    assert {event["pod"] for event in restarts} == {0, 1} and len(restarts) >= 3
    assert not [e for e in said(tmp_path / "gang", "gave_up") if "SignalException" not in e["error"]]
    starts = [event["reason"] for event in said(tmp_path / "gang", "pod_start")]
    assert starts == ["first", "first", "recreate", "recreate"]
    assert mttr["each"] / mttr["gang"] > 1.5, mttr


def test_a_save_has_a_time_limit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that writes for longer than a collective may take is no hang. One that writes for longer than a
    save may take is late, and that is what is said."""
    monkeypatch.setenv("SLOW_SAVE_S", "4")
    settings = {"steps": 1, "quiet": True, "data": write_text(tmp_path / "text"), "timeout_s": 60}
    report = run_rung("slow", out=tmp_path / "a", collective_timeout_s=2.0, **settings)  # type: ignore[arg-type]
    assert report["finished"] and report["faults"] == []
    with pytest.raises(RunError) as raised:
        run_rung("slow", out=tmp_path / "b", save_timeout_s=1.5, **settings)  # type: ignore[arg-type]
    assert "rank 0 waited" in str(raised.value) and "for 1.5 s at most" in str(raised.value)
    assert "Timed out waiting 2000ms" not in str(raised.value)


# --- with fakes: who starts what again -------------------------------------------------------------------

Scripts = dict[str, list[str]]
SLEEP = ["step 1", "sleep 60"]


def start(directory: Path, scripts: Scripts, pods: PodConfig | None = None, **options: Any) -> None:
    options = {"ranks": 2, "timeout_s": 60, "grace_s": 1, **options}
    launch(
        "fake_rank",
        (str(directory), json.dumps(scripts)),
        directory=directory,
        pods=pods or PodConfig(),
        **options,
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch of four ranks in two pods, of which the second was lost once."""
    directory = tmp_path_factory.mktemp("four") / "run"
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        scripts = {"3@0": ["step 1", "inject pod"], **{f"{rank}@0": SLEEP for rank in range(3)}}
        start(directory, scripts, PodConfig(assumed_s=3), ranks=4)
    return directory


def test_the_launcher_tells_what_happens_to_pods(four: Path) -> None:
    (began,) = said(four, "launch")
    assert (began["launcher"], began["pods"], began["policy"], began["ranks"]) == ("torchrun", 2, "each", 4)
    assert began["isolation"].split(":")[0] in ("namespaces", "processes")
    starts = said(four, "pod_start")
    assert [(e["pod"], e["attempt"], e["reason"]) for e in starts] == [
        (0, 0, "first"),
        (1, 0, "first"),
        (1, 1, "restart"),
    ]
    assert starts[1]["ip"] == starts[2]["ip"] != starts[0]["ip"]
    assert len({event["pid"] for event in starts}) == 3
    ends = [(event["pod"], event["attempt"], event["code"]) for event in said(four, "pod_exit")]
    assert ends[0] == (1, 0, -signal.SIGKILL) and sorted(ends[1:]) == [(0, 0, 0), (1, 1, 0)]
    (fault,) = said(four, "fault")
    assert (fault.rank, fault["pod"], fault["kind"], fault["source"]) == (3, 1, "pod", "inside")
    (detected,) = said(four, "detected")
    assert fault.t <= detected.t and said(four, "launch_end")[0]["outcome"] == "finished"
    assert said(four, "pod_wait") == []  # the first restart of a container is at once, and in its old pod
    for agents in (said(four, "agent"),):
        assert {(event["pod"], event["state"]) for event in agents} == {
            (pod, state) for pod in (0, 1) for state in ("rendezvous", "start")
        }


def test_each_rank_is_told_apart_by_its_pod_and_its_process(four: Path) -> None:
    spawned = said(four, "spawn")
    assert sorted((event.rank, event["pod"]) for event in spawned) == sorted(
        2 * [(0, 0), (1, 0), (2, 1), (3, 1)]
    )
    pids = [event["pid"] for event in spawned]
    assert len(set(pids)) == 8 and None not in pids and not any(map(psutil.pid_exists, pids))
    ended: dict[int | None, list[int | None]] = {rank: [] for rank in range(4)}
    for event in said(four, "exit"):
        ended[event.rank].append(event["code"])
    assert all(len(codes) == 2 and codes[1] == 0 for codes in ended.values()), ended


def test_torchrun_understands_the_command_that_pods_run(four: Path) -> None:
    """Flags differ between releases of torch: each of ours must be one, in full, and mean what we mean."""
    from torch.distributed import run as torch_run
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    header = (four / "logs/pod-1.log").read_text().splitlines()[0]
    command = shlex.split(header.partition("-m torch.distributed.run ")[2])
    own = command[: command.index("-m")]
    parser = torch_run.get_args_parser()
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert own and all(word.partition("=")[0] in flags for word in own), own
    config, _, arguments = torch_run.config_from_args(parser.parse_args(command))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 2, 2, 3)
    assert (config.rdzv_backend, config.event_log_handler) == ("c10d", "console")
    assert config.rdzv_configs == {
        "read_timeout": "6",
        "join_timeout": "60",
        "keep_alive_interval": "1",
        "is_host": "False",
        **{name: value for name, value in config.rdzv_configs.items() if name in ("timeout", "rank")},
    }
    settings = {**config.rdzv_configs, "is_host": "True"}
    settings.pop("rank", None)
    there = RendezvousParameters("c10d", f"localhost:{spawn.free_port()}", "id", 2, 2, **settings)
    backend, store = create_backend(there)
    handler = create_handler(store, backend, there)
    assert store.timeout == timedelta(seconds=6)
    assert handler.settings.timeout.join == timedelta(seconds=60)
    assert handler.settings.keep_alive_interval == timedelta(seconds=1)
    grace = PodConfig().grace_s * PodConfig().time_scale
    assert 0 < config.shutdown_timeout < grace  # or the pod is killed while torchrun still waits
    assert arguments[:2] == ["-u", "-m"] or "fake_rank" in arguments


@pytest.mark.parametrize("grace_s", [0.0, 1.0, 10.0, 30.0, 120.0])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_workers_are_given_up_before_their_pod_is(grace_s: float, scale: float) -> None:
    """A pod's grace period must be longer than torchrun's for its workers, so that these come to an end."""
    config = PodConfig(grace_s=grace_s, time_scale=scale)
    ours = torchrun._scaled(config.grace_s * torchrun._WORKERS_GRACE, config)
    if grace_s * scale > 1.5:  # torchrun takes whole seconds, and at least one
        assert ours < grace_s * scale


def test_a_pod_ends_after_its_grace_period_and_not_before(tmp_path: Path) -> None:
    """Drained, twice: a rank that does not hear SIGTERM is killed by its agent in time for the pod's own end;
    an agent that does not hear it is killed with its pod. The others start again once for each."""
    scripts = {
        "1@0": ["deaf", "step 1", "inject drain", "sleep 60"],
        "0@0": SLEEP,
        "0@1": ["step 2", "inject pid1", "inject drain", "sleep 60"],
        "1@1": ["step 2", "sleep 60"],
    }
    start(tmp_path, scripts, PodConfig(grace_s=30, time_scale=0.1, outage_s=0))
    stops = said(tmp_path, "pod_stop")
    assert [(event["pod"], event["reason"]) for event in stops[:2]] == [(1, "drain"), (0, "drain")]
    ends = said(tmp_path, "pod_exit")
    took = [
        next(end.t - stop.t for end in ends if end["pod"] == stop["pod"] and end.t > stop.t)
        for stop in stops[:2]
    ]
    assert 2.0 <= took[0] < 3.0 + 0.5  # torchrun's two thirds
    assert 3.0 <= took[1] < 3.0 + 1.0
    (deaf, *_) = [event for event in said(tmp_path, "exit") if event.rank == 1]
    assert deaf.t - stops[0].t >= 2.0
    new = [(event["pod"], event["reason"]) for event in said(tmp_path, "pod_start")[2:]]
    assert {(1, "recreate"), (0, "recreate")} <= set(new)
    assert {event.generation for event in said(tmp_path, "end")} == {2}  # the first life, and one for each
    assert carriers(tmp_path) == []


def test_a_killed_agent_does_not_leave_its_worker(tmp_path: Path) -> None:
    """Without a process namespace nothing ends a worker with its agent: it would hold on to port and GPU."""
    process = launcher(tmp_path, {"0@0": SLEEP, "1@0": ["deaf", *SLEEP]}, isolation="processes")
    wait_for(lambda: len(said(tmp_path, "step")) == 2, "both ranks to make a step", 60)
    (worker,) = [event["pid"] for event in said(tmp_path, "spawn") if event.rank == 1]
    (agent,) = [event["pid"] for event in said(tmp_path, "pod_start") if event["pod"] == 1]
    assert psutil.Process(worker).ppid() == agent
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(worker), "the worker to end with its agent", 3)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    (ended, *_) = said(tmp_path, "pod_exit")
    assert (ended["pod"], ended["code"]) == (1, -signal.SIGKILL)
    assert [event["reason"] for event in said(tmp_path, "pod_start")][2] == "restart"


def test_a_rank_that_leaves_too_early_ends_the_job_in_bounded_time(tmp_path: Path) -> None:
    """Code 0 is no success before the work is done. Its agent takes it for one, and waits for the others to
    leave too; these start again in vain. Whoever reads the end of it is told who left first."""
    scripts = {"1@0": ["step 1", "leave"], "0@0": ["step 1", "sleep 0.5", "raise"]}
    with pytest.raises(RunError) as raised:
        start(tmp_path, scripts, PodConfig(time_scale=0.01, pod_restarts=0))
    assert str(raised.value).startswith("rank 1 was gone without a word in step 1\n")
    assert "torchrun in pod 0 gave up: " in str(raised.value)
    assert "0 restarts are used up: pod 0 ended with code 1" in str(raised.value)
    assert carriers(tmp_path) == []


def test_a_job_that_all_ranks_leave_early_is_not_done(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        start(tmp_path, {"0": ["step 1", "leave"], "1": ["step 1", "leave"]})
    assert "all containers ended with code 0" in str(raised.value)
    assert re.match(r"rank [01] .* in step 1", str(raised.value))
    assert said(tmp_path, "launch_end")[0]["outcome"] == "failed"
    assert len(said(tmp_path, "pod_start")) == 2  # what ended with code 0 does not start again


@namespaces
def test_a_network_that_is_still_slow_when_the_work_is_done_harms_nobody(tmp_path: Path) -> None:
    """Its time is over while the launcher takes everything down: there is nothing left to mend."""
    scripts = {"0": ["step 1", "sleep 1"], "1": ["step 1", "inject slow", "end-and-hang"]}
    start(tmp_path, scripts, PodConfig(outage_s=11.2))  # the ranks get 10 s to leave
    assert said(tmp_path, "launch_end")[0]["outcome"] == "finished"
    assert carriers(tmp_path) == []


@pytest.mark.parametrize("how", ["timeout", "interrupted"])
def test_what_the_launcher_ends_itself_is_no_failure_of_a_container(tmp_path: Path, how: str) -> None:
    """Time that runs out and Ctrl-C: the account names them, and not the containers that ended for it."""
    if how == "timeout":
        with pytest.raises(RunError):
            start(tmp_path, {"0": SLEEP, "1": SLEEP}, timeout_s=6)
    else:
        process = launcher(tmp_path, {"0": SLEEP, "1": SLEEP})
        wait_for(lambda: len(said(tmp_path, "step")) == 2, "both ranks to make a step", 60)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    (fault,) = Ledger.of(read_events(tmp_path / "events")).faults
    assert (fault.kind, fault.rank, fault.tier) == (how, None, None)
    assert "container" not in fault.first_cause


def test_a_launcher_that_fails_itself_says_so_and_not_that_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Pod, command: list[str]) -> None:
        raise RunError("no container to be had")

    monkeypatch.setattr(Pod, "start", fail)
    with pytest.raises(RunError, match="no container to be had"):
        start(tmp_path, {})
    assert said(tmp_path, "launch_end")[0]["outcome"] == "failed"
    (detected,) = said(tmp_path, "detected")
    assert detected["cause"] == "the launcher failed: no container to be had"


def test_namespaces_that_cannot_be_had_are_not_replaced_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    before = sorted(Path(tempfile.gettempdir()).glob("ridethrough-*"))
    with pytest.raises(UsageError, match="isolation: pods cannot have namespaces of their own here"):
        start(tmp_path, {}, PodConfig(isolation="namespaces"))
    assert sorted(Path(tempfile.gettempdir()).glob("ridethrough-*")) == before


def test_time_that_runs_out_has_its_own_message(tmp_path: Path) -> None:
    with pytest.raises(RunError) as raised:
        start(tmp_path, {"0": ["step 1", "sleep 60"], "1": ["deaf", "enter 2", "sleep 60"]}, timeout_s=5)
    first, *rest = str(raised.value).splitlines()
    assert re.match(r"no end within 5 s: rank 0 was in step 1, silent for \d\.\d s; rank 1 was in st", first)
    assert rest == [f"log: {tmp_path}/logs/pod-{pod}.log" for pod in (0, 1)]
    assert said(tmp_path, "launch_end")[0]["outcome"] == "timeout"
    assert carriers(tmp_path) == []


# --- the command line ------------------------------------------------------------------------------------

Outputs = pytest.CaptureFixture[str]
PROGRAM = (
    "import sys; from ridethrough import cli, rungs; rungs.RUNGS['fake'] = 'fake_rung'; sys.exit(cli.main())"
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A working directory with text to train on."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text")
    yield tmp_path


FAKE = ["run", "fake", "--data", "text", "--steps", "8", "--out", "a", "--timeout", "60"]
PODS = ["--launcher", "torchrun"]


@pytest.mark.usefixtures("folder")
def test_a_job_that_never_starts_uses_up_its_restarts(
    capsys: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each agent tries as often as --max-restarts says and once, then the policy does, then it is over."""
    monkeypatch.setitem(RUNGS, "fake", "no_such_module_at_all")
    assert main([*FAKE, *PODS, "--policy", "gang", "--max-restarts", "1", "--pod-restarts", "1"]) == 1
    out, errors = capsys.readouterr()
    assert re.match(r"ridethrough: rank [01] failed first: it ended with code 1 in startup\n", errors), errors
    assert re.search(r"restarts? (is|are) used up: pod [01] ended with code 1", errors)
    assert "No module named no_such_module_at_all" in Path("a/logs/pod-0.log").read_text()
    assert f"log: {Path('a/logs/pod-0.log').absolute()}" in errors
    assert "continue with: ridethrough run fake --out" in errors
    starts, spawned = said(Path("a"), "pod_start"), said(Path("a"), "spawn")
    assert [event["reason"] for event in starts] == ["first"] * 2 + ["recreate"] * 2
    assert 4 <= len(spawned) <= 2 * 2 * 2  # two ranks, two tries, two containers
    assert "[pods] container of pod" in out
    assert carriers(Path("a")) == []


@pytest.mark.usefixtures("folder")
def test_a_fault_of_a_pod_from_outside(capsys: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.3")
    command = [sys.executable, "-c", PROGRAM, *FAKE, *PODS, "--quiet"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: going_on(Path("a")), "the run", 60)
    assert main(["fault", "a", "pod:1", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["kind"], done["rank"], done["in_effect"]) == ("pod", 1, True)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    report = json.loads(Path("a/report.json").read_text())
    assert [(f["kind"], f["rank"], f["tier"]) for f in report["faults"]] == [("pod", 1, "pods")]
    assert report["launcher"] == {
        **PodConfig().to_dict(),
        "isolation": said(Path("a"), "launch")[0]["isolation"],
    }
    (fault,) = said(Path("a"), "fault")
    assert fault["source"] == "outside"
    assert main(["fault", "a", "pod:1"]) == 2
    assert "rank 1 of" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_faults_of_ranks_from_outside_one_after_another(
    capsys: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod a process has another number for itself; and a rank that has come back can be hit again."""
    monkeypatch.setenv("FAKE_STEP_S", "0.3")
    command = [sys.executable, "-c", PROGRAM, *FAKE, *PODS, "--quiet", "--steps", "16"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for number, fault in enumerate(("exception:1", "kill:0")):
        wait_for(lambda n=number: going_on_in(Path("a"), n), "the run", 60)
        assert main(["fault", "a", fault, "--json"]) == 0, capsys.readouterr().err
        assert json.loads(capsys.readouterr().out)["in_effect"] is True
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    report = json.loads(Path("a/report.json").read_text())
    assert [(f["kind"], f["rank"], f["tier"]) for f in report["faults"]] == [
        ("exception", 1, "torchrun"),
        ("kill", 0, "torchrun"),
    ]


def going_on_in(run: Path, life: int) -> bool:
    """Whether both ranks have made a step in a life of theirs."""
    return {event.rank for event in said(run, "step") if event.generation == life} == {0, 1}


@pytest.mark.usefixtures("folder")
def test_a_run_that_was_given_up_goes_on_in_the_same_pods_or_in_others(capsys: Outputs) -> None:
    flags = ["--pod-restarts", "0", "--policy", "index", "--fault", "pod@3:1"]
    assert main([*FAKE, *PODS, *flags, "--quiet"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("ridethrough: rank 1 was killed with its pod 1 in step 3 (injected pod@3:1)\n")
    assert "0 restarts are used up: pod 1 killed by SIGKILL" in errors

    resume = ["run", "fake", "--resume", "--out", "a", "--timeout", "60", "--quiet"]
    assert main([*resume, "--fault", "pod@5:0"]) == 1
    assert "0 restarts are used up: pod 0 killed by SIGKILL" in capsys.readouterr().err
    pods = Run.open(Path("a")).pods
    assert pods and (pods.policy, pods.pod_restarts) == ("index", 0)

    assert main([*resume, "--policy", "gang", "--pods", "1"]) == 0
    assert [(e["policy"], e["pods"]) for e in said(Path("a"), "launch")] == [
        *(("index", 2), ("index", 2), ("gang", 1)),
    ]
    assert Run.open(Path("a")).pods == replace(pods, policy="gang", pods=1)
    report = json.loads(Path("a/report.json").read_text())
    assert report["finished"] and report["launches"] == 3
    assert [(f["kind"], f["tier"]) for f in report["faults"]] == [("pod", "relaunch")] * 2


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy gang", "--policy is for pods; add --launcher torchrun"),
        ("--share-store", "--share-store is for pods; add --launcher torchrun"),
        ("--launcher slurm", "argument --launcher: invalid choice: 'slurm'"),
        ("--launcher torchrun --policy all", "argument --policy: invalid choice: 'all'"),
        ("--launcher torchrun --pods 3", "pods: 2 ranks cannot be shared equally by 3 pods"),
        ("--launcher torchrun --pods 0", "pods: 0 must be in 1 to 64"),
        ("--launcher torchrun --time-scale 0", "time_scale: 0.0 must be above 0 and at most 10"),
        ("--launcher torchrun --grace-s nan", "grace_s: nan must be in 0 to 1,000,000"),
        (
            "--launcher torchrun --isolation processes --fault net@3:1",
            "fault 'net@3:1' needs pods with a network of their own: processes alone were asked for",
        ),
        ("--fault pod@3:1", "fault 'pod@3:1' happens to a pod; add --launcher torchrun"),
        ("--fault pid1@3:1", "fault 'pid1@3:1' happens to a pod; add --launcher torchrun"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags: str, message: str, capsys: Outputs) -> None:
    assert main([*FAKE, *flags.split()]) == 2
    out, errors = capsys.readouterr()
    assert out == "" and re.fullmatch(r"ridethrough: .+\n", errors) and message in errors, errors
    assert not Path("a").exists()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('launcher = "torchrun"\npolicy = "all"', "job.toml: policy: 'all' is not one of each, index, gang"),
        ('launcher = "torchrun"\npods = "2"', "job.toml: pods = '2' should be of type int"),
        ('launcher = "torchrun"\nshare-store = 1', "job.toml: share_store = 1 should be of type bool"),
        ('policy = "gang"', "--policy is for pods; add --launcher torchrun"),
    ],
)
def test_a_file_that_asks_for_what_cannot_be_is_named(content: str, message: str, capsys: Outputs) -> None:
    Path("job.toml").write_text(content)
    assert main([*FAKE, "--config", "job.toml"]) == 2
    _, errors = capsys.readouterr()
    assert message in errors and not Path("a").exists()


def test_a_fault_of_a_pod_needs_a_run_in_pods(folder: Path, capsys: Outputs) -> None:
    thread = threading.Thread(
        target=run_rung,
        args=("fake",),
        kwargs={"out": folder / "a", "data": "text", "steps": 20, "quiet": True},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STEP_S", "0.2")
        thread.start()
        wait_for(lambda: going_on(folder / "a"), "the run")
    assert main(["fault", "a", "pod:1"]) == 2
    assert "fault 'pod:1' happens to a pod, and" in capsys.readouterr().err
    with pytest.raises(UsageError, match="happens to a pod; add --launcher torchrun"):
        run_rung("fake", out=folder / "b", data="text", faults=["drain@1:0"])
    thread.join(30)
    assert not thread.is_alive()
