"""What happens to a layer's plan after its gate: a rule reads this step's counts, and chosen experts are fetched.

A rule (`after_gate_rules.py`) is a frozen dataclass of rates and knobs, because a step is compiled for it, with

    decide(tables, counts int32 [D, E], holders int32 [D, G], me int32 [], shape) -> (tables, transfer, used)

from this device's tables of one layer, the tokens of each source for each expert, the expert in each slot (-1 for
none), and this device's place: the tables with new destinations, the transfer of the replicas that come late, and its
sizes in use, equal on all devices (both None without such replicas). Letters: docs/notation.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.after_gate_rules import build_rule
from moe_jax.moe.routing import Tables
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import in_line
from moe_jax.parallel.sparse_all_gather import ReplicaTransfer, open_replicas, shrunk
from moe_jax.parallel.varying import cast_varying, varying_axes
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.planning.sizes import late_size


def decide(plan: PlanShape, roles: Roles, counts, tables: Tables):
    """Return what a plan's rule decides of one layer after its gate: (tables to send by, transfer, sizes in use).

    Args:
      counts: int32 [E], tokens of this device for each expert; tables: of this layer.
    """
    axes = roles.expert
    inside = tuple(axis for axis in roles.all if axis not in axes)
    with jax.named_scope("after_gate"):
        counts = lax.psum(counts, inside) if inside else counts
        both = jnp.concatenate([counts, cast_varying(tables.slot_expert, varying_axes(counts))])
        gathered = lax.all_gather(cast_varying(both, axes), axes, to="invarying")
        counts, holders = jnp.split(gathered, [counts.shape[0]], axis=1)
        return build_rule(plan.after_gate).decide(tables, counts, holders, lax.axis_index(axes), plan)


def fetch_late(x, transfer: ReplicaTransfer, decided, bank, grad_sink):
    """Fetch the replicas that come after the gate, in a branch; return (x, (values {name: [m, ...]}, their grad_sink)).

    Args:
      x: floats and integers of which all that follows the gate is made; see `in_line`.
      transfer: the largest that the program has.
      decided: what `decide` returned; bank {name: [Rb, ...]}; grad_sink {name: [Hs, ...]}.
    """
    (tables, lists, used), late = decided, transfer.shape
    bank, grad_sink = cast_varying((bank, grad_sink), varying_axes(x))

    def none(grad_sink):
        def zeros(leaf):
            return cast_varying(jnp.zeros((late.slots, *leaf.shape[1:]), leaf.dtype), varying_axes(leaf))

        return jax.tree.map(zeros, (bank, grad_sink))

    def fetch(grad_sink, part):
        def padded(leaf):  # [late slots, ...] with zeros past the end of the leaf
            return jnp.pad(leaf, ((0, late.slots - leaf.shape[0]), *((0, 0) for _ in leaf.shape[1:])))

        fitted = shrunk(lists, late, part)
        opened = open_replicas(bank, tables.home_row, grad_sink, fitted, ReplicaTransfer(part, transfer.axes))
        return jax.tree.map(padded, opened)

    # a branch for none and one for each size, of which all devices take the same
    branches = [none, *(functools.partial(fetch, part=part) for part in late.halves())]
    with jax.named_scope("after_gate"):
        size = late_size(used, late, jnp)
        return in_line(x, lambda grad_sink, size: lax.switch(size, branches, grad_sink), grad_sink, size)
