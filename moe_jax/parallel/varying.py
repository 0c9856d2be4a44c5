"""Which mesh axes an array varies over inside `shard_map`, and changes of that type.

JAX types every value inside `shard_map` by the set of mesh axes over which its shards may differ. Plain operations cast
their operands to the union by themselves; a `custom_vjp`, a loop carry or a `cond` does not, because there the types of
inputs and outputs must agree exactly: `cast_varying` and `match_varying` make them agree. The transpose of such a cast
is a sum over the added axes: the all-reduce of the gradient of a replicated weight.

A model-parallel group holds its tokens replicated; a schedule splits them, or computes on every device and gets equal
results. The other functions convert between such values. Each says what its gradient is, so that none costs an
all-reduce that the mathematics does not need. `axes` = () makes each of them the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, mlir


def varying_axes(tree) -> frozenset[str]:
    """Return the union of the mesh axes that any leaf of `tree` varies over; empty outside `shard_map`."""
    leaves = jax.tree.leaves(tree)
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def cast_varying(tree, axes):
    """Cast every leaf of `tree` to vary over `axes` as well; a leaf that does already is returned as it is."""
    leaves, structure = jax.tree.flatten(tree)
    for place, leaf in enumerate(leaves):
        missing = frozenset(axes) - jax.typeof(leaf).manual_axis_type.varying
        alone = tuple(sorted(axis for axis in missing if lax.axis_size(axis) == 1))
        if alone:
            leaves[place] = leaf = _cast_alone_p.bind(leaf, axes=alone)
        if len(alone) < len(missing):
            leaves[place] = lax.pcast(leaf, tuple(sorted(missing.difference(alone))), to="varying")
    return structure.unflatten(leaves)


def zeros_varying(shape, dtype, like):
    """Return zeros that vary over the axes of the tree `like`: the carry of a loop or branch that mixes both."""
    return cast_varying(jnp.zeros(shape, dtype), varying_axes(like))


def match_varying(*trees):
    """Cast all `trees` to the union of the axes that any of them varies over; returns a tuple in the same order."""
    return cast_varying(trees, varying_axes(trees))


_declare_equal_p = core.Primitive("declare_equal")


@_declare_equal_p.def_abstract_eval
def _declare_equal_type(x, *, axes):
    left = x.manual_axis_type.varying.difference(axes)
    return x.update(manual_axis_type=x.manual_axis_type.update(varying=left))


mlir.register_lowering(_declare_equal_p, lambda ctx, x, *, axes: [x])


def declare_equal(x, axes: tuple[str, ...]):
    """Return x typed as equal over `axes`, at no cost and unchecked: the caller must know that its values are equal.

    It has no gradient of its own: use it inside a `custom_vjp`.
    """
    return _declare_equal_p.bind(x, axes=tuple(axes)) if axes else x


# A cast over axes of one device: its gradient is no sum, where that of `pcast` is one, for which XLA:CPU copies.
_cast_alone_p = core.Primitive("cast_alone")


@_cast_alone_p.def_abstract_eval
def _cast_alone_type(x, *, axes):
    return x.update(manual_axis_type=x.manual_axis_type.update(varying=x.manual_axis_type.varying.union(axes)))


mlir.register_lowering(_cast_alone_p, lambda ctx, x, *, axes: [x])
ad.deflinear2(_cast_alone_p, lambda d, x, *, axes: [declare_equal(d, axes)])


def with_gradient(back: Callable, static: int = 0) -> Callable:
    """Give the decorated function(x, ...) another gradient: back(d, ...), of the cotangent d of its result alone.

    static: how many arguments follow x, which are no arrays; `back` gets the same.
    """

    def decorate(there):
        function = jax.custom_vjp(there, nondiff_argnums=tuple(range(1, static + 1)))
        function.defvjp(lambda *given: (there(*given), None), lambda *given: (back(given[-1], *given[:static]),))
        return function

    return decorate


@with_gradient(declare_equal, 1)
def replicated_to_varying(x, axes: tuple[str, ...]):
    """Return x typed as varying over `axes`, for code in which each device of the group works on x by itself.

    The cotangent on every device must be the whole one, as it is when the results leave by `varying_to_replicated`;
    then it needs no sum over the group.
    """
    return cast_varying(x, axes)


@with_gradient(cast_varying, 1)
def varying_to_replicated(x, axes: tuple[str, ...]):
    """Type values that are equal on the group as one value; each device gets the whole cotangent.

    The gradient of weights that all devices used then counts once per device: see `scale_gradient`.
    """
    return declare_equal(x, axes)


@with_gradient(lambda d, factor: d if factor == 1 else d * jnp.asarray(factor, d.dtype), 1)
def scale_gradient(x, factor: float):
    """Return x; its cotangent is multiplied by `factor`."""
    return x


def take_part(x, axes: tuple[str, ...], dim: int = 0):
    """Return this device's part of x along `dim`, as a plain slice, whose gradient is a sum over the group."""
    part = x.shape[dim] // math.prod(lax.axis_size(axis) for axis in axes)
    return lax.dynamic_slice_in_dim(cast_varying(x, axes), lax.axis_index(axes) * part, part, axis=dim)


def join_parts(x, axes: tuple[str, ...], dim: int = 0):
    """All-gather the parts of the group's devices along `dim`, in the group's order; the gradient is a local slice."""
    if not axes:
        return x
    return lax.all_gather(cast_varying(x, axes), axes, axis=dim, tiled=True, to="invarying")


def own_part(x, axes: tuple[str, ...], dim: int = 0):
    """Return this device's part of x along `dim`; x is equal on the group. The gradient is one all-gather.

    Plain slicing would cast x and get an all-reduce of the whole x for a gradient, twice the bytes.
    """
    if not axes:
        return x
    assert not frozenset(axes) & varying_axes(x), f"own_part needs a value that is equal over {axes}"
    if jnp.issubdtype(x.dtype, jnp.floating):
        return with_gradient(join_parts, 2)(take_part)(x, tuple(axes), dim)
    return take_part(x, axes, dim)
