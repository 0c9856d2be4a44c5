"""Rows of the expert bank: in the order of a checkpoint's file, and moved to the experts' new homes.

Inputs: leaves of a segment's bank, [D Rb, ...] over the expert axis, and the home of every expert. Outputs: the same
numbers as [L, E, ...] by (layer, expert), independent of mesh and placement, and the way back; or a state whose experts
changed their homes. Values are copied, never computed with.
Letters: docs/notation.md; e experts of a layer on one device in the file: E / D, or where D does not divide E as many
as the most devices up to D can share evenly; the others hold e too, behind the E, that are in no file: [L, D e, ...].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.models.language_model import flatten, segment_of
from moe_jax.parallel.varying import cast_varying, varying_axes
from moe_jax.planning.placement import Placement, bank_rows

Homes = dict[str, np.ndarray]  # {segment: int [L, E]}


def home_of(name: str, home: Homes) -> np.ndarray | None:
    """Return the homes int [L, E] of the experts in the leaf of this name, None where it is not of the bank."""
    segment = segment_of(name)
    return None if segment is None else home[segment]


def file_shape(leaf, home: np.ndarray | None) -> tuple[int, ...]:
    """Return the shape that a file holds of a leaf: [L, E, ...] of one of the bank, its shape of another."""
    return leaf.shape if home is None else (*home.shape, *leaf.shape[1:])


def in_order(leaf, home: np.ndarray | None) -> jax.ShapeDtypeStruct:
    """Describe a bank leaf [D Rb, ...] (an array or ShapeDtypeStruct) in the file's order: [L, D e, ...], sharded.

    A leaf of no bank, whose `home` is None, is in its order already.
    """
    if home is None:
        return leaf
    axes, devices = _split(leaf.sharding)
    layers, experts = home.shape
    sharers = max(parts for parts in range(1, min(experts, devices) + 1) if experts % parts == 0)
    sharding = NamedSharding(leaf.sharding.mesh, P(None, axes or None, *leaf.sharding.spec[1:]))
    shape = (layers, devices * (experts // sharers), *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def _split(sharding: NamedSharding) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes that split the bank's rows, and D, into how many parts."""
    first = sharding.spec[0] if len(sharding.spec) else None
    axes = () if first is None else (first,) if isinstance(first, str) else tuple(first)
    return axes, math.prod(sharding.mesh.shape[axis] for axis in axes)


# Both ways run on the devices, layer by layer, so that no device ever holds more than one layer's experts besides its
# own part. Where every expert's home is the device that stores it in the file (plain expert parallelism), nothing moves
# between devices.
def to_file(leaf: jax.Array, home: np.ndarray | None) -> jax.Array:
    """Return [L, D e, ...] from a bank leaf [D Rb, ...]; a leaf of no bank as it is."""
    if home is None:
        return leaf
    homes, rows, exchanges = _order(leaf, home)
    return _to_file(leaf.sharding, in_order(leaf, home).sharding, exchanges)(leaf, homes, rows)


def from_file(stored: jax.Array, leaf: jax.ShapeDtypeStruct, home: np.ndarray | None) -> jax.Array:
    """Return the leaf that `leaf` describes from `stored`, in the file's order, which is gone then.

    Rows of the bank without an expert become zero.
    """
    if home is None:
        return stored
    homes, rows, exchanges = _order(leaf, home)
    bank_size = leaf.shape[0] // _split(leaf.sharding)[1]
    moved = _from_file(leaf.sharding, in_order(leaf, home).sharding, exchanges, bank_size)(stored, homes, rows)
    jax.block_until_ready(moved)
    stored.delete()  # not two banks at once
    return moved


