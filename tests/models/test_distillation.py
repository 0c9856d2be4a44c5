"""A student and a frozen teacher on one mesh: the divergence against whole logits, and whom its gradient reaches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.equality_cases import (
    BATCH,
    LENGTH,
    VOCAB,
    assert_close,
    banks,
    data,
    model_config,
    moe_config,
    reference_params,
)
from support.marks import slow_but
from support.program_order import overtaking
from support.reference_model import reference_logits

from moe_jax.errors import UserError
from moe_jax.models import LanguageModel, make_loss
from moe_jax.models.config import expert_counts
from moe_jax.parallel.mesh import MeshConfig, build_mesh

ALPHA = 0.7
STUDENT = {"layers": 2, "max_length": LENGTH}
TEACHER = {"layers": 3, "model_dim": 24, "hidden_dim": 16, "positions": "rotary", "loss_chunk": 7}


def taught_loss(params, frozen, batch, student, teacher, alpha):
    """Return (loss, KL) of two models, each given as (ModelConfig, MoEConfig), by whole log probabilities."""
    logits, gate_loss, _ = reference_logits(params, batch.inputs, *student)
    taught, _, _ = reference_logits(frozen, batch.inputs, *teacher)
    log_probs, taught = jax.nn.log_softmax(logits, -1), jax.nn.log_softmax(taught, -1)
    kl = jnp.sum(jnp.sum(jnp.exp(taught) * (taught - log_probs), -1) * batch.weights) / jnp.sum(batch.weights)
    picked = jnp.take_along_axis(log_probs, batch.targets[..., None], -1)[..., 0]
    return gate_loss - jnp.sum(picked * batch.weights) / jnp.sum(batch.weights) + alpha * kl, kl


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def stored(params, config, moe, roles):
    """Return the same parameters with their experts in a bank of even homes."""
    model = LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles)
    return {"dense": params["dense"], "bank": banks(model, params["experts"])}


def build(mesh, student, teacher, alpha, zero=1, teacher_zero=1):
    """Return (loss(params, teacher_params) -> (loss, stats), roles) of two (config, moe)."""
    count = int(np.prod([size for name, size in mesh.items() if name != "model"]))
    sizes = MeshConfig(**mesh)
    experts = [number for pair in (student, teacher) for number in expert_counts(*pair)]
    roles = build_mesh(sizes, jax.devices()[:count], experts)
    model, taught = (
        LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles, zero_stage=stage)
        for (config, moe), stage in ((student, zero), (teacher, teacher_zero))
    )
    batch = data(model.config.dtype, weighted=True)
    rest = batch, model.even_tables(), jax.random.key(11), np.int32(0), np.sum(batch.weights)
    taught = dataclasses.replace(taught, alpha=alpha)
    loss = make_loss(model, model.layout(), BATCH, LENGTH, teacher=taught)
    return lambda params, frozen: loss(params, *rest, frozen), roles


MESHES = {
    "one device": ({}, {}, {}, 1, 1),
    "data, expert and model parallel, tokens split": (
        {"data": 2, "expert": 4, "model": 2}, {"sequence_parallel": True}, {"schedule": "s1"}, 1, 3,
    ),
    "a student in halves": ({"expert": 4}, {"overlap": "halves"}, {}, 1, 1),
    "experts split, dense parameters too": ({"data": 2, "expert": 2, "expert_shard": 2}, {}, {}, 3, 1),
    "segments of both in groups of 2, 4 and 8": (
        {"expert": 8, "model": 2}, {"segments": ("layers=1 num_experts=8", "layers=1 num_experts=4")}, {}, 1, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(MESHES, "data, expert and model parallel, tokens split"))
def test_loss_and_every_gradient_equal_whole_logits(case):
    mesh, config, moe, zero, teacher_zero = MESHES[case]
    student = model_config(**STUDENT, **config), moe_config(gate_noise=0.0, **moe)
    # its gate noise is for its own training: a teacher draws none
    parts = ("layers=1 num_experts=2", "layers=2 num_experts=8 hidden_dim=20") if "segments" in case else ()
    teacher = model_config(**TEACHER, segments=parts), moe_config(num_experts=4, top_k=1, gate_noise=0.5)
    params, frozen = reference_params(*student), reference_params(*teacher)
    loss, roles = build(mesh, student, teacher, ALPHA, zero, teacher_zero)
    both = stored(params, *student, roles), stored(frozen, *teacher, roles)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*both).compile()
    assert not overtaking(step.as_text()), "a collective may run next to a loop or branch that holds others"
    (got, stats), grads = step(*both)
    (want, kl), want_grads = jax.jit(jax.value_and_grad(taught_loss, has_aux=True), static_argnums=(3, 4, 5))(
        params, frozen, data("float64", weighted=True), student, teacher, ALPHA
    )
    assert float(kl) > 0.03
    np.testing.assert_allclose([float(got), float(stats.kl)], [float(want), float(kl)], rtol=1e-10)
    assert_close(grads[0], stored(want_grads, *student, roles))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads[1])), "a gradient reaches the teacher"


def test_tokens_of_halves_that_are_split_too_are_not_those_of_a_teacher():
    student = model_config(**STUDENT, overlap="halves", sequence_parallel=True), moe_config(schedule="s1")
    with pytest.raises(UserError, match=r"orders tokens as the teacher does not; set ModelConfig.overlap = 'none'"):
        build({"expert": 2, "model": 2}, student, (model_config(**TEACHER), moe_config(num_experts=4)), ALPHA)
