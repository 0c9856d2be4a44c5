"""FasterMoE (PPoPP 2022): its figures 5, 10 to 14 and table 3, computed again.

Layers are MoE layers alone, forward and backward, as the paper times them, by its predictor (section 3). What the text
leaves out is the authors' artifact's (github.com/laekov/fastermoe-ae): float32, two choices, h_ff = 2 h, tokens of a
device. Letters: docs/notation.md; n samples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from moe_jax.cluster import Links
from moe_jax.papers.loads import OF_64, find_loads
from moe_jax.papers.systems import Model, Setting, machine
from moe_jax.papers.table import Found, Inputs, Tables, bars
from moe_jax.planning.fastermoe import Shadowing

TOP_K, ITEM = 2, 4  # choices of a token, bytes of a number
# Machine, MoE layers, M, tokens of a device. Table 2's cells are not in the text: layers, M and tokens on johnny are
# those of the artifact's figure 10, those on trevor and GPT's M are assumed.
TASKS = {
    "GPT-S": ("johnny", 12, 1024, 1024),
    "GPT-L": ("johnny", 12, 4096, 1024),
    "BERT-Deep": ("johnny", 24, 1024, 2048),
    "BERT-Deep-L": ("johnny", 24, 4096, 2048),
    "BERT-Wide": ("trevor", 12, 1024, 2048),
    "BERT-Wide-L": ("trevor", 12, 2048, 2048),
    "GPT": ("johnny", 12, 2048, 1024),  # of table 3 and figure 14; figure 5's is not named
}
MODELS = tuple(TASKS)[:-1]  # of figures 10, 12 and 13
JOHNNY, TREVOR = slice(4), slice(4, None)  # of these, by machine
GROUP_DEVICES = {"NVIDIA V100-PCIe": 2, "NVIDIA V100-SXM2": 4}  # FMOE_FUSE_GRAN of the artifact, by default a node
GSHARD_CAPACITY = 1.2  # of a device's tokens, for one expert: FastMoE 0.3's gate, MoEConfig.capacity_factor = 0.6
# Held-out steps to the faithful gate's loss over its own, of the demo, GShard's at that capacity: docs/results.md, by
#     python scripts/bench/gates.py --out=runs/gates --seeds=3 --gin_bindings='train.batch_size = 8'
STEPS = {"FastMoE": 1.0, "GShard": 1.07, "BASE": 1.08, "FasterMoE": 1.0, "topology gate": 1.08}
# Table 3 as printed: hours, thousands of iterations, ms of one. The text that this project has lacks its cells; they
# give the text's ratios, but for FastMoE over FasterMoE: 1.32.
TABLE_3 = {
    "FastMoE": (7.19, 12.2, 2117),
    "GShard": (8.58, 30.9, 1000),
    "BASE": (13.7, 21.0, 2355),
    "FasterMoE": (5.81, 13.0, 1609),
    "topology gate": (6.25, 15.3, 1471),
}
EXPERIMENTS = {
    "the authors' measured links and matmul rate (their artifact's predictor) instead of data sheets": "rates",
    "the artifact's rule (its figure 11: 4 x the compute, 1 / N of a shadow's price) instead of equation 8": "rule",
    "loads of a run of 64 experts (top_2_of_64) instead of 32 experts of two layers side by side": "64",
}
TRAINED = {
    "iterations to the loss: the paper's of MoE-GPT (table 3, and ratios of the text) instead of the demo's": "trained"
}
TABLES = Tables("fastermoe", "modelled", EXPERIMENTS)


Seconds, Work = dict[str, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]]


@functools.cache
def setting_of(inputs: Inputs, name: str, change: str = "") -> Setting:
    """Return the row of a model, one expert on each device; `change`: '' or one of `EXPERIMENTS`."""
    place, layers, model_dim, tokens = TASKS[name]
    cluster = machine(f"{place}_measured" if change == "rates" else place, level=inputs.level)
    of_64 = change == "64" and cluster.devices == 64
    trace = find_loads(OF_64) if of_64 else inputs.loads(TOP_K)
    sizes = {"tokens": tokens * cluster.devices, "top_k": TOP_K, "experts": cluster.devices, "item": ITEM}
    model = Model(name=name, layers=layers, model_dim=model_dim, hidden_dim=2 * model_dim)
    return Setting(cluster=cluster, model=model, trace=trace, **sizes)


@functools.cache
def layers_of(inputs: Inputs, name: str, change: str = "", near: bool = False) -> tuple[Seconds, Work, np.ndarray]:
    """Return the MoE layers of a model: by system its seconds [n, L] and its (3 T_comp, 4 T_comm and shadows' moves),
    and which experts are shadowed, bool [n, L, E]. `near`: under the topology gate.
    """
    setting = setting_of(inputs, name, change)
    loads = kept_near(setting) if near else setting.fitted()[0].loads
    shadowed = shadows(setting, loads, artifact=change == "rule")
    left = np.where(shadowed[:, :, None], 0, loads)
    here = left + (loads - left).sum(axis=3, keepdims=True) * np.eye(setting.devices, dtype=int)
    moved = shadowed.sum(axis=2) * prices(setting)[2]
    work = {"FastMoE": in_turn(setting, loads), "shadowing": in_turn(setting, here, moved)}
    seconds = {system: sum(parts) for system, parts in work.items()}
    seconds |= {"smart schedule": smart(setting, loads), "both": smart(setting, here, moved)}
    return seconds, work, shadowed


def prices(setting: Setting) -> tuple[float, float, float]:
    """Return seconds of a token's forward (4 h h_ff / P), its row on the slow link, an expert's matrices there."""
    wide, deep = setting.model.model_dim, setting.model.hidden_dim
    bandwidth = setting.cluster.bandwidth("a ring")
    flops = setting.cluster.need("flops", "an expert")
    return 4 * wide * deep / flops, wide * ITEM / bandwidth, 2 * wide * deep * ITEM / bandwidth


def shadows(setting: Setting, loads: np.ndarray, artifact: bool) -> np.ndarray:
    """Return the experts that algorithm 1 shadows, bool [n, L, E], by equation 8 as printed or the artifact's form."""
    token, row, expert = prices(setting)
    rule = Shadowing(compute=3 * token, exchange=4 * row, shadow=2 * expert, residual=False)
    if artifact:
        rule = dataclasses.replace(rule, compute=12 * token, shadow=2 * expert / setting.devices)
    flat = loads.reshape(-1, *loads.shape[2:]).astype(np.float64)
    home = np.tile(np.arange(setting.experts), (len(flat), 1))

    def price(offers):
        return offers.sum(axis=1) * rule.shadow, np.full(len(flat), True)

    return rule.search(np, flat, home, price, skips=False)[0].reshape(*loads.shape[:2], -1)


def exchange(setting: Setting, pairs: np.ndarray) -> np.ndarray:
    """Return T_comm of one all-to-all, link by link: tokens [..., D, D] -> seconds [...]."""
    links = Links.of(setting.cluster, pairs.shape[-1], "an exchange")
    return links.exchange(pairs * (setting.model.model_dim * ITEM))


def in_turn(setting: Setting, pairs: np.ndarray, moved=0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return (3 T_comp, 4 T_comm + both ways of what is moved): the terms of equations 7 and 8."""
    return 3 * prices(setting)[0] * pairs.sum(axis=-2).max(axis=-1), 4 * exchange(setting, pairs) + 2 * moved


def smart(setting: Setting, pairs: np.ndarray, moved=0.0) -> np.ndarray:
    """Return the seconds of forward and backward under the smart schedule of section 4.2.

    Step s has what travels between groups s apart on their ring. Transfers run one after the other, S_0 .. S_{G-1},
    S'_0 .. S'_{G-1}, shadows' parameters before and their gradients after; experts compute next to them.
    """
    group = np.arange(setting.devices) // GROUP_DEVICES[setting.cluster.device]
    parts, total = [], 2 * moved
    for step in range(group[-1] + 1):
        rows = np.where((group[:, None] - group) % (group[-1] + 1) == step, pairs, 0)
        parts.append((exchange(setting, rows), prices(setting)[0] * rows.sum(axis=2)))
    for times in (1, 2):  # the backward computes twice as long
        link, experts, ready = 0.0, 0.0, []
        for sent, computed in parts:
            link = link + sent
            experts = np.maximum(experts, link[..., None]) + times * computed
            ready.append(experts.max(axis=2))
        for (sent, _), there in zip(parts, ready, strict=True):
            link = np.maximum(link, there) + sent
        total = total + link
    return total


def zero_seconds(setting: Setting, stage: int) -> float:
    """Return a layer's seconds in data parallelism with a ZeRO stage, all experts on rings (sections 2.3, 3.2).

    Stages 1 and 2 reduce gradients after or next to the backward, and gather parameters when they are updated; stage 3
    gathers next to forward and backward, where it reduces too.
    """
    token, _, expert = prices(setting)
    forward = token * setting.tokens * TOP_K / setting.devices
    ring = (setting.devices - 1) * expert  # (N - 1) / N of N experts, one way
    if stage == 3:
        return max(forward, ring) + max(2 * forward, 2 * ring)
    return forward + (2 * forward + ring if stage == 1 else max(2 * forward, ring)) + ring


def kept_near(setting: Setting) -> np.ndarray:
    """Return loads of which W_net / (M_w W_local) of a device's tokens leave its node; near experts get the rest."""
    loads, cluster = setting.fitted()[0].loads, setting.cluster
    node = np.arange(setting.devices) // cluster.devices_per_node
    near = np.where(node[:, None] == node, loads, 0)
    allowed = cluster.inter_bandwidth / (cluster.devices_per_node * cluster.intra_bandwidth)
    allowed *= setting.tokens / setting.devices
    far = (loads - near) * np.minimum(1.0, allowed / np.maximum((loads - near).sum(axis=3, keepdims=True), 1))
    stays = (loads - far).sum(axis=3, keepdims=True)
    return np.rint(far + near * stays / np.maximum(near.sum(axis=3, keepdims=True), 1)).astype(int)


def said(inputs: Inputs, names: Sequence[str]) -> tuple[str, ...]:
    """Return notes on how the loads of these models were made."""
    return tuple(f"{name}: {setting_of(inputs, name).fitted()[1]}" for name in names)


SPEEDUP = bars("speed-up")
LOADS = "GPT-S", "BERT-Deep", "BERT-Wide"


def of_models(figures: np.ndarray) -> list[tuple]:
    """Return rows (model, machine, figures) of figures [any, models]."""
    return [(name, TASKS[name][0], *cells) for name, cells in zip(MODELS, figures.T, strict=True)]


@TABLES.add()
def figure_5(inputs):
    """Compute the DDL-Roofline, with the semi-ideal curve P x / (1 + x)."""
    setting, (seconds, works, _) = setting_of(inputs, "GPT"), layers_of(inputs, "GPT")
    devices, tokens, (token, row, expert) = setting.devices, setting.tokens, prices(setting)
    even = 3 * token * tokens * TOP_K / devices
    reduced, embedded = 2 * (devices - 1) * expert, 2 * 2 * (devices - 1) / devices * tokens * row  # rings, section 3.2
    points = {
        "DP": (even, reduced, even + reduced),
        "DP, overlapped": (even, reduced, even / 3 + max(2 * even / 3, reduced)),
        "MP": (even, embedded, even + embedded),
        "MP, were it overlapped": (even, embedded, max(even, embedded)),
    }
    names = {"EP": "FastMoE", "EP, shadowing": "shadowing", "EP, smart schedule": "smart schedule"}
    names["EP, shadowing and schedule"] = "both"
    for name, system in names.items():
        work = works["shadowing" if "shadowing" in name else "FastMoE"]
        points[name] = (work[0].mean(), work[1].mean(), seconds[system].mean())
    peak, rows = setting.cluster.need("flops", "a roof") / 1e12, []
    for name, (work, moved, ended) in points.items():
        x, rate = work / moved, peak * even / ended
        rows.append((name, x, rate, rate * (1 + x) / (peak * x)))

    def draw(table, axes) -> None:
        x = np.logspace(-2, 1.5, 200)
        axes.plot(x, peak * np.minimum(1, x), "k", label="ideal")
        axes.plot(x, peak * x / (1 + x), "k--", label="semi-ideal")
        for name, at, rate, _ in table.rows:
            axes.plot(at, rate, "o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="T_comp / T_comm", ylabel="TFLOP/s of a device")
        axes.legend(fontsize=7)

    places = {name: cells for name, *cells in rows}
    ours = places["MP"][0], places["EP"][0], rows[-1][2]
    return Found(rows, ours, said(inputs, ["GPT"]), draw)


@TABLES.add(SPEEDUP)
def figure_10(inputs, change=""):
    """Compare ZeRO, FastMoE and FasterMoE with ZeRO stage 3, in seconds of MoE layers."""
    seconds = [[zero_seconds(setting_of(inputs, name, change), stage) for name in MODELS] for stage in (1, 2, 3)]
    by_model = [layers_of(inputs, name, change)[0] for name in MODELS]
    slowest = np.array(seconds[-1])
    seconds += [[layers[system].mean() for layers in by_model] for system in ("FastMoE", "both")]
    first, second, _, plain, both = speedups = slowest / np.array(seconds)
    most = both[JOHNNY].max(), both[TREVOR].max(), (both / second).max(), (both / first).max(), plain.max()
    return Found(of_models(speedups), most, said(inputs, LOADS))


@TABLES.add()
def figure_11(inputs, change=""):
    """Show which experts of MoE-BERT-Deep are shadowed, and what a layer gains by it."""
    seconds, _, shadowed = layers_of(inputs, "BERT-Deep", change)
    before, after = (1e3 * seconds[name] for name in ("FastMoE", "shadowing"))
    gains = before / after
    of_one = np.where(shadowed.sum(axis=2) == 1, gains, 1.0)

    def draw(table, axes) -> None:
        axes.imshow(shadowed[:, -1].T, cmap="binary", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(xlabel="sample, last layer", ylabel="experts (black: shadowed)", ylim=(15.5, -16), yticks=(0, 15))
        latency = axes.twinx()
        latency.plot(before[:, -1], label="no optimization")
        latency.plot(after[:, -1], label="shadowing")
        latency.set(ylabel="ms", ylim=(-before.max(), 1.1 * before.max()), yticks=(0, int(before.max())))
        latency.legend(fontsize=7)

    means = [values.mean(axis=0) for values in (shadowed.mean(axis=2), before, after, gains)]
    rows = [(at, *row) for at, row in enumerate(zip(*means, of_one.max(axis=0), strict=True))]
    return Found(rows, [shadowed.mean(), of_one.max()], said(inputs, ["BERT-Deep"]), draw)


@TABLES.add(SPEEDUP)
def figure_12(inputs, change=""):
    """Compare the smart schedule with exchanges and experts one after the other, layer by layer."""
    rows = []
    for name in MODELS:
        seconds, work, _ = layers_of(inputs, name, change)
        experts, moved = work["FastMoE"]
        least = np.maximum(experts / 3, moved / 2) + np.maximum(2 * experts / 3, moved / 2)
        achieved = seconds["FastMoE"] / seconds["smart schedule"]
        by_layer = zip(((experts + moved) / least).mean(axis=0), achieved.mean(axis=0), strict=True)
        rows += [(name, at, *both) for at, both in enumerate(by_layer)]
    most = (max(values) for values in zip(*((*row[2:], row[3] / row[2]) for row in rows), strict=True))
    return Found(rows, most, said(inputs, LOADS))


@TABLES.add(SPEEDUP)
def figure_13(inputs, change=""):
    """Compare shadowing, the smart schedule and both with FastMoE."""
    by_system = [layers_of(inputs, name, change)[0].values() for name in MODELS]
    seconds = np.array([[of_system.mean() for of_system in model] for model in by_system]).T
    _, shadowing, schedule, both = speedups = seconds[0] / seconds
    groups = shadowing[JOHNNY], shadowing[TREVOR], schedule, both[JOHNNY], both[TREVOR]
    return Found(of_models(speedups), map(max, groups), said(inputs, LOADS))


@TABLES.add(bars("time to the loss, over FasterMoE's", "time: paper", "ours"), experiments=EXPERIMENTS | TRAINED)
def table_3(inputs, change=""):
    """Compute an iteration of MoE-GPT under each gate, attention included; steps to the loss are the demo's."""
    cause = "" if change == "trained" else change
    setting, (by_system, *_) = setting_of(inputs, "GPT", cause), layers_of(inputs, "GPT", cause)
    loads = setting.fitted()[0].loads
    tokens = setting.tokens / setting.devices
    capped = loads * np.minimum(1.0, GSHARD_CAPACITY * tokens / np.maximum(loads.sum(axis=2, keepdims=True), 1))
    even = np.full((1, 1, *loads.shape[2:]), tokens / setting.devices)  # one choice
    seconds = {
        "FastMoE": by_system["FastMoE"],
        "GShard": sum(in_turn(setting, capped)),
        "BASE": sum(in_turn(setting, even, 2 * exchange(setting, even))),  # shuffled before and after
        "FasterMoE": by_system["both"],
        "topology gate": layers_of(inputs, "GPT", cause, near=True)[0]["both"],
    }
    attention = 3 * setting.attention_seconds
    ours = {gate: 1e3 * setting.model.layers * (attention + float(each.mean())) for gate, each in seconds.items()}
    plain, gshard, base, fastermoe, near = ours.values()
    steps = [STEPS[gate] / STEPS["topology gate"] for gate in ("GShard", "BASE")]
    gshard_steps, base_steps = (2.38 / 1.18, 21.0 / 15.3) if change == "trained" else steps
    times, hours = {gate: ms * STEPS[gate] for gate, ms in ours.items()}, TABLE_3["FasterMoE"][0]
    rows = [
        (gate, *map(float, paper), ours[gate], STEPS[gate], paper[0] / hours, times[gate] / times["FasterMoE"])
        for gate, paper in TABLE_3.items()
    ]
    iterations = plain / fastermoe, fastermoe / near, STEPS["GShard"], STEPS["topology gate"]
    return Found(rows, (*iterations, gshard_steps * gshard / near, base_steps * base / near), said(inputs, ["GPT"]))
