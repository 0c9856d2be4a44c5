"""The MoE layer on one device, without dispatch and without communication: the oracle of every test.

Inputs: tokens [N, M], the gate's weight and all experts' weights. Outputs: tokens [N, M], the gate losses, and the
loads. Every expert computes every token, and a [N, E] matrix of weights, mostly zero, picks and sums. It is written to
be read, shares no code with the layer, and costs E / K times the layer's FLOPs. Letters: docs/notation.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax.moe.config import MoEConfig


def reference_expert(x, weights: dict):
    """Return one expert's output [N, M]; weights {w_in [M, F], w_out [F, M]} and w_gate [M, F] for SwiGLU."""
    up = x @ weights["w_in"]
    hidden = jax.nn.silu(x @ weights["w_gate"]) * up if "w_gate" in weights else jax.nn.gelu(up)
    return hidden @ weights["w_out"]


def reference_moe(
    x, w_gate, experts: dict, config: MoEConfig, *, noise=None, drop_groups: int = 1, shared=None, route=None
):
    """Compute the layer.

    Args:
      x: [N, M].
      w_gate: [M, E].
      experts: {name: [E, M, F] or [E, F, M]}.
      config: the layer.
      noise: [N, E] standard normal noise, or None.
      drop_groups: in capacity mode, how many groups of consecutive tokens are gated each on their own.
      shared: weights of the shared experts as one expert of their hidden dims together, or None; with `w_mix` [M, 2]
        where config.residual is 'learned'.
      route: of another router than `topk`: function of x -> (weight of each expert for each token [N, E], loads int32
        [E], load-balancing loss []).

    Returns:
      y [N, M], load-balancing loss [], z-loss [] (both unweighted), loads int32 [E].
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    logits = x.astype(dtype) @ w_gate.astype(dtype)
    z = jnp.mean(jax.scipy.special.logsumexp(logits, axis=1) ** 2)
    if noise is not None:
        logits = logits + config.gate_noise * noise
    probs = jax.nn.softmax(logits, axis=1)
    best = jnp.argsort(-probs, axis=1, stable=True)[:, : config.top_k]
    chosen = jnp.any(best[:, :, None] == jnp.arange(config.num_experts)[None, None], axis=1)
    weights = jnp.where(chosen, probs, 0)
    if config.renormalize:
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    if config.capacity_factor is not None:
        group = x.shape[0] // drop_groups
        capacity = config.capacity(group)
        keep_masks = []
        for g in range(drop_groups):
            mine, prob = chosen[g * group : (g + 1) * group], probs[g * group : (g + 1) * group]
            if config.drop == "position":
                earlier = jnp.cumsum(mine, axis=0) - mine
            else:
                # token j precedes token i in expert e's queue; last bits say nothing of tokens that tie
                index = jnp.arange(group)
                bits = jnp.finfo(prob.dtype)
                prob = jax.lax.reduce_precision(prob, bits.nexp, 3 * bits.nmant // 4)
                more = prob[None] > prob[:, None]
                tie = (prob[None] == prob[:, None]) & (index[None, :, None] < index[:, None, None])
                earlier = jnp.sum((more | tie) & mine[None], axis=1)
            keep_masks.append(mine & (earlier < capacity))
        weights = jnp.where(jnp.concatenate(keep_masks), weights, 0)
    loads = jnp.sum(chosen, axis=0, dtype=jnp.int32)
    fraction = loads.astype(dtype) / (config.top_k * x.shape[0])
    balance = config.num_experts * jnp.sum(fraction * jnp.mean(probs, axis=0))
    if route is not None:
        weights, loads, balance = route(x)
    y = jnp.zeros(x.shape, dtype)
    for e in range(config.num_experts):
        output = reference_expert(x, {name: value[e].astype(x.dtype) for name, value in experts.items()})
        y = y + weights[:, e : e + 1] * output.astype(dtype)
    if shared is not None:
        always = reference_expert(x, {name: value for name, value in shared.items() if name != "w_mix"}).astype(dtype)
        if config.residual == "learned":
            mix = jax.nn.softmax(x.astype(dtype) @ shared["w_mix"].astype(dtype), axis=1)
            always, y = mix[:, :1] * always, mix[:, 1:] * y
        y = y + always
    return y.astype(x.dtype), balance, z, loads
