"""An optax transformation applied to each matrix of a stack by itself.

Inputs: a transformation that looks at whole leaves (their factors, their root mean square), and parameters {'dense':
..., 'bank': ...} whose leaves of the bank and of the units are stacked in their first dim, each segment's for itself.
Outputs: a transformation under which each expert's and each layer's matrix is a leaf. State leaves get the stack's
first dim, so that those of an expert move with it; step counts stay scalars.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from moe_jax.models.leaf_names import SEGMENT


def per_matrix(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `transform` over every matrix of bank and units, and over all other leaves as they are."""

    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: stack_of([entry.key for entry in path]), params)

    def parts(params) -> optax.GradientTransformation:
        found, stacked = set(jax.tree.leaves(labels(params))), over_first_dim(transform)
        names = sorted(found, key=lambda name: (name == "outer", name))  # the order of the updates in the program
        return optax.partition({name: transform if name == "outer" else stacked for name in names}, labels)

    def update(updates, state, params=None):
        return parts(updates).update(updates, state, params)

    return optax.GradientTransformation(lambda params: parts(params).init(params), update)


def stack_of(names: list[str]) -> str:
    """Return the name of the leaves that are stacked alike with the one at this path of the parameters, or 'outer'."""
    if names[0] == "bank":
        kind, rest = "experts", names[1:]
    elif names[:2] == ["dense", "units"]:
        kind, rest = "units", names[2:]
    else:
        return "outer"
    return f"{kind}_{rest[0]}" if rest[0].startswith(SEGMENT) else kind


def over_first_dim(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `transform` mapped over the first dim of all leaves, which all have the same; counts are shared."""

    def axes_of(params):
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
        is_count = lambda leaf: leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)  # noqa: E731
        return jax.tree.map(lambda leaf: None if is_count(leaf) else 0, jax.eval_shape(transform.init, one))

    def init(params):
        if not jax.tree.leaves(params):
            return transform.init(params)
        return jax.vmap(transform.init, out_axes=axes_of(params))(params)

    def update(updates, state, params=None):
        if not jax.tree.leaves(updates):
            return transform.update(updates, state, params)
        axes = axes_of(params)
        return jax.vmap(transform.update, in_axes=(0, axes, 0), out_axes=(0, axes))(updates, state, params)

    return optax.GradientTransformation(init, update)
