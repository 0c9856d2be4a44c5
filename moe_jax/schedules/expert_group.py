"""EP&ESP-AlltoAll: one exchange over all devices that together hold every expert once.

Inputs: the rows of this device's tokens, one bucket per EP member. *Dump*: each row goes to all shards of its expert.
Each device computes all rows that arrive with its part of the hidden dim. On the way back each source gets the partial
outputs of all shards, and sums them. Source: Parm, section III-C.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from moe_jax.collectives.exchange import Exchange, exchange_counts, make_exchange
from moe_jax.dispatch import permute_rows, regroup, unpermute_rows
from moe_jax.mesh.roles import Roles


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """The product of the EP and ESP groups, and how rows travel in it.

    Attributes:
      axes: mesh axes, EP before ESP.
      ep_size: D; esp_size: Ns.
      exchange: a transport over `axes`.
    """

    axes: tuple[str, ...]
    ep_size: int
    esp_size: int
    exchange: Exchange

    @property
    def size(self) -> int:
        return self.ep_size * self.esp_size

    def dump(self, array):
        """Return [D Ns, ...] from [D, ...]: every shard of a member gets the same."""
        if self.esp_size == 1:
            return array
        return repeat_for_shards(array, self.esp_size).reshape((self.size,) + array.shape[1:])

    def send(self, rows, counts, arriving):
        """Send rows [D c, M] to their experts: [P c, M], source by source.

        Args:
          rows: this device's buckets; counts: int32 [D, G]; arriving: what `send_counts` returned.
        """
        blocks = self.dump(rows.reshape(self.ep_size, -1, rows.shape[-1]))
        out = self.exchange(blocks, jnp.sum(self.dump(counts), axis=1), jnp.sum(arriving, axis=1))
        return out.reshape(-1, rows.shape[-1])

    def send_counts(self, counts):
        """Return int32 [P, G], the rows that arrive from each source per group; counts int32 [D, G]."""
        return exchange_counts(self.dump(counts), self.axes, self.size)

    def send_back(self, rows, counts, arriving):
        """Send computed rows [P c, M] to their sources: [D c, M], the sum over the shards of each expert."""
        blocks = rows.reshape(self.size, -1, rows.shape[-1])
        out = self.exchange(blocks, jnp.sum(arriving, axis=1), jnp.sum(self.dump(counts), axis=1))
        return self.sum_shards(out).reshape(-1, rows.shape[-1])

    def sum_shards(self, blocks):
        """Sum partial outputs over the shards: [D Ns, ...] -> [D, ...]."""
        if self.esp_size == 1:
            return blocks
        acc_dtype = jnp.promote_types(blocks.dtype, jnp.float32)
        split = blocks.reshape((self.ep_size, self.esp_size) + blocks.shape[1:])
        parts = [split[:, shard].astype(acc_dtype) for shard in range(self.esp_size)]
        return sum(parts[1:], parts[0]).astype(blocks.dtype)


def build_expert_group(roles: Roles, transport: str = "all_to_all") -> ExpertGroup:
    """Return the group of this mesh, whose nodes are those of the mesh."""
    axes = roles.expert + roles.expert_shard
    ep_size, esp_size = roles.size(roles.expert), roles.size(roles.expert_shard)
    local = min(ep_size * esp_size, roles.config.devices_per_node)
    return ExpertGroup(axes, ep_size, esp_size, make_exchange(axes, ep_size * esp_size, transport, local))


def repeat_for_shards(array, esp_size: int):
    """Return [n, Ns, ...] from [n, ...]: the same for every shard. The gradient is summed in at least float32."""
    acc_dtype = jnp.promote_types(array.dtype, jnp.float32)
    if array.dtype == acc_dtype or not jnp.issubdtype(array.dtype, jnp.floating):
        # Stacked, so that the gradient is a chain of additions: XLA:CPU sums over a middle dim one number at a time.
        return jnp.stack([array] * esp_size, axis=1)
    return _repeat(esp_size, array)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeat(esp_size, array):
    return jnp.stack([array] * esp_size, axis=1)


def _sum_repeats(esp_size, _, d):
    parts = [d[:, shard].astype(jnp.float32) for shard in range(esp_size)]
    return (sum(parts[1:], parts[0]).astype(d.dtype),)


_repeat.defvjp(lambda esp_size, array: (_repeat(esp_size, array), None), _sum_repeats)


def compute(experts, received, counts):
    """Apply the experts to rows as they arrived; return the results in the same places.

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
    return permute_rows(received, grouping), grouping.group_sizes, grouping


def from_groups(done, grouping):
    """Undo `to_groups`."""
    return done if grouping is None else unpermute_rows(done, grouping)
