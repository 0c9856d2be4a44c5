"""Gradients that each data-parallel device keeps for itself until they are summed, once.

Inputs: the parameters of a model and their layout. Outputs: the same parameters with a copy for each data-parallel
device of what all of them hold, and from the gradient of those the gradient of the parameters. A copy is on its device
already, so it moves nothing; its gradient is that device's own, and `summed` adds them up where the optimizer wants
them: under ZeRO-1 by a reduce-scatter, half the bytes of an all-reduce. Leaves that are split (ZeRO-3) and the experts
stay as they are, and the model sums their gradients. Traced, outside the model's `shard_map`.

What is kept apart is one of
    none     nothing
    outer    what lies outside the layers and has moments that are split: embedding, head, last norm
    all      every dense leaf
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.mesh.roles import Roles
from moe_jax.models.language_model import Layout


def kept_apart(microbatches: int, zero_stage: int, parts: int) -> str:
    """Return 'none', 'outer' or 'all' for a step of so many microbatches on `parts` data-parallel devices.

    Of one microbatch each layer's gradient is summed beside the backward of the layers before it; only what comes last,
    the embedding's, has nothing beside it.
    """
    if parts == 1:
        return "none"
    if microbatches > 1:
        return "all"
    return "outer" if zero_stage == 1 else "none"


def is_own(layout: Layout, roles: Roles, apart: str):
    """Return bool for every dense leaf: whether each device has a copy of its own."""

    def one(path, dim, place):
        if apart == "none" or dim >= 0:
            return False
        return apart == "all" or (path[0].key != "units" and _split_dim(place, roles) is not None)

    return jax.tree_util.tree_map_with_path(one, layout.gather, layout.state["dense"])


def _split_dim(place: P, roles: Roles) -> int | None:
    """Return the dim that is split over the data-parallel devices; None where none is."""
    dims = [at for at, axes in enumerate(place) if (axes if isinstance(axes, tuple) else (axes,)) == roles.dense]
    return dims[0] if dims else None


def own_specs(layout: Layout, roles: Roles, apart: str):
    """Return the PartitionSpecs of what `with_own_leaves` makes of the dense parameters."""
    own, specs = is_own(layout, roles, apart), layout.params["dense"]
    return jax.tree.map(lambda own, spec: P(roles.dense, *spec) if own else spec, own, specs)


def own_leaves(dense, layout: Layout, roles: Roles, apart: str):
    """Return this device's dense parameters, inside `shard_map`."""
    return jax.tree.map(lambda leaf, own: leaf[0] if own else leaf, dense, is_own(layout, roles, apart))


def with_own_leaves(params, layout: Layout, roles: Roles, apart: str):
    """Return the parameters with the dense leaves of which devices have copies as [devices, ...]."""
    parts, mesh = roles.size(roles.dense), roles.mesh

    def copied(leaf, own, spec):
        if not own:
            return leaf
        every = jnp.broadcast_to(leaf[None], (parts, *leaf.shape))
        return lax.with_sharding_constraint(every, NamedSharding(mesh, spec))

    own, specs = is_own(layout, roles, apart), own_specs(layout, roles, apart)
    return {**params, "dense": jax.tree.map(copied, params["dense"], own, specs)}


def summed(grads, layout: Layout, roles: Roles, apart: str):
    """Return the parameters' gradient from that of `with_own_leaves`; what is summed here lies as the moments do."""
    own = is_own(layout, roles, apart)
    places = jax.tree.map(
        lambda own, param, state: state if own else param, own, layout.params["dense"], layout.state["dense"]
    )

    def one(leaf, own, place):
        if not own:
            return leaf
        dim = _split_dim(place, roles)
        if dim is None:
            return lax.psum(leaf[0], roles.dense)
        return lax.psum_scatter(leaf[0], roles.dense, scatter_dimension=dim, tiled=True)

    def over_devices(dense):
        return jax.tree.map(one, dense, own, places)

    add = jax.shard_map(over_devices, mesh=roles.mesh, in_specs=(own_specs(layout, roles, apart),), out_specs=places)
    return {**grads, "dense": add(grads["dense"])}
