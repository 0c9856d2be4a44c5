"""The lab's network: its shape and names anywhere, its links where this machine lets us make them."""

import os
import subprocess
import sys
import time

import network
import pytest
from network import LabError, LabShape, bits_per_second, build_network, default_burst, find_missing, start_ticks
from processes import host_command, host_environment, share_cores


@pytest.fixture(scope="module")
def lab_machine() -> None:
    """Skip where no lab can be built; the reason says what is missing."""
    if missing := find_missing(shaped=True):
        pytest.skip(missing)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hosts": 0}, r"hosts \(0\) must lie in 1..200"),
        ({"hosts": 2, "devices_per_host": 201}, r"devices_per_host \(201\) must lie in 1..200"),
        ({"hosts": 2, "rate": "200mbps"}, r"rate \('200mbps'\) must be a number and kbit, mbit or gbit"),
        ({"hosts": 2, "intra_rate": "0mbit"}, r"intra_rate \('0mbit'\)"),
        ({"hosts": 2, "burst": 100}, r"burst \(100\) must be at least 2000 bytes"),
    ],
)
def test_lab_shape_refuses(fields, words):
    with pytest.raises(LabError, match=words):
        LabShape(**fields)


def test_bits_per_second_of_each_unit():
    assert [bits_per_second(rate) for rate in ("8000bit", "8kbit", "1.5mbit", "2gbit")] == [8e3, 8e3, 1.5e6, 2e9]


def test_default_burst_is_a_millisecond():
    assert [default_burst(rate) for rate in ("1mbit", "40mbit", "200mbit", "8gbit")] == [5000, 5000, 25_000, 10**6]


def test_share_cores_gives_whole_cores_as_far_as_they_go():
    assert share_cores(2, [0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert share_cores(3, [0, 1, 2, 3]) == [[0], [1], [2, 3]]
    assert share_cores(3, [4, 5]) == [[4], [5], [4]]


def lab_hosts(count: int) -> list[network.LabHost]:
    return [
        network.LabHost(namespace=f"n{i}", host_name=f"host{i}", address=f"10.99.{i}.1", host=i) for i in range(count)
    ]


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_start_ticks_tells_a_process_from_its_successors():
    child = subprocess.Popen(["sleep", "10"])
    assert start_ticks(child.pid) is not None and start_ticks(child.pid) == start_ticks(child.pid)
    child.kill()
    time.sleep(0.1)
    assert start_ticks(child.pid) is None  # dead, though nobody has waited for it
    child.wait()


def test_find_missing_asks_for_root(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert find_missing(shaped=False) == "a lab needs root (this is user 1000): run it with sudo"


def test_find_missing_names_the_commands(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda tool: None)
    assert find_missing(shaped=False) == "a lab needs the commands ['ip'] (Debian's package iproute2): install them"
    assert "['ip', 'tc']" in (find_missing(shaped=True) or "")


@pytest.mark.usefixtures("lab_machine")
def test_find_missing_names_the_kernel_module(monkeypatch):
    monkeypatch.setattr(
        network, "_shaping", lambda *_: [["true"], ["tc", "qdisc", "add", "dev", "lo", "root", "nosuch"]]
    )
    assert "this machine cannot make tbf (kernel module sch_tbf): " in (find_missing(shaped=True) or "")
    assert not own_names()


# Real networks.

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


def test_a_link_has_its_rate(build):
    hosts = build(LabShape(hosts=2, rate="20mbit"))
    assert [host.host_name for host in hosts] == ["host0", "host1"]
    # 300 kB at 20 Mbit/s are 120 ms; the bucket lets 5 kB of them, 2 ms, pass at once. Above: a busy machine.
    assert 0.110 < seconds_for_300_kb(hosts[0], hosts[1]) < 0.5


def test_links_inside_a_host_have_their_own_rate(build):
    hosts = build(LabShape(hosts=2, devices_per_host=2, rate="8mbit", intra_rate="200mbit"))
    assert [(host.host_name, host.host) for host in hosts] == [
        ("host0-device0", 0),
        ("host0-device1", 0),
        ("host1-device0", 1),
        ("host1-device1", 1),
    ]
    inside, across = seconds_for_300_kb(hosts[0], hosts[1]), seconds_for_300_kb(hosts[1], hosts[2])
    assert across > 0.28 and inside < across / 3  # 300 ms across; 12 ms inside, and a busy machine


def test_remove_network_ends_what_runs_there(build):
    hosts = build(LabShape(hosts=1))
    process = subprocess.Popen(["ip", "netns", "exec", hosts[0].namespace, "sh", "-c", "setsid sleep 100 & sleep 100"])
    deadline = time.monotonic() + 5
    while len(network.processes_in(hosts[0].namespace)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = network.processes_in(hosts[0].namespace)
    assert len(pids) == 3  # the shell and two sleeps, one in a session of its own
    network.remove_network()
    process.wait(5)
    assert all(start_ticks(pid) is None for pid in pids) and not own_names()


def test_remove_leftovers_spares_labs_that_still_run(build):
    hosts = build(LabShape(hosts=1))
    gone = f"moelab-{os.getpid()}-1-h0"  # this process' id, but of an earlier process that had it
    subprocess.run(["ip", "netns", "add", gone], check=True)
    assert gone in network.remove_leftovers()
    assert hosts[0].namespace in network.lab_names() and gone not in network.lab_names()


def test_build_network_says_which_step_failed(build):
    build(LabShape(hosts=1))
    with pytest.raises(LabError, match=r"`ip netns add moelab-.*-switch` failed: .*File exists"):
        build(LabShape(hosts=1))
