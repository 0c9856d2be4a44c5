"""`s1`: MP pauses before the gate. With N_MP = N_ESP = 1 that is plain expert parallelism, and on one member `dp`.

Inputs: the t tokens of this device's MP group, equal on the group. Outputs: the same tokens, transformed. Each device
takes its own part of them through the gate and to the experts and back, by two exchanges over all EP and ESP devices;
an all-gather over MP makes the tokens whole. Source: Parm, section III-B. See `contract.py` for the contract.
"""

from __future__ import annotations

import jax
from jax import lax

from moe_jax.collectives.replicated import own_part
from moe_jax.dispatch import destinations, pack, passes_of, permute_tokens, route, unpermute_tokens
from moe_jax.errors import UserError
from moe_jax.mesh.roles import Roles
from moe_jax.schedules.contract import LayerSizes, ScheduleOptions, layout_of, register
from moe_jax.schedules.expert_group import build_expert_group, from_groups, member, to_groups
from moe_jax.schedules.mp_tokens import from_parts, to_parts
from moe_jax.schedules.passes import passes_needed
from moe_jax.schedules.staged import Sent, StagedSchedule, finish_passes


@register("s1")
def build_s1(roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
    """Build Parm's first schedule; its drop groups are the N / N_MP tokens of one device."""
    sizes = sizes.split(roles.size(roles.model))
    group = build_expert_group(roles, options.transport)
    layout = layout_of(roles, sizes.bucket_rows(group.ep_size), options.transport)
    most = sizes.most_passes(layout.rows.far)

    def send(x, token_ids, gate, place):
        mine, ids = to_parts(x, roles, options), own_part(token_ids, roles.model)
        with jax.named_scope("gate"):
            choice, stats = gate(mine, ids)
        with jax.named_scope("route"):
            device, expert = destinations(place(stats), choice, sizes.groups)
            routing = route(choice, device, expert, group.ep_size, sizes.groups)
            needed = passes_needed(passes_of(routing, layout, sizes.groups, member(roles)), most, roles.all)
        sorted_rows, group_sizes, way = deliver(mine, routing, 0)
        later = (mine, routing, needed, lax.stop_gradient(stats)) if most > 1 else None
        return Sent(sorted_rows, group_sizes, (choice.weights, way, later)), stats, needed

    def deliver(mine, routing, index):
        with jax.named_scope("dispatch"):
            parcel = pack(routing, index, layout, sizes.top_k, sizes.groups, member(roles))
            arriving = group.send_counts(parcel.counts)
            received = group.send(permute_tokens(mine, parcel), parcel.counts, arriving, layout)
            sorted_rows, group_sizes, grouping = to_groups(received, arriving, layout, member(roles))
        return sorted_rows, group_sizes, (parcel, arriving, grouping)

    def bring_home(done, weights, way):
        parcel, arriving, grouping = way
        with jax.named_scope("combine"):
            home = group.send_back(from_groups(done, grouping), parcel.counts, arriving, layout)
            return unpermute_tokens(home, weights, parcel)

    def finish(done, context, experts):
        y = finish_passes(done, context, experts, deliver, bring_home, most)
        with jax.named_scope("combine"):
            return from_parts(y, roles, options)

    return StagedSchedule(send, finish)


@register("dp")
def build_dp(roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
    """Build the ZeRO / FSDP baseline: experts replicated or gathered, tokens stay.

    Source: the baselines of FasterMoE (ZeRO 2 and 3) and Hecate (FSDP).
    """
    for name in ("expert", "expert_shard", "model"):
        size = roles.size(getattr(roles, name))
        if size > 1:
            raise UserError(
                f"MoEConfig.schedule ('dp') needs MeshConfig.{name} = 1, not {size}: every device computes all "
                f"experts; set MeshConfig.{name} = 1 and MeshConfig.data = {roles.num_devices}"
            )
    return build_s1(roles, sizes, options)
