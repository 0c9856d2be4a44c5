"""Time what planning adds to a training step, and count what changing plans make it wait.

    python scripts/bench/planning.py --out=DIR [--gin_file=configs/run/demo.gin] [--planner=balanced]

First: the same training twice in one process, without a planner and with one that plans after every step but whose
plans are never adopted (`PlannerConfig.swap_seconds` is beyond any gain). Both run segments of --steps steps, in turn;
the answer is the mean over pairs of segments of log(on / off) with its 95% interval. The floor is 0%: where the devices
are not the host's own cores, planning hides behind the step. Here they share them.

Second: 200 steps with plans that are adopted, after the first shapes are compiled; `rejit_stall_seconds` should stay
0 while `plan_id` grows. Prints tables and one JSON line, and writes it to DIR/bench_planning.json.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import time

from absl import app, flags

from moe_jax.training.stepper import Stepper, build_stepper

_GIN_FILES = flags.DEFINE_multi_string("gin_file", ["configs/run/demo.gin"], "Config file.")
_GIN_BINDINGS = flags.DEFINE_multi_string("gin_bindings", [], "Binding.")
_PLANNER = flags.DEFINE_string("planner", "balanced", "Planner to measure.")
_HOST_DEVICES = flags.DEFINE_integer("host_devices", 8, "Devices that the CPU is split into.")
_PAIRS = flags.DEFINE_integer("pairs", 8, "Pairs of segments; 0 leaves the first part out.")
_STEPS = flags.DEFINE_integer("steps", 50, "Steps of a segment.")
_STALL_STEPS = flags.DEFINE_integer("stall_steps", 200, "Steps of the second part; 0 leaves it out.")
_SETTLE_STEPS = flags.DEFINE_integer("settle_steps", 60, "Steps before those, in which shapes compile.")
_OUT = flags.DEFINE_string("out", None, "Folder for the JSON file.", required=True)


def overhead(off: Stepper, on: Stepper) -> dict:
    """Return seconds of a step on both sides and the interval of the mean log ratio, from interleaved segments."""
    import math

    from scipy import stats

    seconds = {"off": [], "on": []}
    for side in (off, on):
        side.run(_STEPS.value)
    for pair in range(_PAIRS.value):
        sides = [("off", off), ("on", on)]
        for name, side in sides if pair % 2 else reversed(sides):
            began = time.perf_counter()
            side.run(_STEPS.value)
            seconds[name].append((time.perf_counter() - began) / _STEPS.value)
        print(f"pair {pair}: off {seconds['off'][-1]:.4f} s, on {seconds['on'][-1]:.4f} s a step", flush=True)
    logs = [math.log(b / a) for a, b in zip(seconds["off"], seconds["on"], strict=True)]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = float(stats.t.ppf(0.95, len(logs) - 1)) * error
    assert on.engine is not None and on.engine.plan_id == 0, "the placement changed"
    return {
        "seconds_off": statistics.median(seconds["off"]),
        "seconds_on": statistics.median(seconds["on"]),
        "overhead_percent": 100 * math.expm1(mean),
        "overhead_percent_upper_95": 100 * math.expm1(mean + reach),
        "pairs": len(logs),
        "steps": _STEPS.value,
    }


def main(_):
    import dataclasses

    import jax

    from moe_jax.config.gin_files import parse_run_config

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _HOST_DEVICES.value)
    config, _, _ = parse_run_config(_GIN_FILES.value, _GIN_BINDINGS.value)
    cluster = config.planner.cluster or "configs/cluster/host_devices.gin"
    planner = dataclasses.replace(config.planner, name=_PLANNER.value, interval=1, cluster=cluster)
    result: dict = {"planner": _PLANNER.value, "gin_files": _GIN_FILES.value, "bindings": _GIN_BINDINGS.value}
    if _PAIRS.value:
        none = dataclasses.replace(config, planner=dataclasses.replace(planner, name="none"))
        held = dataclasses.replace(config, planner=dataclasses.replace(planner, swap_seconds=1e9))
        off, on = (build_stepper(side, jax.devices()) for side in (none, held))
        result["overhead"] = overhead(off, on)
        del off, on
    if _STALL_STEPS.value:
        training = build_stepper(dataclasses.replace(config, planner=planner), jax.devices())
        first, records = training.run(_SETTLE_STEPS.value), training.run(_STALL_STEPS.value)
        assert training.engine is not None
        result["stalls"] = {
            "stall_seconds": sum(record["rejit_stall_seconds"] for record in records),
            "stall_seconds_before": sum(record["rejit_stall_seconds"] for record in first),
            "plans": records[-1]["plan_id"] - first[-1]["plan_id"],
            "steps": len(records),
            "swaps": sum("compile_seconds" in record for record in records),
            "swaps_before": sum("compile_seconds" in record for record in first),
            "executables": len(training.engine.executables),
            "planner_seconds_median": statistics.median(record["planner_seconds"] for record in records),
        }
    folder = pathlib.Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench_planning.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
