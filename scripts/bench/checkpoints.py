"""What checkpoints cost: one run that writes one every 2 k steps, of which the first k follow it and the others none.

    python scripts/bench/checkpoints.py --workdir=runs/saves
    python scripts/bench/checkpoints.py --workdir=runs/large --every=5 --rounds=6 --gin_file=configs/run/demo.gin \\
        --gin_bindings='MoEConfig.num_experts = 64' --gin_bindings='ModelConfig.hidden_dim = 1024' --host_devices=1

Prints the seconds of k steps of both kinds, medians over the rounds, what a checkpoint adds (their difference), what it
holds, and the share that it costs every 100 steps. The steps that hand the state over and those beside the writing are
both in the first k. The first two rounds are left out.
"""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys

from absl import app, flags

from moe_jax.observe.metrics_file import read_metrics

_WORKDIR = flags.DEFINE_string("workdir", None, "New run folder.", required=True)
_GIN_FILE = flags.DEFINE_string("gin_file", "configs/run/demo.gin", "Config file.")
_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding; may repeat.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 4, "CPU devices.")
_EVERY = flags.DEFINE_integer("every", 20, "k.")
_ROUNDS = flags.DEFINE_integer("rounds", 12, "Pairs of k steps that count.")


def main(_) -> None:
    every, rounds = _EVERY.value, _ROUNDS.value
    steps = 2 * every * (rounds + 2)
    bindings = [*_BINDINGS.value, f"train.steps = {steps}", f"train.checkpoint_every = {2 * every}"]
    bindings += ["train.evaluate_windows = 1", "train.keep_checkpoints = 1"]
    command = [sys.executable, "-m", "moe_jax.train", f"--gin_file={_GIN_FILE.value}", f"--workdir={_WORKDIR.value}"]
    command += [*(f"--gin_bindings={text}" for text in bindings), f"--host_devices={_HOST_DEVICES.value}"]
    subprocess.run(command, check=True)
    seconds = {record["step"]: record["step_seconds"] for record in read_metrics(_WORKDIR.value)}
    pairs = []
    for first in range(4 * every, steps, 2 * every):
        pairs.append([sum(seconds[first + half + step + 1] for step in range(every)) for half in (0, every)])
    saved, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
    checkpoints = pathlib.Path(_WORKDIR.value) / "checkpoints"
    size = sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file())
    print(f"{every} steps: {plain:.3f} s without a checkpoint, {saved:.3f} s behind one, of {len(pairs)} rounds each")
    print(f"a checkpoint of {size / 1e9:.3f} GB adds {saved - plain:.3f} s: every 100 steps "
          f"{(saved - plain) / (100 * plain / every):.1%}")  # fmt: skip


if __name__ == "__main__":
    app.run(main)
