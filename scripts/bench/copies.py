"""What copies of the state in RAM cost: two hosts of one process each on this machine, with copies and without in turn.

    python scripts/bench/copies.py --workdir=runs/copies --gin_file=configs/run/demo.gin --host_devices=4
    python scripts/bench/copies.py --workdir=runs/large --gin_file=configs/run/demo.gin --host_devices=1 \\
        --gin_bindings='MoEConfig.num_experts = 64' --gin_bindings='ModelConfig.hidden_dim = 1024'

One job trains, and copies its state every 2 k steps (k = 10): of each 2 k steps the first k follow a copy, the others
none, so both kinds alternate in one process and one minute. Printed: seconds of k steps of both kinds, median over the
rounds, their ratio and its quartiles; then what the trainer says of its copies: bytes of a process, bytes a second from
the first byte that is written to the partner's answer, CPU seconds of the threads beside the steps, and for how long
steps waited. The first round, in which pages are made, is left out. Quiet machine: the ratio is read to a percent.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import statistics
import subprocess
import sys

from absl import app, flags

from moe_jax.observe.metrics_file import read_metrics

_WORKDIR = flags.DEFINE_string("workdir", None, "New run folder.", required=True)
_GIN_FILE = flags.DEFINE_string("gin_file", "configs/run/demo.gin", "Config file.")
_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding; may repeat.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 4, "CPU devices of each of the two hosts.")
_EVERY = flags.DEFINE_integer("every", 10, "k.")
_ROUNDS = flags.DEFINE_integer("rounds", 12, "Pairs of k steps that count.")


def main(_) -> None:
    every, rounds = _EVERY.value, _ROUNDS.value
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    steps = 2 * every * (rounds + 2)
    bindings = [*_BINDINGS.value, f"train.steps = {steps}", f"train.copy_every = {2 * every}"]
    bindings += ["train.checkpoint_every = 0", "train.evaluate_every = 0", "train.evaluate_windows = 1"]
    command = [sys.executable, "-m", "moe_jax.train", f"--gin_file={_GIN_FILE.value}", f"--workdir={_WORKDIR.value}"]
    command += [*(f"--gin_bindings={text}" for text in bindings), f"--host_devices={_HOST_DEVICES.value}"]
    command += [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    token, processes = secrets.token_hex(16), []
    for index in range(2):
        environment = {**os.environ, "MOE_JAX_JOB_TOKEN": token, "NCCL_HOSTID": f"copies {index}"}
        arguments = [*command, f"--process_id={index}"]
        processes.append(subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate()[0] for process in processes][0]
    seconds = {record["step"]: record["step_seconds"] for record in read_metrics(_WORKDIR.value)}
    pairs = []
    for first in range(4 * every, steps - 2 * every + 1, 2 * every):
        pairs.append([sum(seconds[first + half + step + 1] for step in range(every)) for half in (0, every)])
    medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
    ratios = statistics.quantiles([copied / plain for copied, plain in pairs], n=4)
    print(f"{every} steps: {medians[1]:.3f} s without a copy, {medians[0]:.3f} s with one, of {len(pairs)} rounds each")
    print(f"ratio of medians {medians[0] / medians[1]:.4f}; of a round's two {', '.join(f'{r:.4f}' for r in ratios)}")
    print("\n".join(re.findall(r".*copies in RAM of.*", said)))


if __name__ == "__main__":
    app.run(main)
