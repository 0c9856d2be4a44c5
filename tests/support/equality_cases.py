"""A model on a mesh beside the one-device reference: sizes, parameters, data, and the comparison of every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
from support.placements import to_bank

from moe_jax.models import Batch, LanguageModel, ModelConfig, make_loss
from moe_jax.models.reference import reference_loss
from moe_jax.moe import MoEConfig
from moe_jax.moe.routers.scores import gate_noise
from moe_jax.moe.routing import even_tables
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.placement import Placement

EXPERTS, BATCH, LENGTH, VOCAB = 8, 8, 8, 31
NOISE = 0.1


def model_config(dtype="float64", **changes):
    sizes = {"layers": 2, "model_dim": 16, "heads": 4, "hidden_dim": 24, "loss_chunk": 5, "max_length": LENGTH}
    return ModelConfig(dtype=dtype, **{**sizes, **changes})


def moe_config(**changes):
    return MoEConfig(**{"num_experts": EXPERTS, "gate_noise": NOISE, **changes})


def skew(params, routing):
    """Tilt the gates: 'one_hot' sends every first choice to expert 3, 'zero' leaves experts 0-3 without a token."""
    gate = params["dense"]["units"]["segment_0"]["gate"]
    if "bias" in gate["norm"]:
        gate["norm"]["bias"] = jnp.ones_like(gate["norm"]["bias"])
    w = gate["w_gate"]
    if routing == "one_hot":
        gate["w_gate"] = w.at[:, :, 3].add(5.0)
    elif routing == "zero":
        gate["w_gate"] = w.at[:, :, :4].add(-5.0)
    return params


def reference_params(config, moe, routing):
    roles = build_mesh(MeshConfig(), jax.devices()[:1])
    params = LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles).init(jax.random.key(7))
    # biases and norms away from their neutral start, so that their gradients are tested at a general point
    leaves, tree = jax.tree.flatten(params["dense"])
    keys = jax.random.split(jax.random.key(8), len(leaves))
    noisy = [a + 0.05 * jax.random.normal(k, a.shape, a.dtype) for a, k in zip(leaves, keys, strict=True)]
    params = skew({"dense": jax.tree.unflatten(tree, noisy), "bank": params["bank"]}, routing)
    experts = jax.tree.map(lambda leaf: leaf.reshape(config.moe_layers, EXPERTS, *leaf.shape[1:]), params["bank"])
    return {"dense": params["dense"], "experts": experts}


def data(dtype, weighted):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    weights = (rng.random((BATCH, LENGTH)) < 0.6) if weighted else np.ones((BATCH, LENGTH))
    return Batch(tokens[:, :-1], tokens[:, 1:], weights.astype(dtype))


def noise_of(moe, layers, dtype, key):
    if moe.gate_noise == 0:
        return None
    ids = jnp.arange(BATCH * LENGTH, dtype=jnp.int32)
    return [gate_noise(jax.random.fold_in(key, layer), ids, EXPERTS, dtype) for layer in range(layers)]


def assert_equal(case, config, moe, mesh, zero, expert_zero, routing, weighted=False, route=None):
    dtype = jnp.dtype(config.dtype)
    key = jax.random.key(11)
    devices = int(np.prod([size for name, size in mesh.items() if name not in ("model", "devices_per_node")]))
    roles = build_mesh(MeshConfig(**mesh), jax.devices()[:devices])
    drop_groups = roles.num_devices
    params = reference_params(config, moe, routing)
    batch = data(dtype, weighted)
    noise = noise_of(moe, config.moe_layers, dtype, key)

    def oracle(params):
        return reference_loss(
            params, batch.inputs, batch.targets, batch.weights, config, moe, noise=noise,
            drop_groups=drop_groups, route=route,
        )  # fmt: skip

    (want, (_, want_loads)), want_grads = jax.jit(jax.value_and_grad(oracle, has_aux=True))(params)
    model = LanguageModel(
        config=config, moe=moe, vocab_size=VOCAB, roles=roles, zero_stage=zero, expert_zero_stage=expert_zero
    )
    layout = model.layout()
    devices = roles.size(roles.expert)
    placement = Placement.even(config.moe_layers, EXPERTS, devices)
    placed = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(roles.mesh, spec)),
        {"dense": params["dense"], "bank": to_bank(params["experts"], placement)},
        layout.params,
    )
    loss = make_loss(model, layout, BATCH, LENGTH)
    tables = {"segment_0": even_tables(config.moe_layers, EXPERTS, devices)}
    (got, stats), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        placed, batch, tables, key, np.int32(0), np.sum(batch.weights)
    )
    tolerance = 1e-10 if dtype == jnp.float64 else 2e-5
    np.testing.assert_allclose(float(got), float(want), rtol=tolerance, err_msg=case)
    np.testing.assert_array_equal(np.sum(np.asarray(stats.loads), axis=1), want_loads)
    want_flat = {"dense": want_grads["dense"], "bank": to_bank(want_grads["experts"], placement)}
    for (path, a), b in zip(jax.tree.leaves_with_path(want_flat), jax.tree.leaves(grads), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(a)) + 1e-30, (case, jax.tree_util.keystr(path))
    return stats
