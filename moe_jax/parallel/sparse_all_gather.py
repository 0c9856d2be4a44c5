"""Sparse collectives: some devices get some chunks for one step, and the gradients are summed at their owners.

Inputs: a bank of chunks and the tables of one layer. Outputs: the chunks of the replica slots, whose gradients go home
by the same tables. In which sizes bytes move (`TransferShape`) is static; which chunk goes into which slot is data.

A chunk is one row of every array of the bank; all arrays of a chunk travel as one message. The bank itself gets no
gradient: it may hold the chunks of all layers, and a loop over them would carry its gradient. The sums leave as the
cotangent of `grad_sink`, one row per home slot.

Chunks are cut into slices, spread, each slice sent over the slow links once, and collected again. A transfer is a
`ChunkTransfer`, three steps of which the second communicates, so that computation can be placed next to it.

    fetch       A  all-to-all of the level: slice j of all that each device offers to member j
                B  by node: the slices that another node needs, once, to the member of equal rank there
                C  all-to-all of the level: each member's slices of what its replica slots hold
    give back   C, A (and B) the other way, with sums on the way: of a level's members, then of the nodes

Gradients travel in the dtype that the caller gives them and are added in at least float32, in a fixed order and by
gathers alone: on GPUs a scatter that adds is not repeatable to the bit. Each partial sum is rounded once to travel on.
A transfer may be cut along the elements of its chunks: a part is a range of eighths, padded to whole slices.

Letters: docs/notation.md; n elements of a chunk, w of a part of it, s = w / inside of a slice; X, Cp, m as in
`static_sizes.py`.
Source: Hecate, section 3.1, and Pro-Prophet's Trans and Agg; the slices are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.few_kernels import first_places
from moe_jax.parallel.static_sizes import PARTS, TransferShape, TransferTables
from moe_jax.parallel.varying import cast_varying, match_varying, varying_axes, zeros_varying

Array = jax.Array
Bank = dict[str, Array]
Axes = tuple[str, ...]
WHOLE = (0, PARTS)
_take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)

jax.tree_util.register_dataclass(TransferTables, data_fields=["offer", "pick", "want"], meta_fields=[])


@dataclasses.dataclass(frozen=True)
class ChunkTransfer:
    """A transfer in three steps.

    Attributes:
      pack: () -> payload, what this device sends.
      communicate: payload -> what arrives; the only step that communicates.
      unpack: (what arrives, into {name: [slots, ...]}) -> `into` with the arrivals in it.
    """

    pack: Callable
    communicate: Callable
    unpack: Callable

    def at_once(self, into: Bank) -> Bank:
        """Run the three steps one after the other."""
        return self.unpack(self.communicate(self.pack()), into)


_NOTHING = ChunkTransfer(lambda: (), lambda payload: payload, lambda _, into: into)  # a part of a small chunk


def open_replicas(
    bank: Bank, rows: Array, grad_sink: Bank, tables: TransferTables, shape: TransferShape, axes: Axes
) -> tuple[Bank, Bank]:
    """Bring chunks to the replica slots; to be called inside `shard_map` by all devices of the mesh axes `axes`.

    Args:
      bank: {name: [Rb, ...]}, this device's chunks, of one dtype; no gradient flows into it.
      rows: int32 [Hs], the bank row of each home slot.
      grad_sink: {name: [Hs, ...]}, whose values are not read, and whose cotangent is the sum of the replicas'
        gradients. Gradients are added in its dtype on the device, and travel rounded to the bank's.
      tables: who offers and wants which chunk; shape: in which sizes, for which a program is compiled.

    Returns:
      replicas {name: [m, ...]} in the bank's dtype, without a gradient; slots that nothing fills are zero.
      their grad_sink {name: [m, ...]}: zeros that nothing reads, whose cotangent is the gradients of the replicas, in
        the dtype of the sums, wider than that of replicas in 16 bits.
    """
    bank, rows, grad_sink, tables = match_varying(jax.tree.map(lax.stop_gradient, bank), rows, grad_sink, tables)
    replicas = fetch(bank, rows, tables, shape, axes).at_once(empty_replicas(bank, shape))
    wires = tuple(sorted((name, leaf.dtype) for name, leaf in bank.items()))
    return replicas, _replica_grad_sink((shape, axes), wires, rows.shape[0], grad_sink, tables)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _replica_grad_sink(transfer, wires, home_slots, grad_sink, tables):
    del wires, home_slots, tables
    return empty_replicas(grad_sink, transfer[0])


def _gradients_home(transfer, wires, home_slots, tables, gradients):
    gradients, tables = match_varying(gradients, tables)
    sums = {n: zeros_varying((home_slots, *leaf.shape[1:]), leaf.dtype, gradients) for n, leaf in gradients.items()}
    return return_part(gradients, tables, *transfer, wires=dict(wires)).at_once(sums), None


_replica_grad_sink.defvjp(
    lambda transfer, wires, slots, sink, tables: (_replica_grad_sink(transfer, wires, slots, sink, tables), tables),
    _gradients_home,
)


def return_part(
    replicas: Bank, tables: TransferTables, shape: TransferShape, axes: Axes, part=WHOLE, wires=None
) -> ChunkTransfer:
    """Return the transfer of a part of the gradients to their homes, which add them to the sums {name: [Hs, ...]}.

    The sums are over the replicas only: what the home itself has to add is not in them. Where the replicas vary over
    more axes than the sums (several data-parallel groups), what is added is summed over those.

    Args:
      replicas: {name: [m, ...]}, one value per replica slot.
      tables, shape, axes: of the `fetch` that filled the slots; part: (first, last) eighth of it.
      wires: {name: dtype} in which they travel, one dtype; None is their own.
    """
    sent = replicas if wires is None else {name: leaf.astype(wires[name]) for name, leaf in replicas.items()}
    sent, tables = match_varying(sent, tables)
    scope, move = jax.named_scope("sparse_reduce_scatter"), functools.partial(_swap, shape=shape, axes=axes)
    first, last = _columns(sent, shape.inside, part)
    if first == last:
        return _NOTHING

    def pack():
        return _slices_of(sent, jnp.arange(shape.slots, dtype=jnp.int32), first, last, shape.inside)

    def communicate(mine):
        wire = mine.dtype
        came = move(mine)
        sums = sum_by_target(came.reshape(-1, came.shape[-1]), tables.want.reshape(-1), shape.places, shape.inside)
        offered = shape.inside * shape.offers
        own = sums[:offered]
        if shape.crosses:
            others = sums[offered:].astype(wire).reshape(shape.nodes, shape.crossing, -1)
            back = move(others, across=True).reshape(-1, others.shape[-1])
            own = own + sum_by_target(back, tables.pick.reshape(-1), offered, shape.nodes)
        return move(own.astype(wire).reshape(shape.inside, shape.offers, -1))

    def unpack(arrived, into):
        home = next(iter(into.values())).shape[0]
        same = tables.offer[None] == jnp.arange(home, dtype=tables.offer.dtype)[:, None]  # [Hs, X], at most one a row
        place = jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), shape.offers)
        packed = _take(arrived.swapaxes(0, 1).reshape(arrived.shape[1], -1), place)
        more = {n: tuple(sorted(varying_axes(sent) - varying_axes(leaf))) for n, leaf in into.items()}
        if not any(more.values()):
            return _put(into, packed, first, last, add=True)
        sums = {n: zeros_varying(leaf.shape, leaf.dtype, sent) for n, leaf in into.items()}
        sums = _put(sums, packed, first, last, add=True)
        return {n: total + (lax.psum(sums[n], more[n]) if more[n] else sums[n]) for n, total in into.items()}

    return ChunkTransfer(scope(pack), scope(communicate), scope(unpack))


def empty_replicas(bank: Bank, shape: TransferShape) -> Bank:
    """Return replica slots of zeros {name: [m, ...]}."""
    return {name: zeros_varying((shape.slots, *leaf.shape[1:]), leaf.dtype, leaf) for name, leaf in bank.items()}


def fetch(
    bank: Bank, rows: Array, tables: TransferTables, shape: TransferShape, axes: Axes, part=WHOLE
) -> ChunkTransfer:
    """Return the transfer of chunks to replica slots {name: [m, ...]}; a part overwrites its elements of all slots.

    Slots that nothing fills become zero. No gradient flows.

    Args:
      bank: {name: [Rb, ...]}, of one dtype; rows: int32 [Hs], the bank row of each home slot.
      tables, shape, axes: who offers and wants what, in which sizes, and the mesh axes of the devices.
      part: (first, last) eighth of every chunk.
    """
    bank, rows, tables = match_varying(bank, rows, tables)
    scope, move = jax.named_scope("sparse_all_gather"), functools.partial(_swap, shape=shape, axes=axes)
    first, last = _columns(bank, shape.inside, part)
    if first == last:
        return _NOTHING
    home_slots, bank_rows = rows.shape[0], next(iter(bank.values())).shape[0]

    def pack():
        row = jnp.where(tables.offer < home_slots, rows[jnp.minimum(tables.offer, home_slots - 1)], bank_rows)
        # what no slot wants may be any row
        return _slices_of(bank, jnp.minimum(row, bank_rows - 1), first, last, shape.inside)

    def communicate(offered):
        here = move(offered).reshape(shape.inside * shape.offers, -1)
        if shape.crosses:
            came = move(_take(here, tables.pick), across=True)
            here = jnp.concatenate([here, came.reshape(-1, came.shape[-1])])
        return move(_take(here, tables.want))

    def unpack(arrived, into):
        packed = arrived.swapaxes(0, 1).reshape(arrived.shape[1], -1)  # [inside, m, s] -> [m, w]
        return _put(into, packed, first, last, add=False)

    return ChunkTransfer(scope(pack), scope(communicate), scope(unpack))


def shrunk(tables: TransferTables, shape: TransferShape, small: TransferShape) -> TransferTables:
    """Return the tables of a smaller shape, of which only the first offers, crossings and slots are in use."""
    tables_in, offers = shape.inside * shape.offers, small.offers
    pick, want = tables.pick, tables.want[:, : small.slots]
    if shape.by_node:
        near = pick < tables_in
        offered = pick // shape.offers * offers + pick % shape.offers
        pick = jnp.where(near, offered, small.inside * offers)[:, : small.crossing]
    came = jnp.maximum(want - tables_in, 0)
    crossing = max(shape.crossing, 1)
    far = small.inside * offers + came // crossing * small.crossing + came % crossing
    near = want < tables_in
    offered = want // shape.offers * offers + want % shape.offers
    want = jnp.where(near, offered, jnp.where(want < shape.places, far, small.places))
    return TransferTables(offer=tables.offer[:offers], pick=pick, want=want)


def sum_by_target(values: Array, target: Array, targets: int, most: int) -> Array:
    """Add rows with equal targets, in at least float32: values [k, s], target int32 [k] -> [targets, s].

    Rows are sorted by target, of equals in their order, and added pairwise as a tree: the same order every time.

    Args:
      target: `targets` or more for a row that counts nowhere.
      most: static, the most rows with one target.
    """
    rows = values.shape[0]
    order = jnp.argsort(target, stable=True)
    ranked = target[order]
    total = values[order].astype(jnp.promote_types(values.dtype, jnp.float32))
    step = 1
    while step < min(most, rows):
        same = jnp.concatenate([ranked[step:] == ranked[:-step], jnp.zeros_like(ranked[:step], bool)])
        ahead = jnp.concatenate([total[step:], jnp.zeros_like(total[:step])])
        total = total + jnp.where(same[:, None], ahead, 0)
        step *= 2
    wanted = jnp.arange(targets, dtype=ranked.dtype)
    first = first_places(ranked, wanted)
    found = ranked[jnp.minimum(first, rows - 1)] == wanted
    return _take(total, jnp.where(found, first, rows))


def _swap(blocks: Array, shape: TransferShape, axes: Axes, across: bool = False) -> Array:
    """Hand block j of [inside, ...] to member j of the level, or q of [Nn, ...] to that of equal rank on node q."""
    nodes, inside = shape.nodes, shape.inside
    groups = [[node * inside + j for j in range(inside)] for node in range(nodes)]
    if across:
        groups = [[node * inside + j for node in range(nodes)] for j in range(inside)]
    elif nodes == 1:
        groups = None
    blocks = cast_varying(blocks, axes)
    return lax.all_to_all(blocks, axes, 0, 0, axis_index_groups=groups, tiled=True)


def _columns(leaves: Bank, inside: int, part: tuple[int, int]) -> tuple[int, int]:
    """Return the first and the last (exclusive) element of a part: whole slices, the last ones padded."""
    elements = sum(math.prod(leaf.shape[1:]) for leaf in leaves.values())
    first, last = (math.ceil(elements * eighth / PARTS / inside) * inside for eighth in part)
    return first, last


def _slices_of(leaves: Bank, index: Array, first: int, last: int, inside: int) -> Array:
    """Return elements [first, last) of rows `index` of all leaves side by side, past the last one zeros, as slices.

    These are [inside, k, s]: of each row one for each member.
    """
    pieces = []
    for name, begin, size in _places(leaves):
        low, high = max(first - begin, 0), min(last - begin, size)
        if low < high:
            pieces.append(jnp.take(leaves[name], index, axis=0).reshape(index.shape[0], size)[:, low:high])
    missing = last - first - sum(piece.shape[1] for piece in pieces)
    if missing:
        like = next(iter(leaves.values()))
        pieces.append(zeros_varying((index.shape[0], missing), like.dtype, like))
    return jnp.concatenate(pieces, axis=1).reshape(index.shape[0], inside, -1).swapaxes(0, 1)


def _places(leaves: Bank):
    """Yield (name, first element, elements) of every leaf of a chunk."""
    begin = 0
    for name in sorted(leaves):
        size = math.prod(leaves[name].shape[1:])
        yield name, begin, size
        begin += size


def _put(into: Bank, packed: Array, first: int, last: int, add: bool) -> Bank:
    """Return the leaves [k, ...] with elements [first, last) replaced by packed [k, w], or with it added to them."""
    out = dict(into)
    for name, begin, size in _places(into):
        low, high = max(first - begin, 0), min(last - begin, size)
        if low >= high:
            continue
        flat = into[name].reshape(-1, size)
        old, new = flat[:, low:high], packed[:, begin + low - first : begin + high - first].astype(flat.dtype)
        new = old + new if add else new
        flat = new if high - low == size else lax.dynamic_update_slice_in_dim(flat, new, low, axis=1)
        out[name] = flat.reshape(into[name].shape)
    return out
