"""Summaries of replayed planners: balance, bytes, modelled seconds, and the costs of the original systems.

Inputs: Records of each planner. Outputs: one flat dict of numbers per planner, and a table. Seconds are None where the
cluster leaves a figure absent that the model needs.

Letters: docs/notation.md; n samples.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.overlap import Prefetch
from moe_jax.planner import BALANCERS
from moe_jax.planner.cost import Cost
from moe_jax.replay.simulate import Records, split_name

WARM = 10  # in the first nine samples a plan from the past hardly helps: report without them too


def imbalance(records: Records) -> np.ndarray:
    """Return max over mean of the device loads: [n, L]; a layer without tokens is even."""
    mean = records.computed.mean(axis=2)
    return np.where(mean > 0, records.computed.max(axis=2) / np.where(mean > 0, mean, 1.0), 1.0)


def summarize(records: Records, base: Records, cost: Cost) -> dict:
    """Return the numbers of one planner; `base` holds plain expert parallelism over the same samples."""
    ratio = imbalance(records)
    warm = ratio[records.sample >= WARM]
    spread, before = records.computed.std(axis=2).mean(), base.computed.std(axis=2).mean()
    replicas = records.expert_replicas.sum(axis=2)
    chunks = (records.expert_replicas > 0).mean(axis=2)
    layers, devices = records.computed.shape[1:]
    transfer = 2 * replicas * cost.expert_bytes
    search = records.search / layers
    return {
        "max_over_mean": _number(ratio.mean()),
        "max_over_mean_p95": _number(np.percentile(ratio, 95)),
        "max_over_mean_from_10": _number(warm.mean()) if warm.size else None,
        "max_over_mean_p95_from_10": _number(np.percentile(warm, 95)) if warm.size else None,
        "rb": _number(before / max(spread, 1e-9)),
        "replicas_per_layer": _number(replicas.mean()),
        "replicas_per_device": _number(replicas.mean() / devices),
        "replicas_most": int(records.device_replicas.max(initial=0)),
        "bytes_moved": _number((transfer + records.moved * cost.state_bytes).sum(axis=1).mean()),
        "lambda": _number(chunks.mean()),
        "lambda_per_layer": [_number(value) for value in chunks.mean(axis=0)],
        **_seconds(records, base, cost),
        **_original(records, cost),
        "planner_us_per_layer": _number(1e6 * search.mean()),
        **_sent(records),
        "hiding": records.hiding,
        "shape_changes": len(records.transfers.changed),
        "shape_changes_at": records.sample[list(records.transfers.changed)].tolist(),
        "skeleton_changes": len(records.transfers.changed),  # the name up to commit 54b32df
        **{f"counter_{name}": count for name, count in records.counters.items()},
    }


def add_ratios(summaries: dict[str, dict], reference: str) -> None:
    """Add each planner's RB over that of the one named (Pro-Prophet, figure 16), None where that one was not run."""
    base = summaries.get(reference, {}).get("rb")
    for summary in summaries.values():
        summary[f"rb_ratio_to_{reference}"] = None if not base else _number(summary["rb"] / base)


def roofline(records: Records, cost: Cost) -> tuple[float, float] | None:
    """Return (x, y) of the DDL-Roofline: computation over communication, FLOP/s per device reached.

    Source: FasterMoE, section 3.3; T_e2e is the synchronous T_comp + T_comm.
    """
    if not _timed(cost) or np.isnan(records.exchange).any():
        return None
    transfer = 2 * _trans(records, cost) + 2 * records.transfers.late_seconds
    work = 3 * cost.forward(records.computed, "replay")
    talk = 4 * records.exchange + transfer
    tokens = records.computed.sum(axis=2).mean()
    flops = 3 * cost.row_flops * tokens / records.computed.shape[2]
    mean_work, mean_talk = float(work.mean()), float(talk.mean())
    return mean_work / max(mean_talk, 1e-30), flops / max(mean_work + mean_talk, 1e-30)


def _seconds(records: Records, base: Records, cost: Cost) -> dict:
    """Return modelled seconds of a layer by what they are spent on (Pro-Prophet, table I), and the speed-up over EP.

    Planning ahead hides behind the step, so its search is reported but not added; after the gate it is added.
    """
    keys = ("layer_seconds", "place_seconds", "reduce_seconds", "others_seconds", "speedup_over_ep")
    search = float(records.search.mean()) / records.computed.shape[1]
    if not _timed(cost):
        return {**dict.fromkeys(keys), "search_seconds": _number(search)}
    parts = _parts(records, cost)
    place, reduce, others = (float(parts[key].mean()) for key in ("place", "reduce", "others"))
    critical = search if split_name(records.name)[1] else 0.0
    layer = critical + place + reduce + others
    plain = float(sum(part.mean() for part in _parts(base, cost).values()))
    numbers = (layer, place, reduce, others, plain / layer if layer else None)
    return {**{key: _number(n) for key, n in zip(keys, numbers, strict=True)}, "search_seconds": _number(search)}


