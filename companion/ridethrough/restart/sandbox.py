"""What a pod has for itself: with root on Linux its own network, processes, hostname and /dev/shm.

As in Kubernetes, a process that only sleeps holds the namespaces of each pod, and containers enter them. One
more holds the network between the pods. When those processes end, by themselves or by a sweep of the launch
whose token they carry, the kernel takes down all that hangs on them: addresses, links, mounts, shared memory.
So nothing has a name on the machine that could be left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from ridethrough.errors import RunError, UsageError
from ridethrough.spawn import loopback

#: Rate of a network that the fault `slow` has hit.
SLOW_RATE = "20mbit"

_TOOLS = ("ip", "nsenter", "unshare", "mount", "sleep")
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc")
# Gives a pod its hostname; without the program, by a file that some containers may only read.
_SET_NAME = "hostname {name} 2>/dev/null || echo {name} > /proc/sys/kernel/hostname"

# All that a pod needs, once, in namespaces that are gone when it ends.
_PROBE = f"""
mount -t tmpfs tmpfs /dev/shm
mount --bind /etc/passwd /etc/hosts
ip link add probe0 type veth peer name probe1
ip link add bridge type bridge
{_SET_NAME.format(name="probe")}
unshare --pid --fork --mount-proc true
"""

_SUBNET = "10.244.7"
_FIRST_ADDRESS, _LAST_ADDRESS = 10, 250
_COMMAND_S = 20.0


class Sandbox(Protocol):
    """One pod's surroundings, from its creation to its end; containers come and go in it.

    Attributes:
        address: the pod's IP address.
        host: the name by which other pods find it.
        interface: the network interface that has the address.
    """

    address: str
    host: str
    interface: str

    def command(self, command: list[str]) -> list[str]:
        """The command that runs `command` as the first process of a container in here."""
        ...

    def first_process(self, pid: int) -> int | None:
        """Of a container started as process `pid`, the first process, by its number outside; None: gone."""
        ...

    def cut(self) -> None:
        """Take the pod's network away."""
        ...

    def throttle(self) -> None:
        """Make the pod's network slow: `SLOW_RATE` in both directions."""
        ...

    def mend(self) -> None:
        """Give the network back as it was."""
        ...

    def close(self) -> None:
        """End the pod's surroundings; its containers have ended."""
        ...


class Sandboxes(Protocol):
    """Makes the surroundings of pods.

    Attributes:
        isolation: how well they are kept apart, in words.
    """

    isolation: str

    def make(self, pod: int) -> Sandbox:
        """New surroundings for pod `pod`."""
        ...

    def close(self) -> None:
        """End what the sandboxes share."""
        ...


def sandboxes(wanted: str, scratch: Path, environment: Mapping[str, str], shm_mb: int) -> Sandboxes:
    """The best surroundings that this machine can give to pods.

    Args:
        wanted: `auto`, `namespaces` or `processes`.
        scratch: an empty folder for the hosts file, that somebody else removes.
        environment: the environment of helper processes; it carries the token of the launch.
        shm_mb: size of each pod's /dev/shm in MB, where it can have its own.

    Raises:
        UsageError: if namespaces are wanted and can't be had; says why.
    """
    if reason := _reason(wanted):
        return Processes(reason)
    return Namespaces(scratch, environment, shm_mb)


def check(wanted: str, network_faults: Sequence[str]) -> None:
    """Refuse what pods on this machine can't do.

    Raises:
        UsageError: if namespaces are wanted, or faults of the network, and they can't be had; says why.
    """
    reason = _reason(wanted)
    if reason and network_faults:
        raise UsageError(f"fault {network_faults[0]!r} needs pods with a network of their own: {reason}")
    if not reason and network_faults and shutil.which("tc") is None:
        raise UsageError(f"fault {network_faults[0]!r} needs the program tc, of Debian's package iproute2")


def _reason(wanted: str) -> str | None:
    """Why pods get no namespaces of their own; None if they do."""
    if wanted == "processes":
        return "processes alone were asked for"
    reason = why_not()
    if reason and wanted == "namespaces":
        raise UsageError(f"isolation: pods cannot have namespaces of their own here: {reason}")
    return reason


def why_not() -> str | None:
    """Why pods cannot have namespaces of their own on this machine; None if they can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is not installed"
    if os.geteuid() != 0:
        return "this is not root"
    try:
        _run(["unshare", *_NAMESPACES, "sh", "-ec", _PROBE], "a trial of what pods need")
    except RunError as error:
        return str(error)
    return None


def _run(command: list[str], what: str = "") -> None:
    """Run a short command; `what` is how an error calls it.

    Raises:
        RunError: with what it printed, if it fails or does not end.
    """
    what = what or f"`{' '.join(command)}`"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{what} did not end within {_COMMAND_S:g} s") from None
    if done.returncode:
        raise RunError(f"{what} failed: {(done.stderr or done.stdout).strip()}")


class _Holder:
    """A process that holds namespaces and does nothing else."""

    def __init__(self, environment: Mapping[str, str], *namespaces: str) -> None:
        command = ["unshare", *namespaces, "sleep", "infinity"]
        self._enter = ["nsenter", *namespaces]
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        deadline = time.monotonic() + _COMMAND_S
        while psutil.Process(self.pid).name() != "sleep":  # until then it has not left our namespaces
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                output = self._process.stdout.read() if self._process.stdout else ""
                raise RunError(f"`{' '.join(command)}` failed: {output.strip()}")
            time.sleep(0.002)

    def entering(self) -> list[str]:
        """The beginning of a command that runs in these namespaces."""
        return [*self._enter, f"--target={self.pid}", "--"]

    def run(self, *command: str) -> None:
        """Run a command in these namespaces.

        Raises:
            RunError: with what it printed, if it fails.
        """
        _run([*self.entering(), *command])

    def end(self) -> None:
        """End it, and with it whatever only it has held."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


