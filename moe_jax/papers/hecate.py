"""Hecate's figures: what its text says of each, and what the one cost model says of the same models and clusters.

Section 1: claims; 5.2: figures 9, 10; 5.3: 11 to 13; 5.4: 14, 15; 4.2: the overlap degree t. A figure's other values
stand in no text. Where the text gives no cluster (13 to 15) it is B, as in 11 and 12. An experiment changes a `Row`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import scipy.stats

from moe_jax.cluster import read_cluster
from moe_jax.cluster.fits import assumed
from moe_jax.papers.loads import fit_loads
from moe_jax.papers.systems import (
    DEEPSPEED,
    FASTERMOE,
    VOCABULARY,
    Model,
    Setting,
    Step,
    System,
    as_reached,
    cost_of,
    machine,
    planner_of,
    run,
)
from moe_jax.papers.table import Found, Inputs, Tables, bars, lines
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.cost import Cost
from moe_jax.planning.hecate import Hecate, HecatePlanner


@dataclasses.dataclass(frozen=True)
class Row:
    """A model on so many nodes of a cluster, under a change of `CHANGES`."""

    cluster: str
    model: Model
    nodes: int = 4
    batch: int | None = None  # sequences of a device; None: the largest that fits every system
    change: str | None = None
    every: int = 5  # of the trace, so many-th samples are judged


Change = Callable[[Row], Row]
MODELS = tuple(  # table 1, and section 5.1: d_ffn twice d_model
    Model(name=name, layers=layers, model_dim=dim, hidden_dim=2 * dim, length=length)
    for name, dim, length, layers in (
        ("GPT-MoE-S", 768, 2048, 12),
        ("GPT-MoE-L", 1536, 2048, 12),
        ("BERT-MoE", 1024, 512, 12),
        ("BERT-MoE-Deep", 1024, 512, 24),
    )
)
PER_DEVICE, TOP_K = 2, 2  # experts of a device
# bytes of a parameter, its gradient and Adam's state, which is six times 16 bits (2.3), and as much in float32
BYTES, FLEXMOE_SLOTS = 16, 4  # slots: PlannerConfig's default
FLOAT32_RATE = {"hecate_a": 15.7 / 125, "hecate_b": 19.5 / 312}  # of float16's: NVIDIA's data sheets
V100_MEMORY = 900e9  # bytes/s: likewise, SXM2
BASELINES = ("FasterMoE", "SmartMoE", "FlexMoE")
COMPARED = (*BASELINES, "Hecate")
ALL = ("EP", *COMPARED, "Hecate-RM")
PARTS = ("sharding alone", "materialization alone")
INTERVALS = {f"resharded every {steps}": steps for steps in (10, 25, 50, 100)}  # the text names the first and the last
GRID_A = tuple(Row("hecate_a", model, nodes) for nodes in (2, 4) for model in MODELS)
GRID_B = tuple(Row("hecate_b", model) for model in MODELS)
SMALL, *_, DEEP = GRID_B


def _hecate(materialize: bool = True, shard_every: int = 100) -> System:
    """Return Hecate without the optional calibration (4.2), which the evaluation does not mention."""
    options = (Hecate(calibrate=False, materialize=materialize, shard_every=shard_every),)
    return System(planner="hecate", options=options, predictor="last", hiding="hecate", by_node=True)


SYSTEMS = {
    "EP": DEEPSPEED,
    "FasterMoE": FASTERMOE,
    "SmartMoE": System(planner="smartmoe"),
    "FlexMoE": System(planner="flexmoe", by_node=True),
    "Hecate": _hecate(),
    "Hecate-RM": dataclasses.replace(_hecate(), refetch=True),
    PARTS[0]: _hecate(materialize=False),
    PARTS[1]: _hecate(shard_every=0),
    **{name: _hecate(materialize=False, shard_every=steps) for name, steps in INTERVALS.items()},
}


def hecate_on(setting: Setting) -> tuple[HecatePlanner, Cost]:
    """Return Hecate's planner for a setting, and what it takes for the price of a layer."""
    system = SYSTEMS["Hecate"]
    return build_planner(dataclasses.replace(planner_of(system, setting), name="hecate")), cost_of(system, setting)


