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
from moe_jax.config import parse_run_config
from moe_jax.config.run_config import RunConfig
from moe_jax.moe.build import layer_sizes
from moe_jax.parallel.bucket_rows import BucketRows, bucket_layout
from moe_jax.parallel.mesh import Roles, build_mesh
from moe_jax.planning import routing
from moe_jax.planning.buckets import pairs_by_kind
from moe_jax.planning.placement import Placement
from moe_jax.training.plan_cost import initial_placement
from moe_jax.training.replanner import Replanner

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Define the command's flags; whoever imports this file has its own."""
    flags.DEFINE_multi_string("gin_file", [], "Config file of the run; may repeat.")
    flags.DEFINE_multi_string("gin_bindings", [], "Binding; may repeat.")
    flags.DEFINE_integer("devices", 32, "Devices of the mesh.")
    flags.DEFINE_integer("per_node", 8, "Of one node.")
    flags.DEFINE_float("skew", 1.0, "With a planner: loads fall as rank to the power -skew.")
    flags.DEFINE_integer("draws", 1000, "Steps drawn.")
    flags.DEFINE_integer("seed", 0, "Of the draws.")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is drawn from.

    Attributes:
      shares: float [L, E], of each layer's choices; choices: of one source in one exchange.
      exchanges: independent ones in a step, per layer.
      rows: of the buckets, as the layout has them; per_node: members of a node.
      placed: loads int [L, D, E] of an exchange -> the placement that it runs with.
    """

    shares: np.ndarray
    choices: int
    exchanges: int
    rows: BucketRows
    members: int
    per_node: int
    placed: object


def case_of(config: RunConfig, roles: Roles, skew: float) -> Case:
    """Return what a run draws from, in as many exchanges as `ModelConfig.overlap` makes.

    Raises:
      SystemExit: a mesh with model-parallel or sharded experts, which this script does not draw.
    """
    parts = 2 if config.model.block_wise.halves else 1
    members, near = roles.size(roles.expert), roles.members_per_node
    if roles.size(roles.model) > 1 or roles.size(roles.expert_shard) > 1:
        raise SystemExit("MeshConfig.model and MeshConfig.expert_shard must be 1 here")
    train = config.train
    tokens = train.batch_size * config.data.sequence_length // train.grad_accum_steps // roles.num_devices // parts
    layers, experts = config.model.moe_layers, config.moe.num_experts
    exchanges = train.grad_accum_steps * roles.size(roles.data) * parts
    even = initial_placement(config, roles)
    if config.planner.name == "none":
        shares, shape, placed = np.full((layers, experts), 1 / experts), None, lambda loads: even
    else:
        replanner = Replanner(config, roles, "segment_0")
        step_tokens = train.batch_size * config.data.sequence_length
        loads = skewed_loads(replanner, step_tokens, skew)
        shape, placement = replanner.planned(loads)
        shares = loads.sum(axis=1) / loads.sum(axis=(1, 2))[:, None]

        def placed(drawn):
            if shape.after_gate is None:
                return placement
            return replanner.plans.refine(drawn, placement, shape.late)

    sizes = layer_sizes(config.moe, roles, tokens, shape)
    if parts > 1 and sizes.planned_rows is not None:
        sizes = dataclasses.replace(sizes, planned_rows=sizes.planned_rows.each(lambda rows: -(-rows // parts)))
    rows = bucket_layout(sizes.bucket_rows(members), members, near).rows
    return Case(shares, tokens * config.moe.top_k, exchanges, rows, members, near, placed)


def draw_step(case: Case, random: np.random.Generator) -> tuple[bool, float]:
    """Return whether some bucket of a step overflows, and the fullest pair of the step over the mean pair."""
    overflows, fullest = False, 0
    for _ in range(case.exchanges):
        loads = np.stack([random.multinomial(case.choices, share, size=case.members) for share in case.shares])
        placement: Placement = case.placed(loads)
        for kind, pairs in pairs_by_kind(routing.pair_loads(placement, loads), case.per_node).items():
            most = int(pairs.max(initial=0))
            overflows, fullest = overflows or most > getattr(case.rows, kind), max(fullest, most)
    return overflows, fullest * case.members / case.choices


def overflow_rate(case: Case, draws: int, seed: int) -> tuple[float, float]:
    """Return (share of steps that overflow, mean of the fullest pair over the mean pair)."""
    random = np.random.default_rng(seed)
    found = [draw_step(case, random) for _ in range(draws)]
    return float(np.mean([overflows for overflows, _ in found])), float(np.mean([most for _, most in found]))


def main(_):
    config, *_ = parse_run_config(FLAGS.gin_file, FLAGS.gin_bindings)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, devices_per_node=FLAGS.per_node))
    case = case_of(config, build_mesh(config.mesh, FLAGS.devices), FLAGS.skew)
    rate, fullest = overflow_rate(case, FLAGS.draws, FLAGS.seed)
    print(f"rows of a bucket  {case.rows.own} (own), {case.rows.node} (same node), {case.rows.far} (other nodes)")
    print(f"mean rows         {case.choices / case.members:.0f}, the fullest pair of a step {fullest:.3f} times that")
    print(f"overflow          in {rate:.2%} of {FLAGS.draws} steps")


if __name__ == "__main__":
    define_flags()
    app.run(main)
