"""Routing: where each choice of each token goes, and in which row of which bucket it travels.

Inputs: the `Choice` of t tokens, and per choice its destination (device and group there). Outputs: `Routing`, from
which `pack` cuts one `Parcel` per pass: as many rows for each of the D destinations as its bucket has, C or, by a
`BucketLayout`, more for near ones. Every choice is in exactly one
pass, so a bucket of any size loses nothing; it only takes more passes. `regroup` is the receiver's half: the order in
which the rows that arrived form compact groups, one group per expert held there. All results are integers; no row moves
here. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.few_kernels import first_places, places_of_keys
from moe_jax.parallel.static_sizes import BucketLayout, Piece
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_shape import Tables, build_shape, fill_tables

jax.tree_util.register_dataclass(
    Tables, data_fields=[field.name for field in dataclasses.fields(Tables)], meta_fields=[]
)


@typing.dataclass_transform(frozen_default=True)
def record(cls):
    """Make a frozen dataclass of arrays a JAX pytree."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    return jax.tree_util.register_dataclass(
        cls, data_fields=[field.name for field in dataclasses.fields(cls)], meta_fields=[]
    )


@record
class Choice:
    """What the tokens of one drop group chose.

    Attributes:
      expert_ids: int32 [t, K], best first; ties go to the lowest id.
      weights: float [t, K], the factor of each expert's output (at least float32).
      keep_mask: bool [t, K]; False where a capacity dropped the choice, or `gshard` drew no second one.
    """

    expert_ids: jax.Array
    weights: jax.Array
    keep_mask: jax.Array


@record
class Routing:
    """All rows that one source sends, in the order (destination, group, token).

    Attributes:
      choice_at: int32 [A], the choice (token * K + k) that stands at each place of that order; dropped ones last.
      place_of: int32 [A], the inverse of `choice_at`.
      destination: int32 [A], destination of each choice; D where it was dropped.
      start: int32 [D * G + 1], first place of each (destination, group); the last entry ends the last one.
    """

    choice_at: jax.Array
    place_of: jax.Array
    destination: jax.Array
    start: jax.Array


@record
class Parcel:
    """One pass: the rows of D buckets, seen from both ends of the gather.

    Attributes:
      choice_of_row: int32 [R], which choice fills each row; A in an empty row. R = D C, or the layout's total.
      row_of_choice: int32 [t, K], the row of each choice; R for a choice of another pass or a dropped one.
      counts: int32 [D, G], rows per destination and group; rows of one bucket are sorted by group, empty rows last.
    """

    choice_of_row: jax.Array
    row_of_choice: jax.Array
    counts: jax.Array


@record
class Grouping:
    """How rows that arrived in source-major buckets form compact groups.

    Attributes:
      place_of_row: int32 [R], the compact place of each received row; R for an empty row.
      row_of_place: int32 [R], the inverse; R past the last row. Both are None where rows form groups as they came.
      group_sizes: int32 [G], rows per group.
    """

    place_of_row: jax.Array | None
    row_of_place: jax.Array | None
    group_sizes: jax.Array


def rank_within(group_ids, order=None):
    """Return int32 [n], how many earlier entries (in `order`) have the same group id.

    order: int32 [n], entries from first to last; None is by index.
    """
    n = group_ids.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    order = index if order is None else order
    by_group = order[jnp.argsort(group_ids[order], stable=True)]
    sorted_ids = group_ids[by_group]
    starts = jnp.concatenate([jnp.ones((1,), bool), sorted_ids[1:] != sorted_ids[:-1]])
    start_of = lax.cummax(jnp.where(starts, index, 0))
    return jnp.zeros((n,), jnp.int32).at[by_group].set(index - start_of, unique_indices=True)


def route(choice: Choice, destination, group, num_destinations: int, num_groups: int) -> Routing:
    """Order all choices by (destination, group), earlier tokens first.

    destination: int32 [t, K], which of the D destinations each choice goes to; group: int32 [t, K], in [0, G).
    """
    key = jnp.where(choice.keep_mask, destination * num_groups + group, num_destinations * num_groups).reshape(-1)
    key = key.astype(jnp.int32)
    index = lax.iota(jnp.int32, key.shape[0])
    sorted_key, choice_at = lax.sort_key_val(key, index)
    start = places_of_keys(key, sorted_key, num_destinations * num_groups + 1)
    return Routing(
        choice_at=choice_at,
        # every entry is written; the sorted keys are an array that nothing reads any more, so it needs no copy
        place_of=sorted_key.at[choice_at].set(
            index, mode="promise_in_bounds", unique_indices=True, wrap_negative_indices=False
        ),
        destination=lax.div(key, jnp.int32(num_groups)),
        start=start,
    )


