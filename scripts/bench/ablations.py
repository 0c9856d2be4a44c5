"""Two ablations of the papers, replayed over a recorded trace with the executor's prices.

    python scripts/bench/ablations.py --trace=loads.npz [--every=5]

Hecate, figure 15: sharding alone, materialisation alone, both, and the interval of resharding. Pro-Prophet, figure 14:
its planner alone, with the scheduler that hides its transfers, and with a search that knows of the hiding ('full').
Seconds are those of one layer, forward and backward: computation, exchanges by the trace's exact rows on shared links,
Trans and Agg of the shape in force as far as they are not hidden. Prints Markdown, the papers' values beside ours.
"""

from __future__ import annotations

import dataclasses

from absl import app, flags

from moe_jax.cluster import read_named_cluster
from moe_jax.observe.load_trace import read_loads
from moe_jax.placement import Placement
from moe_jax.planner import Cost, PlannerConfig
from moe_jax.replay import report, simulate

_TRACE = flags.DEFINE_string("trace", None, "npz of loads [steps, layers, sources, experts].", required=True)
_EVERY = flags.DEFINE_integer("every", 5, "Judge each so many-th sample.")
_PER_NODE = flags.DEFINE_integer("devices_per_node", 4, "Devices of a node in the trace.")
TAU, SLOTS = 16, 4
# published sizes: Hecate's GPT-MoE-S on its cluster A, Pro-Prophet's MoE-GPT-M on four HPWNV nodes; 16-bit numbers
SYSTEMS = {
    "hecate": {"cluster": "configs/cluster/hecate_a.gin", "model_dim": 768, "hidden_dim": 1536},
    "pro_prophet": {"cluster": "configs/cluster/hpwnv.gin", "model_dim": 1024, "hidden_dim": 2048},
}
HECATE = {
    "sharding alone": {"materialize": False, "calibrate": False},
    "materialisation alone": {"shard_every": 0, "calibrate": False},
    "both": {"calibrate": False},
    "both, calibrated": {"calibrate": True},
}
INTERVALS = (10, 20, 50, 100)


def main(argv):
    del argv
    trace = read_loads(_TRACE.value)
    hecate(trace)
    pro_prophet(trace)


def hecate(trace) -> None:
    """Print figure 15."""
    placement, cost = setting(trace, "hecate")
    base = run(trace, placement, cost, "none")
    seconds = {
        name: layer_seconds(run(trace, placement, cost, "hecate", **how), base, cost) for name, how in HECATE.items()
    }
    plain = layer_seconds(base, base, cost)
    print("| Hecate, figure 15 | ms a layer | over EP |\n|---|---|---|")
    print(f"| expert parallelism | {1e3 * plain:.3f} | 1.00 |")
    for name, value in seconds.items():
        print(f"| {name} | {1e3 * value:.3f} | {plain / value:.2f} |")
    for name, paper in (("sharding alone", 3.32), ("materialisation alone", 1.27)):
        print(f"\nboth over {name}: {seconds[name] / seconds['both']:.2f} (paper {paper})")
    gains = []
    for interval in INTERVALS:
        how = {**HECATE["sharding alone"], "shard_every": interval}
        gains.append(plain / layer_seconds(run(trace, placement, cost, "hecate", **how), base, cost))
    found = ", ".join(f"{gain:.2f}" for gain in gains)
    print(f"\nsharding over EP, resharded every {INTERVALS} iterations: {found} (paper 1.36, 1.41, 1.34, 1.42)\n")


def pro_prophet(trace) -> None:
    """Print figure 14, K = 2, which is the trace's."""
    placement, cost = setting(trace, "pro_prophet")
    base = run(trace, placement, cost, "none")
    blind = run(trace, placement, cost, "pro_prophet", scheduler=False)
    steps = {
        "without any": layer_seconds(base, base, cost),
        "planner": layer_seconds(blind, base, cost),
        "+ scheduler": layer_seconds(dataclasses.replace(blind, hiding="pro_prophet"), base, cost),
        "full": layer_seconds(run(trace, placement, cost, "pro_prophet"), base, cost),
    }
    print("| Pro-Prophet, figure 14, K = 2 | ms a layer | over the row above | paper |\n|---|---|---|---|")
    paper, before = {"planner": 1.12, "+ scheduler": 1.01, "full": 1.02}, None
    for name, value in steps.items():
        gain = "" if before is None else f"{before / value:.2f}"
        print(f"| {name} | {1e3 * value:.3f} | {gain} | {paper.get(name, '')} |")
        before = value


def setting(trace, system: str) -> tuple[Placement, Cost]:
    """Return even homes and the cost model of a system's own machine, cut to the trace's devices."""
    sizes = SYSTEMS[system]
    _, layers, sources, experts = trace.loads.shape
    cluster = read_named_cluster(sizes["cluster"]).sized(sources // _PER_NODE.value, _PER_NODE.value)
    tokens = trace.loads.sum(axis=(2, 3)).mean() / sources / 2
    model_dim = sizes["model_dim"]
    attention = tokens * (8 * model_dim**2 + 4 * 2048 * model_dim) / cluster.need("flops", "the ablation")
    cost = Cost(
        cluster=cluster, model_dim=model_dim, hidden_dim=sizes["hidden_dim"], dtype_bytes=2, replica_slots=SLOTS,
        overlap_degree=TAU, attention_seconds=float(attention),
    )  # fmt: skip
    return Placement.even(layers, experts, sources, _PER_NODE.value), cost


def run(trace, placement, cost, name: str, **knobs):
    """Return the records of one planner."""
    config = PlannerConfig(name=name, replica_slots=SLOTS, overlap_degree=TAU, split="plan", **knobs)
    return simulate.simulate(name, trace, config, placement, cost, 1, _EVERY.value)


def layer_seconds(records, base, cost) -> float:
    """Return the mean seconds of a layer."""
    return report.summarize(records, base, cost)["layer_seconds"]


if __name__ == "__main__":
    app.run(main)
