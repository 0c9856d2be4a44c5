"""The tables of a transfer that is decided after the gate.

An expert that does not fit its home's offers, its node's crossings or a device's slots, in the sizes that the step was
compiled for, is left out as a whole. Twin of `moe_jax.planning.sizes.fit_replicas`, for one layer.
Letters: docs/notation.md; Et experts in the rule's order; X, m, Cp as in parallel/transfer_shape.py.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.transfer_shape import TransferTables
from moe_jax.planning.plan_shape import PlanShape


def fit_late(wanted, order, slot, me, plan: PlanShape):
    """Take experts in order while they fit, and write the tables of device `me`.

    Args:
      wanted: bool [E, D], new replicas; order: int32 [Et], experts that may have some, each once.
      slot: int32 [E, D], the slot of each expert on each device before the gate, -1 where it is not.
      me: int32 []; plan: with the largest size of the transfer, `late`.

    Returns:
      (added bool [E, D], the replicas that fit; slot with theirs; TransferTables of this device; int32 [3], offers,
      slots and crossings in use).
    """
    shape, home_slots, (experts, devices) = plan.late, plan.home_slots, wanted.shape
    nodes, inside = shape.nodes, shape.inside
    at_home = (slot >= 0) & (slot < home_slots)
    home = jnp.argmax(at_home, axis=1).astype(jnp.int32)
    home_slot = jnp.max(jnp.where(at_home, slot, 0), axis=1)

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
    (offers, crossing, slots), (ok, nth, turn, late) = lax.scan(take, none, order)
    added = wanted & jnp.zeros(experts, bool).at[order].set(ok)[:, None]
    nth, turn, late = (jnp.zeros((experts, *of.shape[1:]), jnp.int32).at[order].set(of) for of in (nth, turn, late))
    used = jnp.stack([jnp.max(offers), jnp.max(slots), jnp.max(crossing)])

    travels = jnp.any(added, axis=1)
    place = home % inside * shape.offers + nth  # among its level's offers
    offer = jnp.full((shape.offers,), home_slots, jnp.int32)
    offer = offer.at[jnp.where(travels & (home == me), nth, shape.offers)].set(home_slot, mode="drop")
    level = me // inside
    pick, lies = None, place[:, None]
    if shape.by_node:
        node = jnp.arange(nodes)
        to = jnp.any(added.reshape(experts, nodes, inside), axis=2) & (node[None] != home[:, None] // inside)
        to = to & (home // inside == level)[:, None]
        pick = jnp.full((nodes, shape.crossing), inside * shape.offers, jnp.int32)
        pick = pick.at[node[None], jnp.where(to, turn, shape.crossing)].set(place[:, None], mode="drop")
        came = inside * shape.offers + home // inside * shape.crossing + turn[:, level]
        lies = jnp.where((home // inside == level), place, came)[:, None]
    members = level * inside + jnp.arange(inside)
    want = jnp.full((inside, shape.slots), shape.places, jnp.int32)
    at = jnp.where(added[:, members], late[:, members], shape.slots)
    want = want.at[jnp.broadcast_to(jnp.arange(inside)[None], at.shape), at].set(
        jnp.broadcast_to(lies, at.shape), mode="drop"
    )
    slot = jnp.where(added, home_slots + plan.ahead_slots + late, slot)
    return added, slot, TransferTables(offer=offer, pick=pick, want=want), used
