"""The all-to-all family: ways to hand block p of an array to device p of a group, and rows to their experts.

Inputs: x [P, c, ...], block p for device p, c rows each. Outputs: [P, c, ...], block p from device p. It is its own
transpose, and every transport defines it so, so forward and backward move the same bytes in the same way.

    all_to_all   one collective
    two_level    first within the node, then across nodes: fewer and larger messages on the slow links
    coordinated  among devices of equal place in their groups, then inside them; no exchange of one group but of EP and
                 ESP groups together, so `ExpertGroup` builds it: rows travel among devices of equal place in the groups
                 and are gathered over the shards, so none crosses a slow link once per shard (DeepSpeed-MoE, section
                 5.3)

`ExpertGroup` moves rows between the devices that together hold every expert once, D members of Ns shards (EP x ESP):
one bucket per EP member enters, and each row goes to all shards of its expert; on the way back each source sums their
partial outputs. Source: Parm, section III-C.

Letters: docs/notation.md; here P devices of the group at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.static_sizes import BucketLayout
from moe_jax.parallel.varying import cast_varying, with_gradient

TRANSPORTS = ("all_to_all", "two_level", "coordinated")

Exchange = Callable[[jax.Array], jax.Array]


def make_exchange(axes: tuple[str, ...], size: int, transport: str, local: int, inside: int | None = None) -> Exchange:
    """Return exchange(x [P, c, ...]) -> [P, c, ...].

    Args:
      axes: mesh axes of the group, slowest first.
      size: P.
      transport: one of `TRANSPORTS`.
      local: Ll, members of the group that share a node; neighbours in the group's order.
      inside: exchange among so many neighbours, which are P then, each for themselves.

    Raises:
      UserError: a transport that is no exchange of one group, or a group that does not fill whole nodes.
    """
    if transport == "coordinated":
        raise UserError(
            "MoEConfig.transport ('coordinated') is a way of the schedules s1 and s2; set MoEConfig.schedule = 's1', "
            "or another transport"
        )
    if transport == "two_level" and size % local:
        raise UserError(
            f"MoEConfig.transport ('two_level') needs groups that fill whole nodes; {size} devices exchange rows and "
            f"{local} share a node; set MeshConfig.devices_per_node to a divisor of {size}"
        )
    inner = size if inside is None else min(inside, size)
    if inner == 1:
        return lambda x: x
    all_to_all = functools.partial(lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    neighbours = [list(range(first, first + inner)) for first in range(0, size, inner)] if inner < size else None
    nodes, in_node = size // local, [list(range(first, first + local)) for first in range(0, size, local)]

    def move(x):
        if transport != "two_level" or inner < size:
            return all_to_all(x, axis_index_groups=neighbours)
        # within the node to the member in the target's place, then once between the nodes
        here = jnp.swapaxes(x.reshape((nodes, local) + x.shape[1:]), 0, 1)  # [Ll target place, Nn target node, ...]
        if local > 1:  # two collectives, each with one start-up: rounds of messages would have one each
            here = all_to_all(here, axis_index_groups=in_node)  # [Ll source place, Nn target node, ...]
        there = jnp.swapaxes(here, 0, 1)
        if nodes > 1:
            there = all_to_all(there, axis_index_groups=list(map(list, zip(*in_node, strict=True))))
        return there.reshape(x.shape)  # [Nn source node, Ll source place, ...]

    symmetric = with_gradient(move)(move)
    return lambda x: symmetric(cast_varying(x, axes))


def shift_pairs(outer: int, inner: int, outer_step: int, inner_step: int) -> list[tuple[int, int]]:
    """Return (source, target) of all devices in a group [outer, inner], each dim rotated by its step."""
    return [
        (o * inner + i, (o + outer_step) % outer * inner + (i + inner_step) % inner)
        for o in range(outer)
        for i in range(inner)
    ]


class ExpertGroup:
    """The product of the EP and ESP groups of a mesh, and how rows travel in it by a transport.

    Attributes:
      axes: mesh axes, EP before ESP.
      ep_size: D; esp_size: Ns.
      exchanges: {piece: a transport among all devices, those of a node, those of an EP member}; under 'coordinated'
        among the devices of equal place in these.
    """

    def __init__(self, roles: Roles, transport: str = "all_to_all", shards: bool = True):
        """Build it; shards: whether rows travel to all shards of an expert, or among devices of equal shard."""
        self.ep_size, self.esp_size = roles.size(roles.expert), roles.size(roles.expert_shard) if shards else 1
        self.shard_axes = roles.expert_shard if shards else ()
        self.axes = roles.expert + self.shard_axes
        self.coordinated = shards and transport == "coordinated"
        if not self.coordinated:
            size, in_node = self.ep_size * self.esp_size, roles.config.devices_per_node
            in_node = in_node if shards else max(1, in_node // roles.size(roles.expert_shard))
            make = functools.partial(make_exchange, self.axes, size, transport, min(size, in_node))
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
        return by_piece(self.send_piece, rows, layout)

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
        size = self.ep_size * self.esp_size
        return make_exchange(self.axes, size, "all_to_all", 1)(jnp.repeat(counts, self.esp_size, axis=0))

    def send_back(self, rows, layout: BucketLayout):
        """Send computed rows [Ns R, M] to their sources: [R, M], the sum over the shards of each expert."""
        return by_piece(self.send_piece_back, rows, layout, self.esp_size)

    def send_piece_back(self, kind: str, blocks):
        """Send computed blocks [n Ns, ...] of one piece to their sources, and sum over the shards: [n, ...]."""
        exchange = self.exchanges[kind]
        if self.esp_size == 1:
            return exchange(blocks)
        if self.coordinated:
            split = blocks.reshape((-1, self.esp_size) + blocks.shape[1:])
            return exchange(scatter_sum(split, self.shard_axes, 1))
        return sum_shards(exchange(blocks).reshape((-1, self.esp_size) + blocks.shape[1:]))


def by_piece(change: Callable, rows, layout: BucketLayout, each: int = 1):
    """Return the buffer of what change(piece, its rows) makes of every piece of a buffer; arguments as of `cut`."""
    return join(change(kind, blocks) for kind, blocks in cut(rows, layout, each))


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


def sum_shards(array):
    """Return the sum [n, ...] of array [n, Ns, ...] over the shards, in at least float32.

    It is a chain of additions: XLA:CPU sums over a middle dim one number at a time.
    """
    parts = [array[:, shard].astype(jnp.promote_types(array.dtype, jnp.float32)) for shard in range(array.shape[1])]
    return sum(parts[1:], parts[0]).astype(array.dtype)


@with_gradient(lambda d, esp_size: sum_shards(d), 1)
def repeat_for_shards(array, esp_size: int):
    """Return [n, Ns, ...] from [n, ...]: the same for every shard. The gradient is `sum_shards` of the cotangent."""
    return jnp.stack([array] * esp_size, axis=1)


def gather_shards(array, axes: tuple[str, ...], dim: int):
    """Return every shard's array, stacked along a new `dim`; the gradient is `scatter_sum` of the cotangent."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return lax.all_gather(array, axes, axis=dim)
    return _gather_shards(array, axes, dim)


@with_gradient(lambda d, axes, dim: scatter_sum(d, axes, dim), 2)
def _gather_shards(array, axes, dim):
    return lax.all_gather(array, axes, axis=dim)


@with_gradient(_gather_shards, 2)
def scatter_sum(array, axes: tuple[str, ...], dim: int):
    """Return this shard's entry along `dim` of the sum over the shards.

    It is carried in at least float32, at twice the bytes of bfloat16: shards of an expert are neighbours, and no slow
    link is crossed. The gradient is gathered in the dtype of the array.
    """
    acc_dtype = jnp.promote_types(array.dtype, jnp.float32)
    return lax.psum_scatter(array.astype(acc_dtype), axes, scatter_dimension=dim).astype(array.dtype)
