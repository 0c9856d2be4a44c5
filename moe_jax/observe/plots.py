"""The pictures of a run: loss, expert load over time, device load over time.

Inputs: metrics.jsonl, evaluations.jsonl and loads.npz of a run folder. Outputs: plots/*.png.
Letters: docs/notation.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_jax.observe.atomic import disk_errors_named
from moe_jax.observe.figures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MOST_POINTS,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    new_figure,
    save_figure,
    smoothed,
    span_axes,
    style_axes,
    title_axes,
    windowed,
)
from moe_jax.observe.heat_maps import expert_load_heat_maps
from moe_jax.observe.load_trace import read_loads
from moe_jax.observe.metrics_file import column, read_metrics
from moe_jax.observe.run_folder import EVALUATIONS, RunFolder
from moe_jax.observe.summary import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = (BLUE, ORANGE, PURPLE, YELLOW, SKY)  # for a few layers; more layers get a colour scale


def draw_all(folder: str | os.PathLike[str]) -> list[Path]:
    """Draw every picture that the run has data for.

    Args:
      folder: the run folder.

    Returns:
      The files drawn: loss.png, device_load.png and, if loads were recorded, expert_load.png.

    Raises:
      UserError: a file of the run is damaged, or plots/ cannot be written.
    """
    run = RunFolder(folder)
    metrics, evaluations = read_metrics(run), read_metrics(run, file_name=EVALUATIONS)
    with disk_errors_named(run.plots):
        run.plots.mkdir(exist_ok=True)
    drawn = []
    if metrics or evaluations:
        drawn.append(save_figure(loss_figure(metrics, evaluations), run.plots / "loss.png"))
    if column(metrics, "device_load_max_over_mean")[1].ndim == 2:
        drawn.append(save_figure(device_load_figure(metrics), run.plots / "device_load.png"))
    if run.loads.exists():
        drawn.append(save_figure(expert_load_heat_maps(read_loads(run.loads)), run.plots / "expert_load.png"))
    return drawn


def loss_figure(metrics: Records, evaluations: Records) -> Figure:
    """Draw training and held-out loss over the steps, and below them the learning rate.

    Args:
      metrics: records with `loss` and `learning_rate`.
      evaluations: records with `held_out_loss`, perhaps `unigram_entropy`.
    """
    figure = new_figure(7.2, 4.6)
    rates = column(metrics, "learning_rate")
    if len(rates[0]):
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
        style_axes(below)
        below.plot(*windowed(*rates), color=GREY, linewidth=1.4)
        below.set_ylim(bottom=0)
        below.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        below.yaxis.get_offset_text().set(size=7.5, color=GREY)
        below.set_ylabel("learning\nrate")
        below.set_xlabel("step")
    else:
        axes = figure.subplots()
        axes.set_xlabel("step")
    style_axes(axes)
    steps, losses = windowed(*column(metrics, "loss"))
    if len(steps):
        axes.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.35, marker="o" if len(steps) == 1 else None)
        axes.plot(steps, smoothed(losses), color=BLUE, linewidth=1.8, label="training (smoothed)")
    held_steps, held_losses = column(evaluations, "held_out_loss")
    if len(held_steps):
        axes.plot(held_steps, held_losses, "o-", color=ORANGE, markersize=5, linewidth=1.0, label="held-out")
        last = held_losses[-1]
        if np.isfinite(last):
            axes.annotate(f"{last:.3f}", (held_steps[-1], last), (4, -13), textcoords="offset points", ha="right",
                          color=ORANGE, fontsize=8.5, fontweight="bold")  # fmt: skip
    entropies = column(evaluations, "unigram_entropy")[1]
    if entropies.size and np.isfinite(entropies[-1]):
        axes.axhline(
            entropies[-1], color=GREEN, linewidth=1.2, linestyle=(0, (5, 3)), label="unigram entropy of the corpus"
        )
    axes.set_ylabel("cross-entropy (nats per token)")
    title_axes(axes, "Loss")
    span_axes(axes, np.concatenate([steps, held_steps]))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    return figure


def device_load_figure(metrics: Records) -> Figure:
    """Draw device load max over mean of every layer over the steps, their mean, and the balanced value 1.

    Args:
      metrics: records with `device_load_max_over_mean`, one number per layer.
    """
    figure = new_figure(7.2, 4.0)
    axes = figure.subplots()
    style_axes(axes)
    steps, per_layer = column(metrics, "device_load_max_over_mean")
    L = per_layer.shape[1]
    counted = np.isfinite(per_layer).sum(axis=1)
    mean = np.where(counted > 0, np.nansum(per_layer, axis=1) / np.maximum(counted, 1), np.nan)
    colours = _layer_colours(L)
    few = len(steps) < 3
    # Many layers overlap: theirs are drawn from wider windows than the mean.
    line_steps, lines = windowed(steps, per_layer, MOST_POINTS if L <= len(_NAMED) else MOST_POINTS // 4)
    for layer in range(L):
        label = f"layer {layer}" if L <= len(_NAMED) else None
        axes.plot(line_steps, lines[:, layer], color=colours[layer], linewidth=1.0, alpha=0.75, label=label,
                  marker="o" if few else None, markersize=3)  # fmt: skip
    if L > 1:
        steps, mean = windowed(steps, mean)
        axes.plot(steps, smoothed(mean), color=INK, linewidth=2.0, label=f"mean of {L} layers (smoothed)",
                  marker="o" if few else None)  # fmt: skip
    if L > len(_NAMED):
        _layer_bar(figure, axes, colours)
    axes.axhline(1.0, color=GREEN, linewidth=1.2, linestyle=(0, (5, 3)), label="balanced")
    axes.set_ylim(bottom=1.0 - 0.06 * max(0.05, axes.get_ylim()[1] - 1.0))
    axes.set_xlabel("step")
    axes.set_ylabel("tokens per device, max / mean")
    title_axes(axes, "Device load: the fullest device against the mean")
    span_axes(axes, steps)
    # Below the axes: noisy lines leave no corner free.
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK)
    return figure


def _layer_colours(L: int) -> list:
    """Return a colour per layer: named ones for a few, else from dark to light with depth."""
    if L <= len(_NAMED):
        return list(_NAMED[:L])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, L)))


def _layer_bar(figure: Figure, axes: Axes, colours: list) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.ticker import MaxNLocator

    L = len(colours)
    bar = figure.colorbar(
        ScalarMappable(BoundaryNorm(np.arange(-0.5, L), L), ListedColormap(colours)), ax=axes, aspect=30, pad=0.02
    )
    bar.set_ticks([tick for tick in MaxNLocator(6, integer=True).tick_values(0, L - 1) if 0 <= tick < L])
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter("{x:.0f}")
    bar.set_label("layer", color=GREY, fontsize=8.5)
    bar.ax.tick_params(labelsize=8, colors=GREY, length=0)
    bar.outline.set_visible(False)  # type: ignore[operator]
