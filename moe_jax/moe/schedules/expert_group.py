"""How rows travel between the devices that together hold every expert once, D members of Ns shards (EP x ESP).

One bucket per EP member enters, and each row goes to all shards of its expert; on the way back each source sums their
partial outputs. Source: Parm, section III-C. 'coordinated', where the devices of an MP group have their part of equal
tokens: rows travel among devices of equal place in these groups and are gathered over the shards, so none crosses a
slow link once per shard. Source: DeepSpeed-MoE (Rajbhandari et al. 2022), section 5.3.
Letters: docs/notation.md; P = D Ns.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.routing import passes_of, regroup, route
from moe_jax.moe.schedules.contract import Routed, Schedule
from moe_jax.moe.schedules.passes import passes_needed
from moe_jax.moe.tables import Tables, destinations
from moe_jax.parallel.bucket_rows import BucketLayout
from moe_jax.parallel.exchange import exchange_counts, make_exchange
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.varying import cast_varying


class ExpertGroup:
    """The product of the EP and ESP groups of a mesh, and how rows travel in it by a transport.

    Attributes:
      axes: mesh axes, EP before ESP.
      ep_size: D; esp_size: Ns.
      exchanges: {piece: a transport among all devices, those of a node, those of an EP member}; under 'coordinated'
        among the devices of equal place in these.
    """

    def __init__(self, roles: Roles, transport: str = "all_to_all"):
        self.axes, self.shard_axes = roles.expert + roles.expert_shard, roles.expert_shard
        self.ep_size, self.esp_size = roles.size(roles.expert), roles.size(roles.expert_shard)
        self.coordinated = transport == "coordinated"
        if not self.coordinated:
            size = self.ep_size * self.esp_size
            make = functools.partial(
                make_exchange, self.axes, size, transport, min(size, roles.config.devices_per_node)
            )
            node, own = make(inside=roles.members_per_node * self.esp_size), make(inside=self.esp_size)
            self.exchanges = {"far": make(), "node": node, "own": own}
            return
        in_group = tuple(axis for axis in roles.expert if axis in roles.model)
        across = tuple(axis for axis in roles.expert if axis not in roles.model)
        inner, outer = roles.size(in_group), roles.size(across)

        def by_place(blocks):  # [D, ...] -> [D, ...]: across MP groups among equal places, then inside the MP group
            x = blocks.reshape((outer, inner) + blocks.shape[1:])
            for axes, size, dim in ((across, outer, 0), (in_group, inner, 1)):
                if size > 1:
                    x = lax.all_to_all(cast_varying(x, axes), axes, split_axis=dim, concat_axis=dim, tiled=True)
            return x.reshape(blocks.shape)

        inside = roles.members_per_node
        node = make_exchange(roles.expert, self.ep_size, "all_to_all", 1, inside=inside)
        node = by_place if inside >= self.ep_size else node
        self.exchanges = {"far": by_place, "node": node, "own": lambda blocks: blocks}

    def send(self, rows, layout: BucketLayout):
        """Send rows [R, M] of this device's buckets to their experts: [Ns R, M], piece by piece, then by source."""
        return join(self.send_piece(kind, blocks) for kind, blocks in cut(rows, layout))

    def send_piece(self, kind: str, blocks):
        """Send the blocks of one piece to all shards of their destinations: [n, ...] -> [n Ns, ...]."""
        exchange = self.exchanges[kind]
        if self.esp_size == 1:
            return exchange(blocks)
        if self.coordinated:  # sources (member, shard) in order
            every = gather_shards(cast_varying(exchange(blocks), self.shard_axes), self.shard_axes, 1)
            return every.reshape((-1,) + blocks.shape[1:])
        return exchange(repeat_for_shards(blocks, self.esp_size).reshape((-1,) + blocks.shape[1:]))

    def send_counts(self, counts):
        """Return int32 [P, G], the rows that arrive from each source per group; counts int32 [D, G]."""
        if self.coordinated:
            return self.send_piece("far", counts)
        if self.esp_size > 1:
            counts = repeat_for_shards(counts, self.esp_size).reshape(-1, counts.shape[1])
        return exchange_counts(counts, self.axes, self.ep_size * self.esp_size)

    def send_back(self, rows, layout: BucketLayout):
        """Send computed rows [Ns R, M] to their sources: [R, M], the sum over the shards of each expert."""
        return join(self.send_piece_back(kind, blocks) for kind, blocks in cut(rows, layout, self.esp_size))

    def send_piece_back(self, kind: str, blocks):
        """Send computed blocks [n Ns, ...] of one piece to their sources, and sum over the shards: [n, ...]."""
        exchange = self.exchanges[kind]
        if self.esp_size == 1:
            return exchange(blocks)
        if self.coordinated:
            split = blocks.reshape((-1, self.esp_size) + blocks.shape[1:])
            return exchange(scatter_sum(split, self.shard_axes, 1))
        acc_dtype = jnp.promote_types(blocks.dtype, jnp.float32)
        split = exchange(blocks).reshape((-1, self.esp_size) + blocks.shape[1:])
        parts = [split[:, shard].astype(acc_dtype) for shard in range(self.esp_size)]
        return sum(parts[1:], parts[0]).astype(blocks.dtype)


def route_choices(schedule: Schedule, tokens, choice, tables: Tables, me) -> Routed:
    """Return where the choices of these tokens go, and how many passes that takes; me: int32 [], the EP member."""
    roles, groups = schedule.roles, schedule.sizes.groups
    with jax.named_scope("route"):
        device, expert = destinations(tables, choice, groups)
        routing = route(choice, device, expert, roles.size(roles.expert), groups)
        needed = passes_needed(passes_of(routing, schedule.layout, groups, me), schedule)
    return Routed(tokens, choice.weights, routing, needed)


def grouping_of(counts, layout: BucketLayout, me):
    """Return (group_sizes int32 [G], how arriving rows form groups: a `Grouping`, None where they do already).

    Args:
      counts: int32 [P, G], of each source; layout: that rows are packed by; me: int32 [], this device's EP member.
    """
    if counts.shape[0] == 1:  # one bucket
        return counts[0], None
    grouping = regroup(counts, layout, me)
    return grouping.group_sizes, grouping


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
