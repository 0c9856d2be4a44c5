"""Parm (INFOCOM 2024): its tables and figures, priced on its two testbeds.

A layer's seconds are its exchanges by `cluster/layer_seconds.py` on the links of configs/cluster/parm_{a,b}.gin, and
its matmuls and moved rows by the prices of the GPU, as are start-ups. Letters: docs/notation.md.

Assumed where the text is silent: K = 2 (GShard); float32 (PyTorch's default); E = N_EP, as section VI-D's 2 and 8
experts on 8 and 32 GPUs are with N_ESP = 4; P of {8, 16, 32} on testbed B, and 8 on A; N_MP and N_ESP are 4 in figures
1, 6 and 7 and in table V, which has 4 sequences of an MP group and sums dense gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moe_jax.cluster import Cluster, read_cluster
from moe_jax.cluster.cluster import FOLDER, cluster_of
from moe_jax.cluster.fits import fit_alpha_beta
from moe_jax.cluster.layer_seconds import Transfer, layer_transfers, moving_seconds, preceding_seconds, transfer_seconds
from moe_jax.cluster.prices import Constants, Prices
from moe_jax.cluster.targets import device_named, read_device
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.schedule import LayerSizes
from moe_jax.moe.schedules.parm import layer_shape
from moe_jax.papers.pictures import lines
from moe_jax.papers.table import Inputs, Table, Tables, compare, ends, range_of
from moe_jax.parallel.mesh import MeshConfig, build_mesh

PLACES = {"A": ("parm_a", 1), "B, 8": ("parm_b", 2), "B, 16": ("parm_b", 4), "B, 32": ("parm_b", 8)}  # file, nodes
ITEM, SCHEDULES, COLUMNS = 4, ("deepspeed", "s1", "s2"), ("S1", "S2", "Parm")  # bytes of a number; of `gains`
SIZES = {"B": (2, 4, 8), "L": (512, 1024, 2048), "M": (1024, 2048, 4096), "H": (1024, 2048, 4096), "f": (1.2, 2.4)}
Layer = tuple[str, tuple[int, int], int, int, int, float]  # place, (N_MP, N_ESP), N of an MP group, M, H, f
GROUPS = tuple(itertools.product((1, 2, 4), (1, 2, 4)))  # N_MP, N_ESP
TABLE_4 = tuple(groups for groups in GROUPS if min(groups) > 1)
COPIES = {  # bytes/s between two GPUs without peer access (p2pBandwidthLatencyTest, P2P=Disabled, unidirectional)
    "parm_a": 22.2e9,  # RTX 4090, PCIe 4.0 x16: github.com/NVIDIA/nccl issue 814, median of six GPUs' pairs
    "parm_b": 5.71e9,  # RTX 2080 Ti, PCIe 3.0 x16: test report of two such GPUs rented from AutoDL, 2025-06-05
}


class Assumed(NamedTuple):
    """What the text leaves open; an experiment changes one of it. peers: GPUs reach each other, or copy by `COPIES`."""

    top_k: int = 2
    peers: bool = True
    gather: str = "saa"
    level: str = "middle"  # of assumed prices
    groups: tuple = GROUPS  # of table III


BASE = Assumed()
EXPERIMENTS = {
    "K = 1, the default of DeepSpeed v0.8.1": BASE._replace(top_k=1),
    "GeForce copies through host memory, as measured": BASE._replace(peers=False),
    "N_MP, N_ESP of 2 and 4 alone, as in table IV": BASE._replace(groups=TABLE_4),
}


@functools.cache
def machine(place: str, level: str = "middle", peers: bool = True) -> Cluster:
    """Return a testbed: sizes, links and memory of its file, start-ups and float32 FLOP/s of its GPU's prices."""
    name, nodes = PLACES[place]
    preset = read_cluster(FOLDER / f"{name}.gin")
    prices = Prices(read_device(device_named(preset.device)), Constants(level=level))
    given = ("name", "devices_per_node", "intra_bandwidth", "inter_bandwidth", "cards_per_node", "memory_bytes")
    own = {field: getattr(preset, field) for field in given} | ({} if peers else {"intra_bandwidth": COPIES[name]})
    return dataclasses.replace(cluster_of(prices), nodes=nodes, flops=prices.reached("f32"), **own)


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


def table(title: str, columns: tuple, rows: list, paper: dict, figures: Callable, notes=(), draw=None) -> Table:
    """Return a modelled table, its claims with all experiments, and notes with our figures by low and high prices.

    paper and figures: as of `compare`; a change is another `Assumed`.
    """
    low, high = (map(ends, figures(BASE._replace(level=level))) for level in ("low", "high"))
    ranges = (
        f"{name}: {range_of(cheap)} by low prices, {range_of(dear)} by high ones."
        for name, cheap, dear in zip(paper, low, high, strict=True)
    )
    return Table(title, "modelled", columns, rows, compare(paper, figures, EXPERIMENTS), (*notes, *ranges), draw)


