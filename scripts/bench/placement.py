"""Time training steps of every planner against plain expert parallelism, on hosts that are joined by slow links.

    sudo python scripts/bench/placement.py --out=DIR --trace=loads.npz [--planners=hecate,pro_prophet,balanced]

What it measures: seconds of a training step (forward, backward, update, planning, exchange) in the lab
(scripts/lab/cluster.py): each host is a process of its own, and bytes between hosts take the time of a shaped link. All
hosts share this machine's cores, so compute takes the same time on all and stragglers in compute do not show; bytes and
the planner's host time do. XLA:CPU overlaps no transfer with compute, so every transfer counts in full.

The gate is replaced by one that hands out experts by the counts of a recorded trace's last sample, scaled to the tokens
of a source here. Runs are interleaved: in each round every side trains the same few steps; the speed-up over plain EP
is that of the medians. Before the rounds every side runs --settle steps; planners start from the loads of EP's, so that
their first executable is the one they need, and its buckets are of the size they predict.

A side is a planner, or PLANNER+SCHEDULE; `auto` chooses both, and runs --auto_settle steps before the rounds, in which
it decides and compiles. It is held against these six, EP among them, whose names stood here before the first run:

    sudo python scripts/bench/placement.py --out=DIR --trace=configs/trace/top_2.npz --devices_per_host=2 --rounds=5 \\
        --settle=106 --timeout=2400 --planners=hecate,pro_prophet,balanced,llep,none+pairwise,auto

with all sides past step 100, where Hecate moves homes.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np
from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLANNERS = ("hecate", "pro_prophet", "balanced", "llep", "fastermoe", "flexmoe", "eplb", "smartmoe", "topk_all")

_OUT = flags.DEFINE_string("out", None, "Folder for results.", required=True)
_TRACE = flags.DEFINE_string("trace", None, "npz of loads to replay.", required=True)
_PLANNERS = flags.DEFINE_list("planners", list(PLANNERS), "Sides besides EP; NAME_after_gate decides in the step.")
_HOSTS = flags.DEFINE_integer("hosts", 4, "Hosts of the lab.")
_DEVICES = flags.DEFINE_integer("devices_per_host", 4, "Devices of each.")
_RATE = flags.DEFINE_string("rate", "200mbit", "Rate of a host's link, each way.")
_TOKENS = flags.DEFINE_integer("tokens", 512, "Tokens of a device.")
_ROUNDS = flags.DEFINE_integer("rounds", 4, "Interleaved rounds.")
_STEPS = flags.DEFINE_integer("steps", 3, "Steps of each side in a round.")
_SETTLE = flags.DEFINE_integer("settle", 6, "Steps of each side before the rounds.")
_AUTO_SETTLE = flags.DEFINE_integer("auto_settle", 172, "The same of `auto`, whose rounds have up to 160 steps.")
_TIMEOUT = flags.DEFINE_integer("timeout", 460, "Seconds for one lab.")
_WORKER = flags.DEFINE_bool("worker", False, "Set by this script: this process is one host of the lab.")
EXPERTS, LAYERS, MODEL, HIDDEN, LENGTH = 32, 2, 64, 128, 128


def read_counts(path: str, sources: int, choices: int) -> np.ndarray:
    """Return counts int [LAYERS, sources, E], `choices` a source, of layers 1 and 2 in the last sample."""
    loads = np.load(path)["loads"][-1, 1 : 1 + LAYERS].astype(np.float64)
    if loads.shape[1] % sources or loads.shape[2] != EXPERTS:
        raise app.UsageError(f"--trace has {loads.shape[1]} sources and {loads.shape[2]} experts, not {EXPERTS}")
    loads = loads.reshape(LAYERS, sources, -1, EXPERTS).sum(2)
    exact = loads / loads.sum(-1, keepdims=True) * choices
    counts = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(-(exact - counts), axis=-1, kind="stable"), axis=-1)
    return counts + (rank < (choices - counts.sum(-1, keepdims=True)))


def install_counted_gate(axes: tuple[str, ...]) -> None:
    """Replace the gate by one that reads, in row s of the gate weight, how many choices source s gives each expert."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from moe_jax.moe.routers.statistics import GateStats, count_experts
    from moe_jax.moe.routers.topk import TopK
    from moe_jax.moe.routing import Choice

    def choose(router, x, params, inputs):
        config, tokens, top_k = router.config, x.shape[0], router.config.top_k
        counts = jnp.rint(params["w_gate"][lax.axis_index(axes)]).astype(jnp.int32)
        places = jnp.arange(tokens * top_k, dtype=jnp.int32)
        # no expert has more choices than there are tokens, so the choices of one token are of different experts
        ids = jnp.searchsorted(jnp.cumsum(counts), places, side="right").astype(jnp.int32)
        ids = jnp.minimum(ids, config.num_experts - 1).reshape(top_k, tokens).T
        none = jnp.sum(lax.stop_gradient(x).astype(jnp.float32)) * 0
        weights = jnp.full((tokens, top_k), 1.0 / top_k) + none
        stats = GateStats(
            counts=count_experts(ids, config.num_experts), probability=jnp.zeros((config.num_experts,)) + none,
            squared_logsumexp=none, entropy=none, dropped=jnp.sum(ids < 0, dtype=jnp.int32),
        )  # fmt: skip
        return Choice(expert_ids=ids, weights=weights, keep_mask=ids >= 0), jax.tree.map(lambda leaf: leaf, stats)

    TopK.choose = choose


