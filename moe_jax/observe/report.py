"""The pictures of a run (loss, expert load and device load over time), and one page about it in one file.

metrics.jsonl, evaluations.jsonl and loads.npz of a run folder become plots/*.png; these records, the config and the
environment become report.html, which asks for nothing. Absolute paths are shortened to their last part, so that the
page shows no folders or user names of the machine. Letters: docs/notation.md.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_jax.observe.followed import FollowedRun
from moe_jax.observe.loads import LoadsTrace, read_loads
from moe_jax.observe.metrics_file import MOST_RECORDS, column, read_metrics, summarize_run
from moe_jax.observe.page import page_of
from moe_jax.observe.progress import with_prefix
from moe_jax.storage.run_folder import (
    EVALUATIONS,
    METRICS,
    RunFolder,
    atomic_file,
    disk_errors_named,
    read_text,
    write_atomically,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 200
MOST_POINTS = 400  # of expert loads along the time axis

PURPLE, YELLOW, SKY = "#CC79A7", "#E69F00", "#56B4E9"
BLUE, ORANGE, GREEN, INK, GREY, FAINT = "#0072B2", "#D55E00", "#009E73", "#1f2328", "#656d76", "#d8dee4"
_NAMED = (BLUE, ORANGE, PURPLE, YELLOW, SKY)  # for a few layers; more layers get a colour scale

# A path from the root or a home folder: `/a/b`, `~/b`, not a division or the inside of a relative path or of a URL.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~\-])(?:~[\w.\-]*)?/(?:[^\s'\"/]+/)*([^\s'\"/]+)/?")


def write_report(folder: str | os.PathLike[str], pictures: Sequence[Path] | None = None) -> Path:
    """Write report.html from whatever the run folder holds, and return its path.

    Args:
      pictures: what `draw_all` returned, of which expert_load.png is shown; None draws them now.
    """
    run = RunFolder(folder)
    summary, environment, data = summarize_run(run), run.read_environment(), FollowedRun(run).refresh()
    # The folder's own name, also when it is given as "." or with a link.
    data["name"], date = run.path.resolve().name, environment.get("date")
    steps = "no steps" if summary["steps"] is None else f"{summary['steps']:,} steps"
    texts = {"Config": read_text(run.config), "All values used, defaults included": read_text(run.operative_config)}
    pictures = draw_all(run) if pictures is None else pictures
    shown = [base64.b64encode(path.read_bytes()).decode() for path in pictures if path.name == "expert_load.png"]
    data["about"] = {
        "lead": f"moe_jax run, {steps}{f', {date}' if date else ''}",
        "numbers": model_facts(environment) + headline_numbers(summary),
        "expert_load": shown[0] if shown else None,
        "texts": {name: without_absolute_paths(text.strip()) for name, text in texts.items() if text is not None},
        "environment": {
            name.replace("_", " "): without_absolute_paths(_words(value))
            for name, value in environment.items()
            if name != "modelled"
        },
    }
    return write_atomically(run.report, page_of(data)[0])


def report_run(run: RunFolder) -> None:
    """Draw the pictures, write the report, and print where they are and what a finished run has reached."""
    pictures, summary = draw_all(run), summarize_run(run)
    page, below = write_report(run, pictures), summary["below_unigram_entropy"]
    against = "" if below is None else f"; the held-out loss ends {100 * abs(below):.1f}% {_side(below)} it"
    reached = {name: value for name, value in summary.items() if value or isinstance(value, float)}
    lines = [("run folder", str(run.path))]
    for label, text in (
        ("held-out loss", "{held_out_loss_first:.4f} before, {held_out_loss_last:.4f} after training"),
        ("", "{held_out_loss_ema:.4f} after training, with averaged parameters"),
        ("bits per byte", "{bits_per_byte:.4f} of the held-out text, after training"),
        ("unigram entropy", "{unigram_entropy:.4f} of the held-out text" + against),
        ("skipped steps", "{skipped_steps}, whose loss or gradient was not finite"),
        ("steps run again", "{steps_run_again}, because a bucket overflowed"),
    ):
        with contextlib.suppress(KeyError):  # what no record states, and counts of nothing
            lines.append((label, text.format(**reached)))
    lines += [*(("plot", str(picture)) for picture in pictures), ("report", str(page))]
    for label, text in lines:
        print(f"{label:<18}{text}")


def _side(below: float) -> str:
    """Return on which side of the unigram entropy a loss is that lies this share of it below."""
    return "below" if below >= 0 else "above"


def model_facts(environment: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, value, remark) of the parameters and the planner that environment.json states."""
    rows = []
    if counts := environment.get("parameters"):
        total, active = with_prefix(counts["total"]), with_prefix(counts["active"])
        rows.append(("parameters", total, f"{active} of them for a token"))
    if "planner" in environment:
        rows.append(("planner", str(environment["planner"]), f"schedule {environment['schedule']}"))
    return rows


