"""Which attention a model computes, and that each of ours is the plain formula."""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.cluster.targets import parse_target
from moe_jax.errors import UserError
from moe_jax.models import ModelConfig, attention
from moe_jax.models.attention import attend, resolve_attention

NARROW = ModelConfig(dtype="bfloat16", model_dim=128, heads=2)
LATENT = dataclasses.replace(NARROW, positions="rotary", kv_lora_rank=32, qk_rope_head_dim=16)


def gpu(capability="9.0", platform="gpu"):
    return types.SimpleNamespace(platform=platform, compute_capability=capability, device_kind="NVIDIA X")


def test_auto_is_the_default_and_blocks_on_the_cpu(caplog):
    assert ModelConfig().attention == "auto"
    with caplog.at_level(logging.WARNING):
        for config in (ModelConfig(), NARROW):
            resolved = resolve_attention(config, jax.devices()[0])
            assert resolved == dataclasses.replace(config, attention="blocks")
            assert resolve_attention(config) == resolved  # of an abstract mesh
    assert not caplog.records


@pytest.mark.parametrize("device", [gpu(), gpu("8.0"), gpu("10.0"), gpu(platform="cuda"), parse_target("h200:4x8")])
def test_auto_is_cudnn_where_the_gpu_has_it(device, caplog):
    with caplog.at_level(logging.WARNING):
        assert resolve_attention(NARROW, device) == dataclasses.replace(NARROW, attention="cudnn")
    assert not caplog.records


@pytest.mark.parametrize(
    "config, device, reason",
    [
        (ModelConfig(), gpu(), "cuDNN's attention takes 16-bit floats, and ModelConfig.dtype is 'float32'"),
        (NARROW, gpu("7.5"), "cuDNN's attention needs compute capability 8.0, and NVIDIA X has 7.5"),
        (NARROW, gpu("gfx942"), "cuDNN's attention needs compute capability 8.0, and NVIDIA X has gfx942"),
        (
            dataclasses.replace(NARROW, heads=32),
            gpu(),
            "cuDNN's attention takes heads of a multiple of 8 up to 128, not 4",
        ),
        (dataclasses.replace(NARROW, model_dim=320), gpu(), "up to 128, not 160"),
        (
            LATENT,
            gpu(),
            "cuDNN's attention is called for values as wide as keys, and those of latent attention are not",
        ),
    ],
)
def test_fallbacks_on_gpus_are_said_once_and_named_choices_refused(config, device, reason, caplog):
    attention._say_fallback.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            other = resolve_attention(config, device).attention
    (record,) = caplog.records
    assert other == "blocks"
    assert record.getMessage().startswith("ModelConfig.attention 'auto' is 'blocks' here, not 'cudnn': ")
    assert record.getMessage().endswith(reason)
    with pytest.raises(UserError) as raised:
        resolve_attention(dataclasses.replace(config, attention="cudnn"), device)
    assert str(raised.value).startswith("ModelConfig.attention ('cudnn') cannot be used: ")
    assert str(raised.value).endswith(f"{reason}; set ModelConfig.attention = 'auto', which takes another there")


PAIRS = [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_query_heads_share_keys(dtype):
    """Query head i reads keys and values of head i // 3."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, heads, 4)), dtype) for heads in (6, 2, 2))
    got = np.asarray(attend(q, k, v, True, "blocks"), np.float64)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(array, np.float64)) for array in (q, k, v))
        want = np.asarray(attend(q, k, v, True, "blocks"))
        alone = [attend(q[:, :, i : i + 1], k[:, :, j : j + 1], v[:, :, j : j + 1], True, "blocks") for i, j in PAIRS]
    np.testing.assert_allclose(want, np.concatenate(alone, axis=2), atol=1e-14)
    assert np.max(np.abs(got - want)) < {"float32": 1e-6, "bfloat16": 0.02, "float16": 0.0025}[dtype]


def plain_attention(q, k, v, causal, documents):
    """All scores at once, for autodiff: softmax(q k^T / sqrt(Dh)) v, query head i with key head i // (H / Hkv)."""
    k, v = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    index = jnp.arange(q.shape[1])
    reads = (index[:, None] >= index[None])[None, None] if causal else jnp.ones((1, 1, 1, 1), bool)
    if documents is not None:
        reads = reads & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = jnp.where(reads, jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


# every two of length, packed and causal meet
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "causal_is_packed"), [(5, True), (64, False), (150, True), (600, False)])
def test_blocks_are_plain_attention_in_float64(length, causal_is_packed, causal):
    """One block, one whole block, three of which the last is short, and eight of more than LEAST_QUERIES."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v, d = (jnp.asarray(rng.normal(size=(2, length, heads, 4))) for heads in (6, 2, 2, 6))
        documents = (
            jnp.asarray(np.sort(rng.integers(0, 4, (2, length)), axis=1), jnp.int32)
            if causal == causal_is_packed
            else None
        )
        found = []
        blocks = lambda *qkv: attend(*qkv, causal, "blocks", documents)  # noqa: E731
        plain = lambda *qkv: plain_attention(*qkv, causal, documents)  # noqa: E731
        for function in (blocks, plain):
            out, pull_back = jax.vjp(jax.jit(function), q, k, v)
            found.append((out, *pull_back(d)))
        for got, want in zip(*found, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-12)


def test_cudnn_keeps_documents_apart_by_a_finite_bias(monkeypatch):
    """In its place stands JAX's own attention in float32, with the bias that cuDNN gets; values and gradients."""

    def stand_in(causal, bias):
        assert np.isfinite(np.float32(bias)).all()  # cuDNN errs on what is infinite

        def plain(*arrays):
            wide = (jnp.asarray(array, jnp.float32) for array in (*arrays, bias))
            return jax.nn.dot_product_attention(*wide, is_causal=causal).astype(bias.dtype)

        return plain

    monkeypatch.setattr(attention, "_cudnn", stand_in)
    rng, documents = np.random.default_rng(0), jnp.asarray([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    *qkv, cotangent = (jnp.asarray(rng.normal(size=(2, 6, heads, 8)), jnp.bfloat16) for heads in (4, 2, 2, 4))
    out, pull_back = jax.vjp(lambda *qkv: attend(*qkv, True, "cudnn", documents), *qkv)
    wide = [array.astype(jnp.float32) for array in qkv]
    want, pull_want = jax.vjp(lambda *qkv: plain_attention(*qkv, True, documents), *wide)
    found = (out, *pull_back(cotangent)), (want, *pull_want(cotangent.astype(jnp.float32)))
    for got, exact in zip(*found, strict=True):
        assert np.max(np.abs(np.float32(got) - exact)) < 0.02 * np.max(np.abs(exact))
