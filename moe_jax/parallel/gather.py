"""Gather a tree whose leaves are split over devices, all leaves in one collective.

Inputs: a pytree of this device's parts, and the dim along which each is split. Outputs: the full leaves. The gradient
goes the other way: one reduce-scatter for the split leaves, one all-reduce for those that every device holds whole.
A leaf that is read in a narrower dtype alone may travel in it: rounded before or after, it is the same.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.parallel.varying import cast_varying, varying_axes, with_gradient


def gather_tree(shards, dims, axes: tuple[str, ...], parts: int, wires=None):
    """Return the full leaves of a tree that is split over `axes`, with one all-gather; gradients are reduce-scattered.

    Args:
      shards: pytree of this device's parts.
      dims: matching pytree; the dim along which a leaf is split, or -1 for a leaf that is whole on every device.
      axes: mesh axes; parts: their number of devices.
      wires: matching pytree of names of the dtypes in which split leaves travel; None for their own. Full leaves have
        their own dtype, rounded to that of the wire; gradients are summed, and travel, in their own.
    """
    if parts == 1:
        return cast_varying(shards, axes)
    leaves, tree = jax.tree.flatten(shards)
    split = jax.tree.leaves(dims)
    sent = [str(leaf.dtype) for leaf in leaves] if wires is None else jax.tree.leaves(wires)
    out = list(leaves)
    # Leaves that vary over other axes (MP) are packed apart: packed with them, an equal leaf would be typed as varying,
    # and its gradient would be summed over the devices.
    kinds = [
        (str(leaf.dtype), tuple(sorted(varying_axes(leaf) - set(axes))), tuple(sorted(set(axes) - varying_axes(leaf))))
        for leaf in leaves
    ]
    for kind in sorted(set(kinds)):
        chosen = [i for i in range(len(leaves)) if kinds[i] == kind]
        gathered = [i for i in chosen if split[i] >= 0]
        whole = [i for i in chosen if split[i] < 0]
        if gathered:
            flat = tuple(leaves[i].reshape(-1) for i in gathered)
            if all(sent[i] == kind[0] for i in gathered):
                full = lax.all_gather(jnp.concatenate(flat), axes, axis=0, tiled=False)  # [parts, n], n elements in all
            else:
                full = _gather_narrow(axes, tuple(sent[i] for i in gathered), flat)
            start = 0
            for i in gathered:  # cut into leaves again, whose parts are joined along each leaf's dim
                shape, size, dim = leaves[i].shape, leaves[i].size, split[i]
                piece = lax.slice_in_dim(full, start, start + size, axis=1).reshape((parts, *shape))
                start += size
                joined = shape[:dim] + (parts * shape[dim],) + shape[dim + 1 :]
                out[i] = jnp.moveaxis(piece, 0, dim).reshape(joined)
        if whole and kind[2]:
            for i, leaf in zip(whole, _give_each(tuple(leaves[i] for i in whole), kind[2]), strict=True):
                out[i] = leaf
    return jax.tree.unflatten(tree, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_narrow(axes, wires: tuple[str, ...], flat: tuple):
    """Return [parts, n] of arrays [n_i] of one dtype, each of which travels in its wire's, as bits in one buffer."""
    sizes = [jnp.dtype(wire).itemsize for wire in wires]
    word = jnp.dtype(f"uint{8 * min(sizes)}")  # bits: what is wider keeps all of its own
    words = [lax.bitcast_convert_type(a.astype(wire), word).reshape(-1) for a, wire in zip(flat, wires, strict=True)]
    full = lax.all_gather(jnp.concatenate(words), axes, axis=0, tiled=False)
    pieces = jnp.split(full, np.cumsum([part.size for part in words])[:-1], axis=1)
    found = []
    for piece, array, wire, size in zip(pieces, flat, wires, sizes, strict=True):
        ratio = size // word.itemsize
        piece = piece.reshape(-1, array.size, ratio) if ratio > 1 else piece
        found.append(lax.bitcast_convert_type(piece, wire).astype(array.dtype))
    return jnp.concatenate(found, axis=1)


def _scatter_gradients(axes, wires, sizes, gradient):
    own = lax.psum_scatter(gradient, axes, scatter_dimension=0, tiled=False)
    return (tuple(jnp.split(own, np.cumsum(sizes)[:-1])),)


_gather_narrow.defvjp(
    lambda axes, wires, flat: (_gather_narrow(axes, wires, flat), [array.size for array in flat]), _scatter_gradients
)


def _sum_gradients(gradients, axes):
    packed = lax.psum(jnp.concatenate([gradient.reshape(-1) for gradient in gradients]), axes)
    stops = np.cumsum([gradient.size for gradient in gradients])[:-1]
    parts = jnp.split(packed, stops)
    return tuple(part.reshape(gradient.shape) for part, gradient in zip(parts, gradients, strict=True))


@with_gradient(_sum_gradients, 1)
def _give_each(leaves: tuple, axes: tuple[str, ...]) -> tuple:
    """Return leaves that are equal over `axes`, typed as varying; one collective sums their gradients.

    The forward packs nothing: XLA for GPUs does not always see that a slice of a concatenation is one of its operands,
    and one of its fusions of such a slice did not compile at all.
    """
    return cast_varying(leaves, axes)
