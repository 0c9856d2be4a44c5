"""Run one planner over a recorded trace: what each device computed, what was replicated and moved, and its seconds.

Letters: docs/notation.md; n samples judged.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from moe_jax.cluster import Links
from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsTrace
from moe_jax.parallel.static_sizes import TransferShape
from moe_jax.planning import routing
from moe_jax.planning.balancer import Planner, build_planner, names
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.config import PlannerConfig
from moe_jax.planning.cost import Cost
from moe_jax.planning.placement import Placement, TransferSizes, late_price, transfer_sizes
from moe_jax.planning.plan import grown, with_rule
from moe_jax.planning.plan_shape import build_shape
from moe_jax.replan.auto import SESSIONS
from moe_jax.replan.session import PlanSession

SUFFIX = "_after_gate"
SHOWN = 8  # lags that a message names


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
    needed: TransferSizes  # that each layer's replicas ahead need, [n, L]
    ahead_seconds: np.ndarray  # of one Trans ahead, under the shape in force, [n]
    late_seconds: np.ndarray  # of one after the gate, [n, L]
    changes: int  # how many plans did not fit the compiled sizes
    hiding: str  # block-wise schedule that the transfers ahead run under; those after the gate run next to nothing
    counters: dict[str, int]  # the planner's own


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
    session = SESSIONS.get(base, PlanSession)(config, placement, cost)
    largest = with_rule(session.planner, build_shape(placement), cost).late if config.bounded else None
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
    ahead_seconds, late_seconds, changes = transfer_seconds(plans, placement, cost, session.planner, largest)
    return Records(
        name=name,
        sample=samples,
        needed=TransferSizes(*(np.stack(column) for column in zip(*(ahead.sizes for ahead, _ in plans), strict=True))),
        ahead_seconds=ahead_seconds,
        late_seconds=late_seconds,
        changes=changes,
        hiding=hiding,
        counters=dict(session.planner.counters),
        **{key: np.stack([row[key] for row in rows]) for key in rows[0]},
    )


def transfer_seconds(
    plans: Sequence[tuple[Placement, Placement]],
    start: Placement,
    cost: Cost,
    planner: Planner,
    late: TransferShape | None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the seconds of one Trans ahead [n] and after the gate [n, L], and how often the compiled shape changed.

    The shape changes from plan to plan as a run's does, and all of it is sent.

    Args:
      plans: of each sample the plan ahead, and what the step made of it after the gate; start: the homes before them.
      late: the largest transfer after the gate, None where layers send what they need.
    """
    shape, changes, devices = build_shape(start), 0, start.devices
    in_time, after_gate = np.zeros(len(plans)), np.zeros((len(plans), start.layers))
    of_sizes = cost.prices.late(late)
    for place, (ahead, plan) in enumerate(plans):
        before, shape = shape, grown(planner, shape, ahead, cost)
        changes += place > 0 and shape != before
        if shape.ahead is not None:
            in_time[place] = cost.prices.shape_seconds(shape.ahead)
        if len(plan.replicas) != len(ahead.replicas):
            added = plan.holds & ~ahead.holds
            inside = start.devices_per_node if late is None else late.inside
            needed = transfer_sizes(plan.homes, added, inside)
            after_gate[place] = late_price(needed, late, of_sizes, 2 * cost.prices.transfer(needed, devices)) / 2
    return in_time, after_gate, changes


def summarize(records: Records, base: Records, cost: Cost) -> dict:
    """Return the numbers of one planner, to six digits; `base` holds plain expert parallelism over the same samples.

    Seconds of a layer are modelled, by what they are spent on (Pro-Prophet, table I). The search took seconds of this
    host, and stands apart: a modelled device's seconds never have it added, not even after the gate, where the running
    program searches on its devices.
    """
    mean = records.computed.mean(axis=2)  # a layer without tokens is even
    ratio = np.where(mean > 0, records.computed.max(axis=2) / np.where(mean > 0, mean, 1.0), 1.0)
    spread, before = records.computed.std(axis=2).mean(), base.computed.std(axis=2).mean()
    replicas = records.expert_replicas.sum(axis=2)
    chunks = (records.expert_replicas > 0).mean(axis=2)
    layers, devices = records.computed.shape[1:]
    moved = 2 * replicas * cost.prices.expert_bytes + records.moved * cost.prices.state_bytes
    by_purpose = []  # of both, under the shapes in force and the planner's own block-wise schedule
    for own in (records, base):
        own_cost, needed = dataclasses.replace(cost, prefetch=Prefetch(schedule=own.hiding)), own.needed
        if cost.prices.of_program:
            exchange, late = own.exchange, own.late_seconds
            trans = np.broadcast_to(own.ahead_seconds[:, None], needed.slots.shape)
        else:  # experts one by one, those that came late too
            exchange, trans, late = None, None, 0.0
            holders = own.expert_replicas + (own.expert_replicas > 0)
            needed = needed._replace(holders=holders.sum(axis=2))
        parts = own_cost.parts(own.computed, own.received, needed, exchange=exchange, trans=trans)
        by_purpose.append({**parts, "place": parts["place"] + late, "reduce": parts["reduce"] + late})
    seconds = {name: float(part.mean()) for name, part in by_purpose[0].items()}
    layer, plain = sum(seconds.values()), float(sum(part.mean() for part in by_purpose[1].values()))
    found = {
        "max_over_mean": ratio.mean(),
        "max_over_mean_p95": np.percentile(ratio, 95),
        "rb": before / max(spread, 1e-9),
        "replicas_per_layer": replicas.mean(),
        "replicas_per_device": replicas.mean() / devices,
        "bytes_moved": moved.sum(axis=1).mean(),
        "lambda": chunks.mean(),
        "layer_seconds": layer,
        **{f"{name}_seconds": own for name, own in seconds.items()},
        "speedup_over_ep": plain / layer if layer else None,
        "search_seconds": records.search.mean() / layers,
        "planner_us_per_layer": 1e6 * (records.search / layers).mean(),
        "hiding": records.hiding,
        "shape_changes": records.changes,
        **{f"counter_{name}": count for name, count in records.counters.items()},
    }
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in found.items()}


# title, key of a summary, what it is multiplied by, what it says
COLUMNS = (
    ("load", "max_over_mean", 1.0, "tokens of the fullest device over the mean, mean of layers and samples"),
    ("layer ms", "layer_seconds", 1e3, "one MoE layer, forward and backward, modelled"),
    ("over EP", "speedup_over_ep", 1.0, "speed-up of the layer over plain expert parallelism"),
    ("moved GB", "bytes_moved", 1e-9, "parameters, gradients and states of experts sent in a step, all layers"),
    ("plan us", "planner_us_per_layer", 1.0, "search for one layer's plan on this host, not part of the layer"),
)


def table(summaries: dict[str, dict]) -> str:
    """Return a table of the main figures, one planner a line, and what its columns are."""
    width = max(map(len, summaries), default=0) + 2
    lines = ["planner".ljust(width) + "".join(title.rjust(11) for title, *_ in COLUMNS)]
    for name, summary in summaries.items():
        cells = ("-" if summary[key] is None else f"{summary[key] * scale:.4g}" for _, key, scale, _ in COLUMNS)
        lines.append(name.ljust(width) + "".join(cell.rjust(11) for cell in cells))
    return "\n".join([*lines, "", *(f"{title:10}{what}" for title, _, _, what in COLUMNS)])