def distribution(title: str, label: str, values: np.ndarray, paper: dict, figures: Callable) -> Table:
    """Return the table of a figure that shows how many layers have which value."""

    def draw(axes):
        axes.hist(values, bins=20, edgecolor="white")
        axes.set(xlabel=label, ylabel="layers")

    columns = ("layers", "least", "a tenth is below", "median", "a tenth is above", "largest")
    row = (len(values), *np.quantile(values, (0, 0.1, 0.5, 0.9, 1)))
    return table(f"{title}: {label}", columns, [row], paper, figures, (), draw)


def table_3(inputs: Inputs) -> Table:
    def figures(to=BASE):
        found = np.concatenate(gains_of("", to, to.groups))[:, 2]
        return len(found), found.min(), found.max()

    places = inputs.track(PLACES, "table III")
    rows = [(p, 1458, *(sum(len(runs(p, pair)) for pair in of) for of in (GROUPS, TABLE_4))) for p in places]
    columns = ("testbed, P", "combinations", "valid", "of these N_MP, N_ESP as in table IV")
    paper = {"valid runs": 1296, "least speed-up of a layer": 1.13, "largest speed-up of a layer": 5.77}
    notes = (
        "Table III spans 4,374. Runs are summed over four places: 1,296 is 4 x 324, the layers of figure 1.",
        "Buckets are full: a capacity bounds them, and no trace of loads is read.",
    )
    return table("Table III: runs that fit a GPU's memory", columns, rows, paper, figures, notes)


def table_4(inputs: Inputs) -> Table:
    def figures(to=BASE):
        for testbed in inputs.track(papers, "table IV"):
            cells = gains_of(testbed, to)
            yield from np.array([gain.mean(axis=0) for gain in cells]).T
            saa, aas = np.concatenate(cells), np.concatenate(gains_of(testbed, to._replace(gather="aas")))
            yield 100 * (saa[:, 2] / saa[:, :2].min(axis=1)).mean() - 100
            yield 100 * (saa[:, 1] / aas[:, 1]).mean() - 100
        yield max(np.divide(*gain.mean(axis=0)[1::-1]) for gain in gains_of("A", to))

    papers = {
        "A": ((2.1, 4.19), (1.99, 4.12), (2.1, 4.2), 8, 1.09),
        "B": ((2.46, 5.77), (2.2, 5.38), (2.46, 5.77), 10.5, 1.12),
    }
    means = (f"{name}, mean of a cell" for name in COLUMNS)
    names = (*means, "Parm over the worse of S1 and S2, %", "S2 by SAA over S2 by AAS, %")
    paper = {f"{name}, testbed {at}": its for at in papers for name, its in zip(names, papers[at], strict=True)}
    paper["S2's 3.72 over S1's 3.21 in a cell of A"] = 3.72 / 3.21
    cases = [(place, pair, gains(place, pair)) for place in PLACES for pair in TABLE_4]
    rows = [(place, *pair, len(gain), *gain.mean(axis=0)) for place, pair, gain in cases]
    columns = ("testbed, P", "N_MP", "N_ESP", "layers", *COLUMNS)
    return table("Table IV: mean speed-ups", columns, rows, paper, figures)


def choice(inputs: Inputs) -> Table:
    def hits(place, to=BASE):
        found = np.concatenate([gains(place, pair, to) for pair in GROUPS if pair[0] > 1])
        s1, s2, taken = found.T
        best = np.maximum(s1, s2)
        return len(found), *(100 * value.mean() for value in (s2 > s1, taken >= best, best / taken - 1))

    def figures(to=BASE):
        return np.array([hits(place, to)[1:3] for place in PLACES]).T

    names = ("S2 is shorter, % of layers", "equations 13 and 14 are right, %", "they lose, % of time")
    layers = [layer for place in inputs.track(PLACES, "places") for pair in TABLE_4 for layer in runs(place, pair)]
    _, s1, s2 = np.array([price(layer).sum(axis=1) for layer in layers]).T
    best = int(np.argmin(s2 / s1))
    notes = (
        f"S2 gains most at P, (N_MP, N_ESP), N, M, H, f = {layers[best]}: {s2[best]:.4g} s for {s1[best]:.4g} s.",
        "On A none: gathers share a device's one link with SAA, so both wait for two exchanges of equal size and one "
        "gather, of N M under S1 and of K f N M under S2, more in all of table III.",
        "How often the choice is right in layers that were timed on CPU devices: docs/results.md, Schedules.",
    )
    rows, paper = [(place, *hits(place)) for place in PLACES], dict.fromkeys(names[:2])
    return table("Algorithm 1, N_MP > 1", ("testbed, P", "layers", *names), rows, paper, figures, notes)


