"""Rows of the expert bank: in the order of a checkpoint's file, and moved to the experts' new homes.

Inputs: leaves of a segment's bank, [D Rb, ...] over the expert axis, and the home of every expert. Outputs: the same
numbers as [L, E, ...] by (layer, expert), independent of mesh and placement, and the way back; or a state whose experts
changed their homes. Values are copied, never computed with.
Letters: docs/notation.md; e experts of a layer on one device in the file: E / D, or where D does not divide E as many
as the most devices up to D can share evenly; the others hold e too, behind the E, that are in no file: [L, D e, ...].
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.models.language_model import flatten, is_bank, segment_of
from moe_jax.parallel.mesh import replace_leaf
from moe_jax.parallel.varying import cast_varying, varying_axes
from moe_jax.planning.placement import Placement, bank_rows, reshard_permutation

Homes = dict[str, np.ndarray]  # {segment: int [L, E]}


def home_of(name: str, home: Homes) -> np.ndarray | None:
    """Return the homes int [L, E] of the experts in the leaf of this name, None where it is not of the bank."""
    return home[segment_of(name)] if is_bank(name) else None


def stored_as(leaf, home: np.ndarray) -> jax.ShapeDtypeStruct:
    """Return a bank leaf [D Rb, ...] (an array or ShapeDtypeStruct) in the file's order: [L, D e, ...], sharded."""
    axes, devices = _split(leaf.sharding)
    layers, experts = home.shape
    sharding = NamedSharding(leaf.sharding.mesh, P(None, axes or None, *leaf.sharding.spec[1:]))
    shape = (layers, devices * in_file(experts, devices), *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def in_file(experts: int, devices: int) -> int:
    """Return e, the experts of a layer that one device holds of the file."""
    return experts // max(parts for parts in range(1, min(experts, devices) + 1) if experts % parts == 0)


def _split(sharding: NamedSharding) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes that split the bank's rows, and D, into how many parts."""
    first = sharding.spec[0] if len(sharding.spec) else None
    axes = () if first is None else (first,) if isinstance(first, str) else tuple(first)
    return axes, math.prod(sharding.mesh.shape[axis] for axis in axes)


# Both ways run on the devices, layer by layer, so that no device ever holds more than one layer's experts besides its
# own part. Where every expert's home is the device that stores it in the file (plain expert parallelism), nothing moves
# between devices.
def to_file(leaf: jax.Array, home: np.ndarray) -> jax.Array:
    """Return [L, D e, ...] from a bank leaf [D Rb, ...]."""
    home, rows, exchanges = _order(leaf, home)
    return _to_file(leaf.sharding, stored_as(leaf, home).sharding, exchanges)(leaf, home, rows)


def from_file(stored: jax.Array, leaf: jax.ShapeDtypeStruct, home: np.ndarray) -> jax.Array:
    """Return the bank leaf that `leaf` describes from [L, D e, ...]; rows without an expert become zero."""
    home, rows, exchanges = _order(leaf, home)
    bank_size = leaf.shape[0] // _split(leaf.sharding)[1]
    return _from_file(leaf.sharding, stored_as(leaf, home).sharding, exchanges, bank_size)(stored, home, rows)


def _order(leaf, home: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return int32 [L, D e] of each expert's home and of its bank row there, and whether the file has another home.

    Behind the E experts the home is D, which is none.
    """
    placement = Placement(np.asarray(home))
    home, rows, devices, experts = placement.home, bank_rows(placement), _split(leaf.sharding)[1], placement.experts
    assert leaf.shape[0] % devices == 0, (leaf.shape, devices)
    assert home.max() < devices and rows.max() < leaf.shape[0] // devices, "homes of another mesh"
    each = in_file(experts, devices)
    behind = ((0, 0), (0, devices * each - experts))
    home, rows = np.pad(home, behind, constant_values=devices), np.pad(rows, behind)
    return home, rows, bool((home != np.arange(devices * each) // each).any())


def copied(state, home: Homes, copy: Callable[[str, jax.Array], Any]) -> dict[str, Any]:
    """Return {name: copy(name, leaf as a file holds it)} of a state's leaves, when all is done.

    A leaf of the bank that was reordered is gone before the next one is.
    """
    copies = {}
    for name, leaf in flatten(state).items():
        own = home_of(name, home)
        ordered = leaf if own is None else to_file(leaf, own)
        copies[name] = copy(name, ordered)
        if ordered is not leaf:
            jax.block_until_ready(copies[name])
            ordered.delete()
    return jax.block_until_ready(copies)


def in_host_memory(array: jax.Array) -> jax.Array:
    """Return a copy of an array in buffers of its own in host memory, which may still be under way."""
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


def described_for_file(needed: dict[str, Any], home: Homes) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the leaves {name: ShapeDtypeStruct with a NamedSharding} of a state in a file's order, on this mesh."""
    owns = {name: home_of(name, home) for name in needed}
    return {name: leaf if owns[name] is None else stored_as(leaf, owns[name]) for name, leaf in needed.items()}


def shapes_in_file(described: dict[str, Any], home: Homes) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a file holds of `described_for_file`: without what lies behind the last expert."""
    owns = {name: home_of(name, home) for name in described}
    return {
        name: leaf.shape if owns[name] is None else (*owns[name].shape, *leaf.shape[2:])
        for name, leaf in described.items()
    }


def read_leaves(
    stored: dict[str, Any], needed: dict[str, Any], tree, home: Homes,
    source: tuple[str, Callable[[], contextlib.AbstractContextManager]], stored_dtype: str = "",
):  # fmt: skip
    """Return leaves on this run's mesh, in the structure of `tree`.

    Args:
      stored: {name: object with `dtype`, `shape` and [index].read().result()}, in the order of a file.
      needed: {name: ShapeDtypeStruct with a NamedSharding}, leaves of `tree`.
      home: where the experts are to be stored.
      source: what the leaves are read from, in words, and a context that turns errors of reading into a UserError.
      stored_dtype: of all leaves in the file, from which each is cast once it is there; '' for those of `needed`.

    UserError: the first leaf that differs between `stored` and `needed`.
    """
    (what, errors_named), dtypes = source, [leaf.dtype for leaf in needed.values()]
    if stored_dtype:
        needed = {name: leaf.update(dtype=stored_dtype) for name, leaf in needed.items()}
    assert all(isinstance(leaf.sharding, NamedSharding) for leaf in needed.values()), "a leaf has no NamedSharding"
    wanted = described_for_file(needed, home)
    shapes = shapes_in_file(wanted, home)
    kinds = [
        {name: f"{leaf.dtype.name} {list(leaf.shape)}" for name, leaf in stored.items()},
        {name: f"{leaf.dtype.name} {list(shapes[name])}" for name, leaf in wanted.items()},
    ]
    differing = [name for name in {**wanted, **stored} if kinds[0].get(name) != kinds[1].get(name)]
    if differing:
        held, here = (kind.get(differing[0], "absent") for kind in kinds)
        more = f" (and {len(differing) - 1} more leaves differ)" if len(differing) > 1 else ""
        raise UserError(
            f"{what} is not of this model: {differing[0]} is {held} in the checkpoint and {here} in this run{more}; "
            "use the model, optimizer and tokenizer that it was trained with, or another --workdir"
        )
    leaves = []
    for (name, leaf), dtype in zip(needed.items(), dtypes, strict=True):
        sharding, shape = wanted[name].sharding, wanted[name].shape
        parts = {repr(index): index for index in sharding.addressable_devices_indices_map(shape).values()}
        own = home_of(name, home)
        if own is not None:  # parts behind the last expert are in no file
            parts = {part: index for part, index in parts.items() if (index[1].start or 0) < own.shape[1]}
        with errors_named():
            reading = {part: stored[name][index].read() for part, index in parts.items()}  # all at once
            held = {part: future.result() for part, future in reading.items()}
        nothing = np.zeros(sharding.shard_shape(shape), leaf.dtype)
        array = jax.make_array_from_callback(
            shape, sharding, lambda index, held=held, nothing=nothing: held.get(repr(index), nothing)
        )
        if own is not None:
            array, in_order = from_file(array, leaf, own), array
            jax.block_until_ready(array)
            in_order.delete()  # not two banks at once
        if array.dtype != dtype:
            array = replace_leaf(lambda array, dtype=dtype: array.astype(dtype), array, leaf.sharding)
        leaves.append(array)
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


@functools.lru_cache(maxsize=128)
def _to_file(sharding: NamedSharding, out: NamedSharding, exchange: bool):
    axes, devices = _split(sharding)

    def body(bank, home, rows):
        me = lax.axis_index(axes) if axes else 0
        held = home.shape[1] // devices

        def one_layer(layer):
            home_E, rows_E = layer
            if not exchange:
                return jnp.take(bank, lax.dynamic_slice_in_dim(rows_E, me * held, held), axis=0)
            mine = jnp.take(bank, jnp.where(home_E == me, rows_E, 0), axis=0)  # [E, ...], those of others are not read
            arrived = lax.all_to_all(mine.reshape(devices, held, *mine.shape[1:]), axes, 0, 0)  # [source, e, ...]
            return arrived[lax.dynamic_slice_in_dim(home_E, me * held, held), jnp.arange(held)]

        return lax.map(one_layer, (home, rows))

    moved = jax.shard_map(body, mesh=sharding.mesh, in_specs=(sharding.spec, P(), P()), out_specs=out.spec)
    return jax.jit(moved, out_shardings=out)


@functools.lru_cache(maxsize=128)
def _from_file(sharding: NamedSharding, stored: NamedSharding, exchange: bool, bank_size: int):
    axes, devices = _split(sharding)

    def body(experts, home, rows):
        me = lax.axis_index(axes) if axes else 0
        held = home.shape[1] // devices

        def one_layer(bank, layer):
            experts_e, home_E, rows_E = layer
            if exchange:
                experts_e = lax.all_gather(experts_e, axes, tiled=True)  # [E, ...]
                places = jnp.where(home_E == me, rows_E, bank_size)
            else:
                places = lax.dynamic_slice_in_dim(rows_E, me * held, held)
            return bank.at[places].set(experts_e, mode="drop"), None

        bank = cast_varying(jnp.zeros((bank_size, *experts.shape[2:]), experts.dtype), varying_axes(experts))
        return lax.scan(one_layer, bank, (experts, home, rows))[0]

    moved = jax.shard_map(body, mesh=sharding.mesh, in_specs=(stored.spec, P(), P()), out_specs=sharding.spec)
    return jax.jit(moved, out_shardings=sharding)


# A change of homes: parameters and moments of all experts move to the bank rows of a new placement, every leaf in its
# own dtype, in rounds of one all-to-all, in which a device sends at most one row to each other device: next to the leaf
# and its new version memory holds D rows and the D that arrive, however many move. The rounds are data: the program is
# compiled once.
def reshard(
    state: dict, old: Placement, new: Placement, rows: int, segment: str,
    share: Callable[[Callable], Callable] = lambda move: move,
) -> dict:  # fmt: skip
    """Return the state with the experts where `new` homes them. The given state is donated.

    Args:
      rows: Rb.
      segment: whose bank moves.
      share: jitted move -> what runs it; the move is the same object for banks of the same shapes and shardings.
    """
    leaves, tree = jax.tree.flatten(state)
    at = [index for index, name in enumerate(flatten(state)) if is_bank(name) and segment_of(name) == segment]
    held = [leaves[index] for index in at]
    bank = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in held)
    tables = move_tables(reshard_permutation(old, new, rows), old.devices)
    for index, leaf in zip(at, share(_mover(bank))(held, tables), strict=True):
        leaves[index] = leaf
    return jax.tree.unflatten(tree, leaves)


def move_tables(source: np.ndarray, devices: int) -> dict[str, np.ndarray]:
    """Sort the moves of a permutation, in which row r takes what row source[r] holds (int [D Rb]), into rounds.

    Returns:
      stay int32 [D, Rb]: the own row that each row takes, Rb where it comes from another device; send int32 [D, Rb, D]:
      the row that a device sends to each other in a round, Rb for none; place int32 [D, Rb, D]: where it puts the row
      of each other; rounds int32 []: rounds in use.
    """
    rows = len(source) // devices
    target = np.arange(len(source))
    owner, new = source // rows, target // rows
    stay = np.where(owner == new, source % rows, rows).reshape(devices, rows)
    moved = np.flatnonzero(owner != new)
    pair = owner[moved] * devices + new[moved]
    order = np.argsort(pair, kind="stable")
    ranked = pair[order]
    start = np.searchsorted(ranked, ranked, side="left")
    turn = np.empty(len(moved), np.int64)
    turn[order] = np.arange(len(moved)) - start
    send = np.full((devices, rows, devices), rows, np.int32)
    place = np.full((devices, rows, devices), rows, np.int32)
    send[owner[moved], turn, new[moved]] = source[moved] % rows
    place[new[moved], turn, owner[moved]] = moved % rows
    rounds = np.int32(turn.max(initial=-1) + 1)
    return {"stay": stay.astype(np.int32), "send": send, "place": place, "rounds": rounds}


@functools.lru_cache(maxsize=8)
def _mover(bank: tuple):
    """Return the jitted move of all leaves of a bank, one after the other; bank: their shapes with shardings."""

    def move(leaves, tables):
        moved = []
        for leaf, kind in zip(leaves, bank, strict=True):
            axes, _ = _split(kind.sharding)
            rounds = jax.shard_map(
                functools.partial(_move_rows, axes),
                mesh=kind.sharding.mesh,
                in_specs=(kind.sharding.spec, *[P(axes or None)] * 3, P()),
                out_specs=kind.sharding.spec,
            )
            moved.append(rounds(leaf, tables["stay"], tables["send"], tables["place"], tables["rounds"]))
        return moved

    return jax.jit(move, donate_argnums=0, out_shardings=[kind.sharding for kind in bank])


def _move_rows(axes: tuple[str, ...], bank, stay, send, place, rounds):
    """Return this device's new bank [Rb, ...]; `move_tables` tells the rest, of which it has its own row."""
    stay, send, place = stay[0], send[0], place[0]
    new = jnp.take(bank, stay, axis=0, mode="fill", fill_value=0)

    def one_round(turn, new):
        sent = jnp.take(bank, send[turn], axis=0, mode="fill", fill_value=0)  # [D, ...], a row for each device
        arrived = lax.all_to_all(sent, axes, 0, 0, tiled=True) if axes else sent
        return new.at[place[turn]].set(arrived, mode="drop")

    return lax.fori_loop(0, rounds, one_round, cast_varying(new, varying_axes(bank, send)))
