"""The four ways in which chunks travel, each as a journey of three steps: pack, carry, unpack.

Inputs: a static plan, the table of one layer, and the chunks of this device (a bank to fetch from, or gradients of
replicas to return to their homes). Outputs: a `Journey`. Only its second step communicates, so that computation can be
placed beside it.
Letters: docs/notation.md; n elements of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.transfer_plan import Transfer, TransferPlan
from moe_jax.collectives.varying import cast_varying, varying_axes

Array = jax.Array
Bank = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Journey:
    """A transfer in three steps.

    Attributes:
      pack: () -> cargo, a pytree of what this device sends.
      carry: cargo -> what arrives; the only step that communicates.
      unpack: (what arrives, into {name: [slots, ...]}) -> `into` with the arrivals in it.
    """

    pack: Callable
    carry: Callable
    unpack: Callable

    def at_once(self, into: Bank) -> Bank:
        """Run the three steps one after the other."""
        return self.unpack(self.carry(self.pack()), into)

    def named(self, scope: str) -> Journey:
        """Return the journey with every step inside a named scope."""

        def within(step):
            @functools.wraps(step)
            def run(*arguments):
                with jax.named_scope(scope):
                    return step(*arguments)

            return run

        return Journey(within(self.pack), within(self.carry), within(self.unpack))


def fetch(plan: TransferPlan, bank: Bank, rows: Array, table: Transfer) -> Journey:
    """Return the journey of chunks to replica slots; arrivals overwrite the slots that they fill.

    Args:
      bank: {name: [Rb, ...]}; rows: int32 [Hs], the bank row of each home slot.
      table, plan: which device sends and receives which chunk, and by which method.
    """
    first = next(iter(bank.values()))
    # entries that no slot takes are sent unchanged, or as zeros: a padded slot may point to any row
    source = jnp.minimum(rows[jnp.minimum(table.send, plan.home_slots - 1)], first.shape[0] - 1)
    return _FETCH[plan.method](plan, bank, source, table)


def bring_back(plan: TransferPlan, replicas: Bank, table: Transfer) -> Journey:
    """Return the journey of gradients {name: [Gs, ...]} to their homes, which add them in the dtypes of the sums."""
    return _RETURN[plan.method](plan, replicas, table)


def _fetch_by_rounds(plan, bank, source, table):
    def pack():
        return [_packed(bank, source[turn][None]) for turn in range(table.send.shape[0])]

    def unpack(arrived, out):
        for turn, chunk in enumerate(arrived):
            pieces = _unpacked(chunk, bank)
            out = {n: leaf.at[table.take[turn]].set(pieces[n][0], mode="drop") for n, leaf in out.items()}
        return out

    return Journey(pack, functools.partial(_carry_by_rounds, plan, table, False), unpack)


def _return_by_rounds(plan, replicas, table):
    def pack():
        return [_packed(replicas, table.take[turn][None]) for turn in range(table.send.shape[0])]

    def unpack(arrived, sums):
        for turn, chunk in enumerate(arrived):
            pieces = _unpacked(chunk, replicas)
            sums = {
                n: leaf.at[table.send[turn]].add(pieces[n][0].astype(leaf.dtype), mode="drop")
                for n, leaf in sums.items()
            }
        return sums

    return Journey(pack, functools.partial(_carry_by_rounds, plan, table, True), unpack)


def _carry_by_rounds(plan, table, back, cargo):
    """Run the rounds of this layer, the only list or list number `table.layer`: T chunks [1, n] -> T chunks [1, n]."""

    def run(rounds, cargo):
        arrived = []
        for turn, chunk in enumerate(cargo):
            if turn < len(rounds):
                pairs = tuple((b, a) for a, b in rounds[turn]) if back else rounds[turn]
                arrived.append(lax.ppermute(chunk, plan.axes, pairs))
            else:  # another layer's list is longer
                arrived.append(zeros_varying(chunk.shape, chunk.dtype, chunk))
        return arrived

    if not plan.branches:
        return run(plan.rounds[0] if plan.rounds else (), cargo)
    return lax.switch(table.layer, [functools.partial(run, rounds) for rounds in plan.rounds], cargo)


def _fetch_by_gather(plan, bank, source, table):
    return Journey(
        lambda: _packed(bank, source),
        lambda offered: lax.all_gather(offered, plan.axes, tiled=True),  # [D X, n]
        lambda arrived, out: _filled(arrived, table.take, out),
    )


def _return_by_gather(plan, replicas, table):
    return Journey(
        lambda: _spread(replicas, lax.axis_size(plan.axes) * table.send.shape[0], table.take),
        lambda spread: lax.psum_scatter(spread, plan.axes, tiled=True),
        lambda arrived, sums: _added(sums, arrived, replicas, table.send),
    )


def _fetch_by_broadcast(plan, bank, source, table):
    mine = (table.send < plan.home_slots)[:, None]
    return Journey(
        lambda: jnp.where(mine, _packed(bank, source), 0),
        lambda masked: cast_varying(lax.psum(masked, plan.axes), varying_axes(masked)),  # [Y, n]
        lambda arrived, out: _filled(arrived, table.take, out),
    )


def _return_by_broadcast(plan, replicas, table):
    return Journey(
        lambda: _spread(replicas, table.send.shape[0], table.take),
        lambda spread: cast_varying(lax.psum(spread, plan.axes), varying_axes(spread)),
        lambda arrived, sums: _added(sums, arrived, replicas, table.send),
    )


_FETCH = {
    "shift": _fetch_by_rounds,
    "permute": _fetch_by_rounds,
    "gather": _fetch_by_gather,
    "broadcast": _fetch_by_broadcast,
}
_RETURN = {
    "shift": _return_by_rounds,
    "permute": _return_by_rounds,
    "gather": _return_by_gather,
    "broadcast": _return_by_broadcast,
}


def _filled(chunks: Array, take, out: Bank) -> Bank:
    """Return `out` with chunks [n, ...] in the slots that take one."""
    here = take < chunks.shape[0]
    pieces = _unpacked(_take(chunks, take), out)
    return {n: jnp.where(here.reshape(-1, *(1,) * (leaf.ndim - 1)), pieces[n], leaf) for n, leaf in out.items()}


def _packed(leaves: Bank, index) -> Array:
    """Return rows `index` [k] of all leaves side by side, [k, n]; zeros for a row out of range."""
    return jnp.concatenate([_take(leaves[n], index).reshape(index.shape[0], -1) for n in sorted(leaves)], axis=1)


def _unpacked(packed: Array, like: Bank) -> Bank:
    """Undo `_packed`: [k, n] -> {name: [k, ...]} with the row shapes of `like`."""
    pieces, start = {}, 0
    for name in sorted(like):
        size = math.prod(like[name].shape[1:])
        pieces[name] = packed[:, start : start + size].reshape(packed.shape[0], *like[name].shape[1:])
        start += size
    return pieces


def _take(rows: Array, index) -> Array:
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


def _spread(replicas: Bank, places: int, take) -> Array:
    """Add the replicas' values at the places they were taken from: -> [places, n]."""
    packed = jnp.concatenate([replicas[n].reshape(replicas[n].shape[0], -1) for n in sorted(replicas)], axis=1)
    return zeros_varying((places, packed.shape[1]), packed.dtype, packed).at[take].add(packed, mode="drop")


def _added(sums: Bank, packed: Array, replicas: Bank, slots) -> Bank:
    pieces = _unpacked(packed, replicas)
    return {n: leaf.at[slots].add(pieces[n].astype(leaf.dtype), mode="drop") for n, leaf in sums.items()}


def zeros_varying(shape, dtype, like) -> Array:
    """Return zeros that vary over the axes of `like`."""
    return cast_varying(jnp.zeros(shape, dtype), varying_axes(like))
