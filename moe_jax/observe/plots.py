"""The pictures of a run: loss, expert load over time, device load over time.

Inputs: metrics.jsonl, evaluations.jsonl and loads.npz of a run folder. Outputs: plots/*.png.
Letters: docs/notation.md.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_jax.observe.loads import LoadsTrace, read_loads
from moe_jax.observe.metrics_file import Records, column, read_metrics
from moe_jax.observe.run_folder import EVALUATIONS, RunFolder, atomic_file, disk_errors_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 200
MOST_POINTS = 400  # along the time axis; longer runs are averaged in windows

PURPLE, YELLOW, SKY = "#CC79A7", "#E69F00", "#56B4E9"
BLUE, ORANGE, GREEN, INK, GREY, FAINT = "#0072B2", "#D55E00", "#009E73", "#1f2328", "#656d76", "#d8dee4"


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG atomically, without the metadata that would make equal pictures differ."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None})
    return path


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that many inches that draws with Agg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def windowed(steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Average neighbouring records so that at most `most` points are left.

    Args:
      steps: [n].
      values: [n] or [n, layers]; NaN counts as absent.

    Returns:
      (steps, values) of at most `most` rows: the last step of each window and the mean over it.
    """
    if len(steps) <= most:
        return steps, values
    starts = np.linspace(0, len(steps), most, endpoint=False).astype(int)
    present = np.isfinite(values)
    counts = np.add.reduceat(present, starts, axis=0, dtype=np.float64)
    sums = np.add.reduceat(np.where(present, values, 0.0), starts, axis=0)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return steps[np.append(starts[1:], len(steps)) - 1], means


