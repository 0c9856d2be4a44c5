"""What rules after the gate have in common: their inputs and outputs, and how experts are fetched after the gate.

Inputs: the counts of this device's tokens and the tables of one layer. Outputs: counts of all sources, and the replicas
of the experts that a rule chose. Inside `shard_map`; all devices of the expert-parallel group take part.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.sparse_all_gather import open_replicas
from moe_jax.collectives.transfer_plan import TransferPlan
from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.dispatch import Tables


class Rule(Protocol):
    """Decide for one layer; frozen and hashable, because a step is compiled for it.

    Attributes:
      home_slots: Hs; replica_slots: Gs.
      ahead: whether replicas are planned and fetched ahead as well.
      late_replicas: Y, the most experts fetched after the gate; 0 for none.
    """

    home_slots: int
    replica_slots: int
    ahead: bool
    late_replicas: int

    def decide(self, tables: Tables, counts: jax.Array, holders: jax.Array, me: jax.Array) -> tuple[Tables, jax.Array]:
        """Return this source's tables for this step's counts, and how many experts are fetched late (int32 []).

        Args:
          tables: this device's, of one layer, as planned ahead.
          counts: int32 [D, E], tokens of each source for each expert.
          holders: int32 [D, G], the expert in each slot of each device; -1 for none.
          me: int32 [], this device's place in the group.

        Returns:
          tables of the same shapes; where experts are fetched after the gate, `transfer` holds those alone.
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


def fetch_late(bank, grad_sink, tables: Tables, needed, rule: Rule, axes: tuple[str, ...]):
    """Fetch the experts that a rule chose, broadcasting about as many as it chose: as `open_replicas` returns them.

    A broadcast has a static number of chunks; there is one branch for none and one for each power of two up to Y.

    Args:
      bank, grad_sink: of this device and layer, as `open_replicas` takes them.
      tables: what `rule` returned; its transfer holds Y chunks.
      needed: int32 [], how many of them are in use, the first ones; equal on all devices.
      axes: of the expert-parallel group.
    """
    late = rule.late_replicas
    plan = TransferPlan(method="broadcast", home_slots=rule.home_slots, replica_slots=rule.replica_slots, axes=axes)
    sizes = [1 << power for power in range(late.bit_length()) if 1 << power < late] + [late]

    def none():
        return tuple(
            {
                name: cast_varying(jnp.zeros((plan.replica_slots, *leaf.shape[1:]), leaf.dtype), varying_axes(leaf))
                for name, leaf in leaves.items()
            }
            for leaves in (bank, grad_sink)
        )

    def fetch(size):
        table = tables.transfer
        take = jnp.where(table.take < size, table.take, size)
        part = dataclasses.replace(table, send=table.send[:size], take=take)
        return lambda: open_replicas(bank, tables.home_row, grad_sink, part, plan)

    branch = jnp.searchsorted(jnp.array([0, *sizes], jnp.int32), needed, side="left").astype(jnp.int32)
    return lax.switch(branch, [none, *map(fetch, sizes)])
