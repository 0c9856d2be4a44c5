"""Builds and removes the network of a lab: namespaces that stand for hosts, joined by links of a given rate.

Inputs: how many hosts, and the rate of their links. Outputs: one network namespace per host, each with its own address
and /etc/hosts, all joined by a bridge. Nothing is added to the machine's own network: the bridge is in one more
namespace, so that two labs can use the same addresses and a lab is removed by removing its namespaces. It starts no
processes.

Every name contains the process that owns it (its id and the time it started), so what a killed lab left behind is found
by name alone, and a running lab is never changed. Linux only; needs root.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "moelab-"
_NAME = re.compile(rf"^{_PREFIX}(\d+)-(\d+)-[a-z0-9]+$")
_NETNS = Path("/run/netns")
_ETC_NETNS = Path("/etc/netns")
_RATE = re.compile(r"^(\d+(?:\.\d+)?)([kmg]?)bit$")
_KILL_SECONDS = 10.0


class LabError(ValueError):
    """A user's mistake, or something that the machine does not have: one line with the remedy."""


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """One namespace: its network name, the host name seen inside, its address."""

    namespace: str
    host_name: str
    address: str

    def enter(self) -> list[str]:
        """Return the words before a command that is to run on this host, and to end when the lab ends."""
        named = 'hostname "$0" && exec "$@"'
        return [
            "ip", "netns", "exec", self.namespace, "unshare", "--uts", "setpriv", "--pdeathsig", "KILL",
            "sh", "-c", named, self.host_name,
        ]  # fmt: skip


def check_shape(hosts: int, devices_per_host: int, rate: str | None) -> None:
    """Refuse counts and a rate that no lab has; the rate is that of a link, each way, as tc writes it ("200mbit")."""
    for name, count in (("hosts", hosts), ("devices_per_host", devices_per_host)):
        if not 1 <= count <= 200:
            raise LabError(f"{name} ({count}) must lie in 1..200")
    if rate is not None and (not _RATE.match(rate) or bits_per_second(rate) < 1000):
        raise LabError(f"rate ({rate!r}) must be a number and kbit, mbit or gbit, as in 200mbit")


def bits_per_second(rate: str) -> float:
    """Return what a rate such as "200mbit" means."""
    found = _RATE.match(rate)
    assert found is not None, rate
    return float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def find_missing(shaped: bool) -> str | None:
    """Return what this machine lacks for a lab, or None. Tries each piece in a namespace of its own."""
    if not sys.platform.startswith("linux"):
        return f"a lab needs Linux's network namespaces (this is {sys.platform})"
    if os.geteuid() != 0:
        return f"a lab needs root (this is user {os.geteuid()}): run it with sudo"
    tools = [tool for tool in ("ip", "setpriv", *(["tc"] if shaped else [])) if shutil.which(tool) is None]
    if tools:
        return f"a lab needs the commands {tools} (Debian's packages iproute2 and util-linux): install them"
    name = f"{_own_prefix()}probe"
    trials = [
        (["ip", "netns", "add", name], "a network namespace (in a container: CAP_SYS_ADMIN and CAP_NET_ADMIN)"),
        (["ip", "-n", name, "link", "add", "b0", "type", "bridge"], "a bridge (kernel module bridge)"),
        (["ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"], "a veth pair (module veth)"),
    ]
    if shaped:
        pieces, bucket = _shaping(name, "v0", "1mbit")
        trials += [(pieces, "a limit on gso_max_size (iproute2 of 2018)"), (bucket, "tbf (kernel module sch_tbf)")]
    try:
        for command, piece in trials:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return f"this machine cannot make {piece}: {' '.join(done.stderr.split())}"
    finally:
        _remove_namespace(name)
    return None


def build_network(count: int, rate: str | None) -> list[LabHost]:
    """Make the namespaces of `count` hosts and their links; `remove_network` undoes it, also what is half made.

    Raises:
      LabError: a step failed; says which.
    """
    switch = f"{_own_prefix()}switch"
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "core", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "core", "up")
    hosts = [_add_host(switch, host, rate) for host in range(count)]
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.host_name}\n" for host in hosts)
    for host in hosts:
        (_ETC_NETNS / host.namespace / "hosts").write_text(names)
    return hosts


def remove_network() -> None:
    """Remove every namespace of this process' lab, and end every process in them."""
    _remove([name for name in lab_names() if name.startswith(_own_prefix())])


def remove_leftovers() -> list[str]:
    """Remove what labs left behind whose process is gone; return the names."""
    names = []
    for name in lab_names():
        found = _NAME.match(name)
        if start_ticks(int(found[1])) != int(found[2]):
            names.append(name)
    _remove(names)
    return names


def processes_in(namespace: str) -> list[int]:
    """Return the ids of the processes in a network namespace."""
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _own_prefix() -> str:
    return f"{_PREFIX}{os.getpid()}-{start_ticks(os.getpid())}-"


def lab_names() -> list[str]:
    """Return the names of all namespaces, and their folders in /etc, that labs have made on this machine."""
    found = set()
    for folder in (_NETNS, _ETC_NETNS):
        if folder.is_dir():
            found |= {path.name for path in folder.iterdir() if _NAME.match(path.name)}
    return sorted(found)


def _add_host(switch: str, host: int, rate: str | None) -> LabHost:
    """Make the namespace of a host and its link to the bridge."""
    port, address = f"h{host}", f"10.99.{host}.1"
    namespace = f"{_own_prefix()}{port}"
    (_ETC_NETNS / namespace).mkdir(parents=True)
    (_ETC_NETNS / namespace / "hosts").touch()  # `ip netns exec` puts it over /etc/hosts
    _run("ip", "netns", "add", namespace)
    _run("ip", "-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "core", "up")
    _run("ip", "-n", namespace, "address", "add", f"{address}/16", "dev", "eth0")
    _run("ip", "-n", namespace, "link", "set", "eth0", "up")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")
    for place, end in ((namespace, "eth0"), (switch, port)):
        for command in _shaping(place, end, rate) if rate is not None else ():
            _run(*command)
    return LabHost(namespace=namespace, host_name=f"host{host}", address=address)


def _shaping(namespace: str, device: str, rate: str) -> list[list[str]]:
    # A small bucket, so that the time of a message is proportional to its size. The kernel hands packets over in pieces
    # of up to 64 kB, and cuts one that is larger than the bucket into packets with a timer each. That took so much of
    # two cores that a ring of ppermutes came out 1.3 to 1.7 times slower than its wire; pieces stay below the bucket.
    burst = max(5_000, int(bits_per_second(rate) / 8 * 1e-3))  # 1 ms at the rate
    piece = min(65536, burst * 4 // 5)
    return [
        ["ip", "-n", namespace, "link", "set", device, "gso_max_size", f"{piece}"],
        ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", f"{burst}b"]
        + ["latency", "200ms"],
    ]


def _remove(names: Iterable[str]) -> None:
    names = list(names)
    deadline = time.monotonic() + _KILL_SECONDS
    while left := [pid for name in names if (_NETNS / name).exists() for pid in processes_in(name)]:
        if time.monotonic() > deadline:
            raise LabError(f"processes {left} in {names} do not end; see what they wait for in /proc/<id>/stack")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    for name in names:
        _remove_namespace(name)


def _remove_namespace(name: str) -> None:
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # another lab may clean at the same time
    shutil.rmtree(_ETC_NETNS / name, ignore_errors=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise LabError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
