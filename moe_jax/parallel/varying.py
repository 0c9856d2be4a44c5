"""Which mesh axes an array varies over, inside `shard_map`.

JAX types every value inside `shard_map` by the set of mesh axes over which its shards may differ. Plain operations cast
their operands to the union by themselves; a `custom_vjp`, a loop carry or a `cond` does not, because there the types of
inputs and outputs must agree exactly. These functions make them agree. The transpose of such a cast is a sum over the
added axes: the all-reduce of the gradient of a replicated weight.
"""

from __future__ import annotations

import jax
from jax import lax


def varying_axes(*trees) -> frozenset[str]:
    """Return the union of the mesh axes that any leaf of `trees` varies over; empty outside `shard_map`."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(trees):
        axes |= jax.typeof(leaf).manual_axis_type.varying
    return axes


def cast_varying(tree, axes):
    """Cast every leaf of `tree` to vary over `axes` as well; a leaf that does already is returned as it is."""
    leaves, structure = jax.tree.flatten(tree)
    for place, leaf in enumerate(leaves):
        missing = frozenset(axes) - jax.typeof(leaf).manual_axis_type.varying
        if missing:
            leaves[place] = lax.pcast(leaf, tuple(sorted(missing)), to="varying")
    return structure.unflatten(leaves)


def match_varying(*trees):
    """Cast all `trees` to the union of the axes that any of them varies over; returns a tuple in the same order."""
    return cast_varying(trees, varying_axes(trees))
