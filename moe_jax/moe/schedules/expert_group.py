"""EP&ESP-AlltoAll: one exchange over all devices that together hold every expert once.

Inputs: the rows of this device's tokens, one bucket per EP member. *Dump*: each row goes to all shards of its expert.
Where buckets differ in length, each of their pieces
(`parallel/bucket_rows.py`) travels by itself: among all, inside the node, or inside the ESP group.
Each device computes all rows that arrive, brought into group order, with its part of the hidden dim. On the way back
each source gets the partial outputs of all shards, and sums them. Source: Parm, section III-C.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.permute import permute_rows, unpermute_rows
from moe_jax.moe.routing import regroup
from moe_jax.moe.schedules.contract import StagedSchedule
from moe_jax.parallel.bucket_rows import BucketLayout
from moe_jax.parallel.exchange import Exchange, exchange_counts, make_exchange
from moe_jax.parallel.mesh import Roles


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertGroup:
    """The product of the EP and ESP groups, and how rows travel in it.

    Attributes:
      axes: mesh axes, EP before ESP.
      ep_size: D; esp_size: Ns.
      exchanges: {piece: a transport over `axes` of all devices, of those of a node, of those of an EP member}.
    """

    axes: tuple[str, ...]
    ep_size: int
    esp_size: int
    exchanges: dict[str, Exchange]

    @property
    def size(self) -> int:
        return self.ep_size * self.esp_size

    def dump(self, array):
        """Return [n Ns, ...] from [n, ...]: every shard of a member gets the same."""
        if self.esp_size == 1:
            return array
        return repeat_for_shards(array, self.esp_size).reshape((-1,) + array.shape[1:])

    def send(self, rows, layout: BucketLayout):
        """Send rows [R, M] of this device's buckets to their experts: [Ns R, M], piece by piece, then by source."""
        return join(self.exchanges[kind](self.dump(blocks)) for kind, blocks in cut(rows, layout))

    def send_counts(self, counts):
        """Return int32 [P, G], the rows that arrive from each source per group; counts int32 [D, G]."""
        return exchange_counts(self.dump(counts), self.axes, self.size)

    def send_back(self, rows, layout: BucketLayout):
        """Send computed rows [Ns R, M] to their sources: [R, M], the sum over the shards of each expert."""
        pieces = cut(rows, layout, self.esp_size)
        return join(self.sum_shards(self.exchanges[kind](blocks)) for kind, blocks in pieces)

    def sum_shards(self, blocks):
        """Sum partial outputs over the shards: [n Ns, ...] -> [n, ...]."""
        if self.esp_size == 1:
            return blocks
        acc_dtype = jnp.promote_types(blocks.dtype, jnp.float32)
        split = blocks.reshape((-1, self.esp_size) + blocks.shape[1:])
        parts = [split[:, shard].astype(acc_dtype) for shard in range(self.esp_size)]
        return sum(parts[1:], parts[0]).astype(blocks.dtype)


def build_expert_group(roles: Roles, transport: str = "all_to_all") -> ExpertGroup:
    """Return the group of this mesh, whose nodes are those of the mesh."""
    axes = roles.expert + roles.expert_shard
    ep_size, esp_size = roles.size(roles.expert), roles.size(roles.expert_shard)
    local = min(ep_size * esp_size, roles.config.devices_per_node)
    make = functools.partial(make_exchange, axes, ep_size * esp_size, transport, local)
    exchanges = {"far": make(), "node": make(inside=roles.members_per_node * esp_size), "own": make(inside=esp_size)}
    return ExpertGroup(axes, ep_size, esp_size, exchanges)


def cut(rows, layout: BucketLayout, each: int = 1):
    """Yield (piece, its rows [n each, c, ...]) of a buffer [R each, ...] that holds n buckets of `each` devices."""
    if len(layout.pieces) == 1:
        yield "far", rows.reshape((layout.members * each, -1) + rows.shape[1:])
        return
    for piece in layout.pieces:
        part = lax.slice_in_dim(rows, piece.offset * each, (piece.offset + piece.rows) * each)
        yield piece.kind, part.reshape((piece.count * each, piece.width) + rows.shape[1:])


def join(pieces):
    """Return pieces [n, c, ...] as one buffer [R, ...]; the inverse of `cut`."""
    flat = [blocks.reshape((-1,) + blocks.shape[2:]) for blocks in pieces]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def member(roles: Roles):
    """Return int32 [], this device's EP member; inside `shard_map`."""
    return lax.axis_index(roles.expert) if roles.size(roles.expert) > 1 else jnp.int32(0)


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


def gather_shards(array, axes: tuple[str, ...], dim: int):
    """Return every shard's array, stacked along a new `dim`; the gradient is `scatter_sum` of the cotangent."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return lax.all_gather(array, axes, axis=dim)
    return _gather_shards(array, axes, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_shards(array, axes, dim):
    return lax.all_gather(array, axes, axis=dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter_sum(array, axes: tuple[str, ...], dim: int):
    """Return this shard's entry along `dim` of the sum over the shards.

    It is carried in at least float32, at twice the bytes of bfloat16: shards of an expert are neighbours, and no slow
    link is crossed. The gradient is gathered in the dtype of the array.
    """
    acc_dtype = jnp.promote_types(array.dtype, jnp.float32)
    return lax.psum_scatter(array.astype(acc_dtype), axes, scatter_dimension=dim).astype(array.dtype)


_gather_shards.defvjp(
    lambda array, axes, dim: (_gather_shards(array, axes, dim), None),
    lambda axes, dim, _, d: (scatter_sum(d, axes, dim),),
)
scatter_sum.defvjp(
    lambda array, axes, dim: (scatter_sum(array, axes, dim), None),
    lambda axes, dim, _, d: (_gather_shards(d, axes, dim),),
)


def grouping_of(counts, layout: BucketLayout, me):
    """Return (group_sizes int32 [G], how arriving rows form groups: a `Grouping`, None where they do already).

    Args:
      counts: int32 [P, G], of each source; layout: that rows are packed by; me: int32 [], this device's EP member.
    """
    if counts.shape[0] == 1:  # one bucket
        return counts[0], None
    grouping = regroup(counts, layout, me)
    return grouping.group_sizes, grouping


class GroupedSchedule(StagedSchedule):
    """A schedule that brings received rows into group order; its metadata end with what `grouping_of` returned."""

    def arrive(self, received, metadata):
        group_sizes, grouping = metadata[-1]
        with jax.named_scope("dispatch"):
            return received if grouping is None else permute_rows(received, grouping), group_sizes

    def depart(self, done, metadata):
        grouping = metadata[-1][1]
        with jax.named_scope("combine"):
            return done if grouping is None else unpermute_rows(done, grouping)
