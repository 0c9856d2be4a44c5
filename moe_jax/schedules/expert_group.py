"""EP&ESP-AlltoAll: one exchange over all devices that together hold one copy of every expert.

Enters: the rows of this device's tokens, one bucket per EP member. *Dump*: each row goes to all shards of its expert.
Each device computes all rows that arrive with its part of the hidden dim. On the way back each source gets the partial
outputs of all shards, and sums them. Source: Parm, section III-C.
Letters: D EP members, S shards of an expert (N_ESP), P = D S devices, c rows of a bucket, G groups, M model dim.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from moe_jax.collectives.exchange import Exchange, exchange_counts, make_exchange
from moe_jax.dispatch import groups_to_rows, regroup, rows_to_groups
from moe_jax.mesh.roles import Roles


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """The product of the EP and ESP groups, and how rows travel in it.

    Attributes:
      axes: mesh axes, EP before ESP.
      members: D; shards: S.
      exchange: a transport over `axes`.
    """

    axes: tuple[str, ...]
    members: int
    shards: int
    exchange: Exchange

    @property
    def size(self) -> int:
        return self.members * self.shards

    def dump(self, array):
        """Return [D S, ...] from [D, ...]: every shard of a member gets the same."""
        if self.shards == 1:
            return array
        return repeat_for_shards(array, self.shards).reshape((self.size,) + array.shape[1:])

    def send(self, rows, counts, arriving):
        """Send rows [D c, M] to their experts: [P c, M], source by source.

        Args:
          rows: this device's buckets; counts: int32 [D, G]; arriving: what `send_counts` returned.
        """
        blocks = self.dump(rows.reshape(self.members, -1, rows.shape[-1]))
        out = self.exchange(blocks, jnp.sum(self.dump(counts), axis=1), jnp.sum(arriving, axis=1))
        return out.reshape(-1, rows.shape[-1])

    def send_counts(self, counts):
        """Return int32 [P, G], the rows that arrive from each source per group; counts int32 [D, G]."""
        return exchange_counts(self.dump(counts), self.axes, self.size)

    def send_back(self, rows, counts, arriving):
        """Send computed rows [P c, M] home: [D c, M], the sum over the shards of each expert."""
        blocks = rows.reshape(self.size, -1, rows.shape[-1])
        out = self.exchange(blocks, jnp.sum(arriving, axis=1), jnp.sum(self.dump(counts), axis=1))
        return self.sum_shards(out).reshape(-1, rows.shape[-1])

    def sum_shards(self, blocks):
        """Sum partial outputs over the shards: [D S, ...] -> [D, ...]."""
        if self.shards == 1:
            return blocks
        wide = jnp.promote_types(blocks.dtype, jnp.float32)
        split = blocks.reshape((self.members, self.shards) + blocks.shape[1:])
        parts = [split[:, shard].astype(wide) for shard in range(self.shards)]
        return sum(parts[1:], parts[0]).astype(blocks.dtype)


def build_expert_group(roles: Roles, transport: str = "all_to_all") -> ExpertGroup:
    """Return the group of this mesh; neighbours in it that share a node are the mesh's."""
    axes = roles.expert + roles.expert_shard
    members, shards = roles.size(roles.expert), roles.size(roles.expert_shard)
    local = min(members * shards, roles.config.devices_per_node)
    return ExpertGroup(axes, members, shards, make_exchange(axes, members * shards, transport, local))


def repeat_for_shards(array, shards: int):
    """Return [n, S, ...] from [n, ...]: the same for every shard. The gradient is summed in at least float32."""
    wide = jnp.promote_types(array.dtype, jnp.float32)
    if array.dtype == wide or not jnp.issubdtype(array.dtype, jnp.floating):
        # stacked, so that the gradient is a chain of additions: XLA:CPU sums over a middle dim one number at a time
        return jnp.stack([array] * shards, axis=1)
    return _repeat(shards, array)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeat(shards, array):
    return jnp.stack([array] * shards, axis=1)


def _sum_repeats(shards, _, d):
    parts = [d[:, shard].astype(jnp.float32) for shard in range(shards)]
    return (sum(parts[1:], parts[0]).astype(d.dtype),)


_repeat.defvjp(lambda shards, array: (_repeat(shards, array), None), _sum_repeats)


def compute(experts, received, counts):
    """Apply the experts to rows as they arrived; returns them in the same places.

    Args:
      experts: function (rows [R, M] in compact group order, group_sizes int32 [G]) -> [R, M].
      received: [sources c, M], each source's bucket sorted by group.
      counts: int32 [sources, G].
    """
    with jax.named_scope("experts"):
        rows, sizes, grouping = to_groups(received, counts)
        return from_groups(experts(rows, sizes), grouping)


def to_groups(received, counts):
    """Bring rows that arrived into group order: (rows [R, M], group_sizes int32 [G], how to go back)."""
    if counts.shape[0] == 1:  # one bucket, already in group order
        return received, counts[0], None
    grouping = regroup(counts, received.shape[0] // counts.shape[0])
    return rows_to_groups(received, grouping), grouping.group_sizes, grouping


def from_groups(done, grouping):
    """Undo `to_groups`."""
    return done if grouping is None else groups_to_rows(done, grouping)
