"""Keys and values of the tokens so far, and attention to them.

Inputs: q [b, Sq, H, Dh], k, v [b, Sq, Hkv, Dh] of new tokens and their positions. Outputs: attention's result
[b, Sq, H, Dh] and the cache with the new keys and values in it.

A cache is {segment: {attention of its unit: Entry}}; a token's keys stand in the row of its position, so prompts of
different lengths need no shift: padding behind a prompt is overwritten before anything may look at it. Sequences are
split over the data-parallel devices and heads over the model-parallel ones, as attention's parameters are.
Letters: docs/notation.md; T rows of a sequence in the cache.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.collectives.varying import cast_varying
from moe_jax.dispatch.route import record
from moe_jax.mesh.roles import Roles
from moe_jax.models import LanguageModel
from moe_jax.models.attention import attend
from moe_jax.models.segments import Segment


@record
class Entry:
    """Of one attention in all units of a segment: keys and values [U, b, T, Hkv, Dh]."""

    keys: jax.Array
    values: jax.Array


def attentions_of(segment: Segment) -> tuple[str, ...]:
    """Return the names of a unit's attentions, in their order."""
    names = ("dense_attention",) if segment.config.moe_every != 1 else ()
    return (*names, "attention") if segment.has_experts else names


def cache_specs(model: LanguageModel) -> dict:
    """Return the PartitionSpec of every array of a cache."""
    roles = model.roles
    spec = P(None, roles.dense, None, roles.model or None)
    return {segment.name: {name: Entry(spec, spec) for name in attentions_of(segment)} for segment in model.segments}


def empty_cache(model: LanguageModel, rows: int, length: int) -> dict:
    """Return this device's zeros for `rows` sequences of up to `length` tokens; inside `shard_map`."""
    roles: Roles = model.roles

    def zeros(segment: Segment):
        config = segment.config
        heads = config.key_value_heads // roles.size(roles.model)
        shape = (segment.units, rows, length, heads, config.head_size)
        return cast_varying(jnp.zeros(shape, config.dtype), roles.dense + roles.model)

    return {
        segment.name: {name: Entry(zeros(segment), zeros(segment)) for name in attentions_of(segment)}
        for segment in model.segments
    }


def cache_bytes(model: LanguageModel, rows: int, length: int) -> int:
    """Return the bytes of a cache on one device."""
    parts = model.roles.size(model.roles.model)
    heads = sum(
        segment.units * len(attentions_of(segment)) * segment.config.key_value_heads // parts
        for segment in model.segments
    )
    return 2 * rows * length * heads * model.config.head_size * jnp.dtype(model.config.dtype).itemsize


def attend_prompt(entry: Entry, unit, q, k, v, implementation: str) -> tuple[jax.Array, Entry]:
    """Attend among whole prompts that start at position 0, and store their keys and values.

    Args:
      unit: int32 [], turn of the loop over units; implementation: as `attend` takes it.
    """
    zero = jnp.zeros((), jnp.int32)
    at = (unit, zero, zero, zero, zero)
    keys = lax.dynamic_update_slice(entry.keys, k[None], at)
    values = lax.dynamic_update_slice(entry.values, v[None], at)
    return attend(q, k, v, True, implementation), Entry(keys, values)


def attend_cached(entry: Entry, unit, q, k, v, positions) -> tuple[jax.Array, Entry]:
    """Store the keys and values of one new token per sequence, and attend to all of it up to that token.

    Args:
      unit: int32 []; q [b, 1, H, Dh]; k, v [b, 1, Hkv, Dh]; positions: int32 [b], below T.
    """
    row = jnp.arange(positions.shape[0])
    keys = entry.keys.at[unit, row, positions].set(k[:, 0])
    values = entry.values.at[unit, row, positions].set(v[:, 0])
    mixed = attend_one(q[:, 0], keys[unit], values[unit], positions)
    return mixed[:, None], Entry(keys, values)


def attend_one(q, keys, values, positions):
    """Return softmax(q k^T / sqrt(Dh)) v over the rows 0 to `positions` of each sequence: [b, H, Dh].

    Args:
      q: [b, H, Dh], consecutive H / Hkv of which share a head of keys; keys, values: [b, T, Hkv, Dh].
    """
    rows, heads, dim = q.shape
    shared = keys.shape[2]
    acc_dtype = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(rows, shared, heads // shared, dim)
    scores = jnp.einsum("bhgd,bthd->bhgt", grouped, keys, preferred_element_type=acc_dtype) / math.sqrt(dim)
    seen = jnp.arange(keys.shape[1], dtype=jnp.int32)[None] <= positions[:, None]
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(acc_dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    mixed = jnp.einsum("bhgt,bthd->bhgd", weights, values, preferred_element_type=acc_dtype)
    return mixed.astype(q.dtype).reshape(rows, heads, dim)
