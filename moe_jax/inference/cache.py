"""Keys and values of the tokens so far, and attention to them.

Inputs: q [b, Sq, H, Dh], k, v [b, Sq, Hkv, Dh] of new tokens and their positions. Outputs: attention's result
[b, Sq, H, Dh]; and the cache with the new keys and values in it.

A cache is {segment: {attention of its unit: Entry}}; a token's keys stand in the row of its position, so prompts of
different lengths need no shift: padding behind a prompt is overwritten before anything may look at it. The loop over
units only reads the cache and hands out what is new, which is stored once after it: written inside the loop, the whole
cache would be copied in every turn. Sequences are split over the data-parallel devices and heads over the
model-parallel ones, as attention's parameters are.
Letters: docs/notation.md; Hkv heads of keys and values, which divide H; T rows of a sequence in the cache.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from moe_jax.dispatch.route import record
from moe_jax.models import LanguageModel
from moe_jax.models.segments import Segment


@record
class Entry:
    """Of one attention in all units of a segment: keys and values [U, b, Hkv, T, Dh]."""

    keys: jax.Array
    values: jax.Array


def attentions_of(segment: Segment) -> tuple[str, ...]:
    """Return the names of a unit's attentions, in their order."""
    names = ("dense_attention",) if segment.config.moe_every != 1 else ()
    return (*names, "attention") if segment.has_experts else names


def cache_specs(model: LanguageModel) -> dict:
    """Return the PartitionSpec of every array of a cache."""
    roles = model.roles
    spec = P(None, roles.dense, roles.model or None)
    return {segment.name: {name: Entry(spec, spec) for name in attentions_of(segment)} for segment in model.segments}


def store_prompts(new: dict, held: int) -> dict:
    """Return a segment's cache with room for `held` tokens; new: {attention: (k, v)}, each [U, b, Sq, Hkv, Dh]."""

    def one(array):
        by_head = jnp.swapaxes(array, 2, 3)
        return jnp.pad(by_head, ((0, 0), (0, 0), (0, 0), (0, held - by_head.shape[3]), (0, 0)))

    return {name: Entry(*map(one, pair)) for name, pair in new.items()}


def store_tokens(cache: dict, new: dict, positions) -> dict:
    """Return a segment's cache with one more token of each sequence; new: (k, v) [U, b, 1, Hkv, Dh] each.

    Args:
      positions: int32 [b], below T.
    """
    row = jnp.arange(positions.shape[0])

    def one(held, array):
        return held.at[:, row, :, positions].set(jnp.swapaxes(array[:, :, 0], 0, 1))

    return {name: Entry(one(cache[name].keys, k), one(cache[name].values, v)) for name, (k, v) in new.items()}


def attend_cached(entry: Entry, q, k, v, positions, in_place: bool = False):
    """Return softmax(q k^T / sqrt(Dh)) v over the tokens before `positions` and the new one: [b, 1, H, Dh].

    The new token's keys and values stand in for the rows of its position, which the cache does not hold yet.

    Args:
      entry: of this unit, [b, Hkv, T, Dh]; q: [b, 1, H, Dh], consecutive H / Hkv of which share a head of keys.
      k, v: [b, 1, Hkv, Dh], of the new token; positions: int32 [b], where it stands, below T.
      in_place: multiply keys and values where they lie, without a matmul, which copies them first.
    """
    rows, _, heads, dim = q.shape
    shared = k.shape[2]
    acc_dtype = jnp.promote_types(q.dtype, jnp.float32)
    place = jnp.arange(entry.keys.shape[2], dtype=jnp.int32)[None] - positions[:, None]
    new = (place == 0)[:, None, :, None]
    keys = jnp.where(new, jnp.swapaxes(k, 1, 2), entry.keys)
    values = jnp.where(new, jnp.swapaxes(v, 1, 2), entry.values)

    def times(spec, a, b, summed):
        if not in_place:
            return jnp.einsum(spec, a, b, preferred_element_type=acc_dtype)
        return jnp.sum(a.astype(acc_dtype) * b[:, :, None].astype(acc_dtype), axis=summed)

    grouped = q[:, 0].reshape(rows, shared, heads // shared, dim)
    row = grouped[:, :, :, None] if in_place else grouped
    scores = times("bhgd,bhtd->bhgt", row, keys, -1) / math.sqrt(dim)
    scores = jnp.where((place <= 0)[:, None, None], scores, jnp.finfo(acc_dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    row = weights[..., None] if in_place else weights
    mixed = times("bhgt,bhtd->bhgd", row, values, -2)
    return mixed.astype(q.dtype).reshape(rows, 1, heads, dim)
