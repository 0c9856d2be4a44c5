"""`ring`: tokens are all-gathered to the experts, and results are reduce-scattered to their sources.

Inputs: the t tokens of this device's MP group. Outputs: the same tokens, transformed. Every device of an expert group
gets all tokens of the group, computes those that chose its experts, weights them, and sums them into their places. The
bytes do not depend on K or on skew, only the computed rows do. Under MP tokens are split first, as in `s1`.
Results and gradients are summed on the way in their own dtype: float32 would double bfloat16's bytes on every link, the
slow ones too. At most n = K Ns of a token's terms are not zero, so the sum is off by at most (n - 1) u of the sum of
their sizes, to first order in u = 2^-8, half a unit of bfloat16's last place.
Letters: docs/notation.md; P t tokens together, C rows computed in a pass.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.permute import permute_tokens, unpermute_tokens
from moe_jax.moe.routing import Choice, pack, passes_of, route
from moe_jax.moe.schedules.contract import LayerSizes, Routed, Schedule, ScheduleOptions, register
from moe_jax.moe.schedules.mp_tokens import from_parts, to_parts
from moe_jax.moe.schedules.passes import passes_needed
from moe_jax.moe.tables import destinations
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import wait_for
from moe_jax.parallel.replicated import own_part
from moe_jax.parallel.varying import cast_varying


@register("ring", one_piece=False)
class AllGather(Schedule):
    """The all-gather schedule; its drop groups are the N / N_MP tokens of one device."""

    def __init__(self, roles: Roles, sizes: LayerSizes, options: ScheduleOptions):
        self.roles, self.options = roles, options
        self.sizes = sizes.split(roles.size(roles.model))
        self.axes = roles.expert + roles.expert_shard
        self.size = roles.size(self.axes)
        self.rows = computed_rows(self.sizes, roles.size(roles.expert), self.size)
        self.passes = gathered_sizes(self.sizes, self.size).passes(self.rows)

    def enter(self, x, token_ids):
        return to_parts(x, self.roles, self.options), own_part(token_ids, self.roles.model)

    def route(self, tokens, choice, tables):
        groups = self.sizes.groups
        with jax.named_scope("dispatch"):
            device, group = destinations(tables, choice, groups)
            place = jnp.where(choice.keep_mask, device * groups + group, -1)
            ready = wait_for(tokens, device[0, 0], device)  # replicas may come in a branch, before `device` is known
            tokens, weights, place = self._gather(ready), self._gather(choice.weights), self._gather(place)
        with jax.named_scope("route"):
            here = (place >= 0) & (place // groups == lax.axis_index(self.roles.expert))
            chosen = Choice(expert_ids=place, weights=weights, keep_mask=here)
            routing = route(chosen, jnp.zeros_like(place), place % groups, 1, groups)
            needed = passes_needed(passes_of(routing, self.rows, groups), self.passes, self.roles.all)
        return Routed(tokens, weights, routing, needed)

    def run_pass(self, routed, index, experts):
        parcel = pack(routed.routing, index, self.rows, self.sizes.top_k, self.sizes.groups)
        with jax.named_scope("experts"):
            done = experts(permute_tokens(routed.tokens, parcel), parcel.counts[0])
        return unpermute_tokens(done, routed.weights, parcel)

    def leave(self, y):
        with jax.named_scope("combine"):
            return from_parts(self._scatter(y), self.roles, self.options)

    def _gather(self, array):
        if self.size == 1:
            return array
        return lax.all_gather(cast_varying(array, self.axes), self.axes, tiled=True)

    def _scatter(self, array):
        if self.size == 1:
            return array
        return lax.psum_scatter(cast_varying(array, self.axes), self.axes, scatter_dimension=0, tiled=True)


def gathered_sizes(sizes: LayerSizes, parts: int) -> LayerSizes:
    """Return the sizes of `parts` devices' tokens together, each of which gated its own."""
    capacity = None if sizes.capacity is None else parts * sizes.capacity
    return dataclasses.replace(sizes, tokens=parts * sizes.tokens, capacity=capacity, planned_rows=None)


def computed_rows(sizes: LayerSizes, ep_size: int, parts: int) -> int:
    """Return C: what one EP member computes in a pass of the tokens of `parts` devices."""
    return gathered_sizes(sizes, parts).even_rows(ep_size)
