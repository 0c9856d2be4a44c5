"""The all-to-all family: ways to hand block p of an array to device p of a group.

Inputs: x [P, c, ...], block p for device p, c rows each. Outputs: [P, c, ...], block p from device p. It is its own
transpose, and every transport defines it so, so forward and backward move the same bytes in the same way.

    all_to_all   one padded collective
    ppermute     P - 1 rounds of ppermute; round r sends to the device r places on
    two_level    first within the node, then across nodes: fewer and larger messages on the slow links
    ragged       only the rows in use, no padding; GPU only. There are reports of wrong gradients and hangs, so it is
                 opt-in, and the first step compares its gradients with the padded ones
    coordinated  among devices of equal place in their groups, then inside them; no exchange of one group but of EP and
                 ESP groups together, so it is built in schedules/coordinated_group.py and not here

Letters: docs/notation.md; here P devices of the group at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from moe_jax.collectives.varying import cast_varying
from moe_jax.errors import UserError

TRANSPORTS = ("all_to_all", "ppermute", "two_level", "ragged", "coordinated")

Exchange = Callable[..., jax.Array]


def make_exchange(axes: tuple[str, ...], size: int, transport: str, local: int, inside: int | None = None) -> Exchange:
    """Return exchange(x [P, c, ...], sent int32 [P], received int32 [P]) -> [P, c, ...].

    Args:
      axes: mesh axes of the group, slowest first.
      size: P.
      transport: one of `TRANSPORTS`.
      local: Ll, members of the group that share a node; neighbours in the group's order.
      inside: exchange among so many neighbours, which are P then, each for themselves; not `ragged`.

    `sent` and `received` count the rows in use of each block, which are its first ones; only `ragged` reads them, and
    it leaves zeros in the other rows.

    Raises:
      UserError: an unknown transport, or a group that does not fill whole nodes.
    """
    if transport not in TRANSPORTS:
        raise UserError(f"MoEConfig.transport ({transport!r}) must be one of {', '.join(TRANSPORTS)}")
    if transport == "coordinated":
        raise UserError(
            "MoEConfig.transport ('coordinated') is a way of the schedules s1 and s2; set MoEConfig.schedule = 's1', "
            "or another transport"
        )
    if transport == "two_level" and size % local:
        raise UserError(
            f"MoEConfig.transport ('two_level') needs groups that fill whole nodes; {size} devices exchange rows and "
            f"{local} share a node; set MeshConfig.devices_per_node to a divisor of {size}"
        )
    if inside is not None and inside < size:
        return _exchange_inside(axes, size // inside, inside, transport)
    if size == 1:
        return lambda x, sent=None, received=None: x
    if transport == "ragged":
        return functools.partial(_ragged, axes)
    move = {
        "all_to_all": functools.partial(_all_to_all, axes),
        "ppermute": functools.partial(_rounds, axes, 1, size),
        "two_level": functools.partial(_two_levels, axes, size // local, local),
    }[transport]
    symmetric = _own_transpose(move)
    return lambda x, sent=None, received=None: symmetric(cast_varying(x, axes))


def _exchange_inside(axes, outer: int, inner: int, transport: str) -> Exchange:
    """Return the exchange of each `inner` neighbours of the group."""
    assert transport != "ragged", "ragged exchanges have buckets of one length"
    if inner == 1:
        return lambda x, sent=None, received=None: x
    groups = [list(range(first * inner, (first + 1) * inner)) for first in range(outer)]
    move = functools.partial(_rounds, axes, outer, inner)
    if transport == "all_to_all":
        move = functools.partial(_all_to_all, axes, groups=groups)
    symmetric = _own_transpose(move)
    return lambda x, sent=None, received=None: symmetric(cast_varying(x, axes))


def permute_apart(x, axes: tuple[str, ...], pairs: list[tuple[int, int]]):
    """Return `lax.ppermute(x, axes, pairs)`, on GPUs on the stream of point-to-point messages.

    XLA keeps one transfer of a stream in flight, so this one may run beside another kind of collective.
    """
    with set_xla_metadata(_xla_gpu_collective_stream="p2p"):
        return lax.ppermute(x, axes, pairs)


def exchange_counts(counts, axes: tuple[str, ...], size: int):
    """Return int32 [P, ...], the counts that each device of the group holds for this one: a small all-to-all."""
    if size == 1:
        return counts
    return lax.all_to_all(cast_varying(counts, axes), axes, split_axis=0, concat_axis=0, tiled=True)


def _own_transpose(move):
    @jax.custom_vjp
    def exchange(x):
        return move(x)

    exchange.defvjp(lambda x: (move(x), None), lambda _, d: (move(d),))
    return exchange


def _all_to_all(axes, x, groups=None):
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)


def shift_pairs(outer: int, inner: int, outer_step: int, inner_step: int) -> list[tuple[int, int]]:
    """Return (source, target) of all devices in a group [outer, inner], each dim rotated by its step."""
    return [
        (o * inner + i, (o + outer_step) % outer * inner + (i + inner_step) % inner)
        for o in range(outer)
        for i in range(inner)
    ]


def _rounds(axes, outer, inner, x):
    """Exchange along the inner dim of a group [outer, inner] by rounds: x [inner, ...] -> [inner, ...]."""
    me = lax.axis_index(axes) % inner
    step = jnp.arange(inner)
    ahead = jnp.take(x, (me + step) % inner, axis=0)
    got = [ahead[0]]
    for r in range(1, inner):
        got.append(lax.ppermute(ahead[r], axes, shift_pairs(outer, inner, 0, r)))
    return jnp.take(jnp.stack(got), (me - step) % inner, axis=0)


def _two_levels(axes, nodes, local, x):
    """Exchange x [P, ...]: within the node to the member in the target's place, then once between the nodes."""
    by_place = jnp.swapaxes(x.reshape((nodes, local) + x.shape[1:]), 0, 1)  # [Ll target place, Nn target node, ...]
    here = _rounds(axes, nodes, local, by_place) if local > 1 else by_place  # [Ll source place, Nn target node, ...]
    to_node = jnp.swapaxes(here, 0, 1)
    there = _across(axes, nodes, local, to_node) if nodes > 1 else to_node  # [Nn source node, Ll source place, ...]
    return there.reshape(x.shape)


