"""Strangers at the rendezvous port of jobs of two processes: does the job start, and how much later?

    python scripts/checks/rendezvous_strangers.py --starts=20

For each kind of stranger, so many jobs of two real processes are started through `start_hosts` on the loopback
interface. Process 1 connects after the stranger has connected to process 0's port and sent its bytes; some strangers
continue meanwhile. A start's time runs from then until both processes have joined, jax.distributed included. Every
start must come within the median of undisturbed ones (a connection that closes at once) plus one second, and name the
stranger's address once if it was dropped. Prints a table, then one JSON line; exit code 1 if any start failed. Only
loopback is used.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from moe_jax.training.rendezvous import seal, versions

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_SECONDS = 1.0
DROPPED = "from 127.0.0.1 was dropped"


def say_nothing(connection: socket.socket) -> None:
    """Hold the connection."""


def say_garbage(connection: socket.socket) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")


def say_a_huge_line(connection: socket.socket) -> None:
    connection.sendall(b"a" * (4 << 20))


def say_slow_bytes(connection: socket.socket) -> None:
    def drip() -> None:
        try:
            for _ in range(1000):
                connection.sendall(b"a")
                time.sleep(0.05)
        except OSError:
            pass

    threading.Thread(target=drip, daemon=True).start()


def say_hello(connection: socket.socket, count: int) -> None:
    """Send a correct hello, sealed with a wrong token."""
    content = {"index": 1, "count": count, "name": "a", "versions": versions(), "host_id": "", "challenge": "c"}
    challenge = json.loads(connection.makefile("rb").readline())["challenge"]
    connection.sendall(json.dumps(seal(b"guessed", "hello", challenge, content)).encode() + b"\n")


KINDS = {
    "none": None,
    "nothing": say_nothing,
    "garbage": say_garbage,
    "huge line": say_a_huge_line,
    "wrong token": lambda connection: say_hello(connection, 2),
    "another count": lambda connection: say_hello(connection, 3),
    "slow bytes": say_slow_bytes,
}


def work(arguments: argparse.Namespace) -> None:
    """Run one process of a job: join, process 1 after a line on stdin, and print the time."""
    import jax

    from moe_jax.training.hosts import HostsConfig, start_hosts

    jax.config.update("jax_platforms", "cpu")
    print("ready", flush=True)
    if arguments.index == 1:
        sys.stdin.readline()
    config = HostsConfig(
        coordinator=f"127.0.0.1:{arguments.port}", num_processes=2, process_id=arguments.index, start_timeout_seconds=60
    )
    with start_hosts(config):
        print(time.time(), flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start(say, folder: Path) -> tuple[float, int]:
    """Start one job; return (seconds of the start, lines that name the stranger)."""
    port, processes = free_port(), []
    for index in range(2):
        command = [sys.executable, __file__, "--work", f"--port={port}", f"--index={index}"]
        with open(folder / f"log{index}", "w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=dict(os.environ)
            )
        processes.append(process)
    connection = None
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while connection is None:  # without a stranger too, so that all starts are measured alike
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        if say is None:
            connection.close()
        else:
            try:
                say(connection)
            except OSError:  # cut off
                pass
        time.sleep(0.2)
        connecting = time.time()
        first, second = processes
        second.stdin.write("go\n")
        second.stdin.flush()
        joined = [float(process.stdout.readline()) for process in (first, second)]
        codes = [process.wait(60) for process in processes]
        assert codes == [0, 0], codes
        return max(joined) - connecting, (folder / "log0").read_text().count(DROPPED)
    finally:
        if connection is not None:
            connection.close()
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=20, help="jobs for each kind of stranger (20)")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS)[1:], choices=list(KINDS)[1:], help="strangers (all)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    normal, answer = 0.0, {}
    print(f"{'stranger':16}{'in time':>10}{'median s':>10}{'longest s':>11}{'named':>14}")
    for name, say in {"none": None, **{name: KINDS[name] for name in arguments.kinds}}.items():
        seconds, named = [], []
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(arguments.starts):
                try:
                    took, lines = start(say, Path(folder))
                except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
                    logs = " / ".join((Path(folder) / f"log{index}").read_text()[-2000:] for index in range(2))
                    print(f"{name}: no start ({error!r}): {logs}")
                    took, lines = float("inf"), 0
                seconds.append(took)
                named.append(lines)
        normal = normal or statistics.median(seconds)
        in_time = sum(took <= normal + ALLOWED_SECONDS for took in seconds)
        shown = f"{min(named)} to {max(named)} lines"
        median, longest = statistics.median(seconds), max(seconds)
        median, longest = statistics.median(seconds), max(seconds)
        print(f"{name:16}{in_time:>4} of {len(seconds):<3}{median:>9.2f}{longest:>11.2f}{shown:>14}", flush=True)
        answer[name] = {"in_time": in_time, "median": round(median, 3), "longest": round(longest, 3)}
    print(json.dumps({"starts": arguments.starts, "normal_seconds": round(normal, 3), **answer}))
    sys.exit(any(kind["in_time"] < arguments.starts for kind in answer.values()))


if __name__ == "__main__":
    main()
