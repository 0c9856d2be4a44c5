"""Every planner, and two ablations of the papers, replayed over a recorded trace with the executor's prices.

    python scripts/bench/ablations.py --trace=loads.npz [--every=5] [--csv=planners.csv]

Hecate, figure 15: sharding alone, materialisation alone, both, and the interval of resharding. Pro-Prophet, figure 14:
its planner alone, with the scheduler that hides its transfers, and with a search that knows of the hiding ('full').
Seconds are those of one layer, forward and backward: computation, exchanges by the trace's exact rows on shared links,
Trans and Agg of the shape in force as far as they are not hidden. Prints Markdown, with the papers' values; what
reads Hecate's overlap degree (tau) stands there with 16 and with its own formula. --csv takes every planner too, over
each sample, both forms of the transfer, as `python -m moe_jax.replay` has them, and writes all figures down.
"""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
from absl import app, flags

from moe_jax.analysis import replay_inputs as inputs
from moe_jax.analysis import replay_report as report
from moe_jax.analysis import simulate
from moe_jax.cluster import read_cluster
from moe_jax.observe.loads import LoadsTrace, read_loads
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement

_TRACE = flags.DEFINE_string("trace", None, "npz of loads [steps, layers, sources, experts].", required=True)
_EVERY = flags.DEFINE_integer("every", 5, "Judge each so many-th sample.")
_PER_NODE = flags.DEFINE_integer("devices_per_node", 4, "Devices of a node in the trace.")
_CSV = flags.DEFINE_string("csv", None, "Replay every planner too, and write all figures here.")
TAUS, SLOTS, TOP_K = (16, None), 4, 2  # None: by the formula of Hecate's section 4.2
FIGURES = (
    "max_over_mean", "max_over_mean_p95", "replicas_per_device", "sent_experts", "sent_experts_across",
    "sent_experts_least", "received_experts", "shape_changes", "layer_seconds", "speedup_over_ep",
)  # fmt: skip
# published sizes: Hecate's GPT-MoE-S on its cluster A, sequences of 2,048; Pro-Prophet's MoE-GPT-M on the 16 devices of
# four HPWNV nodes, 16,384 tokens an iteration; 16-bit numbers. A device has one sequence of `tokens`.
SYSTEMS = {
    "hecate": {"cluster": "configs/cluster/hecate_a.gin", "model_dim": 768, "hidden_dim": 1536, "tokens": 2048},
    "pro_prophet": {"cluster": "configs/cluster/hpwnv.gin", "model_dim": 1024, "hidden_dim": 2048, "tokens": 1024},
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
    rows = [row for tau in TAUS for row in hecate(trace, tau)] + pro_prophet(trace)
    if _CSV.value is None:
        return
    rows += every_planner()
    with open(_CSV.value, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, ("table", "row", "transfer", "tau", *FIGURES), extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)


def hecate(trace, tau: int | None) -> list[dict]:
    """Print figure 15; return its rows."""
    trace, placement, cost = setting(trace, "hecate", tau)
    tau = cost.overlap()
    base = run(trace, placement, cost, "none")
    found = {"expert parallelism": report.summarize(base, base, cost)}
    resharded = {f"resharded every {at}": {**HECATE["sharding alone"], "shard_every": at} for at in INTERVALS}
    for name, how in {**HECATE, **resharded}.items():
        found[name] = report.summarize(run(trace, placement, cost, "hecate", **how), base, cost)
    print(f"| Hecate, figure 15, tau {tau} | ms a layer | over EP |\n|---|---|---|")
    for name, summary in found.items():
        print(f"| {name} | {1e3 * summary['layer_seconds']:.3f} | {summary['speedup_over_ep']:.2f} |")
    for name, paper in (("sharding alone", 3.32), ("materialisation alone", 1.27)):
        gain = found[name]["layer_seconds"] / found["both"]["layer_seconds"]
        print(f"\nboth over {name}: {gain:.2f} (paper {paper})")
    print(f"\nresharded every {INTERVALS} iterations the paper has 1.36, 1.41, 1.34, 1.42\n")
    return [{"table": "Hecate, figure 15", "row": name, "tau": tau, **summary} for name, summary in found.items()]


def pro_prophet(trace) -> list[dict]:
    """Print figure 14, K = 2, which is the trace's; return its rows."""
    trace, placement, cost = setting(trace, "pro_prophet")
    base = run(trace, placement, cost, "none")
    blind = run(trace, placement, cost, "pro_prophet", scheduler=False)
    steps = {
        "without any": base,
        "planner": blind,
        "+ scheduler": dataclasses.replace(blind, hiding="pro_prophet"),
        "full": run(trace, placement, cost, "pro_prophet"),
    }
    found = {name: report.summarize(records, base, cost) for name, records in steps.items()}
    print("| Pro-Prophet, figure 14, K = 2 | ms a layer | over the row above | paper |\n|---|---|---|---|")
    paper, before = {"planner": 1.12, "+ scheduler": 1.01, "full": 1.02}, None
    for name, summary in found.items():
        value = summary["layer_seconds"]
        gain = "" if before is None else f"{before / value:.2f}"
        print(f"| {name} | {1e3 * value:.3f} | {gain} | {paper.get(name, '')} |")
        before = value
    return [{"table": "Pro-Prophet, figure 14", "row": name, **summary} for name, summary in found.items()]


def every_planner() -> list[dict]:
    """Return the rows of every planner on links that are all alike; with another tau those of Hecate alone."""
    sizes = {"nodes": 4, "devices_per_node": _PER_NODE.value}
    given = inputs.build_inputs({"trace": _TRACE.value, "cluster": "configs/cluster/flat_3gbs_30tflops.gin", **sizes})
    _, layers, sources, experts = given.trace.loads.shape
    placement, attention = Placement.even(layers, experts, sources, _PER_NODE.value), inputs.attention_seconds(given)[0]
    rows = []
    for form in ("auto", "by_node"):
        for tau in TAUS:
            cost = Cost(
                **inputs.layer_of(given), replica_slots=SLOTS, overlap_degree=tau, attention_seconds=attention,
                transfer=form,
            )  # fmt: skip
            base = run(given.trace, placement, cost, "none", every=1)
            for name in simulate.EVERY_NAME:
                own = simulate.split_name(name)[0] == "hecate"
                if own or tau == TAUS[0]:
                    summary = report.summarize(run(given.trace, placement, cost, name, every=1), base, cost)
                    row = {"table": "every planner", "row": name, "transfer": form, **summary}
                    rows.append({**row, "tau": cost.overlap()} if own else row)
    return rows


def setting(trace, system: str, tau: int | None = None) -> tuple[LoadsTrace, Placement, Cost]:
    """Return the loads of the system's tokens, even homes, and its own machine's costs, cut to the trace's devices."""
    sizes = SYSTEMS[system]
    tokens = sizes["tokens"]
    _, layers, sources, experts = trace.loads.shape
    cluster = read_cluster(sizes["cluster"]).sized(sources // _PER_NODE.value, _PER_NODE.value)
    share = tokens * TOP_K * sources / trace.loads.sum(axis=(2, 3)).mean()
    trace = trace._replace(loads=np.rint(trace.loads * share).astype(np.int64))
    model_dim = sizes["model_dim"]
    attention = tokens * (8 * model_dim**2 + 4 * tokens * model_dim) / cluster.need("flops", "the ablation")
    cost = Cost(
        cluster=cluster, model_dim=model_dim, hidden_dim=sizes["hidden_dim"], dtype_bytes=2, replica_slots=SLOTS,
        overlap_degree=tau, attention_seconds=float(attention),
    )  # fmt: skip
    return trace, Placement.even(layers, experts, sources, _PER_NODE.value), cost


def run(trace, placement, cost, name: str, every: int | None = None, **knobs):
    """Return the records of one planner."""
    config = PlannerConfig(replica_slots=SLOTS, transfer=cost.transfer, split="plan", **knobs)
    return simulate.simulate(name, trace, config, placement, cost, 1, every or _EVERY.value)


if __name__ == "__main__":
    app.run(main)
