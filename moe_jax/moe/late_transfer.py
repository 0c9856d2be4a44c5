"""The tables of a transfer that is decided after the gate.

Inputs: which replicas a rule wants, in which order it tries them, and where experts are at home. Outputs: the replicas
that fit the sizes that the step was compiled for, the slots that they fill, and this device's `TransferTables`. An
expert that does not fit its home's offers, its node's crossings or a device's slots is left out as a whole, and no
destination may name a slot of it. Twin of `moe_jax.planning.transfer_sizes.transfer_sizes.fit_replicas`, for one layer.

Letters: docs/notation.md; Et experts in the rule's order; X, m, Cp as in parallel/transfer_shape.py.
"""

from __future__ import annotations

import typing

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.transfer_shape import TransferShape, TransferTables


class Fitted(typing.NamedTuple):
    """Replicas that come late.

    Attributes:
      added: bool [E, D]; slot: int32 [E, D], the late slot of each (from 0), where added.
      transfer: of this device.
      used: int32 [3], offers, slots and crossings in use.
    """

    added: jax.Array
    slot: jax.Array
    transfer: TransferTables
    used: jax.Array


def fit_late(wanted, order, home, home_slot, me, shape: TransferShape, home_slots: int) -> Fitted:
    """Take experts in order while they fit, and write the tables of device `me`.

    Args:
      wanted: bool [E, D], new replicas; order: int32 [Et], experts that may have some, each once.
      home: int32 [E], the home of each expert; home_slot: int32 [E], its slot there.
      me: int32 []; shape: sizes; home_slots: Hs.
    """
    experts, devices = wanted.shape
    nodes, inside = shape.nodes, shape.inside

    def take(carry, expert):
        offers, crossing, slots = carry
        mine, at = wanted[expert], home[expert]
        to = jnp.any(mine.reshape(nodes, inside), axis=1) & (jnp.arange(nodes) != at // inside)
        node = crossing[at // inside]
        full = jnp.any(to & (node >= shape.crossing)) | jnp.any(mine & (slots >= shape.slots))
        room = (offers[at] < shape.offers) & ~full
        ok = jnp.any(mine) & room
        after = (
            offers.at[at].add(ok.astype(jnp.int32)),
            crossing.at[at // inside].add((to & ok).astype(jnp.int32)),
            slots + (mine & ok).astype(jnp.int32),
        )
        return after, (ok, offers[at], node, slots)

    none = (jnp.zeros(devices, jnp.int32), jnp.zeros((nodes, nodes), jnp.int32), jnp.zeros(devices, jnp.int32))
    (offers, crossing, slots), (ok, nth, turn, slot) = lax.scan(take, none, order)
    added = wanted & jnp.zeros(experts, bool).at[order].set(ok)[:, None]
    nth, turn, slot = (jnp.zeros((experts, *of.shape[1:]), jnp.int32).at[order].set(of) for of in (nth, turn, slot))
    used = jnp.stack([jnp.max(offers), jnp.max(slots), jnp.max(crossing)])
    return Fitted(added, slot, _tables(added, slot, nth, turn, home, home_slot, me, shape, home_slots), used)


def _tables(added, slot, nth, turn, home, home_slot, me, shape: TransferShape, home_slots: int) -> TransferTables:
    experts, devices = added.shape
    inside = shape.inside
    travels = jnp.any(added, axis=1)
    place = home % inside * shape.offers + nth  # among its level's offers
    offer = jnp.full((shape.offers,), home_slots, jnp.int32)
    offer = offer.at[jnp.where(travels & (home == me), nth, shape.offers)].set(home_slot, mode="drop")
    level = me // inside
    pick, lies = None, place[:, None]
    if shape.by_node:
        node = jnp.arange(shape.nodes)
        to = jnp.any(added.reshape(experts, shape.nodes, inside), axis=2) & (node[None] != home[:, None] // inside)
        to = to & (home // inside == level)[:, None]
        pick = jnp.full((shape.nodes, shape.crossing), inside * shape.offers, jnp.int32)
        pick = pick.at[node[None], jnp.where(to, turn, shape.crossing)].set(place[:, None], mode="drop")
        came = inside * shape.offers + home // inside * shape.crossing + turn[:, level]
        lies = jnp.where((home // inside == level), place, came)[:, None]
    members = level * inside + jnp.arange(inside)
    mine = added[:, members]
    want = jnp.full((inside, shape.slots), shape.places, jnp.int32)
    at = jnp.where(mine, slot[:, members], shape.slots)
    want = want.at[jnp.broadcast_to(jnp.arange(inside)[None], at.shape), at].set(
        jnp.broadcast_to(lies, at.shape), mode="drop"
    )
    return TransferTables(offer=offer, pick=pick, want=want)
