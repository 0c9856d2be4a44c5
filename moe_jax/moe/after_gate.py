"""What happens to a layer's plan after its gate: a rule reads this step's counts, and chosen experts are fetched.

A rule (`after_gate_rules.py`) is a frozen dataclass of rates and knobs, because a step is compiled for it, with

    decide(tables, counts int32 [D, E], holders int32 [D, G], me int32 [], shape) -> (tables, transfer, used)

from this device's tables of one layer, the tokens of each source for each expert, the expert in each slot (-1 for
none), and this device's place: the tables with new destinations, the transfer of the replicas that come late, and its
sizes in use, equal on all devices (both None without such replicas). Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.after_gate_rules import build_rule
from moe_jax.moe.routing import Tables
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import wait_for
from moe_jax.parallel.sparse_all_gather import ReplicaTransfer, open_replicas, shrunk
from moe_jax.parallel.varying import cast_varying, varying_axes
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.planning.sizes import late_size


def decide(plan: PlanShape | None, roles: Roles, stats, bank, grad_sink, tables: Tables, replicas: tuple):
    """Return (tables to send by, replicas) of one layer after its gate: a plan's rule reads the counts of this step.

    Args:
      stats: the gate's statistics; bank {name: [Rb, ...]}; grad_sink {name: [Hs, ...]}; tables: of this layer.
      replicas: those planned ahead, (values {name: [m, ...]}, their grad_sink) for each transfer, in the order of
        their slots; those that come late are put behind them.
    """
    if plan is None or plan.after_gate is None:
        return tables, replicas
    axes, late = roles.expert, plan.late
    inside = tuple(axis for axis in roles.all if axis not in axes)
    with jax.named_scope("after_gate"):
        counts = lax.psum(stats.counts, inside) if inside else stats.counts
        both = jnp.concatenate([counts, cast_varying(tables.slot_expert, varying_axes(counts))])
        gathered = lax.all_gather(cast_varying(both, axes), axes, to="invarying")
        experts = counts.shape[0]
        rule = build_rule(plan.after_gate)
        decided, transfer, used = rule.decide(
            tables, gathered[:, :experts], gathered[:, experts:], lax.axis_index(axes), plan
        )
        if late is None:
            return decided, replicas
        bank, grad_sink = cast_varying((bank, grad_sink), varying_axes(stats.counts))
        size = wait_for(late_size(used, late, jnp), tables.home_row[0], stats)

        def padded(leaf):  # [late slots, ...] with zeros past the end of the leaf
            zeros = jnp.zeros((late.slots - leaf.shape[0], *leaf.shape[1:]), leaf.dtype)
            return jnp.concatenate([leaf, cast_varying(zeros, varying_axes(leaf))]) if len(zeros) else leaf

        def none():
            return tuple(
                {
                    name: cast_varying(jnp.zeros((late.slots, *leaf.shape[1:]), leaf.dtype), varying_axes(leaf))
                    for name, leaf in leaves.items()
                }
                for leaves in (bank, grad_sink)
            )

        def fetch(part):
            fitted = shrunk(transfer, late, part)
            return jax.tree.map(
                padded, open_replicas(bank, tables.home_row, grad_sink, fitted, ReplicaTransfer(part, axes))
            )

        # a branch for none and one for each size, of which all devices take the same
        branches = [none, *(functools.partial(fetch, part) for part in late.halves())]
        fetched = lax.switch(size, branches)
        waited = wait_for(decided.dest_slot, decided.home_row[0], fetched)
        return dataclasses.replace(decided, dest_slot=waited), (*replicas, fetched)
