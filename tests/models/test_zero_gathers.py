"""ZeRO-3 brings parameters together in the dtype in which they are read: half the bytes in bfloat16, and equal numbers.

Rounding before the gather or after it is the same, so that a bfloat16 model's forward is equal to the bit without ZeRO.
What is read in float32 (norms, gates, biases, and a token table that positions are added to) travels whole.
"""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.equality_cases import BATCH, LENGTH, build, data, model_config, moe_config, placed, reference_params
from support.marks import slow_but
from support.traced_programs import equations_of

from moe_jax.models import make_loss
from moe_jax.models.language_model import flatten

EXACT = {"xla_allow_excess_precision": False}  # else XLA:CPU leaves out the rounding of a weight that it has in float32
MODELS = {  # model, layer, mesh next to 2 expert-parallel devices
    "learned": ({}, {}, {"data": 2}),
    "published": (
        {
            "positions": "rotary", "tied_head": False, "norm": "rms", "qk_norm": "head", "activation": "swiglu",
            "kv_heads": 2, "ffn_bias": False, "moe_every": 2, "remat": "block",
        },
        {"schedule": "s1", "shared_experts": 1, "residual": "learned"},
        {"data": 2, "model": 2},
    ),
    "rotary_halves": ({"positions": "rotary", "overlap": "halves"}, {"schedule": "s1"}, {"data": 2}),
}  # fmt: skip

MOVES = ("all_gather", "reduce_scatter")


def loss_of(name, dtype, zero):
    """Return (model, its loss, the loss's inputs) on a mesh."""
    changes, layer, mesh = MODELS[name]
    config, moe = model_config(dtype, **changes), moe_config(gate_noise=0.0, **layer)
    model = build(config, moe, {"expert": 2, **mesh}, zero_stage=zero)
    layout, batch = model.layout(), data(config.param_dtype, weighted=True)
    params = placed(model, layout, reference_params(config, moe))
    inputs = params, batch, model.even_tables(), jax.random.key(1), np.int32(0), np.sum(batch.weights)
    return model, make_loss(model, layout, BATCH, LENGTH), inputs


def gathered_bytes(text: str) -> int:
    """Return the bytes that a device gives to the all-gathers of a lowered program, one turn of each loop."""
    total = 0
    for part in text.split("stablehlo.all_gather")[1:]:
        sizes, bits = re.search(r": \(tensor<((?:\d+x)*)[a-z]*(\d+)>\) ->", part).groups()
        total += math.prod(int(size) for size in sizes.split("x") if size) * int(bits) // 8
    return total


def expected_bytes(model) -> int:
    """Return the same of the leaves' sizes: what lies outside the layers, and one unit; without MP."""
    layout, shapes = model.layout(), flatten(model.shapes()["dense"])
    dims, wires, total = flatten(layout.gather), flatten(layout.wires), 0
    for name, leaf in shapes.items():
        if dims[name] >= 0:
            values = leaf.size // (model.config.units if name.startswith("units") else 1)
            total += values // model.roles.size(model.roles.dense) * jnp.dtype(wires[name]).itemsize
    return total


@pytest.mark.parametrize("name", slow_but(MODELS, "learned"))
def test_bfloat16_travels_and_the_forward_is_equal_to_the_bit(name):
    (_, plain, given), (model, split, inputs) = (loss_of(name, "bfloat16", zero) for zero in (0, 3))
    lowered, lowered_plain = jax.jit(split).lower(*inputs), jax.jit(plain).lower(*given)
    if name == "learned":  # nothing is gathered over MP
        assert gathered_bytes(lowered.as_text()) - gathered_bytes(lowered_plain.as_text()) == expected_bytes(model)
    (got, _), (want, _) = lowered.compile(EXACT)(*inputs), lowered_plain.compile(EXACT)(*given)
    assert got == want


def test_experts_travel_once_a_layer_and_their_gradients_in_float32():
    """Two layers in halves, whose experts are split in two: both halves and the backward read one gather in bfloat16,
    and the sum of both halves' gradients is scattered, once, in float32 (the gather of zeros that it is the transpose
    of is traced, and nothing reads it)."""
    config = model_config("bfloat16", overlap="halves", stack="unrolled")
    model = build(config, moe_config(gate_noise=0.0), {"data": 2, "expert": 2}, expert_zero_stage=3)
    layout, batch = model.layout(), data("float32", weighted=True)
    params = placed(model, layout, reference_params(config, model.moe))
    inputs = params, batch, model.even_tables(), jax.random.key(1), np.int32(0), np.sum(batch.weights)
    step = jax.jit(jax.grad(make_loss(model, layout, BATCH, LENGTH), has_aux=True))
    moved = [own for own in equations_of(step.trace(*inputs).jaxpr.jaxpr) if own.primitive.name in MOVES]
    found = collections.Counter((own.primitive.name, own.outvars[0].aval.dtype.name) for own in moved)
    assert found == {("all_gather", "bfloat16"): 2, ("all_gather", "float32"): 2, ("reduce_scatter", "float32"): 2}
