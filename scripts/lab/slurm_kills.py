"""Kill nodes and processes of a Slurm job at drawn moments, and time how it comes back by itself.

    sudo python scripts/lab/slurm_kills.py --kills=20 --seed=1 --out=docs/bench/slurm_kills.json \
        --gin_file=configs/run/demo.gin --gin_bindings='ModelConfig.layers = 2'

Two of three nodes train, the third is a spare. A kill takes a node's power (its slurmd goes too) or ends a process by
signal 9: while steps are made, a checkpoint is written, or the programs of the start before are compiled. The seed
draws victims, moments and pauses. The node of the batch script is spared: its loss returns the job to the queue, for
which Slurm takes two minutes. A lost node boots again after the next step. Nobody else helps.

Prints a line for each kill with the seconds of every phase, then medians, and compares all losses, to the bit, with
those of a job that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import tempfile
import time

from slurm_jobs import Job, Lab

from moe_jax.observe.metrics_file import read_metrics
from moe_jax.storage.run_folder import environment_record

KINDS = ("node of process 0", "node of process 1", "process 0", "process 1")
MOMENTS = ("steps", "save", "compilation")
PHASES = ("noticed", "end of srun", "probe", "start", "restore", "compilation and step")
# The line at which a phase has ended; the last one ends with a step in metrics.jsonl.
MARKS = (
    r"moe_jax: process \d|moe_jax code|srun: error|attempt \d+ ended",
    r"attempt \d+ ended", r"attempt \d+ on", r"devices a node", r"resuming at step \d+|step 0 of",
)  # fmt: skip


def draw(number: int, seed: int) -> list[tuple[str, str, float]]:
    """Return (kind, moment, pause in seconds) of each kill; each kind is as frequent as the others, within one."""
    generator = random.Random(seed)
    kinds = (KINDS * (number // len(KINDS) + 1))[:number]
    return [
        (kind, generator.choices(MOMENTS, (3, 1, 1))[0], generator.uniform(0.5, 8.0))
        for kind in generator.sample(kinds, number)
    ]


class Killed:
    """A job that is killed again and again."""

    def __init__(self, lab: Lab, job: Job, workdir: pathlib.Path):
        self.lab, self.job, self.workdir, self.attempt, self.furthest = lab, job, workdir, 0, 0

    def last_step(self) -> int:
        """Return the last step of metrics.jsonl, 0 without one."""
        path = self.workdir / "metrics.jsonl"
        lines = path.read_bytes().splitlines()[-1:] if path.exists() else []
        found = re.match(rb'{"step": (\d+)', lines[0]) if lines else None
        return int(found[1]) if found else 0

    def nodes(self) -> list[str]:
        """Return the nodes of the current attempt, that of process 0 first."""
        at = self.job.wait(rf"attempt {self.attempt} on")
        return self.job.lines[at][1].partition("nodes: ")[2].split()

    def await_step(self, after: int, since: float = 0.0, seconds: float = 300.0) -> float:
        """Wait until a step above `after` is recorded, later than `since`; return when."""
        end, path = time.time() + seconds, self.workdir / "metrics.jsonl"
        while self.last_step() <= after or path.stat().st_mtime < since:
            if time.time() > end or self.job.has_ended():
                raise TimeoutError(self.job.text())
            time.sleep(0.05)
        return time.time()

    def kill(self, kind: str, moment: str, pause: float) -> dict:
        """Kill, wait for the next step, and return the seconds of each phase."""
        nodes = self.nodes()
        if moment != "compilation":
            self.await_step(self.furthest)  # a job that is killed three times before a new step would end
            time.sleep(pause)
        if moment == "save":
            self.await_save()
        if kind.startswith("node") and self.nodes()[int(kind[-1])] == "n1":
            kind = f"node of process {1 - int(kind[-1])}"  # n1 has the batch script
        victim = nodes[int(kind[-1])]
        saved = max((int(path.name) for path in (self.workdir / "checkpoints").glob("[0-9]" * 8)), default=0)
        seen, began = len(self.job.read()), time.time()
        if kind.startswith("node"):
            self.lab.lose(victim)
        else:
            self.lab.enter(victim, "pkill", "-9", "-f", "^python -u -m moe_jax.train").wait()
        times = [began]
        for mark in MARKS:
            at = self.job.wait(mark, after=seen)
            times.append(max(self.job.lines[at][0], times[-1]))
        self.attempt, self.furthest = self.attempt + 1, max(self.furthest, self.last_step())
        resumed = int(re.search(r"step (\d+)", self.job.lines[at][1])[1])
        record = {"kind": kind, "moment": moment, "saved": saved, "resumed": resumed, "victim": victim}
        times.append(self.await_step(resumed, times[-1]))
        record |= {name: round(b - a, 1) for name, a, b in zip(PHASES, times, times[1:], strict=False)}
        return record | {"total": round(times[-1] - began, 1)}

    def await_save(self) -> None:
        """Wait until a checkpoint is being written."""
        folder = self.workdir / "checkpoints"
        known, end = {path.name for path in folder.iterdir()}, time.time() + 120
        while not {path.name for path in folder.iterdir()} - known and time.time() < end:
            time.sleep(0.005)


def main() -> None:
    """Carry the command line out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--lost_after_seconds", type=float, default=10.0)
    parser.add_argument("--out", type=pathlib.Path)
    options, arguments = parser.parse_known_args()
    base = pathlib.Path(tempfile.mkdtemp(dir="/var/tmp", prefix="moe_jax_kills."))
    arguments += [f"--gin_bindings=train.checkpoint_every = {options.every}", "--host_devices=2"]
    arguments += [f"--lost_after_seconds={options.lost_after_seconds}"]
    records = []
    os.environ["SLURMD_TIMEOUT"] = "300"  # Slurm's default: a node that boots again sooner stays in the allocation
    with Lab(3) as lab:
        work = base / "killed"
        words = [*arguments, f"--workdir={work}", "--gin_bindings=train.steps = 100000"]
        with Job(base / "job", words, nodes=3, WANT="2", MIN_NODES="2") as job:
            killed = Killed(lab, job, work)
            killed.await_step(0)
            for kill in draw(options.kills, options.seed):
                records.append(killed.kill(*kill))
                print(json.dumps(records[-1]), flush=True)
                lab.restore()
            steps = killed.last_step()
        whole = base / "whole"
        words = [*arguments, f"--workdir={whole}", "--gin_bindings=train.steps = 100000"]
        with Job(base / "job_whole", words, nodes=2) as job:
            undisturbed = Killed(lab, job, whole)
            undisturbed.await_step(steps, seconds=3600.0)
    want, got = ([record["loss"] for record in read_metrics(folder)] for folder in (whole, work))
    summary = {
        "losses": steps, "losses that differ": sum(a != b for a, b in zip(want[:steps], got[:steps], strict=True)),
        "steps lost beyond the last checkpoint": sum(
            max(0, record["saved"] - record["resumed"]) for record in records  # one under way may still be finished
        ),
    }  # fmt: skip
    for name, word in (("nodes", "node"), ("processes", "process")):
        side = [record for record in records if record["kind"].startswith(word)]
        summary[name] = len(side)
        for phase in (*PHASES, "total"):
            summary[f"{name}, median {phase}"] = statistics.median(record[phase] for record in side)
    print(json.dumps(summary, indent=1))
    if options.out:
        text = {"command": " ".join(arguments), "seed": options.seed, "environment": environment_record()}
        options.out.write_text(json.dumps(text | {"summary": summary, "kills": records}, indent=1) + "\n")
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
