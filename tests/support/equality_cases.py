"""A model on a mesh next to the one-device reference: sizes, parameters, data, and the comparison of every gradient.

A model whose layers differ has experts, banks and tables by segment.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.options import layer_config
from support.placements import to_bank
from support.reference_model import reference_loss

from moe_jax.models import Batch, LanguageModel, ModelConfig, make_loss
from moe_jax.models.config import expert_counts
from moe_jax.models.model_group import rows_of
from moe_jax.moe import MoEConfig
from moe_jax.moe.routers.scores import gate_noise
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.placement import Placement

EXPERTS, BATCH, LENGTH, VOCAB = 8, 8, 8, 31
NOISE = 0.1
KEY = jax.random.key(11)


def model_config(dtype="float64", **changes):
    sizes = {"layers": 2, "model_dim": 16, "heads": 4, "hidden_dim": 24, "loss_chunk": 5, "max_length": LENGTH}
    return ModelConfig(dtype=dtype, **{**sizes, **changes})


def moe_config(**changes):
    return layer_config(**{"num_experts": EXPERTS, "gate_noise": NOISE, **changes})


def build(config, moe, mesh, **stages):
    """Return the model on the devices of a mesh {name: size}, cut for the model's experts."""
    devices = int(np.prod([size for name, size in mesh.items() if name not in ("model", "devices_per_node")]))
    roles = build_mesh(MeshConfig(**mesh), jax.devices()[:devices], expert_counts(config, moe))
    return LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles, **stages)


def skew(dense, routing):
    """Tilt the gates: 'one_hot' sends every first choice to expert 3, 'zero' leaves experts 0-3 without a token."""
    if routing in ("one_hot", "zero"):
        gate = dense["units"]["segment_0"]["gate"]
        if "bias" in gate["norm"]:
            gate["norm"]["bias"] = jnp.ones_like(gate["norm"]["bias"])
        at, by = (3, 5.0) if routing == "one_hot" else (slice(4), -5.0)
        gate["w_gate"] = gate["w_gate"].at[:, :, at].add(by)
    return dense


def reference_params(config, moe, routing="general"):
    """Return parameters {'dense', 'experts': {segment: {name: [L, E, ...]}}} as the reference takes them."""
    model = build(config, moe, {"expert": 1})
    params, experts = model.init(jax.random.key(7)), {}
    # biases and norms away from their neutral start, so that their gradients are tested at a general point
    leaves, tree = jax.tree.flatten(params["dense"])
    keys = jax.random.split(jax.random.key(8), len(leaves))
    noisy = [a + 0.05 * jax.random.normal(k, a.shape, a.dtype) for a, k in zip(leaves, keys, strict=True)]
    for segment in model.expert_segments:
        shape, own = (segment.config.moe_layers, segment.moe.num_experts), params["bank"][segment.name]
        experts[segment.name] = {name: v.reshape(*shape, *v.shape[1:]) for name, v in own.items()}
    return {"dense": skew(jax.tree.unflatten(tree, noisy), routing), "experts": experts}


def banks(model, experts):
    """Return the bank of a model, homes even, from experts {segment: [L, E, ...]}."""
    found = {}
    for segment in model.expert_segments:
        devices = segment.roles(model.roles).size(segment.roles(model.roles).expert)
        even = Placement.even(segment.config.moe_layers, segment.moe.num_experts, devices)
        found[segment.name] = to_bank(experts[segment.name], even)
    return found


def on_mesh(tree, specs, roles):
    """Return the leaves as their PartitionSpecs say."""
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, roles.sharding(*spec)), tree, specs)


def placed(model, layout, params):
    """Return the reference's parameters {'dense', 'experts'} on the mesh, homes even."""
    stored = {"dense": params["dense"], "bank": banks(model, params["experts"])}
    return on_mesh(stored, layout.params, model.roles)