def _across(axes, nodes, local, x):
    """Exchange among the devices with the same place in their nodes: x [Nn, ...] -> [Nn, ...]."""
    me = lax.axis_index(axes) // local
    step = jnp.arange(nodes)
    ahead = jnp.take(x, (me + step) % nodes, axis=0)
    got = [ahead[0]]
    for r in range(1, nodes):
        got.append(lax.ppermute(ahead[r], axes, shift_pairs(nodes, local, r, 0)))
    return jnp.take(jnp.stack(got), (me - step) % nodes, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(axes, x, sent, received):
    return _send_ragged(axes, x, sent, received)


def _send_ragged(axes, x, sent, received):
    x = cast_varying(x, axes)
    size, rows = x.shape[:2]
    begin = jnp.arange(size, dtype=jnp.int32) * rows
    place = jnp.full((size,), lax.axis_index(axes) * rows, jnp.int32)  # my block, wherever it goes
    flat = x.reshape((size * rows,) + x.shape[2:])
    out = lax.ragged_all_to_all(
        flat,
        jnp.zeros_like(flat),
        cast_varying(begin, axes),
        cast_varying(sent.astype(jnp.int32), axes),
        place,
        cast_varying(received.astype(jnp.int32), axes),
        axis_name=axes,
    )
    return out.reshape(x.shape)


_ragged.defvjp(
    lambda axes, x, sent, received: (_send_ragged(axes, x, sent, received), (sent, received)),
    lambda axes, counts, d: (_send_ragged(axes, d, counts[1], counts[0]), None, None),
)
