"""Summaries of replayed planners: balance, bytes, modelled seconds, and the costs of the original systems.

Inputs: Records of each planner. Outputs: one flat dict of numbers per planner, and a table. Seconds are None where the
cluster leaves a figure absent that the model needs.

Letters: docs/notation.md; n samples.
"""

from __future__ import annotations

import numpy as np

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
        "shape_changes": records.shape_changes,
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
    transfer = 2 * cost.transfer(_holders(records), records.computed.shape[2], "replay")
    work = 3 * cost.forward(records.computed, "replay")
    talk = 4 * records.exchange + transfer
    tokens = records.computed.sum(axis=2).mean()
    flops = 12.0 * cost.model_dim * cost.hidden_dim * tokens / records.computed.shape[2]
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
    parts = cost.parts(records.computed, records.received, _holders(records), "replay")
    place, reduce, others = (float(parts[key].mean()) for key in ("place", "reduce", "others"))
    critical = search if split_name(records.name)[1] else 0.0
    layer = critical + place + reduce + others
    plain = float(cost.layer(base.computed, base.received, np.zeros(base.computed.shape[:2]), "replay").mean())
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


def _holders(records: Records) -> np.ndarray:
    """Devices that hold a replicated expert, its home included, summed over replicated experts: [n, L]."""
    replicated = records.expert_replicas > 0
    return (records.expert_replicas + replicated).sum(axis=2)


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
        ("lambda", "lambda"),
        ("GB moved", "bytes_moved"),
        ("layer ms", "layer_seconds"),
        ("over EP", "speedup_over_ep"),
        ("orig. ms", "original_seconds_per_layer"),
        ("plan us", "planner_us_per_layer"),
        ("shapes", "shape_changes"),
    )
    scale = {"bytes_moved": 1e-9, "layer_seconds": 1e3, "original_seconds_per_layer": 1e3}
    widths = [max(11, len(title) + 2) for title, _ in columns]
    lines = ["planner".ljust(30) + "".join(title.rjust(w) for (title, _), w in zip(columns, widths, strict=True))]
    for name, summary in summaries.items():
        cells = []
        for (_, key), width in zip(columns, widths, strict=True):
            value = summary[key]
            cells.append(("-" if value is None else f"{value * scale.get(key, 1):.4g}").rjust(width))
        lines.append(name.ljust(30) + "".join(cells))
    return "\n".join(lines)
