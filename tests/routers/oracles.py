"""Every router again, in loops over tokens and experts, in NumPy: what `moe_jax.moe.routers` must equal.

Inputs: `Given`, the logits of one drop group's tokens and what else the router reads. Outputs: for each token a list of
(expert, weight, kept), in the order of its choices. No code is shared with the package.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Given:
    """What a router decides by.

    Attributes:
      logits: float [t, E]; noise: standard normal [t, E] or None in evaluation; scale_logits: [t, E] of `noisy_topk`.
      draws: [t] in [0, 1) of `gshard`, or None; bias: [E] of `sigmoid_bias`; local: bool [E] of `topology`.
      token_ids: int [t].
    """

    logits: np.ndarray
    noise: np.ndarray | None = None
    scale_logits: np.ndarray | None = None
    draws: np.ndarray | None = None
    bias: np.ndarray | None = None
    local: np.ndarray | None = None
    token_ids: np.ndarray | None = None


def softmax(row):
    top = max(row)
    exponentials = [math.exp(value - top) for value in row]
    return [value / sum(exponentials) for value in exponentials]


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def best(scores, count, among=None):
    """Return the `count` ids with the highest scores, ties to the lowest id."""
    ids = range(len(scores)) if among is None else among
    return sorted(ids, key=lambda e: (-scores[e], e))[:count]


def noisy_logits(config, given):
    rows = []
    for i, row in enumerate(given.logits):
        row = list(row)
        if given.noise is not None:
            for e in range(len(row)):
                scale = config.gate_noise
                if config.router == "noisy_topk":
                    scale = math.log1p(math.exp(given.scale_logits[i][e]))
                row[e] += scale * given.noise[i][e]
        rows.append(row)
    return rows


def inside_groups(config, scores, score_group):
    """Return the experts of the token's best groups, all where there are no groups."""
    if not config.expert_groups:
        return range(len(scores))
    size = len(scores) // config.expert_groups
    groups = [[scores[g * size + i] for i in range(size)] for g in range(config.expert_groups)]
    stay = best([score_group(group) for group in groups], config.kept_groups)
    return [e for e in range(len(scores)) if e // size in stay]


def served(config, wanted, asked):
    """Say which choices an expert's capacity admits.

    Args:
      wanted: per token a list of experts, None for a choice that asks for nothing.
      asked: the (token, place) in the order in which they are served.
    """
    keep = [[expert is not None for expert in row] for row in wanted]
    if config.capacity_factor is None:
        return keep
    tokens = len(wanted)
    capacity = min(
        tokens, max(config.min_capacity, math.ceil(config.top_k * config.capacity_factor * tokens / config.num_experts))
    )
    taken = {}
    for token, k in asked:
        expert = wanted[token][k]
        if expert is None:
            continue
        keep[token][k] = taken.get(expert, 0) < capacity
        taken[expert] = taken.get(expert, 0) + 1
    return keep


def in_order(config, ids, scores):
    """Return the (token, place) in the order of `MoEConfig.drop`."""
    asked = [(token, k) for token in range(len(ids)) for k in range(len(ids[token]))]
    if config.drop == "probability":
        asked.sort(key=lambda at: -certain(scores[at[0]][ids[at[0]][at[1]]]))  # stable: ties to the earlier token
    return asked


def certain(value):
    """Return a float64 rounded to 40 of its 53 bits, which no order of summation changes."""
    fraction, power = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, 40)), power - 40)


def joined(ids, weights, keep):
    return [list(zip(*rows, strict=True)) for rows in zip(ids, weights, keep, strict=True)]


def by_probability(config, given, pick):
    probs = [softmax(row) for row in noisy_logits(config, given)]
    ids = [pick(i, row) for i, row in enumerate(probs)]
    keep = served(config, ids, in_order(config, ids, probs))
    weights = []
    for row, chosen in zip(probs, ids, strict=True):
        picked = [row[e] for e in chosen]
        if config.renormalize and config.router != "switch":
            picked = [value / sum(picked) for value in picked]
        weights.append([value * config.routed_scale for value in picked])
    return joined(ids, weights, keep)


def topk(config, given):
    return by_probability(config, given, lambda i, row: best(row, config.top_k, inside_groups(config, row, max)))


def forced_balance(config, given):
    def pick(i, row):
        return [(int(given.token_ids[i]) * config.top_k + k) % config.num_experts for k in range(config.top_k)]

    return by_probability(config, given, pick)


