"""What a scan over layers stacks for its backward: what `residuals.py` names, once each, in the compute dtype.

Read off the traced gradient; nothing is compiled. That the gradients are right, test_equality.py says, whose models are
scans without remat, and test_prefetch.py of block-wise schedules. Letters: docs/notation.md.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
from support.equality_cases import BATCH, EXPERTS, KEY, LENGTH, build, data, model_config, moe_config, tables_of
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


def stacked_by_scan(turns: int, **fields) -> list:
    config = model_config("bfloat16", layers=LAYERS, model_dim=M, hidden_dim=F, **fields)
    model = first_pass_model(build(config, moe_config(gate_noise=0.0, schedule="s1"), {"expert": 2}))
    gradient = jax.grad(make_loss(model, model.layout(), BATCH, LENGTH), has_aux=True)
    inputs = model.shapes(), data("float32", False), tables_of(model), KEY, np.int32(0), np.float32(1)
    return stacked(jax.make_jaxpr(gradient)(*inputs).jaxpr, turns)


def test_a_scan_stacks_what_is_named_once_in_the_compute_dtype():
    found = stacked_by_scan(LAYERS)
    assert not [one for one in found if one.dtype == jnp.bool_]
    sizes = collections.Counter(int(np.prod(one.shape)) for one in found if one.dtype == jnp.bfloat16)
    products = max(sizes)
    # x before either half of a block, queries, keys, values, what attention made; rows as they came and as they return
    assert sizes == {T * M: 6, products * M // F: 2, products: 1}
    large = sorted(int(np.prod(one.shape)) for one in found if one.dtype == jnp.float32)[-2:]
    assert large[0] == T * EXPERTS  # the gate's products; the other is the scores that XLA's attention keeps
    assert sum(one.dtype == jnp.float32 and int(np.prod(one.shape)) >= T * EXPERTS for one in found) == 2


def test_a_block_wise_scan_stacks_as_little_of_each_half():
    """A turn of two halves: each has half of the tokens, and rows and products of its own."""
    found = stacked_by_scan(LAYERS - 1, overlap="halves")
    assert not [one for one in found if one.dtype == jnp.bool_]
    sizes = collections.Counter(int(np.prod(one.shape)) for one in found if one.dtype == jnp.bfloat16)
    products = max(sizes)
    assert sizes == {T // 2 * M: 2 * 6, products * M // F: 2 * 2, products: 2 * 1}
    sums = [one for one in found if one.dtype == jnp.float32 and int(np.prod(one.shape)) >= T // 2 * EXPERTS]
    assert len(sums) == 2 * 2  # the gate's products, and the scores that XLA's attention keeps
