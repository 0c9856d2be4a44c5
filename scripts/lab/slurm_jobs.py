"""Jobs of scripts/launch/train.sbatch on the nodes of slurm.sh: submitted, watched by their log, their nodes lost.

Inputs: the arguments of moe_jax.train. Outputs: lines of the job's log, with the time each was seen, and its exit code.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.05


class NoSlurmError(Exception):
    """This machine cannot have a Slurm of its own."""


class Lab:
    """The nodes n1, n2, ... of a Slurm of its own, up for the length of a `with` block; what is lost stays so."""

    def __init__(self, nodes: int = 3):
        self.names = [f"n{at}" for at in range(1, nodes + 1)]
        self.lost: set[str] = set()

    def __enter__(self) -> Lab:
        said = self._lab("up", str(len(self.names)))
        os.environ["SLURM_CONF"] = re.search(r"SLURM_CONF=(\S+)", said)[1]
        return self

    def __exit__(self, *_error) -> None:
        self._lab("down")

    def _lab(self, *words: str) -> str:
        # its daemons keep what they inherit, so nothing is read from a pipe that would never end
        path = pathlib.Path("/var/tmp") / f"moe_jax_slurm_said.{os.getpid()}"
        with open(path, "w+") as said:
            code = subprocess.call(["bash", str(ROOT / "scripts/lab/slurm.sh"), *words], stdout=said, stderr=said)
            said.seek(0)
            text = said.read()
        path.unlink()
        if code:
            raise (NoSlurmError if code == 2 else RuntimeError)(f"slurm.sh {' '.join(words)} ended with {code}: {text}")
        return text

    def lose(self, node: str) -> None:
        """Take a node's power away."""
        self._lab("lose", node)
        self.lost.add(node)

    def restore(self) -> None:
        """Start all nodes that were lost."""
        for node in sorted(self.lost):
            self._lab("back", node)
        self.lost.clear()

    def enter(self, node: str, *command: str, **options) -> subprocess.Popen:
        """Start a command on a node; options: of subprocess.Popen."""
        return subprocess.Popen(["bash", str(ROOT / "scripts/lab/slurm.sh"), "enter", node, *command], **options)


class Job:
    """A job of train.sbatch; as a context manager it is cancelled at the end."""

    def __init__(self, folder: pathlib.Path, arguments: Sequence[str], *, nodes: int, **environment: str):
        """Submit it.

        Args:
          folder: for the log, on a file system that all nodes share; arguments: of moe_jax.train.
          nodes: of the allocation; environment: such as WANT="2".
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._read, self.lines = folder / "log", 0, []
        bin_folder = os.path.dirname(sys.executable)
        environment = {
            **os.environ, "VIRTUAL_ENV": os.path.dirname(bin_folder), "JAX_PLATFORMS": "cpu",
            "PATH": f"{bin_folder}:{os.environ['PATH']}", **environment,
        }  # fmt: skip
        options = [f"--nodes={nodes}", "--gres=none", f"--output={self._log}", "--parsable"]
        command = ["sbatch", *options, "scripts/launch/train.sbatch", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        self.number = done.stdout.strip()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_error) -> None:
        subprocess.run(["scancel", self.number], check=False)
        while not self.has_ended():
            time.sleep(0.2)

    def read(self) -> list[tuple[float, str]]:
        """Return all whole lines of the log so far, each with the time at which it was first seen."""
        if self._log.exists():
            with open(self._log, "rb") as log:
                log.seek(self._read)
                *whole, rest = log.read().split(b"\n")
                self._read = log.tell() - len(rest)
            self.lines += [(time.time(), line.decode(errors="replace")) for line in whole]
        return self.lines

    def wait(self, pattern: str, *, after: int = 0, seconds: float = 240.0) -> int:
        """Return the index of the first line, from `after` on, that has a pattern; a TimeoutError with the log."""
        for poll in range(int(seconds / POLL_SECONDS)):
            ended = poll % 20 == 19 and self.has_ended()
            for at, (_, line) in enumerate(self.read()[after:], after):
                if re.search(pattern, line):
                    return at
            if ended:
                break
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"no line with {pattern!r}:\n{self.text()}")

    def text(self) -> str:
        """Return the log."""
        return "\n".join(line for _, line in self.read())

    def has_ended(self) -> bool:
        """Say whether it neither waits nor runs, now and a second later: a job that returns to the queue does not."""
        for pause in (0, 1):
            time.sleep(pause)
            if self.shown("JobState") in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return False
        return True

    def end(self, seconds: float = 300.0) -> int:
        """Wait for the job's end and return its exit code."""
        end = time.time() + seconds
        while not self.has_ended():
            if time.time() > end:
                raise TimeoutError(f"the job goes on:\n{self.text()}")
            time.sleep(0.2)
        return int(self.shown("ExitCode").partition(":")[0])

    def hurry(self) -> None:
        """Let a job that went back into the queue start now, for which Slurm takes two minutes."""
        time.sleep(2)  # one that starts in the second in which it ended has a credential that was revoked
        subprocess.run(["scontrol", "update", f"JobId={self.number}", "StartTime=now"], check=True)

    def shown(self, field: str) -> str:
        """Return a field of what Slurm shows of the job."""
        done = subprocess.run(["scontrol", "show", "job", self.number], stdout=subprocess.PIPE, text=True, check=True)
        return re.search(rf"\b{field}=(\S+)", done.stdout)[1]
