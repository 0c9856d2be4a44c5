"""The routers as dense, differentiable formulas: what every expert's output is multiplied by, for each token [N, E].

Who is chosen and kept comes from the loops of `oracles.py`, called from the jitted program; weights and losses are
formulas of the scores, whose gradients the real model's must equal. Letters: docs/notation.md.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from routers.oracles import ORACLES, Given, even_assignment
from support.equality_cases import LENGTH

from moe_jax.moe.routers import build_router
from moe_jax.moe.routers.base_layers import AUCTION_EPS, AUCTION_ROUNDS
from moe_jax.moe.routers.scores import gate_noise, token_draws

OF_SIGMOID = ("sigmoid_bias", "base")  # what weights are of
OF_SOFTMAX = ("topk", "switch", "noisy_topk", "gshard", "group_limited", "forced_balance", "topology")


@dataclasses.dataclass(frozen=True)
class Groups:
    """How tokens are gated together.

    Attributes:
      drop_groups: number of equal groups of consecutive tokens; shuffle_groups: how many of them `base` shuffles among.
      local: bool [drop_groups, E], the experts on the node of each.
    """

    drop_groups: int
    local: np.ndarray


def dense_route(config, key, tokens: int, groups: Groups):
    """Return route(layer, gate, x [N, M]) -> (weights [N, E], loads int32 [E], balance loss []), in training."""
    ids, experts = np.arange(tokens, dtype=np.int32), config.num_experts
    draws = build_router(config).draws

    def route(layer, gate, x):
        layer_key = jax.random.fold_in(key, layer)
        logits = x @ gate["w_gate"]
        noise = gate_noise(layer_key, ids, experts, logits.dtype) if draws else jnp.zeros_like(logits)
        scale_logits = x @ gate["w_noise"] if "w_noise" in gate else jnp.zeros_like(logits)
        scale = jax.nn.softplus(scale_logits) if "w_noise" in gate else config.gate_noise
        noisy = logits + scale * noise
        bias = gate.get("choice_bias", jnp.zeros(experts))
        with jax.ensure_compile_time_eval():
            own_key = jax.random.fold_in(key, layer)
            order = base_order(own_key, tokens, groups.drop_groups) if config.router == "base" else None

        def decide(logits, noise, scale_logits, draws, bias):
            given = Given(*map(np.asarray, (logits, noise, scale_logits, draws, bias)), token_ids=ids)
            return decided(config, given, groups, order)

        shape = jax.ShapeDtypeStruct((3, tokens, experts), bool)
        arguments = (logits, noise, scale_logits, token_draws(layer_key, ids, logits.dtype), bias)
        chosen, keep, first = jax.pure_callback(decide, shape, *jax.tree.map(jax.lax.stop_gradient, arguments))
        weights, probs = weigh(config, noisy, chosen)
        loads = jnp.sum(chosen, axis=0, dtype=jnp.int32)
        counted, per_token = (first, 1) if config.router == "gshard" else (chosen, config.top_k)
        fraction = jnp.sum(counted, axis=0) / (per_token * tokens)
        balance = experts * jnp.sum(fraction * jnp.mean(probs, axis=0))
        if config.balance_over == "sequence":
            rows = [(chosen[i : i + LENGTH], probs[i : i + LENGTH]) for i in range(0, tokens, LENGTH)]
            fractions = [(jnp.sum(c, axis=0) / (config.top_k * LENGTH), jnp.mean(p, axis=0)) for c, p in rows]
            balance = sum(experts * jnp.sum(f * p) for f, p in fractions) / len(rows)
        balance = jnp.zeros(()) if config.router == "base" else balance
        return jnp.where(keep, weights, 0), loads, balance

    return route


def weigh(config, noisy, chosen):
    """Return the weights [N, E] of the chosen experts, and the probabilities of the balance loss."""
    assert config.router in (*OF_SOFTMAX, *OF_SIGMOID), f"say here what the weights of {config.router!r} are"
    probs = jax.nn.softmax(noisy, axis=1)
    scores = jax.nn.sigmoid(noisy) if config.router in OF_SIGMOID else probs
    weights = jnp.where(chosen, scores, 0)
    if config.renormalize and config.router not in ("switch", "base"):
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    scale = 1.0 if config.router in ("base", "switch") else config.routed_scale
    return scale * weights, probs if config.router == "base" else scores / jnp.sum(scores, axis=1, keepdims=True)


def base_order(key, tokens: int, devices: int):
    """Return int [devices, t], the tokens whose scores each device gets: a part of each device's shuffled ones."""
    each = tokens // devices
    part = each // devices
    found = np.zeros((devices, each), int)
    for source in range(devices):
        order = np.asarray(jax.random.permutation(jax.random.fold_in(key, source), jnp.arange(each, dtype=jnp.int32)))
        for device in range(devices):
            mine = order[device * part : (device + 1) * part]
            found[device, source * part : (source + 1) * part] = source * each + mine
    return found


def decided(config, given: Given, groups: Groups, order):
    """Return bool [3, N, E]: chosen, kept, and the first choice, group by group."""
    tokens, experts = given.logits.shape
    out = np.zeros((3, tokens, experts), bool)
    if config.router == "base":
        for mine in order:
            owner, _ = even_assignment(given.logits[mine], AUCTION_EPS, AUCTION_ROUNDS)
            out[:, mine, owner] = True
        return out
    each = tokens // groups.drop_groups
    for group in range(groups.drop_groups):
        part = slice(group * each, (group + 1) * each)
        own = Given(
            *(None if array is None else array[part] for array in (given.logits, given.noise, given.scale_logits)),
            draws=given.draws[part], bias=given.bias, local=groups.local[group], token_ids=given.token_ids[part],
        )  # fmt: skip
        for i, row in enumerate(ORACLES[config.router](config, own)):
            for k, (expert, _, stays) in enumerate(row):
                out[:, part.start + i, expert] |= np.array([True, stays, k == 0])
    return out
