"""Sparse collectives: some devices get some chunks for a while, and their gradients are summed back where they live.

`sparse_all_gather` enters with a bank of chunks and the table of one layer, and leaves with the chunks of the guest
slots; `sparse_reduce_scatter` enters with one gradient per guest slot, and leaves with their sums per home slot. The
VJP of the first is the second. How the bytes move (`TransferPlan`) is static; which chunk goes into which slot is data.

A chunk is one row of every array of the bank; all arrays of a chunk travel as one message. The bank itself gets no
gradient: it may hold the chunks of all layers, and a loop over them would carry its gradient. The sums leave as the
cotangent of `sink`, one row per home slot.
Letters: S bank rows of this device, Hs home slots and Gs guest slots of a layer, D devices, T rounds, X chunks that
each device offers to all, B chunks broadcast to all, n elements of a chunk.
Where the bank is in 16 bits and the sink in float32, `open_guests` gives gradients a door of the sink's dtype: they are
added in float32 on the device and at home. Rounds carry them rounded once, in the bank's dtype; `gather` and
`broadcast`, which add on the way, carry float32, twice the bytes of the way out.
Source: Hecate, section 3.1; Pro-Prophet's Trans and Agg.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.journey import Journey, bring_back, fetch, zeros_varying
from moe_jax.collectives.transfer import Transfer, TransferPlan
from moe_jax.collectives.varying import match_varying, varying_axes

Array = jax.Array
Bank = dict[str, Array]


def sparse_all_gather(bank: Bank, rows: Array, sink: Bank, table: Transfer, plan: TransferPlan) -> Bank:
    """Bring chunks to the guest slots; to be called inside `shard_map` by all devices of `plan.axes`.

    Args:
      bank: {name: [S, ...]}, this device's chunks; no gradient flows into it.
      rows: int32 [Hs], the bank row of each home slot.
      sink: {name: [Hs, ...]}, whose values are not read, and whose cotangent is the sum of the guests' gradients.
      table: who sends and takes what.
      plan: how.

    Returns:
      {name: [Gs, ...]} in the bank's dtype; slots that nothing fills are zero.
    """
    bank = jax.tree.map(lax.stop_gradient, bank)
    bank, rows, sink, table = match_varying(bank, rows, sink, table)
    dtypes = tuple(sorted((name, leaf.dtype) for name, leaf in sink.items()))
    return _all_gather(plan, dtypes, bank, rows, sink, table)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_gather(plan, dtypes, bank, rows, sink, table):
    del dtypes, sink
    with jax.named_scope("sparse_all_gather"):
        return fetch(plan, bank, rows, table).at_once(empty_guests(bank, plan))


def _all_gather_fwd(plan, dtypes, bank, rows, sink, table):
    return _all_gather(plan, dtypes, bank, rows, sink, table), table


def _all_gather_bwd(plan, dtypes, table, gradients):
    sums = sparse_reduce_scatter(gradients, table, plan, dtypes=dict(dtypes))
    return None, None, sums, None


_all_gather.defvjp(_all_gather_fwd, _all_gather_bwd)


def open_guests(bank: Bank, rows: Array, sink: Bank, table: Transfer, plan: TransferPlan) -> tuple[Bank, Bank]:
    """Return (guests, doors): `sparse_all_gather` with the gradients beside the values, in the sink's dtype.

    The guests have no gradient. The doors {name: [Gs, ...]} are zeros that nothing reads, and their cotangents are the
    gradients of the guests: in the dtype of the sums, wider than that of guests in 16 bits.
    """
    with jax.named_scope("sparse_all_gather"):
        bank, rows, sink, table = match_varying(jax.tree.map(lax.stop_gradient, bank), rows, sink, table)
        guests = fetch(plan, bank, rows, table).at_once(empty_guests(bank, plan))
        wires = tuple(sorted((name, leaf.dtype) for name, leaf in bank.items()))
        return guests, _open_doors(plan, wires, sink, table)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _open_doors(plan, wires, sink, table):
    del wires, table
    return {n: zeros_varying((plan.guest_slots, *leaf.shape[1:]), leaf.dtype, leaf) for n, leaf in sink.items()}


def _open_doors_bwd(plan, wires, table, gradients):
    return sparse_reduce_scatter(gradients, table, plan, wires=dict(wires)), None


_open_doors.defvjp(lambda plan, wires, sink, table: (_open_doors(plan, wires, sink, table), table), _open_doors_bwd)


def fetch_journey(bank: Bank, rows: Array, table: Transfer, plan: TransferPlan) -> Journey:
    """Return `sparse_all_gather` in steps, without a gradient; arrivals overwrite the slots [Gs] that they fill.

    With the plan and the table of `cut` that is a part of a transfer; the parts together are the whole.
    """
    bank, rows, table = match_varying(bank, rows, table)
    return fetch(plan, bank, rows, table).named("sparse_all_gather")


def return_journey(guests: Bank, table: Transfer, plan: TransferPlan, wires=None) -> Journey:
    """Return the `sparse_reduce_scatter` of a part of a transfer in steps; arrivals are added to [Hs], in its dtypes.

    `wires` is as there.
    Where the guests vary over more axes than the sums (replicas of the group), what is added is summed over those.
    """
    guests, table = match_varying(guests, table)
    guests = for_the_wire(guests, plan, wires)
    steps = bring_back(plan, guests, table)

    def unpack(arrived, into):
        more = tuple(sorted(varying_axes(guests) - varying_axes(into)))
        if not more:
            return steps.unpack(arrived, into)
        sums = steps.unpack(arrived, {n: zeros_varying(leaf.shape, leaf.dtype, guests[n]) for n, leaf in into.items()})
        return jax.tree.map(lambda total, part: total + lax.psum(part, more), into, sums)

    return Journey(steps.pack, steps.carry, unpack).named("sparse_reduce_scatter")


def cut(plan: TransferPlan, table: Transfer, start: float, stop: float, layer: int | None = None):
    """Return the plan and the table of one part of a transfer: its rounds or chunks from `start` to `stop`.

    Args:
      plan, table: of the whole; the table of one layer.
      start, stop: shares between 0 and 1, rounded to whole rounds (`shift`, `permute`) or chunks per device.
      layer: which list of rounds to run, where that is known while tracing; None asks the table.

    Returns:
      (plan, table), or None for a part without a round.
    """
    units = max(map(len, plan.rounds), default=0) if plan.method in ("shift", "permute") else table.send.shape[0]
    first, last = round(start * units), round(stop * units)
    if last <= first:
        return None
    send, take = table.send[first:last], table.take
    if plan.method in ("shift", "permute"):
        lists = plan.rounds if layer is None or len(plan.rounds) < 2 else (plan.rounds[layer],)
        plan = dataclasses.replace(plan, rounds=tuple(rounds[first:last] for rounds in lists))
        take = take[first:last]
    elif plan.method == "gather":
        device, chunk = take // units, take % units
        devices = lax.axis_size(plan.axes)
        mine = (device < devices) & (chunk >= first) & (chunk < last)
        take = jnp.where(mine, device * (last - first) + chunk - first, devices * (last - first))
    else:
        take = jnp.where((take >= first) & (take < last), take - first, last - first)
    return plan, dataclasses.replace(table, send=send, take=take)


def for_the_wire(guests: Bank, plan: TransferPlan, wires) -> Bank:
    """Return the gradients of guests as they travel: rounds carry them in `wires` {name: dtype}, each rounded once.

    `gather` and `broadcast` add them up on their way, so there they keep their dtype.
    """
    if wires is None or plan.method not in ("shift", "permute"):
        return guests
    return {name: leaf.astype(wires[name]) for name, leaf in guests.items()}


def sparse_reduce_scatter(guests: Bank, table: Transfer, plan: TransferPlan, dtypes=None, wires=None) -> Bank:
    """Sum one value per guest slot at the home of its chunk: {name: [Gs, ...]} -> {name: [Hs, ...]}.

    Args:
      guests: travel in their own dtype, or as `for_the_wire` says.
      table, plan: of the `sparse_all_gather` that filled the slots.
      dtypes: {name: dtype} of the sums, that of the guests where not given.
      wires: {name: dtype} in which rounds carry them; None is their own.

    Returns:
      The sums over the guests only: what the home itself has to add is not in them.
    """
    guests, table = match_varying(guests, table)
    with jax.named_scope("sparse_reduce_scatter"):
        sums = {
            name: zeros_varying((plan.home_slots, *leaf.shape[1:]), (dtypes or {}).get(name, leaf.dtype), leaf)
            for name, leaf in guests.items()
        }
        guests = for_the_wire(guests, plan, wires)
        return bring_back(plan, guests, table).at_once(sums)


def empty_guests(bank: Bank, plan: TransferPlan) -> Bank:
    """Return guest slots of zeros {name: [Gs, ...]}."""
    return {name: zeros_varying((plan.guest_slots, *leaf.shape[1:]), leaf.dtype, leaf) for name, leaf in bank.items()}
