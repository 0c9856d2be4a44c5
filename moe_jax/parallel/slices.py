"""How chunks travel: cut into slices, spread, each slice over the slow links once, and collected again.

Inputs: a static shape, the tables of one layer, and the chunks of this device (a bank to fetch from, or gradients of
replicas to return to their homes). Outputs: a `ChunkTransfer`, three steps of which the second communicates, so that
computation can be placed beside it.

    fetch       A  all-to-all of the level: slice j of all that each device offers to member j
                B  by node: the slices that another node needs, once, to the member of equal rank there
                C  all-to-all of the level: each member's slices of what its replica slots hold
    give back   C, A (and B) the other way, with sums on the way: of a level's members, then of the nodes

Gradients travel in the dtype that the caller gives them and are added in at least float32, in a fixed order and by
gathers alone: on GPUs a scatter that adds is not repeatable to the bit. Each partial sum is rounded once to travel on.
A transfer may be cut along the elements of its chunks: a part is a range of eighths, padded to whole slices.

Letters: docs/notation.md; n elements of a chunk, w of a part of it, s = w / inside of a slice; X, Cp, m as in
`transfer_shape.py`.
Source: the sparse collectives of Hecate, section 3.1; the slices are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.sorted_search import first_places
from moe_jax.parallel.transfer_shape import TransferShape, TransferTables
from moe_jax.parallel.varying import cast_varying, varying_axes

Array = jax.Array
Bank = dict[str, Array]
PARTS = 8  # a transfer is cut at multiples of an eighth
WHOLE = (0, PARTS)

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

    def named(self, scope: str) -> ChunkTransfer:
        """Return the transfer with every step inside a named scope."""

        def within(step):
            @functools.wraps(step)
            def run(*arguments):
                with jax.named_scope(scope):
                    return step(*arguments)

            return run

        return ChunkTransfer(within(self.pack), within(self.communicate), within(self.unpack))


_NOTHING = ChunkTransfer(lambda: (), lambda payload: payload, lambda _, into: into)  # a part of a small chunk


def fetch(
    bank: Bank, rows: Array, tables: TransferTables, shape: TransferShape, axes: tuple[str, ...], part=WHOLE
) -> ChunkTransfer:
    """Return the transfer of chunks to replica slots {name: [m, ...]}; a part overwrites its elements of all slots.

    Args:
      bank: {name: [Rb, ...]}, of one dtype; rows: int32 [Hs], the bank row of each home slot.
      tables, shape: who offers and wants what, and in which sizes.
      axes: mesh axes of the D devices.
      part: (first, last) eighth of every chunk.

    Slots that nothing fills become zero.
    """
    levels = _Levels(shape, axes)
    first, last = _columns(_elements(bank), shape.inside, part)
    if first == last:
        return _NOTHING
    home_slots, bank_rows = rows.shape[0], next(iter(bank.values())).shape[0]

    def pack():
        row = jnp.where(tables.offer < home_slots, rows[jnp.minimum(tables.offer, home_slots - 1)], bank_rows)
        # what no slot wants may be any row
        return _sliced(_columns_of(bank, jnp.minimum(row, bank_rows - 1), first, last), shape.inside)

    def communicate(offered):
        here = levels.swap_inside(offered).reshape(shape.inside * shape.offers, -1)
        if shape.crosses:
            came = levels.swap_across(_take(here, tables.pick))
            here = jnp.concatenate([here, came.reshape(-1, came.shape[-1])])
        return levels.swap_inside(_take(here, tables.want))

    def unpack(arrived, into):
        return _with_columns(into, _joined(arrived), first, last)

    return ChunkTransfer(pack, communicate, unpack)


def give_back(
    gradients: Bank, tables: TransferTables, shape: TransferShape, axes: tuple[str, ...], part=WHOLE
) -> ChunkTransfer:
    """Return the transfer of gradients {name: [m, ...]} to their homes, which add them to sums {name: [Hs, ...]}.

    Args:
      gradients: of the replica slots, of one dtype, in which they travel.
      tables, shape, axes, part: of the `fetch` that filled the slots.
    """
    levels = _Levels(shape, axes)
    first, last = _columns(_elements(gradients), shape.inside, part)
    if first == last:
        return _NOTHING

    def pack():
        every = jnp.arange(shape.slots, dtype=jnp.int32)
        return _sliced(_columns_of(gradients, every, first, last), shape.inside)

    def communicate(mine):
        wire = mine.dtype
        came = levels.swap_inside(mine)
        sums = sum_by_target(came.reshape(-1, came.shape[-1]), tables.want.reshape(-1), shape.places, shape.inside)
        offered = shape.inside * shape.offers
        own = sums[:offered]
        if shape.crosses:
            others = sums[offered:].astype(wire).reshape(shape.nodes, shape.crossing, -1)
            back = levels.swap_across(others).reshape(-1, others.shape[-1])
            own = own + sum_by_target(back, tables.pick.reshape(-1), offered, shape.nodes)
        return levels.swap_inside(own.astype(wire).reshape(shape.inside, shape.offers, -1))

    def unpack(arrived, sums):
        home = next(iter(sums.values())).shape[0]
        same = tables.offer[None] == jnp.arange(home, dtype=tables.offer.dtype)[:, None]  # [Hs, X], at most one a row
        place = jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), shape.offers)
        return _plus_columns(sums, _take(_joined(arrived), place), first, last)

    return ChunkTransfer(pack, communicate, unpack)


def shrunk(tables: TransferTables, shape: TransferShape, small: TransferShape) -> TransferTables:
    """Return the tables of a smaller shape, of which only the first offers, crossings and slots are in use."""
    tables_in, offers = shape.inside * shape.offers, small.offers

    def offered(index):
        return index // shape.offers * offers + index % shape.offers

    pick = tables.pick
    if shape.by_node:
        pick = jnp.where(pick < tables_in, offered(pick), small.inside * offers)[:, : small.crossing]
    want = tables.want[:, : small.slots]
    came = jnp.maximum(want - tables_in, 0)
    crossing = max(shape.crossing, 1)
    far = small.inside * offers + came // crossing * small.crossing + came % crossing
    want = jnp.where(want < tables_in, offered(want), jnp.where(want < shape.places, far, small.places))
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


def zeros_varying(shape, dtype, like) -> Array:
    """Return zeros that vary over the axes of `like`."""
    return cast_varying(jnp.zeros(shape, dtype), varying_axes(like))


@dataclasses.dataclass(frozen=True)
class _Levels:
    """The two kinds of exchange: among the devices of a level, and among those of equal rank on all nodes."""

    shape: TransferShape
    axes: tuple[str, ...]

    def swap_inside(self, blocks: Array) -> Array:
        """Hand block j of [inside, ...] to member j."""
        nodes, inside = self.shape.nodes, self.shape.inside
        groups = [[node * inside + j for j in range(inside)] for node in range(nodes)]
        return self._swap(blocks, groups if nodes > 1 else None)

    def swap_across(self, blocks: Array) -> Array:
        """Hand block q of [Nn, ...] to the member of equal rank on node q."""
        nodes, inside = self.shape.nodes, self.shape.inside
        return self._swap(blocks, [[node * inside + j for node in range(nodes)] for j in range(inside)])

    def _swap(self, blocks: Array, groups) -> Array:
        blocks = cast_varying(blocks, self.axes)
        return lax.all_to_all(blocks, self.axes, 0, 0, axis_index_groups=groups, tiled=True)


def _elements(leaves: Bank) -> int:
    return sum(math.prod(leaf.shape[1:]) for leaf in leaves.values())


def _columns(elements: int, inside: int, part: tuple[int, int]) -> tuple[int, int]:
    """Return the first and the last (exclusive) element of a part: whole slices, the last ones padded."""
    first, last = (math.ceil(elements * eighth / PARTS / inside) * inside for eighth in part)
    return first, last


def _columns_of(leaves: Bank, index: Array, first: int, last: int) -> Array:
    """Return elements [first, last) of rows `index` of all leaves side by side, [k, w]; past the last one zeros."""
    pieces = []
    for name, begin, size in _places(leaves):
        low, high = max(first - begin, 0), min(last - begin, size)
        if low < high:
            pieces.append(jnp.take(leaves[name], index, axis=0).reshape(index.shape[0], size)[:, low:high])
    missing = last - first - sum(piece.shape[1] for piece in pieces)
    if missing:
        like = next(iter(leaves.values()))
        pieces.append(zeros_varying((index.shape[0], missing), like.dtype, like))
    return jnp.concatenate(pieces, axis=1)


def _places(leaves: Bank):
    """Yield (name, first element, elements) of every leaf of a chunk."""
    begin = 0
    for name in sorted(leaves):
        size = math.prod(leaves[name].shape[1:])
        yield name, begin, size
        begin += size


def _with_columns(into: Bank, packed: Array, first: int, last: int) -> Bank:
    """Return the leaves [k, ...] with elements [first, last) replaced by packed [k, w]."""
    return _at_columns(into, packed, first, last, lambda old, new: new.astype(old.dtype))


def _plus_columns(into: Bank, packed: Array, first: int, last: int) -> Bank:
    """Return the leaves [k, ...] with packed [k, w] added to elements [first, last)."""
    return _at_columns(into, packed, first, last, lambda old, new: old + new.astype(old.dtype))


def _at_columns(into: Bank, packed: Array, first: int, last: int, put) -> Bank:
    out = dict(into)
    for name, begin, size in _places(into):
        low, high = max(first - begin, 0), min(last - begin, size)
        if low >= high:
            continue
        flat = into[name].reshape(-1, size)
        new = put(flat[:, low:high], packed[:, begin + low - first : begin + high - first])
        flat = new if high - low == size else lax.dynamic_update_slice_in_dim(flat, new, low, axis=1)
        out[name] = flat.reshape(into[name].shape)
    return out


def _sliced(chunks: Array, inside: int) -> Array:
    """Cut chunks into the slices of all members: [k, w] -> [inside, k, s]."""
    return chunks.reshape(chunks.shape[0], inside, -1).swapaxes(0, 1)


def _joined(slices: Array) -> Array:
    """Undo `_sliced`: [inside, k, s] -> [k, w]."""
    return slices.swapaxes(0, 1).reshape(slices.shape[1], -1)


def _take(rows: Array, index) -> Array:
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)
