"""Count the rows that a padded exchange carries under each planner: buckets of one length beside three.

    python scripts/bench/exchange_rows.py --trace=loads.npz [--steps=40] [--planners=balanced,hecate,pro_prophet]

A recorded trace [samples, layers, sources, experts], its sources folded to the mesh's members, 1,024 choices each, two
layers from sample 50 on, as `bench/placement.py` has them. Plans are made every step from the steps before it, ahead of
the gate. Per step the fullest pair of each kind (a member and itself, two of one node, two of different nodes) of both
layers gives the lengths that would just hold it; printed are means over the steps, in rows of the mean bucket, and what
one member hands to others in one exchange: with all buckets as long as the fullest, and with three lengths. Then the
lengths that a run would be compiled for without headroom, and in how many steps they overflow. No bytes move here.
"""

import tempfile

import numpy as np
from absl import app, flags

from moe_jax.config import parse_run_config
from moe_jax.parallel.abstract import build_abstract_roles
from moe_jax.parallel.bucket_rows import BucketRows
from moe_jax.planning import routing
from moe_jax.planning.buckets import exchange_bytes, fullest_pairs
from moe_jax.training.replanner import Replanner

FLAGS = flags.FLAGS
flags.DEFINE_string("trace", None, "npz of recorded loads", required=True)
flags.DEFINE_integer("steps", 40, "steps counted, after three that only fill the predictor")
flags.DEFINE_integer("members", 8, "D")
flags.DEFINE_integer("members_per_node", 2, "of one node")
flags.DEFINE_float("bandwidth", 3.125e6, "bytes/s of a link, for the planners' cost")
flags.DEFINE_list("planners", ["balanced", "hecate", "pro_prophet"], "planner names")
CHOICES, LAYERS, FIRST, SETTLE = 1024, 2, 50, 3


def counts() -> np.ndarray:
    """Return loads int [steps, LAYERS, D, E], CHOICES a source."""
    loads = np.load(FLAGS.trace)["loads"][FIRST : FIRST + SETTLE + FLAGS.steps, 1 : 1 + LAYERS].astype(np.float64)
    loads = loads.reshape(*loads.shape[:2], FLAGS.members, -1, loads.shape[-1]).sum(3)
    exact = loads / loads.sum(-1, keepdims=True) * CHOICES
    whole = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(-(exact - whole), axis=-1, kind="stable"), axis=-1)
    return whole + (rank < (CHOICES - whole.sum(-1, keepdims=True)))


def replanner(planner: str, split: str, experts: int, cluster: str) -> Replanner:
    """Return the planning of one run."""
    late = ["PlannerConfig.calibrate = False"] if planner == "hecate" else []
    bindings = [
        "ModelConfig.layers = 2", "ModelConfig.model_dim = 64", "ModelConfig.hidden_dim = 128",
        "DataConfig.sequence_length = 128", "ModelConfig.max_length = 128", f"MoEConfig.num_experts = {experts}",
        f"MeshConfig.expert = {FLAGS.members}", f"MeshConfig.devices_per_node = {FLAGS.members_per_node}",
        f"train.batch_size = {FLAGS.members * CHOICES // 2 // 128}", f"PlannerConfig.name = '{planner}'",
        f"PlannerConfig.split = '{split}'", "PlannerConfig.when = 'ahead'", "PlannerConfig.replica_slots = 4",
        "PlannerConfig.overlap_degree = 16", "PlannerConfig.interval = 1",
        f"PlannerConfig.cluster = '{cluster}'", *late,
    ]  # fmt: skip
    config = parse_run_config(["configs/run/deepspeed_moe.gin"], bindings)[0]
    return Replanner(config, build_abstract_roles(config.mesh, FLAGS.members))


def line(name: str, loads: np.ndarray, plan) -> str:
    """Return one line of the table."""
    mean, found, overflows = CHOICES / FLAGS.members, [], 0
    for step, now in enumerate(loads):
        place = plan.plans.propose(step).placement if step else plan.start
        if step >= SETTLE:
            need = fullest_pairs(routing.pair_loads(place, now), FLAGS.members_per_node)
            sizes = plan.predicted_rows(plan.first_shape(), place)
            carried = [
                exchange_bytes(rows, FLAGS.members, FLAGS.members_per_node, 1 / mean)[1:]
                for rows in (BucketRows.even(need.most), need)
            ]
            lengths = [size / mean for rows in (need, sizes) for size in (rows.own, rows.node, rows.far)]
            found.append([*lengths[:3], *carried[0], *carried[1], *lengths[3:]])
            overflows += not need.within(sizes.raised())
        plan.plans.observe(now)
    own, node, far, *rest = np.mean(found, axis=0)
    cells = [f"{a:.2f}, {b:.2f}" for a, b in (rest[:2], rest[2:4])]
    planned = ", ".join(f"{size:.2f}" for size in rest[4:])
    return f"| {name} | {own:.2f}, {node:.2f}, {far:.2f} | {cells[0]} | {cells[1]} | {planned} | {overflows} |"


def main(_):
    loads = counts()
    with tempfile.NamedTemporaryFile("w", suffix=".gin") as file:
        figures = {"name": "bench", "flat": True, "intra_bandwidth": FLAGS.bandwidth, "flops": 4e9}
        file.write("".join(f"Cluster.{name} = {value!r}\n" for name, value in figures.items()))
        file.flush()
        print("| | fullest own, node, far | one length: inside, across | three: inside, across | planned | overflows |")
        print("|---|---|---|---|---|---|")
        for planner in FLAGS.planners:
            for split in ("plan", "even"):
                run = replanner(planner, split, loads.shape[-1], file.name)
                print(line(f"`{planner}`, '{split}'", loads, run))
        run = replanner(FLAGS.planners[0], "plan", loads.shape[-1], file.name)
        need = [fullest_pairs(routing.pair_loads(run.start, now), FLAGS.members_per_node) for now in loads[SETTLE:]]
        mean = CHOICES / FLAGS.members
        kinds = [np.mean([getattr(rows, kind) for rows in need]) / mean for kind in ("own", "node", "far")]
        print("without replicas, own, node, far: " + ", ".join(f"{kind:.2f}" for kind in kinds))


if __name__ == "__main__":
    app.run(main)
