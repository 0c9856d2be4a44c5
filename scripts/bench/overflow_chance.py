"""Draw a step's counts at random, many times, and say how often some bucket of some layer overflows.

    python scripts/bench/overflow_chance.py --gin_file=configs/run/gpt_moe_s_h200.gin --devices=32 --per_node=8 \\
        [--skew=1] [--draws=1000]

The loads are stated: each choice of every source takes an expert independently, by even shares, or with a planner by
shares that fall as rank to the power -skew in an order that differs from layer to layer, as `python -m moe_jax.inspect`
shows them to the planner. (A token's K experts differ, which a draw here leaves out: counts vary a little less in
truth.) Each exchange is drawn for itself: all layers, microbatches, data-parallel groups, halves of a batch. With a
planner its plan is made from the stated loads, and what it decides after the gate from the drawn ones. Printed are the
rows of the buckets, the share of steps in which some bucket overflows, and the mean of the fullest pair of a step over
the mean pair. No bytes move here, and no device is needed.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from absl import app, flags

from moe_jax.analysis.compile_ahead import skewed_loads
from moe_jax.config.gin_files import parse_run_config
from moe_jax.config.run_config import RunConfig
from moe_jax.moe.build import layer_sizes
from moe_jax.parallel.bucket_rows import bucket_layout
from moe_jax.parallel.mesh import Roles, build_mesh
from moe_jax.planning import routing
from moe_jax.planning.sizes import pairs_by_kind
from moe_jax.replan.build import build_sessions
from moe_jax.replan.segments import initial_placement

FLAGS = flags.FLAGS


def overflow_rate(config: RunConfig, roles: Roles, skew: float, draws: int, seed: int):
    """Return (share of steps that overflow, mean of the fullest pair over the mean one, rows of buckets, mean rows).

    Raises:
      SystemExit: a mesh with model-parallel or sharded experts, which this script does not draw.
    """
    train = config.train
    if roles.size(roles.model) > 1 or roles.size(roles.expert_shard) > 1:
        raise SystemExit("MeshConfig.model and MeshConfig.expert_shard must be 1 here")
    members, near = roles.size(roles.expert), roles.members_per_node
    parts = 2 if config.model.overlap == "halves" else 1
    exchanges = train.grad_accum_steps * roles.size(roles.data) * parts  # independent ones in a step, per layer
    step_tokens = train.batch_size * config.data.sequence_length
    tokens = step_tokens // train.grad_accum_steps // roles.num_devices // parts
    choices = tokens * config.moe.top_k  # of one source in one exchange
    layers, experts = config.model.moe_layers, config.moe.num_experts
    if config.planner.name == "none":
        shares, shape, placement = np.full((layers, experts), 1 / experts), None, initial_placement(config, roles)
    else:
        segment = build_sessions(config, roles)["segment_0"]
        loads = skewed_loads(segment.start, step_tokens, config.moe.top_k, skew)
        shape, placement = segment.planned_for(loads)
        shares = loads.sum(axis=1) / loads.sum(axis=(1, 2))[:, None]  # [L, E]
    sizes = layer_sizes(config.moe, roles, tokens, shape)
    if parts > 1 and sizes.planned_rows is not None:
        sizes = dataclasses.replace(sizes, planned_rows=sizes.planned_rows.each(lambda rows: -(-rows // parts)))
    rows = bucket_layout(sizes.bucket_rows(members), members, near).rows

    random = np.random.default_rng(seed)
    overflows, fullest = np.zeros(draws, bool), np.zeros(draws)
    for step in range(draws):
        for _ in range(exchanges):
            loads = np.stack([random.multinomial(choices, share, size=members) for share in shares])
            placed = placement
            if shape is not None and shape.after_gate is not None:
                placed = segment.refine(loads, placement, shape.late)
            for kind, pairs in pairs_by_kind(routing.pair_loads(placed, loads), near).items():
                most = int(pairs.max(initial=0))
                overflows[step] |= most > getattr(rows, kind)
                fullest[step] = max(fullest[step], most)
    return overflows.mean(), (fullest * members / choices).mean(), rows, choices / members


def main(_):
    config, *_ = parse_run_config(FLAGS.gin_file, FLAGS.gin_bindings)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, devices_per_node=FLAGS.per_node))
    roles = build_mesh(config.mesh, FLAGS.devices)
    rate, ratio, rows, mean = overflow_rate(config, roles, FLAGS.skew, FLAGS.draws, FLAGS.seed)
    print(f"rows of a bucket  {rows.own} (own), {rows.node} (same node), {rows.far} (other nodes)")
    print(f"mean rows         {mean:.0f}, the fullest pair of a step {ratio:.3f} times that")
    print(f"overflow          in {rate:.2%} of {FLAGS.draws} steps")


if __name__ == "__main__":
    flags.DEFINE_multi_string("gin_file", [], "Config file of the run; may repeat.")
    flags.DEFINE_multi_string("gin_bindings", [], "Binding; may repeat.")
    flags.DEFINE_integer("devices", 32, "Devices of the mesh.")
    flags.DEFINE_integer("per_node", 8, "Of one node.")
    flags.DEFINE_float("skew", 1.0, "With a planner: loads fall as rank to the power -skew.")
    flags.DEFINE_integer("draws", 1000, "Steps drawn.")
    flags.DEFINE_integer("seed", 0, "Of the draws.")
    app.run(main)
