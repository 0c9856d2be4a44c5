"""What a scan over layers stacks for its backward, and which collectives of an MP group are in a layer.

Read off traced programs; nothing is compiled. That the gradients are right, test_equality.py says, whose models are
scans without remat, and test_prefetch.py of block-wise schedules. Letters: docs/notation.md.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.equality_cases import BATCH, EXPERTS, KEY, LENGTH, build, data, model_config, moe_config
from support.sums_in_programs import constants_and_carries
from support.traced_programs import equations_of

from moe_jax.models import make_loss
from moe_jax.models.language_model import first_pass_model

LAYERS, M, F = 4, 32, 48
T = BATCH * LENGTH // 2  # tokens of one of the two devices


def stacked(jaxpr, turns: int) -> list:
    """Return the types of what the first scan of so many turns, the forward's, stacks; without the stacked dim."""
    scans = (eqn for eqn in equations_of(jaxpr) if eqn.primitive.name == "scan" and eqn.params["length"] == turns)
    first = next(scans)
    carries = constants_and_carries(first.params, len(first.outvars))[1]
    return [jax.ShapeDtypeStruct(out.aval.shape[1:], out.aval.dtype) for out in first.outvars[carries:]]


def traced(config, mesh, function=lambda loss: loss, **layer):
    """Return the jaxpr of a function of the loss of pass 0."""
    moe = moe_config(**{"gate_noise": 0.0, "schedule": "s1", **layer})
    model = first_pass_model(build(config, moe, mesh))
    loss = make_loss(model, model.layout(), BATCH, LENGTH)
    inputs = model.shapes(), data("float32", False), model.even_tables(), KEY, np.int32(0), np.float32(1)
    return jax.make_jaxpr(function(loss))(*inputs)


def stacked_by_scan(turns: int, dtype="bfloat16", mesh=None, **fields) -> list:
    config = model_config(dtype, **{"layers": LAYERS, "model_dim": M, "hidden_dim": F, **fields})
    gradient = traced(config, mesh or {"expert": 2}, lambda loss: jax.grad(loss, has_aux=True))
    return stacked(gradient.jaxpr, turns)


def test_a_scan_stacks_what_is_named_once_in_the_compute_dtype():
    found = stacked_by_scan(LAYERS)
    assert not [one for one in found if one.dtype == jnp.bool_]
    sizes = collections.Counter(int(np.prod(one.shape)) for one in found if one.dtype == jnp.bfloat16)
    products = max(sizes)
    # x before either half of a block, queries, keys, values, what attention made; rows as they came and as they return
    assert sizes == {T * M: 6, products * M // F: 2, products: 1}
    large = sorted(int(np.prod(one.shape)) for one in found if one.dtype == jnp.float32)[-2:]
    # a number for each query of attention, whose scores are made again, and the gate's products
    assert large == [T * model_config().heads, T * EXPERTS]


def test_a_block_wise_scan_stacks_as_little_of_each_half():
    """A turn of two halves: each has half of the tokens, and rows and products of its own."""
    found = stacked_by_scan(LAYERS - 1, overlap="halves")
    assert not [one for one in found if one.dtype == jnp.bool_]
    sizes = collections.Counter(int(np.prod(one.shape)) for one in found if one.dtype == jnp.bfloat16)
    products = max(sizes)
    assert sizes == {T // 2 * M: 2 * 6, products * M // F: 2 * 2, products: 2 * 1}
    sums = [one for one in found if one.dtype == jnp.float32 and int(np.prod(one.shape)) >= T // 2 * EXPERTS]
    assert len(sums) == 2  # the gate's products: attention keeps no scores


MP4 = {"expert": 8, "model": 4}
TOKENS = BATCH // 2 * LENGTH  # of an MP group


def test_norms_and_residuals_are_kept_split():
    """Whole, a layer keeps arrays [b, Sq, M]; split, none of that size, not even what is gathered for the matmuls."""
    sizes = {"layers": 6, "moe_every": 2, "dense_hidden_dim": 96, "model_dim": 16, "hidden_dim": 24}
    whole, split = (
        [one for one in stacked_by_scan(3, "float32", MP4, sequence_parallel=split, **sizes) if one.dtype == np.float32]
        for split in (False, True)
    )
    of_tokens = lambda found, tokens: sum(one.shape[-1:] == (16,) and one.size == tokens * 16 for one in found)  # noqa: E731
    assert of_tokens(whole, TOKENS) == 4, whole
    assert (of_tokens(split, TOKENS), of_tokens(split, TOKENS // 4)) == (0, 4), split
    less = sum(one.size for one in whole) - sum(one.size for one in split)
    assert less >= 3 / 4 * 4 * TOKENS * 16


@pytest.mark.parametrize(
    ("schedule", "gathers"), [("s1", 0), ("deepspeed", 1)], ids=["tokens_stay_split", "gathered_on_entry"]
)
def test_collectives_of_a_layer_of_split_tokens(schedule, gathers):
    """One all-gather and one reduce-scatter of the group's tokens for attention; none for s1, one for deepspeed."""
    config, found = model_config("float32", layers=1, sequence_parallel=True), collections.Counter()
    for equation in equations_of(traced(config, MP4, schedule=schedule, bucket_slack=100.0).jaxpr):
        sizes = [v.aval.size for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "size")]
        if max(sizes, default=0) == TOKENS * config.model_dim:
            found[equation.primitive.name] += 1
    names = {name: number for name, number in found.items() if "gather" in name or "scatter" in name or "psum" in name}
    reduced = {name for name in names if "psum" in name or name == "reduce_scatter"}
    assert reduced == {"reduce_scatter"} and names["reduce_scatter"] == 1, names
    assert sum(n for name, n in names.items() if name.startswith("all_gather")) == 1 + gathers, names
