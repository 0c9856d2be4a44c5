"""A model of a job's share of useful time (ETTR) on 16 hosts of 8 GPUs, from the lab's phases and --dry_run's bytes.

    python -m moe_jax.train --dry_run --target=h100:16x8 --gin_file=configs/run/qwen3_30b_h100.gin \\
        --gin_bindings='train.copy_every = 10'
    python scripts/lab/ettr.py --host_bytes=...

A failure costs the phases until the next step, of which restoring is the bytes of one host over its network, and the
steps since the last whole copy, half of k on average. A copy costs the time in which steps wait for the devices' bytes.
Prints a Markdown table over seconds of a step and between failures, with the seconds of `program` that the lab measured
and with none, and what `program` may cost to reach --aim at --aim_every.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Job:
    """Bytes are of one host; rates in bytes a second."""

    host_bytes: float  # that copies take of its RAM, two generations of its own and a partner's part
    devices: int = 8
    every: int = 10  # steps between copies
    detection: float = 0.1
    membership: float = 0.4
    start: float = 0.7
    program: float = 21.8  # until the step is compiled, and made
    device_rate: float = 25e9  # of one device to its host
    network_rate: float = 200e9  # into a host
    file_rate: float = 1e9  # of one process, which writes a copy and sends it while steps go on

    @property
    def part(self) -> float:
        """Bytes of the state that a host holds."""
        return self.host_bytes / 4

    def lost_seconds(self, step: float) -> float:
        """Return what a failure costs on average, from the last whole copy to the next new step."""
        restore = self.part / self.network_rate + self.part / self.devices / self.device_rate
        copied = self.part / self.devices / self.file_rate  # the copy before is the last whole one until then
        back = self.detection + self.membership + self.start + restore + self.program
        return back + self.every * step / 2 + copied

    def useful_share(self, step: float, between: float) -> float:
        """Return ETTR for seconds of a step and between failures of the job."""
        waits = self.part / self.devices / self.device_rate
        return max(0.0, 1 - self.lost_seconds(step) / between) / (1 + waits / (self.every * step))


def table(job: Job, steps: list[float], betweens: list[float]) -> str:
    """Return ETTR as Markdown: with the job's program, and with one that is ready."""
    ready = replace(job, program=0.0)
    lines = ["| step | " + " | ".join(f"a failure in {between / 60:g} min" for between in betweens) + " |"]
    lines.append("|---" * (1 + len(betweens)) + "|")
    for step in steps:
        pairs = [f"{one.useful_share(step, between):.3f}" for between in betweens for one in (job, ready)]
        cells = [f"{have}, {could}" for have, could in zip(pairs[::2], pairs[1::2], strict=True)]
        lines.append(f"| {step:g} s | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse flags and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host_bytes", type=float, required=True, help="of each host's RAM, as --dry_run says")
    parser.add_argument("--steps", type=float, nargs="+", default=[1, 5, 15], help="seconds of a step")
    parser.add_argument("--betweens", type=float, nargs="+", default=[600, 3600, 10800], help="between failures")
    parser.add_argument("--aim", type=float, default=0.94, help="ETTR to reach")
    parser.add_argument("--aim_every", type=float, default=600, help="seconds between failures there")
    options = parser.parse_args()
    job = Job(host_bytes=options.host_bytes)
    print(table(job, options.steps, options.betweens))
    for step in options.steps:
        may = (1 - options.aim) * options.aim_every - job.lost_seconds(step) + job.program
        print(f"{step:g} s a step: {options.aim} at a failure in {options.aim_every:g} s if program takes {may:.1f} s")


if __name__ == "__main__":
    main()
