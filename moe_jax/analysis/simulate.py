"""Run one planner over a recorded trace.

Inputs: a trace, a planner's configuration, cost. Outputs: `Records`, arrays by sample and layer of what each device
computed, what was replicated and moved, and how long planning took. Summaries are made in report.py.

Letters: docs/notation.md; n samples judged.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from moe_jax.analysis.replay_transfers import TransferLog, Transfers
from moe_jax.cluster import exchange_seconds
from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsTrace
from moe_jax.planning import AFTER_GATE, NAMES, routing
from moe_jax.planning.balancer import BALANCERS, with_late
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan_session import PlanSession
from moe_jax.planning.plan_shape import build_shape

SUFFIX = "_after_gate"
EVERY_NAME = (*NAMES, *(name + SUFFIX for name in AFTER_GATE))  # what `all` stands for


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Records:
    """Hold the results, sample by sample.

    Attributes:
      sample: int [n], positions in the trace.
      computed, received, device_replicas: int [n, L, D]; the last are the replicas that a device holds.
      expert_replicas: int16 [n, L, E], replicas of each expert.
      moved: int [n, L], experts whose home changed; arrived: int [n, L], replicas that were not there a sample before.
      exchange: float [n, L], seconds of one all-to-all over the links, NaN where a link's speed is absent.
      search: float [n], host seconds to plan all layers.
      transfers: what the transfers send under the shape in force, and how often that changed.
      hiding: the block-wise schedule that the transfers ahead run under; those after the gate run beside nothing.
      counters: the planner's own counts.
    """

    name: str
    sample: np.ndarray
    computed: np.ndarray
    received: np.ndarray
    device_replicas: np.ndarray
    expert_replicas: np.ndarray
    moved: np.ndarray
    arrived: np.ndarray
    exchange: np.ndarray
    search: np.ndarray
    transfers: Transfers
    hiding: str
    counters: dict[str, int]


def split_name(name: str) -> tuple[str, bool]:
    """Return (planner, sees the step itself) of NAME or NAME_after_gate."""
    base = name.removesuffix(SUFFIX)
    if base not in BALANCERS:
        raise UserError(f"planner {name!r} is unknown; use {', '.join(NAMES)}, each with or without {SUFFIX}, or all")
    return base, base != name


def simulate(
    name: str, trace: LoadsTrace, config: PlannerConfig, placement: Placement, cost: Cost, lag: int, every: int
) -> Records:
    """Plan each judged sample from the sample `lag` before it, and evaluate it on its own loads.

    Args:
      config: the planner's knobs; name and `when` are set from `name`.
      lag: samples between what is seen and what is planned for; the first `lag` samples are not judged.
      every: judge each so many-th sample.
    """
    base, sees = split_name(name)
    late = sees and base in AFTER_GATE
    config = dataclasses.replace(config, name=base, when="after_gate" if late else "ahead")
    planner = BALANCERS[base]
    hiding = planner.schedule if getattr(config, "scheduler", True) else "none"
    cost = dataclasses.replace(cost, prefetch=Prefetch(schedule=hiding))
    session = PlanSession(config, placement, cost)
    largest = with_late(session.planner, build_shape(placement), cost).late if config.bounded else None
    log = TransferLog(placement, cost, largest, session.planner.ahead_most(placement, cost))
    samples = np.arange(lag, len(trace.loads), every)
    if not len(samples):
        raise UserError(f"lag ({lag}) leaves none of the trace's {len(trace.loads)} samples; use a smaller lag")
    rows: list[tuple] = []
    before, seen = placement, 0
    for sample in samples.tolist():
        # A planner that sees the step without a rule of its own for that plans from the step's loads directly.
        newest = sample if sees and not late else sample - lag
        while seen <= newest:
            session.predictor.observe(trace.loads[seen])
            seen += 1
        began = time.perf_counter()
        ahead = plan = session.propose(int(trace.iterations[sample]))
        if session.config.decides_late:
            plan = session.refine(trace.loads[sample], late=largest)
        seconds = time.perf_counter() - began
        log.take(ahead, plan)
        pairs = routing.pair_loads(plan, trace.loads[sample])
        computed = pairs.sum(axis=1)
        received = computed - np.einsum("ldd->ld", pairs)
        held = plan.holds & ~plan.homes
        moved, arrived = (plan.home != before.home).sum(axis=1), (plan.holds & ~before.holds).sum(axis=(1, 2))
        exchange = np.full(len(computed), np.nan)
        if cost.cluster.intra_bandwidth is not None or cost.cluster.inter_bandwidth is not None:
            exchange = exchange_seconds(cost.cluster, pairs * cost.exchanged_bytes, "replay")
        replicas = (held.sum(axis=1), held.sum(axis=2).astype(np.int16))
        rows.append((computed, received, *replicas, moved, arrived, exchange, seconds))
        before = plan
    columns = [np.stack(column) for column in zip(*rows, strict=True)]
    keys = ("computed", "received", "device_replicas", "expert_replicas", "moved", "arrived", "exchange", "search")
    return Records(
        name=name,
        sample=samples,
        transfers=log.result(),
        hiding=hiding,
        counters=dict(session.planner.counters),
        **dict(zip(keys, columns, strict=True)),
    )