def _original(records: Records, cost: Cost) -> dict:
    """Return what the system that a planner comes from would move and hold, by its own rules.

    Bytes count every receiver, per layer and step; memory is optimizer state kept for replicas, per device.
    """
    planner = BALANCERS[split_name(records.name)[0]].planner
    each_step, moves, memory = planner.original_costs(records, cost)
    total = each_step + moves
    seconds = None
    if _linked(cost):
        seconds = _number(total.mean() / (records.computed.shape[2] * cost.bandwidth("replay")))
    return {
        "original": planner.original,
        "original_bytes_per_layer": _number(total.mean()),
        "original_seconds_per_layer": seconds,
        "original_optimizer_bytes_per_device": _number(memory),
    }


def _parts(records: Records, cost: Cost) -> dict[str, np.ndarray]:
    """Return seconds [n, L] by purpose, under the shapes in force and the planner's own block-wise schedule."""
    cost = dataclasses.replace(cost, prefetch=Prefetch(schedule=records.hiding))
    paper = cost.price == "paper"
    exchange = None if paper or np.isnan(records.exchange).any() else records.exchange
    loads = (records.computed, records.received, records.transfers.needed)
    parts = cost.parts(*loads, "replay", exchange=exchange, trans=_trans(records, cost))
    late = 0.0 if paper else records.transfers.late_seconds
    return {**parts, "place": parts["place"] + late, "reduce": parts["reduce"] + late}


def _trans(records: Records, cost: Cost) -> np.ndarray:
    """Return seconds [n, L] of one Trans ahead: of the shape in force, or by the papers' formula."""
    needed = records.transfers.needed
    if cost.price == "paper":
        holders = records.expert_replicas + (records.expert_replicas > 0)  # those that came late included
        return cost.trans(needed._replace(holders=holders.sum(axis=2)), records.computed.shape[2], "replay")
    return np.broadcast_to(records.transfers.seconds[:, None], needed.slots.shape)


def _sent(records: Records) -> dict:
    """Return what the busiest device sends and receives for a layer's Trans, in experts, mean over samples and layers.

    The transfer of the shape in force (`transfer_form`), and after the gate what came late; `least` with the smallest
    shape of each plan, `own` with each layer's own sizes; then both forms of what is in force ahead.
    """
    moved = records.transfers
    late = moved.late.mean(axis=(0, 1))
    inside, across = (moved.in_force[moved.form].mean(axis=0) + late).tolist()
    least, own = (moved.least.mean(axis=0) + late).tolist(), (moved.own.mean(axis=(0, 1)) + late).tolist()
    found = {
        "transfer_form": moved.form,
        "sent_experts": _number(inside + across),
        "sent_experts_across": _number(across),
        "received_experts": _number(records.device_replicas.max(axis=2).mean()),
        "sent_experts_least": _number(sum(least)),
        "sent_experts_across_least": _number(least[1]),
        "sent_experts_own": _number(sum(own)),
        "sent_experts_across_own": _number(own[1]),
    }
    for form, sent in moved.in_force.items():
        near, far = (sent.mean(axis=0) + late).tolist()
        found |= {f"sent_experts_{form}": _number(near + far), f"sent_experts_across_{form}": _number(far)}
    return found


def _linked(cost: Cost) -> bool:
    cluster = cost.cluster
    return (cluster.intra_bandwidth if cluster.flat or cluster.nodes == 1 else cluster.inter_bandwidth) is not None


def _timed(cost: Cost) -> bool:
    return _linked(cost) and cost.cluster.flops is not None


def _number(value) -> float:
    return float(f"{float(value):.6g}")


def table(summaries: dict[str, dict]) -> str:
    """Return a table of the main columns, one planner a line."""
    columns = (
        ("max/mean", "max_over_mean"),
        ("p95", "max_over_mean_p95"),
        ("from 10", "max_over_mean_from_10"),
        ("RB", "rb"),
        ("replicas/dev", "replicas_per_device"),
        ("sent", "sent_experts"),
        ("across", "sent_experts_across"),
        ("received", "received_experts"),
        ("least", "sent_experts_least"),
        ("form", "transfer_form"),
        ("hiding", "hiding"),
        ("lambda", "lambda"),
        ("GB moved", "bytes_moved"),
        ("layer ms", "layer_seconds"),
        ("over EP", "speedup_over_ep"),
        ("orig. ms", "original_seconds_per_layer"),
        ("plan us", "planner_us_per_layer"),
        ("shapes", "shape_changes"),
    )
    scale = {"bytes_moved": 1e-9, "layer_seconds": 1e3, "original_seconds_per_layer": 1e3}
    widths = [max(13 if key == "hiding" else 11, len(title) + 2) for title, key in columns]
    lines = ["planner".ljust(30) + "".join(title.rjust(w) for (title, _), w in zip(columns, widths, strict=True))]
    for name, summary in summaries.items():
        cells = []
        for (_, key), width in zip(columns, widths, strict=True):
            value = summary.get(key)
            text = value if isinstance(value, str) else None if value is None else f"{value * scale.get(key, 1):.4g}"
            cells.append((text or "-").rjust(width))
        lines.append(name.ljust(30) + "".join(cells))
    return "\n".join(lines)
