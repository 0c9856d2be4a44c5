"""What rules after the gate have in common: their inputs and outputs, and how experts are fetched after the gate.

Inputs: the counts of this device's tokens and the tables of one layer. Outputs: counts of all sources, and the replicas
of the experts that a rule chose. Inside `shard_map`; all devices of the expert-parallel group take part.
Letters: docs/notation.md; X, m, Cp as in parallel/transfer_shape.py.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.routing import record
from moe_jax.moe.tables import Tables
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import wait_for
from moe_jax.parallel.slices import Transfer, shrunk
from moe_jax.parallel.sparse_all_gather import open_replicas
from moe_jax.parallel.transfer_shape import TransferShape, TransferTables
from moe_jax.parallel.varying import cast_varying, varying_axes
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.planning.transfer_sizes import SIZES


@record
class Decision:
    """What a rule decided for one layer.

    Attributes:
      tables: this source's, with new destinations; all else as planned ahead.
      transfer: of the replicas that come late, in the sizes of `PlanShape.late`; None for a rule without such.
      used: int32 [3], offers, slots and crossings of it that are in use; equal on all devices.
    """

    tables: Tables
    transfer: TransferTables | None
    used: jax.Array


class Rule(Protocol):
    """Decide for one layer; frozen and hashable, because a step is compiled for it. It holds rates and knobs only."""

    def decide(
        self, tables: Tables, counts: jax.Array, holders: jax.Array, me: jax.Array, shape: PlanShape
    ) -> Decision:
        """Return what this source does with this step's counts.

        Args:
          tables: this device's, of one layer, as planned ahead.
          counts: int32 [D, E], tokens of each source for each expert.
          holders: int32 [D, G], the expert in each slot of each device; -1 for none.
          me: int32 [], this device's place in the group.
          shape: sizes of the step.
        """
        ...


def gather_counts(counts, tables: Tables, axes: tuple[str, ...], inside: tuple[str, ...]):
    """Return (counts int32 [D, E], holders int32 [D, G]), equal on all devices.

    Args:
      counts: int32 [E], choices of this device's tokens, each token counted on one device only.
      tables: of one layer.
      axes: of the expert-parallel group. inside: all other mesh axes, over which the counts of a member are summed.
    """
    counts = lax.psum(counts, inside) if inside else counts
    both = jnp.concatenate([counts, cast_varying(tables.slot_expert, varying_axes(counts))])
    gathered = lax.all_gather(cast_varying(both, axes), axes, to="invarying")
    return gathered[:, : counts.shape[0]], gathered[:, counts.shape[0] :]


def slots_of(holders, experts: int):
    """Return int32 [E, D], the slot in which each device holds each expert; -1 where it does not."""
    devices, slots = holders.shape
    expert = jnp.where(holders < 0, experts, holders)
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None], holders.shape)
    device = jnp.broadcast_to(jnp.arange(devices, dtype=jnp.int32)[:, None], holders.shape)
    return jnp.full((experts, devices), -1, jnp.int32).at[expert, device].set(slot, mode="drop")


def by_falling(values):
    """Sort ids by falling value, ties by rising id: [E] -> int32 [E]."""
    return jnp.argsort(-values, stable=True).astype(jnp.int32)


def late_size(used, shape: TransferShape):
    """Return int32 [], the size that holds what is used: 0 for none, i for the i-th (from 1) of `TransferShape.halves`.

    Twin of `moe_jax.planning.transfer_sizes.late_size`; what no size holds gets the last.
    """
    there = jnp.array([[getattr(size, name) for name in SIZES] for size in shape.halves()], jnp.int32)
    misses = jnp.sum(jnp.any(used[None] > there, axis=1), dtype=jnp.int32)
    return jnp.where(used[1] > 0, jnp.minimum(misses, len(there) - 1) + 1, 0)


def fetch_late(bank, grad_sink, home_row, decision: Decision, shape: TransferShape, axes: tuple[str, ...]):
    """Fetch the experts that a rule chose, in the smallest size that holds them: as `open_replicas` returns them.

    There is one branch for none and one for each of `TransferShape.halves`; all devices take the same one.

    Args:
      bank, grad_sink, home_row: of this device and layer, as `open_replicas` takes them.
      shape: the largest size.
      axes: of the expert-parallel group.
    """

    def none():
        return tuple(
            {
                name: cast_varying(jnp.zeros((shape.slots, *leaf.shape[1:]), leaf.dtype), varying_axes(leaf))
                for name, leaf in leaves.items()
            }
            for leaves in (bank, grad_sink)
        )

    def fetch(size):
        def run():
            tables = shrunk(decision.transfer, shape, size)
            both = open_replicas(bank, home_row, grad_sink, tables, Transfer(size, axes))
            return jax.tree.map(lambda leaf: _padded(leaf, shape.slots), both)

        return run

    return lax.switch(late_size(decision.used, shape), [none, *map(fetch, shape.halves())])


def _padded(leaf, slots: int):
    """Return [slots, ...] with zeros past the end of the leaf."""
    zeros = jnp.zeros((slots - leaf.shape[0], *leaf.shape[1:]), leaf.dtype)
    return jnp.concatenate([leaf, cast_varying(zeros, varying_axes(leaf))]) if slots > leaf.shape[0] else leaf


def decide(plan: PlanShape | None, roles: Roles, stats, bank, grad_sink, tables: Tables, replicas: tuple):
    """Return (tables to send by, replicas) of one layer after its gate: a plan's rule reads the counts of this step.

    Args:
      stats: the gate's statistics; bank {name: [Rb, ...]}; grad_sink {name: [Hs, ...]}; tables: of this layer.
      replicas: those planned ahead, (values {name: [m, ...]}, their grad_sink) for each transfer, in the order of
        their slots; those that come late are put behind them.
    """
    if plan is None or plan.after_gate is None:
        return tables, replicas
    inside = tuple(axis for axis in roles.all if axis not in roles.expert)
    with jax.named_scope("after_gate"):
        counts, holders = gather_counts(stats.counts, tables, roles.expert, inside)
        decision = plan.after_gate.decide(tables, counts, holders, lax.axis_index(roles.expert), plan)
        if plan.late is None:
            return decision.tables, replicas
        bank, grad_sink = cast_varying((bank, grad_sink), varying_axes(stats.counts))
        count = tables.home_row[0]
        decision = dataclasses.replace(decision, used=wait_for(decision.used, count, stats))
        late = fetch_late(bank, grad_sink, tables.home_row, decision, plan.late, roles.expert)
        decided = decision.tables
        waited = wait_for(decided.dest_slot, decided.home_row[0], late)
        return dataclasses.replace(decided, dest_slot=waited), (*replicas, late)
