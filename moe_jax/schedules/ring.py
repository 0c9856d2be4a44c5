"""`ring`: tokens are all-gathered to the experts, and results are reduce-scattered to their sources.

Inputs: the t tokens of this device's MP group. Outputs: the same tokens, transformed. Every device of an expert group
gets all tokens of the group, computes those that chose its experts, weights them, and sums them into their places. The
bytes do not depend on K or on skew, only the computed rows do. Under MP tokens are split first, as in `s1`.
Letters: docs/notation.md; P t tokens together, C rows computed in a pass.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.ordering import wait_for
from moe_jax.collectives.replicated import own_part
from moe_jax.collectives.varying import cast_varying
from moe_jax.dispatch import Choice, destinations, pack, passes_of, permute_tokens, route, unpermute_tokens
from moe_jax.mesh.roles import Roles
from moe_jax.schedules.contract import LayerSizes, ScheduleOptions, register
from moe_jax.schedules.mp_tokens import from_parts, to_parts
from moe_jax.schedules.passes import passes_needed, run_passes


@register("ring")
def build_ring(roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
    """Build the all-gather schedule; its drop groups are the N / N_MP tokens of one device."""
    sizes = sizes.split(roles.size(roles.model))
    axes = roles.expert + roles.expert_shard
    ep_size, size = roles.size(roles.expert), roles.size(axes)
    every = gathered_sizes(sizes, size)
    rows = computed_rows(sizes, ep_size, size)
    most = every.most_passes(rows)

    def gather(array):
        return array if size == 1 else lax.all_gather(cast_varying(array, axes), axes, tiled=True)

    def scatter(array):
        if size == 1:
            return array
        return lax.psum_scatter(cast_varying(array, axes), axes, scatter_dimension=0, tiled=True)

    def schedule(x, token_ids, gate, placed):
        mine, ids = to_parts(x, roles, options), own_part(token_ids, roles.model)
        with jax.named_scope("gate"):
            choice, stats = gate(mine, ids)
            experts, tables = placed(stats)
        with jax.named_scope("dispatch"):
            device, group = destinations(tables, choice, sizes.groups)
            place = jnp.where(choice.keep_mask, device * sizes.groups + group, -1)
            ready = wait_for(mine, device[0, 0], device)  # replicas may come in a branch, before `device` is known
            tokens, weights, place = gather(ready), gather(choice.weights), gather(place)
        with jax.named_scope("route"):
            me = lax.axis_index(roles.expert)
            here = (place >= 0) & (place // sizes.groups == me)
            chosen = Choice(expert_ids=place, weights=weights, keep_mask=here)
            routing = route(chosen, jnp.zeros_like(place), place % sizes.groups, 1, sizes.groups)
            needed = passes_needed(passes_of(routing, rows, sizes.groups), most, roles.all)

        def one_pass(index):
            parcel = pack(routing, index, rows, sizes.top_k, sizes.groups)
            with jax.named_scope("experts"):
                done = experts(permute_tokens(tokens, parcel), parcel.counts[0])
            return unpermute_tokens(done, weights, parcel)

        y = run_passes(one_pass, needed, most, before=stats)
        with jax.named_scope("combine"):
            return from_parts(scatter(y), roles, options), stats, needed

    return schedule


def gathered_sizes(sizes: LayerSizes, parts: int) -> LayerSizes:
    """Return the sizes of `parts` devices' tokens together, each of which gated its own."""
    capacity = None if sizes.capacity is None else parts * sizes.capacity
    return dataclasses.replace(sizes, tokens=parts * sizes.tokens, capacity=capacity, planned_rows=None)


def computed_rows(sizes: LayerSizes, ep_size: int, parts: int) -> int:
    """Return C: what one EP member computes in a pass of the tokens of `parts` devices."""
    return gathered_sizes(sizes, parts).even_rows(ep_size)
