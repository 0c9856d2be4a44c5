"""Plain expert parallelism (`deepspeed` without MP and ESP) and its communication-free sibling `dp`.

Enters: this device's tokens. Leaves: the same tokens, transformed. In between, rows travel to the device that holds
their expert and back by two all-to-alls over the expert axis; with `dp` every device holds all experts and no row
travels. See `base.py` for the contract.
"""

from __future__ import annotations

import math

import jax
from jax import lax

from moe_jax.dispatch import (
    destinations,
    groups_to_rows,
    largest_bucket,
    pack,
    regroup,
    route,
    rows_to_groups,
    rows_to_tokens,
    tokens_to_rows,
)
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles
from moe_jax.schedules.base import LayerSizes, register
from moe_jax.schedules.passes import passes_needed, run_passes


def make_exchange(roles: Roles, sizes: LayerSizes):
    """Return the schedule that exchanges rows over the expert axis of `roles`."""
    axes = roles.expert
    devices = roles.size(axes)
    rows = sizes.bucket_rows(devices)
    most = math.ceil(sizes.worst_rows() / rows)

    def exchange(array):
        if devices == 1:
            return array
        return lax.all_to_all(array, axes, split_axis=0, concat_axis=0, tiled=True)

    def schedule(x, token_ids, gate, experts, tables):
        with jax.named_scope("gate"):
            choice, stats = gate(x, token_ids)
        with jax.named_scope("route"):
            device, group = destinations(tables, choice, sizes.groups)
            routing = route(choice, device, group, devices, sizes.groups)
            needed = passes_needed(largest_bucket(routing, sizes.groups), rows, roles.all)

        def one_pass(index):
            with jax.named_scope("dispatch"):
                parcel = pack(routing, index, rows, sizes.top_k, sizes.groups)
                sent = exchange(tokens_to_rows(x, parcel))
                counts = exchange(parcel.counts)
            with jax.named_scope("experts"):
                if devices == 1:  # one bucket, already in group order
                    done = experts(sent, counts[0])
                else:
                    grouping = regroup(counts, rows)
                    done = groups_to_rows(experts(rows_to_groups(sent, grouping), grouping.group_sizes), grouping)
            with jax.named_scope("combine"):
                return rows_to_tokens(exchange(done), choice.weights, parcel)

        return run_passes(one_pass, needed, most), stats, needed

    return schedule


@register("deepspeed")
def build_deepspeed(roles: Roles, sizes: LayerSizes):
    """Build DeepSpeed-MoE's schedule: all-to-all, experts, all-to-all."""
    if roles.size(roles.model) > 1 or roles.size(roles.expert_shard) > 1:
        raise UserError(
            f"MoEConfig.schedule ('deepspeed') runs with MeshConfig.model = 1 and expert_shard = 1 only, not "
            f"{roles.size(roles.model)} and {roles.size(roles.expert_shard)}; set both to 1"
        )
    return make_exchange(roles, sizes)


@register("dp")
def build_dp(roles: Roles, sizes: LayerSizes):
    """Build the ZeRO / FSDP baseline: experts replicated or gathered, tokens stay.

    Source: the baselines of FasterMoE (ZeRO 2 and 3) and Hecate (FSDP).
    """
    for name in ("expert", "expert_shard", "model"):
        size = roles.size(getattr(roles, name))
        if size > 1:
            raise UserError(
                f"MoEConfig.schedule ('dp') needs MeshConfig.{name} = 1, not {size}: every device computes all experts; "
                f"set MeshConfig.{name} = 1 and MeshConfig.data = {roles.num_devices}"
            )
    return make_exchange(roles, sizes)
