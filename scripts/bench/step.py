"""Time a training step on all host devices against the same model and global batch on one device.

What it says: the work is the same and the cores are the same, so the ratio is what parallelism costs here: exchanges,
smaller matmuls, and repeats of what is not split. The floor is 1. Runs are interleaved in one process; the ratio is
that of the medians. Run it as

    python scripts/bench/step.py --gin_file=configs/run/demo.gin --host_devices=8 --rounds=5
"""

from __future__ import annotations

import json
import statistics
import time

from absl import app, flags

_GIN_FILES = flags.DEFINE_multi_string("gin_file", ["configs/run/demo.gin"], "Config file.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 8, "Devices that the CPU is split into.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Interleaved rounds.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of each side in a round.")
_WARMUP = flags.DEFINE_integer("warmup", 30, "Steps before the clock starts: early routing is more skewed than later.")


def prepare(config, devices):
    """Return a function that runs the next n steps and gives the seconds of each."""
    import dataclasses

    import jax

    from moe_jax.parallel.mesh import to_devices
    from moe_jax.training.program import build_session

    mesh = config.mesh if len(devices) > 1 else type(config.mesh)()
    session = build_session(dataclasses.replace(config, mesh=mesh), devices)
    executable, _ = session.compile_step()
    held = {"state": session.fresh_state(), "step": 0, "passes": 1}
    host_signals = session.host_signals(0)

    def run(steps):
        seconds = []
        for _ in range(steps):
            batch = to_devices(session.feed.read(held["step"]), session.state_shardings.batch)
            started = time.perf_counter()
            held["state"], metrics = executable(held["state"], batch, session.tables, host_signals)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - started)
            held["step"] += 1
            held["passes"] = int(metrics["passes"].max())
        return seconds, held["passes"]

    return run


def main(_):
    import jax

    from moe_jax.config.gin_files import parse_run_config

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _HOST_DEVICES.value)
    config, _ = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value)
    sides = {"many": prepare(config, jax.devices()), "one": prepare(config, jax.devices()[:1])}
    times = {name: [] for name in sides}
    for run in sides.values():
        run(_WARMUP.value)
    for _ in range(_ROUNDS.value):
        for name, run in sides.items():
            seconds, passes = run(_STEPS.value)
            times[name] += seconds
            print(f"{name:5s} median {statistics.median(seconds):.4f} s, passes {passes}", flush=True)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    result = {
        "host_devices": _HOST_DEVICES.value,
        "seconds_many": medians["many"],
        "seconds_one": medians["one"],
        "ratio": medians["many"] / medians["one"],
        "samples": len(times["one"]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
