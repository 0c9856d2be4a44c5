"""The lab's network: its shape and names anywhere, its links where this machine lets us make them."""

import os
import subprocess
import sys

import network
import pytest
from network import LabShape, build_network, find_missing
from processes import host_command, host_environment


def lab_hosts(count: int) -> list[network.LabHost]:
    names = [{"namespace": f"n{i}", "host_name": f"host{i}", "address": f"10.99.{i}.1"} for i in range(count)]
    return [network.LabHost(**own, host=i) for i, own in enumerate(names)]


def test_host_command_gives_flags_to_programs_of_moe_jax_only():
    ours = host_command(["python", "-m", "moe_jax.train", "--workdir=a"], lab_hosts(3), 2, 4)
    place = ["--coordinator=10.99.0.1:8476", "--num_processes=3", "--process_id=2", "--host_devices=4"]
    assert ours == ["python", "-m", "moe_jax.train", "--workdir=a", *place]
    for other in (["python", "bench.py", "--m"], ["python", "-m", "moe_jax_tools"], ["-m"]):
        assert host_command(other, lab_hosts(3), 2, 4) == other


def test_host_environment_says_who_the_process_is():
    given = {"HOME": "/h", "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"}
    environment = host_environment(given, lab_hosts(3), 1, 4)
    assert environment["JAX_COORDINATOR_ADDRESS"] == "10.99.0.1:8476"
    assert (environment["JAX_NUM_PROCESSES"], environment["JAX_PROCESS_ID"]) == ("3", "1")
    assert environment["JAX_NUM_CPU_DEVICES"] == "4" and environment["HOME"] == "/h"
    assert environment["XLA_FLAGS"].split() == ["--xla_cpu_enable_fast_math=false"]  # the two counts would clash


def test_find_missing_asks_for_root(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert find_missing(shaped=False) == "a lab needs root (this is user 1000): run it with sudo"


_SERVE = """
import socket
with socket.create_server(("", 5000)) as listener:
    print("up", flush=True)
    while True:
        with listener.accept()[0] as connection:
            left = 300_000
            while left: left -= len(connection.recv(min(left, 65536)))
            connection.sendall(b"k")
"""
_SEND = """
import socket, sys, time
times = []
for _ in range(3):
    with socket.create_connection((sys.argv[1], 5000)) as connection:
        start = time.perf_counter()
        connection.sendall(bytes(300_000))
        connection.recv(1)
        times.append(time.perf_counter() - start)
print(min(times))
"""


def own_names() -> list[str]:
    return [name for name in network.lab_names() if f"-{os.getpid()}-" in name]


def seconds_for_300_kb(source: network.LabHost, target: network.LabHost) -> float:
    """Return the best time of three to send 300 kB from one host to another, by name."""
    inside = ["ip", "netns", "exec"]
    server = subprocess.Popen([*inside, target.namespace, sys.executable, "-c", _SERVE], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == b"up\n"
    command = [*inside, source.namespace, sys.executable, "-c", _SEND, target.host_name]
    try:
        return float(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.fixture
def build(lab_machine):
    """Return build_network, undone after the test."""
    yield build_network
    network.remove_network()
    assert not own_names()


def test_links_inside_a_host_have_their_own_rate(build):
    hosts = build(LabShape(hosts=2, devices_per_host=2, rate="8mbit", intra_rate="200mbit"))
    names = [(f"host{host}-device{device}", host) for host in (0, 1) for device in (0, 1)]
    assert [(host.host_name, host.host) for host in hosts] == names
    inside, across = seconds_for_300_kb(hosts[0], hosts[1]), seconds_for_300_kb(hosts[1], hosts[2])
    assert across > 0.28 and inside < across / 3  # 300 ms across; 12 ms inside, and a busy machine
