"""Pictures of a replay: device loads over time, replicas as black cells, and the DDL-Roofline.

Inputs: Records. Outputs: PNG files. matplotlib is imported when a picture is drawn, never before.
"""

from __future__ import annotations

import pathlib

import numpy as np

from moe_jax.planner.cost import Cost
from moe_jax.replay.report import roofline
from moe_jax.replay.simulate import Records


def _figure(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_device_load(records: Records, layer: int, path: pathlib.Path) -> None:
    """Draw tokens per device over the device mean, samples to the right, devices upwards, for one layer."""
    figure = _figure(9, 3)
    axes = figure.subplots()
    loads = records.computed[:, layer].T
    mean = loads.mean(axis=0)
    shades = axes.imshow(
        loads / np.where(mean > 0, mean, 1.0), aspect="auto", origin="lower", vmin=0, vmax=4, interpolation="nearest"
    )
    axes.set(xlabel="sample", ylabel="device", title=f"{records.name}: device load / mean, layer {layer}")
    figure.colorbar(shades)
    figure.savefig(path, dpi=90)


def plot_replicas(records: Records, layer: int, path: pathlib.Path) -> None:
    """Draw which experts are replicated, black where an expert has replicas (FasterMoE, figure 11), for one layer."""
    figure = _figure(9, 3)
    axes = figure.subplots()
    axes.imshow(
        records.expert_replicas[:, layer].T > 0,
        aspect="auto",
        origin="lower",
        cmap="binary",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    axes.set(xlabel="sample", ylabel="expert", title=f"{records.name}: replicated experts, layer {layer}")
    figure.savefig(path, dpi=90)


def plot_roofline(records: dict[str, Records], cost: Cost, path: pathlib.Path) -> bool:
    """Draw every planner under the ideal and the synchronous roof; say whether the cluster's figures allow it.

    Roofs: P min(1, x) and P x / (1 + x). Source: FasterMoE, section 3.3.
    """
    points = {name: roofline(record, cost) for name, record in records.items()}
    known = {name: point for name, point in points.items() if point is not None}
    if not known:
        return False
    peak = cost.cluster.need("flops", "the roofline")
    figure = _figure(8, 6)
    axes = figure.subplots()
    ratio = np.logspace(-2, 2, 200)
    axes.plot(ratio, peak * np.minimum(1, ratio) / 1e12, label="ideal: all overlaps")
    axes.plot(ratio, peak * ratio / (1 + ratio) / 1e12, "--", label="synchronous")
    for name, (x, y) in known.items():
        axes.plot(x, y / 1e12, "o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="computation / communication", ylabel="TFLOP/s per device")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)
    return True
