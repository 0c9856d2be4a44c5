"""Small models under placements and block-wise schedules, next to the one-device reference.

Sizes: L MoE layers, E = 8 experts, 8 sequences of 8 tokens, up to 2 replicas a device and layer.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.equality_cases import (
    BATCH,
    EXPERTS,
    KEY,
    LENGTH,
    NOISE,
    VOCAB,
    assert_close,
    data,
    on_mesh,
    reference_gradients,
    what,
)
from support.placements import random_placement, to_bank
from support.program_order import overtaking

from moe_jax.models import LanguageModel, ModelConfig, make_loss
from moe_jax.moe import MoEConfig
from moe_jax.moe.routers.scores import gate_noise
from moe_jax.parallel.mesh import MeshConfig, build_mesh
from moe_jax.planning.plan_shape import build_shape, fill_tables, grow

SLOTS = 2
COMPILED = "/jax/core/compile/backend_compile_duration"
ROUTINGS = ("general", "one_hot", "zero")


def model_config(**changes):
    sizes = {"layers": 3, "model_dim": 8, "heads": 2, "hidden_dim": 12, "loss_chunk": 8, "max_length": LENGTH}
    return ModelConfig(dtype="float64", **{**sizes, **changes})


def moe_config(schedule):
    return MoEConfig(num_experts=EXPERTS, top_k=2, gate_noise=NOISE, schedule=schedule, gather="saa")


def placements_of(by_node, layers, devices, number=2, rules="every", **drawn):
    """Return some placements and one shape for all; drawn: as `random_placement` takes it."""
    sizes = {"layers": layers, "experts": EXPERTS, "devices": devices, "per_node": max(1, devices // 2)}
    drawn = {"replica_slots": SLOTS, "fewest": 1 if rules == "every" else 0, **drawn}
    found = [random_placement(seed, **sizes, rules=rules, **drawn) for seed in range(number)]
    shape = build_shape(found[0], by_node=by_node)
    for placement in found[1:]:
        shape = grow(shape, placement)
    return found, shape


@functools.cache
def reference_params(config, routing="general"):
    roles = build_mesh(MeshConfig(), jax.devices()[:1])
    params = LanguageModel(config=config, moe=moe_config("s1"), vocab_size=VOCAB, roles=roles).init(jax.random.key(7))
    gate = params["dense"]["units"]["segment_0"]["gate"]
    gate["norm"]["bias"] = jnp.ones_like(gate["norm"]["bias"])  # so that first choices crowd
    if routing == "one_hot":  # every first choice is expert 3
        gate["w_gate"] = gate["w_gate"].at[:, :, 3].add(5.0)
    elif routing == "zero":  # nobody chooses experts 0 to 3
        gate["w_gate"] = gate["w_gate"].at[:, :, :4].add(-5.0)
    experts = jax.tree.map(lambda leaf: leaf.reshape(config.moe_layers, EXPERTS, *leaf.shape[1:]), params["bank"])
    return {"dense": params["dense"], "experts": experts}


@functools.cache
def reference(config, routing="general"):
    """Return (loss, gradients) of the one-device model."""
    config, moe = what(config, moe_config("s1"))
    ids = jnp.arange(BATCH * LENGTH, dtype=jnp.int32)
    noise = [gate_noise(jax.random.fold_in(KEY, i), ids, EXPERTS, jnp.float64) for i in range(config.moe_layers)]
    (loss, _), grads = reference_gradients(
        reference_params(config, routing), data("float64", False), noise, config=config, moe=moe
    )
    return float(loss), jax.tree.map(np.asarray, grads)


def gradient_step(config, schedule, mesh, shape, zero=1, shares=None, routing="general"):
    """Return (jitted step, arguments(placement, routing))."""
    number = mesh["expert"] * mesh.get("expert_shard", 1) * mesh.get("data", 1)
    roles = build_mesh(MeshConfig(**mesh), jax.devices()[:number])
    model = LanguageModel(config=config, moe=moe_config(schedule), vocab_size=VOCAB, roles=roles, zero_stage=zero)
    layout = model.layout()
    plan = {"segment_0": dataclasses.replace(shape, **(shares or {}))}
    loss = make_loss(model, layout, BATCH, LENGTH, plan=plan)
    by_expert, whole = NamedSharding(roles.mesh, P(roles.expert)), NamedSharding(roles.mesh, P())
    rest = jax.device_put((data("float64", False), KEY, np.int32(0), np.float64(BATCH * LENGTH)), whole)

    def arguments(placement, routing=routing):
        params = reference_params(what(config, moe_config(schedule))[0], routing)
        params = {"dense": params["dense"], "bank": to_bank(params["experts"], placement, shape.bank_rows)}
        tables = jax.device_put({"segment_0": fill_tables(shape, placement)}, by_expert)
        return on_mesh(params, layout.params, roles), rest[0], tables, *rest[1:]

    return jax.jit(jax.value_and_grad(loss, has_aux=True)), arguments


def runner(config, schedule, mesh, shape, **how):
    """Return run(placement, routing) -> (loss, gradients, stats), compiled once, at the first call.

    No collective of the program may run next to a branch that holds others, such as the rounds of one layer's transfer.
    """
    step, arguments = gradient_step(config, schedule, mesh, shape, **how)
    compiled = []

    def run(placement, *routing):
        given = arguments(placement, *routing)
        if not compiled:
            compiled.append(step.lower(*given).compile())
            # remat may take a branch again at any time
            if config.is_block_wise or config.remat == "none":
                assert not overtaking(compiled[0].as_text())
        (value, stats), grads = compiled[0](*given)
        return float(value), grads, stats

    return run


def assert_equals_reference(case, got, want, placement, rows):
    """Compare loss and every gradient, 1e-10 of each leaf's largest entry; rows: of the bank on a device."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-10, err_msg=str(case))
    bank = to_bank(want[1]["experts"], placement, rows)
    assert_close(got[1], {"dense": want[1]["dense"], "bank": bank}, case=case)


def check(
    *, prefetch, schedule="deepspeed", mesh=None, by_node=False, rows=None, zero=1, shares=None, routing="general",
    late=None, **changes,
):  # fmt: skip
    """Compare loss and every gradient of two placements with the reference; returns the most passes."""
    config = model_config(prefetch=prefetch, **changes)
    mesh = mesh or {"expert": 8}
    placements, shape = placements_of(by_node, config.moe_layers, mesh["expert"])
    shape = dataclasses.replace(shape, bucket_rows=rows, **(late(shape) if late else {}))
    passes = 1
    with jax.enable_x64(True):
        want = reference(config, routing)
        run = runner(config, schedule, mesh, shape, zero=zero, shares=shares, routing=routing)
        for placement in placements:
            got = run(placement)
            assert_equals_reference(routing, got, want, placement, shape.bank_rows)
            passes = max(passes, int(np.asarray(got[2].passes).max()))
    return passes


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
