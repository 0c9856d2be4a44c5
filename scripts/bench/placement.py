"""Time training steps of every planner against plain expert parallelism, on hosts that are joined by slow links.

    sudo python scripts/bench/placement.py --out=DIR [--trace=loads.npz] [--planners=hecate,pro_prophet,balanced]

What it measures: seconds of a training step (forward, backward, update, planning, exchange) in the lab
(scripts/lab/cluster.py): each host is a process of its own, and bytes between hosts take the time of a shaped link. All
hosts share this machine's cores, so compute takes the same time on all and stragglers in compute do not show; bytes and
the planner's host time do. XLA:CPU overlaps no transfer with compute, so every transfer counts in full.

Routing, one run for each:
  zipf   the model's own gate, its norm's bias set such that expert r of a layer (in an order drawn per layer) has
         -1.2 ln(r + 1) added to its logit for every token;
  trace  with --trace: step by step the counts of a recorded trace [steps, layers, sources, experts], scaled to the
         tokens of a source here. The gate is replaced by one that hands out experts by those counts.

Plain EP runs first, with each transport and then, with the best, several bucket sizes; the best of all is what planners
are compared with, and they use its transport. Runs are interleaved: in each round every side trains the same few
steps; the speed-up is that of the medians. Before the rounds every side runs --settle steps; planners start from the
loads of EP's, so that their first executable is the one they need, and its buckets are of the size they predict. The
floor of a step is its compute and an even exchange: ep_even, plain EP without skew on the same links.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np
from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLANNERS = ("hecate", "pro_prophet", "balanced", "llep", "fastermoe", "flexmoe", "eplb", "smartmoe", "topk_all")

_OUT = flags.DEFINE_string("out", None, "Folder for results.", required=True)
_TRACE = flags.DEFINE_string("trace", "", "npz of loads to replay; '' leaves that run out.")
_ROUTINGS = flags.DEFINE_list("routings", ["zipf", "trace"], "Which routings to run.")
_PLANNERS = flags.DEFINE_list("planners", list(PLANNERS), "Planners beside EP; NAME_after_gate decides in the step.")
_HOSTS = flags.DEFINE_integer("hosts", 4, "Hosts of the lab.")
_DEVICES = flags.DEFINE_integer("devices_per_host", 4, "Devices of each.")
_RATE = flags.DEFINE_string("rate", "200mbit", "Rate of a host's link, each way.")
_TOKENS = flags.DEFINE_integer("tokens", 512, "Tokens of a device.")
_ROUNDS = flags.DEFINE_integer("rounds", 4, "Interleaved rounds.")
_STEPS = flags.DEFINE_integer("steps", 3, "Steps of each side in a round.")
_SETTLE = flags.DEFINE_integer("settle", 6, "Steps of each side before the rounds.")
_SLACKS = flags.DEFINE_list("slacks", ["1.5", "3", "6"], "Bucket sizes tried for EP, over the mean.")
_TRANSPORTS = flags.DEFINE_list("transports", ["all_to_all", "two_level"], "Transports tried for EP.")
_EP = flags.DEFINE_string("ep", "", "TRANSPORT:SLACK of plain EP as an earlier run chose it; '' tries them all.")
_REPLICA_SLOTS = flags.DEFINE_integer("replica_slots", 4, "Replicas of a device in a layer.")
_SPLIT = flags.DEFINE_enum(
    "split", "auto", ["auto", "even", "plan"], "PlannerConfig.split of planners that plan ahead."
)
_FIRST = flags.DEFINE_integer("first_sample", 50, "Sample of the trace for step 0.")
_WAIT_FOR = flags.DEFINE_string(
    "wait_for", "", "Start the rounds when this file exists: to empty a busy machine first."
)
_TIMEOUT = flags.DEFINE_integer("timeout", 460, "Seconds for one lab.")
_WORKER = flags.DEFINE_string("worker", "", "Set by this script: the routing to run on this host.")
EXPERTS, LAYERS, MODEL, HIDDEN, LENGTH = 32, 2, 64, 128, 128


def read_counts(path: str, sources: int, choices: int, first: int) -> np.ndarray:
    """Return counts int [steps, LAYERS, sources, E], `choices` a source, from samples `first` on of layers 1 and 2."""
    loads = np.load(path)["loads"][first:, 1 : 1 + LAYERS].astype(np.float64)
    if loads.shape[2] % sources or loads.shape[3] != EXPERTS:
        raise app.UsageError(f"--trace has {loads.shape[2]} sources and {loads.shape[3]} experts, not {EXPERTS}")
    loads = loads.reshape(*loads.shape[:2], sources, -1, EXPERTS).sum(3)
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


def run_config(transport: str, slack: float, planner: str):
    """Return the run of one side."""
    from moe_jax.config import parse_run_config

    devices = _HOSTS.value * _DEVICES.value
    late = planner.endswith("_after_gate")
    bindings = [
        f"ModelConfig.layers = {LAYERS}", f"ModelConfig.model_dim = {MODEL}", f"ModelConfig.hidden_dim = {HIDDEN}",
        f"ModelConfig.max_length = {LENGTH}", f"DataConfig.sequence_length = {LENGTH}", "ModelConfig.heads = 4",
        f"MoEConfig.num_experts = {EXPERTS}", f"MoEConfig.bucket_slack = {slack}", "MoEConfig.aux_loss_weight = 0.0",
        f"MoEConfig.transport = '{transport}'", f"MeshConfig.expert = {devices}",
        f"MeshConfig.devices_per_node = {_DEVICES.value}", f"train.batch_size = {devices * _TOKENS.value // LENGTH}",
        "train.learning_rate = 1e-6", "train.zero_stage = 0", "train.steps = 1000000",
        f"PlannerConfig.name = '{planner.removesuffix('_after_gate')}'",
        f"PlannerConfig.when = '{'after_gate' if late else 'ahead'}'",
        f"PlannerConfig.split = '{'plan' if late else _SPLIT.value}'",
        *(["PlannerConfig.calibrate = False"] if planner == "hecate" else []),
        f"PlannerConfig.replica_slots = {_REPLICA_SLOTS.value}", "PlannerConfig.overlap_degree = 16",
        "PlannerConfig.interval = 1", "PlannerConfig.swap_after = 1", "PlannerConfig.skipped_devices = 'search'",
        f"PlannerConfig.cluster = '{pathlib.Path(_OUT.value).resolve() / 'lab_cluster.gin'}'",
    ]  # fmt: skip
    return parse_run_config(["configs/run/deepspeed_moe.gin"], bindings)[0]


def rate_bytes(rate: str) -> float:
    """Return bytes/s of a rate such as 400mbit."""
    units = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
    return float(rate[:-4]) * units[rate[-4:]] / 8


def change_for(routing: str):
    """Return (state, step) -> state that gives the gate its skew."""
    from moe_jax.parallel.global_arrays import to_devices

    devices, seen = _HOSTS.value * _DEVICES.value, {}
    if routing == "trace":
        counts = read_counts(_TRACE.value, devices, 2 * _TOKENS.value, _FIRST.value)

    def change(state, step):
        gate = state["params"]["dense"]["units"]["gate"]
        old = gate["w_gate"]
        if routing == "trace":
            weight = np.zeros(old.shape, np.float32)
            weight[:, :devices] = counts[step % len(counts)]
        elif "weight" in seen:
            return state
        else:
            rng = np.random.default_rng(0)
            order = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)])
            shift = (-1.2 * np.log(order + 1.0) if routing == "zipf" else 0.0 * order).astype(np.float32)
            # the norm's output has mean 0 over M, and its bias is 1: a constant column adds its sum to the logit
            weight = np.random.default_rng(1).normal(0, MODEL**-0.5, old.shape).astype(np.float32)
            weight += shift[:, None] / MODEL - weight.mean(axis=1, keepdims=True)
            bias = gate["norm"]["bias"]
            gate["norm"]["bias"] = to_devices(np.ones(bias.shape, np.float32), bias.sharding)
            seen["weight"] = True
        gate["w_gate"] = to_devices(weight, old.sharding)
        return state

    return change


def time_sides(sides: dict, rounds: int, steps: int, say, keep=lambda found: None) -> dict:
    """Run all sides in turn; return per side the seconds of each round's step and what its records say.

    Args:
      keep: called with what was found so far after each round.
    """
    found = {name: {"seconds": [], "passes": [], "replicas": [], "skew": [], "planner": []} for name in sides}
    for at in range(rounds):
        for name, side in sides.items():
            began = time.perf_counter()
            records = side.run(steps)
            found[name]["seconds"].append((time.perf_counter() - began) / steps)
            for record in records:
                found[name]["passes"].append(float(record["passes"].mean()))
                found[name]["replicas"].append(record.get("replicas", 0) / LAYERS)
                found[name]["planner"].append(record.get("planner_seconds", 0.0))
                homes = record["loads"].sum(axis=1).reshape(LAYERS, _HOSTS.value * _DEVICES.value, -1).sum(axis=2)
                even = (homes.max(1) / homes.mean(1)).mean()
                found[name]["skew"].append(float(np.mean(record.get("device_load_max_over_mean", even))))
        say(f"round {at}: " + ", ".join(f"{name} {found[name]['seconds'][-1]:.3f}" for name in sides))
        keep(found)
    return found


def summary(found: dict) -> dict:
    """Return medians, per side."""
    return {
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


def try_ep(build, hosts, say) -> tuple[dict, tuple[str, float], tuple]:
    """Time plain EP with each transport, then with the best one's other bucket sizes.

    Returns:
      what was tried; the best transport and bucket; that side, with the loads that it saw.
    """
    if _EP.value:
        transport, slack = _EP.value.split(":")
        return {}, (transport, float(slack)), build(transport, float(slack), "none")
    tried: dict[tuple[str, float], dict] = {}
    built: dict[tuple[str, float], tuple] = {}
    slacks = sorted(map(float, _SLACKS.value))

    def attempt(transport, slack):
        built[transport, slack] = build(transport, slack, "none")
        tried[transport, slack] = summary(time_sides({"ep": built[transport, slack][0]}, 2, 2, say))["ep"]

    def best():
        ours = min(tried, key=lambda case: tried[case]["step_seconds"])
        transport, slack = hosts.gather_text(f"best {len(tried)}", f"{ours[0]} {ours[1]}")[0].split()
        return transport, float(slack)

    for transport in _TRANSPORTS.value:
        attempt(transport, slacks[len(slacks) // 2])
    transport = best()[0]
    for slack in slacks:
        if (transport, slack) not in tried:
            attempt(transport, slack)
    chosen = best()
    return {f"{transport} {slack:g}": found for (transport, slack), found in tried.items()}, chosen, built[chosen]


def worker(routing: str) -> None:
    """Run one routing on this host; process 0 writes OUT/ROUTING.json."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    jax.config.update("jax_enable_compilation_cache", False)
    from moe_jax.parallel.mesh import build_mesh
    from moe_jax.training.hosts import HostsConfig, start_hosts
    from moe_jax.training.stepper import build_stepper

    place = {"coordinator": None, "num_processes": None, "process_id": None}
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        place = {
            "coordinator": os.environ["JAX_COORDINATOR_ADDRESS"],
            "num_processes": int(os.environ["JAX_NUM_PROCESSES"]),
            "process_id": int(os.environ["JAX_PROCESS_ID"]),
        }
    with start_hosts(HostsConfig(**place, lost_after_seconds=150.0)) as hosts:

        def say(text):
            if hosts.is_main:
                print(f"{time.strftime('%H:%M:%S')} {routing}: {text}", flush=True)

        def build(transport, slack, planner, how=routing, past=()):
            began = time.perf_counter()
            config = run_config(transport, slack, planner)
            side = build_stepper(config, jax.devices(), change_for(how), past)
            compiled = time.perf_counter() - began
            past = [record["loads"] for record in side.run(_SETTLE.value)]
            say(f"{planner} {transport} {slack:g}: compiled in {compiled:.0f} s, settled after {side.step} steps")
            return side, past

        mesh = run_config("all_to_all", 1.5, "none").mesh
        if routing == "trace":
            install_counted_gate(build_mesh(mesh, jax.devices()).expert)
        tried, (transport, slack), (plain, past) = try_ep(build, hosts, say)
        best, sides = f"{transport} {slack:g}", {"ep": plain}
        plain.step = _SETTLE.value  # the same steps as all others in the rounds
        if routing == "zipf":
            sides["ep_even"], _ = build(transport, 2.0, "none", "even")
        for planner in _PLANNERS.value:
            sides[planner], _ = build(transport, 1.5, planner, past=past)
        say("ready for the rounds")
        while _WAIT_FOR.value and not os.path.exists(_WAIT_FOR.value):
            time.sleep(0.2)

        def keep(found):
            result = summary(found)
            for values in result.values():
                values["speedup"] = result["ep"]["step_seconds"] / values["step_seconds"]
            if hosts.is_main:
                whole = {"routing": routing, "best_ep": best, "tried_ep": tried, "sides": result}
                path = pathlib.Path(_OUT.value) / f"{routing}-{'-'.join(_PLANNERS.value)}-{_SPLIT.value}.json"
                path.write_text(json.dumps(whole, indent=1) + "\n")

        time_sides(sides, _ROUNDS.value, _STEPS.value, say, keep)


