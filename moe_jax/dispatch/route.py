"""Routing: where each choice of each token goes, and in which row of which bucket it travels.

Inputs: the `Choice` of t tokens, and per choice its destination (device and group there). Outputs: `Routing`, from
which `pack` cuts one `Parcel` per pass: at most C rows for each of the D destinations. Every choice is in exactly one
pass, so a bucket of any size loses nothing; it only takes more passes. `regroup` is the receiver's half: the order in
which the rows that arrived form compact groups, one group per expert held there. All results are integers; no row moves
here. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax


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
      keep_mask: bool [t, K]; False where a capacity dropped the choice. All True when dropless.
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
      choice_of_row: int32 [D C], which choice fills each row; A in an empty row.
      row_of_choice: int32 [t, K], the row of each choice; D C for a choice of another pass or a dropped one.
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
      row_of_place: int32 [R], the inverse; R past the last row.
      group_sizes: int32 [G], rows per group.
    """

    place_of_row: jax.Array
    row_of_place: jax.Array
    group_sizes: jax.Array


def rank_within(group_ids, order=None):
    """Return int32 [n], how many earlier entries (in `order`) have the same group id.

    Args:
      group_ids: int32 [n].
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

    Args:
      choice: of t tokens.
      destination: int32 [t, K], which of the D destinations each choice goes to.
      group: int32 [t, K], its group there, in [0, G).
      num_destinations: D.
      num_groups: G.
    """
    key = jnp.where(choice.keep_mask, destination * num_groups + group, num_destinations * num_groups).reshape(-1)
    key = key.astype(jnp.int32)
    index = lax.iota(jnp.int32, key.shape[0])
    sorted_key, choice_at = lax.sort_key_val(key, index)
    start = jnp.searchsorted(sorted_key, jnp.arange(num_destinations * num_groups + 1, dtype=jnp.int32), side="left")
    return Routing(
        choice_at=choice_at,
        place_of=jnp.zeros_like(index).at[choice_at].set(index, unique_indices=True),
        destination=key // num_groups,
        start=start.astype(jnp.int32),
    )


def largest_bucket(routing: Routing, num_groups: int):
    """Return int32 [], the most rows that this source sends to one destination, all passes together."""
    edges = routing.start[::num_groups]
    return jnp.max(edges[1:] - edges[:-1])


def pack(routing: Routing, index, rows: int, top_k: int, num_groups: int) -> Parcel:
    """Cut pass `index` (int or int32 []) out of the routing: places [index C, (index + 1) C) of every destination.

    Args:
      routing: of A = t K choices.
      index: number of the pass, from 0.
      rows: C, rows of a bucket.
      top_k: K.
      num_groups: G.
    """
    num_choices = routing.choice_at.shape[0]
    edges = routing.start[::num_groups]
    num_destinations = edges.shape[0] - 1
    first = edges[:-1] + index * rows
    place = first[:, None] + lax.iota(jnp.int32, rows)[None]
    filled = place < edges[1:, None]
    choice_of_row = jnp.where(filled, routing.choice_at[jnp.minimum(place, num_choices - 1)], num_choices)
    slot = routing.place_of - jnp.append(first, 0)[routing.destination]
    inside = (slot >= 0) & (slot < rows) & (routing.destination < num_destinations)
    row_of_choice = jnp.where(inside, routing.destination * rows + slot, num_destinations * rows)
    bounds = jnp.clip(routing.start[:-1].reshape(num_destinations, num_groups) - first[:, None], 0, rows)
    ends = jnp.clip(routing.start[1:].reshape(num_destinations, num_groups) - first[:, None], 0, rows)
    return Parcel(
        choice_of_row=choice_of_row.reshape(-1),
        row_of_choice=row_of_choice.reshape(-1, top_k),
        counts=ends - bounds,
    )


def regroup(counts, rows: int) -> Grouping:
    """Say how received buckets form compact groups: groups in order, within a group sources in order.

    Args:
      counts: int32 [D, G], rows of each source and group; each source's rows come sorted by group, empty ones last.
      rows: C, rows of one source's bucket, so R = D C.
    """
    num_sources, num_groups = counts.shape
    total = num_sources * rows
    group_sizes = jnp.sum(counts, axis=0)
    base = (jnp.cumsum(group_sizes) - group_sizes)[None] + jnp.cumsum(counts, axis=0) - counts  # [D, G]
    ends = jnp.cumsum(counts, axis=1)
    slot = lax.iota(jnp.int32, rows)
    group = jax.vmap(functools.partial(jnp.searchsorted, side="right"), in_axes=(0, None))(ends, slot)  # [D, C]
    safe = jnp.minimum(group, num_groups - 1)
    within = slot[None] - jnp.take_along_axis(ends - counts, safe, axis=1)
    place = jnp.where(group < num_groups, jnp.take_along_axis(base, safe, axis=1) + within, total).reshape(-1)
    row_of_place = (
        jnp.full((total,), total, jnp.int32).at[place].set(lax.iota(jnp.int32, total), mode="drop", unique_indices=True)
    )
    return Grouping(place_of_row=place.astype(jnp.int32), row_of_place=row_of_place, group_sizes=group_sizes)
