"""The one all-gather that brings split leaves together."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moe_jax.parallel.gather import gather_tree
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.parallel.sharding import spec_of
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


def test_gather_tree():
    """Every device gets every leaf to the bit; a leaf's gradient is the sum over devices, on the device of its part."""
    step, placed, tree, weights = gathering(dict.fromkeys(TREE, jnp.float32))
    (_, full), grads = step(placed, weights)
    for name in TREE:
        np.testing.assert_array_equal(full[name], np.broadcast_to(tree[name], (8, *tree[name].shape)))
        np.testing.assert_allclose(grads[name], weights[name].sum(axis=0), rtol=0, atol=1e-5)  # sums of eight
        assert grads[name].sharding.is_equivalent_to(placed[name].sharding, grads[name].ndim)


def test_gather_tree_keeps_dtypes():
    """Leaves of two dtypes travel apart, each unrounded."""
    dtypes = {
        "columns": jnp.float32,
        "cube": jnp.bfloat16,
        "rows": jnp.bfloat16,
        "whole": jnp.float32,
        "whole_too": jnp.float32,
    }
    step, placed, tree, weights = gathering(dtypes)
    (_, full), grads = step(placed, weights)
    for name, dtype in dtypes.items():
        assert full[name].dtype == grads[name].dtype == dtype
        np.testing.assert_array_equal(full[name][5], tree[name])
    assert step.lower(placed, weights).as_text().count("stablehlo.all_gather") == 2


def test_gather_tree_in_the_dtype_that_is_read():
    """Some leaves travel in bfloat16 beside others in float32, as bits of one all-gather; gradients in float32."""
    wires = {**dict.fromkeys(TREE, "float32"), "columns": "bfloat16", "rows": "bfloat16"}
    step, placed, tree, weights = gathering(dict.fromkeys(TREE, jnp.float32), wires)
    (_, full), grads = step(placed, weights)
    for name, wire in wires.items():
        assert full[name].dtype == grads[name].dtype == jnp.float32
        np.testing.assert_array_equal(full[name][5], tree[name].astype(wire).astype(jnp.float32))
        np.testing.assert_allclose(grads[name], weights[name].sum(axis=0), rtol=0, atol=1e-5)
    text = step.lower(placed, weights).as_text()
    counts = [text.count(f"stablehlo.{name}") for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")]
    assert counts == [1, 1, 2, 0]
    values = {name: math.prod(shape) // 8 for name, (shape, _) in TREE.items()}
    words = values["columns"] + values["rows"] + 2 * values["cube"]
    assert f"tensor<8x{words}xui16>" in text


def test_gather_tree_beside_a_model_parallel_leaf():
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
