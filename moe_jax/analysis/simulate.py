"""Run one planner over a recorded trace: what each device computed, what was replicated, moved and sent.

Letters: docs/notation.md; n samples judged; X offers, m slots, Cp crossing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from moe_jax.cluster import Links
from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsTrace
from moe_jax.parallel.transfer_shape import TransferShape
from moe_jax.planning import routing
from moe_jax.planning.balancer import Planner, build_planner, names
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement
from moe_jax.planning.plan import grown, with_late
from moe_jax.planning.plan_shape import build_shape
from moe_jax.planning.sizes import SIZES, TransferSizes, late_size, transfer_sizes
from moe_jax.replan.auto import plan_session

SUFFIX = "_after_gate"
SHOWN = 8  # lags that a message names


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """What the transfers of a replay send and take; what is sent are experts of the busiest device, inside and across
    nodes, [..., 2]."""

    form: str  # of the transfer ahead, 'flat' or 'by_node'
    needed: TransferSizes  # that each layer's replicas ahead need, [n, L]
    ahead: np.ndarray  # sent under the shape in force, [n, 2]
    late: np.ndarray  # sent after the gate, [n, L, 2]
    seconds: np.ndarray  # of one Trans ahead, [n]
    late_seconds: np.ndarray  # of one after the gate, [n, L]
    changes: int  # how many plans did not fit the compiled sizes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Records:
    """The results of one planner, sample by sample."""

    name: str
    sample: np.ndarray  # int [n], positions in the trace
    computed: np.ndarray  # int [n, L, D], token-expert assignments of each device
    received: np.ndarray  # of them those from other devices
    device_replicas: np.ndarray  # int [n, L, D], replicas that a device holds
    expert_replicas: np.ndarray  # int16 [n, L, E], replicas of each expert
    moved: np.ndarray  # int [n, L], experts whose home changed
    arrived: np.ndarray  # int [n, L], replicas that were not there a sample before
    exchange: np.ndarray  # float [n, L], seconds of one all-to-all over the links
    search: np.ndarray  # float [n], host seconds to plan all layers
    transfers: Transfers
    hiding: str  # block-wise schedule that the transfers ahead run under; those after the gate run next to nothing
    counters: dict[str, int]  # the planner's own


def every_name() -> tuple[str, ...]:
    """Return what `all` stands for: every planner, and every one that can decide after the gate as such."""
    return (*names(), *(name + SUFFIX for name in names(after_gate=True)))


def split_name(name: str) -> tuple[str, bool]:
    """Return (planner, sees the step itself) of NAME or NAME_after_gate."""
    base = name.removesuffix(SUFFIX)
    if base not in names():
        raise UserError(f"planner {name!r} is unknown; use {', '.join(names())}, each with or without {SUFFIX}, or all")
    return base, base != name


def least_lag(iterations: np.ndarray) -> int:
    """Return the fewest steps between two samples of a trace, 1 where it has one sample."""
    return int(np.diff(iterations).min()) if len(iterations) > 1 else 1


def judged(iterations: np.ndarray, lag: int) -> np.ndarray:
    """Return the places int [n] of a trace's samples that have another one `lag` steps before them.

    Raises:
      UserError: there is none.
    """
    found = np.flatnonzero(np.isin(iterations - lag, iterations))
    if lag < 1 or not len(found):
        apart = np.unique(iterations[:, None] - iterations[:SHOWN])
        lags = ", ".join(map(str, apart[apart > 0][:SHOWN]))
        raise UserError(
            f"lag ({lag}) is in steps, and none of the trace's {len(iterations)} samples has another one so many steps "
            f"before it; it answers {f'lags of {lags}, ..' if lags else 'none: record more'}"
        )
    return found


def simulate(
    name: str, trace: LoadsTrace, config: PlannerConfig, placement: Placement, cost: Cost, lag: int, every: int
) -> Records:
    """Plan each judged sample from the loads of `lag` steps before it and earlier, and evaluate it on its own loads.

    Args:
      config: of the planner; name and `when` are set from `name`.
      lag: steps, of the trace's iterations; samples without one so many steps before them are not judged.
      every: judge each so many-th of the others.
    """
    base, sees = split_name(name)
    late = sees and base in names(after_gate=True)
    config = dataclasses.replace(config, name=base, when="after_gate" if late else "ahead")
    hiding = build_planner(config).schedule
    cost = dataclasses.replace(cost, prefetch=Prefetch(schedule=hiding))
    session = plan_session(config, placement, cost)
    largest = with_late(session.planner, build_shape(placement), cost).late if config.bounded else None
    samples = judged(trace.iterations, lag)[::every]
    apart = np.maximum(1, np.diff(trace.iterations, prepend=trace.iterations[0]) // least_lag(trace.iterations))
    rows: list[dict] = []
    links = Links.of(cost.prices.cluster, placement.devices, "replay", cost.prices.shards)
    plans: list[tuple[Placement, Placement]] = []
    before, seen = placement, 0
    for sample in samples.tolist():
        # A planner that sees the step without a rule of its own for that plans from the step's loads directly.
        newest = trace.iterations[sample] - (0 if sees and not late else lag)
        while trace.iterations[seen] <= newest:
            session.observe(trace.loads[seen], int(apart[seen]))
            seen += 1
        began = time.perf_counter()
        ahead = plan = session.propose(int(trace.iterations[sample]))
        if session.config.decides_late:
            plan = session.planner.refine(trace.loads[sample], ahead, dataclasses.replace(session.cost, late=largest))
        seconds = time.perf_counter() - began
        plans.append((ahead, plan))
        pairs = routing.pair_loads(plan, trace.loads[sample])
        computed, held = pairs.sum(axis=1), plan.holds & ~plan.homes
        exchange = links.exchange(pairs * cost.prices.exchanged_bytes)
        row = {
            "computed": computed,
            "received": computed - np.einsum("ldd->ld", pairs),
            "device_replicas": held.sum(axis=1),
            "expert_replicas": held.sum(axis=2).astype(np.int16),
            "moved": (plan.home != before.home).sum(axis=1),
            "arrived": (plan.holds & ~before.holds).sum(axis=(1, 2)),
        }
        rows.append({**row, "exchange": exchange, "search": seconds})
        before = plan
    return Records(
        name=name,
        sample=samples,
        transfers=follow_transfers(plans, placement, cost, session.planner, largest),
        hiding=hiding,
        counters=dict(session.planner.counters),
        **{key: np.stack([row[key] for row in rows]) for key in rows[0]},
    )


def follow_transfers(
    plans: Sequence[tuple[Placement, Placement]],
    start: Placement,
    cost: Cost,
    planner: Planner,
    late: TransferShape | None,
) -> Transfers:
    """Return what the transfers of a run of these plans send; their compiled shape changes as a run's does.

    Args:
      plans: of each sample the plan ahead, and what the step made of it after the gate; start: the homes before them.
      late: the largest transfer after the gate, None where it may be any.
    """
    group = {"devices": start.devices, "devices_per_node": start.devices_per_node}
    several, bounded = 1 < start.devices_per_node < start.devices, late is not None
    shape, changes, rows = build_shape(start), 0, []
    for place, (ahead, plan) in enumerate(plans):
        before, shape = shape, grown(planner, shape, ahead, cost)
        changes += place > 0 and shape != before
        sent, late_seconds = np.zeros((plan.layers, 2)), np.zeros(plan.layers)
        if len(plan.replicas) != len(ahead.replicas):
            added, late_now = plan.holds & ~ahead.holds, late
            if not bounded:  # the largest holds all that came so far, and goes in the cheaper form
                largest = transfer_sizes(plan.homes, added, plan.devices_per_node)
                largest = largest.shape(*group.values(), several)
                if late is not None:
                    most = {name: max(getattr(largest, name), getattr(late, name)) for name in SIZES}
                    largest = dataclasses.replace(largest, **most)
                late = late_now = largest
                if not cost.prices.is_by_node(late, *group.values()):
                    late_now = dataclasses.replace(late, by_node=False, crossing=0)
            # a layer sends the smallest half of the largest that holds what came
            size_of_layer = late_size(transfer_sizes(plan.homes, added, late_now.inside), late_now)
            for number, size in enumerate(late_now.halves(), 1):
                sent[size_of_layer == number] = size.sent()
                late_seconds[size_of_layer == number] = cost.prices.shape_seconds(size)
        in_force, seconds = (0.0, 0.0), 0.0
        if shape.ahead is not None:
            in_force, seconds = tuple(shape.ahead.sent()), cost.prices.shape_seconds(shape.ahead)
        rows.append((ahead.sizes, in_force, sent, late_seconds, seconds))
    sizes, in_force, sent, late_seconds, seconds = zip(*rows, strict=True)
    newest = shape.ahead or shape.spare
    return Transfers(
        form="by_node" if newest is not None and newest.by_node else "flat",
        needed=TransferSizes(*(np.stack(column) for column in zip(*sizes, strict=True))),
        ahead=np.array(in_force),
        late=np.stack(sent),
        seconds=np.array(seconds),
        late_seconds=np.stack(late_seconds),
        changes=changes,
    )
