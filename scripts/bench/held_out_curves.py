"""Held-out losses of runs that the trainer carries out, several seeds of each kind: train, tabulate.

Inputs: run files and bindings. Outputs: for each run its [(step, held-out loss)]; for each kind a list of those, one a
seed; Markdown cells with the mean and the range over seeds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from moe_jax.observe.metrics_file import read_metrics
from moe_jax.storage.run_folder import EVALUATIONS

Curve = list[tuple[int, float]]


def train(folder: Path, gin_file: str, bindings: list[str], host_devices: int) -> Curve:
    """Carry out one run, unless it is finished; return (step, held-out loss) of its evaluations."""
    command = [sys.executable, "-m", "moe_jax.train", f"--gin_file={gin_file}", f"--workdir={folder}"]
    command += [f"--host_devices={host_devices}", *(f"--gin_bindings={binding}" for binding in bindings)]
    print(folder, file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [(record["step"], record["held_out_loss"]) for record in read_metrics(folder, file_name=EVALUATIONS)]


def loss_cells(runs: list[Curve], base: list[Curve] | None) -> str:
    """Return Markdown cells: mean of the last losses, their range, and how far they lie below `base`, seed by seed."""
    last = [run[-1][1] for run in runs]
    below = ""
    if base is not None:
        gains = [b - a for a, b in zip(last, (run[-1][1] for run in base), strict=True)]
        below = f"{statistics.mean(gains):.4f} ({min(gains):.4f} to {max(gains):.4f})"
    return f"{statistics.mean(last):.4f} | {min(last):.4f} to {max(last):.4f} | {below}"


def steps_to(run: Curve, loss: float) -> float | None:
    """Return the step at which a run's held-out loss falls to `loss`, between evaluations on a line; None: never."""
    for (step, before), (later, after) in zip(run, run[1:], strict=False):
        if after <= loss:
            return step + (later - step) * (before - loss) / (before - after)
    return None
