"""Gradients that each data-parallel device keeps for itself until they are summed, once.

Inputs: the parameters of a model and their layout. Outputs: the same parameters with a copy for each data-parallel
device of what all of them hold, and from the gradient of those the gradient of the parameters. A copy is on its device
already, so it moves nothing; its gradient is that device's own, and `summed` adds them up where the optimizer wants
them: under ZeRO-1 by a reduce-scatter, half the bytes of an all-reduce. Leaves that are split (ZeRO-3) and the experts
stay as they are, and the model sums their gradients. Traced, outside the model's `shard_map`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.mesh.roles import Roles
from moe_jax.models.language_model import Layout


def own_specs(layout: Layout, roles: Roles):
    """Return the PartitionSpecs of what `with_own_leaves` makes of the dense parameters."""
    return jax.tree.map(
        lambda dim, spec: spec if dim >= 0 else P(roles.dense, *spec), layout.gather, layout.params["dense"]
    )


def own_leaves(dense, layout: Layout):
    """Return this device's dense parameters, inside `shard_map`."""
    return jax.tree.map(lambda leaf, dim: leaf if dim >= 0 else leaf[0], dense, layout.gather)


def with_own_leaves(params, layout: Layout, roles: Roles):
    """Return the parameters with dense leaves that all data-parallel devices hold as [devices, ...]."""
    parts, mesh = roles.size(roles.dense), roles.mesh

    def copied(leaf, dim, spec):
        if dim >= 0:
            return leaf
        every = jnp.broadcast_to(leaf[None], (parts, *leaf.shape))
        return lax.with_sharding_constraint(every, NamedSharding(mesh, spec))

    specs = own_specs(layout, roles)
    return {**params, "dense": jax.tree.map(copied, params["dense"], layout.gather, specs)}


def summed(grads, layout: Layout, roles: Roles):
    """Return the parameters' gradient from that of `with_own_leaves`; what is summed here lies as the moments do."""
    places = jax.tree.map(
        lambda dim, param, state: param if dim >= 0 else state,
        layout.gather, layout.params["dense"], layout.state["dense"],
    )  # fmt: skip

    def one(leaf, dim, place):
        if dim >= 0:
            return leaf
        dims = [at for at, axes in enumerate(place) if (axes if isinstance(axes, tuple) else (axes,)) == roles.dense]
        if not dims:
            return lax.psum(leaf[0], roles.dense)
        return lax.psum_scatter(leaf[0], roles.dense, scatter_dimension=dims[0], tiled=True)

    def over_devices(dense):
        return jax.tree.map(one, dense, layout.gather, places)

    add = jax.shard_map(over_devices, mesh=roles.mesh, in_specs=(own_specs(layout, roles),), out_specs=places)
    return {**grads, "dense": add(grads["dense"])}
