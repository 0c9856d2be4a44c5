"""`deepspeed`: DeepSpeed-MoE's schedule as Parm describes it, redundant work included.

Every device of the MP group sends all t tokens, so experts compute each of them N_MP times, and an expert's gradient
is divided by N_MP; every device of an ESP group gathers the tokens of all its members, and what the shards computed is
summed over the group before each takes its own part. Without MP and ESP it is `s1`. Source: Parm, figure 3a.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.layer import ExpertParallel
from moe_jax.moe.permute import permute_tokens
from moe_jax.moe.routing import Parcel, pack, regroup
from moe_jax.moe.schedule import LayerSizes, Sent, register
from moe_jax.parallel.exchange import ExpertGroup, by_piece, gather_shards
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.varying import (
    cast_varying,
    own_part,
    replicated_to_varying,
    scale_gradient,
    varying_to_replicated,
)


@register("deepspeed")
class DeepSpeed(ExpertParallel):
    """AG_ESP, A2A_EP, experts, AR_ESP, A2A_EP, ESP-split.

    What travels are the rows of all shards' buckets, those of a member's shards side by side in each piece.
    """

    gates_group = True

    def __init__(self, roles: Roles, sizes: LayerSizes):
        super().__init__(roles, sizes, ExpertGroup(roles, sizes.config.transport, shards=False))
        self.esp_size, self.mp_size = roles.size(roles.expert_shard), roles.size(roles.model)
        together = self.layout.rows.each(lambda rows: self.esp_size * rows)
        self.travelling = dataclasses.replace(self.layout, rows=together)

    def route(self, tokens, choice, tables):
        routed = super().route(tokens, choice, tables)
        with jax.named_scope("dispatch"):
            everyone = self._gather(replicated_to_varying(tokens, self.roles.model))
            everyone = everyone.reshape(-1, tokens.shape[-1])  # [Ns t, M]
            weights = replicated_to_varying(choice.weights, self.roles.model)
        return dataclasses.replace(routed, tokens=everyone, weights=weights)

    def pack(self, routed, index):
        sizes, layout, me = self.sizes, self.layout, self.member()
        with jax.named_scope("dispatch"):
            parcel = pack(routed.routing, index, layout, sizes.config.top_k, sizes.groups, me)
            joint = self.of_all_shards(jax.tree.map(self._gather, parcel))
            arriving = self.group.send_counts(joint.counts)  # [D, Ns, G]
            grouping = regroup(arriving.reshape(-1, sizes.groups), layout, me)
            rows = scale_gradient(permute_tokens(routed.tokens, joint), float(self.mp_size))
            return rows, Sent(parcel, grouping)

    def of_all_shards(self, every: Parcel) -> Parcel:
        """Return the parcels [Ns, ...] of all shards as one; in each piece of the layout (destination, shard, row)."""
        layout, shards = self.layout, self.esp_size
        shard = jnp.arange(shards, dtype=jnp.int32)[:, None]
        choices, of_row, row = every.row_of_choice[0].size, [], None
        chosen = jnp.where(every.choice_of_row < choices, every.choice_of_row + shard * choices, shards * choices)
        for piece in layout.pieces:
            part = chosen[:, piece.offset : piece.offset + piece.rows].reshape(shards, piece.count, piece.width)
            of_row.append(jnp.swapaxes(part, 0, 1).reshape(-1))
            at = every.row_of_choice - piece.offset
            here = at // piece.width * shards + shard[:, :, None]
            here = here * piece.width + at % piece.width + piece.offset * shards
            row = here if row is None else jnp.where(at >= 0, here, row)
        row = jnp.where(every.row_of_choice < layout.total, row, shards * layout.total)
        return Parcel(
            choice_of_row=of_row[0] if len(of_row) == 1 else jnp.concatenate(of_row),
            row_of_choice=row.reshape(-1, row.shape[-1]),
            counts=jnp.swapaxes(every.counts, 0, 1),
        )

    def send_back(self, rows, sent):
        with jax.named_scope("combine"):
            rows = scale_gradient(rows, 1.0 / self.mp_size)  # each expert's gradient counts once
            if self.esp_size == 1:
                return self.group.send_back(rows, self.travelling)
            acc_dtype = jnp.promote_types(rows.dtype, jnp.float32)
            rows = lax.psum(rows.astype(acc_dtype), self.roles.expert_shard).astype(rows.dtype)

            def own(_, blocks):
                blocks = blocks.reshape((-1, self.esp_size) + blocks.shape[1:])
                return own_part(blocks, self.roles.expert_shard, dim=1)[:, 0]

            return by_piece(own, self.group.send_back(rows, self.travelling), self.layout, self.esp_size)

    def leave(self, y):
        return super().leave(varying_to_replicated(y, self.roles.model))

    def _gather(self, array):
        """Return [Ns, ...], what each shard of this device's ESP group has."""
        if self.esp_size == 1:
            return array[None]
        return gather_shards(cast_varying(array, self.roles.expert_shard), self.roles.expert_shard, 0)