def with_sold_links(setting: Setting) -> Setting:
    """Return the setting with links as others reached them between such nodes, t by the bandwidth they are sold as."""
    cluster = setting.cluster
    sold = read_cluster(f"configs/cluster/{cluster.name}.gin").inter_bandwidth
    as_sold = dataclasses.replace(setting, cluster=dataclasses.replace(cluster, inter_bandwidth=sold))
    planner, cost = hecate_on(as_sold)
    t = planner.overlap(cost)
    return dataclasses.replace(setting, cluster=as_reached(cluster), overlap_degree=t)


def in_float32(setting: Setting) -> Setting:
    """Return the setting in float32, at the GPU's rate of it."""
    rate = FLOAT32_RATE[setting.cluster.name] * setting.cluster.flops
    return dataclasses.replace(setting, cluster=dataclasses.replace(setting.cluster, flops=rate), item=4)


def with_scores(setting: Setting) -> Setting:
    """Return the setting, of cluster A, with attention that writes its scores to memory, as `free_bytes` counts them.

    A score of 16 bits and its mask are 13 bytes of traffic forward (written; masked, with softmax; dropped; multiplied)
    and 19 backward; a step has three times what is added here. FlashAttention's kernels need a newer GPU than a V100.
    """
    model = setting.model
    scores = setting.tokens / setting.devices * model.length * model.model_dim / 64  # heads of 64
    moved = (13 + 19) / 3 * scores * setting.item / 2
    return dataclasses.replace(setting, besides=moved / (V100_MEMORY * assumed("memory_share", "middle")))


SCORES = "attention that writes its scores to memory: V100 have no FlashAttention"
CHANGES: dict[str, Callable[[Setting], Setting]] = {
    "float32, PyTorch's default, as no precision is named": in_float32,
    "links between nodes as NCCL's users measured them (issues 235, 527), t by what they are sold as": with_sold_links,
    SCORES: with_scores,
}
SAME: Change = dataclasses.replace
EXPERIMENTS = {cause: functools.partial(dataclasses.replace, change=cause) for cause in CHANGES}
ON_V100 = {SCORES: EXPERIMENTS.pop(SCORES)}
ON_A = {"cluster A, as the text names none": functools.partial(dataclasses.replace, cluster="hecate_a")}
OF_SMALL = {"GPT-MoE-S, as the text names no model": functools.partial(dataclasses.replace, model=SMALL.model)}


def fullest(computed: np.ndarray) -> float:
    """Return how much over the mean a device computes at worst, all layers together: [n, L, D]."""
    of_device = computed.mean(axis=1)
    return float((of_device.max(axis=1) / of_device.mean(axis=1)).max())


def state_bytes(setting: Setting, replicas: float = 0.0, kept: Sequence[float] = (0.0, 0.0, 0.0)) -> np.ndarray:
    """Return a device's bytes of MoE parameters, gradients and state; `kept`: what of the replicas each peak has."""
    model, item = setting.model, setting.item
    each = np.array([item, item, BYTES - 2 * item]) * 2 * model.model_dim * model.hidden_dim
    return each * (PER_DEVICE * model.layers + replicas * np.array(kept))


