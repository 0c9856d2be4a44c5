"""`s1`: MP pauses before the gate. With N_MP = N_ESP = 1 that is plain expert parallelism, and on one member `dp`.

Inputs: the t tokens of this device's MP group, equal on the group. Outputs: the same tokens, transformed. Each device
takes its own part of them through the gate and to the experts and back, by two exchanges over all EP and ESP devices;
an all-gather over MP makes the tokens whole. Source: Parm, section III-B. See `contract.py` for the contract.
"""

from __future__ import annotations

import jax

from moe_jax.errors import UserError
from moe_jax.moe.permute import permute_tokens, unpermute_tokens
from moe_jax.moe.routing import pack, passes_of, route
from moe_jax.moe.schedules.choose_group import choose_group
from moe_jax.moe.schedules.contract import (
    LayerSizes,
    Packed,
    Routed,
    ScheduleOptions,
    layout_of,
    own_bucket_rows,
    register,
)
from moe_jax.moe.schedules.expert_group import GroupedSchedule, grouping_of, member
from moe_jax.moe.schedules.mp_tokens import from_parts, to_parts
from moe_jax.moe.schedules.passes import passes_needed
from moe_jax.moe.tables import destinations
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.replicated import own_part


@register("s1")
class ExpertParallel(GroupedSchedule):
    """Parm's first schedule; its drop groups are the N / N_MP tokens of one device."""

    def __init__(self, roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
        self.roles, self.options = roles, options
        self.sizes = sizes.split(roles.size(roles.model))
        self.group = choose_group(roles, options.transport)
        self.layout = layout_of(roles, own_bucket_rows(sizes, roles))
        self.passes = self.sizes.passes(self.layout.rows.far)

    def enter(self, x, token_ids):
        return to_parts(x, self.roles, self.options), own_part(token_ids, self.roles.model)

    def route(self, tokens, choice, tables):
        roles, groups = self.roles, self.sizes.groups
        with jax.named_scope("route"):
            device, expert = destinations(tables, choice, groups)
            routing = route(choice, device, expert, self.group.ep_size, groups)
            mine = passes_of(routing, self.layout, groups, member(roles))
            needed = passes_needed(mine, self.passes, roles.all)
        return Routed(tokens, choice.weights, routing, needed)

    def pack(self, routed, index):
        sizes, layout, me = self.sizes, self.layout, member(self.roles)
        with jax.named_scope("dispatch"):
            parcel = pack(routed.routing, index, layout, sizes.top_k, sizes.groups, me)
            arriving = self.group.send_counts(parcel.counts)
            return Packed(permute_tokens(routed.tokens, parcel), (parcel, grouping_of(arriving, layout, me)))

    def send(self, rows, metadata):
        with jax.named_scope("dispatch"):
            return self.group.send(rows, self.layout)

    def send_back(self, rows, metadata):
        with jax.named_scope("combine"):
            return self.group.send_back(rows, self.layout)

    def unpack(self, returned, metadata, routed):
        with jax.named_scope("combine"):
            return unpermute_tokens(returned, routed.weights, metadata[0])

    def leave(self, y):
        with jax.named_scope("combine"):
            return from_parts(y, self.roles, self.options)


@register("dp", moves_tokens=False)
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
    return ExpertParallel(roles, sizes, options)