def run_lab(routing: str) -> None:
    command = [
        sys.executable, str(ROOT / "scripts/lab/cluster.py"), f"--hosts={_HOSTS.value}",
        f"--devices_per_host={_DEVICES.value}", f"--rate={_RATE.value}", f"--timeout={_TIMEOUT.value}", "--",
        sys.executable, str(ROOT / "scripts/bench/placement.py"), *sys.argv[1:], f"--worker={routing}",
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)


def write_results(folder: pathlib.Path) -> dict:
    """Gather all runs in the folder into results.json and results.md; later runs of a side replace earlier ones."""
    import platform

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    gathered: dict = {}
    lines = []
    for path in sorted(folder.glob("*-*.json"), key=lambda path: path.stat().st_mtime):
        run = json.loads(path.read_text())
        gathered.setdefault(run["routing"], []).append(run)
    for routing, runs in gathered.items():
        lines += [f"## {routing}", "", "| side | s a step | speed-up over EP | max/mean | replicas a layer | passes |"]
        lines += ["|---|---|---|---|---|---|"]
        for run in runs:
            for name, side in run["sides"].items():
                lines.append(
                    f"| {name} ({run['best_ep']}) | {side['step_seconds']:.3f} | {side['speedup']:.2f} | "
                    f"{side['device_load_max_over_mean']:.2f} | {side['replicas_per_layer']:.1f} | "
                    f"{side['passes']:.2f} |"
                )
        lines.append("")
    machine = {
        "machine": f"{os.cpu_count()}-core {platform.machine()} virtual machine, CPU",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.strip(), "command": " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hosts": _HOSTS.value, "devices_per_host": _DEVICES.value, "rate": _RATE.value, "tokens": _TOKENS.value,
    }  # fmt: skip
    draw(folder / "speedups.png", gathered)
    (folder / "results.md").write_text("\n".join([json.dumps(machine), "", *lines]))
    print("\n".join(lines))
    return {**machine, "runs": gathered}


