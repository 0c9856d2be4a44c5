"""Builds and removes the network of a lab: namespaces that stand for hosts, joined by links of a given rate.

Inputs: a LabShape (how many hosts and devices, the rates). Outputs: one network namespace per host, or per device where
the links inside a host are shaped too, each with its own address and /etc/hosts. Nothing is added to the machine's own
network: the bridges are in one more namespace, so that two labs can use the same addresses and a lab is removed by
removing its namespaces. It starts no processes.

    without intra_rate                         with intra_rate
    host0   host1   host2     one namespace    host0-device0   host0-device1   host1-device0 ...
      |       |       |       each               |               |  intra_rate    |
      +--- bridge ----+  rate                    +--- node 0 ----+                +--- node 1 ...
                                                        |            rate                |
                                                        +----------- bridge -------------+

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
class LabShape:
    """What the lab looks like.

    Attributes:
      hosts: number of hosts.
      devices_per_host: devices of each host.
      rate: rate of the link between a host and the others, each way, as tc writes it ("200mbit"); None = unshaped.
      intra_rate: rate of the link between a device and the others of its host. One process cannot shape what it copies
        between its own devices, so with this every device is a process of its own in a namespace of its own.
      burst: bytes that a link lets through at once after a pause; None = 1 ms at the rate, at least 5 kB.
    """

    hosts: int
    devices_per_host: int = 1
    rate: str | None = None
    intra_rate: str | None = None
    burst: int | None = None

    def __post_init__(self):
        for name in ("hosts", "devices_per_host"):
            if not 1 <= getattr(self, name) <= 200:
                raise LabError(f"{name} ({getattr(self, name)}) must lie in 1..200")
        for name in ("rate", "intra_rate"):
            value = getattr(self, name)
            if value is not None and (not _RATE.match(value) or bits_per_second(value) < 1000):
                raise LabError(f"{name} ({value!r}) must be a number and kbit, mbit or gbit, as in 200mbit")
        if self.burst is not None and self.burst < 2000:
            raise LabError(f"burst ({self.burst}) must be at least 2000 bytes, more than one packet")


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """One namespace: its network name, the host name seen inside, its address, the host it belongs to."""

    namespace: str
    host_name: str
    address: str
    host: int


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
    tools = [tool for tool in ("ip", *(["tc"] if shaped else [])) if shutil.which(tool) is None]
    if tools:
        return f"a lab needs the commands {tools} (Debian's package iproute2): install them"
    name = f"{_own_prefix()}probe"
    trials = [
        (["ip", "netns", "add", name], "a network namespace (in a container: CAP_SYS_ADMIN and CAP_NET_ADMIN)"),
        (["ip", "-n", name, "link", "add", "b0", "type", "bridge"], "a bridge (kernel module bridge)"),
        (["ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"], "a veth pair (module veth)"),
    ]
    if shaped:
        pieces, bucket = _shaping(name, "v0", "1mbit", None)
        trials += [(pieces, "a limit on gso_max_size (iproute2 of 2018)"), (bucket, "tbf (kernel module sch_tbf)")]
    try:
        for command, piece in trials:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return f"this machine cannot make {piece}: {' '.join(done.stderr.split())}"
    finally:
        _remove_namespace(name)
    return None


def build_network(shape: LabShape) -> list[LabHost]:
    """Make the namespaces and links of a lab; `remove_network` undoes it, also what a failure left half made.

    Raises:
      LabError: a step failed; says which.
    """
    switch = f"{_own_prefix()}switch"
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "core", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "core", "up")
    hosts = []
    for host in range(shape.hosts):
        if shape.intra_rate is None:
            hosts.append(_add_host(switch, "core", host, None, shape.rate, shape.burst))
            continue
        node = f"n{host}"
        _run("ip", "-n", switch, "link", "add", node, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", node, "up")
        _run("ip", "-n", switch, "link", "add", f"u{host}", "type", "veth", "peer", "name", f"c{host}")
        for port, bridge in ((f"u{host}", node), (f"c{host}", "core")):
            _run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
            _shape(switch, port, shape.rate, shape.burst)
        for device in range(shape.devices_per_host):
            hosts.append(_add_host(switch, node, host, device, shape.intra_rate, shape.burst))
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


def _add_host(switch: str, bridge: str, host: int, device: int | None, rate: str | None, burst: int | None) -> LabHost:
    """Make the namespace of a host, or of one of its devices, and its link to a bridge."""
    port = f"h{host}" if device is None else f"h{host}d{device}"
    host_name = f"host{host}" if device is None else f"host{host}-device{device}"
    namespace, address = f"{_own_prefix()}{port}", f"10.99.{host}.{(device or 0) + 1}"
    (_ETC_NETNS / namespace).mkdir(parents=True)
    (_ETC_NETNS / namespace / "hosts").touch()  # `ip netns exec` puts it over /etc/hosts
    _run("ip", "netns", "add", namespace)
    _run("ip", "-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
    _run("ip", "-n", namespace, "address", "add", f"{address}/16", "dev", "eth0")
    _run("ip", "-n", namespace, "link", "set", "eth0", "up")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")
    _shape(namespace, "eth0", rate, burst)
    _shape(switch, port, rate, burst)
    return LabHost(namespace=namespace, host_name=host_name, address=address, host=host)


def _shape(namespace: str, device: str, rate: str | None, burst: int | None) -> None:
    if rate is not None:
        for command in _shaping(namespace, device, rate, burst):
            _run(*command)


def _shaping(namespace: str, device: str, rate: str, burst: int | None) -> list[list[str]]:
    # A small bucket, so that the time of a message is proportional to its size. The kernel hands packets over in pieces
    # of up to 64 kB, and cuts one that is larger than the bucket into packets with a timer each. That took so much of
    # two cores that a ring of ppermutes came out 1.3 to 1.7 times slower than its wire; pieces stay below the bucket.
    burst = burst or max(5_000, int(bits_per_second(rate) / 8 * 1e-3))
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
