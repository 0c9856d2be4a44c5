"""What happens to a layer's plan after its gate: a rule reads this step's counts, and chosen experts are fetched.

What is decided stands in the planners' files, written for NumPy and jax.numpy, layers [L, ...] first: one here. A rule
makes tables of it. It is a frozen dataclass of rates and options, because a step is compiled for it, with

    decide_by(rule, tables, counts int32 [D, E], holders int32 [D, G], me int32 [], shape) -> (tables, transfer, used)

from this device's tables of one layer, the tokens of each source for each expert, the expert in each slot (-1 for
none), and this device's place: the tables with new destinations, the transfer of the replicas that come late, and its
sizes in use, equal on all devices (both None without such replicas).
Letters: docs/notation.md; slot int32 [E, D] of each expert on each device, -1 where it is not; quota [E, D] tokens of e
on d.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.routing import Tables
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.ordering import in_line
from moe_jax.parallel.sparse_all_gather import empty_replicas, open_replicas, shrunk
from moe_jax.parallel.static_sizes import TransferShape, TransferTables
from moe_jax.parallel.varying import cast_varying, match_varying, varying_axes
from moe_jax.planning.arrays import LOOPS, falling
from moe_jax.planning.balanced import Levelling, level_quotas
from moe_jax.planning.fastermoe import Shadowing
from moe_jax.planning.hecate import Calibration
from moe_jax.planning.llep import Llep, fitted_quotas
from moe_jax.planning.placement import SHARE_ONE, TransferSizes, fit_replicas, late_size
from moe_jax.planning.plan_shape import PlanShape
from moe_jax.planning.routing import node_edges

MOST_VALUES = 1 << 13  # of padded [E, D] or [D, D]: a block of threads keeps several such arrays in its registers


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
        return decide_by(plan.after_gate, tables, counts, holders, lax.axis_index(axes), plan)


def fetch_late(x, late: TransferShape, axes: tuple[str, ...], decided, bank, grad_sink):
    """Fetch the replicas that come after the gate, in a branch; return (x, (values {name: [m, ...]}, their grad_sink)).

    Args:
      x: floats and integers of which all that follows the gate is made; see `in_line`.
      late: the largest transfer that the program has; axes: mesh axes of the expert-parallel group.
      decided: what `decide` returned; bank {name: [Rb, ...]}; grad_sink {name: [Hs, ...]}.
    """
    tables, lists, used = decided
    bank, grad_sink = cast_varying((bank, grad_sink), varying_axes(x))

    def none(grad_sink):
        return empty_replicas(bank, late), empty_replicas(grad_sink, late)

    def fetch(grad_sink, part):
        fitted = shrunk(lists, late, part)
        opened = open_replicas(bank, tables.home_row, grad_sink, fitted, part, axes)
        rest = late.slots - part.slots  # zeros
        return jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, rest), *((0, 0),) * (leaf.ndim - 1))), opened)

    # a branch for none and one for each size, of which all devices take the same
    branches = [none, *(functools.partial(fetch, part=part) for part in late.halves())]
    with jax.named_scope("after_gate"):
        size = late_size(used, late, jnp)
        return in_line(x, lambda grad_sink, size: lax.switch(size, branches, grad_sink), grad_sink, size)


def device_loop(step, carry, times, going=None):
    """Do what `loop` of planning/arrays.py says, traced."""
    if going is None:  # a GPU need not ask the host after every turn whether to go on, if `times` is a constant
        return lax.fori_loop(0, times, step, carry)

    def more(state):
        return (state[0] < times) & going(state[1])

    return lax.while_loop(more, lambda state: (state[0] + 1, step(*state)), (jnp.int32(0), carry))[1]


LOOPS[jnp] = device_loop


def slots_of(holders, experts: int):
    """Return int32 [E, D], the slot in which each device holds each expert; -1 where it does not."""
    devices, slots = holders.shape
    expert = jnp.where(holders < 0, experts, holders)
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None], holders.shape)
    device = jnp.broadcast_to(jnp.arange(devices, dtype=jnp.int32)[:, None], holders.shape)
    return jnp.full((experts, devices), -1, jnp.int32).at[expert, device].set(slot, mode="drop")


@functools.singledispatch
def decide_by(rule, tables, counts, holders, me, shape):
    """Return (tables, transfer, used) of a layer by a planner's rule, of which the file's first lines say all.

    Raises:
      TypeError: nothing is registered here for the rule's class.
    """
    raise TypeError(f"no tables are made of {rule!r}: register its class with moe_jax.moe.after_gate.decide_by")


@decide_by.register(Shadowing)
def shadow(rule, tables, counts, holders, me, shape):
    """Shadow experts as FasterMoE: a device computes its own tokens of a shadowed expert, all others go home."""
    slot, late = slots_of(holders[:, : shape.home_slots], counts.shape[1]), shape.late
    home = jnp.argmax(slot, axis=1).astype(jnp.int32)
    at_home = home * shape.slots + jnp.max(slot, axis=1)
    counts = counts.astype(jnp.result_type(float))
    chosen = rule.fitting(jnp, counts[None], home[None], late)[0][0]
    wanted = chosen[:, None] & (jnp.arange(counts.shape[0])[None] != home[:, None])
    fit = fit_replicas(jnp, wanted[None], falling(jnp, jnp.sum(counts, axis=0))[None], home[None], late)
    added, slot, transfer, used = late_tables(fit, slot, me, shape)
    dest_slot = jnp.where(added[:, me], me * shape.slots + slot[:, me], at_home)
    decided = dataclasses.replace(
        tables,
        dest_slot=dest_slot[:, None] + jnp.zeros_like(tables.dest_slot),
        dest_num=jnp.ones_like(tables.dest_num),
        dest_den=jnp.ones_like(tables.dest_den),
    )
    return decided, transfer, used


@decide_by.register(Calibration)
def calibrate(rule, tables, counts, holders, me, shape):
    """Add replicas as Hecate; tokens go by the rule `nearest` over those planned ahead and those added."""
    slot = slots_of(holders, counts.shape[1])
    counts, home = counts.astype(jnp.result_type(float)), homes_of(slot, shape)
    _, fit, pays = rule.choose(jnp, counts[None], (slot >= 0)[None], home[None], shape.late)
    _, with_late, transfer, used = late_tables(fit, slot, me, shape)
    tables = nearest(tables, jnp.where(pays[0], with_late, slot), me, shape)
    return tables, transfer, TransferSizes(*(jnp.where(pays[0], size, 0) for size in used))


@decide_by.register(Levelling)
def level(rule, tables, counts, holders, me, shape):
    """Share tokens as `balanced`, over the replicas planned ahead."""
    slot = slots_of(holders, counts.shape[1])
    home = (slot >= 0) & (slot < shape.home_slots)
    counts = counts.astype(jnp.result_type(float))
    quota = levelled(jnp.sum(counts, axis=0), slot >= 0, home, rule.sweeps)
    return share_tables(tables, counts, quota, slot, me, shape), None, None


def levelled(totals, held, home, sweeps: int):
    """Return what `level_quotas` does [E, D]; on an NVIDIA GPU by one kernel that fits it, equal up to rounding."""

    def loops(totals, held, home):
        return level_quotas(jnp, totals[None], held[None], home[None], sweeps)[0]

    rows, columns = _padded(held.shape)
    if max(rows, columns) * columns > MOST_VALUES:  # more than a block's registers hold
        return loops(totals, held, home)
    kernel = functools.partial(level_in_one_kernel, sweeps=sweeps)
    return lax.platform_dependent(totals, held, home, cuda=kernel, default=loops)


@decide_by.register(Llep)
def spill(rule, tables, counts, holders, me, shape):
    """Spill experts as `llep`, with replicas that fit the late transfer."""
    slot = slots_of(holders, counts.shape[1])
    counts, home = counts.astype(jnp.result_type(float)), homes_of(slot, shape)
    quota, _, fit = fitted_quotas(jnp, jnp.sum(counts, axis=0)[None], home[None], shape.late, rule)
    _, slot, transfer, used = late_tables(fit, slot, me, shape)
    return share_tables(tables, counts, quota[0], slot, me, shape), transfer, used


def homes_of(slot, plan: PlanShape):
    """Return int32 [E], the device of each expert's home: slot int32 [E, D], -1 where the expert is not."""
    return jnp.argmax((slot >= 0) & (slot < plan.home_slots), axis=1).astype(jnp.int32)


