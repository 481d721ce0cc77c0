"""Pods of this machine: what each has for itself, what reaches what, and that nothing of them is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ridethrough import processes, spawn
from ridethrough.config import PodConfig
from ridethrough.errors import RunError, UsageError
from ridethrough.launch import launch
from ridethrough.restart import sandbox
from ridethrough.restart.pods import Pod
from ridethrough.restart.sandbox import Namespaces, Sandbox

from tests.fakes import carriers, install, launcher, on_the_machine, said, wait_for

pytestmark = pytest.mark.ranks

REASON = sandbox.why_not()
namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))
isolations = pytest.mark.parametrize("isolation", [pytest.param("namespaces", marks=namespaces), "processes"])

SHM_MB = 8


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which launches of this test, here or in another process, keep their temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def machine(scratch: Path) -> Iterator[None]:
    """Afterwards the machine is as it was before, to the last file descriptor."""
    before, files = on_the_machine(), open_files()
    yield
    assert on_the_machine() == before
    assert list(scratch.iterdir()) == []
    wait_for(lambda: open_files() <= files, "file descriptors to be closed")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """What the processes of one launch get; they are gone afterwards."""
    token = uuid.uuid4().hex
    yield spawn.environment(os.environ, token=token, threads=1)
    left = processes.carriers(token)
    processes.sweep(token)
    assert left == []


@pytest.fixture
def network(tmp_path: Path, environment: dict[str, str]) -> Iterator[Namespaces]:
    """A network that pods can be made on."""
    made = Namespaces(tmp_path, environment, SHM_MB)
    yield made
    made.close()


@pytest.fixture
def pair(network: Namespaces) -> Iterator[list[Sandbox]]:
    """Two pods on it."""
    made: list[Sandbox] = [network.make(0), network.make(1)]
    yield made
    for one in made:
        one.close()


def inside(pod: Sandbox, code: str) -> Any:
    """Run Python in a new container of a pod; returns what it prints, from JSON."""
    command = pod.command([sys.executable, "-c", textwrap.dedent(code)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


# --- what a pod has for itself ---------------------------------------------------------------------------

LOOK = """
import json, os, socket
print(json.dumps({
    "pid": os.getpid(),
    "others": [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()],
    "hostname": socket.gethostname(),
    "links": sorted(name for _, name in socket.if_nameindex()),
    "peers": {name: socket.gethostbyname(name) for name in ("pod-0.job", "pod-1.job", "pod-0", "localhost")},
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    "folder": os.getcwd(),
    "namespaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in "net uts ipc mnt pid".split()},
}))
"""


@namespaces
def test_a_pod_has_an_address_a_name_processes_and_shared_memory_of_its_own(pair: list[Sandbox]) -> None:
    one, other, again = inside(pair[0], LOOK), inside(pair[1], LOOK), inside(pair[0], LOOK)
    assert pair[0].address != pair[1].address
    for seen in (one, other):
        assert seen["peers"] == {
            "pod-0.job": pair[0].address,
            "pod-1.job": pair[1].address,
            "pod-0": pair[0].address,
            "localhost": "127.0.0.1",
        }
        assert (seen["pid"], seen["others"]) == (1, [])
        assert seen["links"] == ["eth0", "lo"]
        assert seen["shm"] == SHM_MB << 20
        assert seen["folder"] == str(Path.cwd())
    assert (one["hostname"], other["hostname"]) == ("pod-0", "pod-1")
    for kind, own in one["namespaces"].items():
        assert own != str(Path(f"/proc/self/ns/{kind}").readlink()), kind
        if kind in ("net", "uts", "ipc"):  # a pod's own, for all of its containers; the others end with each
            assert other["namespaces"][kind] != own == again["namespaces"][kind], kind


@namespaces
def test_shared_memory_ends_where_it_was_said_to(pair: list[Sandbox]) -> None:
    """A job that needs more than the pod's /dev/shm meets the end of it here, as on a cluster."""
    fill = """
        import errno, json
        with open("/dev/shm/full", "wb", buffering=0) as file:
            written, error = 0, None
            try:
                for _ in range(64):
                    written += file.write(bytes(1 << 20))
            except OSError as got:
                error = got.errno
        print(json.dumps([written, error]))
    """
    written, error = inside(pair[0], fill)
    assert error == errno.ENOSPC and written <= SHM_MB << 20
    assert written > (SHM_MB - 2) << 20
    assert inside(pair[1], "import json, os; print(json.dumps(os.listdir('/dev/shm')))") == []
    assert not Path("/dev/shm/full").exists()


