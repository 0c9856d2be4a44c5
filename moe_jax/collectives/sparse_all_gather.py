"""Sparse collectives: some devices get some chunks for one step, and the gradients are summed at their owners.

`sparse_all_gather` takes a bank of chunks and the table of one layer, and returns the chunks of the replica slots;
`sparse_reduce_scatter` takes one gradient per replica slot, and returns their sums per home slot. The VJP of the first
is the second. How the bytes move (`TransferPlan`) is static; which chunk goes into which slot is data.

A chunk is one row of every array of the bank; all arrays of a chunk travel as one message. The bank itself gets no
gradient: it may hold the chunks of all layers, and a loop over them would carry its gradient. The sums leave as the
cotangent of `grad_sink`, one row per home slot.

Where the bank is in 16 bits and `grad_sink` in float32, `open_replicas` gives gradients a `grad_sink` of that dtype:
they are added in float32 on the device and at home. Rounds carry them rounded once, in the bank's dtype; `gather` and
`broadcast`, whose collectives add, carry float32, twice the bytes that the parameters took.
Letters: docs/notation.md; n elements of a chunk.
Source: Hecate, section 3.1; Pro-Prophet's Trans and Agg.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.journey import Journey, bring_back, fetch, zeros_varying
from moe_jax.collectives.transfer_plan import Transfer, TransferPlan
from moe_jax.collectives.varying import match_varying, varying_axes

Array = jax.Array
Bank = dict[str, Array]


def sparse_all_gather(bank: Bank, rows: Array, grad_sink: Bank, table: Transfer, plan: TransferPlan) -> Bank:
    """Bring chunks to the replica slots; to be called inside `shard_map` by all devices of `plan.axes`.

    Args:
      bank: {name: [Rb, ...]}, this device's chunks; no gradient flows into it.
      rows: int32 [Hs], the bank row of each home slot.
      grad_sink: {name: [Hs, ...]}, whose values are not read, and whose cotangent is the sum of the replicas'
        gradients.
      table: which device sends and receives which chunk.
      plan: by which method, in which rounds.

    Returns:
      {name: [Gs, ...]} in the bank's dtype; slots that nothing fills are zero.
    """
    bank = jax.tree.map(lax.stop_gradient, bank)
    bank, rows, grad_sink, table = match_varying(bank, rows, grad_sink, table)
    dtypes = tuple(sorted((name, leaf.dtype) for name, leaf in grad_sink.items()))
    return _all_gather(plan, dtypes, bank, rows, grad_sink, table)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_gather(plan, dtypes, bank, rows, grad_sink, table):
    del dtypes, grad_sink
    with jax.named_scope("sparse_all_gather"):
        return fetch(plan, bank, rows, table).at_once(empty_replicas(bank, plan))


def _all_gather_fwd(plan, dtypes, bank, rows, grad_sink, table):
    return _all_gather(plan, dtypes, bank, rows, grad_sink, table), table


def _all_gather_bwd(plan, dtypes, table, gradients):
    sums = sparse_reduce_scatter(gradients, table, plan, dtypes=dict(dtypes))
    return None, None, sums, None


_all_gather.defvjp(_all_gather_fwd, _all_gather_bwd)


def open_replicas(bank: Bank, rows: Array, grad_sink: Bank, table: Transfer, plan: TransferPlan) -> tuple[Bank, Bank]:
    """Return (replicas, their grad_sink): `sparse_all_gather` with gradients in the dtype of `grad_sink`.

    The replicas have no gradient. Their grad_sink {name: [Gs, ...]} is zeros that nothing reads, and its cotangent is
    the gradients of the replicas: in the dtype of the sums, wider than that of replicas in 16 bits.
    """
    with jax.named_scope("sparse_all_gather"):
        bank, rows, grad_sink, table = match_varying(jax.tree.map(lax.stop_gradient, bank), rows, grad_sink, table)
        replicas = fetch(plan, bank, rows, table).at_once(empty_replicas(bank, plan))
        wires = tuple(sorted((name, leaf.dtype) for name, leaf in bank.items()))
        return replicas, _replica_grad_sink(plan, wires, grad_sink, table)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replica_grad_sink(plan, wires, grad_sink, table):
    del wires, table
    return {n: zeros_varying((plan.replica_slots, *leaf.shape[1:]), leaf.dtype, leaf) for n, leaf in grad_sink.items()}


def _replica_grad_sink_bwd(plan, wires, table, gradients):
    return sparse_reduce_scatter(gradients, table, plan, wires=dict(wires)), None


_replica_grad_sink.defvjp(
    lambda plan, wires, grad_sink, table: (_replica_grad_sink(plan, wires, grad_sink, table), table),
    _replica_grad_sink_bwd,
)


def fetch_journey(bank: Bank, rows: Array, table: Transfer, plan: TransferPlan) -> Journey:
    """Return `sparse_all_gather` in steps, without a gradient; arrivals overwrite the slots [Gs] that they fill.

    With the plan and the table of `cut` it is one part of a transfer; the parts together are the whole.
    """
    bank, rows, table = match_varying(bank, rows, table)
    return fetch(plan, bank, rows, table).named("sparse_all_gather")


def return_journey(replicas: Bank, table: Transfer, plan: TransferPlan, wires=None) -> Journey:
    """Return the `sparse_reduce_scatter` of a part of a transfer in steps; arrivals are added to the sums [Hs, ...].

    `wires` is as in `sparse_reduce_scatter`. Where the replicas vary over more axes than the sums (several
    data-parallel groups), what is added is summed over those.
    """
    replicas, table = match_varying(replicas, table)
    replicas = for_the_wire(replicas, plan, wires)
    steps = bring_back(plan, replicas, table)

    def unpack(arrived, into):
        more = tuple(sorted(varying_axes(replicas) - varying_axes(into)))
        if not more:
            return steps.unpack(arrived, into)
        sums = steps.unpack(
            arrived, {n: zeros_varying(leaf.shape, leaf.dtype, replicas[n]) for n, leaf in into.items()}
        )
        return jax.tree.map(lambda total, part: total + lax.psum(part, more), into, sums)

    return Journey(steps.pack, steps.carry, unpack).named("sparse_reduce_scatter")


def cut(plan: TransferPlan, table: Transfer, start: float, stop: float, layer: int | None = None):
    """Return the plan and the table of one part of a transfer: its rounds or chunks from `start` to `stop`.

    Args:
      plan, table: of the whole; the table of one layer.
      start, stop: shares between 0 and 1, rounded to whole rounds (`shift`, `permute`) or chunks per device.
      layer: which list of rounds to run, where that is known while tracing; None takes it from the table.

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


