"""A student beside a frozen teacher on one mesh: the divergence against whole logits, and whom its gradient reaches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.equality_cases import BATCH, LENGTH, VOCAB, data, model_config, moe_config
from support.placements import to_bank

from moe_jax.dispatch import even_tables
from moe_jax.errors import UserError
from moe_jax.mesh import MeshConfig, build_mesh
from moe_jax.models import LanguageModel, make_loss
from moe_jax.models.distillation import Teacher
from moe_jax.models.reference import reference_log_probs
from moe_jax.placement import Placement

ALPHA = 0.7
STUDENT = {"layers": 2, "max_length": LENGTH}
TEACHER = {"layers": 3, "model_dim": 24, "hidden_dim": 16, "positions": "rotary", "loss_chunk": 7}


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def drawn(seed, config, moe):
    """Return parameters {'dense', 'experts'} away from their neutral start."""
    roles = build_mesh(MeshConfig(), jax.devices()[:1])
    model = LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles)

    @jax.jit
    def draw(key):
        leaves, tree = jax.tree.flatten(model.init(key))
        keys = jax.random.split(key, len(leaves))
        noisy = [a + 0.1 * jax.random.normal(k, a.shape, a.dtype) for a, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, noisy)

    params, shape = draw(jax.random.key(seed)), (config.moe_layers, moe.num_experts)
    return {
        "dense": params["dense"],
        "experts": {n: v.reshape(*shape, *v.shape[1:]) for n, v in params["bank"].items()},
    }


def stored(params, config, moe, roles):
    """Return the same parameters with their experts in a bank of even homes."""
    even = Placement.even(config.moe_layers, moe.num_experts, roles.size(roles.expert))
    return {"dense": params["dense"], "bank": to_bank(params["experts"], even)}


def build(mesh, student, teacher, alpha, zero=1, teacher_zero=1):
    """Return (loss(params, teacher_params) -> (loss, stats), plain loss(params), roles) of two (config, moe)."""
    count = int(np.prod([size for name, size in mesh.items() if name != "model"]))
    roles = build_mesh(MeshConfig(**mesh), jax.devices()[:count])
    model, taught = (
        LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles, zero_stage=stage)
        for (config, moe), stage in ((student, zero), (teacher, teacher_zero))
    )
    batch = data(model.config.dtype, weighted=True)
    tables = even_tables(model.config.moe_layers, model.moe.num_experts, roles.size(roles.expert))
    rest = batch, tables, jax.random.key(11), np.int32(0), np.sum(batch.weights)
    kind = Teacher(model=taught, layout=taught.layout(), alpha=alpha)
    with_teacher = make_loss(model, model.layout(), BATCH, LENGTH, teacher=kind)
    plain = make_loss(model, model.layout(), BATCH, LENGTH)
    return lambda params, frozen: with_teacher(params, *rest, frozen), lambda params: plain(params, *rest), roles


def oracle(params, frozen, student, teacher):
    """Return (loss, KL) by whole log probabilities on one device."""
    batch = data(student[0].dtype, weighted=True)
    log_probs, gate_loss, _ = reference_log_probs(params, batch.inputs, *student)
    taught, _, _ = reference_log_probs(frozen, batch.inputs, *teacher)
    kl = jnp.sum(jnp.sum(jnp.exp(taught) * (taught - log_probs), -1) * batch.weights) / np.sum(batch.weights)
    picked = jnp.take_along_axis(log_probs, batch.targets[..., None], -1)[..., 0]
    return gate_loss - jnp.sum(picked * batch.weights) / np.sum(batch.weights) + ALPHA * kl, kl


def assert_close(got, want, tolerance=1e-10):
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(a)) + 1e-30, jax.tree_util.keystr(path)


MESHES = {
    "one device": ({}, {}, {}, 1, 1),
    "data, expert and model parallel, tokens split": (
        {"data": 2, "expert": 4, "model": 2}, {"sequence_parallel": True}, {"schedule": "s1"}, 1, 3,
    ),
    "a student in halves": ({"expert": 4}, {"overlap": "halves"}, {}, 1, 1),
    "experts split, dense parameters too": ({"data": 2, "expert": 2, "expert_shard": 2}, {}, {}, 3, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        name if "tokens split" in name or "halves" in name else pytest.param(name, marks=pytest.mark.slow)
        for name in MESHES
    ],
)
def test_loss_and_every_gradient_equal_whole_logits(case):
    mesh, config, moe, zero, teacher_zero = MESHES[case]
    student = model_config(**STUDENT, **config), moe_config(gate_noise=0.0, **moe)
    # its gate noise is for its own training: a teacher draws none
    teacher = model_config(**TEACHER), moe_config(num_experts=4, top_k=1, gate_noise=0.5)
    params, frozen = drawn(1, *student), drawn(5, *teacher)
    loss, _, roles = build(mesh, student, teacher, ALPHA, zero, teacher_zero)
    both = stored(params, *student, roles), stored(frozen, *teacher, roles)
    (got, stats), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*both)
    (want, kl), want_grads = jax.jit(jax.value_and_grad(oracle, has_aux=True), static_argnums=(2, 3))(
        params, frozen, student, teacher
    )
    assert float(kl) > 0.1
    np.testing.assert_allclose([float(got), float(stats.kl)], [float(want), float(kl)], rtol=1e-10)
    assert_close(grads[0], stored(want_grads, *student, roles))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads[1])), "a gradient reaches the teacher"


def test_tokens_of_halves_that_are_split_too_are_not_those_of_a_teacher():
    student = model_config(**STUDENT, overlap="halves", sequence_parallel=True), moe_config(schedule="s1")
    with pytest.raises(UserError, match=r"orders tokens as the teacher does not; set ModelConfig.overlap = 'none'"):
        build({"expert": 2, "model": 2}, student, (model_config(**TEACHER), moe_config(num_experts=4)), ALPHA)


@pytest.mark.slow
def test_alpha_zero_is_training_without_a_teacher():
    mesh = {"data": 2, "expert": 2}
    student = model_config(**STUDENT), moe_config()
    teacher = model_config(**TEACHER), moe_config(num_experts=4, top_k=1)
    loss, plain, roles = build(mesh, student, teacher, 0.0)
    params, frozen = stored(drawn(1, *student), *student, roles), stored(drawn(5, *teacher), *teacher, roles)
    (got, stats), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, frozen)
    (want, plain_stats), want_grads = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    assert float(stats.kl) > 0.1 and plain_stats.kl is None
    np.testing.assert_allclose(float(got), float(want), rtol=1e-12)
    assert_close(grads, want_grads, 1e-12)


@pytest.mark.slow
def test_the_student_as_its_own_teacher_adds_nothing():
    student = model_config(**STUDENT), moe_config(gate_noise=0.0)
    loss, plain, roles = build({"expert": 2}, student, student, 100.0)
    params = stored(drawn(1, *student), *student, roles)
    (got, stats), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, params)
    (want, _), want_grads = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    assert abs(float(stats.kl)) < 1e-15
    np.testing.assert_allclose(float(got), float(want), rtol=1e-12)
    assert_close(grads, want_grads)


def test_bfloat16_student_and_teacher_have_a_divergence_near_the_exact_one():
    kl = {}
    for dtype in ("float64", "bfloat16"):
        student, teacher = (
            (model_config(dtype, **sizes), moe_config(gate_noise=0.0, num_experts=4)) for sizes in (STUDENT, TEACHER)
        )
        loss, _, roles = build({"data": 2}, student, teacher, ALPHA)
        cast = lambda tree, config: jax.tree.map(lambda a: a.astype(config.param_dtype), tree)  # noqa: E731
        exact = [
            drawn(seed, dataclasses.replace(c, dtype="float64"), m) for seed, (c, m) in ((1, student), (5, teacher))
        ]
        both = [cast(stored(p, c, m, roles), c) for p, (c, m) in zip(exact, (student, teacher), strict=True)]
        kl[dtype] = float(jax.jit(loss)(*both)[1].kl)
    assert kl["bfloat16"] == pytest.approx(kl["float64"], rel=0.05) and kl["float64"] > 0.1
