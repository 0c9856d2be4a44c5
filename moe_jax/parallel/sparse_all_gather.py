"""Sparse collectives: some devices get some chunks for one step, and the gradients are summed at their owners.

Inputs: a bank of chunks and the tables of one layer. Outputs: the chunks of the replica slots, whose gradients go home
by the same tables. In which sizes bytes move (`TransferShape`) is static; which chunk goes into which slot is data. How
they move is in `slices.py`.

A chunk is one row of every array of the bank; all arrays of a chunk travel as one message. The bank itself gets no
gradient: it may hold the chunks of all layers, and a loop over them would carry its gradient. The sums leave as the
cotangent of `grad_sink`, one row per home slot. Letters: docs/notation.md; X, Cp, m as in `transfer_shape.py`.
Source: Hecate, section 3.1; Pro-Prophet's Trans and Agg.
"""

from __future__ import annotations

import functools

import jax
from jax import lax

from moe_jax.parallel.slices import WHOLE, ChunkTransfer, Transfer, fetch, give_back, zeros_varying
from moe_jax.parallel.transfer_shape import TransferTables
from moe_jax.parallel.varying import match_varying, varying_axes

Array = jax.Array
Bank = dict[str, Array]


def open_replicas(
    bank: Bank, rows: Array, grad_sink: Bank, tables: TransferTables, transfer: Transfer
) -> tuple[Bank, Bank]:
    """Bring chunks to the replica slots; to be called inside `shard_map` by all devices of `transfer.axes`.

    Args:
      bank: {name: [Rb, ...]}, this device's chunks, of one dtype; no gradient flows into it.
      rows: int32 [Hs], the bank row of each home slot.
      grad_sink: {name: [Hs, ...]}, whose values are not read, and whose cotangent is the sum of the replicas'
        gradients. Gradients are added in its dtype on the device, and travel rounded to the bank's.
      tables: who offers and wants which chunk.

    Returns:
      replicas {name: [m, ...]} in the bank's dtype, without a gradient; slots that nothing fills are zero.
      their grad_sink {name: [m, ...]}: zeros that nothing reads, whose cotangent is the gradients of the replicas, in
        the dtype of the sums, wider than that of replicas in 16 bits.
    """
    bank, rows, grad_sink, tables = match_varying(jax.tree.map(lax.stop_gradient, bank), rows, grad_sink, tables)
    replicas = fetch(bank, rows, tables, transfer).at_once(empty_replicas(bank, transfer))
    wires = tuple(sorted((name, leaf.dtype) for name, leaf in bank.items()))
    return replicas, _replica_grad_sink(transfer, wires, rows.shape[0], grad_sink, tables)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _replica_grad_sink(transfer, wires, home_slots, grad_sink, tables):
    del wires, home_slots, tables
    return empty_replicas(grad_sink, transfer)


def _gradients_home(transfer, wires, home_slots, tables, gradients):
    gradients, tables = match_varying(gradients, tables)
    sums = {n: zeros_varying((home_slots, *leaf.shape[1:]), leaf.dtype, gradients) for n, leaf in gradients.items()}
    return return_part(gradients, tables, transfer, wires=dict(wires)).at_once(sums), None


_replica_grad_sink.defvjp(
    lambda transfer, wires, slots, sink, tables: (_replica_grad_sink(transfer, wires, slots, sink, tables), tables),
    _gradients_home,
)


def return_part(
    replicas: Bank, tables: TransferTables, transfer: Transfer, part: tuple[int, int] = WHOLE, wires=None
) -> ChunkTransfer:
    """Return a part of the gradients' way home in steps; arrivals are added to the sums {name: [Hs, ...]}.

    The sums are over the replicas only: what the home itself has to add is not in them. Where the replicas vary over
    more axes than the sums (several data-parallel groups), what is added is summed over those.

    Args:
      replicas: {name: [m, ...]}, one value per replica slot.
      tables, transfer: of the `fetch` that filled the slots; part: (first, last) eighth of it.
      wires: {name: dtype} in which they travel; None is their own.
    """
    sent = replicas if wires is None else {name: leaf.astype(wires[name]) for name, leaf in replicas.items()}
    sent, tables = match_varying(sent, tables)
    steps = give_back(sent, tables, transfer, part)

    def unpack(arrived, into):
        more = tuple(sorted(varying_axes(sent) - varying_axes(into)))
        if not more:
            return steps.unpack(arrived, into)
        sums = steps.unpack(arrived, {n: zeros_varying(leaf.shape, leaf.dtype, sent) for n, leaf in into.items()})
        return jax.tree.map(lambda total, part: total + lax.psum(part, more), into, sums)

    return ChunkTransfer(steps.pack, steps.communicate, jax.named_scope("sparse_reduce_scatter")(unpack))


def empty_replicas(bank: Bank, transfer: Transfer) -> Bank:
    """Return replica slots of zeros {name: [m, ...]}."""
    return {name: zeros_varying((transfer.slots, *leaf.shape[1:]), leaf.dtype, leaf) for name, leaf in bank.items()}
