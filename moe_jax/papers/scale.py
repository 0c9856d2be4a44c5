"""Past the papers: steps of their systems from 64 to 16,384 devices, simulated by the one cost model.

One layer on H100 nodes of eight, one group of all devices, made-up loads (`zipf_loads`, its seeds), a plan from one
sample judged on the next. Every size is varied alone from 1,024 devices, 256 experts, two choices, and devices with
every skew. Parm without model parallelism and DeepSpeed-MoE are plain expert parallelism. Left out: what other layers
and a real network add, plans that hold for several steps, and more experts than devices can be given evenly.
Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from moe_jax.cluster.layer_seconds import preceding_seconds
from moe_jax.papers.systems import listed
from moe_jax.papers.table import Found, Tables, lines
from moe_jax.planning.balancer import build_planner
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost, LayerPrices, predicted_layer_seconds
from moe_jax.planning.placement import Placement
from moe_jax.replan.session import PlanSession

TOKENS, MODEL_DIM, HIDDEN_DIM, LENGTH, PER_NODE, SLOTS = 2048, 4096, 2048, 4096, 8, 4  # tokens of a device
SYSTEMS = {"EP": "none", "FasterMoE": "fastermoe", "Pro-Prophet": "pro_prophet", "Hecate": "hecate"}
PLANNED = tuple(SYSTEMS)[1:]
SKEWS = (0.0, 0.5, 1.0, 1.5)  # exponents of popularity by rank
BASE = (1024, 256, 2, 1.0)  # devices, experts, choices, skew
CASES = (
    *((devices, *BASE[1:3], skew) for skew in SKEWS for devices in (64, 256, 1024, 4096, 16384)),
    *((BASE[0], experts, *BASE[2:]) for experts in (64, 128, 512)),
    *((*BASE[:2], top_k, BASE[3]) for top_k in (1, 4, 8)),
)
PAYS = 0.99  # of EP's step, that a system's is shorter than
TABLES = Tables("scale", "simulated", {})


def zipf_loads(devices: int, experts: int, choices: int, skew: float, sample: int) -> np.ndarray:
    """Draw loads int32 [1, D, E]: popularity by rank to a power, times a Gamma of mean 1 for each source and expert.

    Experts' order is of seed 0 for all samples, the rest of the seed `sample`.
    """
    order, rng = np.random.default_rng(0).permutation(experts), np.random.default_rng(sample)
    share = 1.0 / (1 + order) ** skew
    mean = choices * share / share.sum()
    return rng.poisson(mean * rng.gamma(4.0, 0.25, (1, devices, experts))).astype(np.int32)


def costs(devices: int, level: str) -> dict[str, Cost]:
    """Return the price of a layer by system."""
    cluster = listed("h100", devices, level)
    block = {"moe_every": 1, "matrices": 3, "dense_hidden_dim": 0}
    attention = preceding_seconds(cluster, TOKENS, 2, model_dim=MODEL_DIM, length=LENGTH, **block)
    sizes = {"model_dim": MODEL_DIM, "hidden_dim": HIDDEN_DIM, "matrices": 3, "dtype_bytes": 2, "param_bytes": 4}
    cost = Cost(prices=LayerPrices(cluster=cluster, **sizes), replica_slots=SLOTS, attention_seconds=attention)
    planners = {system: build_planner(PlannerConfig(name=name)) for system, name in SYSTEMS.items()}
    return {
        system: dataclasses.replace(cost, prefetch=Prefetch(schedule=planner.schedule))
        for system, planner in planners.items()
    }


def step(system: str, cost: Cost, loads: list[np.ndarray]) -> tuple[float, float, int]:
    """Return seconds of a layer with its attention, CPU seconds of its planner, and bytes of its plan."""
    session = PlanSession(
        PlannerConfig(name=SYSTEMS[system], replica_slots=SLOTS, must_pay=False),
        Placement.even(1, loads[0].shape[2], loads[0].shape[1], PER_NODE),
        cost,
    )
    began = time.process_time()
    session.predictor.observe(loads[0])
    plan = session.propose(1)
    planned = time.process_time() - began
    seconds = float(predicted_layer_seconds(plan, loads[1], cost)[0]) + 3 * cost.attention_seconds
    return seconds, planned, sum(table.nbytes for table in (plan.home, plan.replicas, plan.shares))


@TABLES.add(
    lines("devices", "EP, ms", *(f"{name}, ms" for name in PLANNED), by="skew", xscale="log", ylabel="ms of a layer")
)
def scale(inputs):
    """Compute a step of each system for every case."""
    rows = []
    for devices, experts, top_k, skew in CASES:
        loads = [zipf_loads(devices, experts, top_k * TOKENS, skew, sample) for sample in (1, 2)]
        steps = [step(system, cost, loads) for system, cost in costs(devices, inputs.level).items()]
        seconds, planned, plan_bytes = zip(*steps, strict=True)
        milliseconds = (1e3 * each for each in (*seconds, *planned[1:]))
        rows.append((skew, devices, experts, top_k, *milliseconds, *plan_bytes[1:]))
    paying = {(name, skew): 0 for name in PLANNED for skew in SKEWS}
    for skew, devices, experts, top_k, plain, *others in rows:
        for name, seconds in zip(PLANNED, others, strict=False):
            if (experts, top_k) == BASE[1:3] and seconds < PAYS * plain:
                paying[name, skew] = max(devices, paying[name, skew])
    return Found(rows, paying.values())