def late_tables(fit, slot, me, plan: PlanShape):
    """Write the tables of the late transfer for device `me`.

    Args:
      fit: of one layer, what `fit_replicas` returns.
      slot: int32 [E, D], the slot of each expert on each device before the gate, -1 where it is not.
      me: int32 []; plan: with the largest size of the transfer, `late`.

    Returns:
      (added bool [E, D], the replicas that fit; slot with theirs; TransferTables of this device; TransferSizes in use).
    """
    added, (nth, turn, late), sizes = fit[0][0], (place[0] for place in fit[1]), fit[2]
    shape, home_slots, (experts, _) = plan.late, plan.home_slots, added.shape
    nodes, inside = shape.nodes, shape.inside
    at_home = (slot >= 0) & (slot < home_slots)
    home, home_slot = homes_of(slot, plan), jnp.max(jnp.where(at_home, slot, 0), axis=1)

    place = home % inside * shape.offers + nth  # among its level's offers
    offer = jnp.full((shape.offers,), home_slots, jnp.int32)
    travels = jnp.any(added, axis=1)
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
    slot = jnp.where(added, home_slots + plan.replica_slots - plan.late_slots + late, slot)
    used = TransferSizes(*(size[0] for size in sizes[:3]))
    return added, slot, TransferTables(offer=offer, pick=pick, want=want), used


