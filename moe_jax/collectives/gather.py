"""Gather a tree whose leaves are split over devices, all leaves in one collective.

Inputs: a pytree of this device's parts, and the dim along which each is split. Outputs: the full leaves. The gradient
goes the other way: one reduce-scatter for the split leaves, one all-reduce for those that every device holds whole.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax.collectives.varying import cast_varying, varying_axes


def gather_tree(shards, dims, axes: tuple[str, ...], parts: int):
    """Return the full leaves of a tree that is split over `axes`, with one all-gather; gradients are reduce-scattered.

    Args:
      shards: pytree of this device's parts.
      dims: matching pytree; the dim along which a leaf is split, or -1 for a leaf that is whole on every device.
      axes: mesh axes; parts: their number of devices.
    """
    leaves, tree = jax.tree.flatten(shards)
    split = jax.tree.leaves(dims)
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
            packed = jnp.concatenate([leaves[i].reshape(-1) for i in gathered])
            full = lax.all_gather(packed, axes, axis=0, tiled=False)  # [parts, n], n elements in all
            _unpack(full, leaves, gathered, split, parts, out)
        if whole and kind[2]:
            for i, leaf in zip(whole, _give_each(tuple(leaves[i] for i in whole), kind[2]), strict=True):
                out[i] = leaf
    return jax.tree.unflatten(tree, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _give_each(leaves: tuple, axes: tuple[str, ...]) -> tuple:
    """Return leaves that are equal over `axes`, typed as varying; one collective sums their gradients.

    The forward packs nothing: XLA for GPUs does not always see that a slice of a concatenation is one of its operands,
    and one of its fusions of such a slice did not compile at all.
    """
    return cast_varying(leaves, axes)


def _sum_gradients(axes, _, gradients):
    packed = lax.psum(jnp.concatenate([gradient.reshape(-1) for gradient in gradients]), axes)
    stops = np.cumsum([gradient.size for gradient in gradients])[:-1]
    parts = jnp.split(packed, stops)
    return (tuple(part.reshape(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)),)


_give_each.defvjp(lambda leaves, axes: (cast_varying(leaves, axes), None), _sum_gradients)


def _unpack(packed, leaves, chosen, split, parts, out):
    """Cut packed [parts, n] into leaves again and write them to `out`; parts are joined along each leaf's dim."""
    start = 0
    for i in chosen:
        shape, size = leaves[i].shape, leaves[i].size
        piece = lax.slice_in_dim(packed, start, start + size, axis=1).reshape((parts, *shape))
        start += size
        dim = split[i]
        joined = shape[:dim] + (parts * shape[dim],) + shape[dim + 1 :]
        out[i] = jnp.moveaxis(piece, 0, dim).reshape(joined)
