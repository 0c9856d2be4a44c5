"""Documents packed into one sequence are as if each had a sequence of its own: logits, loss and every gradient.

The oracle knows no masks: it is the one-device reference on each document alone, filled up behind its end, which a
causal model cannot see. float64, 1e-10 of the largest entry. Few models, that together meet every way to run layers:
scanned and written out, segments, block-wise schedules, model-parallel groups whole and split over tokens, ZeRO-3.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.document_cases import alone, make_mesh_logits, packed_batch
from support.equality_cases import assert_close, banks, build, model_config, moe_config, placed, reference_params
from support.marks import slow_but
from support.reference_model import reference_logits

from moe_jax.models import make_loss

LATENT = {"positions": "rotary", "head_dim": 6, "kv_lora_rank": 4, "qk_rope_head_dim": 2}
# schedule, mesh, ZeRO stage, model
CASES = {
    "one_device": ("deepspeed", {}, 1, {"remat": "dots"}),
    "split_zero3_pairs": (
        "s1",
        {"expert": 4, "expert_shard": 2, "model": 2},
        3,
        {"moe_every": 2, "sequence_parallel": True, "kv_heads": 2},
    ),
    "hecate_rotary_written_out": (
        "s1",
        {"expert": 4, "expert_shard": 2, "model": 4},
        1,
        {"prefetch": "hecate", "remat": "block", "positions": "rotary", "stack": "unrolled"},
    ),
    "halves_split": (
        "s1",
        {"expert": 4, "model": 2},
        1,
        {"overlap": "halves", "sequence_parallel": True, **LATENT},
    ),
    "segments_halves": (
        "deepspeed",
        {"expert": 4},
        1,
        {"overlap": "halves", "segments": ("layers=1 moe_every=0", "layers=2"), "layers": 3, "remat": "block"},
    ),
    "bert_data2": ("deepspeed", {"data": 2, "expert": 2}, 3, {"kind": "bert", "remat": "block"}),
}  # fmt: skip


def of_case(name):
    schedule, mesh, zero, changes = CASES[name]
    config = model_config(document_mask=True, **{"overlap": "none", "attention": "blocks", **changes})
    moe = moe_config(num_experts=4, schedule=schedule, gate_noise=0.0, aux_loss_weight=0.0, z_loss_weight=0.0)
    return config, moe, build(config, moe, mesh, zero_stage=zero)


@pytest.mark.parametrize("name", slow_but(CASES, "segments_halves"))
def test_packed_documents_equal_documents_alone(name):
    with jax.enable_x64(True):
        config, moe, model = of_case(name)
        params, packed = reference_params(config, moe), packed_batch()
        if config.kind == "gpt":
            batch, places = alone(packed)
        else:  # what fills a row up is seen by its document: here the oracle has a mask, which a test below proves
            batch, places = packed, [(row, 0, 8) for row in range(8)]
        plain = dataclasses.replace(config, document_mask=False)

        def oracle(params):
            logits, *_ = reference_logits(params, batch.inputs, plain, moe, documents=batch.documents)
            log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits, -1), batch.targets[..., None], -1)[..., 0]
            return -jnp.sum(log_probs * batch.weights) / jnp.sum(batch.weights), logits

        (want, want_logits), want_grads = jax.jit(jax.value_and_grad(oracle, has_aux=True))(params)
        layout = model.layout()
        on_mesh = placed(model, layout, params)
        loss = jax.jit(jax.value_and_grad(make_loss(model, layout, 8, 8), has_aux=True))
        total = np.sum(packed.weights)
        (got, _), grads = loss(on_mesh, packed, model.even_tables(), jax.random.key(0), np.int32(0), total)
        np.testing.assert_allclose(float(got), float(want), rtol=1e-10)
        assert_close(grads, {"dense": want_grads["dense"], "bank": banks(model, want_grads["experts"])})
        logits = make_mesh_logits(model, layout)(on_mesh, packed)
        for own, (row, first, last) in zip(np.asarray(want_logits), places, strict=True):
            assert_close(logits[row, first:last], own[: last - first], case=(row, first, last))


def test_the_masked_reference_is_each_document_alone():
    """Of a model that sees both ways, with no rows filled up."""
    packed = packed_batch()
    with jax.enable_x64(True):
        config, moe = model_config(kind="bert", layers=1), moe_config(num_experts=4, gate_noise=0.0)
        params = reference_params(config, moe)
        run = jax.jit(lambda inputs, documents: reference_logits(params, inputs, config, moe, documents=documents)[0])
        got = run(packed.inputs, packed.documents)
        for row, first, last in ((0, 0, 3), (0, 3, 6), (7, 0, 7)):
            want = run(packed.inputs[row : row + 1, first:last], None)
            assert_close(got[row, first:last], want[0], case=(row, first, last))


def test_a_bfloat16_model_keeps_documents_apart():
    """What precedes a document changes none of its logits' bits: a masked weight is 0, not a small number."""
    config = model_config(document_mask=True, overlap="none", attention="blocks", dtype="bfloat16", layers=1)
    moe = moe_config(num_experts=2, gate_noise=0.0)
    model = build(config, moe, {"expert": 2})
    params, packed = reference_params(config, moe), packed_batch()
    layout = model.layout()
    on_mesh = placed(model, layout, params)
    other = packed.inputs.copy()
    other[0, :2] = (other[0, :2] + 1) % 30  # the first document of row 0, but for its end
    batches = [packed, dataclasses.replace(packed, inputs=other)]
    logits = make_mesh_logits(model, layout)
    before, after = (np.asarray(logits(on_mesh, batch), np.float32)[0] for batch in batches)
    assert np.max(np.abs(before[:2] - after[:2])) > 0
    np.testing.assert_array_equal(before[3:], after[3:])
