"""The whole model on one device, layer after layer, in plain JAX: the oracle for loss and every gradient.

No mesh, no scan, no module: formulas on dictionaries.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.models.config import ModelConfig, segments_of, with_experts
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.reference import reference_moe


def normalize(x, p, config: ModelConfig):
    if config.norm == "rms":
        return root_mean_square_norm(x, p["scale"][None, None], (-1,), config)
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + config.norm_epsilon) * p["scale"][None, None] + p["bias"][None, None]


def root_mean_square_norm(x, scale, over: tuple[int, ...], config: ModelConfig):
    return x / jnp.sqrt(jnp.mean(x**2, over, keepdims=True) + config.norm_epsilon) * scale


def rotary(x, config: ModelConfig):
    """Rotate x [B, Sq, H, Dh]: feature pair (i, i + Dh/2) of position s by s / factor * base^(-2i/Dh)."""
    half = x.shape[-1] // 2
    position = jnp.arange(x.shape[1]) / config.rotary_factor
    angle = position[:, None] * config.rotary_base ** (-jnp.arange(half) / half)[None]
    turn = jnp.exp(1j * angle)[None, :, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return jnp.concatenate([turned.real, turned.imag], -1)


def rotary_latent(x, config: ModelConfig):
    """Rotate x [B, Sq, H, dr] by YaRN: each pair's wavelength decides its share of the frequency that is divided."""
    half, base = x.shape[-1] // 2, config.rotary_base
    if not config.rotary_yarn:
        return rotary(x, config)
    length, fast, slow, mscale, mscale_all_dim = config.rotary_yarn
    # index of the pair that turns so often in the original length, from turns = length base^(-i / half) / 2 pi
    at = {turns: half * math.log(length / turns / (2 * math.pi)) / math.log(base) for turns in (fast, slow)}
    low, high = max(math.floor(at[fast]), 0), min(math.ceil(at[slow]), 2 * half - 1)
    divided = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0, 1)
    frequency = base ** (-np.arange(half) / half)
    frequency = divided * frequency / config.rotary_factor + (1 - divided) * frequency
    turn = jnp.exp(1j * np.arange(x.shape[1])[:, None] * frequency[None])[None, :, None]
    larger = (0.1 * mscale * math.log(config.rotary_factor) + 1) / larger_keys(config)
    turned = (x[..., :half] + 1j * x[..., half:]) * turn * larger
    return jnp.concatenate([turned.real, turned.imag], -1)


def larger_keys(config: ModelConfig):
    return 0.1 * config.rotary_yarn[4] * math.log(config.rotary_factor) + 1 if config.rotary_yarn else 1.0


