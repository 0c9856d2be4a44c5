"""A change of homes: parameters and moments of all experts move to the bank rows of a new placement.

Inputs: the training state (donated), the old homes and the new ones. Outputs: the same state with every leaf of the
bank permuted, and nothing else touched. Every leaf moves in its own dtype, in rounds of one all-to-all, in which a
device sends at most one row to each other device: beside the leaf and its new version memory holds D rows and the D
that arrive, however many move. The rounds are data: the program is compiled once.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.models.leaf_names import flatten, is_bank, segment_of
from moe_jax.placement import Placement, reshard_permutation


def move_tables(source: np.ndarray, devices: int) -> dict[str, np.ndarray]:
    """Sort the moves of a permutation into rounds.

    Args:
      source: int [D Rb]; row r takes what row source[r] holds.

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
    return {
        "stay": stay.astype(np.int32),
        "send": send,
        "place": place,
        "rounds": np.int32(turn.max(initial=-1) + 1),
    }


def reshard(state: dict, old: Placement, new: Placement, rows: int, segment: str | None = None) -> dict:
    """Return the state with the experts where `new` homes them. The given state is donated.

    Args:
      rows: Rb.
      segment: whose bank moves, None where the bank is one segment's.
    """
    names = [name for name in flatten(state) if is_bank(name) and segment_of(name) == segment]
    leaves, tree = jax.tree.flatten(state)
    at = [index for index, name in enumerate(flatten(state)) if name in set(names)]
    shardings = tuple(leaves[index].sharding for index in at)
    tables = move_tables(reshard_permutation(old, new, rows), old.devices)
    for index, leaf in zip(at, _mover(shardings)([leaves[index] for index in at], tables), strict=True):
        leaves[index] = leaf
    return jax.tree.unflatten(tree, leaves)


@functools.lru_cache(maxsize=8)
def _mover(shardings: tuple):
    """Return the jitted move of all bank leaves, one after the other."""

    def move(leaves, tables):
        return [_move_leaf(leaf, tables, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]

    return jax.jit(move, donate_argnums=0, out_shardings=list(shardings))


def _move_leaf(leaf, tables, sharding):
    first = sharding.spec[0]
    axes = () if first is None else (first,) if isinstance(first, str) else tuple(first)

    def body(bank, stay, send, place, rounds):
        stay, send, place = stay[0], send[0], place[0]
        new = jnp.take(bank, stay, axis=0, mode="fill", fill_value=0)

        def one_round(turn, new):
            sent = jnp.take(bank, send[turn], axis=0, mode="fill", fill_value=0)  # [D, ...], a row for each device
            arrived = lax.all_to_all(sent, axes, 0, 0, tiled=True) if axes else sent
            return new.at[place[turn]].set(arrived, mode="drop")

        return lax.fori_loop(0, rounds, one_round, cast_varying(new, varying_axes(bank, send)))

    by_device = P(axes or None)
    moved = jax.shard_map(
        body,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, by_device, by_device, by_device, P()),
        out_specs=sharding.spec,
    )
    return moved(leaf, tables["stay"], tables["send"], tables["place"], tables["rounds"])
