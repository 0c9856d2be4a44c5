"""What `ModelConfig.overlap` = 'auto' is: two halves where the modelled step is faster with them, else none.

Inputs: a run's config, its mesh, and the rates of its devices. Outputs: the config with the choice, and the seconds of
one MoE layer both ways, even loads. It is 'none' without rates, on CPU devices, inside one node, whose exchanges the
compiler hides by itself (docs/results.md), and where tokens are not gated each by itself: halves would change
which tokens compete for a place. Host side; no arrays on devices.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.cluster import Cluster
from moe_jax.cluster.targets import Target
from moe_jax.cluster.timeline import Model
from moe_jax.config.run_config import RunConfig
from moe_jax.moe.routers import build_router
from moe_jax.moe.schedule import schedule_record
from moe_jax.parallel.mesh import Roles
from moe_jax.planning.block_schedule import Prefetch, Times, stage_seconds
from moe_jax.training.plan_cost import attention_seconds, plan_cost, segment_runs

MORE_KERNELS = 75  # of one layer in two halves, both ways: (2,061 - 1,164) / 12 on GPT-MoE-S (docs/results.md)


def settle_overlap(config: RunConfig, roles: Roles, target: Target | None) -> RunConfig:
    """Return the config with 'none' or 'halves' in place of 'auto'.

    Args:
      target: what the devices are, None where their rates are not known.
    """
    if config.model.overlap != "auto":
        return config
    gain = 0.0
    if target is not None and not why_not_halves(config, roles):
        for name, (own, _) in segment_runs(config, roles).items():
            in_one_piece, in_halves = layer_seconds(config, roles, target, name)
            gain += own.model.moe_layers * (in_one_piece - in_halves)
    model = dataclasses.replace(config.model, overlap="halves" if gain > 0 else "none")
    return dataclasses.replace(config, model=model)


def why_not_halves(config: RunConfig, roles: Roles) -> str:
    """Return why 'auto' leaves a run in one piece whatever the rates, '' where nothing speaks against halves."""
    train = config.train
    rows = train.batch_size // train.grad_accum_steps // roles.size(roles.dense)
    if roles.members_per_node == roles.size(roles.expert):
        return "no exchange leaves a node"
    if rows % 2:
        return f"a device has {rows} sequence(s), an odd number"
    if config.distillation.teacher:
        return "the run has a teacher"
    for own, _ in segment_runs(config, roles).values():
        record, router = schedule_record(own.moe.schedule), build_router(own.moe)
        if not (record.one_piece and record.moves_tokens):
            return f"MoEConfig.schedule is {own.moe.schedule!r}"
        if not own.moe.dropless or not router.replays:
            return "tokens compete for places among those gated together"
        if own.moe.record_choices:
            return "choices are recorded"
    return ""


def layer_seconds(config: RunConfig, roles: Roles, target: Target, segment: str) -> tuple[float, float]:
    """Return the modelled seconds of one layer of a segment under even loads, forward and backward: in one piece, and
    in two halves with their launches, as `timeline.Model` has them.

    Args:
      target: rates and topology of the devices.
    """
    own, own_roles = segment_runs(config, roles)[segment]
    members, shards = own_roles.size(own_roles.expert), own_roles.size(own_roles.expert_shard)
    nodes = members // own_roles.members_per_node
    cluster = Cluster(
        name=target.name,
        nodes=target.nodes,
        devices_per_node=target.per_node,
        intra_bandwidth=target.intra_bandwidth,
        inter_bandwidth=target.node_bandwidth,
        intra_latency=target.base_latency + target.intra_latency,
        inter_latency=target.base_latency + target.inter_latency,
        cards_per_node=target.adapters,
        flops=target.flops_bf16,
    )
    cluster = cluster.sized(nodes, own_roles.members_per_node).part_of(shards)
    cost = dataclasses.replace(plan_cost(config, roles, segment), cluster=cluster)
    tokens = own.train.batch_size * own.data.sequence_length / own.train.grad_accum_steps / roles.num_devices
    computed = np.full(members, tokens * own.moe.top_k * shards)
    asked_by = "ModelConfig.overlap = 'auto'"
    times = Times(
        attention=attention_seconds(own, own_roles, target.flops_bf16),
        experts=float(cost.forward(computed, asked_by)),
        exchange=float(cost.exchange(computed * (1 - 1 / members), asked_by)),
    )
    launches, recompute = MORE_KERNELS * Model().launch, own.model.recomputes
    seconds = (float(stage_seconds(Prefetch(halves=halves), times, recompute)) for halves in (False, True))
    in_one_piece, in_halves = seconds
    return in_one_piece, in_halves + launches