def nearest(tables, slot, me, shape):
    """Return the tables with this source's destinations: the own device, else the own node's holders, else all."""
    experts, devices = slot.shape
    held = slot >= 0
    device = jnp.arange(devices, dtype=jnp.int32)
    own, near = device == me, device // shape.devices_per_node == me // shape.devices_per_node
    here, inside = held & own[None], held & near[None]
    one = jnp.any(here, axis=1, keepdims=True)
    candidate = jnp.where(one, here, jnp.where(jnp.any(inside, axis=1, keepdims=True), inside, held))
    number = jnp.sum(candidate, axis=1, dtype=jnp.int32)
    place = (jnp.cumsum(candidate, axis=1, dtype=jnp.int32) - 1 - (me % number)[:, None]) % number[:, None]
    place = jnp.where(candidate, place, devices)
    target = device[None] * shape.slots + jnp.maximum(slot, 0)
    expert = jnp.broadcast_to(jnp.arange(experts)[:, None], place.shape)
    upto = jnp.minimum(device[None] + 1, number[:, None])
    return dataclasses.replace(
        tables,
        dest_slot=jnp.zeros_like(target).at[expert, place].set(target, mode="drop"),
        dest_num=upto.astype(jnp.uint32),
        dest_den=number.astype(jnp.uint32),
    )


