"""A job of supervisors on this machine, whose processes only count; one of them is this file, run as a program.

A process writes its place to WORKDIR/places, counts steps, and ends: with the code that WORKDIR/exit holds, with 75
after SIGTERM, with 1 before its first step where WORKDIR/broken exists; where that names another host, with 4.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

SECRET = "of all jobs of these tests"


def port_pairs(count: int) -> list[int]:
    """Return ports that nothing listens on, neither on the next one: the latter is of process 0."""
    with contextlib.ExitStack() as held:
        found = []
        while len(found) < count:
            port = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                held.enter_context(socket.create_server(("127.0.0.1", port + 1)))
                found.append(port)
        return found


class Job:
    """Supervisors of `count` hosts on ports of this machine; `close` kills what runs."""

    def __init__(self, folder: pathlib.Path, count: int, *flags: str, addresses=None, command=None):
        self.workdir, self.logs, self.flags = folder / "run", folder / "logs", flags
        self.places = self.workdir / "places"
        self.logs.mkdir()
        addresses = addresses or [f"127.0.0.1:{port}" for port in port_pairs(count)]
        self.hosts = ",".join(addresses)
        self.command = command or [sys.executable, __file__, f"--workdir={self.workdir}"]
        self.supervisors: dict[int, subprocess.Popen] = {}

    def start(self, *indices: int, before=(), code: str = "", **environment: str) -> None:
        """Start supervisors; `code`: Python that runs first; `before`: of each host, what its command begins with."""
        program = f"{code}\nimport runpy; runpy.run_module('moe_jax.supervise', run_name='__main__')"
        for index in indices:
            own = [f"--hosts={self.hosts}", f"--host_index={index}", *self.flags, "--", *self.command]
            variables = {**os.environ, "MOE_JAX_JOB_TOKEN": SECRET, **environment}
            words = before[index] if before else ()
            with open(self.logs / str(index), "ab") as log:
                self.supervisors[index] = subprocess.Popen(
                    [*words, sys.executable, "-c", program, *own], env=variables, stdout=log, stderr=log
                )

    def log(self, index: int) -> str:
        return (self.logs / str(index)).read_text()

    def placed(self) -> dict[int, dict[int, dict]]:
        """Return {epoch: {process: what it wrote}}."""
        found: dict[int, dict[int, dict]] = {}
        for path in self.places.glob("*.json") if self.places.exists() else ():
            epoch, process = map(int, path.stem.split("-"))
            found.setdefault(epoch, {})[process] = json.loads(path.read_text())
        return found

    def epoch_of(self, size: int, after: int = 0, seconds: float = 30) -> int:
        """Wait until all of `size` processes of a later epoch than `after` count; return that epoch."""

        def newest() -> int | None:
            epoch, there = max(self.placed().items(), default=(0, {}))
            done = len(there) == size and all(place["count"] == size for place in there.values())
            return epoch if epoch > after and done and self.steps(epoch) >= size else None

        return self.wait(newest, seconds)

    def steps(self, epoch: int) -> int:
        """Return how many steps of an epoch were written down."""
        return len(list(self.places.glob(f"{epoch}-*.step")))

    def hosts_of(self, epoch: int) -> list[int]:
        """Return the hosts of an epoch in the order of their processes."""
        return [place["host"] for _, place in sorted(self.placed()[epoch].items())]

    def wait(self, look, seconds: float = 30):
        """Return what `look` returns once that is true."""
        deadline = time.monotonic() + seconds
        while not (found := look()):
            logs = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.logs.iterdir()))
            assert time.monotonic() < deadline, logs
            time.sleep(0.05)
        return found

    def end(self, index: int, seconds: float = 30) -> int:
        """Wait for a supervisor's end and return its exit code."""
        return (
            self.wait(lambda: self.supervisors[index].poll() is not None, seconds)
            and self.supervisors[index].returncode
        )

    def kill(self, index: int) -> None:
        self.supervisors[index].kill()
        self.supervisors[index].wait()

    def tell(self, name: str, text: str = "") -> None:
        """Write a file that the processes look at."""
        (self.workdir / f"{name}.part").write_text(text)
        (self.workdir / f"{name}.part").rename(self.workdir / name)

    def close(self) -> None:
        for process in self.supervisors.values():
            process.kill()
            process.wait()


def count() -> None:
    """Be a process of such a job."""
    from moe_jax.recovery.standby import await_place, report_step

    workdir = pathlib.Path(sys.argv[1].partition("=")[2])
    flags = dict(flag.removeprefix("--").split("=") for flag in await_place())
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    places = workdir / "places"
    places.mkdir(exist_ok=True, parents=True)
    name = f"{os.environ['MOE_JAX_EPOCH']}-{flags['process_id']}"
    supervisor = pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    host = next(word.partition("=")[2] for word in supervisor if word.startswith("--host_index="))
    place = {"host": int(host), "count": int(flags["num_processes"]), "pid": os.getpid()}
    place |= {"coordinator": flags["coordinator"], "secret": os.environ["MOE_JAX_JOB_TOKEN"]}
    (places / f"{name}.part").write_text(json.dumps(place))
    (places / f"{name}.part").rename(places / f"{name}.json")
    if (workdir / "broken").exists():  # names who is, or nobody: all are
        sys.exit(1 if (workdir / "broken").read_text() in ("", host) else 4)
    for step in range(1, 10_000):
        time.sleep(0.05)
        report_step(step)
        (places / f"{name}.step").touch()
        if (workdir / "exit").exists():
            sys.exit(int((workdir / "exit").read_text()))
        if asked:
            sys.exit(int(flags["preempt_exit_code"]))


if __name__ == "__main__":
    count()
