"""Ranks under torchrun, one agent a pod, and the restart policy that starts failed containers again."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ridethrough import spawn
from ridethrough.config import PodConfig
from ridethrough.events import EventLog
from ridethrough.launcher.group import LEAVE_S, OUTPUT_S, Ending, Task, Watcher, interrupted
from ridethrough.launcher.pod_faults import PodFaults
from ridethrough.launcher.progress import Progress
from ridethrough.launcher.story import Exit
from ridethrough.ledger.spread import signal_name, signs
from ridethrough.restart.pods import Pod
from ridethrough.restart.policy import Policy, Restart
from ridethrough.restart.sandbox import sandboxes

#: Seconds within which torchrun tells the exit code of a worker that is gone.
_CODE_S = 1.0

#: What torchrun prints when it finds a worker failed; nothing else tells the exit code of its child.
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")

#: torchrun's own waits at a rendezvous, in seconds, as it has them by default: for a key in the store, for
#: the other agents, and between two signs of life, of which three may be missed. `time_scale` shortens them.
RENDEZVOUS_S = {"read_timeout": 60, "join_timeout": 600, "keep_alive_interval": 5}

#: torchrun's grace for its workers as a share of the pod's own, so that it is over before the pod is killed.
_WORKERS_GRACE = 2 / 3


@dataclass
class _Worker:
    """A rank's process, which is the child of a torchrun agent and not ours."""

    rank: int
    pod: int
    number: int
    process: psutil.Process | None
    gone_at: float | None = None
    code: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        with suppress(psutil.Error):
            process = self.process
            return bool(process and process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        return False


@dataclass
class _Plan:
    """Pods that are to start again, once they have all ended and waited."""

    restart: Restart
    due: float | None = None


class TorchrunPods(Watcher):
    """The pods of one launch; implements `Group`.

    Args:
        task: what their ranks run.
        log: the launcher's events.
        progress: where to show what they print.
        environment: what every process of the launch gets.
        config: how many pods, and how they start again.
        scratch: the launch's folder of temporary files.
    """

    def __init__(
        self,
        task: Task,
        log: EventLog,
        progress: Progress,
        environment: Mapping[str, str],
        config: PodConfig,
        scratch: Path,
    ) -> None:
        super().__init__(task, log, progress)
        self._config, self._scratch, self._environment = config, scratch, dict(environment)
        self._sandboxes = sandboxes(config.isolation, scratch, environment, config.shm_mb)
        self._policy = Policy(config)
        self._pods: list[Pod] = []
        self._workers: dict[int, _Worker] = {}
        self._plans: list[_Plan] = []
        self._kill_at: dict[int, float] = {}
        self._drained: set[int] = set()
        self._completed: set[int] = set()
        self._given_up: str | None = None
        self._lost_generation = task.generation - 1
        self._endpoint = ""
        self._ending = False
        directory = task.directory / "faults"
        self._faults = PodFaults(directory, config.outage_s, self.record, self._pod_of, self._drain)

    @property
    def about(self) -> dict[str, Any]:
        """What the `launch` event says of the way in which the ranks are started."""
        config = self._config
        return {
            "launcher": config.launcher,
            "pods": config.pods,
            "policy": config.policy,
            "isolation": self._sandboxes.isolation,
        }

    # --- the frame ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a container in every pod."""
        environment = {
            **self._environment,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if self._config.share_store else "1",
        }
        for number in range(self._config.pods):
            log = self.logs / f"pod-{number}.log"
            own = {**environment, **_gpus(number, self._config.share(self.task.ranks), self.task.ranks)}
            self._pods.append(Pod(number, self._sandboxes, own, self._scratch, log, self.lines))
        first = self._pods[0].sandbox
        self._endpoint = f"{first.host}:{spawn.free_port()}"
        for pod in self._pods:
            self._start(pod, "first")

    def watch(self, timeout_s: float, told: list[signal.Signals]) -> Ending | None:
        """Wait until all pods have completed (None), or until the job is lost for good."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.turn()
            if self._given_up:
                return self._failure(self._given_up)
            if len(self._completed) == len(self._pods):
                return None if self.all_done else self._failure("all containers ended with code 0")
            if self.all_done:
                # All is done and saved. A container that hangs on its way out must not hold up the others.
                self.turns(LEAVE_S, lambda: len(self._completed) < len(self._pods))
                return None
            if told:
                return interrupted(told)
            if time.monotonic() > deadline:
                return self.timeout(timeout_s, self._log_files())

    def end(self, ending: Ending | None) -> None:
        """End what still runs, and record it all."""
        self._ending = True
        self._completed.update(range(len(self._pods)))  # whatever ends now, nothing starts again
        if ending:
            self._detect(time.time(), ending.cause)
        for pod in self._pods:
            if pod.running:
                self.record("pod_stop", pod=pod.number, reason="end")
                pod.terminate()
        self.turns(self.task.grace_s, lambda: any(pod.running for pod in self._pods))
        for pod in self._pods:
            pod.kill()
        self.turn()
        for pod in self._pods:
            pod.close()
        self._sandboxes.close()
        if ending:
            self.record("aborted")

    def finish_output(self) -> None:
        """Take in the last of the output, once nothing is left that could write more."""
        containers = [pod.container for pod in self._pods if pod.container]
        self.turns(OUTPUT_S, lambda: not self.lines.empty() or any(one.talking for one in containers))

    # --- what containers and agents say ------------------------------------------------------------------

    def show_line(self, number: int, line: str) -> None:
        """With the pod in front; what agents say in JSON is for us."""
        if line.startswith('{"name": "torchelastic.'):
            with suppress(ValueError, KeyError):  # a line that another process has written into
                self._agent_said(number, json.loads(line))
                return
        if match := _FAILED.search(line):
            self._code_is_known(number, int(match[2]), int(match[1]))
        self.progress.line(f"[pod {number}] {line}")

    def _agent_said(self, pod: int, said: dict[str, Any]) -> None:
        """torchrun's own events, of which it writes each when what it tells of is over."""
        about = said["metadata"]
        state, now = about["state"], time.time()
        if state in ("RENDEZVOUS", "ASSIGN_WORKER_RANKS"):
            self.record("agent", t=now - about["duration_ms"] / 1000, pod=pod, state="rendezvous")
            self.record("agent", t=now, pod=pod, state="start")
        elif state == "START" and said["source"] == "WORKER":
            self._worker_started(pod, int(about["global_rank"]), int(about["worker_id"]))
        elif state == "FAILED" and said["source"] == "AGENT" and about.get("raw_error"):
            self.record("gave_up", pod=pod, error=str(about["raw_error"]).strip().splitlines()[-1])

    def _worker_started(self, pod: int, rank: int, number: int) -> None:
        """Find the process of a rank: `number` is its process number within the pod.

        Among its agent's children, as the environment of a process cannot be read until it has been set up.
        """
        container = self._pods[pod].container
        assert container
        agent = self._pods[pod].sandbox.first_process(container.pid)
        own: list[psutil.Process] = []
        with suppress(psutil.Error):  # they have ended since
            children = psutil.Process(agent).children() if agent else []
            own = [child for child in children if _number_inside(child.pid) == number]
        if (before := self._workers.get(rank)) and rank not in self.exits and not before.alive:
            self._note_exit(before, before.code)
        self._workers[rank] = _Worker(rank, pod, number, own[0] if own else None)
        self.exits.pop(rank, None)
        self.record("spawn", rank=rank, pid=own[0].pid if own else None, pod=pod)

    def _code_is_known(self, pod: int, number: int, code: int) -> None:
        for worker in self._workers.values():
            if (worker.pod, worker.number) == (pod, number):
                worker.code = code

    # --- ends and beginnings -----------------------------------------------------------------------------

    def note_ends(self) -> None:
        """Look what has ended, and do what is due."""
        for worker in list(self._workers.values()):
            self._look_at(worker)
        for pod in self._pods:
            if pod.running and (code := pod.poll()) is not None:
                self._container_ended(pod, code)
        if not self._ending:
            self._faults.turn()
            self._kill_overdue()
            self._carry_out_plans()

    def _look_at(self, worker: _Worker) -> None:
        """Note that a worker is gone; its exit code is torchrun's to tell, a moment later."""
        if worker.rank in self.exits or worker.alive:
            return
        if worker.gone_at is None:
            worker.gone_at = time.time()
            for event in self.follower.new():  # its last words, which say whether its work was done
                self.hear(event)
        running, ended = self._pods[worker.pod].running, self.stories[worker.rank].ended
        if not ended:
            self._detect(worker.gone_at, f"the process of rank {worker.rank} is gone", rank=worker.rank)
        waiting = ended or (worker.code is None and time.time() - worker.gone_at < _CODE_S)
        if running and waiting:
            return
        container = self._pods[worker.pod].container
        code = 0 if ended and container and container.code == 0 else worker.code
        self._note_exit(worker, code)

    def _note_exit(self, worker: _Worker, code: int | None) -> None:
        t = worker.gone_at or time.time()
        self.exits[worker.rank] = Exit(code, t)
        self.record("exit", rank=worker.rank, t=t, code=code, pod=worker.pod)

    def _container_ended(self, pod: Pod, code: int) -> None:
        now = time.time()
        self.record("pod_exit", pod=pod.number, attempt=pod.attempt, code=code)
        for worker in self._workers.values():
            if worker.pod == pod.number:
                self._look_at(worker)
        self._kill_at.pop(pod.number, None)
        if code == 0 or self.all_done:
            self._completed.add(pod.number)
        if pod.number in self._completed or self._planned(pod.number):
            return
        self._detect(now, f"the container of pod {pod.number} ended", pod=pod.number)
        gone = pod.number in self._drained
        restart = self._policy.failed(pod.number, now - pod.started_at, gone)
        how = f"killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
        if restart is None:
            self._given_up = f"{self._config.pod_restarts} restarts are used up: pod {pod.number} {how}"
            return
        self._say(f"container of pod {pod.number} {how}; {_in_words(restart, self._config)}")
        self._plans.append(_Plan(restart))
        for number in restart.pods:
            self._completed.discard(number)
            if self._pods[number].running:
                self._stop(self._pods[number], "gang")

    def _stop(self, pod: Pod, reason: str) -> None:
        """Ask a container to end; what has not within the grace period is killed."""
        self.record("pod_stop", pod=pod.number, reason=reason)
        pod.terminate()
        self._kill_at[pod.number] = time.time() + self._config.grace_s * self._config.time_scale

    def _kill_overdue(self) -> None:
        for number, when in list(self._kill_at.items()):
            if time.time() >= when:
                self._pods[number].kill()

    def _planned(self, pod: int) -> bool:
        return any(pod in plan.restart.pods for plan in self._plans)

    def _carry_out_plans(self) -> None:
        for plan in list(self._plans):
            pods = [self._pods[number] for number in plan.restart.pods]
            if plan.due is None and not any(pod.running for pod in pods):
                plan.due = time.time() + self._wait(plan.restart)
            if plan.due is not None and time.time() >= plan.due:
                self._plans.remove(plan)
                for pod in pods:
                    self._start_again(pod, plan.restart.recreate)

    def _wait(self, restart: Restart) -> float:
        """Say that pods wait; returns for how long, in seconds."""
        backoff_s, assumed_s = restart.backoff_s, restart.assumed_s
        if backoff_s or assumed_s:
            for number in restart.pods:
                self.record("pod_wait", pod=number, backoff_s=backoff_s, assumed_s=assumed_s)
        return backoff_s + assumed_s

    def _start_again(self, pod: Pod, recreate: bool) -> None:
        if recreate:
            pod.recreate()
            self._drained.discard(pod.number)
            self._faults.forget(pod)
        self._start(pod, "recreate" if recreate else "restart")

    def _start(self, pod: Pod, reason: str) -> None:
        pod.start(self._command(pod))
        assert pod.container
        about: dict[str, Any] = {"attempt": pod.attempt, "pid": pod.container.pid, "ip": pod.sandbox.address}
        self.record("pod_start", pod=pod.number, reason=reason, **about)

    def _command(self, pod: Pod) -> list[str]:
        """What a container runs: what one would write into the manifest of such a pod."""
        config, task = self._config, self.task
        settings = [f"{name}={_scaled(s, config)}" for name, s in RENDEZVOUS_S.items()]
        settings.append(f"is_host={pod.number == 0}")
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={config.pods}", f"--nproc-per-node={config.share(task.ranks)}"),
            *(f"--max-restarts={config.max_restarts}", "--rdzv-backend=c10d"),
            *(f"--rdzv-id={task.directory.name}", f"--rdzv-endpoint={self._endpoint}"),
            f"--rdzv-conf={','.join(settings)}",
            *(f"--local-addr={pod.sandbox.host}", "--event-log-handler=console"),
            f"--shutdown-timeout={_scaled(config.grace_s * _WORKERS_GRACE, config)}",
            *("-m", task.module, *task.arguments),
        ]

    def _pod_of(self, rank: int) -> Pod:
        worker = self._workers.get(rank)
        return self._pods[worker.pod if worker else rank // self._config.share(self.task.ranks)]

    def _drain(self, pod: Pod) -> None:
        self._drained.add(pod.number)
        self._stop(pod, "drain")

    # --- how it is lost ----------------------------------------------------------------------------------

    def _detect(self, t: float, cause: str, rank: int | None = None, pod: int | None = None) -> None:
        """Note the first sign, of each life of the ranks, that somebody in charge could see."""
        generation = max(story.generation for story in self.stories)
        if generation > self._lost_generation:
            self._lost_generation = generation
            self.record("detected", rank=rank, t=t, pod=pod, cause=cause)

    def _failure(self, why: str) -> Ending:
        """The first cause of the last loss, and why nothing brings the ranks back from it."""
        newest = max(story.generation for story in self.stories)
        began = min((event.t for event in self.heard if event.generation == newest), default=0.0)
        heard = sorted(self.heard, key=lambda event: event.t)
        earlier = [event for event in heard if event.t < began]
        found = signs(heard[len(earlier) :], self.task.ranks, earlier)
        details = [*(f"  {sign.text}" for sign in found[1:]), why]
        details += [f"log: {log}" for log in self._log_files()]
        first = found[0] if found else None
        return Ending(
            "failed", first.text if first else why, first.rank if first else None, "\n".join(details)
        )

    def _log_files(self) -> list[Path]:
        return [pod.container.log for pod in self._pods if pod.container]

    def _say(self, text: str) -> None:
        self.progress.line(f"[pods] {text}")


def _in_words(restart: Restart, config: PodConfig) -> str:
    everybody = "all pods are made anew"
    one = "its pod is made anew" if restart.recreate else "it starts again"
    wait = restart.backoff_s + restart.assumed_s
    when = f"in {wait:.2f} s ({wait / config.time_scale:g} s × {config.time_scale:g})" if wait else "at once"
    return f"{everybody if config.policy == 'gang' else one} {when}"


def _scaled(seconds: float, config: PodConfig) -> int:
    """A wait of torchrun, which takes whole seconds only."""
    return max(1, round(seconds * config.time_scale))


def _number_inside(pid: int) -> int:
    """The number that a process has in its own process namespace."""
    with suppress(OSError):
        if match := re.search(r"^NSpid:.*?(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M):
            return int(match[1])
    return pid


def _gpus(pod: int, share: int, ranks: int) -> dict[str, str]:
    """The GPUs of a pod, if there is one for each rank; else none, and the ranks compute on CPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    gpus = [str(number) for number in range(len(there))] if visible is None else visible.split(",")
    if not there:
        return {}
    own = gpus[pod * share : (pod + 1) * share] if len(gpus) >= ranks else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
