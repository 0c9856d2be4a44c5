"""`ring`: tokens are all-gathered to the experts, and results are reduce-scattered to their sources.

Every device of an expert group gets all tokens of the group, computes those that chose its experts, weights them, and
sums them into their places; under MP tokens are split first, as in `s1`. The bytes do not depend on K or on skew.
Results and gradients are summed on the way in their own dtype: with bfloat16 off by at most (K Ns - 1) 2^-8 of the sum
of their sizes. Letters: docs/notation.md; P t tokens together, C rows computed in a pass.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.permute import permute_tokens, unpermute_tokens
from moe_jax.moe.routing import Choice, destinations, pack, passes_of, route
from moe_jax.moe.schedule import LayerSizes, Routed, Schedule, register
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.static_sizes import bucket_layout
from moe_jax.parallel.varying import cast_varying


@register("ring")
class AllGather(Schedule):
    """The all-gather schedule; its drop groups are the N / N_MP tokens of one device.

    Attributes:
      computed: where the rows stand that a device computes in a pass.
    """

    def __init__(self, roles: Roles, sizes: LayerSizes):
        super().__init__(roles, sizes)
        self.axes = roles.expert + roles.expert_shard
        self.size = roles.size(self.axes)
        # what one EP member computes in a pass: of the tokens of all devices, each of which gated its own
        own = self.sizes.capacity
        together = dataclasses.replace(
            self.sizes,
            tokens=self.size * self.sizes.tokens,
            capacity=None if own is None else self.size * own,
            planned_rows=None,
        )
        self.computed = bucket_layout(together.even_rows(roles.size(roles.expert)), 1)
        self.most_passes = together.most_passes(self.computed.rows.far)

    def route(self, tokens, choice, tables):
        groups = self.sizes.groups
        with jax.named_scope("dispatch"):
            device, group = destinations(tables, choice, groups)
            place = jnp.where(choice.keep_mask, device * groups + group, -1)
            weights = choice.weights
            if self.size > 1:
                tokens, weights, place = (
                    lax.all_gather(cast_varying(array, self.axes), self.axes, tiled=True)
                    for array in (tokens, weights, place)
                )
        with jax.named_scope("route"):
            here = (place >= 0) & (place // groups == lax.axis_index(self.roles.expert))
            chosen = Choice(expert_ids=place, weights=weights, keep_mask=here)
            routing = route(chosen, jnp.zeros_like(place), place % groups, 1, groups)
            needed = self.passes_needed(passes_of(routing, self.computed, groups))
        return Routed(tokens, weights, routing, needed)

    def run_pass(self, routed, index, experts):
        parcel = pack(routed.routing, index, self.computed, self.sizes.config.top_k, self.sizes.groups)
        with jax.named_scope("experts"):
            rows = permute_tokens(routed.tokens, parcel)
        return unpermute_tokens(experts(rows, parcel.counts[0]), routed.weights, parcel)

    def leave(self, y):
        with jax.named_scope("combine"):
            if self.size > 1:
                y = lax.psum_scatter(cast_varying(y, self.axes), self.axes, scatter_dimension=0, tiled=True)
        return super().leave(y)