# --- containers come and go in a pod ---------------------------------------------------------------------


def pod(made: Any, environment: dict[str, str], folder: Path) -> Pod:
    return Pod(0, made, environment, folder, folder / "log", spawn.output_queue())


def contain(pod: Pod, code: str, folder: Path) -> Any:
    """Run Python as the pod's next container, to its end; returns what it writes to `said`."""
    result = folder / "said"
    result.unlink(missing_ok=True)
    pod.start([sys.executable, "-c", textwrap.dedent(code), str(result)])
    wait_for(lambda: pod.poll() is not None, "the container's end")
    assert pod.container and pod.container.code == 0, pod.container and pod.container.tail
    return json.loads(result.read_text())


KEEP = """
    import json, os, pathlib, sys, tempfile
    kept = [pathlib.Path(folder, "kept") for folder in (tempfile.gettempdir(), "/dev/shm")]
    found = [file.exists() for file in kept]
    [file.touch() for file in kept]
    pathlib.Path(sys.argv[1]).write_text(json.dumps({"found": found, **os.environ}))
"""


@namespaces
def test_a_container_that_starts_again_finds_its_files_and_a_new_pod_does_not(
    network: Namespaces, environment: dict[str, str], tmp_path: Path
) -> None:
    own = pod(network, environment, tmp_path)
    try:
        first, second = contain(own, KEEP, tmp_path), contain(own, KEEP, tmp_path)
        before = own.sandbox.address
        own.recreate()
        third = contain(own, KEEP, tmp_path)
    finally:
        own.close()
    assert [seen["found"] for seen in (first, second, third)] == [[False] * 2, [True] * 2, [False] * 2]
    assert own.attempt == 2
    assert first["TMPDIR"].startswith(f"{tmp_path}/")
    assert first["POD_IP"] == second["POD_IP"] == before
    assert third["POD_IP"] == own.sandbox.address != before
    assert (first["JOB_COMPLETION_INDEX"], first["GLOO_SOCKET_IFNAME"]) == ("0", "eth0")


@namespaces
def test_a_new_pod_is_found_by_its_name_by_those_that_run(pair: list[Sandbox], network: Namespaces) -> None:
    """Whoever has looked up the name of a pod before it was made anew has to look again, and can."""
    resolve = "import json, socket; print(json.dumps(socket.gethostbyname('pod-0.job')))"
    assert inside(pair[1], resolve) == pair[0].address
    pair[0].close()
    pair[0] = network.make(0)
    assert inside(pair[1], resolve) == pair[0].address


FAMILY = """
    import json, os, subprocess, sys, time
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
    for new_session in (False, True):
        subprocess.Popen([sys.executable, "-c", code], start_new_session=new_session)
    open(sys.argv[1], "w").write("1")
    time.sleep(float(sys.argv[2]))
"""


