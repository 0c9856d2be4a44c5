"""How parameters and optimizer state lie on the mesh: one decision per leaf, and one collective for all that is split.

Inputs: shapes and roles, or a pytree of this device's parts. Outputs: partition specs, or the full leaves. The gradient
of a gather is one reduce-scatter for the split leaves, and one all-reduce for those that every device holds whole. A
leaf that is read in a narrower dtype alone may travel in it: rounded before or after, it is the same.

ZeRO stages for dense leaves, over all dense data-parallel axes: 0 keeps everything on every device, 1 shards the
optimizer state, 3 shards the parameters too. Expert leaves lie on the expert axis whatever the stage; from stage 1 on
their optimizer state is split over `data` as well. Source: ZeRO (Rajbhandari et al. 2020), section 5.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from moe_jax.errors import UserError
from moe_jax.parallel.mesh import Roles
from moe_jax.parallel.varying import cast_varying, varying_axes, with_gradient


def check_zero_stages(dense: int, experts: int) -> None:
    """Raise a UserError for a ZeRO stage that dense parameters, or experts under the schedule `dp`, cannot have."""
    if dense not in (0, 1, 3):
        raise UserError(f"train.zero_stage ({dense}) must be 0, 1 or 3")
    if experts not in (0, 1, 2, 3):
        raise UserError(f"train.expert_zero_stage ({experts}) must be 0, 1, 2 or 3")


def spec_of(ndim: int, entries: dict[int | None, tuple[str, ...]]) -> P:
    """Return a PartitionSpec of `ndim` dims from {dim: axes}; an entry for dim None is left out."""
    return P(*(entries.get(dim) or None for dim in range(ndim)))


def dense_specs(shapes, model_dims, stacked, roles: Roles, zero_stage: int):
    """Return (param specs, optimizer specs, gather dims) for a tree of dense leaves.

    Args:
      shapes: pytree of shapes (tuples) of the global leaves.
      model_dims: matching pytree: dim that the MP group splits (not counting a stacked layer dim), -1 for none.
      stacked: matching pytree of bool: leaf has a leading layer dim.
      roles: the mesh.
      zero_stage: 0, 1 or 3.

    Returns:
      pytrees of PartitionSpec, PartitionSpec and int (gather dim without the stacked dim, -1 for none).
    """
    parts, model_parts = roles.size(roles.dense), roles.size(roles.model)

    def one(shape, model_dim, is_stacked):
        body = shape[1:] if is_stacked else shape
        offset = 1 if is_stacked else 0
        taken = model_dim if model_dim >= 0 and model_parts > 1 else None
        # the largest dim that divides among the devices, the last among equals
        fitting = [dim for dim, size in enumerate(body) if parts > 1 and dim != taken and size % parts == 0]
        dim = max(fitting, key=lambda dim: (body[dim], dim), default=None)
        model = {} if taken is None else {taken + offset: roles.model}
        both = dict(model) if dim is None else {**model, dim + offset: roles.dense}
        params = both if zero_stage == 3 else model
        state = both if zero_stage >= 1 else model
        ndim = len(shape)
        return spec_of(ndim, params), spec_of(ndim, state), dim if zero_stage == 3 and dim is not None else -1

    dims, tree = jax.tree.flatten(model_dims)
    leaves = map(one, tree.flatten_up_to(shapes), dims, jax.tree.leaves(stacked))
    return tuple(tree.unflatten(part) for part in zip(*leaves, strict=True))


def expert_specs(shapes: dict, roles: Roles, zero_stage: int, dp_stage: int | None):
    """Return (param specs, grad_sink specs, optimizer specs) for the bank {name: [D Rb, ...]}.

    Args:
      shapes: {name: shape}; `w_out` has its hidden dim first, all others last. Of the low-rank factors of a weight one
        has it, and the other has none.
      roles: the mesh.
      zero_stage: stage of the run; from 1 on the optimizer state is split over `data`.
      dp_stage: ZeRO stage 0-3 of the experts under the `dp` schedule, None under every other.
    """
    shard_axes = roles.expert_shard if roles.size(roles.expert_shard) > 1 else ()
    data_parts = roles.size(roles.data)
    stage = zero_stage if dp_stage is None else dp_stage
    params, grad_sinks, states = {}, {}, {}
    for name, shape in shapes.items():
        no_hidden = name in ("w_out_lora_b", "w_in_lora_a", "w_gate_lora_a")
        hidden = None if no_hidden else 1 if name.startswith("w_out") else 2
        base = {0: roles.expert, hidden: shard_axes}
        fine = base
        if hidden is not None and data_parts > 1 and shape[hidden] % (data_parts * roles.size(shard_axes)) == 0:
            fine = {0: roles.expert, hidden: shard_axes + roles.data}
        states[name] = spec_of(len(shape), fine if stage >= 1 else base)
        grad_sinks[name] = spec_of(len(shape), fine if dp_stage in (2, 3) else base)
        params[name] = spec_of(len(shape), fine if dp_stage == 3 else base)
    return params, grad_sinks, states


def split_dims(specs: dict, axes: tuple[str, ...]) -> dict[str, int]:
    """Return {name: the dim that its PartitionSpec splits over all of `axes`, or -1}, as `gather_tree` takes them."""
    found = dict.fromkeys(specs, -1)
    for name, spec in specs.items() if axes else ():
        for dim, entry in reversed(list(enumerate(spec))):
            if set(axes) <= set(entry if isinstance(entry, tuple) else (entry,)):
                found[name] = dim
    return found


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
