"""A model whose layers differ, on a mesh beside the one-device reference: parameters by segment, and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
from routers.dense_router import Groups, dense_route
from support.equality_cases import BATCH, LENGTH, NOISE, VOCAB, data
from support.placements import to_bank

from moe_jax.models import LanguageModel, ModelConfig, make_loss
from moe_jax.models.config import expert_counts
from moe_jax.models.reference import reference_loss
from moe_jax.moe import MoEConfig
from moe_jax.moe.routers.scores import gate_noise
from moe_jax.moe.routing import even_tables
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.placement import Placement

PYRAMID = (
    "layers=1 num_experts=2", "layers=2 moe_every=2 num_experts=4 hidden_dim=20", "layers=2 num_experts=8 top_k=3",
)  # fmt: skip


def model_config(segments=PYRAMID, dtype="float64", **changes):
    layers = sum(int(text.split()[0].removeprefix("layers=")) for text in segments)
    sizes = {"layers": layers, "model_dim": 16, "heads": 4, "hidden_dim": 24, "loss_chunk": 5, "max_length": LENGTH}
    return ModelConfig(**{"dtype": dtype, "segments": segments, **sizes, **changes})


def moe_config(**changes):
    return MoEConfig(**{"gate_noise": NOISE, "top_k": 2, **changes})


def build(config, moe, mesh, **stages):
    """Return the model on devices x ... of a mesh {name: size}, cut for the model's experts."""
    devices = int(np.prod([size for name, size in mesh.items() if name not in ("model", "devices_per_node")]))
    sizes = MeshConfig(**mesh)
    roles = build_mesh(sizes, jax.devices()[:devices], expert_counts(config, moe, sizes, devices))
    return LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles, **stages)


def reference_params(config, moe):
    """Return parameters as the reference takes them, drawn anew, so that no bias is zero and no gate even."""
    model = build(config, moe, {"expert": 1})
    params = model.init(jax.random.key(7))
    leaves, tree = jax.tree.flatten(params["dense"])
    keys = jax.random.split(jax.random.key(8), len(leaves))
    noisy = [a + 0.05 * jax.random.normal(k, a.shape, a.dtype) for a, k in zip(leaves, keys, strict=True)]
    experts = {}
    for segment in model.expert_segments:
        shape = (segment.config.moe_layers, segment.moe.num_experts)
        own = params["bank"][segment.name]
        experts[segment.name] = {name: v.reshape(*shape, *v.shape[1:]) for name, v in own.items()}
    return {"dense": jax.tree.unflatten(tree, noisy), "experts": experts}


def banks(model, experts):
    """Return the bank of a model from experts [L, E, ...] by segment."""
    found = {}
    for segment in model.expert_segments:
        devices = model.roles_of(segment).size(model.roles_of(segment).expert)
        even = Placement.even(segment.config.moe_layers, segment.moe.num_experts, devices)
        found[segment.name] = to_bank(experts[segment.name], even)
    return found


def tables_of(model):
    """Return tables of even homes, for every segment with experts."""
    found = {}
    for segment in model.expert_segments:
        roles = model.roles_of(segment)
        layers, experts = segment.config.moe_layers, segment.moe.num_experts
        found[segment.name] = even_tables(layers, experts, roles.size(roles.expert))
    return found


def route_of(model, key):
    """Return the dense route of all layers, where a segment has another router than `topk`; else None."""
    if all(segment.moe.router == "topk" for segment in model.expert_segments):
        return None
    layers = []
    for segment in model.expert_segments:
        groups = Groups(drop_groups=1, local=np.ones((1, segment.moe.num_experts), bool))
        route = dense_route(segment.moe, key, BATCH * LENGTH, groups)
        layers += [route] * segment.config.moe_layers
    return lambda layer, gate, x: layers[layer](layer, gate, x)


def noise_of(model, dtype, key):
    ids = jnp.arange(BATCH * LENGTH, dtype=jnp.int32)
    return [
        gate_noise(jax.random.fold_in(key, segment.first_layer + layer), ids, segment.moe.num_experts, dtype)
        for segment in model.expert_segments
        for layer in range(segment.config.moe_layers)
    ]


def assert_equal(case, config, moe, mesh, zero=1, expert_zero=1):
    """Compare loss, loads and every gradient with the reference, to 1e-10 of each leaf's largest entry."""
    dtype, key = jnp.dtype(config.dtype), jax.random.key(11)
    model = build(config, moe, mesh, zero_stage=zero, expert_zero_stage=expert_zero)
    params, batch = reference_params(config, moe), data(dtype, True)
    noise = noise_of(model, dtype, key)

    def oracle(params):
        return reference_loss(
            params, batch.inputs, batch.targets, batch.weights, config, moe, noise=noise,
            drop_groups=model.roles.num_devices, route=route_of(model, key),
        )  # fmt: skip

    (want, (_, want_loads)), want_grads = jax.jit(jax.value_and_grad(oracle, has_aux=True))(params)
    layout = model.layout()
    placed = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(model.roles.mesh, spec)),
        {"dense": params["dense"], "bank": banks(model, params["experts"])},
        layout.params,
    )
    loss = make_loss(model, layout, BATCH, LENGTH)
    (got, stats), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        placed, batch, tables_of(model), key, np.int32(0), np.sum(batch.weights)
    )
    np.testing.assert_allclose(float(got), float(want), rtol=1e-10, err_msg=case)
    np.testing.assert_array_equal(np.sum(np.asarray(stats.loads), axis=1), want_loads)
    want_flat = {"dense": want_grads["dense"], "bank": banks(model, want_grads["experts"])}
    for (path, a), b in zip(jax.tree.leaves_with_path(want_flat), jax.tree.leaves(grads), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.max(np.abs(a - b)) <= 1e-10 * np.max(np.abs(a)) + 1e-30, (case, jax.tree_util.keystr(path))
    return stats