def smoothed(values: np.ndarray, reach: int | None = None) -> np.ndarray:
    """Average each value [n] with its neighbours up to `reach` away on both sides; NaN is left out."""
    n = len(values)
    reach = max(1, min(10, n // 20)) if reach is None else reach
    present = np.isfinite(values)
    counts = np.concatenate([[0.0], np.cumsum(present)])
    sums = np.concatenate([[0.0], np.cumsum(np.where(present, values, 0.0))])
    index = np.arange(n)
    # The same reach on both sides, so that a falling curve is not shifted.
    sides = np.minimum(reach, np.minimum(index, n - 1 - index))
    first, stop = index - sides, index + sides + 1
    number = counts[stop] - counts[first]
    return np.where(present, (sums[stop] - sums[first]) / np.maximum(number, 1), np.nan)


def style_axes(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(True, axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=8.5, length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=GREY, size=9)


def title_axes(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", color=INK, fontsize=11, fontweight="bold", pad=10)


def span_axes(axes: Axes, steps: np.ndarray) -> None:
    """Let the axis begin and end with the data; a single step gets a margin on both sides."""
    if len(steps):
        first, last = float(steps.min()), float(steps.max())
        room = 0.01 * (last - first) if last > first else 0.5
        axes.set_xlim(first - room, last + room)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

NO_TOKENS = "#000000"
_WIDTH = 7.2


def expert_load_heat_maps(trace: LoadsTrace) -> Figure:
    """Draw a panel per layer: steps to the right, experts upwards, colour = load against an even share.

    The scale is logarithmic and the same in all panels; white is an even share, an expert without a token is black.
    With more experts than pixels their colours are averaged.

    Args:
      trace: loads [Nt, L, S, E] and iterations [Nt].
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    shares, first, last = load_grid(trace)
    L, E, _ = shares.shape
    across, down = panel_grid(L)
    height = panel_height(E, down)
    figure = new_figure(_WIDTH, 0.9 + down * (height + 0.26))
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    reach = colour_reach(shares)
    norm = LogNorm(1.0 / reach, reach)
    for layer, axes in enumerate(panels.flat):
        if layer >= L:
            axes.set_axis_off()
            continue
        axes.imshow(
            # Below the scale: no token. The lightest loads stay on it.
            np.where(shares[layer] > 0, np.clip(shares[layer], 1.001 / reach, reach), 1e-9),
            cmap=_colours(),
            norm=norm,
            aspect="auto",
            origin="lower",
            extent=(first, last, -0.5, E - 0.5),
        )
        _dress(axes, layer, labelled_below=layer + across >= L, labelled_left=layer % across == 0)
    # The panels share their axes, and so one set of ticks.
    panels[0, 0].set_yticks(sorted({0, E // 2, E - 1}))
    panels[0, 0].xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    panels[0, 0].set_xlim(first, last)
    bar = figure.colorbar(
        ScalarMappable(norm, _colours()), ax=panels, location="top", aspect=45, shrink=0.7, pad=0.01, extend="min"
    )
    ticks, labels = _scale_ticks(reach)
    bar.set_ticks(ticks, labels=labels)
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8, colors=GREY, length=0)
    bar.outline.set_visible(False)
    figure.suptitle("Expert load over time, against an even share (black: no token)", x=0.01, ha="left", color=INK,
                    fontsize=11, fontweight="bold")  # fmt: skip
    figure.supxlabel("step", color=GREY, fontsize=9)
    figure.supylabel("expert", color=GREY, fontsize=9)
    return figure


def load_grid(trace: LoadsTrace, most: int = MOST_POINTS) -> tuple[np.ndarray, float, float]:
    """Bring samples onto an even time axis and divide each expert's load by the even share.

    Args:
      trace: loads [Nt, L, S, E].
      most: columns at most; several samples in one column are averaged, a gap repeats the sample before it.

    Returns:
      (shares float64 [L, E, n], first, last): 1 is an even share; the steps at the left and right edge.
    """
    tokens = trace.loads.sum(axis=2, dtype=np.int64).astype(np.float64)
    even = tokens.mean(axis=2, keepdims=True)
    shares = tokens / np.where(even > 0, even, 1.0)
    steps = trace.iterations.astype(np.int64)
    apart = int(np.diff(steps).min()) if len(steps) > 1 else 1
    columns = min(most, int(steps[-1] - steps[0]) // apart + 1)
    edges = steps[0] + (steps[-1] - steps[0] + apart) * np.arange(columns + 1) / columns
    # Column j holds the samples from edge j to edge j + 1, or else the newest one before it.
    stops = np.searchsorted(steps, edges[1:] - 1e-6)
    starts = np.minimum(np.concatenate([[0], stops[:-1]]), stops - 1)
    sums = np.concatenate([np.zeros((1, *shares.shape[1:])), np.cumsum(shares, axis=0)])
    means = (sums[stops] - sums[starts]) / (stops - starts)[:, None, None]
    return means.transpose(1, 2, 0), float(edges[0]), float(edges[-1])


def panel_grid(layers: int) -> tuple[int, int]:
    """Return (panels across, panels down): one or two wide panels, then 3, 4, 6 and 8 columns."""
    across = next(
        columns for columns, most in ((1, 2), (2, 6), (3, 12), (4, 24), (6, 48), (8, math.inf)) if layers <= most
    )
    across = min(across, layers)
    return across, math.ceil(layers / across)


def panel_height(experts: int, down: int) -> float:
    """Return inches: taller for more experts, lower when many panels share the page."""
    return max(0.75, min(0.6 + 0.05 * experts, 3.8, 9.0 / down))


def colour_reach(shares: np.ndarray) -> float:
    """Return the multiple of an even share at the upper end of the scale, a power of two from 2 to 64.

    It covers all but the heaviest 0.2% of the loads, so that one outlier does not make the others look alike. The lower
    end is its inverse: the light experts do not set it, since a step waits for the heavy ones.
    """
    extreme = float(np.quantile(shares, 0.998))
    return 2.0 ** min(6, max(1, math.ceil(math.log2(max(extreme, 1.0)) - 0.01)))


def _colours() -> Colormap:
    import matplotlib

    return matplotlib.colormaps["RdBu_r"].with_extremes(under=NO_TOKENS)


def _dress(axes: Axes, layer: int, *, labelled_below: bool, labelled_left: bool) -> None:
    axes.set_title(f"layer {layer}", loc="left", fontsize=8, color=INK, pad=2)
    axes.tick_params(
        colors=GREY, labelsize=7.5, length=2, color=FAINT, labelbottom=labelled_below, labelleft=labelled_left
    )
    for spine in axes.spines.values():
        spine.set_visible(False)


def _scale_ticks(reach: float) -> tuple[list[float], list[str]]:
    powers = range(-int(math.log2(reach)), int(math.log2(reach)) + 1)
    labels = [f"{2**power}x" if power > 0 else f"1/{2**-power}x" for power in powers]
    labels[0], labels[-1], labels[len(labels) // 2] = "\u2264 " + labels[0], "\u2265 " + labels[-1], "even"
    return [2.0**power for power in powers], labels


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