def gshard(config, given):
    probs = [softmax(row) for row in noisy_logits(config, given)]
    ids = [best(row, 2) for row in probs]
    weights = [[row[a] / (row[a] + row[b]), row[b] / (row[a] + row[b])] for row, (a, b) in zip(probs, ids, strict=True)]
    wanted = [list(row) for row in ids]
    for i in range(len(ids)):
        if given.draws is not None and given.draws[i] >= min(1.0, 2 * weights[i][1]):
            wanted[i][1] = None
    first_then_second = [(i, 0) for i in range(len(ids))] + [(i, 1) for i in range(len(ids))]
    return joined(ids, weights, served(config, wanted, first_then_second))


def sigmoid_bias(config, given):
    scores = [[sigmoid(value) for value in row] for row in noisy_logits(config, given)]
    ids, weights = [], []
    for row in scores:
        biased = [value + given.bias[e] for e, value in enumerate(row)]
        inside = inside_groups(config, biased, lambda group: sum(sorted(group, reverse=True)[:2]))
        ids.append(best(biased, config.top_k, inside))
        picked = [row[e] for e in ids[-1]]
        if config.renormalize:
            picked = [value / (sum(picked) + 1e-20) for value in picked]
        weights.append([config.routed_scale * value for value in picked])
    return joined(ids, weights, served(config, ids, in_order(config, ids, scores)))


def topology(config, given):
    scores = noisy_logits(config, given)
    most = math.floor(len(scores) * config.options[0].remote_fraction + 1e-9)
    local = [e for e in range(config.num_experts) if given.local[e]]
    first = [best(row, 1)[0] for row in scores]
    remote = [i for i in range(len(scores)) if not given.local[first[i]]]
    crossing = sorted(remote, key=lambda i: (-scores[i][first[i]], i))[:most]
    ids, weights = [], []
    for i, row in enumerate(scores):
        if i in crossing:
            ids.append([first[i], *best(row, config.top_k - 1, local)])
        else:
            ids.append(best(row, config.top_k, local))
        probs = softmax(row)
        weights.append(softmax([row[e] for e in ids[-1]]) if config.renormalize else [probs[e] for e in ids[-1]])
    return joined(ids, weights, served(config, ids, in_order(config, ids, scores)))


def base(config, given):
    """Evaluation: the best expert. Training assigns: see `even_assignment`."""
    ids = [best(row, 1) for row in given.logits]
    return joined(ids, [[sigmoid(row[e]) for e in chosen] for row, chosen in zip(given.logits, ids, strict=True)],
                  [[True]] * len(ids))  # fmt: skip


def even_assignment(scores, eps, rounds):
    """Return (expert of each token, tokens left after the auction), bid by bid."""
    tokens, experts = scores.shape
    each = tokens // experts
    owner, bid = [None] * tokens, [0.0] * tokens
    for _ in range(rounds):
        if None not in owner:
            break
        price = []
        for e in range(experts):
            held = [bid[i] for i in range(tokens) if owner[i] == e]
            price.append(min(held) if len(held) == each else 0.0)
        for i in [i for i in range(tokens) if owner[i] is None]:
            values = [scores[i][e] - price[e] for e in range(experts)]
            one, two = best(values, 2)
            owner[i], bid[i] = one, price[one] + (values[one] - values[two]) + eps
        keep_highest(owner, bid, experts, each)
    left = owner.count(None)
    while None in owner:
        room = [e for e in range(experts) if owner.count(e) < each]
        offers = [math.inf] * tokens
        for i in [i for i in range(tokens) if owner[i] is None]:
            owner[i] = best(scores[i], 1, room)[0]
            offers[i] = scores[i][owner[i]]
        keep_highest(owner, offers, experts, each)
    return owner, left


def keep_highest(owner, bids, experts, each):
    for e in range(experts):
        mine = sorted((i for i in range(len(owner)) if owner[i] == e), key=lambda i: (-bids[i], i))
        for i in mine[each:]:
            owner[i] = None


ORACLES = {
    "topk": topk,
    "switch": topk,
    "noisy_topk": topk,
    "group_limited": topk,
    "forced_balance": forced_balance,
    "gshard": gshard,
    "sigmoid_bias": sigmoid_bias,
    "topology": topology,
    "base": base,
}
