"""The model under a placement beside the one-device reference: sizes, parameters, a step, and the comparison."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.placements import random_placement, to_bank
from support.program_order import overtaking

from moe_jax.models import Batch, LanguageModel, ModelConfig, make_loss
from moe_jax.models.reference import reference_loss
from moe_jax.moe import MoEConfig
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.plan_shape import fill_tables

EXPERTS, BATCH, LENGTH, VOCAB, LAYERS, SLOTS = 8, 8, 8, 31, 2, 3
COMPILED = "/jax/core/compile/backend_compile_duration"
ROUTINGS = ("general", "one_hot", "zero")


def draw_placement(seed, devices, replica_slots=SLOTS):
    """Some replicas, and in each layer a random rule."""
    sizes = {"layers": LAYERS, "experts": EXPERTS, "devices": devices, "per_node": max(1, devices // 2)}
    return random_placement(seed, **sizes, replica_slots=replica_slots, rules="any")


def moe_config(**changes):
    return MoEConfig(**{"num_experts": EXPERTS, "top_k": 2, **changes})


CONFIG = ModelConfig(
    dtype="float64", layers=LAYERS, model_dim=8, heads=2, hidden_dim=12, loss_chunk=8, max_length=LENGTH
)


# (method, mesh, schedule, rows of a bucket: 0 by the slack, else so few that it overflows)
@functools.cache
def reference_params(routing):
    roles = build_mesh(MeshConfig(), jax.devices()[:1])
    params = LanguageModel(config=CONFIG, moe=moe_config(), vocab_size=VOCAB, roles=roles).init(jax.random.key(7))
    gate = params["dense"]["units"]["segment_0"]["gate"]
    gate["norm"]["bias"] = jnp.ones_like(gate["norm"]["bias"])
    if routing == "one_hot":
        gate["w_gate"] = gate["w_gate"].at[:, :, 3].add(5.0)
    elif routing == "zero":
        gate["w_gate"] = gate["w_gate"].at[:, :, :4].add(-5.0)
    experts = jax.tree.map(lambda leaf: leaf.reshape(LAYERS, EXPERTS, *leaf.shape[1:]), params["bank"])
    return {"dense": params["dense"], "experts": experts}


@functools.cache
def data():
    tokens = np.random.default_rng(3).integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], np.ones((BATCH, LENGTH)))


@functools.cache
def reference_step():
    def oracle(params):
        batch = data()
        return reference_loss(params, batch.inputs, batch.targets, batch.weights, CONFIG, moe_config())

    return jax.jit(jax.value_and_grad(oracle, has_aux=True))


@functools.cache
def reference(routing):
    """Return (loss, gradients) of the one-device model."""
    (loss, _), grads = reference_step()(reference_params(routing))
    return float(loss), jax.tree.map(np.asarray, grads)


@contextlib.contextmanager
def counted_compilations():  # the listener list is private; only tests take theirs away
    events = []

    def listen(event, duration, **_):
        if event == COMPILED:
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax._src.monitoring.unregister_event_duration_listener(listen)


def runner(shape, mesh, schedule):
    """Return run(placement, routing) -> (loss, gradients, stats), compiled once, at the first call.

    No collective of the program may run beside a branch that holds others, such as the rounds of one layer's transfer.
    """
    roles = build_mesh(MeshConfig(**mesh), jax.devices())
    model = LanguageModel(config=CONFIG, moe=moe_config(schedule=schedule), vocab_size=VOCAB, roles=roles)
    layout = model.layout()
    loss = make_loss(model, layout, BATCH, LENGTH, plan={"segment_0": shape})
    by_expert, whole = NamedSharding(roles.mesh, P(roles.expert)), NamedSharding(roles.mesh, P())
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    rest = jax.device_put((data(), jax.random.key(1), np.int32(0), np.float64(BATCH * LENGTH)), whole)
    compiled = []

    def run(placement, routing):
        params = reference_params(routing)
        params = {"dense": params["dense"], "bank": to_bank(params["experts"], placement, shape.bank_rows)}
        params = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(roles.mesh, s)), params, layout.params)
        tables = jax.device_put({"segment_0": fill_tables(shape, placement)}, by_expert)
        arguments = (params, rest[0], tables, *rest[1:])
        if not compiled:
            compiled.append(step.lower(*arguments).compile())
            if shape.late is None or schedule != "s2":  # whose branch of late replicas does not wait
                assert not overtaking(compiled[0].as_text())
        (value, stats), grads = compiled[0](*arguments)
        return float(value), grads, stats

    return run


def assert_equals_reference(case, got, want, placement, rows):
    loss, grads, _ = got
    want_loss, want_grads = want
    np.testing.assert_allclose(loss, want_loss, rtol=1e-10, err_msg=case)
    want_flat = {"dense": want_grads["dense"], "bank": to_bank(want_grads["experts"], placement, rows)}
    for (path, a), b in zip(jax.tree.leaves_with_path(want_flat), jax.tree.leaves(grads), strict=True):
        difference = np.max(np.abs(np.asarray(a) - np.asarray(b)))
        assert difference <= 1e-10 * np.max(np.abs(a)) + 1e-30, (case, jax.tree_util.keystr(path), difference)
