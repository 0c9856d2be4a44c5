"""Pro-Prophet's tables and figures (section VI): simulated over a trace of loads, on its three kinds of nodes.

Plans come from the iteration before, as there. The paper names no precision, sequence length or vocabulary. Rows are
in float16, whose rates the testbed's GPUs have in the cluster files; in float32, PyTorch's default, no end of a row
moves by a fifth.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from typing import NamedTuple

import numpy as np

from moe_jax.cluster.collectives import Links
from moe_jax.cluster.fits import assumed
from moe_jax.papers.fastermoe import shadows
from moe_jax.papers.loads import fit_loads, sharpened
from moe_jax.papers.systems import (
    DEEPSPEED,
    FASTERMOE,
    PRO_PROPHET,
    VOCABULARY,
    Model,
    Setting,
    Step,
    System,
    as_reached,
    machine,
    run,
)
from moe_jax.papers.table import Found, Inputs, Tables, bars, lines
from moe_jax.planning.pro_prophet import ProProphet
from moe_jax.planning.topk_all import TopKAll

# table III: layers, embedding, hidden
SIZES = {"S": (12, 512, 1024), "M": (12, 1024, 2048), "L": (12, 2048, 4096), "DS": (24, 512, 1024),
         "DM": (24, 1024, 2048)}  # fmt: skip
MODELS = {
    name: Model(name=f"MoE-GPT-{name}", layers=layers, model_dim=dim, hidden_dim=hidden)
    for name, (layers, dim, hidden) in SIZES.items()
}
WHOLE = "the head, and sums of dense gradients after the backward (as the engines of DeepSpeed and FastMoE do)"
COPIES = "GPUs without peer access, whose copies pass through the host: links as measured on such nodes"
SKEW = "figure 3's skew (3 of 16 experts with half of the choices) instead of the trace's"
SPAN = "Ours are of all 500 iterations of the trace, the text's of the first 100 of a run."
TABLES = Tables("pro_prophet", "simulated", {SKEW: "skew", WHOLE: "whole", COPIES: "copies"}, lambda *_: (SPAN,))
PLANNER = System(planner="pro_prophet", options=(ProProphet(scheduler=False),))
SCHEDULER = dataclasses.replace(PLANNER, hiding="pro_prophet")
TOP_2, TOP_3 = (System(planner="topk_all", options=(TopKAll(top_k=count),)) for count in (2, 3))
PLANNED = ("FasterMoE", "Pro-Prophet")
OVER_DEEPSPEED = "speed-up over DeepSpeed-MoE"
BARS = bars(OVER_DEEPSPEED, *PLANNED)
COMPARED = {"DeepSpeed-MoE": DEEPSPEED, "FasterMoE": FASTERMOE, "Pro-Prophet": PRO_PROPHET}


class Row(NamedTuple):
    """A model on nodes of a cluster, one expert a GPU (section VI); `tokens` of an iteration."""

    top_k: int
    model: str = "M"
    cluster: str = "hpwnv"
    nodes: int = 4
    tokens: int = 16384


def setting_of(inputs: Inputs, row: Row, change: str = "") -> Setting:
    """Return a row's setting; `change`: one of `TABLES.experiments`."""
    cluster = machine(row.cluster, row.nodes, inputs.level)
    if change == "copies":
        cluster = as_reached(cluster)
    sizes = {"tokens": row.tokens, "top_k": row.top_k, "experts": cluster.devices}
    trace = inputs.loads(row.top_k)
    if change == "skew":  # of 16 experts, as the figure has them: more or fewer would be another skew
        of_16, _ = fit_loads(trace, devices=16, experts=16, choices=row.tokens * row.top_k // 16)
        trace = sharpened(of_16, 3 / 16, 0.5)
    return Setting(cluster=cluster, model=MODELS[row.model], trace=trace, **sizes)


@functools.cache
def step_of(inputs: Inputs, system: System, row: Row, change: str = "") -> Step:
    """Return a system's step; models whose layers are of equal sizes differ in their number alone."""
    first = next(name for name, sizes in SIZES.items() if sizes[1:] == SIZES[row.model][1:])
    if change == "whole":
        setting = setting_of(inputs, row)
        own, devices, bandwidth = setting.model, setting.devices, setting.cluster.bandwidth("sums of gradients")
        dense = 4 * own.layers * own.model_dim**2 + VOCABULARY * own.model_dim  # of attention and embeddings, on a ring
        outside = setting.head_seconds + 2 * setting.item * dense * (1 - 1 / devices) / bandwidth
        return dataclasses.replace(step_of(inputs, system, row), outside=outside)
    if row.model == first:
        return run(system, setting_of(inputs, row, change))
    return dataclasses.replace(step_of(inputs, system, row._replace(model=first), change), model=MODELS[row.model])


def speedups(inputs: Inputs, row: Row, change: str = "") -> np.ndarray:
    """Return [3]: FasterMoE and Pro-Prophet over DeepSpeed-MoE, and Pro-Prophet over the better of the two."""
    plain, shadowed, ours = (step_of(inputs, of, row, change).iterations.mean() for of in COMPARED.values())
    return np.array([plain / shadowed, plain / ours, min(plain, shadowed) / ours])


def speedups_by_model(inputs: Inputs, change: str, table: str, models: str, place: Row) -> Found:
    """Return both systems over DeepSpeed-MoE on one cluster, each K and model a row; cells of the text are in order."""
    cases = [place._replace(top_k=k, model=model) for k in (1, 2) for model in models.split()]
    ours = [speedups(inputs, case, change)[:2] for case in cases]
    stated = zip(*(TABLES.texts[table]["claims"][f"{system} over DeepSpeed-MoE"] for system in PLANNED), strict=True)
    told = zip(cases, stated, ours, strict=True)
    rows = [(case.top_k, MODELS[case.model].name, *paper, *cells) for case, paper, cells in told]
    shadowed, planned = np.array(ours).T
    claims = shadowed, planned, planned / shadowed
    return Found(rows, claims, (setting_of(inputs, place._replace(top_k=2)).fitted()[1],))


SHARES = ("balancing", "search", "place", "reduce", "others")
RUNS = 9  # of a search that is timed
RELEASED = "the search as FasterMoE's release does it: counts gathered from all GPUs, a loop in PyTorch"
TORCH_SEARCH = 90e-6  # s of a layer's on the host: scripts/bench/torch_search.py, torch 2.13, 2-core x86 VM, 2026-11-26


def search_seconds(setting: Setting) -> float:
    """Return the seconds of FasterMoE's search for one layer (its algorithm 1) on this host, the median of `RUNS`."""
    loads, spent = setting.fitted()[0].loads[:1, :1], []
    for _ in range(RUNS):
        began = time.perf_counter()
        shadows(setting, loads, artifact=False)
        spent.append(time.perf_counter() - began)
    return float(np.median(spent))


def released_seconds(setting: Setting) -> float:
    """Return the seconds of the same search in FasterMoE's release (`global_policy` of github.com/laekov/fastmoe).

    Besides the loop the host waits for an all-gather, a copy of each GPU's counts (PyTorch's list form of it) and one
    to the host, each at PyTorch's price of a launch, the list's high one.
    """
    cluster, devices = setting.cluster, setting.devices
    start = Links(cluster, devices, cluster.devices_per_node).start_up(True)
    return TORCH_SEARCH + start + (devices + 1) * assumed("launch", "high")


@TABLES.add(experiments=TABLES.experiments | {RELEASED: "released"})
def table_1(inputs, change=""):
    """Return the shares of FasterMoE's step that searching, placing and reducing take."""
    rows, searched, stated = [], search_seconds, TABLES.texts["table_1"]["claims"].values()
    if change == "released":
        change, searched = "", released_seconds
    for model, *paper in zip(SIZES, *stated, strict=True):
        row = Row(1, model)
        step = step_of(inputs, FASTERMOE, row, change)
        parts = np.array([searched(setting_of(inputs, row)), *(step.parts[p].mean() for p in SHARES[2:4])])
        shares = 100 * parts / (step.iterations.mean() / step.model.layers + parts[0])
        rows.append((MODELS[model].name, *paper, shares.sum(), *shares, 100 - shares.sum()))
    return Found(rows, [*zip(*rows, strict=True)][6:])


@TABLES.add(BARS)
def table_4(inputs, change=""):
    """Compare both systems with DeepSpeed-MoE on 4 HPNV nodes."""
    return speedups_by_model(inputs, change, "table_4", "S M L DS DM", Row(1, cluster="hpnv"))


@TABLES.add(BARS)
def table_5(inputs, change=""):
    """Compare both systems with DeepSpeed-MoE on 2 LPWNV nodes."""
    return speedups_by_model(inputs, change, "table_5", "S M DS DM", Row(1, cluster="lpwnv", nodes=2, tokens=4096))


CASES = ((4, 1), (8, 1), (4, 2), (8, 2))  # nodes and K of figure 10's captions


@TABLES.add(bars("speed-up", *(f"{name} over DeepSpeed-MoE" for name in PLANNED)))
def figure_10(inputs, change=""):
    """Compare both systems with DeepSpeed-MoE on 4 and 8 HPWNV nodes."""
    cases = [Row(k, model, nodes=nodes, tokens=4096 * nodes) for nodes, k in CASES for model in SIZES]
    rows = []
    for case in cases:
        rows.append((case.top_k, MODELS[case.model].name, case.nodes, *np.roll(speedups(inputs, case, change), 1)))
    best = [[row[3] for row in rows if (row[2], row[0]) == case] for case in CASES]
    plain = [[row[5] for row in rows if row[0] == top_k] for top_k in (1, 2)]
    shadowed = np.mean([row[5] / row[4] for row in rows if row[0] == 1])
    return Found(rows, [*([end for of in groups for end in (min(of), max(of))] for groups in (best, plain)), shadowed])


@TABLES.add(lines("layer", *(f"{name} over DeepSpeed-MoE" for name in PLANNED), by="K", ylabel="speed-up"))
def figure_11(inputs, change=""):
    """Compare both systems with DeepSpeed-MoE layer by layer."""
    rows = []
    for top_k in (1, 2):
        steps = (step_of(inputs, system, Row(top_k), change) for system in COMPARED.values())
        plain, shadowed, ours = (step.layers.mean(axis=0) for step in steps)
        layers = zip(plain / shadowed, plain / ours, shadowed / ours, strict=True)
        rows += [(top_k, layer, *cells) for layer, cells in enumerate(layers)]
    return Found(rows, np.array(rows).T[3:])


@TABLES.add(lines("sample", *(f"{name}, ms" for name in COMPARED), ylabel="ms of an iteration"))
def figure_12(inputs, change=""):
    """Time every sample under each system."""
    times = [1e3 * step_of(inputs, system, Row(1), change).iterations for system in COMPARED.values()]
    rows = [(sample, *cells) for sample, cells in enumerate(zip(*times, strict=True), 1)]
    return Found(rows, [(times[1] / times[2]).mean()])


@TABLES.add(experiments={})
def figure_13(inputs):
    """Return how far the paper's formula of an exchange (equation 1) is from the exchange priced link by link."""
    records, row = step_of(inputs, DEEPSPEED, Row(1)).records, setting_of(inputs, Row(1))
    sent, rows = records.received * (row.model.model_dim * row.item), []
    for name, seconds in (
        ("all-to-all, equation 1", sent.max(axis=2) / row.cluster.bandwidth("figure_13")),
        ("all-to-all, the planners' price", Links.of(row.cluster, sent.shape[-1], "figure_13").received(sent)),
    ):
        error = 100 * abs(seconds / records.exchange - 1)
        rows.append((name, error.mean(), np.percentile(error, 95)))
    return Found(rows, [row[1] for row in rows])


@TABLES.add()
def figure_14(inputs, change=""):
    """Return what planner, scheduler and the planner that knows the scheduler add, each over the one before it."""
    rows = []
    for top_k in (1, 2):
        stages = (DEEPSPEED, PLANNER, SCHEDULER, PRO_PROPHET)
        times = np.array([step_of(inputs, system, Row(top_k), change).iterations.mean() for system in stages])
        rows.append((top_k, *(times[:-1] / times[1:])))
    by_stage = np.array(rows).T[1:]
    return Found(rows, [*by_stage, *by_stage.mean(axis=1)])


@TABLES.add()
def figure_15(inputs, change=""):
    """Return the planner against replicating the two or three heaviest experts everywhere."""
    rows = []
    for top_k in (1, 2):
        planned, *fixed = (step_of(inputs, of, Row(top_k), change).iterations for of in (PLANNER, TOP_2, TOP_3))
        rows.append((top_k, *((policy / planned).mean() for policy in fixed)))
    first, second = (row[1:] for row in rows)
    return Found(rows, [*first, second])


@TABLES.add(lines("layer", "ratio", by="K, model", ylabel="RB over FasterMoE's"))
def figure_16(inputs, change=""):
    """Return RB of the planner over FasterMoE's, layer by layer; RB: the spread of loads before over after."""
    rows = []
    for top_k, model in itertools.product((1, 2), "SML"):
        steps = (step_of(inputs, system, Row(top_k, model), change) for system in COMPARED.values())
        spreads = (np.maximum(step.records.computed.std(axis=2).mean(axis=0), 1e-9) for step in steps)
        for layer, (before, shadowed, ours) in enumerate(zip(*spreads, strict=True)):
            rows.append((f"{top_k}, {model}", layer, before / shadowed, before / ours, shadowed / ours))
    return Found(rows, [max(row[4] for row in rows)])
