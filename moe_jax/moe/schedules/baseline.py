"""`deepspeed`: DeepSpeed-MoE's schedule as Parm describes it, redundant work included.

Inputs: the t tokens of this device's MP group. Outputs: the same tokens, transformed. Every device of the MP group
sends all t tokens, so experts compute each of them N_MP times; every device of an ESP group gathers the tokens of all
its members, and what the shards computed is summed over the group before each takes its own part.
Source: Parm, figure 3a.

The N_MP devices that hold a token get equal results, so its gradient is that of any one of them; an expert's gradient
sums over all of them and is divided by N_MP.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.permute import permute_tokens, unpermute_tokens
from moe_jax.moe.routing import Parcel, pack, passes_of, route, stack_rows, stacked_row
from moe_jax.moe.schedules.contract import (
    LayerSizes,
    Packed,
    Routed,
    ScheduleOptions,
    group_bucket_rows,
    layout_of,
    register,
)
from moe_jax.moe.schedules.expert_group import GroupedSchedule, cut, gather_shards, grouping_of, join, member
from moe_jax.moe.schedules.mp_tokens import from_replicated, to_replicated
from moe_jax.moe.schedules.passes import passes_needed
from moe_jax.moe.tables import destinations
from moe_jax.parallel.bucket_rows import BucketLayout
from moe_jax.parallel.exchange import exchange_counts, make_exchange
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import wait_for
from moe_jax.parallel.replicated import own_part, replicated_to_varying, scale_gradient, varying_to_replicated
from moe_jax.parallel.varying import cast_varying


@register("deepspeed", gates_group=True, bucket_rows=group_bucket_rows, s1_without=("model", "expert_shard"))
class Baseline(GroupedSchedule):
    """AG_ESP, A2A_EP, experts, AR_ESP, A2A_EP, ESP-split; without MP and ESP no token is on two devices: it is s1."""

    def __init__(self, roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
        self.roles, self.sizes, self.options = roles, sizes, options
        self.ep_size, self.esp_size, self.mp_size = (
            roles.size(axes) for axes in (roles.expert, roles.expert_shard, roles.model)
        )
        self.layout = layout_of(roles, group_bucket_rows(sizes, roles))
        self.passes = sizes.passes(self.layout.rows.far)
        local = max(1, min(self.ep_size, roles.config.devices_per_node // self.esp_size))
        make = functools.partial(make_exchange, roles.expert, self.ep_size, options.transport, local)
        self.exchanges = {"far": make(), "node": make(inside=roles.members_per_node), "own": lambda blocks: blocks}

    def enter(self, x, token_ids):
        return to_replicated(x, self.roles, self.options), token_ids

    def route(self, tokens, choice, tables):
        roles, groups = self.roles, self.sizes.groups
        with jax.named_scope("route"):
            device, expert = destinations(tables, choice, groups)
            routing = route(choice, device, expert, self.ep_size, groups)
            mine = passes_of(routing, self.layout, groups, member(roles))
            needed = passes_needed(mine, self.passes, roles.all)
        with jax.named_scope("dispatch"):
            ready = wait_for(tokens, needed, device)  # replicas may come in a branch, before `device` is known
            everyone = self._gather(replicated_to_varying(ready, roles.model))
            everyone = everyone.reshape(-1, tokens.shape[-1])  # [Ns t, M]
            weights = replicated_to_varying(choice.weights, roles.model)
        return Routed(everyone, weights, routing, needed)

    def pack(self, routed, index):
        roles, sizes, layout, me = self.roles, self.sizes, self.layout, member(self.roles)
        with jax.named_scope("dispatch"):
            parcel = pack(routed.routing, index, layout, sizes.top_k, sizes.groups, me)
            joint = _join(jax.tree.map(self._gather, parcel), layout)
            arriving = exchange_counts(joint.counts, roles.expert, self.ep_size)  # [D, Ns, G]
            grouping = grouping_of(arriving.reshape(-1, sizes.groups), layout, me)
            return Packed(permute_tokens(routed.tokens, joint), (parcel, grouping))

    def send(self, rows, metadata):
        with jax.named_scope("dispatch"):
            return self._send(rows)

    def arrive(self, received, metadata):
        with jax.named_scope("dispatch"):
            scaled = scale_gradient(received, float(self.mp_size))
        return super().arrive(scaled, metadata)

    def send_back(self, rows, metadata):
        with jax.named_scope("combine"):
            return self._send(self._counted_once(rows))

    def unpack(self, returned, metadata, routed):
        layout, esp_size = self.layout, self.esp_size
        with jax.named_scope("combine"):
            shards = self.roles.expert_shard if esp_size > 1 else ()
            parts = (blocks.reshape((-1, esp_size) + blocks.shape[1:]) for _, blocks in cut(returned, layout, esp_size))
            own = join(own_part(blocks, shards, dim=1)[:, 0] for blocks in parts)
            return unpermute_tokens(own, routed.weights, metadata[0])

    def leave(self, y):
        return from_replicated(varying_to_replicated(y, self.roles.model), self.roles, self.options)

    def _gather(self, array):
        """Return [Ns, ...], what each shard of this device's ESP group has."""
        if self.esp_size == 1:
            return array[None]
        return gather_shards(cast_varying(array, self.roles.expert_shard), self.roles.expert_shard, 0)

    def _send(self, array):
        """Exchange rows [Ns R, M] among members; those of a member's shards stand side by side in each piece."""
        pieces = cut(array, self.layout, self.esp_size)
        blocks = ((kind, _side_by_side(blocks, self.esp_size)) for kind, blocks in pieces)
        return join(self.exchanges[kind](part).reshape(-1, 1, array.shape[-1]) for kind, part in blocks)

    def _counted_once(self, done):
        """Undo the scaling of `arrive` and sum the shards' partial outputs: each expert's gradient counts once."""
        done = scale_gradient(done, 1.0 / self.mp_size)
        if self.esp_size == 1:
            return done
        acc_dtype = jnp.promote_types(done.dtype, jnp.float32)
        return lax.psum(done.astype(acc_dtype), self.roles.expert_shard).astype(done.dtype)


def _side_by_side(blocks, esp_size: int):
    """Return [n, Ns c, M] of [n Ns, c, M]."""
    return blocks.reshape(-1, esp_size * blocks.shape[1], blocks.shape[-1])


def _join(parcels: Parcel, layout: BucketLayout) -> Parcel:
    """Return one parcel over the tokens of all shards; in each piece of the layout (destination, shard, row).

    Args:
      parcels: with a leading Ns: choice_of_row [Ns, R], row_of_choice [Ns, t, K], counts [Ns, D, G].
      layout: of one shard's R rows.
    """
    esp_size, tokens, top_k = parcels.row_of_choice.shape
    shard = jnp.arange(esp_size, dtype=jnp.int32)
    choices, chosen = tokens * top_k, parcels.choice_of_row
    chosen = jnp.where(chosen < choices, chosen + shard[:, None] * choices, esp_size * choices)
    return Parcel(
        choice_of_row=stack_rows(chosen, layout),
        row_of_choice=stacked_row(parcels.row_of_choice, shard[:, None, None], esp_size, layout).reshape(-1, top_k),
        counts=jnp.swapaxes(parcels.counts, 0, 1),
    )