class Namespaces:
    """Pods with network, mount, hostname, IPC and process namespaces of their own, on one bridge."""

    isolation = "namespaces: each pod has its own network, processes, hostname, IPC and /dev/shm"

    def __init__(self, scratch: Path, environment: Mapping[str, str], shm_mb: int) -> None:
        self._hosts = scratch / "hosts"
        self._environment, self._shm_mb = environment, shm_mb
        self._addresses: dict[int, str] = {}
        self._made = 0
        self._switch: _Holder | None = None

    def make(self, pod: int) -> NamespacePod:
        """New surroundings, with an address that no pod of this launch has had lately."""
        if self._switch is None:
            self._switch = _Holder(self._environment, "--net")
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge", "up")
        self._made += 1
        last = _FIRST_ADDRESS + (self._made - 1) % (_LAST_ADDRESS - _FIRST_ADDRESS)
        self._addresses[pod] = f"{_SUBNET}.{last}"
        self._write_hosts()
        holder = _Holder(self._environment, *_NAMESPACES)
        made = NamespacePod(pod, self._addresses[pod], holder, self._switch, f"port{self._made}")
        try:
            made.set_up(self._hosts, self._shm_mb)
        except BaseException:
            holder.end()
            raise
        return made

    def close(self) -> None:
        """Take the bridge away."""
        if self._switch:
            self._switch.end()

    def _write_hosts(self) -> None:
        """Stand in for the cluster's DNS. The same file, so that pods which have it mounted see it change."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address} {_host(pod)} pod-{pod}" for pod, address in self._addresses.items()]
        self._hosts.write_text("\n".join(lines) + "\n")


class NamespacePod:
    """The surroundings of one pod in namespaces."""

    interface = "eth0"

    def __init__(self, pod: int, address: str, holder: _Holder, switch: _Holder, port: str) -> None:
        self.address, self.host = address, _host(pod)
        self._pod, self._holder, self._switch, self._port = pod, holder, switch, port

    def set_up(self, hosts: Path, shm_mb: int) -> None:
        """Network, names, /dev/shm."""
        switch, pod = self._switch.run, self._holder.run
        switch("ip", "link", "add", self._port, "type", "veth",
               "peer", "name", self.interface, "netns", str(self._holder.pid))  # fmt: skip
        switch("ip", "link", "set", self._port, "master", "bridge", "up")
        pod("ip", "link", "set", "lo", "up")
        pod("ip", "address", "add", f"{self.address}/24", "dev", self.interface)
        pod("ip", "link", "set", self.interface, "up")
        pod("sh", "-c", _SET_NAME.format(name=f"pod-{self._pod}"))
        pod("mount", "--bind", str(hosts), "/etc/hosts")
        pod("mount", "-t", "tmpfs", "-o", f"size={shm_mb}m", "tmpfs", "/dev/shm")

    def command(self, command: list[str]) -> list[str]:
        """As process 1 of a process namespace; when the process that waits for it ends, all in it do."""
        alone = ["unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]
        return [*self._holder.entering(), *alone, f"--wd={Path.cwd()}", "--", *command]

    def first_process(self, pid: int) -> int | None:
        """The child that `unshare` has forked."""
        try:
            children = psutil.Process(pid).children()
        except psutil.Error:
            return None
        return children[0].pid if children else None

    def cut(self) -> None:
        """Pull the cable at the other end: the pod's sockets only see that nothing comes back."""
        self._switch.run("ip", "link", "set", self._port, "down")

    def throttle(self) -> None:
        """A token bucket in each direction."""
        bucket = ("root", "tbf", "rate", SLOW_RATE, "burst", "32kbit", "latency", "400ms")
        self._switch.run("tc", "qdisc", "replace", "dev", self._port, *bucket)
        self._holder.run("tc", "qdisc", "replace", "dev", self.interface, *bucket)

    def mend(self) -> None:
        """Plug it in again, without buckets."""
        self._switch.run("ip", "link", "set", self._port, "up")
        for holder, interface in ((self._switch, self._port), (self._holder, self.interface)):
            holder.run("sh", "-c", f"tc qdisc del dev {interface} root 2>/dev/null || true")

    def close(self) -> None:
        """End the process that holds it all."""
        self._holder.end()


class Processes:
    """Pods that are processes of this machine and share all it has; `isolation` says why."""

    def __init__(self, reason: str) -> None:
        self.isolation = f"processes: pods share this machine's network, processes and /dev/shm ({reason})"

    def make(self, pod: int) -> ProcessPod:
        """Nothing to make."""
        return ProcessPod(pod)

    def close(self) -> None:
        """Nothing to end."""


class ProcessPod:
    """The surroundings of a pod that is only processes."""

    def __init__(self, pod: int) -> None:
        self.address = self.host = f"127.0.0.{_FIRST_ADDRESS + pod}"  # all of 127/8 is this machine
        self.interface = loopback()

    def command(self, command: list[str]) -> list[str]:
        """As it is."""
        return command

    def first_process(self, pid: int) -> int | None:
        """The process itself."""
        return pid if psutil.pid_exists(pid) else None

    def cut(self) -> None:
        """Not to be called: a fault of the network is refused before the launch."""
        raise RunError("a pod without a network of its own has nothing to cut")

    def throttle(self) -> None:
        """As `cut`."""
        self.cut()

    def mend(self) -> None:
        """As `cut`."""
        self.cut()

    def close(self) -> None:
        """Nothing to end."""


def _host(pod: int) -> str:
    """The name that a headless Service gives to a pod of a Job, short."""
    return f"pod-{pod}.job"