def figure_1(inputs: Inputs) -> Table:
    del inputs

    def shares(to=BASE):
        parts = np.array([price(layer, to)[0] for layer in runs("B, 32", (4, 4), to)])
        return 100 * parts[:, 0] / parts.sum(axis=1)

    label = "communication, % of a layer's time under the baseline"
    return distribution("Figure 1", label, shares(), {"mean, %": None}, lambda to=BASE: [shares(to).mean()])


def figure_6(inputs: Inputs) -> Table:
    points, sizes = {}, itertools.product((1024, 4096, 16384), SIZES["M"])
    for (tokens, dim), place in inputs.track(itertools.product(sizes, ("A", "B, 32")), "collectives"):
        shape = shapes(place, (4, 4), tokens, ITEM * dim, 2.4)[2]
        (send, gather), saa = layer_transfers(shape, "aas")[0], layer_transfers(shape)[0][1:]
        for name, moves, x in (
            ("EP&ESP-AlltoAll", [send._replace(calls=1)], send.elements),
            ("MP-AllGather", [gather], gather.elements),
            ("both at once (SAA)", saa, send.elements),
        ):
            seconds = transfer_seconds(moves, shape, machine(place), "figure 6")
            points.setdefault((place, name), []).append((x, seconds))
    fits = {key: fit_alpha_beta(*zip(*own, strict=True)) for key, own in points.items()}
    columns = ("testbed, P", "collective", "alpha, us", "beta, ns/byte", "R^2")
    rows = [(*key, 1e6 * fit.alpha, 1e9 * fit.beta, fit.r2) for key, fit in fits.items()]
    said = "Prices are lines in bytes, so R^2 says nothing of a machine; of measured ones: docs/results.md, Schedules."
    series = {", ".join(key): sorted(own) for key, own in points.items()}
    draw = lines(series, xscale="log", yscale="log", xlabel="bytes", ylabel="seconds")
    title, least = "Figure 6: alpha and beta, N_MP = N_ESP = 4", min(fit.r2 for fit in fits.values())
    return table(title, columns, rows, {"R^2, the least": None}, lambda to=BASE: [least], (said,), draw)


def figure_7(inputs: Inputs) -> Table:
    del inputs

    def speedups(to=BASE):
        return gains("B, 32", (4, 4), to)[:, 2]

    def figures(to=BASE):
        return speedups(to).mean(), 100 * (speedups(to) > 4).mean()

    label, paper = "Parm's speed-up over DeepSpeed-MoE on 32 GPUs", {"mean": 4.91, "above 4, % of layers": 89}
    return distribution("Figure 7", label, speedups(), paper, figures)


def iteration(place: str, length: int, to: Assumed) -> np.ndarray:
    """Return [3], seconds of an iteration by schedule: 12 blocks of M = 768 and F = 3,072, and V = 50,304."""
    tokens, dim, vocabulary, cluster = 4 * length, 768, 50304, machine(place, to.level, to.peers)
    layer = price((place, (4, 4), tokens, dim, 4 * dim, 1.2), to).sum(axis=1)
    sizes = {"model_dim": dim, "length": length, "moe_every": 1, "matrices": 2, "dense_hidden_dim": 4 * dim}
    attention = 3 * preceding_seconds(cluster, tokens / 4, ITEM, **sizes)
    head = 3 * cluster.prices.matmul("f32", 1, tokens, dim, vocabulary / 4)
    summed = Transfer("all_reduce", "model", ITEM * tokens * dim, 2)
    gradients = Transfer("all_reduce", "expert_across", ITEM * dim * (12 * 4 * dim + vocabulary) // 4)
    shape = shapes(place, (4, 4), tokens, ITEM * dim, to.top_k * 1.2)[1]
    block, once = (transfer_seconds([move], shape, cluster, "table V") for move in (summed, gradients))
    return 12 * (layer + attention + block) + head + once


def table_5(inputs: Inputs) -> Table:
    def seconds(to=BASE):  # of the baseline and of the shorter of S1 and S2, [cases, 2]
        found = [iteration(place, length, to) for length, place in cases.values()]
        return np.array([(base, min(others)) for base, *others in found])

    models = {"BERT-Base": 512, "GPT-2": 1024}
    cases = {(model, place): (models[model], place) for model in models for place in ("A", "B, 32")}
    found = zip(inputs.track(cases, "iterations"), seconds(), strict=True)
    rows = [(*case, base, best, base / best) for case, (base, best) in found]
    columns = ("model", "testbed, P", "DeepSpeed-MoE, s", "Parm, s", "speed-up")
    paper = {"speed-up": (2.98, 3.15)}
    return table("Table V: an iteration", columns, rows, paper, lambda to=BASE: [np.divide(*seconds(to).T)])


TABLES: Tables = {of.__name__: of for of in (table_3, table_4, choice, figure_1, figure_6, figure_7, table_5)}
