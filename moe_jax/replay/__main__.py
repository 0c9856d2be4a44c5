"""Run planners over a recorded trace of expert loads, and compare them.

    python -m moe_jax.replay --trace=loads.npz --cluster=configs/cluster/flat_3gbs_30tflops.gin --planners=all \
        --nodes=4 --devices_per_node=4 --lag=1 --guest_slots=4 --overlap_degree=16 --out=DIR

Prints a table and, last, one JSON line; writes it and the pictures to --out. A user's mistake is one line, exit code 2.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import subprocess
import sys

import numpy as np
from absl import flags

from moe_jax.cluster import read_cluster
from moe_jax.config.command_line import parse_flags
from moe_jax.errors import UserError
from moe_jax.observe.load_trace import LoadsTrace, read_loads
from moe_jax.placement import Placement
from moe_jax.planner import Cost, PlannerConfig
from moe_jax.replay import plots, report, simulate

FLAGS = flags.FLAGS
flags.DEFINE_string("trace", None, "npz with loads [steps, layers, sources, experts] and iterations [steps]")
flags.DEFINE_string("cluster", None, "cluster preset (.gin) or calibrate's file (.json)")
flags.DEFINE_list(
    "planners", ["all"], "planner names, NAME to plan ahead, NAME_after_gate to see the step itself; or all"
)
flags.DEFINE_integer("nodes", None, "nodes; the cluster's when not given")
flags.DEFINE_integer("devices_per_node", None, "devices of a node; the cluster's when not given")
flags.DEFINE_integer("lag", 1, "samples between the loads seen and the sample planned for")
flags.DEFINE_integer("every", 1, "judge each so many-th sample")
flags.DEFINE_integer("guest_slots", 4, "mu: guests of a device in one layer")
flags.DEFINE_integer("overlap_degree", 16, "tau: experts whose transfer hides behind attention")
flags.DEFINE_integer("model_dim", 1024, "M")
flags.DEFINE_integer("hidden_dim", 2048, "F of an expert")
flags.DEFINE_integer("dtype_bytes", 4, "bytes of one number; 4 is float32")
flags.DEFINE_float("attention_seconds", None, "forward time of what precedes an MoE layer; hides transfers")
flags.DEFINE_integer("interval", None, "plan each so many iterations; the planner's own when not given")
flags.DEFINE_integer("shard_every", 0, "hecate: iterations between reshards (0: homes stay even)")
flags.DEFINE_bool("materialize", True, "hecate: guests on or off")
flags.DEFINE_bool("scheduler", True, "pro_prophet: cost model with its scheduler's overlap")
flags.DEFINE_string("n", "0", "pro_prophet: devices left out per expert, or search")
flags.DEFINE_float("alpha", 0.5, "pro_prophet: balance threshold")
flags.DEFINE_integer("top_k", 2, "topk_all: experts copied to all devices")
flags.DEFINE_enum("predictor", "last", ["last", "window", "exponential", "trend"], "how loads are guessed")
flags.DEFINE_integer("plot_layer", 0, "layer that is drawn")
flags.DEFINE_string("out", None, "folder for replay.json and pictures; none: print only")


def _config() -> PlannerConfig:
    if FLAGS.n != "search" and not FLAGS.n.isdigit():
        raise UserError(f"--n ({FLAGS.n!r}) must be a whole number of at least 0, or search")
    return PlannerConfig(
        guest_slots=FLAGS.guest_slots,
        overlap_degree=FLAGS.overlap_degree,
        interval=FLAGS.interval,
        shard_every=FLAGS.shard_every,
        materialize=FLAGS.materialize,
        scheduler=FLAGS.scheduler,
        n=FLAGS.n if FLAGS.n == "search" else int(FLAGS.n),
        alpha=FLAGS.alpha,
        top_k=FLAGS.top_k,
        predictor=FLAGS.predictor,
        bounded=False,
    )


def _setup():
    """Return (trace, placement, cost) from the flags, checked against each other."""
    for flag in ("trace", "cluster"):
        if getattr(FLAGS, flag) is None:
            raise UserError(f"--{flag} is missing; give a path")
    if FLAGS.lag < 1 or FLAGS.every < 1:
        raise UserError(f"--lag ({FLAGS.lag}) and --every ({FLAGS.every}) must be at least 1")
    recorded = read_loads(FLAGS.trace)
    if not recorded.loads.size:
        raise UserError(f"{FLAGS.trace}: loads {list(recorded.loads.shape)} is empty; give a trace with samples")
    trace = LoadsTrace(recorded.loads.astype(np.int64), recorded.iterations)
    cluster = read_cluster(FLAGS.cluster).sized(FLAGS.nodes, FLAGS.devices_per_node)
    for field in ("nodes", "devices_per_node"):
        cluster.need(field, f"replay (or set --{field})")
    _, layers, sources, experts = trace.loads.shape
    cluster.check_devices(sources, f"trace {pathlib.Path(FLAGS.trace).name}")
    if not 0 <= FLAGS.plot_layer < layers:
        raise UserError(f"--plot_layer ({FLAGS.plot_layer}) must lie in 0..{layers - 1}, the trace's layers")
    placement = Placement.even(layers, experts, sources, cluster.devices_per_node)
    cost = Cost(
        cluster=cluster,
        model_dim=FLAGS.model_dim,
        hidden_dim=FLAGS.hidden_dim,
        dtype_bytes=FLAGS.dtype_bytes,
        guest_slots=FLAGS.guest_slots,
        overlap_degree=FLAGS.overlap_degree,
        attention_seconds=FLAGS.attention_seconds,
    )
    return trace, placement, cost


def replay() -> dict:
    """Run the planners that the flags name; return the JSON answer and write pictures to --out."""
    asked = simulate.every_name() if FLAGS.planners == ["all"] else list(dict.fromkeys(FLAGS.planners))
    for name in asked:
        simulate.split_name(name)
    trace, placement, cost = _setup()
    # Plain EP is the base of RB and speed-up, FasterMoE of the RB ratio: run them even when nobody asked.
    bases = ["none"] + (["fastermoe"] if cost.cluster.flops is not None else [])
    records = {}
    for name in dict.fromkeys([*bases, *asked]):
        records[name] = simulate.simulate(name, trace, _config(), placement, cost, FLAGS.lag, FLAGS.every)
    summaries = {name: report.summarize(record, records["none"], cost) for name, record in records.items()}
    report.add_ratios(summaries, summaries.get("fastermoe", {}).get("rb"))
    answer = {name: summaries[name] for name in asked}
    print(report.table(answer), flush=True)
    if FLAGS.out is not None:
        out = pathlib.Path(FLAGS.out)
        out.mkdir(parents=True, exist_ok=True)
        for name in asked:
            plots.plot_device_load(records[name], FLAGS.plot_layer, out / f"device_load_{name}.png")
            plots.plot_copies(records[name], FLAGS.plot_layer, out / f"copies_{name}.png")
        plots.plot_roofline({name: records[name] for name in asked}, cost, out / "ddl_roofline.png")
    return {"planners": answer, **_provenance(trace, cost)}


def _provenance(trace, cost: Cost) -> dict:
    """Say what was run: command, date, commit, trace and cluster."""
    here = pathlib.Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return {
        "trace": {"name": pathlib.Path(FLAGS.trace).name, "shape": list(trace.loads.shape)},
        "cluster": cost.cluster.name,
        "lag": FLAGS.lag,
        "every": FLAGS.every,
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip() or None,
        "command": " ".join(["python -m moe_jax.replay", *sys.argv[1:]]),
    }


def main() -> None:
    """Run the command line; a user's mistake is one line and no traceback."""
    try:
        parse_flags(sys.argv, "moe_jax.replay", "trace")
        answer = replay()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    line = json.dumps(answer)
    if FLAGS.out is not None:
        (pathlib.Path(FLAGS.out) / "replay.json").write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
