"""Closed formulas against the real model: every leaf, count and spec, and the FLOPs of every matrix product."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from support.reference_model import reference_loss

from moe_jax.cluster.layer_seconds import preceding_flops
from moe_jax.models import Batch, LanguageModel, ModelConfig
from moe_jax.models.config import LoraConfig
from moe_jax.models.counts import Sizes, device_bytes, flops_per_token, parameter_counts, preceding
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh

VOCAB = 48
SIZES = {"layers": 4, "model_dim": 16, "heads": 4, "hidden_dim": 24, "max_length": 8}
VARIANTS = [
    {},
    {"moe_every": 2, "activation": "swiglu", "dense_hidden_dim": 40},
    {"activation": "swiglu", "positions": "rotary", "kind": "bert"},
    {
        "moe_every": 2, "norm": "rms", "kv_heads": 2, "head_dim": 6, "qk_norm": "head", "attention_bias": False,
        "ffn_bias": False, "tied_head": False,
    },
    {"kv_heads": 1, "qk_norm": "width", "norm": "rms"},
    {
        "moe_every": 2, "positions": "rotary", "head_dim": 10, "kv_lora_rank": 6, "q_lora_rank": 7,
        "qk_rope_head_dim": 4, "v_head_dim": 5,
    },
]  # fmt: skip


SHARED = {"shared_experts": 2, "shared_hidden_dim": 20, "residual": "learned"}
LAYERS = [*((changes, {}) for changes in VARIANTS), ({}, {"shared_experts": 1}), ({"activation": "swiglu"}, SHARED)]


def test_parameter_counts_by_hand():
    """One block, M=2, one head, F=3, E=4, K=1, V=5, 7 positions.

    Embeddings 5*2 + 7*2 = 24; attention 3*2*2 + 2*2 = 16, biases 3*2 + 2 = 8; norms 3 * 2*2 = 12; gate 2*4 = 8;
    experts 4 * 2*2*3 = 48, of which a token meets 12.
    """
    config = ModelConfig(layers=1, model_dim=2, heads=1, hidden_dim=3, max_length=7)
    total, active, as_papers, by_group = parameter_counts(config, MoEConfig(num_experts=4, top_k=1), 5)
    assert by_group == {
        "embedding": 24, "attention": 16, "feed_forward": 0, "shared_experts": 0, "gate": 8, "norm": 12, "bias": 8,
        "experts": 48,
    }  # fmt: skip
    assert (total, active, as_papers) == (116, 80, 64)
    # three experts of a token, whatever a capacity may drop
    assert parameter_counts(config, MoEConfig(num_experts=4, top_k=3, capacity_factor=2.0), 5)[1] == 80 + 2 * 12


def dot_flops(jaxpr) -> int:
    """Return 2 x rows x columns x contracted of every matrix product in a jaxpr, inner ones included."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contract, _), _ = equation.params["dimension_numbers"]
            inner = np.prod([equation.invars[0].aval.shape[dim] for dim in contract])
            total += 2 * int(np.prod(equation.outvars[0].aval.shape) * inner)
        for inner_jaxpr in jaxprs_in_params(equation.params):
            total += dot_flops(inner_jaxpr)
    return total


@pytest.mark.parametrize(("changes", "layer"), LAYERS)
def test_forward_flops_are_the_matrix_products_of_the_reference(changes, layer):
    """With K = E the reference, which computes every expert for every token, does just what a token needs."""
    config, moe = ModelConfig(**{**SIZES, **changes}), MoEConfig(num_experts=2, top_k=2, **layer)
    roles = build_mesh(MeshConfig(), jax.devices()[:1])
    shapes = LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles).shapes()
    experts = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((config.moe_layers, 2, *leaf.shape[1:]), leaf.dtype), shapes["bank"]
    )
    batch = Batch(*(jax.ShapeDtypeStruct((3, 8), dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32)))
    jaxpr = jax.make_jaxpr(
        lambda params, batch: reference_loss(params, batch.inputs, batch.targets, batch.weights, config, moe)
    )({"dense": shapes["dense"], "experts": experts}, batch)
    want = dot_flops(jaxpr.jaxpr)
    forward, training = flops_per_token(config, moe, VOCAB, 8, LoraConfig())
    assert (forward * 3 * 8, training * 3 * 8) == (want, 3 * want)
    assert flops_per_token(config, moe, VOCAB, 8, LoraConfig(rank=2)) == (forward, 2 * forward)


