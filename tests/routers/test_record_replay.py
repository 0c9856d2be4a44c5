"""Choices recorded on one mesh and replayed on another: every token's experts of then, whatever the gate says now."""

import jax
import numpy as np
import pytest
from support.equality_cases import BATCH, EXPERTS, LENGTH, VOCAB, data, model_config, moe_config

from moe_jax.errors import UserError
from moe_jax.models import LanguageModel, make_loss
from moe_jax.models.language_model import by_token
from moe_jax.moe.routing import even_tables
from moe_jax.parallel.mesh import MeshConfig, build_mesh

KEY = jax.random.key(11)


def runner(moe, mesh, **model_changes):
    """Return run(change, choices) -> (loss, statistics, gradients) of one microbatch on a mesh, compiled once.

    `change` is added to the gates' weights; choices are those of `Batch.choices`.
    """
    devices = int(np.prod([mesh.get(name, 1) for name in ("data", "expert", "expert_shard")]))
    roles = build_mesh(MeshConfig(**mesh), jax.devices()[:devices])
    model = LanguageModel(config=model_config(**model_changes), moe=moe, vocab_size=VOCAB, roles=roles)
    layout, batch = model.layout(), data("float64", True)
    tables = {"segment_0": even_tables(2, EXPERTS, roles.size(roles.expert))}
    step = jax.jit(jax.value_and_grad(make_loss(model, layout, BATCH, LENGTH), has_aux=True))

    def run(change=0.0, choices=None):
        params = model.init(jax.random.key(7))
        gate = params["dense"]["units"]["segment_0"]["gate"]
        gate["w_gate"] = gate["w_gate"] + change * jax.random.normal(jax.random.key(8), gate["w_gate"].shape)
        named = lambda spec: jax.sharding.NamedSharding(roles.mesh, spec)  # noqa: E731
        params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, named(spec)), params, layout.params)
        given = type(batch)(batch.inputs, batch.targets, batch.weights, choices)
        (loss, stats), grads = step(params, given, tables, KEY, np.int32(0), np.sum(batch.weights))
        return float(loss), stats, jax.device_get(grads["dense"])

    return run


def test_recorded_choices_are_replayed_on_another_mesh():
    with jax.enable_x64(True):
        moe = moe_config(router="sigmoid_bias", record_choices=True, schedule="deepspeed")
        loss, stats, grads = runner(moe, {"data": 2, "expert": 2, "model": 2})()
        choices = np.asarray(stats.choices)
        assert choices.shape == (2, BATCH * LENGTH, 2) and choices.dtype == np.int32
        counts = [np.bincount(layer.ravel(), minlength=EXPERTS) for layer in choices]
        np.testing.assert_array_equal(counts, np.sum(stats.loads, axis=1))
        split = moe_config(router="sigmoid_bias", record_choices=True, schedule="s1")
        run, replay = runner(split, {"expert": 4, "model": 2}), np.asarray(by_token(choices, BATCH))
        again, replayed, same_grads = run(choices=replay)
        assert abs(again - loss) <= 1e-12 * loss
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), grads, same_grads)
        other, moved, _ = run(3.0, replay)
        for found in (replayed, moved):
            np.testing.assert_array_equal(found.choices, choices)
            np.testing.assert_array_equal(np.sum(found.loads, axis=1), counts)
        assert abs(other - loss) > 1e-6, "weights are of the gate as it is now"


def test_what_cannot_be_replayed_is_one_line():
    with pytest.raises(UserError, match=r"record_choices \(True\) needs a router whose choices can be replayed"):
        moe_config(router="gshard", record_choices=True)
    choices = np.zeros((BATCH, LENGTH, 2, 2), np.int32)
    with jax.enable_x64(True):
        with pytest.raises(UserError, match=r"cannot be replayed by MoEConfig.router = 'gshard'"):
            runner(moe_config(router="gshard"), {"expert": 2})(choices=choices)
        with pytest.raises(UserError, match=r"cannot be replayed with ModelConfig.prefetch = 'hecate'"):
            runner(moe_config(schedule="s1"), {"expert": 2}, prefetch="hecate")(choices=choices)
