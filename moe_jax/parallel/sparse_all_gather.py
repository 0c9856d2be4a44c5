"""Sparse collectives: some devices get some chunks for one step, and the gradients are summed at their owners.

`sparse_all_gather` takes a bank of chunks and the tables of one layer, and returns the chunks of the replica slots;
`sparse_reduce_scatter` takes one gradient per replica slot, and returns their sums per home slot. The VJP of the first
is the second. In which sizes bytes move (`TransferShape`) is static; which chunk goes into which slot is data. How they
move is in `slices.py`.

A chunk is one row of every array of the bank; all arrays of a chunk travel as one message. The bank itself gets no
gradient: it may hold the chunks of all layers, and a loop over them would carry its gradient. The sums leave as the
cotangent of `grad_sink`, one row per home slot.

Where the bank is in 16 bits and `grad_sink` in float32, `open_replicas` gives gradients a `grad_sink` of that dtype:
they are added in float32 on the device, on the way and at home, and travel rounded to the bank's dtype.
Letters: docs/notation.md; X, Cp, m as in `transfer_shape.py`.
Source: Hecate, section 3.1; Pro-Prophet's Trans and Agg.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax

from moe_jax.parallel.slices import WHOLE, ChunkTransfer, fetch, give_back, zeros_varying
from moe_jax.parallel.transfer_shape import TransferShape, TransferTables
from moe_jax.parallel.varying import match_varying, varying_axes

Array = jax.Array
Bank = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What a program is compiled for: the sizes of a transfer, and the mesh axes of its devices."""

    shape: TransferShape
    axes: tuple[str, ...]

    @property
    def slots(self) -> int:
        """m: replica slots of a device."""
        return self.shape.slots


def sparse_all_gather(bank: Bank, rows: Array, grad_sink: Bank, tables: TransferTables, transfer: Transfer) -> Bank:
    """Bring chunks to the replica slots; to be called inside `shard_map` by all devices of `transfer.axes`.

    Args:
      bank: {name: [Rb, ...]}, this device's chunks, of one dtype; no gradient flows into it.
      rows: int32 [Hs], the bank row of each home slot.
      grad_sink: {name: [Hs, ...]}, whose values are not read, and whose cotangent is the sum of the replicas'
        gradients.
      tables: who offers and wants which chunk.

    Returns:
      {name: [m, ...]} in the bank's dtype; slots that nothing fills are zero.
    """
    bank = jax.tree.map(lax.stop_gradient, bank)
    bank, rows, grad_sink, tables = match_varying(bank, rows, grad_sink, tables)
    dtypes = tuple(sorted((name, leaf.dtype) for name, leaf in grad_sink.items()))
    return _all_gather(transfer, dtypes, bank, rows, grad_sink, tables)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_gather(transfer, dtypes, bank, rows, grad_sink, tables):
    del dtypes, grad_sink
    with jax.named_scope("sparse_all_gather"):
        return fetch(bank, rows, tables, transfer.shape, transfer.axes).at_once(empty_replicas(bank, transfer))


def _all_gather_fwd(transfer, dtypes, bank, rows, grad_sink, tables):
    return _all_gather(transfer, dtypes, bank, rows, grad_sink, tables), (tables, rows)


def _all_gather_bwd(transfer, dtypes, residuals, gradients):
    tables, rows = residuals
    sums = sparse_reduce_scatter(gradients, tables, transfer, rows.shape[0], dtypes=dict(dtypes))
    return None, None, sums, None


_all_gather.defvjp(_all_gather_fwd, _all_gather_bwd)


def open_replicas(
    bank: Bank, rows: Array, grad_sink: Bank, tables: TransferTables, transfer: Transfer
) -> tuple[Bank, Bank]:
    """Return (replicas, their grad_sink): `sparse_all_gather` with gradients in the dtype of `grad_sink`.

    The replicas have no gradient. Their grad_sink {name: [m, ...]} is zeros that nothing reads, and its cotangent is
    the gradients of the replicas: in the dtype of the sums, wider than that of replicas in 16 bits.
    """
    with jax.named_scope("sparse_all_gather"):
        bank, rows, grad_sink, tables = match_varying(jax.tree.map(lax.stop_gradient, bank), rows, grad_sink, tables)
        empty = empty_replicas(bank, transfer)
        replicas = fetch(bank, rows, tables, transfer.shape, transfer.axes).at_once(empty)
        wires = tuple(sorted((name, leaf.dtype) for name, leaf in bank.items()))
        return replicas, _replica_grad_sink(transfer, wires, rows.shape[0], grad_sink, tables)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _replica_grad_sink(transfer, wires, home_slots, grad_sink, tables):
    del wires, home_slots, tables
    return {n: zeros_varying((transfer.slots, *leaf.shape[1:]), leaf.dtype, leaf) for n, leaf in grad_sink.items()}