def _order(leaf, home: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return int32 [L, D e] of each expert's home and of its bank row there, and whether the file has another home.

    Behind the E experts the home is D, which is none.
    """
    placement = Placement(np.asarray(home))
    home, rows, devices, experts = placement.home, bank_rows(placement), _split(leaf.sharding)[1], placement.experts
    assert leaf.shape[0] % devices == 0, (leaf.shape, devices)
    assert home.max() < devices and rows.max() < leaf.shape[0] // devices, "homes of another mesh"
    each = in_order(leaf, home).shape[1] // devices
    behind = ((0, 0), (0, devices * each - experts))
    home, rows = np.pad(home, behind, constant_values=devices), np.pad(rows, behind)
    return home, rows, bool((home != np.arange(devices * each) // each).any())


@functools.lru_cache(maxsize=128)
def _to_file(sharding: NamedSharding, out: NamedSharding, exchange: bool):
    axes, devices = _split(sharding)

    def body(bank, home, rows):
        me = lax.axis_index(axes) if axes else 0
        each = home.shape[1] // devices

        def one_layer(layer):
            home_E, rows_E = layer
            if not exchange:
                return jnp.take(bank, lax.dynamic_slice_in_dim(rows_E, me * each, each), axis=0)
            mine = jnp.take(bank, jnp.where(home_E == me, rows_E, 0), axis=0)  # [E, ...], those of others are not read
            arrived = lax.all_to_all(mine.reshape(devices, each, *mine.shape[1:]), axes, 0, 0)  # [source, e, ...]
            return arrived[lax.dynamic_slice_in_dim(home_E, me * each, each), jnp.arange(each)]

        return lax.map(one_layer, (home, rows))

    moved = jax.shard_map(body, mesh=sharding.mesh, in_specs=(sharding.spec, P(), P()), out_specs=out.spec)
    return jax.jit(moved, out_shardings=out)


@functools.lru_cache(maxsize=128)
def _from_file(sharding: NamedSharding, stored: NamedSharding, exchange: bool, bank_size: int):
    axes, devices = _split(sharding)

    def body(experts, home, rows):
        me = lax.axis_index(axes) if axes else 0
        each = home.shape[1] // devices

        def one_layer(bank, layer):
            experts_e, home_E, rows_E = layer
            if exchange:
                experts_e = lax.all_gather(experts_e, axes, tiled=True)  # [E, ...]
                places = jnp.where(home_E == me, rows_E, bank_size)
            else:
                places = lax.dynamic_slice_in_dim(rows_E, me * each, each)
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
    at = [index for index, name in enumerate(flatten(state)) if segment_of(name) == segment]
    bank = [leaves[index] for index in at]
    kinds = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in bank)
    # row r of the new bank holds what row source[r] of the old one held; unused rows take unused ones
    at_old, at_new = ((own.home * rows + bank_rows(own)).ravel() for own in (old, new))
    source = np.full(old.devices * rows, -1, np.int32)
    source[at_new] = at_old
    source[source < 0] = np.setdiff1d(np.arange(len(source), dtype=np.int32), at_old)
    tables = move_tables(source, old.devices)
    for index, leaf in zip(at, share(_mover(kinds))(bank, tables), strict=True):
        leaves[index] = leaf
    return jax.tree.unflatten(tree, leaves)


def move_tables(source: np.ndarray, devices: int) -> dict[str, np.ndarray]:
    """Sort the moves of a permutation, in which row r takes what row source[r] holds (int [D Rb]), into rounds.

    Returns:
      stay int32 [D, Rb]: the row of its own device that each row takes, Rb where it comes from another one; send int32
      [D, Rb, D]: the row that a device sends to each other in a round, Rb for none; place int32 [D, Rb, D]: where it
      puts the row of each other; rounds int32 []: rounds in use.
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
def _mover(kinds: tuple):
    """Return the jitted move of all leaves of a bank, one after the other; kinds: their shapes with shardings."""

    def move(leaves, tables):
        moved = []
        for leaf, kind in zip(leaves, kinds, strict=True):
            axes, _ = _split(kind.sharding)
            rounds = jax.shard_map(
                functools.partial(_move_rows, axes),
                mesh=kind.sharding.mesh,
                in_specs=(kind.sharding.spec, *[P(axes or None)] * 3, P()),
                out_specs=kind.sharding.spec,
            )
            moved.append(rounds(leaf, tables["stay"], tables["send"], tables["place"], tables["rounds"]))
        return moved

    return jax.jit(move, donate_argnums=0, out_shardings=[kind.sharding for kind in kinds])


def _move_rows(axes: tuple[str, ...], bank, stay, send, place, rounds):
    """Return this device's new bank [Rb, ...]; `move_tables` tells the rest, of which it has its own row."""
    stay, send, place = stay[0], send[0], place[0]
    new = jnp.take(bank, stay, axis=0, mode="fill", fill_value=0)

    def one_round(turn, new):
        sent = jnp.take(bank, send[turn], axis=0, mode="fill", fill_value=0)  # [D, ...], a row for each device
        arrived = lax.all_to_all(sent, axes, 0, 0, tiled=True) if axes else sent
        return new.at[place[turn]].set(arrived, mode="drop")

    return lax.fori_loop(0, rounds, one_round, cast_varying(new, varying_axes((bank, send))))