def for_the_wire(replicas: Bank, plan: TransferPlan, wires) -> Bank:
    """Return the gradients of replicas as they travel: rounds carry them in `wires` {name: dtype}, each rounded once.

    `gather` and `broadcast` add them in the collective, so there they keep their dtype.
    """
    if wires is None or plan.method not in ("shift", "permute"):
        return replicas
    return {name: leaf.astype(wires[name]) for name, leaf in replicas.items()}


def sparse_reduce_scatter(replicas: Bank, table: Transfer, plan: TransferPlan, dtypes=None, wires=None) -> Bank:
    """Sum one value per replica slot at the home of its chunk: {name: [Gs, ...]} -> {name: [Hs, ...]}.

    Args:
      replicas: travel in their own dtype, or as `for_the_wire` says.
      table, plan: of the `sparse_all_gather` that filled the slots.
      dtypes: {name: dtype} of the sums, that of the replicas where not given.
      wires: {name: dtype} in which rounds carry them; None is their own.

    Returns:
      The sums over the replicas only: what the home itself has to add is not in them.
    """
    replicas, table = match_varying(replicas, table)
    with jax.named_scope("sparse_reduce_scatter"):
        sums = {
            name: zeros_varying((plan.home_slots, *leaf.shape[1:]), (dtypes or {}).get(name, leaf.dtype), leaf)
            for name, leaf in replicas.items()
        }
        replicas = for_the_wire(replicas, plan, wires)
        return bring_back(plan, replicas, table).at_once(sums)


def empty_replicas(bank: Bank, plan: TransferPlan) -> Bank:
    """Return replica slots of zeros {name: [Gs, ...]}."""
    return {name: zeros_varying((plan.replica_slots, *leaf.shape[1:]), leaf.dtype, leaf) for name, leaf in bank.items()}
