"""A placement as arrays on the device: where the tokens of an expert go, and which replicas are fetched.

All of them are inputs of a step. The host builds them from a `Placement`; a new plan with the same shapes runs in the
same executable. `destinations` applies the placement's token rule to the choices of one source.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.moe.routing import Choice, rank_within
from moe_jax.planning.plan_shape import Tables

jax.tree_util.register_dataclass(
    Tables, data_fields=[field.name for field in dataclasses.fields(Tables)], meta_fields=[]
)


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
    """Return NumPy tables of plain expert parallelism: device d holds experts [d E/D, (d+1) E/D) of every layer.

    Bank rows are layer-major: row l E/D + j is the j-th expert of layer l on this device.
    """
    held = experts // devices
    shape = (devices, layers, experts, 1)
    rows = np.arange(layers * held, dtype=np.int32).reshape(1, layers, held)
    return Tables(
        dest_slot=np.broadcast_to(np.arange(experts, dtype=np.int32)[:, None], shape),
        dest_num=np.ones(shape, np.uint32),
        dest_den=np.ones(shape[:3], np.uint32),
        home_row=np.broadcast_to(rows, (devices, layers, held)),
    )
