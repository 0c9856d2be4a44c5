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

from moe_jax.collectives.bucket_rows import BucketLayout
from moe_jax.collectives.exchange import exchange_counts, make_exchange
from moe_jax.collectives.ordering import wait_for
from moe_jax.collectives.replicated import own_part, replicated_to_varying, scale_gradient, varying_to_replicated
from moe_jax.collectives.varying import cast_varying
from moe_jax.dispatch import (
    Parcel,
    destinations,
    pack,
    passes_of,
    permute_tokens,
    route,
    stack_rows,
    stacked_row,
    unpermute_tokens,
)
from moe_jax.mesh.roles import Roles
from moe_jax.schedules.contract import LayerSizes, ScheduleOptions, layout_of, register
from moe_jax.schedules.expert_group import cut, from_groups, join, member, to_groups
from moe_jax.schedules.expert_parallel import build_s1
from moe_jax.schedules.mp_tokens import from_replicated, to_replicated
from moe_jax.schedules.passes import passes_needed
from moe_jax.schedules.staged import Sent, StagedSchedule, finish_passes


@register("deepspeed")
def build_deepspeed(roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
    """Build the baseline: AG_ESP, A2A_EP, experts, AR_ESP, A2A_EP, ESP-split."""
    ep_size, esp_size, mp_size = (roles.size(axes) for axes in (roles.expert, roles.expert_shard, roles.model))
    if esp_size == mp_size == 1:
        return build_s1(roles, sizes, options)  # no token is on two devices: the two schedules are equal
    layout = layout_of(roles, sizes.bucket_rows(ep_size), options.transport)
    most = sizes.most_passes(layout.rows.far)
    local = max(1, min(ep_size, roles.config.devices_per_node // esp_size))
    make = functools.partial(make_exchange, roles.expert, ep_size, options.transport, local)
    exchanges = {"far": make(), "own": lambda blocks, sent, received: blocks}
    if options.transport != "ragged":
        exchanges["node"] = make(inside=roles.members_per_node)

    def gather(array):
        if esp_size == 1:
            return array[None]
        return lax.all_gather(cast_varying(array, roles.expert_shard), roles.expert_shard)

    def send(array, sent, received):
        """Exchange rows [Ns R, M] among members; those of a member's shards stand side by side in each piece."""
        blocks = ((kind, _side_by_side(blocks, esp_size)) for kind, blocks in cut(array, layout, esp_size))
        return join(exchanges[kind](part, sent, received).reshape(-1, 1, array.shape[-1]) for kind, part in blocks)

    def counted_once(done):
        """Undo the scaling of `deliver` and sum the shards' partial outputs: each expert's gradient counts once."""
        done = scale_gradient(done, 1.0 / mp_size)
        return lax.psum(done, roles.expert_shard) if esp_size > 1 else done

    def send_tokens(x, token_ids, gate, place):
        x = to_replicated(x, roles, options)
        with jax.named_scope("gate"):
            choice, stats = gate(x, token_ids)
        with jax.named_scope("route"):
            device, expert = destinations(place(stats), choice, sizes.groups)
            routing = route(choice, device, expert, ep_size, sizes.groups)
            needed = passes_needed(passes_of(routing, layout, sizes.groups, member(roles)), most, roles.all)
        with jax.named_scope("dispatch"):
            ready = wait_for(x, needed, device)  # replicas may come in a branch, before `device` is known
            everyone = gather(replicated_to_varying(ready, roles.model)).reshape(-1, x.shape[-1])  # [Ns t, M]
            weights = replicated_to_varying(choice.weights, roles.model)
        sorted_rows, group_sizes, way = deliver(everyone, routing, 0)
        later = (everyone, routing, needed, lax.stop_gradient(stats)) if most > 1 else None
        return Sent(sorted_rows, group_sizes, (weights, way, later)), stats, needed

    def deliver(everyone, routing, index):
        with jax.named_scope("dispatch"):
            parcel = pack(routing, index, layout, sizes.top_k, sizes.groups, member(roles))
            joint = _join(jax.tree.map(gather, parcel), layout)
            arriving = exchange_counts(joint.counts, roles.expert, ep_size)  # [D, Ns, G]
            sent, received = jnp.sum(joint.counts, (1, 2)), jnp.sum(arriving, (1, 2))
            arrived = scale_gradient(send(permute_tokens(everyone, joint), sent, received), float(mp_size))
            sorted_rows, group_sizes, grouping = to_groups(
                arrived, arriving.reshape(-1, sizes.groups), layout, member(roles)
            )
        return sorted_rows, group_sizes, (parcel, sent, received, grouping)

    def bring_home(done, weights, way):
        parcel, sent, received, grouping = way
        with jax.named_scope("combine"):
            home = send(counted_once(from_groups(done, grouping)), received, sent)
            shards = roles.expert_shard if esp_size > 1 else ()
            parts = (blocks.reshape((-1, esp_size) + blocks.shape[1:]) for _, blocks in cut(home, layout, esp_size))
            home = join(own_part(blocks, shards, dim=1)[:, 0] for blocks in parts)
            return unpermute_tokens(home, weights, parcel)

    def finish(done, context, experts):
        y = finish_passes(done, context, experts, deliver, bring_home, most)
        return from_replicated(varying_to_replicated(y, roles.model), roles, options)

    return StagedSchedule(send_tokens, finish)


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