def run_config(side: str):
    """Return the run of one side."""
    from moe_jax.config.gin_files import parse_run_config

    planner, _, schedule = side.partition("+")
    schedule = "auto" if planner == "auto" else schedule or "s1"
    devices = _HOSTS.value * _DEVICES.value
    late = planner.endswith("_after_gate")
    bindings = [
        f"ModelConfig.layers = {LAYERS}", f"ModelConfig.model_dim = {MODEL}", f"ModelConfig.hidden_dim = {HIDDEN}",
        f"ModelConfig.max_length = {LENGTH}", f"DataConfig.sequence_length = {LENGTH}", "ModelConfig.heads = 4",
        "MoEConfig.bucket_slack = 1.5",
        f"MoEConfig.num_experts = {EXPERTS}", "MoEConfig.aux_loss_weight = 0.0",
        f"MoEConfig.schedule = '{schedule}'",
        f"MeshConfig.expert = {devices}", f"MeshConfig.devices_per_node = {_DEVICES.value}",
        f"train.batch_size = {devices * _TOKENS.value // LENGTH}",
        "train.learning_rate = 1e-6", "train.zero_stage = 0", "train.steps = 1000000",
        f"PlannerConfig.name = '{planner.removesuffix('_after_gate')}'",
        f"PlannerConfig.when = '{'after_gate' if late else 'ahead'}'",
        f"PlannerConfig.split = '{'plan' if late else 'auto'}'",
        *(["Hecate.calibrate = False"] if planner == "hecate" else []),
        "PlannerConfig.replica_slots = 4", "Hecate.overlap_degree = 16",
        "PlannerConfig.interval = 1", "PlannerConfig.swap_after = 1", "ProProphet.skipped_devices = 'search'",
        f"PlannerConfig.cluster = '{pathlib.Path(_OUT.value).resolve() / 'lab_cluster.gin'}'",
    ]  # fmt: skip
    return parse_run_config(["configs/run/deepspeed_moe.gin"], bindings)[0]


