"""Sequence parallelism: what the loop over layers keeps for the backward, and which collectives are there.

That loss and gradients are those of the reference, test_equality.py says.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.equality_cases import BATCH, KEY, LENGTH, build, data, model_config, moe_config, tables_of
from support.traced_programs import equations_of

from moe_jax.models import make_loss


def traced(config, moe, mesh):
    """Return (loss, arguments) of a model on a mesh of shapes."""
    model = build(config, moe, mesh)
    rest = data(np.float32, False), tables_of(model), KEY, np.int32(0), np.float32(1)
    return make_loss(model, model.layout(), BATCH, LENGTH), (model.shapes(), *rest)


def residuals_of_the_loop(split: bool):
    """Return {shape of one layer: number} of the floats that the forward loop stacks for the backward, MP 4, s1."""
    config = model_config("float32", layers=6, moe_every=2, dense_hidden_dim=96, sequence_parallel=split)
    loss, arguments = traced(config, moe_config(schedule="s1", gate_noise=0.0, bucket_slack=100.0), MESH)

    def forward(params):
        return jax.vjp(lambda p: loss(p, *arguments[1:])[0], params)

    found = collections.Counter()
    for equation in equations_of(jax.make_jaxpr(forward)(arguments[0]).jaxpr):
        if equation.primitive.name == "scan" and equation.params["length"] == config.moe_layers:
            for outside, inside in zip(equation.outvars, equation.params["jaxpr"].jaxpr.outvars, strict=True):
                stacked = outside.aval.ndim == inside.aval.ndim + 1  # a carry has as many dims outside
                if stacked and jnp.issubdtype(inside.aval.dtype, jnp.floating):
                    found[inside.aval.shape] += 1
    return found


MESH = {"expert": 8, "model": 4}
TOKENS, DIM = BATCH // 2 * LENGTH, 16  # of an MP group


def test_norms_and_residuals_are_kept_split():
    """Whole, a layer keeps arrays [b, Sq, M]; split, none of that size, not even what is gathered for the matmuls."""

    def of_tokens(found, tokens):
        return sum(n for shape, n in found.items() if shape and shape[-1] == DIM and np.prod(shape[:-1]) == tokens)

    whole, split = residuals_of_the_loop(False), residuals_of_the_loop(True)
    assert of_tokens(whole, TOKENS) == 4, whole
    assert of_tokens(split, TOKENS) == 0, split
    assert of_tokens(split, TOKENS // 4) == 4, split

    def size(found):
        return sum(n * int(np.prod(shape)) for shape, n in found.items())

    assert size(whole) - size(split) >= 3 / 4 * 4 * TOKENS * DIM


@pytest.mark.parametrize(
    ("schedule", "gathers"), [("s1", 0), ("deepspeed", 1)], ids=["tokens_stay_split", "gathered_on_entry"]
)
def test_collectives_of_a_layer(schedule, gathers):
    """One all-gather and one reduce-scatter of the group's tokens for attention; none for s1, one for deepspeed."""
    config = model_config("float32", layers=1, sequence_parallel=True)
    loss, arguments = traced(config, moe_config(schedule=schedule, gate_noise=0.0, bucket_slack=100.0), MESH)
    found = collections.Counter()
    for equation in equations_of(jax.make_jaxpr(loss)(*arguments).jaxpr):
        sizes = [v.aval.size for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "size")]
        if max(sizes, default=0) == TOKENS * DIM:
            found[equation.primitive.name] += 1
    names = {name: number for name, number in found.items() if "gather" in name or "scatter" in name or "psum" in name}
    reduced = {name for name in names if "psum" in name or name == "reduce_scatter"}
    assert reduced == {"reduce_scatter"} and names["reduce_scatter"] == 1, names
    assert sum(n for name, n in names.items() if name.startswith("all_gather")) == 1 + gathers, names


def test_without_an_mp_group_nothing_changes():
    mesh = {"expert": 8}
    texts = []
    for split in (False, True):
        loss, arguments = traced(model_config("float32", sequence_parallel=split), moe_config(gate_noise=0.0), mesh)
        texts.append(str(jax.make_jaxpr(loss)(*arguments)))
    assert texts[0] == texts[1]
