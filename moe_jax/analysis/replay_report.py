"""Replayed planners: balance, bytes and modelled seconds; tables and pictures.

matplotlib is imported when a picture is drawn, never before. Letters: docs/notation.md; n samples.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from moe_jax.analysis.simulate import Records
from moe_jax.planning.block_schedule import Prefetch
from moe_jax.planning.cost import Cost

WARM = 9  # judged samples in which a plan from the past hardly helps: report without them too


def summarize(records: Records, base: Records, cost: Cost) -> dict:
    """Return the numbers of one planner, to six digits; `base` holds plain expert parallelism over the same samples."""
    mean = records.computed.mean(axis=2)  # a layer without tokens is even
    ratio = np.where(mean > 0, records.computed.max(axis=2) / np.where(mean > 0, mean, 1.0), 1.0)
    warm = ratio[WARM:]
    spread, before = records.computed.std(axis=2).mean(), base.computed.std(axis=2).mean()
    replicas = records.expert_replicas.sum(axis=2)
    chunks = (records.expert_replicas > 0).mean(axis=2)
    layers, devices = records.computed.shape[1:]
    moved = 2 * replicas * cost.prices.expert_bytes + records.moved * cost.prices.state_bytes
    found = {
        "max_over_mean": ratio.mean(),
        "max_over_mean_p95": np.percentile(ratio, 95),
        "max_over_mean_from_10": warm.mean() if warm.size else None,
        "max_over_mean_p95_from_10": np.percentile(warm, 95) if warm.size else None,
        "rb": before / max(spread, 1e-9),
        "replicas_per_layer": replicas.mean(),
        "replicas_per_device": replicas.mean() / devices,
        "bytes_moved": moved.sum(axis=1).mean(),
        "lambda": chunks.mean(),
        **_seconds(records, base, cost),
        "planner_us_per_layer": 1e6 * (records.search / layers).mean(),
        **_sent(records),
        "hiding": records.hiding,
        "shape_changes": records.transfers.changes,
        **{f"counter_{name}": count for name, count in records.counters.items()},
    }
    return {key: _rounded(value) for key, value in found.items()}


def _rounded(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def roofline(records: Records, cost: Cost) -> tuple[float, float]:
    """Return (x, y) of the DDL-Roofline: computation over communication, FLOP/s per device reached.

    Source: FasterMoE, section 3.3. T_e2e is that of the planner's own block-wise schedule: T_comp + T_comm, less what
    of T_comm is hidden; the ratio counts both in full.
    """
    end_to_end = float(sum(part.mean() for part in _parts(records, cost).values()))
    in_turn = float(sum(part.mean() for part in _parts(dataclasses.replace(records, hiding="none"), cost).values()))
    work = 3 * float(cost.prices.compute(records.computed).mean())
    tokens = records.computed.sum(axis=2).mean()
    flops = 6 * cost.prices.expert_params * tokens / records.computed.shape[2]
    return work / max(in_turn - work, 1e-30), flops / max(end_to_end, 1e-30)


def _seconds(records: Records, base: Records, cost: Cost) -> dict:
    """Return modelled seconds of a layer by what they are spent on (Pro-Prophet, table I), and the speed-up over EP.

    The search took seconds of this host, and stands apart: a modelled device's seconds never have it added, not even
    after the gate, where the running program searches on its devices.
    """
    seconds = {name: float(part.mean()) for name, part in _parts(records, cost).items()}
    layer = sum(seconds.values())
    plain = float(sum(part.mean() for part in _parts(base, cost).values()))
    return {
        "layer_seconds": layer,
        **{f"{name}_seconds": own for name, own in seconds.items()},
        "speedup_over_ep": plain / layer if layer else None,
        "search_seconds": float(records.search.mean()) / records.computed.shape[1],
    }


def _parts(records: Records, cost: Cost) -> dict[str, np.ndarray]:
    """Return seconds [n, L] by purpose, under the shapes in force and the planner's own block-wise schedule."""
    cost = dataclasses.replace(cost, prefetch=Prefetch(schedule=records.hiding))
    needed = records.transfers.needed
    if cost.prices.of_program:
        exchange, late = records.exchange, records.transfers.late_seconds
        trans = np.broadcast_to(records.transfers.seconds[:, None], needed.slots.shape)
    else:  # experts one by one, those that came late too
        exchange, trans, late = None, None, 0.0
        holders = records.expert_replicas + (records.expert_replicas > 0)
        needed = needed._replace(holders=holders.sum(axis=2))
    parts = cost.parts(records.computed, records.received, needed, exchange=exchange, trans=trans)
    return {**parts, "place": parts["place"] + late, "reduce": parts["reduce"] + late}


def _sent(records: Records) -> dict:
    """Return what the busiest device sends and receives for a layer's Trans, in experts, mean over samples and layers.

    The transfer of the shape in force (`transfer_form`), and after the gate what came late.
    """
    moved = records.transfers
    inside, across = (moved.ahead.mean(axis=0) + moved.late.mean(axis=(0, 1))).tolist()
    return {
        "transfer_form": moved.form,
        "sent_experts": inside + across,
        "sent_experts_across": across,
        "received_experts": records.device_replicas.max(axis=2).mean(),
    }


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


def plot_layer(records: Records, layer: int, folder: pathlib.Path) -> None:
    """Draw one layer, samples to the right, into the folder.

    One picture has the tokens of each device over the device mean, one is black where an expert has replicas
    (FasterMoE, figure 11).
    """
    from matplotlib.figure import Figure

    loads, replicated = records.computed[:, layer].T, records.expert_replicas[:, layer].T > 0
    mean = loads.mean(axis=0)
    ratio, binary = loads / np.where(mean > 0, mean, 1.0), {"vmax": 1, "cmap": "binary"}
    for name, values, label, title, how in (
        ("device_load", ratio, "device", "device load / mean", {"vmax": 4}),
        ("replicas", replicated, "expert", "replicated experts", binary),
    ):
        figure = Figure(figsize=(9, 3), layout="constrained")
        axes = figure.subplots()
        shades = axes.imshow(values, aspect="auto", origin="lower", vmin=0, interpolation="nearest", **how)
        axes.set(xlabel="sample", ylabel=label, title=f"{records.name}: {title}, layer {layer}")
        if name == "device_load":
            figure.colorbar(shades)
        figure.savefig(folder / f"{name}_{records.name}.png", dpi=90)


def plot_roofline(records: dict[str, Records], cost: Cost, path: pathlib.Path) -> None:
    """Draw every planner under the ideal and the synchronous roof.

    Roofs: P min(1, x) and P x / (1 + x). Source: FasterMoE, section 3.3.
    """
    from matplotlib.figure import Figure

    peak = cost.prices.cluster.need("flops", "the roofline")
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    ratio = np.logspace(-2, 2, 200)
    axes.plot(ratio, peak * np.minimum(1, ratio) / 1e12, label="ideal: all overlaps")
    axes.plot(ratio, peak * ratio / (1 + ratio) / 1e12, "--", label="synchronous")
    for name, record in records.items():
        x, y = roofline(record, cost)
        axes.plot(x, y / 1e12, "o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="computation / communication", ylabel="TFLOP/s per device")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)