MESHES = [
    ({}, 1),
    ({}, 8),
    ({"data": 2}, 8),
    ({"data": 2, "expert_shard": 2, "model": 4}, 8),
    ({"data": 8, "expert": 1}, 8),
]


def bytes_of(shapes, specs, roles) -> int:
    """Return what device 0 holds of a tree, as jax lays it out."""

    def one(leaf, spec):
        return int(np.prod(roles.sharding(*spec).shard_shape(leaf.shape))) * leaf.dtype.itemsize

    is_spec = lambda node: isinstance(node, jax.sharding.PartitionSpec)  # noqa: E731
    return sum(jax.tree.leaves(jax.tree.map(one, shapes, specs, is_leaf=is_spec)))


@pytest.mark.parametrize(("mesh", "devices"), MESHES)
def test_device_bytes_are_those_of_the_layout(mesh, devices):
    config = ModelConfig(**SIZES, moe_every=2, dtype="bfloat16")
    schedule = "dp" if mesh.get("expert") == 1 else "deepspeed"
    moe = MoEConfig(num_experts=8, schedule=schedule)
    roles = build_mesh(MeshConfig(**mesh), jax.devices()[:devices])
    every = itertools.product((0, 1, 3), (0, 1, 2, 3)) if len(mesh) == 1 else [(0, 0), (1, 2), (3, 1), (3, 3)]
    for zero, expert_zero in every:
        model = LanguageModel(
            config=config, moe=moe, vocab_size=VOCAB, roles=roles, zero_stage=zero, expert_zero_stage=expert_zero
        )
        layout, shapes = model.layout(), model.shapes()
        abstract = dataclasses.replace(model, roles=build_mesh(MeshConfig(**mesh), devices))
        got = device_bytes(Sizes(model=abstract, length=8, batch_size=8, grad_accum_steps=1))
        assert got.parameters == bytes_of(shapes, layout.params, roles)
        assert got.optimizer == 2 * bytes_of(shapes, layout.state, roles)
        gradients = {"dense": layout.params["dense"], "bank": layout.grad_sink}
        assert got.gradients == bytes_of(shapes, gradients, roles)
        same_dtype, double = (
            dataclasses.replace(abstract, config=dataclasses.replace(config, dtype=name))
            for name in ("float32", "float64")
        )
        twice_as_wide = device_bytes(Sizes(model=double, length=8, batch_size=8, grad_accum_steps=1))
        assert twice_as_wide.parameters == 2 * got.parameters
        whole_leaves = device_bytes(Sizes(model=same_dtype, length=8, batch_size=8, grad_accum_steps=1)).compute_weights
        stages = [zero] * (roles.size(roles.dense) > 1) + [expert_zero] * (roles.size(roles.data) > 1)
        assert (whole_leaves > 0) == (3 in stages)
        twice = device_bytes(Sizes(model=abstract, length=8, batch_size=16, grad_accum_steps=2))
        # of a microbatch alone those of what is no unit: each layer's are added to the sum as it makes them
        both = shapes["dense"], layout.params["dense"]
        outer = [{name: leaf for name, leaf in of.items() if name != "units"} for of in both]
        assert twice.gradients == got.gradients + bytes_of(*outer, roles) and twice.activations == got.activations


def test_flops_between_moe_layers_by_hand():
    """M = 16, Sq = 8: attention 8 M^2 + 4 Sq M = 2,560 a token; two of them, and a dense FFN of three matrices 16 x 40,
    3,840 FLOPs, where every second block is MoE."""
    assert preceding_flops(**preceding(ModelConfig(**SIZES), 8)) == 2560
    other = ModelConfig(**SIZES, moe_every=2, activation="swiglu", dense_hidden_dim=40)
    assert preceding_flops(**preceding(other, 8)) == 2 * 2560 + 3840
