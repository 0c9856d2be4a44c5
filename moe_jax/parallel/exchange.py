"""The all-to-all family: ways to hand block p of an array to device p of a group.

Inputs: x [P, c, ...], block p for device p, c rows each. Outputs: [P, c, ...], block p from device p. It is its own
transpose, and every transport defines it so, so forward and backward move the same bytes in the same way.

    all_to_all   one collective
    two_level    first within the node, then across nodes: fewer and larger messages on the slow links
    coordinated  among devices of equal place in their groups, then inside them; no exchange of one group but of EP and
                 ESP groups together, so it is built in moe/schedules/expert_group.py and not here

Letters: docs/notation.md; here P devices of the group at hand.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.errors import UserError
from moe_jax.parallel.varying import cast_varying

TRANSPORTS = ("all_to_all", "two_level", "coordinated")

Exchange = Callable[[jax.Array], jax.Array]


def make_exchange(axes: tuple[str, ...], size: int, transport: str, local: int, inside: int | None = None) -> Exchange:
    """Return exchange(x [P, c, ...]) -> [P, c, ...].

    Args:
      axes: mesh axes of the group, slowest first.
      size: P.
      transport: one of `TRANSPORTS`.
      local: Ll, members of the group that share a node; neighbours in the group's order.
      inside: exchange among so many neighbours, which are P then, each for themselves.

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
    inner = size if inside is None else min(inside, size)
    if inner == 1:
        return lambda x: x
    neighbours = [list(range(first, first + inner)) for first in range(0, size, inner)] if inner < size else None
    nodes, in_node = size // local, [list(range(first, first + local)) for first in range(0, size, local)]

    def move(x):
        if transport != "two_level" or inner < size:
            return _all_to_all(x, axes, neighbours)
        # within the node to the member in the target's place, then once between the nodes
        here = jnp.swapaxes(x.reshape((nodes, local) + x.shape[1:]), 0, 1)  # [Ll target place, Nn target node, ...]
        if local > 1:  # two collectives, each with one start-up: rounds of messages would have one each
            here = _all_to_all(here, axes, in_node)  # [Ll source place, Nn target node, ...]
        there = jnp.swapaxes(here, 0, 1)
        if nodes > 1:
            there = _all_to_all(there, axes, list(map(list, zip(*in_node, strict=True))))
        return there.reshape(x.shape)  # [Nn source node, Ll source place, ...]

    symmetric = jax.custom_vjp(move)
    symmetric.defvjp(lambda x: (move(x), None), lambda _, d: (move(d),))
    return lambda x: symmetric(cast_varying(x, axes))


def _all_to_all(x, axes, groups):
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)


def exchange_counts(counts, axes: tuple[str, ...], size: int):
    """Return int32 [P, ...], the counts that each device of the group holds for this one: a small all-to-all."""
    if size == 1:
        return counts
    return lax.all_to_all(cast_varying(counts, axes), axes, split_axis=0, concat_axis=0, tiled=True)


def shift_pairs(outer: int, inner: int, outer_step: int, inner_step: int) -> list[tuple[int, int]]:
    """Return (source, target) of all devices in a group [outer, inner], each dim rotated by its step."""
    return [
        (o * inner + i, (o + outer_step) % outer * inner + (i + inner_step) % inner)
        for o in range(outer)
        for i in range(inner)
    ]