def headline_numbers(summary: dict) -> list[tuple[str, str, str]]:
    """Return (label, value, remark) for each number that the run's records state."""
    below, against = summary["below_unigram_entropy"], ""
    if below is not None:
        against = f"loss ends {abs(below):.0%} {_side(below)} it"
    rows = [
        ("held-out loss, before", "held_out_loss_first", ".3f", "nats per token"),
        ("held-out loss, after", "held_out_loss_last", ".3f", "nats per token"),
        ("held-out loss, averaged", "held_out_loss_ema", ".3f", "moving average of parameters"),
        ("bits per byte", "bits_per_byte", ".3f", "of held-out text, after"),
        ("unigram entropy", "unigram_entropy", ".3f", against),
        ("training loss, last step", "loss_last", ".3f", "nats per token"),
        ("tokens/s", "tokens_per_second", "si", "median"),
        ("model FLOP/s", "model_flops_per_second", "si", "median, all devices"),
        ("step", "step_seconds", "s", "median"),
        ("peak memory per device", "peak_device_bytes", "bytes", ""),
        ("device load, mean", "device_load_mean", ".2f", "max / mean, 1 is balanced"),
        ("device load, worst", "device_load_worst", ".2f", "of any layer and step"),
        ("dropped tokens", "dropped_fraction", ".3%", "mean over steps"),
        ("overflow steps", "overflow_steps", ",.0f", "took more than one pass"),
        ("skipped steps", "skipped_steps", "some", "loss or gradient not finite"),
        ("updates left out", "overflowed_updates", "some", "gradients overflowed float16, the loss scale was halved"),
        ("steps run again", "steps_run_again", "some", "a bucket overflowed in the common program"),
        ("compilations", "compilations", "some", f"{summary['compile_seconds']:.1f} s in all"),
        ("re-jit stall", "rejit_stall_seconds", ".1f", "seconds waited"),
    ]
    forms = {
        "some": "{:,.0f}".format,
        "si": with_prefix,
        "s": lambda value: f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s",
        "bytes": lambda value: f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB",
    }
    numbers = []
    for label, name, form, remark in rows:
        value = summary[name]
        if value is not None and (value or form != "some"):
            numbers.append((label, forms[form](value) if form in forms else format(value, form), remark))
    return numbers


def without_absolute_paths(text: str) -> str:
    """Shorten every absolute path to its last part: `'/data/ann/books.txt'` becomes `'.../books.txt'`."""
    return _ABSOLUTE_PATH.sub(r".../\1", text)


def _words(value: Any) -> str:
    """Write plain data as a phrase: {"data": 1, "expert": 8} as `data 1, expert 8`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_words(item) for item in value)
    if value is None or isinstance(value, bool):
        return {None: "unknown", True: "yes", False: "no"}[value]
    return str(value)


def has_report(run: RunFolder) -> bool:
    """Say whether a finished run's report is there, and the pictures too, where they can be drawn."""
    missing = importlib.util.find_spec("matplotlib") is not None and not any(run.plots.glob("*.png"))
    return run.report.exists() and not missing


def draw_all(folder: str | os.PathLike[str]) -> list[Path]:
    """Draw loss.png, device_load.png and, of recorded loads, expert_load.png: what the run has data for.

    Without matplotlib there is one line that says so, and no picture.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed; pip install matplotlib, then give the same command again")
        return []
    run = RunFolder(folder)
    metrics, evaluations = (read_metrics(run, file_name=name, most=MOST_RECORDS) for name in (METRICS, EVALUATIONS))
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


def smoothed(values: np.ndarray) -> np.ndarray:
    """Average each value [n] with its neighbours up to a fortieth of all away, fewer near the ends; NaN is left out."""
    n, present = len(values), np.isfinite(values)
    index, reach = np.arange(n), max(1, n // 40)
    # the same reach on both sides, but for the outermost values, so that a falling curve is not shifted
    sides = np.clip(np.minimum(index, n - 1 - index), reach // 8, reach)
    first, stop = np.maximum(index - sides, 0), np.minimum(index + sides + 1, n)
    counts, sums = (np.append(0.0, np.cumsum(each)) for each in (present, np.where(present, values, 0.0)))
    return np.where(present, (sums[stop] - sums[first]) / np.maximum(counts[stop] - counts[first], 1), np.nan)


def style_axes(axes: Axes) -> None:
    """Draw axes as all pictures of runs have them: no frame, faint horizontal lines behind the data, grey ticks."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(True, axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(colors=GREY, labelsize=8.5, length=0)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=GREY, size=9)


