"""The one all-gather that brings split leaves together."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.sharding import gather_tree, spec_of
from moe_jax.parallel.varying import cast_varying

TREE = {  # leaf -> (global shape, dim that is split over the eight devices or -1)
    "columns": ((3, 16), 1),
    "cube": ((2, 8, 3), 1),
    "rows": ((24, 2), 0),
    "whole": ((5,), -1),
    "whole_too": ((2, 3), -1),
}


def gathering(dtypes, wires=None):
    """Return (jitted value and gradient of a weighted sum of the gathered tree, tree, weights [8, ...], roles)."""
    roles = build_mesh(MeshConfig(data=2), jax.devices())
    rng = np.random.default_rng(0)
    tree = {name: jnp.asarray(rng.normal(size=shape), dtypes[name]) for name, (shape, _) in TREE.items()}
    weights = {name: rng.normal(size=(8, *shape)).astype(dtypes[name]) for name, (shape, _) in TREE.items()}
    dims = {name: dim for name, (_, dim) in TREE.items()}
    specs = {name: spec_of(len(shape), {dim: roles.dense}) for name, (shape, dim) in TREE.items()}

    def body(shards, weights):
        full = gather_tree(shards, dims, roles.dense, 8, wires)
        total = sum(jnp.sum(full[name] * weights[name][0]).astype(jnp.float32) for name in TREE)
        return jax.lax.psum(total, roles.dense), jax.tree.map(lambda a: cast_varying(a, roles.dense)[None], full)

    sharded = jax.shard_map(body, mesh=roles.mesh, in_specs=(specs, P(roles.dense)), out_specs=(P(), P(roles.dense)))
    step = jax.jit(jax.value_and_grad(sharded, has_aux=True))
    placed = {name: jax.device_put(tree[name], roles.sharding(*specs[name])) for name in TREE}
    return step, placed, tree, weights


FLOAT32 = dict.fromkeys(TREE, "float32")
TWO = {**FLOAT32, "cube": "bfloat16", "rows": "bfloat16"}
WIRES = {**FLOAT32, "columns": "bfloat16", "rows": "bfloat16"}


@pytest.mark.parametrize(
    ("dtypes", "wires", "collectives"), [(FLOAT32, None, (1, 1)), (TWO, None, (2, 2)), (FLOAT32, WIRES, (1, 1))]
)
def test_every_device_gets_every_leaf(dtypes, wires, collectives):
    """To the bit of its wire; a leaf's gradient is the sum over devices, in its dtype, on the device of its part.

    Leaves of two dtypes travel apart, each unrounded. Some leaves may travel in bfloat16 next to others in float32, as
    bits of one all-gather; their gradients are summed in float32.
    """
    step, placed, tree, weights = gathering(dtypes, wires)
    (_, full), grads = step(placed, weights)
    for name, dtype in dtypes.items():
        sent = tree[name].astype((wires or dtypes)[name]).astype(dtype)
        assert full[name].dtype == grads[name].dtype == dtype
        np.testing.assert_array_equal(full[name], np.broadcast_to(sent, (8, *sent.shape)))
        assert grads[name].sharding.is_equivalent_to(placed[name].sharding, grads[name].ndim)
        if dtype == "float32":
            np.testing.assert_allclose(grads[name], weights[name].sum(axis=0), rtol=0, atol=1e-5)  # sums of eight
    text = step.lower(placed, weights).as_text()
    assert tuple(text.count(f"stablehlo.{kind}") for kind in ("all_gather", "reduce_scatter")) == collectives
    assert text.count("stablehlo.all_reduce") == 2  # the loss, and all leaves that are whole
    if wires:
        values = {name: math.prod(shape) // 8 for name, (shape, _) in TREE.items()}
        assert f"tensor<8x{values['columns'] + values['rows'] + 2 * values['cube']}xui16>" in text


def test_gather_tree_next_to_a_model_parallel_leaf():
    """A leaf that differs over MP does not make its neighbour do so: the neighbour's gradient is not counted twice."""
    roles = build_mesh(MeshConfig(model=2), jax.devices())
    specs = {"heads": P(roles.model, roles.dense), "plain": P(roles.dense)}
    dims = {"heads": 1, "plain": 0}

    def body(shards):
        full = gather_tree(shards, dims, roles.dense, 4)
        scale = 1 + jax.lax.axis_index(roles.dense).astype(jnp.float32)  # devices 1 to 4
        own_part = jax.lax.psum(jnp.sum(full["heads"]), roles.model)
        return jax.lax.psum(scale * (own_part + jnp.sum(full["plain"])), roles.dense)

    total = jax.shard_map(body, mesh=roles.mesh, in_specs=(specs,), out_specs=P())
    tree = {"heads": jnp.ones((2, 8)), "plain": jnp.ones(4)}
    loss, grads = jax.jit(jax.value_and_grad(total))(tree)
    assert loss == (1 + 2 + 3 + 4) * (16 + 4)
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, np.full(tree[name].shape, 10), err_msg=name)
