"""`s1`: MP pauses before the gate. With N_MP = N_ESP = 1 that is plain expert parallelism, and on one member `dp`.

Inputs: the t tokens of this device's MP group, equal on the group. Outputs: the same tokens, transformed. Each device
takes its own part of them through the gate and to the experts and back, by two exchanges over all EP and ESP devices;
an all-gather over MP makes the tokens whole. Source: Parm, section III-B.
"""

from __future__ import annotations

import jax

from moe_jax.errors import UserError
from moe_jax.moe.permute import permute_tokens
from moe_jax.moe.routing import pack
from moe_jax.moe.schedules.contract import LayerSizes, ScheduleOptions, StagedSchedule, register
from moe_jax.moe.schedules.expert_group import ExpertGroup, grouping_of, member, route_choices
from moe_jax.parallel.mesh import Roles


@register("s1")
class ExpertParallel(StagedSchedule):
    """Parm's first schedule; its drop groups are the N / N_MP tokens of one device."""

    def __init__(self, roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
        super().__init__(roles, sizes, options)
        self.group = ExpertGroup(roles, options.transport)

    def route(self, tokens, choice, tables):
        return route_choices(self, tokens, choice, tables, member(self.roles))

    def pack(self, routed, index):
        sizes, layout, me = self.sizes, self.layout, member(self.roles)
        with jax.named_scope("dispatch"):
            parcel = pack(routed.routing, index, layout, sizes.top_k, sizes.groups, me)
            arriving = self.group.send_counts(parcel.counts)
            return permute_tokens(routed.tokens, parcel), (parcel, grouping_of(arriving, layout, me))

    def exchange(self, rows, metadata):
        with jax.named_scope("dispatch"):
            return self.group.send(rows, self.layout)

    def send_back(self, rows, metadata):
        with jax.named_scope("combine"):
            return self.group.send_back(rows, self.layout)


@register("dp")
class DataParallel(ExpertParallel):
    """The ZeRO / FSDP baseline: experts replicated or gathered, tokens stay.

    Source: the baselines of FasterMoE (ZeRO 2 and 3) and Hecate (FSDP).
    """

    moves_tokens = False

    def __init__(self, roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
        for name in ("expert", "expert_shard", "model"):
            size = roles.size(getattr(roles, name))
            if size > 1:
                raise UserError(
                    f"MoEConfig.schedule ('dp') needs MeshConfig.{name} = 1, not {size}: every device computes all "
                    f"experts; set MeshConfig.{name} = 1 and MeshConfig.data = {roles.num_devices}"
                )
        super().__init__(roles, sizes, options)