def title_axes(axes: Axes, text: str) -> None:
    """Write a picture's title, bold, above its left edge."""
    axes.set_title(text, loc="left", color=INK, fontsize=11, fontweight="bold", pad=10)


def expert_load_heat_maps(trace: LoadsTrace) -> Figure:
    """Draw a panel per layer: steps to the right, experts upwards, colour = load against an even share.

    The scale is logarithmic and the same in all panels; white is an even share, an expert without a token is black.
    With more experts than pixels their colours are averaged.
    """
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    shares, first, last = load_grid(trace)
    L, E, _ = shares.shape
    # one or two wide panels, then 3, 4, 6 and 8 columns; taller for more experts, lower when many share the page
    across = min(L, next(columns for columns, most in ((1, 2), (2, 6), (3, 12), (4, 24), (6, 48), (8, L)) if L <= most))
    down = math.ceil(L / across)
    height = max(0.75, min(0.6 + 0.05 * E, 3.8, 9.0 / down))
    figure = new_figure(7.2, 0.9 + down * (height + 0.26))
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    # The upper end of the scale, a power of two from 2 to 64, covers all but the heaviest 0.2% of the loads, so that
    # one outlier does not make the others look alike. The lower end is its inverse: the light experts do not set it,
    # since a step waits for the heavy ones.
    power = min(6, max(1, math.ceil(math.log2(max(float(np.quantile(shares, 0.998)), 1.0)) - 0.01)))
    reach = 2.0**power
    norm, colours = LogNorm(1.0 / reach, reach), matplotlib.colormaps["RdBu_r"].with_extremes(under="#000000")
    for layer, axes in enumerate(panels.flat):
        if layer >= L:
            axes.set_axis_off()
            continue
        # Below the scale: no token. The lightest loads stay on it.
        shown = np.where(shares[layer] > 0, np.clip(shares[layer], 1.001 / reach, reach), 1e-9)
        extent = (first, last, -0.5, E - 0.5)
        axes.imshow(shown, cmap=colours, norm=norm, aspect="auto", origin="lower", extent=extent)
        axes.set_title(f"layer {layer}", loc="left", fontsize=8, color=INK, pad=2)
        labelled = {"labelbottom": layer + across >= L, "labelleft": layer % across == 0}
        axes.tick_params(colors=GREY, labelsize=7.5, length=2, color=FAINT, **labelled)
        for spine in axes.spines.values():
            spine.set_visible(False)
    # The panels share their axes, and so one set of ticks.
    panels[0, 0].set_yticks(sorted({0, E // 2, E - 1}))
    panels[0, 0].xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    panels[0, 0].set_xlim(first, last)
    bar = figure.colorbar(
        ScalarMappable(norm, colours), ax=panels, location="top", aspect=45, shrink=0.7, pad=0.01, extend="min"
    )
    powers = range(-power, power + 1)
    labels = [f"{2**power}x" if power > 0 else f"1/{2**-power}x" for power in powers]
    labels[0], labels[-1], labels[len(labels) // 2] = "\u2264 " + labels[0], "\u2265 " + labels[-1], "even"
    bar.set_ticks([2.0**power for power in powers], labels=labels)
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8, colors=GREY, length=0)
    bar.outline.set_visible(False)
    figure.suptitle("Expert load over time, against an even share (black: no token)", x=0.01, ha="left", color=INK,
                    fontsize=11, fontweight="bold")  # fmt: skip
    figure.supxlabel("step", color=GREY, fontsize=9)
    figure.supylabel("expert", color=GREY, fontsize=9)
    return figure


def load_grid(trace: LoadsTrace) -> tuple[np.ndarray, float, float]:
    """Bring samples onto an even time axis and divide each expert's load by the even share.

    Several samples in one of at most MOST_POINTS columns are averaged, a gap repeats the sample before it.

    Returns:
      (shares float64 [L, E, n], first, last): 1 is an even share; the steps at the left and right edge.
    """
    tokens = trace.loads.sum(axis=2, dtype=np.int64).astype(np.float64)
    even = tokens.mean(axis=2, keepdims=True)
    shares = tokens / np.where(even > 0, even, 1.0)
    steps = trace.iterations.astype(np.int64)
    apart = int(np.diff(steps).min()) if len(steps) > 1 else 1
    columns = min(MOST_POINTS, int(steps[-1] - steps[0]) // apart + 1)
    edges = steps[0] + (steps[-1] - steps[0] + apart) * np.arange(columns + 1) / columns
    # Column j holds the samples from edge j to edge j + 1, or else the newest one before it.
    stops = np.searchsorted(steps, edges[1:] - 1e-6)
    starts = np.minimum(np.concatenate([[0], stops[:-1]]), stops - 1)
    sums = np.concatenate([np.zeros((1, *shares.shape[1:])), np.cumsum(shares, axis=0)])
    means = (sums[stops] - sums[starts]) / (stops - starts)[:, None, None]
    return means.transpose(1, 2, 0), float(edges[0]), float(edges[-1])


def loss_figure(metrics: list[dict], evaluations: list[dict]) -> Figure:
    """Draw training and held-out loss over the steps, and below them the learning rate."""
    figure = new_figure(7.2, 4.6)
    rates = column(metrics, "learning_rate")
    if len(rates[0]):
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
        style_axes(below)
        below.plot(*rates, color=GREY, linewidth=1.4)
        below.set_ylim(bottom=0)
        below.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        below.yaxis.get_offset_text().set(size=7.5, color=GREY)
        below.set_ylabel("learning\nrate")
        below.set_xlabel("step")
    else:
        axes = figure.subplots()
        axes.set_xlabel("step")
    style_axes(axes)
    steps, losses = column(metrics, "loss")
    if len(steps):
        axes.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.35, marker="o" if len(steps) == 1 else None)
        axes.plot(steps, smoothed(losses), color=BLUE, linewidth=1.8, label="training (smoothed)")
    evaluated, held_out = column(evaluations, "held_out_loss")
    if len(evaluated):
        axes.plot(evaluated, held_out, "o-", color=ORANGE, markersize=5, linewidth=1.0, label="held-out")
        last = held_out[-1]
        if np.isfinite(last):
            axes.annotate(f"{last:.3f}", (evaluated[-1], last), (4, -13), textcoords="offset points", ha="right",
                          color=ORANGE, fontsize=8.5, fontweight="bold")  # fmt: skip
    entropies = column(evaluations, "unigram_entropy")[1]
    if entropies.size and np.isfinite(entropies[-1]):
        axes.axhline(
            entropies[-1], color=GREEN, linewidth=1.2, linestyle=(0, (5, 3)), label="unigram entropy of the corpus"
        )
    axes.set_ylabel("cross-entropy (nats per token)")
    title_axes(axes, "Loss")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    return figure


def device_load_figure(metrics: list[dict]) -> Figure:
    """Draw device load max over mean of every layer over the steps, their mean, and the balanced value 1."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(7.2, 4.0)
    axes = figure.subplots()
    style_axes(axes)
    steps, per_layer = column(metrics, "device_load_max_over_mean")
    L = per_layer.shape[1]
    named, marker = L <= len(_NAMED), "o" if len(steps) < 3 else None
    # named colours for a few layers, else from dark to light with depth
    colours = _NAMED[:L] if named else matplotlib.colormaps["viridis"](np.linspace(0.0, 0.92, L))
    for layer, loads in enumerate(per_layer.T):
        label = f"layer {layer}" if named else None
        axes.plot(steps, smoothed(loads), color=colours[layer], linewidth=1.0, alpha=0.75, label=label, marker=marker,
                  markersize=3)  # fmt: skip
    if L > 1:
        counted = np.isfinite(per_layer).sum(axis=1)
        mean = np.where(counted > 0, np.nansum(per_layer, axis=1) / np.maximum(counted, 1), np.nan)
        axes.plot(steps, smoothed(mean), color=INK, linewidth=2.0, label=f"mean of {L} layers", marker=marker)
    if not named:
        scale = ScalarMappable(Normalize(-0.5, L - 0.5), ListedColormap(colours))
        bar = figure.colorbar(scale, ax=axes, aspect=30, pad=0.02, ticks=MaxNLocator(6, integer=True))
        bar.set_label("layer", color=GREY, fontsize=8.5)
        bar.ax.tick_params(labelsize=8, colors=GREY, length=0)
        bar.outline.set_visible(False)
    axes.axhline(1.0, color=GREEN, linewidth=1.2, linestyle=(0, (5, 3)), label="balanced")
    axes.set_ylim(bottom=1.0 - 0.06 * max(0.05, axes.get_ylim()[1] - 1.0))
    axes.set_xlabel("step")
    axes.set_ylabel("tokens per device, max / mean")
    title_axes(axes, "Device load, smoothed: the fullest device against the mean")
    # Below the axes: noisy lines leave no corner free.
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK)
    return figure