def free_bytes(setting: Setting, most: float, states: np.ndarray, batch: int) -> float:
    """Return what a device with so many sequences has left, where its experts get `most` times the mean.

    Activations: Korthikanti et al. 2022, section 4.1, its MLP's by expert (input, hidden before, after GeLU, output),
    of 16 bits there.
    """
    model, dim = setting.model, setting.model.model_dim
    dense = BYTES * (4 * model.layers * dim**2 + VOCABULARY * dim)
    block = (15 + 5 * model.length // 64 + 12 * TOP_K * most) * dim  # bytes of a token, heads of 64
    tokens = batch * model.length * (model.layers * block + 4 * VOCABULARY)
    return setting.cluster.memory_bytes - dense - states.sum() - tokens * setting.item / 2


def kept_of(name: str, model: Model) -> tuple[float, float, float]:
    """Return which part of a system's replicas is in memory at the peak: parameters, gradients, optimizer state."""
    if name.startswith("Hecate"):
        alive = Prefetch(schedule="hecate", refetch_replicas=SYSTEMS[name].refetch).build(model.layers).layers_alive()
        return alive / model.layers, 1 / model.layers, 0.0  # a layer's gradients leave before the next one's come
    return {"FasterMoE": (1.0, 1.0, 0.0), "FlexMoE": (1.0, 1.0, 1.0)}.get(name, (0.0, 0.0, 0.0))


@functools.cache
def setting_of(inputs: Inputs, row: Row) -> Setting:
    """Return a row's setting; its batch is the largest that fits EP's fullest device beside FlexMoE's replicas."""
    cluster, model = machine(row.cluster, row.nodes, inputs.level), row.model
    sizes = {"experts": PER_DEVICE * cluster.devices, "top_k": TOP_K, "every": row.every}
    given = {"cluster": cluster, "model": model, "trace": inputs.loads(TOP_K)}
    changed = CHANGES.get(row.change, dataclasses.replace)
    setting, batch = Setting(tokens=cluster.devices * model.length, **given, **sizes), row.batch
    setting = dataclasses.replace(setting, item=changed(setting).item)  # what a change does to memory
    if batch is None:
        loads = setting.fitted()[0].loads.sum(axis=2)
        most = fullest(loads.reshape(*loads.shape[:2], cluster.devices, -1).sum(axis=3))
        states = state_bytes(setting, FLEXMOE_SLOTS * model.layers, kept_of("FlexMoE", model))
        batch = max([1, *(size for size in range(1, 1000) if free_bytes(setting, most, states, size) >= 0)])
    setting = dataclasses.replace(setting, tokens=setting.tokens * batch)
    return changed(setting)


def batch_of(setting: Setting) -> int:
    """Return the sequences of a device."""
    return setting.tokens // setting.devices // setting.model.length


@functools.cache
def step_of(inputs: Inputs, row: Row, name: str) -> Step:
    """Return a system's step, with what a changed placement costs: 'rearrange', which is on the critical path."""
    setting, model = setting_of(inputs, row), row.model
    system = SYSTEMS[name]
    slots = FLEXMOE_SLOTS
    if system.planner == "hecate":  # m, from what memory is left (4.2)
        left = free_bytes(setting, 1.0, state_bytes(setting), batch_of(setting))
        alive = kept_of("Hecate-RM" if system.refetch else "Hecate", model)[0] * model.layers
        slots = int(np.clip(left / alive / cost_of(system, setting).prices.expert_bytes, 0, setting.experts))
    setting = dataclasses.replace(setting, replica_slots=slots)
    step, cost = run(system, setting), cost_of(system, setting)
    copies = step.records.moved + (step.records.arrived if system.planner == "flexmoe" else 0)
    iterations = np.ptp(setting.trace.iterations) / len(step.records.sample)
    seconds = copies * cost.prices.state_bytes / (row.nodes * cost.prices.bandwidth() * iterations)
    return dataclasses.replace(step, parts={**step.parts, "rearrange": seconds})


def seconds_of(inputs: Inputs, row: Row, name: str, of=np.mean) -> float:
    """Return the seconds of an iteration, in the mean or by `of`, with the head; sums of dense gradients hide (2.2)."""
    return float(of(step_of(inputs, row, name).iterations)) + setting_of(inputs, row).head_seconds


def memory_of(inputs: Inputs, row: Row, name: str) -> tuple[np.ndarray, bool]:
    """Return the peak bytes of parameters, gradients and state of the fullest device, and whether all of it fits."""
    records, model, setting = step_of(inputs, row, name).records, row.model, setting_of(inputs, row)
    replicas = FLEXMOE_SLOTS if name == "FlexMoE" else records.device_replicas.mean(axis=1).max()  # reserved (1, C1)
    states = state_bytes(setting, replicas * model.layers, kept_of(name, model))
    return states, free_bytes(setting, fullest(records.computed), states, batch_of(setting)) >= 0


def loads_note(inputs: Inputs) -> tuple[str]:
    """Return how the loads of all tables were made."""
    fitted = fit_loads(inputs.loads(TOP_K), devices=32, experts=64, choices=TOP_K * SMALL.model.length)
    return ("32 GPUs, a sequence: " + fitted[1],)


TABLES = Tables("hecate", "simulated", EXPERIMENTS, loads_note)


def end_to_end(inputs: Inputs, change: Change, grid: Sequence[Row]) -> tuple[list[tuple], np.ndarray]:
    """Return rows of speed-ups over EP, and the speed-ups [rows, COMPARED]."""
    rows = []
    for row in map(change, grid):
        setting, base = setting_of(inputs, row), seconds_of(inputs, row, "EP")
        speeds = (base / seconds_of(inputs, row, name) for name in COMPARED)
        rows.append((setting.devices, row.model.name, batch_of(setting), *speeds))
    return rows, np.array([row[3:] for row in rows])


@TABLES.add()
def overlap_degree(inputs, change=SAME):
    """Return t, the experts that hide behind attention, of every model and cluster."""
    rows = []
    for row in map(change, (*GRID_A, *GRID_B)):
        setting = setting_of(inputs, row)
        planner, cost = hecate_on(setting)
        times = 1e3 * cost.attention_seconds, 1e3 * cost.overlap_seconds()
        rows.append((row.cluster, setting.devices, row.model.name, *times, planner.overlap(cost), planner.remark(cost)))
    return Found(rows, [[row[5] for row in rows]])


@TABLES.add(bars("speed-up over EP"), experiments=EXPERIMENTS | ON_V100)
def figure_9(inputs, change=SAME):
    """Compare systems with EP on cluster A, on 16 and on 32 GPUs."""
    rows, speeds = end_to_end(inputs, change, GRID_A)
    small, large = speeds.reshape(2, len(MODELS), -1)
    best = (scipy.stats.gmean(half[:, 3] / half[:, :3].max(axis=1)) for half in (small, large))
    return Found(rows, [small[:, 3], large[:, 3], *best])


@TABLES.add(bars("speed-up over EP"))
def figure_10(inputs, change=SAME):
    """Compare systems with EP on cluster B."""
    rows, speeds = end_to_end(inputs, change, GRID_B)
    return Found(rows, [speeds[:, 3], scipy.stats.gmean((speeds[:, 3:] / speeds[:, :3]).ravel())])


@TABLES.add(bars("speed-up over EP"))
def figure_11(inputs, change=SAME):
    """Compare Hecate's MoE layers with EP's, layer by layer."""
    ep, hecate = (step_of(inputs, change(SMALL), name).layers.mean(axis=0) for name in ("EP", "Hecate"))
    return Found(list(enumerate(ep / hecate)), [ep / hecate, scipy.stats.gmean(ep / hecate)])


@TABLES.add(bars("ms", stacked=True))
def figure_12(inputs, change=SAME):
    """Split an iteration of each system by what its critical path waits for."""
    rows, row = [], change(DEEP)
    for name in ALL:
        step = step_of(inputs, row, name)
        a2a, others = 4 * step.records.exchange, step.parts["others"]
        split = (others, 0 * a2a, 0 * a2a) if name == "FasterMoE" else (0 * a2a, others - a2a, a2a)
        parts = (*split, step.parts["place"] + step.parts["reduce"], step.parts["rearrange"], step.attention)
        rows.append((name, *(1e3 * row.model.layers * float(np.mean(part)) for part in parts)))
    ep, *baselines, hecate, again = (np.array(line[1:]) for line in rows)
    return Found(
        rows, [ep[2] / hecate[2], again[3] / hecate[3] if hecate[3] else 1.0, min(map(sum, baselines)) / sum(again)]
    )


@TABLES.add(bars("GB", stacked=True), experiments=EXPERIMENTS | ON_A | OF_SMALL)
def figure_13(inputs, change=SAME):
    """Return the peak memory of parameters, gradients and optimizer state by system."""
    parts = np.array([memory_of(inputs, change(DEEP), name)[0] for name in ALL])
    ep, *_, flexmoe, hecate, again = parts
    kept = 100 * (again[0] - ep[0]) / max(hecate[0] - ep[0], 1)
    rows = [(name, *part) for name, part in zip(ALL, 1e-9 * parts, strict=True)]
    return Found(
        rows, [hecate[0] / ep[0], sum(hecate) / sum(ep), sum(flexmoe) / sum(hecate), sum(again) / sum(ep), kept]
    )


@TABLES.add(lines("batch", *ALL, ylabel="ms"), experiments=EXPERIMENTS | ON_A)
def figure_14(inputs, change=SAME):
    """Return milliseconds of an iteration by batch, up to the largest that fits."""
    row, rows, slower = dataclasses.replace(change(SMALL), every=12), [], []
    names = ALL if change(SMALL) == SMALL else ALL[-2:]  # of a change those that the claims are of
    most = dict.fromkeys(names, 0)
    for batch in range(1, 13):
        row = dataclasses.replace(row, batch=batch)
        fits = [name for name in names if memory_of(inputs, row, name)[1]]
        if not fits:
            break
        times = {name: 1e3 * seconds_of(inputs, row, name) for name in fits}
        most.update(dict.fromkeys(fits, batch))
        rows.append((batch, *(times.get(name, "out of memory") for name in names)))
        if {"Hecate", "Hecate-RM"} <= times.keys():
            slower.append(100 * (times["Hecate-RM"] / times["Hecate"] - 1))
    again = most.pop("Hecate-RM")
    return Found(rows, [slower, again, max(most.values())])


@TABLES.add(bars("ms"), experiments=EXPERIMENTS | ON_A)
def figure_15(inputs, change=SAME):
    """Time Hecate's parts alone, and intervals of resharding."""
    row = dataclasses.replace(change(SMALL), every=1)
    names = ("EP", *PARTS, "Hecate", *INTERVALS)
    layers = {name: row.model.layers * step_of(inputs, row, name).layers.mean() for name in names}
    rows = [(name, 1e3 * seconds, 1e3 * seconds_of(inputs, row, name)) for name, seconds in layers.items()]
    ep, sharding, materialization, both, *every = (line[2] for line in rows)
    return Found(rows, [sharding / both, materialization / both, ep / np.array(every)])


@TABLES.add()
def claims(inputs, change=SAME):
    """Return the most that the text claims anywhere on 32 GPUs."""
    names = ("Hecate over a baseline", "Hecate-RM over the best", "Hecate-RM over a baseline", "balanced EP over EP")
    ratios, even = {name: [] for name in names}, dataclasses.replace(inputs, trace="W0_balanced")
    for row in map(change, (*GRID_A[4:], *GRID_B)):
        times = [seconds_of(inputs, row, name) for name in BASELINES]
        hecate, again = (seconds_of(inputs, row, name) for name in ("Hecate", "Hecate-RM"))
        values = [max(times) / hecate, min(times) / again, max(times) / again]
        if row.cluster == "hecate_a":
            same = dataclasses.replace(row, batch=batch_of(setting_of(inputs, row)))
            values.append(seconds_of(inputs, row, "EP", of=np.max) / seconds_of(even, same, "EP"))
        for name, value in zip(names, values, strict=False):
            ratios[name].append(value)
    first, second, _, last = map(max, ratios.values())
    return Found([(name, min(values), max(values)) for name, values in ratios.items()], [first, second, last])