def share_tables(tables, counts, quota, slot, me, shape):
    """Return the tables of this source by which tokens are split as quotas [E, D] say; slot int32 [E, D], -1: none."""
    devices, experts = counts.shape
    at_home = (slot >= 0) & (slot < shape.home_slots)
    device, per_node = jnp.arange(devices, dtype=jnp.int32), shape.devices_per_node
    supply = jnp.sum(counts.reshape(-1, per_node, experts), axis=1).T  # [E, Nn]
    return dataclasses.replace(
        tables,
        dest_slot=device[None] * shape.slots + jnp.maximum(slot, 0),
        dest_num=node_edges(jnp, supply, quota, at_home, me // per_node).astype(jnp.uint32),
        dest_den=jnp.full((experts,), SHARE_ONE, jnp.uint32),
    )


def level_in_one_kernel(totals, held, home, sweeps: int, interpret: bool = False):
    """Return quotas [E, D], those of `level_quotas` but for rounding, by one kernel on a GPU.

    The rule is a loop over experts inside a loop over rounds, each turn on a few numbers: as XLA's loops that is
    thousands of launches a layer. Here one block of threads keeps the quotas in registers. Nothing is sorted: water
    fills a set of holders to level (amount + sum of their grounds) / number, and the least such level over the sets
    "all holders whose ground is no higher than holder i's" is the level at which the water stands.

    Args:
      totals: float [E]; held, home: bool [E, D].
      sweeps: rounds, at most.
      interpret: run on any device, step by step; for tests.
    """
    from jax.experimental import pallas as pl

    totals, held, home = match_varying(totals, held, home)
    experts, devices = held.shape
    rows, columns = _padded((experts, devices))
    more = (0, rows - experts), (0, columns - devices)
    flags = jnp.pad(held.astype(jnp.int32) + 2 * home.astype(jnp.int32), more)
    out = jax.ShapeDtypeStruct(flags.shape, totals.dtype, manual_axis_type=jax.typeof(totals).manual_axis_type)
    options = {}
    if not interpret:
        from jax.experimental.pallas import triton

        options = {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=1)}
    kernel = functools.partial(_kernel, experts=experts, devices=devices, sweeps=sweeps)
    quota = pl.pallas_call(kernel, out_shape=out, interpret=interpret, name="level", **options)(
        jnp.pad(totals, more[0]), flags
    )
    # whatever a GPU made of it, tokens go to holders alone
    return jnp.where(held, quota[:experts, :devices], jnp.zeros((), quota.dtype))


def _padded(sizes):
    """Return the powers of two that hold the sizes, as Triton's arrays must be."""
    return tuple(1 << (size - 1).bit_length() for size in sizes)


def _kernel(totals_ref, flags_ref, quota_ref, *, experts: int, devices: int, sweeps: int):
    totals, flags = totals_ref[...], flags_ref[...]
    held, home = flags % 2 == 1, flags >= 2
    zero = jnp.zeros((), totals.dtype)
    row = lax.broadcasted_iota(jnp.int32, flags.shape, 0)
    place = lax.broadcasted_iota(jnp.int32, totals.shape, 0)

    def pour(expert, carry):
        quota, load = carry
        here = row == expert
        holds = jnp.sum(jnp.where(here & held, 1, 0), axis=0) > 0
        mine = jnp.sum(jnp.where(here, quota, zero), axis=0)
        amount = jnp.sum(jnp.where(place == expert, totals, zero))
        base = load - mine
        # the level to which `amount` fills the grounds of the holders
        inside = (base[None, :] <= base[:, None]) & holds[None, :]  # [D, D], the set of each holder
        number = jnp.sum(inside.astype(base.dtype), axis=1)
        ground = jnp.sum(jnp.where(inside, base[None, :], zero), axis=1)
        level = (amount + ground) / jnp.maximum(number, jnp.ones((), base.dtype))
        level = jnp.min(jnp.where(holds, level, jnp.full((), jnp.inf, base.dtype)))
        new = jnp.where(holds, jnp.maximum(level - base, zero), zero)
        replicated = jnp.sum(holds.astype(jnp.int32)) > 1
        quota = jnp.where(here & replicated, new[None, :], quota)
        return quota, jnp.where(replicated, base + new, load)

    def sweep(carry):
        turn, quota, load, _ = carry
        quota, after = lax.fori_loop(0, experts, pour, (quota, load))
        change, mean = jnp.max(jnp.abs(after - load)), jnp.sum(after) / devices
        return turn + 1, quota, after, (change > 1e-3 * mean).astype(jnp.int32)

    quota = jnp.where(home, totals[:, None], zero)
    start = jnp.int32(0), quota, jnp.sum(quota, axis=0), jnp.int32(1)
    quota_ref[...] = lax.while_loop(lambda carry: (carry[0] < sweeps) & (carry[3] > 0), sweep, start)[1]
