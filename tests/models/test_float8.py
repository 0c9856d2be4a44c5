"""A model in float8, in two halves and whole: the same loss and gradients."""

import dataclasses

import jax
import numpy as np
import pytest
from support import prefetch_cases
from support.prefetch_cases import BATCH, EXPERTS, LENGTH, VOCAB, batch, model_config, moe_config, placements_of, runner

from moe_jax.models import LanguageModel, make_loss
from moe_jax.moe import MoEConfig
from moe_jax.moe.routing import even_tables
from moe_jax.parallel.mesh import MeshConfig, build_mesh

E4M3 = "float8_e4m3"


@pytest.mark.slow
def test_halves_equal_the_whole(monkeypatch):
    in_float8 = lambda name: dataclasses.replace(moe_config(name), dispatch_dtype=E4M3, expert_dtype=E4M3)  # noqa: E731
    config = model_config(layers=1)
    placements, shape = placements_of(False, config.moe_layers, 2, number=1)
    monkeypatch.setattr(prefetch_cases, "moe_config", in_float8)
    with jax.enable_x64(True):
        whole, halves = (
            runner(dataclasses.replace(config, overlap=overlap), "s1", {"expert": 2}, shape)(placements[0])
            for overlap in ("none", "halves")
        )
    for got, want in zip(jax.tree.leaves(halves[:2]), jax.tree.leaves(whole[:2]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-10 * max(1.0, np.abs(want).max()))


def test_halves_send_what_the_whole_sends():
    """One layer on two devices, even buckets for any routing, so that there are no later passes to compile."""
    roles = build_mesh(MeshConfig(expert=2), jax.devices()[:2])
    moe = MoEConfig(num_experts=EXPERTS, top_k=2, schedule="s1", bucket_slack=2.0, dispatch_dtype=E4M3)
    params, found = None, []
    with jax.enable_x64(True):
        for overlap in ("none", "halves"):
            config = model_config(layers=1, overlap=overlap)
            model = LanguageModel(config=config, moe=moe, vocab_size=VOCAB, roles=roles)
            layout = model.layout()
            if params is None:
                shardings = jax.tree.map(lambda spec: roles.sharding(*spec), layout.params)
                params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(7))
            tables = {"segment_0": even_tables(1, EXPERTS, 2)}
            rest = tables, jax.random.key(11), np.int32(0), np.float64(BATCH * LENGTH)
            step = jax.jit(jax.value_and_grad(make_loss(model, layout, BATCH, LENGTH), has_aux=True))
            lowered = step.lower(params, batch(), *rest)
            assert "f8E4M3FN" in lowered.as_text()
            (value, _), grads = lowered.compile()(params, batch(), *rest)
            found.append(jax.tree.map(np.asarray, (value, grads)))
    for got, want in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-10 * max(1.0, np.abs(want).max()))