def _replica_grad_sink_fwd(transfer, wires, home_slots, grad_sink, tables):
    return _replica_grad_sink(transfer, wires, home_slots, grad_sink, tables), tables


def _replica_grad_sink_bwd(transfer, wires, home_slots, tables, gradients):
    return sparse_reduce_scatter(gradients, tables, transfer, home_slots, wires=dict(wires)), None


_replica_grad_sink.defvjp(_replica_grad_sink_fwd, _replica_grad_sink_bwd)


def fetch_part(
    bank: Bank, rows: Array, tables: TransferTables, transfer: Transfer, part: tuple[int, int] = WHOLE
) -> ChunkTransfer:
    """Return a part (first, last eighth) of `sparse_all_gather` in steps, without a gradient; it fills its elements."""
    bank, rows, tables = match_varying(bank, rows, tables)
    return fetch(bank, rows, tables, transfer.shape, transfer.axes, part).named("sparse_all_gather")


def return_part(
    replicas: Bank, tables: TransferTables, transfer: Transfer, part: tuple[int, int] = WHOLE, wires=None
) -> ChunkTransfer:
    """Return the `sparse_reduce_scatter` of a part of a transfer in steps; arrivals are added to the sums [Hs, ...].

    `wires` is as in `sparse_reduce_scatter`. Where the replicas vary over more axes than the sums (several
    data-parallel groups), what is added is summed over those.
    """
    replicas, tables = match_varying(for_the_wire(replicas, wires), tables)
    steps = give_back(replicas, tables, transfer.shape, transfer.axes, part)

    def unpack(arrived, into):
        more = tuple(sorted(varying_axes(replicas) - varying_axes(into)))
        if not more:
            return steps.unpack(arrived, into)
        sums = steps.unpack(
            arrived, {n: zeros_varying(leaf.shape, leaf.dtype, replicas[n]) for n, leaf in into.items()}
        )
        return jax.tree.map(lambda total, part: total + lax.psum(part, more), into, sums)

    return ChunkTransfer(steps.pack, steps.communicate, unpack).named("sparse_reduce_scatter")


def for_the_wire(replicas: Bank, wires) -> Bank:
    """Return the gradients of replicas as they travel: in `wires` {name: dtype}, or their own dtype for None."""
    return replicas if wires is None else {name: leaf.astype(wires[name]) for name, leaf in replicas.items()}


def sparse_reduce_scatter(
    replicas: Bank, tables: TransferTables, transfer: Transfer, home_slots: int, dtypes=None, wires=None
) -> Bank:
    """Sum one value per replica slot at the home of its chunk: {name: [m, ...]} -> {name: [Hs, ...]}.

    Args:
      replicas: one value per replica slot.
      tables, transfer: of the `sparse_all_gather` that filled the slots.
      home_slots: Hs.
      dtypes: {name: dtype} of the sums, that of the replicas where not given.
      wires: {name: dtype} in which they travel; None is their own.

    Returns:
      The sums over the replicas only: what the home itself has to add is not in them.
    """
    replicas, tables = match_varying(replicas, tables)
    with jax.named_scope("sparse_reduce_scatter"):
        sums = {
            name: zeros_varying((home_slots, *leaf.shape[1:]), (dtypes or {}).get(name, leaf.dtype), leaf)
            for name, leaf in replicas.items()
        }
        return give_back(for_the_wire(replicas, wires), tables, transfer.shape, transfer.axes).at_once(sums)


def empty_replicas(bank: Bank, transfer: Transfer) -> Bank:
    """Return replica slots of zeros {name: [m, ...]}."""
    return {name: zeros_varying((transfer.slots, *leaf.shape[1:]), leaf.dtype, leaf) for name, leaf in bank.items()}