def draw(path: pathlib.Path, gathered: dict) -> None:
    """Draw the speed-up of every side over EP, one colour for each routing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = {
        routing: {name: side["speedup"] for run in runs for name, side in run["sides"].items() if name != "ep_even"}
        for routing, runs in gathered.items()
    }
    names = list(dict.fromkeys(name for speedups in bars.values() for name in speedups))
    figure, axes = plt.subplots(figsize=(7, 0.4 * len(names) + 1.2))
    for at, (routing, speedups) in enumerate(bars.items()):
        places = [index + 0.4 * at for index, name in enumerate(names) if name in speedups]
        axes.barh(places, [speedups[name] for name in names if name in speedups], height=0.38, label=routing)
    axes.set_yticks([index + 0.2 * (len(bars) - 1) for index in range(len(names))], names)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("steps a second over plain EP's")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(_):
    if _WORKER.value:
        return worker(_WORKER.value)
    folder = pathlib.Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    # what scripts/bench/predicted.py fits here: a start-up, and about 1.5 GB/s between the devices of one process
    cluster = {
        "name": "lab", "nodes": _HOSTS.value, "devices_per_node": _DEVICES.value, "flops": 4e9,
        "inter_bandwidth": rate_bytes(_RATE.value), "inter_latency": 1.2e-3,
        "intra_bandwidth": 1.5e9, "intra_latency": 1.2e-3,
    }  # fmt: skip
    (folder / "lab_cluster.gin").write_text("".join(f"Cluster.{name} = {value!r}\n" for name, value in cluster.items()))
    for routing in _ROUTINGS.value:
        if routing != "trace" or _TRACE.value:
            run_lab(routing)
    result = write_results(folder)
    speedups = {
        routing: {name: round(side["speedup"], 3) for run in runs for name, side in run["sides"].items()}
        for routing, runs in result["runs"].items()
    }
    print(json.dumps(speedups))
    return 0


if __name__ == "__main__":
    app.run(main)