def passes_of(routing: Routing, layout: BucketLayout, num_groups: int, me=None):
    """Return int32 [], passes that this source's buckets take: the most over them; 0 where it sends nothing."""
    edges, limit = routing.start[::num_groups], bucket_lengths(layout, me)
    return jnp.max((edges[1:] - edges[:-1] + limit - 1) // limit)


def bucket_lengths(layout: BucketLayout, me):
    """Return the rows of all buckets, or int32 [D], those of the bucket for each destination where they differ.

    me: this source's own member, int32 [].
    """
    rows = layout.rows
    if len(layout.pieces) == 1:
        return rows.far
    member = lax.iota(jnp.int32, layout.members)
    near = jnp.where(member // layout.near == me // layout.near, rows.node, rows.far)
    return jnp.where(member == me, rows.own, near)


def members_of(piece: Piece, layout: BucketLayout, me, each: int = 1):
    """Return int32 [count * each], whose rows a piece holds, in order, where every member is `each` devices in a row.

    None stands for all.
    """
    if piece.kind == "far":
        return None
    first = me if piece.kind == "own" else me // layout.near * layout.near
    return first * each + lax.iota(jnp.int32, piece.count * each)


def pack(routing: Routing, index, layout: BucketLayout, top_k: int, num_groups: int, me=None) -> Parcel:
    """Cut pass `index` (int or int32 []) out of the routing: places [index C, (index + 1) C) of every destination.

    layout: where the rows of the D buckets stand; me: int32 [], which member this source is, read where lengths differ.
    """
    num_choices, destination = routing.choice_at.shape[0], routing.destination
    edges, length = routing.start[::num_groups], bucket_lengths(layout, me)
    first = edges[:-1] + index * length
    slot = routing.place_of - jnp.append(first, 0)[destination]
    choice_of_row, row = [], None
    for piece in layout.pieces:
        who = members_of(piece, layout, me)
        start, end, bucket = first, edges[1:], destination
        if who is not None:
            start, end, bucket = first[who], end[who], destination - who[0]
        place = (start + piece.begin if piece.begin else start)[:, None] + lax.iota(jnp.int32, piece.width)[None]
        filled = place < end[:, None]
        chosen = jnp.where(filled, routing.choice_at[jnp.minimum(place, num_choices - 1)], num_choices)
        choice_of_row.append(chosen.reshape(-1))
        here = piece.offset + bucket * piece.width + slot - piece.begin
        row = here if row is None else jnp.where(slot >= piece.begin, here, row)
    even = len(layout.pieces) == 1
    ends_at = length if even else jnp.append(length, 0)[destination]
    inside = (slot >= 0) & (slot < ends_at) & (destination < layout.members)
    most = length if even else length[:, None]
    bounds, ends = (
        jnp.clip(edge.reshape(layout.members, num_groups) - first[:, None], 0, most)
        for edge in (routing.start[:-1], routing.start[1:])
    )
    return Parcel(
        choice_of_row=choice_of_row[0] if even else jnp.concatenate(choice_of_row),
        row_of_choice=jnp.where(inside, row, layout.total).reshape(-1, top_k),
        counts=ends - bounds,
    )


def counts_within(counts, begin, end):
    """Return int32 [S, G], rows of each group among the places from begin to end of a bucket; counts: of all of it."""
    ends = jnp.cumsum(counts, axis=1)
    return jnp.clip(ends, begin, end) - jnp.clip(ends - counts, begin, end)


def regroup(counts, layout: BucketLayout, me=None) -> Grouping:
    """Say how received buckets form compact groups: groups in order, within a group sources in order.

    Args:
      counts: int32 [S, G], rows of each source and group; each source's rows come sorted by group, empty ones last.
        The sources are D members, or D members of several devices each.
      layout: of the buffers that sources packed; me: int32 [], which member received them; read where lengths differ.
    """
    if counts.shape[0] == 1:  # one bucket, in group order as it is
        return Grouping(place_of_row=None, row_of_place=None, group_sizes=counts[0])
    each = counts.shape[0] // layout.members
    pieces = [(members_of(piece, layout, me, each), piece.begin, piece.end) for piece in layout.pieces]
    return regroup_pieces(counts, pieces)


def regroup_pieces(counts, pieces) -> Grouping:
    """Say how rows form compact groups that arrived in pieces of their sources' buckets; see `regroup`.

    Args:
      counts: int32 [S, G], of whole buckets.
      pieces: list of (sources int32 [n] or None for all, begin, end): n times the places from `begin` to `end` of a
        source's bucket, one after the other.
    """
    num_sources, num_groups = counts.shape
    total = sum((num_sources if who is None else who.shape[0]) * (end - begin) for who, begin, end in pieces)
    group_sizes = jnp.sum(counts, axis=0)
    base = (jnp.cumsum(group_sizes) - group_sizes)[None] + jnp.cumsum(counts, axis=0) - counts  # [S, G]
    ends = jnp.cumsum(counts, axis=1)
    starts = ends - counts

    def places(who, begin, end):
        of = [array if who is None else array[who] for array in (base, starts, ends)]
        slot = lax.iota(jnp.int32, end - begin) + begin if begin else lax.iota(jnp.int32, end)
        group = first_places(of[2], slot, side="right")
        safe = jnp.minimum(group, num_groups - 1)
        within = slot[None] - jnp.take_along_axis(of[1], safe, axis=1)
        return jnp.where(group < num_groups, jnp.take_along_axis(of[0], safe, axis=1) + within, total).reshape(-1)

    place = [places(*piece) for piece in pieces]
    place = place[0] if len(place) == 1 else jnp.concatenate(place)
    place = place.astype(jnp.int32)
    nowhere = jnp.maximum(place, total)  # `total` everywhere, made where `place` is: constants are copied for a scatter
    row_of_place = nowhere.at[place].set(
        lax.iota(jnp.int32, total), mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    return Grouping(place_of_row=place, row_of_place=row_of_place, group_sizes=group_sizes)


def local(tables: Tables) -> Tables:
    """Return this device's tables, inside `shard_map`: the leading dim, of size 1, is taken off."""
    return jax.tree.map(lambda array: array[0], tables)


def destinations(tables: Tables, choice: Choice, groups: int):
    """Apply the token rule of one layer to one source's choices.

    Args:
      tables: this device's, of one layer: dest_slot [E, Q], dest_num [E, Q], dest_den [E].
      choice: of t tokens; any number of choices of one expert.
      groups: G.

    Returns:
      device int32 [t, K] and group int32 [t, K].
    """
    ids = choice.expert_ids
    num_experts, candidates = tables.dest_slot.shape
    if candidates == 1:
        slot = tables.dest_slot[:, 0][ids]
    else:
        flat = jnp.where(choice.keep_mask, ids, num_experts).reshape(-1)
        rank = rank_within(flat).astype(jnp.uint32)
        counts = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=flat.dtype)[None], axis=0, dtype=jnp.uint32)
        edges = share_of(tables.dest_num, tables.dest_den[:, None], counts[:, None])  # [E, Q], first rank beyond q
        q = jnp.sum(edges[ids.reshape(-1)] <= rank[:, None], axis=1, dtype=jnp.int32)
        q = jnp.minimum(q, candidates - 1).reshape(ids.shape)  # only dropped choices are beyond the last
        slot = tables.dest_slot[ids, q]
    return slot // groups, slot % groups


def share_of(num, den, count):
    """Return num * count // den, exact for every uint32 count although the product may not fit 32 bits.

    With count = a den + b the result is num a + num b // den: num a <= count, and num b < 2^32.

    Args:
      num, den: uint32, 0 <= num <= den, 1 <= den <= 2^16.
      count: uint32; the three broadcast.
    """
    whole = count // den
    return num * whole + num * (count - whole * den) // den


def even_tables(layers: int, experts: int, devices: int) -> Tables:
    """Return NumPy tables of plain expert parallelism, the homes of `Placement.even`.

    Bank rows are layer-major: of the n experts of a layer on a device, row l n + j is the j-th one of layer l.
    """
    placement = Placement.even(layers, experts, devices, rule="home")
    return dataclasses.replace(fill_tables(build_shape(placement), placement), slot_expert=None)