def worker() -> None:
    """Run all sides on this host, in turn; process 0 writes OUT/sides.json after each round."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    jax.config.update("jax_enable_compilation_cache", False)
    from moe_jax.jobs.start import start_hosts
    from moe_jax.parallel.mesh import build_mesh, to_devices
    from moe_jax.training.stepper import build_stepper

    place = {
        "coordinator": os.environ["JAX_COORDINATOR_ADDRESS"],
        "num_processes": int(os.environ["JAX_NUM_PROCESSES"]),
        "process_id": int(os.environ["JAX_PROCESS_ID"]),
    }
    devices = _HOSTS.value * _DEVICES.value
    counts = read_counts(_TRACE.value, devices, 2 * _TOKENS.value)

    def with_counts(state, _):
        """Return the state, its gate handing out the trace's experts."""
        gate = state["params"]["dense"]["units"]["segment_0"]["gate"]
        weight = np.zeros(gate["w_gate"].shape, np.float32)
        weight[:, :devices] = counts
        gate["w_gate"] = to_devices(weight, gate["w_gate"].sharding)
        return state

    with start_hosts(**place, lost_after_seconds=150.0) as hosts:

        def say(text):
            if hosts.is_main:
                print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

        def build(planner, past=()):
            began = time.perf_counter()
            side = build_stepper(run_config(planner), jax.devices(), with_counts, past)
            compiled = time.perf_counter() - began
            past = [record["loads"] for record in side.run(_AUTO_SETTLE.value if planner == "auto" else _SETTLE.value)]
            say(f"{planner}: compiled in {compiled:.0f} s, settled after {side.step} steps")
            return side, past

        install_counted_gate(build_mesh(run_config("none").mesh, jax.devices()).expert)
        plain, past = build("none")
        sides = {"ep": plain, **{planner: build(planner, past)[0] for planner in _PLANNERS.value}}
        say("ready for the rounds")

        found = {name: {"seconds": [], "passes": [], "replicas": [], "skew": [], "planner": []} for name in sides}
        for at in range(_ROUNDS.value):
            for name, side in sides.items():
                values, began = found[name], time.perf_counter()
                records = side.run(_STEPS.value)
                values["seconds"].append((time.perf_counter() - began) / _STEPS.value)
                for record in records:
                    values["passes"].append(float(record["passes"].mean()))
                    values["replicas"].append(record.get("replicas", 0) / LAYERS)
                    values["planner"].append(record.get("planner_seconds", 0.0))
                    homes = record["loads"].sum(axis=1).reshape(LAYERS, devices, -1).sum(axis=2)
                    even = (homes.max(1) / homes.mean(1)).mean()
                    values["skew"].append(float(np.mean(record.get("device_load_max_over_mean", even))))
            say(f"round {at}: " + ", ".join(f"{name} {found[name]['seconds'][-1]:.3f}" for name in sides))
            result = {
                name: {
                    "step_seconds": statistics.median(values["seconds"]),
                    "rounds": [round(seconds, 4) for seconds in values["seconds"]],
                    "passes": statistics.mean(values["passes"]),
                    "replicas_per_layer": statistics.mean(values["replicas"]),
                    "device_load_max_over_mean": statistics.mean(values["skew"]),
                    "planner_ms": 1e3 * statistics.median(values["planner"]),
                }
                for name, values in found.items()
            }
            for values in result.values():
                values["speedup"] = result["ep"]["step_seconds"] / values["step_seconds"]
            if hosts.is_main:
                (pathlib.Path(_OUT.value) / "sides.json").write_text(json.dumps(result, indent=1) + "\n")


def main(_):
    if _WORKER.value:
        return worker()
    folder = pathlib.Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    units = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
    rate = float(_RATE.value[:-4]) * units[_RATE.value[-4:]] / 8
    own = {"nodes": _HOSTS.value, "devices_per_node": _DEVICES.value, "inter_bandwidth": rate}
    text = (ROOT / "scripts/lab/cluster.gin").read_text() + "".join(f"Cluster.{k} = {v!r}\n" for k, v in own.items())
    (folder / "lab_cluster.gin").write_text(text)
    command = [
        sys.executable, str(ROOT / "scripts/lab/cluster.py"), f"--hosts={_HOSTS.value}",
        f"--devices_per_host={_DEVICES.value}", f"--rate={_RATE.value}", f"--timeout={_TIMEOUT.value}", "--",
        sys.executable, str(ROOT / "scripts/bench/placement.py"), *sys.argv[1:], "--worker",
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)
    sides = json.loads((folder / "sides.json").read_text())
    lines = [
        "| side | s a step | speed-up over EP | max/mean | replicas a layer | passes |",
        "|---|---|---|---|---|---|",
    ]
    for name, side in sides.items():
        lines.append(
            f"| {name} | {side['step_seconds']:.3f} | {side['speedup']:.2f} | "
            f"{side['device_load_max_over_mean']:.2f} | {side['replicas_per_layer']:.1f} | {side['passes']:.2f} |"
        )
    machine = {
        "machine": f"{os.cpu_count()}-core {platform.machine()} virtual machine, CPU",
        "date": time.strftime("%Y-%m-%d"), "command": " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hosts": _HOSTS.value, "devices_per_host": _DEVICES.value, "rate": _RATE.value, "tokens": _TOKENS.value,
    }  # fmt: skip
    (folder / "results.md").write_text("\n".join([json.dumps(machine), "", *lines]) + "\n")
    print("\n".join(lines))
    print(json.dumps({name: round(side["speedup"], 3) for name, side in sides.items()}))
    if "auto" in sides:
        auto = sides.pop("auto")["step_seconds"]
        print(f"auto over the best other side: {auto / min(side['step_seconds'] for side in sides.values()):.3f}")
    return 0


if __name__ == "__main__":
    app.run(main)