@isolations
@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_nothing_that_a_container_has_started_outlives_it(
    isolation: str, how: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Also what has a session of its own: a worker whose agent is killed must not hold on to its GPU."""
    made = sandbox.sandboxes(isolation, tmp_path, environment, SHM_MB)
    own = pod(made, environment, tmp_path)
    marks = {processes.POD: "0"}
    try:
        seconds = "0.1" if how == "ends" else "120"
        own.start([sys.executable, "-c", textwrap.dedent(FAMILY), str(tmp_path / "said"), seconds])
        wait_for((tmp_path / "said").exists, "the container's children")
        if how == "is killed":
            assert len(processes.carriers(environment[processes.TOKEN], marks)) >= 3
            own.kill()
        wait_for(lambda: own.poll() is not None, "the container's end")
        assert processes.carriers(environment[processes.TOKEN], marks) == []
    finally:
        own.close()
        made.close()


@isolations
def test_a_frozen_first_process_stands_still_and_can_be_killed(
    isolation: str, environment: dict[str, str], tmp_path: Path
) -> None:
    made = sandbox.sandboxes(isolation, tmp_path, environment, SHM_MB)
    own = pod(made, environment, tmp_path)
    tick = "import sys, time\nwhile True:\n    open(sys.argv[1], 'a').write('.')\n    time.sleep(0.01)"
    ticks = tmp_path / "ticks"
    try:
        own.start([sys.executable, "-c", tick, str(ticks)])
        wait_for(lambda: ticks.exists() and ticks.stat().st_size > 2, "ticks")
        own.freeze()
        assert own.container
        first = own.sandbox.first_process(own.container.pid)
        status = Path(f"/proc/{first}/status")
        wait_for(lambda: "\nState:\tT" in status.read_text(), "the first process to stand still")
        own.terminate()  # which it can't hear
        assert own.poll() is None and own.running
        own.kill()
        assert own.poll() == -signal.SIGKILL and own.poll() is None
    finally:
        own.close()
        made.close()


# --- the network -----------------------------------------------------------------------------------------

SERVE = """
import socket, sys, threading
listener = socket.create_server(("", 5000))
print("ready", flush=True)
def answer(peer):
    with peer:
        while got := peer.recv(1 << 16):
            if got.endswith(b"?"):
                peer.sendall(sys.argv[1].encode())
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""

ASK = """
import json, socket
try:
    with socket.create_connection(("pod-0.job", 5000), timeout=0.5) as peer:
        peer.sendall(b"?")
        print(json.dumps(peer.recv(100).decode()))
except OSError as error:
    print(json.dumps(type(error).__name__))
"""

SEND = """
import json, socket, time
with socket.create_connection(("pod-0.job", 5000), timeout=30) as peer:
    began = time.monotonic()
    peer.sendall(bytes(4 << 20) + b"?")
    peer.recv(100)
    print(json.dumps(time.monotonic() - began))
"""


def serve(pod: Sandbox, environment: dict[str, str], says: str) -> subprocess.Popen[str]:
    """A server in a container of a pod."""
    command = pod.command([sys.executable, "-c", SERVE, says])
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def server(pair: list[Sandbox], environment: dict[str, str]) -> Iterator[None]:
    """Pod 0 serves."""
    with serve(pair[0], environment, "here") as process:
        yield
        process.kill()


@namespaces
@pytest.mark.usefixtures("server")
def test_a_cut_network_carries_nothing_and_a_mended_one_does_again(pair: list[Sandbox]) -> None:
    assert inside(pair[1], ASK) == "here"
    pair[1].cut()
    assert inside(pair[1], ASK) == "TimeoutError"  # nothing comes back, not even a refusal
    pair[1].mend()
    assert inside(pair[1], ASK) == "here"
    pair[0].cut()
    assert inside(pair[1], ASK) == "TimeoutError"
    pair[0].mend()
    assert inside(pair[1], ASK) == "here"


@namespaces
@pytest.mark.skipif(shutil.which("tc") is None, reason="tc is not installed")
@pytest.mark.usefixtures("server")
def test_a_slow_network_has_the_rate_that_it_says(pair: list[Sandbox]) -> None:
    fast = inside(pair[1], SEND)
    pair[1].throttle()
    pair[1].throttle()  # a second fault, before the first is over
    slow = inside(pair[1], SEND)
    pair[1].mend()
    mended = inside(pair[1], SEND)
    assert sandbox.SLOW_RATE == "20mbit"
    assert 8 * (4 << 20) / slow == pytest.approx(20e6, rel=0.25)
    assert slow > 4 * max(fast, mended)


@namespaces
def test_two_launches_at_once_have_the_same_addresses_and_do_not_meet(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    said = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    nets = [Namespaces(tmp_path / str(number), environment, SHM_MB) for number in range(2)]
    pairs = [[net.make(0), net.make(1)] for net in nets]
    assert [pod.address for pod in pairs[0]] == [pod.address for pod in pairs[1]]
    with serve(pairs[0][0], environment, "one") as one, serve(pairs[1][0], environment, "two") as two:
        said += [inside(pods[1], ASK) for pods in pairs]
        one.kill()
        one.wait(10)
        for pod in pairs[0]:
            pod.close()
        nets[0].close()
        said.append(inside(pairs[1][1], ASK))  # the end of one launch is nothing to the other
        two.kill()
    for pod in pairs[1]:
        pod.close()
    nets[1].close()
    assert said == ["one", "two", "two"]


@namespaces
def test_addresses_are_used_again_only_after_hundreds_of_pods(network: Namespaces) -> None:
    """A peer that holds on to an old address must not reach another pod by it."""
    seen = []
    for _ in range(3):
        made = network.make(0)
        seen.append(made.address)
        made.close()
    assert len(set(seen)) == 3 and all(address.startswith("10.244.7.") for address in seen)


# --- what is refused -------------------------------------------------------------------------------------


def test_what_a_machine_cannot_do_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.check("processes", [])
    with pytest.raises(UsageError, match=r"fault 'net@3:1' needs pods with a network of their own: process"):
        sandbox.check("processes", ["net@3:1"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    sandbox.check("auto", [])
    assert sandbox.sandboxes("auto", Path(), {}, 1).isolation.endswith("(this is not root)")
    with pytest.raises(UsageError, match=r"isolation: pods cannot have namespaces .* here: this is not root"):
        sandbox.check("namespaces", [])
    with pytest.raises(UsageError, match="fault 'slow@3:1' needs pods with a network of their own: this is"):
        sandbox.check("auto", ["slow@3:1"])
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "nsenter") else f"/bin/{tool}")
    with pytest.raises(UsageError, match="here: ip, nsenter is not installed"):
        sandbox.check("namespaces", [])


@namespaces
def test_a_slow_network_needs_tc(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else which(tool))
    with pytest.raises(UsageError, match="fault 'slow@3:1' needs the program tc, of Debian's package"):
        sandbox.check("auto", ["slow@3:1"])


@namespaces
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv to give a right up")
@pytest.mark.parametrize("right", ["sys_admin", "net_admin"])
def test_root_without_the_right_is_told_what_the_kernel_said(right: str) -> None:
    """As in a container of a cluster, where root may be nobody."""
    code = "from ridethrough.restart.sandbox import check; check('namespaces', [])"
    done = subprocess.run(
        ["setpriv", f"--bounding-set=-{right}", f"--inh-caps=-{right}", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
    )
    (last,) = done.stderr.splitlines()[-1:]
    assert "UsageError: isolation: pods cannot have namespaces of their own here: a trial of" in last
    assert "not permitted" in last


# --- nothing is left -------------------------------------------------------------------------------------

LONG = {"0": ["deaf", "child stray", "step 1", "sleep 120"], "1": ["step 1", "sleep 120"]}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@isolations
@pytest.mark.usefixtures("machine", "fakes")
def test_a_launch_leaves_nothing(tmp_path: Path, isolation: str) -> None:
    run = tmp_path / "run"
    config = PodConfig(isolation=isolation)  # type: ignore[arg-type]
    launch(
        "fake_rank", (str(run), '{"0": ["child stray"]}'), ranks=2, directory=run, timeout_s=60, pods=config
    )
    assert said(run, "launch_end")[0]["outcome"] == "finished"
    assert carriers(run) == []


@namespaces
@pytest.mark.usefixtures("machine", "fakes")
@pytest.mark.parametrize("step", ["second pod's network", "bridge", "shared memory"])
def test_pods_that_cannot_all_be_made_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """An error in the middle of making them: whatever was made before it is taken down again."""
    fails = {"second pod's network": "port2", "bridge": "bridge", "shared memory": "/dev/shm"}[step]
    run = sandbox._Holder.run

    def fail(self: sandbox._Holder, *command: str) -> None:
        if fails in command:
            raise RunError(f"no {step} to be had")
        run(self, *command)

    monkeypatch.setattr(sandbox._Holder, "run", fail)
    directory = tmp_path / "run"
    with pytest.raises(RunError, match=f"no {step} to be had"):
        launch("fake_rank", (str(directory), "{}"), ranks=2, directory=directory, pods=PodConfig())
    assert said(directory, "launch_end")
    assert carriers(directory) == []


@pytest.mark.usefixtures("machine", "fakes")
@pytest.mark.parametrize(
    ("isolation", "number"),
    [
        pytest.param("namespaces", signal.SIGKILL, marks=namespaces),
        pytest.param("namespaces", signal.SIGINT, marks=namespaces),
        ("processes", signal.SIGKILL),
        ("processes", signal.SIGTERM),
    ],
)
def test_a_launcher_that_is_ended_leaves_nothing(
    tmp_path: Path, isolation: str, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = launcher(run, LONG, isolation=isolation, grace_s=5)
    wait_for(lambda: len(said(run, "step")) == 2, "both ranks to make a step", 60)
    assert len(carriers(run)) >= 5  # two agents, two ranks, a child
    process.send_signal(number)
    if number == signal.SIGINT:
        wait_for(lambda: said(run, "pod_stop"), "the launcher to hear it")
        process.send_signal(number)  # the impatient reader's second Ctrl-C
    _, errors = process.communicate(timeout=30)
    wait_for(lambda: not carriers(run), "the launch's processes to end", 10)
    if number == signal.SIGKILL:
        wait_for(lambda: not list((tmp_path / "scratch").iterdir()), "the guard to clear away")
        return
    assert said(run, "launch_end")[0]["outcome"] == "interrupted"
    assert ("KeyboardInterrupt" if number == signal.SIGINT else "the launcher got SIGTERM") in errors
    assert {event["reason"] for event in said(run, "pod_stop")} == {"end"}


@pytest.mark.usefixtures("machine", "fakes")
def test_two_launches_at_once_without_namespaces_keep_out_of_each_others_way(tmp_path: Path) -> None:
    """They share the machine's network and processes, and even the addresses of their pods."""
    hit, other = tmp_path / "hit", tmp_path / "other"
    scripts = {"0@0": ["step 1", "inject pod"], "1@0": ["step 1", "sleep 60"]}
    launchers = [
        launcher(hit, scripts, isolation="processes"),
        launcher(other, {"1": ["sleep 3"]}, isolation="processes"),
    ]
    errors = [process.communicate(timeout=60)[1] for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], errors
    assert [event["pod"] for event in said(hit, "pod_start")][:3] == [0, 1, 0]
    assert len(said(other, "pod_start")) == 2 and not said(other, "detected")
    assert not carriers(hit) and not carriers(other)


# --- without root ----------------------------------------------------------------------------------------

#: Another user, who may read and search all, as Python and this package may lie in somebody's home.
NOBODY = [
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]
PROGRAM = (
    "import sys; from ridethrough import cli, rungs; rungs.RUNGS['fake'] = 'fake_rung'; sys.exit(cli.main())"
)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv to be another user"
)
@pytest.mark.usefixtures("machine", "fakes")
def test_without_root_pods_are_processes_and_the_report_says_so(tmp_path: Path, scratch: Path) -> None:
    folder, text = tmp_path / "own", tmp_path / "text"
    folder.mkdir()
    text.mkdir()
    (text / "a.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    os.chown(folder, 65534, 65534)
    os.chown(scratch, 65534, 65534)
    flags = ["run", "fake", "--data", str(text), "--steps", "6", "--launcher", "torchrun", "--out"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*NOBODY, sys.executable, "-c", PROGRAM, *flags, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=folder)

    refused = run("no", "--fault", "net@3:1")
    assert refused.returncode == 2 and "needs pods with a network of their own: this is not" in refused.stderr
    done = run("a", "--fault", "pod@3:1", "--policy", "gang")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "a/report.json").read_text())
    why = "processes: pods share this machine's network, processes and /dev/shm (this is not root)"
    assert report["launcher"]["isolation"] == why
    assert why in " ".join(done.stdout.split())
    assert [fault["tier"] for fault in report["faults"]] == ["pods"]
    assert carriers(folder / "a") == []


def test_pods_that_are_processes_have_addresses_of_their_own(
    environment: dict[str, str], tmp_path: Path
) -> None:
    made = sandbox.sandboxes("processes", tmp_path, environment, SHM_MB)
    pods = [made.make(number) for number in range(3)]
    assert len({pod.address for pod in pods}) == 3
    for one in pods:
        with socket.create_server((one.address, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5).close()
        for fault in (one.cut, one.throttle, one.mend):
            with pytest.raises(RunError, match="has nothing to cut"):
                fault()