def data(dtype, weighted):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    weights = (rng.random((BATCH, LENGTH)) < 0.6) if weighted else np.ones((BATCH, LENGTH))
    return Batch(tokens[:, :-1], tokens[:, 1:], weights.astype(dtype))


def filled_up(batch, config, roles):
    """Return the batch with the rows that its devices need to share it, of weight 0, and noise for tokens."""
    rng, count = np.random.default_rng(4), rows_of(config, roles, BATCH) * roles.size(roles.dense) - BATCH
    more = [rng.integers(0, VOCAB, (count, LENGTH)).astype(np.int32) for _ in range(2)]
    more.append(np.zeros((count, LENGTH), batch.weights.dtype))
    given = batch.inputs, batch.targets, batch.weights
    return Batch(*(np.concatenate(both) for both in zip(given, more, strict=True)))


def noise_of(model, dtype):
    """Return the gates' noise of every MoE layer, [B Sq, E] each; None without."""
    ids = jnp.arange(BATCH * LENGTH, dtype=jnp.int32)
    noise = [
        gate_noise(jax.random.fold_in(KEY, segment.first_layer + layer), ids, segment.moe.num_experts, dtype)
        for segment in model.expert_segments
        for layer in range(segment.config.moe_layers)
    ]
    return noise if model.moe.gate_noise else None


def what(config, moe):
    """Return the configs without all that says how to compute, so that cases share a program of the reference."""
    how = ("remat", "prefetch", "refetch_replicas", "stack", "overlap", "sequence_parallel")
    config = dataclasses.replace(config, **{name: getattr(ModelConfig(), name) for name in how})
    how = ("schedule", "transport", "pairwise_groups", "gather", "bucket_slack")
    return config, dataclasses.replace(moe, **{name: getattr(MoEConfig(), name) for name in how})


@functools.partial(jax.jit, static_argnames=("config", "moe", "drop_groups", "route"))
def reference_gradients(params, batch, noise, *, config, moe, drop_groups=1, route=None):
    """Return ((loss, (cross-entropy, loads)), gradients) of the one-device model; arguments as of `reference_loss`."""
    loss = functools.partial(reference_loss, config=config, moe=moe, noise=noise, drop_groups=drop_groups, route=route)
    return jax.value_and_grad(loss, has_aux=True)(params, batch.inputs, batch.targets, batch.weights)


def assert_close(got, want, tolerance=1e-10, case=""):
    """Compare trees to a tolerance of each leaf's largest entry."""
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(a)) + 1e-30, (case, jax.tree_util.keystr(path))


def assert_equal(
    case, config, moe, mesh, zero=1, expert_zero=1, routing="general", weighted=True, route=None
):  # fmt: skip
    """Compare loss, loads and every gradient with the reference; returns the statistics."""
    dtype = jnp.dtype(config.dtype)
    model = build(config, moe, mesh, zero_stage=zero, expert_zero_stage=expert_zero)
    params, batch, noise = reference_params(config, moe, routing), data(dtype, weighted), noise_of(model, dtype)
    plain, layer = what(config, moe)
    groups = 1 if moe.capacity_factor is None else model.roles.mesh.size
    (want, (_, want_loads)), want_grads = reference_gradients(
        params, batch, noise, config=plain, moe=layer, drop_groups=groups, route=route
    )
    layout = model.layout()
    step = jax.jit(jax.value_and_grad(make_loss(model, layout, BATCH, LENGTH), has_aux=True))
    (got, stats), grads = step(
        placed(model, layout, params), filled_up(batch, config, model.roles), model.even_tables(), KEY, np.int32(0),
        np.sum(batch.weights),
    )  # fmt: skip
    tolerance = 1e-10 if dtype == jnp.float64 else 2e-5
    np.testing.assert_allclose(float(got), float(want), rtol=tolerance, err_msg=case)
    np.testing.assert_array_equal(np.sum(np.asarray(stats.loads), axis=1), want_loads)
    assert_close(grads, {"dense": want_grads["dense"], "bank": banks(model, want_grads["experts"])}, tolerance, case)
    return stats