def latent_attention(x, p, config: ModelConfig, documents=None):
    """Keys and values of all heads, written out."""
    h, rotated, rank = normalize(x, p["norm"], config), config.qk_rope_head_dim, config.kv_lora_rank
    tiny = dataclasses.replace(config, norm_epsilon=1e-6)
    latents = {name: h @ p[name] for name in ("q_down", "kv_down") if name in p}
    if config.attention_bias:
        latents = {name: latent + p[f"{name}_bias"][None, None] for name, latent in latents.items()}
    c = root_mean_square_norm(latents["kv_down"][..., :rank], p["kv_norm"]["scale"][None, None], (-1,), tiny)
    keys_of_all = rotary_latent(latents["kv_down"][..., None, rank:], config)
    q, up = h, p.get("q")
    if "q_down" in p:
        q, up = root_mean_square_norm(latents["q_down"], p["q_norm"]["scale"][None, None], (-1,), tiny), p["q_up"]
    q = jnp.einsum("bsr,rhd->bshd", q, up)
    q = jnp.concatenate([q[..., :-rotated], rotary_latent(q[..., -rotated:], config)], -1)
    own = config.head_size - rotated
    k, v = (jnp.einsum("bsr,rhd->bshd", c, part) for part in (p["kv_up"][..., :own], p["kv_up"][..., own:]))
    k = jnp.concatenate([k, jnp.repeat(keys_of_all, config.heads, 2)], -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * larger_keys(config) ** 2 / jnp.sqrt(q.shape[-1])
    return mixed_by(scores, v, p, config, documents)


def attention(x, p, config: ModelConfig, documents=None):
    if config.kv_lora_rank:
        return latent_attention(x, p, config, documents)
    h = normalize(x, p["norm"], config)
    if config.key_value_heads == config.heads:
        weights = [p["qkv"][:, i] for i in range(3)]
        biases = p["qkv_bias"] if config.attention_bias else None
    else:
        weights = [p["q"], p["kv"][:, 0], p["kv"][:, 1]]
        biases = [p["q_bias"], *p["kv_bias"]] if config.attention_bias else None
    q, k, v = (jnp.einsum("bsm,mhd->bshd", h, w) for w in weights)  # of k and v [B, Sq, Hkv, Dh]
    if biases is not None:
        q, k, v = (a + b[None, None] for a, b in zip((q, k, v), biases, strict=True))
    if config.qk_norm != "none":
        over = (-1,) if config.qk_norm == "head" else (-2, -1)  # scale [Dh] or [H, Dh]
        scales = (p[name]["scale"] for name in ("q_norm", "k_norm"))
        scales = [jnp.expand_dims(scale, tuple(range(4 - scale.ndim))) for scale in scales]
        q, k = (root_mean_square_norm(a, scale, over, config) for a, scale in zip((q, k), scales, strict=True))
    if config.positions == "rotary":
        q, k = rotary(q, config), rotary(k, config)
    queries_of_one = config.heads // config.key_value_heads  # query head i reads keys and values of i // queries_of_one
    k, v = (jnp.stack([a[:, :, i // queries_of_one] for i in range(config.heads)], 2) for a in (k, v))
    return mixed_by(jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]), v, p, config, documents)


def mixed_by(scores, v, p, config: ModelConfig, documents=None):
    """Mask scores [B, H, Sq, Sq], mix values [B, Sq, H, Dv] and project."""
    if config.kind == "gpt":
        causal = jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None]
        scores = jnp.where(causal, scores, -jnp.inf)
    if documents is not None:
        scores = jnp.where(alike(documents)[:, None], scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    out = jnp.einsum("bshd,hdm->bsm", mixed, p["out"])
    return out + p["out_bias"][None, None] if config.attention_bias else out


def alike(documents):
    """Return bool [B, Sq, Sq], whether tokens i and j are of one document, of documents int32 [B, Sq]."""
    return documents[:, :, None] == documents[:, None]


def reference_logits(
    params, inputs, config: ModelConfig, moe: MoEConfig, *, noise=None, drop_groups=1, route=None, documents=None
):
    """Return (logits [B, Sq, V], weighted gate losses [], loads int32 [L, E]); arguments as below."""
    dense, segments = params["dense"], segments_of(config, moe)
    most = max(segment.moe.num_experts for segment in with_experts(segments))
    x = dense["embedding"]["tokens"][inputs]
    if config.positions == "learned":
        before = jnp.tril(jnp.ones((inputs.shape[1], inputs.shape[1]), jnp.int32), -1)[None]  # in the same document
        at = jnp.sum(before if documents is None else before * alike(documents), axis=2)
        x = x + dense["embedding"]["positions"][at]
    gate_loss, loads = 0.0, []
    for segment in segments:
        units = dense["units"][segment.name]
        for index in range(segment.config.units):
            p = jax.tree.map(lambda leaf: leaf[index], units)  # noqa: B023
            if segment.config.moe_every != 1:
                x = x + attention(x, p["dense_attention"], config, documents)
                ffn = p["dense"]
                h = normalize(x, ffn["norm"], config)
                up = h @ ffn["w_in"] + (ffn["in_bias"][None, None] if config.ffn_bias else 0)
                hidden = jax.nn.silu(h @ ffn["w_gate"]) * up if "w_gate" in ffn else jax.nn.gelu(up)
                x = x + hidden @ ffn["w_out"] + (ffn["out_bias"][None, None] if config.ffn_bias else 0)
            if not segment.has_experts:
                continue
            x = x + attention(x, p["attention"], config, documents)
            h = normalize(x, p["gate"]["norm"], config).reshape(-1, x.shape[-1])
            own = params["experts"][segment.name]
            here = None if route is None else functools.partial(route, len(loads), p["gate"])
            y, balance, z, counts = reference_moe(
                h,
                p["gate"]["w_gate"],
                {name: value[index] for name, value in own.items()},
                segment.moe,
                noise=None if noise is None else noise[len(loads)],
                drop_groups=drop_groups,
                shared=p.get("shared"),
                route=here,
            )
            x = x + y.reshape(x.shape)
            gate_loss = gate_loss + moe.aux_loss_weight * balance + moe.z_loss_weight * z
            loads.append(jnp.pad(counts, (0, most - segment.moe.num_experts)))
    x = normalize(x, dense["norm"], config)
    table = dense["embedding"]["tokens" if config.tied_head else "head"]
    return x @ table.T, gate_loss, jnp.stack(loads)


def reference_loss(
    params, inputs, targets, weights, config: ModelConfig, moe: MoEConfig, *, noise=None, drop_groups=1, route=None,
    documents=None,
):  # fmt: skip
    """Return the loss that the real model must reproduce.

    Args:
      params: {'dense': as in the real model, 'experts': {segment: {name: [L, E, ...]}}}.
      inputs, targets: int32 [B, Sq]; weights: float [B, Sq].
      config, moe: the model.
      noise: list of L arrays [B Sq, E] of standard normal noise, E of that layer, or None.
      drop_groups: in capacity mode, groups of consecutive tokens that are gated each on their own.
      documents: int32 [B, Sq], as in `Batch`, where the model keeps packed documents apart.
      route: of another router than `topk`: function (layer, gate's parameters, tokens [N, M]) -> what `reference_moe`
        takes from its `route`.

    Returns:
      loss [], with (cross-entropy [], loads int32 [L, E]); E is the largest of all layers, and experts that a
      layer does not have count 0.
    """
    logits, gate_loss, loads = reference_logits(
        params, inputs, config, moe, noise=noise, drop_groups=drop_groups, route=route, documents=documents
    )
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits, -1), targets[..., None], -1)[..., 0]
    cross_entropy = -jnp.sum(picked * weights) / jnp.sum(weights)
    return cross_entropy + gate_loss, (cross_entropy, loads)
