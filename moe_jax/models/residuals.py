"""The residuals of a stage's backward, without the arrays that it has anyway.

Inputs: the function that `jax.vjp` returned, and arrays that the backward will have again (parameters, the bank,
tables, replicas of experts). Outputs: `Residuals`, a pytree of the other arrays that it holds. `restore` joins the two,
in another iteration of another loop. So a loop can stack `Residuals` without stacking a bank in every turn, and
replicas of experts can be fetched a second time instead of being saved.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax.collectives.varying import cast_varying, varying_axes


@jax.tree_util.register_pytree_node_class
class Residuals:
    """What `jax.vjp` returned, taken apart: `arrays` are its own, `plan` says where each of its leaves comes from."""

    def __init__(self, arrays, plan):
        self.arrays, self.plan = arrays, plan

    def tree_flatten(self):
        return tuple(self.arrays), self.plan

    @classmethod
    def tree_unflatten(cls, plan, arrays):
        return cls(arrays, plan)

    def restore(self, known):
        """Return the function; `known` is the tree that was given to `residuals_of`, with arrays of the same shapes."""
        tree, places = self.plan
        there = jax.tree.leaves(known)
        sources = {"known": there, "own": self.arrays}
        leaves = [_leaf(kind, at, sources) for kind, at in places]
        return jax.tree.unflatten(tree, leaves)


def _leaf(kind, at, sources):
    if kind == "static":
        return at
    if kind == "empty":
        shape, dtype, axes = at
        return cast_varying(jnp.zeros(shape, dtype), axes)
    return sources[kind][at]


def residuals_of(pull_back, known) -> Residuals:
    """Take apart what `jax.vjp` returned; left out: leaves of `known`, the same objects, and empty arrays."""
    place = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(known))}
    leaves, tree = jax.tree.flatten(pull_back)
    arrays, places = [], []
    for leaf in leaves:
        if id(leaf) in place:
            places.append(("known", place[id(leaf)]))
        elif hasattr(leaf, "dtype") and leaf.size == 0:  # saved, it would be an input of loops that nothing reads
            places.append(("empty", (leaf.shape, leaf.dtype, varying_axes(leaf))))
        elif hasattr(leaf, "dtype"):
            place_of_own = next((i for i, other in enumerate(arrays) if other is leaf), len(arrays))
            if place_of_own == len(arrays):
                arrays.append(leaf)
            places.append(("own", place_of_own))
        else:  # JAX's placeholder for an argument that it does not need
            places.append(("static", leaf))
    return Residuals(arrays, (tree, tuple(places)))
