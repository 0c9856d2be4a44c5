"""`deepspeed`: DeepSpeed-MoE's schedule as Parm describes it, redundant work included.

Every device of the MP group sends all t tokens, so experts compute each of them N_MP times, and an expert's gradient
is divided by N_MP; every device of an ESP group gathers the tokens of all its members, and what the shards computed is
summed over the group before each takes its own part. Without MP and ESP it is `s1`. Source: Parm, figure 3a.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.permute import permute_tokens
from moe_jax.moe.routing import Parcel, pack, stack_rows, stacked_row
from moe_jax.moe.schedules.contract import LayerSizes, ScheduleOptions, StagedSchedule, register
from moe_jax.moe.schedules.expert_group import cut, gather_shards, grouping_of, join, member, route_choices
from moe_jax.parallel.exchange import exchange_counts, make_exchange
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import wait_for
from moe_jax.parallel.replicated import own_part, replicated_to_varying, scale_gradient, varying_to_replicated
from moe_jax.parallel.varying import cast_varying


@register("deepspeed")
class Baseline(StagedSchedule):
    """AG_ESP, A2A_EP, experts, AR_ESP, A2A_EP, ESP-split."""

    gates_group = True
    s1_without = ("model", "expert_shard")

    def __init__(self, roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
        super().__init__(roles, sizes, options)
        self.ep_size, self.esp_size, self.mp_size = (
            roles.size(axes) for axes in (roles.expert, roles.expert_shard, roles.model)
        )
        local = max(1, min(self.ep_size, roles.config.devices_per_node // self.esp_size))
        make = functools.partial(make_exchange, roles.expert, self.ep_size, options.transport, local)
        self.exchanges = {"far": make(), "node": make(inside=roles.members_per_node), "own": lambda blocks: blocks}

    def route(self, tokens, choice, tables):
        routed = route_choices(self, tokens, choice, tables, member(self.roles))
        with jax.named_scope("dispatch"):
            # replicas may come in a branch, before destinations are known
            ready = wait_for(tokens, routed.passes, routed.routing.destination)
            everyone = self._gather(replicated_to_varying(ready, self.roles.model))
            everyone = everyone.reshape(-1, tokens.shape[-1])  # [Ns t, M]
            weights = replicated_to_varying(choice.weights, self.roles.model)
        return dataclasses.replace(routed, tokens=everyone, weights=weights)

    def pack(self, routed, index):
        roles, sizes, layout, me = self.roles, self.sizes, self.layout, member(self.roles)
        with jax.named_scope("dispatch"):
            parcel = pack(routed.routing, index, layout, sizes.top_k, sizes.groups, me)
            # one parcel over the tokens of all shards; in each piece of the layout (destination, shard, row)
            every = jax.tree.map(self._gather, parcel)  # [Ns, ...]
            shard = jnp.arange(self.esp_size, dtype=jnp.int32)
            choices, chosen = parcel.row_of_choice.size, every.choice_of_row
            chosen = jnp.where(chosen < choices, chosen + shard[:, None] * choices, self.esp_size * choices)
            choice_of_row = stack_rows(chosen, layout)
            row = stacked_row(every.row_of_choice, shard[:, None, None], self.esp_size, layout)
            joint = Parcel(
                choice_of_row=choice_of_row,
                row_of_choice=row.reshape(-1, sizes.top_k),
                counts=jnp.swapaxes(every.counts, 0, 1),
            )
            arriving = exchange_counts(joint.counts, roles.expert, self.ep_size)  # [D, Ns, G]
            grouping = grouping_of(arriving.reshape(-1, sizes.groups), layout, me)
            return permute_tokens(routed.tokens, joint), (parcel, grouping)

    def exchange(self, rows, metadata):
        with jax.named_scope("dispatch"):
            return self._exchange(rows)

    def arrive(self, received, metadata):
        with jax.named_scope("dispatch"):
            scaled = scale_gradient(received, float(self.mp_size))
        return super().arrive(scaled, metadata)

    def send_back(self, rows, metadata):
        with jax.named_scope("combine"):
            rows = scale_gradient(rows, 1.0 / self.mp_size)  # each expert's gradient counts once
            if self.esp_size > 1:
                acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
                rows = lax.psum(rows.astype(acc_dtype), self.roles.expert_shard).astype(rows.dtype)
            return self._exchange(rows)

    def unpack(self, returned, metadata, routed):
        with jax.named_scope("combine"):
            shards = self.roles.expert_shard if self.esp_size > 1 else ()
            own = []
            for _, blocks in cut(returned, self.layout, self.esp_size):
                blocks = blocks.reshape((-1, self.esp_size) + blocks.shape[1:])
                own.append(own_part(blocks, shards, dim=1)[:, 0])
        return super().unpack(join(own), metadata, routed)

    def leave(self, y):
        return super().leave(varying_to_replicated(y, self.roles.model))

    def _gather(self, array):
        """Return [Ns, ...], what each shard of this device's ESP group has."""
        if self.esp_size == 1:
            return array[None]
        return gather_shards(cast_varying(array, self.roles.expert_shard), self.roles.expert_shard, 0)

    def _exchange(self, rows):
        """Exchange rows [Ns R, M] among members; those of a member's shards stand side by side in each piece."""
        pieces = []
        for kind, blocks in cut(rows, self.layout, self.esp_size):
            side_by_side = blocks.reshape(-1, self.esp_size * blocks.shape[1], blocks.shape[-1])
            pieces.append(self.exchanges[kind](side_by_side).reshape(-1, 1, rows.shape[-1]))
        return join(pieces)
