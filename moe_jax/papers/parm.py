"""Parm (INFOCOM 2024): its tables and figures, priced on its two testbeds.

A layer's seconds are its exchanges by `cluster/layer_seconds.py` on the links of configs/cluster/parm_{a,b}.gin, and
its matmuls and moved rows by the prices of the GPU. Letters: docs/notation.md.

Assumed where the text is silent: K = 2 (GShard); float32 (PyTorch's default); E = N_EP, as section VI-D's 2 and 8
experts on 8 and 32 GPUs are with N_ESP = 4; P of {8, 16, 32} on testbed B, and 8 on A; N_MP and N_ESP are 4 in figures
6 and 7 and in table V, which has 4 sequences of an MP group and sums dense gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from moe_jax.cluster import Cluster
from moe_jax.cluster.fits import fit_alpha_beta
from moe_jax.cluster.layer_seconds import Transfer, layer_transfers, moving_seconds, preceding_seconds, transfer_seconds
from moe_jax.cluster.targets import device_named
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.schedule import LayerSizes, layer_shape
from moe_jax.papers import systems
from moe_jax.papers.table import Found, Tables, curves
from moe_jax.parallel.mesh import MeshConfig, build_mesh

PLACES = {"A": ("parm_a", 1), "B, 8": ("parm_b", 2), "B, 16": ("parm_b", 4), "B, 32": ("parm_b", 8)}  # file, nodes
ITEM, SCHEDULES = 4, ("deepspeed", "s1", "s2")  # bytes of a number
SIZES = {"B": (2, 4, 8), "L": (512, 1024, 2048), "M": (1024, 2048, 4096), "H": (1024, 2048, 4096), "f": (1.2, 2.4)}
Layer = tuple[str, tuple[int, int], int, int, int, float]  # place, (N_MP, N_ESP), N of an MP group, M, H, f
GROUPS = tuple(itertools.product((1, 2, 4), (1, 2, 4)))  # N_MP, N_ESP
FASTER = GROUPS[1:]  # S1 and S2 are faster in all cases of the text: with neither degree all schedules are one program
TABLE_4 = tuple(groups for groups in GROUPS if min(groups) > 1)


class Assumed(NamedTuple):
    """What the text leaves open; an experiment changes one of it.

    peers: GPUs reach each other; else links are as others measured them.
    """

    top_k: int = 2
    peers: bool = True
    gather: str = "saa"
    level: str = "middle"  # of assumed prices
    groups: tuple = FASTER  # of table III


BASE = Assumed()


@functools.cache
def machine(place: str, level: str = "middle", peers: bool = True) -> Cluster:
    """Return a testbed: links, start-ups and memory of its file, matmuls and memory by the prices of its GPU."""
    name, nodes = PLACES[place]
    cluster = systems.machine(name, nodes, level)
    prices = systems.prices_of(device_named(cluster.device), level)
    cluster = dataclasses.replace(cluster, prices=prices, flops=prices.reached("f32"))
    return cluster if peers else systems.as_reached(cluster)


@functools.cache
def shapes(place: str, groups: tuple[int, int], tokens: int, row: int, slots: float) -> list:
    """Return the `LayerShape` of each schedule; row: bytes; slots: K f, those of a token in all buckets."""
    cluster, (mp_size, esp_size) = machine(place), groups
    config = MeshConfig(expert_shard=esp_size, model=mp_size, devices_per_node=cluster.devices_per_node)
    roles, experts = build_mesh(config.resolve(cluster.devices), cluster.devices), cluster.devices // esp_size
    config, capacity = MoEConfig(num_experts=experts), math.ceil(slots * tokens / experts)
    sizes = LayerSizes(config=config, tokens=tokens, groups=1, capacity=capacity, row_bytes=row)
    return [layer_shape(name, roles, sizes) for name in SCHEDULES]


moving = functools.cache(moving_seconds)


def price(layer: Layer, to: Assumed = BASE) -> np.ndarray:
    """Return [3, 2], seconds by schedule: exchanges (equations 1, 13, 14, both ways), and computation; no overlap."""
    (place, groups, tokens, dim, hidden, factor), seconds = layer, []
    cluster = machine(place, to.level, to.peers)
    matmul = functools.partial(cluster.prices.matmul, "f32", 1)
    for shape in shapes(place, groups, tokens, ITEM * dim, to.top_k * factor):
        gated = tokens if shape.gates_group else tokens // shape.mp_size
        packed = shape.sent_rows * (1 if shape.cuts_buckets else shape.esp_size)
        rows = shape.sent_rows * shape.esp_size // shape.sharers
        moved = ITEM * dim * (2 * (packed + to.top_k * gated) + 4 * rows)  # as `layer_seconds` counts them
        computed = 6 * matmul(rows, hidden // shape.esp_size, dim) + 3 * matmul(gated, shape.experts, dim)
        seconds.append((moving(shape, cluster, to.gather), computed + cluster.prices.memory(moved)))
    return np.array(seconds)


def memory(layer: Layer, to: Assumed = BASE) -> float:
    """Return a device's bytes under the baseline: weights, gradients, what a backward needs, and rows that leave.

    It needs tokens before and after the gather, rows that arrived (and their gradient), both hidden rows (and one's).
    """
    _, (_, shards), tokens, dim, hidden, factor = layer
    slots = to.top_k * factor * tokens
    return ITEM * (4 * dim * hidden / shards + dim * (tokens + shards * (tokens + 3 * slots)) + 3 * slots * hidden)


@functools.cache
def runs(place: str, groups: tuple[int, int], to: Assumed = BASE) -> list[Layer]:
    """Return the combinations of table III that fit a GPU's memory, each N as often as B and L give it."""
    sizes = itertools.product(*SIZES.values())
    layers = ((place, groups, batch * length, *others) for batch, length, *others in sizes)
    return [layer for layer in layers if memory(layer, to) <= machine(place).memory_bytes]


@functools.cache
def gains(place: str, groups: tuple[int, int], to: Assumed = BASE) -> np.ndarray:
    """Return [n, 3]: the baseline's seconds over those of S1, of S2 and of what algorithm 1 takes, of all runs."""
    seconds = np.array([price(layer, to) for layer in runs(place, groups, to)])
    base, s1, s2 = seconds.sum(axis=2).T
    return base[:, None] / np.stack([s1, s2, np.where(seconds[:, 1, 0] <= seconds[:, 2, 0], s1, s2)], axis=1)


def gains_of(testbed: str, to: Assumed = BASE, groups=TABLE_4) -> list[np.ndarray]:
    """Return `gains` of a testbed's places ('': all) and of these groups."""
    return [gains(place, pair, to) for place in PLACES if place.startswith(testbed) for pair in groups]


EXPERIMENTS = {
    "K = 1, the default of DeepSpeed v0.8.1": BASE._replace(top_k=1),
    "GeForce copies through host memory, as measured": BASE._replace(peers=False),
    "N_MP, N_ESP of 2 and 4 alone, as in table IV": BASE._replace(groups=TABLE_4),
}
TABLES = Tables("parm", "modelled", EXPERIMENTS)


def distribution(label: str, values: np.ndarray, ours: list) -> Found:
    """Return a figure that shows how many layers have which value."""

    def draw(table, axes):
        axes.hist(values, bins=20, edgecolor="white")
        axes.set(xlabel=label, ylabel="layers")

    return Found([(len(values), *np.quantile(values, (0, 0.1, 0.5, 0.9, 1)))], ours, draw=draw)


@TABLES.add()
def table_3(inputs, to=BASE):
    """Count the layers that fit a GPU's memory, and return Parm's speed-ups of them."""
    to = to._replace(level=inputs.level)
    rows = [(p, 1458, *(sum(len(runs(p, pair)) for pair in of) for of in (GROUPS, TABLE_4))) for p in PLACES]
    speedups = np.concatenate(gains_of("", to, to.groups))[:, 2]
    return Found(rows, [len(speedups), speedups])


@TABLES.add()
def table_4(inputs, to=BASE):
    """Average speed-ups of S1, S2 and Parm by place and groups."""
    to = to._replace(level=inputs.level)
    cases, ours = [(place, pair, gains(place, pair, to)) for place in PLACES for pair in TABLE_4], []
    for testbed in "AB":
        cells = gains_of(testbed, to)
        saa, aas = np.concatenate(cells), np.concatenate(gains_of(testbed, to._replace(gather="aas")))
        worse = 100 * (saa[:, 2] / saa[:, :2].min(axis=1)).mean() - 100
        ours += [*np.array([gain.mean(axis=0) for gain in cells]).T, worse, 100 * (saa[:, 1] / aas[:, 1]).mean() - 100]
    best = max(np.divide(*gain.mean(axis=0)[1::-1]) for gain in gains_of("A", to))
    return Found([(place, *pair, len(gain), *gain.mean(axis=0)) for place, pair, gain in cases], [*ours, best])


@TABLES.add()
def choice(inputs, to=BASE):
    """Say how often S2 is shorter, and how often algorithm 1 takes the shorter one."""
    to = to._replace(level=inputs.level)
    rows = []
    for place in PLACES:
        speedups = np.concatenate([gains(place, pair, to) for pair in GROUPS if pair[0] > 1])
        s1, s2, taken = speedups.T
        best = np.maximum(s1, s2)
        rows.append((place, len(speedups), *(100 * part.mean() for part in (s2 > s1, taken >= best, best / taken - 1))))
    layers = [layer for place in PLACES for pair in TABLE_4 for layer in runs(place, pair)]
    _, s1, s2 = np.array([price(layer, to).sum(axis=1) for layer in layers]).T
    best = int(np.argmin(s2 / s1))
    note = f"S2 gains most at P, (N_MP, N_ESP), N, M, H, f = {layers[best]}: {s2[best]:.4g} s for {s1[best]:.4g} s."
    return Found(rows, [[row[at] for row in rows] for at in (2, 3)], (note,))


@TABLES.add()
def figure_1(inputs, to=BASE):
    """Return which part of a layer's time under the baseline is communication."""
    to = to._replace(level=inputs.level)
    parts = np.array([price(layer, to)[0] for groups in GROUPS for layer in runs("B, 32", groups, to)])
    shares = 100 * parts[:, 0] / parts.sum(axis=1)
    return distribution("communication, % of a layer's time", shares, [shares.mean()])


@TABLES.add(experiments={})
def figure_6(inputs):
    """Fit lines to the prices of collectives by bytes."""
    points, sizes = {}, itertools.product((1024, 4096, 16384), SIZES["M"])
    for (tokens, dim), place in itertools.product(sizes, ("A", "B, 32")):
        shape = shapes(place, (4, 4), tokens, ITEM * dim, 2.4)[2]
        (send, gather), saa = layer_transfers(shape, "aas")[0], layer_transfers(shape)[0][1:]
        for name, moves, x in (
            ("EP&ESP-AlltoAll", [send._replace(calls=1)], send.elements),
            ("MP-AllGather", [gather], gather.elements),
            ("both at once (SAA)", saa, send.elements),
        ):
            seconds = transfer_seconds(moves, shape, machine(place, inputs.level), "figure 6")
            points.setdefault((place, name), []).append((x, seconds))
    fits = {key: fit_alpha_beta(*zip(*measured, strict=True)) for key, measured in points.items()}
    rows = [(*key, 1e6 * fit.alpha, 1e9 * fit.beta, fit.r2) for key, fit in fits.items()]
    series = {", ".join(key): sorted(measured) for key, measured in points.items()}
    draw = curves(series, xscale="log", yscale="log", xlabel="bytes", ylabel="seconds")
    return Found(rows, [min(row[-1] for row in rows)], draw=draw)


@TABLES.add()
def figure_7(inputs, to=BASE):
    """Return how Parm's speed-ups on 32 GPUs are distributed."""
    to = to._replace(level=inputs.level)
    speedups = gains("B, 32", (4, 4), to)[:, 2]
    return distribution("speed-up over DeepSpeed-MoE", speedups, [speedups.mean(), 100 * (speedups > 4).mean()])


LENGTHS = {"BERT-Base": 512, "GPT-2": 1024}


@TABLES.add()
def table_5(inputs, to=BASE):
    """Time an iteration of BERT-Base and GPT-2 under the baseline and under Parm.

    That is 12 blocks of M = 768 and F = 3,072, and V = 50,304; [3], seconds by schedule, of which Parm takes the least.
    """
    to = to._replace(level=inputs.level)
    rows = []
    for (model, length), place in itertools.product(LENGTHS.items(), ("A", "B, 32")):
        tokens, dim, vocabulary, cluster = 4 * length, 768, 50304, machine(place, to.level, to.peers)
        layer = price((place, (4, 4), tokens, dim, 4 * dim, 1.2), to).sum(axis=1)
        sizes = {"model_dim": dim, "length": length, "moe_every": 1, "matrices": 2, "dense_hidden_dim": 4 * dim}
        attention = 3 * preceding_seconds(cluster, tokens / 4, ITEM, **sizes)
        head = 3 * cluster.prices.matmul("f32", 1, tokens, dim, vocabulary / 4)
        summed = Transfer("all_reduce", "model", ITEM * tokens * dim, 2)
        gradients = Transfer("all_reduce", "expert_across", ITEM * dim * (12 * 4 * dim + vocabulary) // 4)
        shape = shapes(place, (4, 4), tokens, ITEM * dim, to.top_k * 1.2)[1]
        block, once = (transfer_seconds([move], shape, cluster, "table V") for move in (summed, gradients))
        base, *others = 12 * (layer + attention + block) + head + once
        rows.append((model, place, base, min(others), base / min(others)))
    return Found(rows, [[row[-1] for row in rows]])
