"""Sequence parallelism: norms and residuals split over the tokens of an MP group give the same numbers with less kept.

Loss and every gradient in float64 against the one-device reference (1e-10 of the largest entry of each leaf), with the
tokens entering each schedule split; what the loop over layers keeps for the backward; which collectives are there.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.equality_cases import BATCH, EXPERTS, LENGTH, VOCAB, assert_equal, data, model_config, moe_config

from moe_jax.errors import UserError
from moe_jax.models import LanguageModel, make_loss
from moe_jax.moe.routing import even_tables
from moe_jax.parallel.mesh import MeshConfig, build_mesh

# schedule, mesh, ZeRO stage, model
CASES = {
    "s1_mp4_pairs_zero3": (
        "s1",
        {"expert": 4, "expert_shard": 2, "model": 4},
        3,
        {"moe_every": 2, "remat": "block", "activation": "swiglu", "positions": "rotary"},
    ),
    "s2_mp2_esp2": ("s2", {"expert": 4, "expert_shard": 2, "model": 2}, 1, {"remat": "dots"}),
    "deepspeed_mp4": ("deepspeed", {"data": 2, "expert": 4, "model": 4}, 3, {"moe_every": 2}),
}
# with buckets so small that a second pass is taken
SLOW = {
    "deepspeed_mp2_esp4": ("deepspeed", {"expert": 2, "expert_shard": 4, "model": 2}, 1, {}),
    "pairwise_mp2": ("pairwise", {"expert": 4, "expert_shard": 2, "model": 2}, 1, {}),
    "ring_mp4": ("ring", {"expert": 4, "expert_shard": 2, "model": 4}, 1, {}),
    "parm_mp2": ("parm", {"expert": 4, "expert_shard": 2, "model": 2}, 1, {"kind": "bert"}),
    "prefetch_mp4": ("deepspeed", {"expert": 8, "model": 4}, 1, {"prefetch": "pro_prophet", "remat": "block"}),
}


def check(name, slack, schedule, mesh, zero, changes):
    """Compare one case of the tables above."""
    with jax.enable_x64(True):
        config = model_config(sequence_parallel=True, **changes)
        return assert_equal(
            name, config, moe_config(schedule=schedule, bucket_slack=slack), mesh, zero, 1, "uniform", True
        )


@pytest.mark.parametrize("name", CASES)
def test_equals_reference_float64(name):
    check(name, 100.0, *CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_schedules_equal_reference_float64(name):
    check(name, 0.5, *SLOW[name])


def traced(config, moe, mesh, length=LENGTH):
    """Return (loss, arguments) of a model on a mesh of shapes."""
    roles = build_mesh(MeshConfig(**mesh), jax.devices()[:8])
    model = LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles)
    layout = model.layout()
    loss = make_loss(model, layout, BATCH, length)
    tables = {"segment_0": even_tables(config.moe_layers, EXPERTS, roles.size(roles.expert))}
    arguments = (model.shapes(), data(np.float32, False), tables, jax.random.key(0), np.int32(0), np.float32(1))
    return loss, arguments


def equations(jaxpr):
    """Yield all equations inside a jaxpr."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def residuals_of_the_loop(split: bool):
    """Return {shape of one layer: number} of the floats that the forward loop stacks for the backward, MP 4, s1."""
    config = model_config("float32", layers=6, moe_every=2, dense_hidden_dim=96, sequence_parallel=split)
    loss, arguments = traced(config, moe_config(schedule="s1", gate_noise=0.0, bucket_slack=100.0), MESH)

    def forward(params):
        return jax.vjp(lambda p: loss(p, *arguments[1:])[0], params)

    found = collections.Counter()
    for equation in equations(jax.make_jaxpr(forward)(arguments[0]).jaxpr):
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
    for equation in equations(jax.make_jaxpr(loss)(*arguments).jaxpr):
        sizes = [v.aval.size for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "size")]
        if max(sizes, default=0) == TOKENS * DIM:
            found[equation.primitive.name] += 1
    names = {name: number for name, number in found.items() if "gather" in name or "scatter" in name or "psum" in name}
    reduced = {name for name in names if "psum" in name or name == "reduce_scatter"}
    assert reduced == {"reduce_scatter"} and names["reduce_scatter"] == 1, names
    assert sum(n for name, n in names.items() if name.startswith("all_gather")) == 1 + gathers, names


def test_a_length_that_the_group_does_not_divide_is_one_line():
    config = model_config("float32", sequence_parallel=True)
    message = (
        r"^ModelConfig.sequence_parallel splits the tokens over MeshConfig.model \(4\) devices, which must divide "
        r"DataConfig.sequence_length \(6\); make it a multiple of 4, or set ModelConfig.sequence_parallel = False$"
    )
    with pytest.raises(UserError, match=message):
        traced(config, moe_config(), MESH, length=6)
    whole = dataclasses.replace(config, sequence_parallel=False)
    assert traced(whole, moe_config(), MESH, length=6), "the batch makes up for it"


def test_without_an_mp_group_nothing_changes():
    mesh = {"expert": 8}
    texts = []
    for split in (False, True):
        loss, arguments = traced(model_config("float32", sequence_parallel=split), moe_config(gate_noise=0.0), mesh)
        texts.append(str(jax.make_jaxpr(loss)(*arguments)))
    assert texts[0] == texts[1]
