"""What a run has reached: numbers, a picture of its experts' loads over time, and one page about it in one file.

metrics.jsonl and evaluations.jsonl of a run folder become a few numbers, loads.npz becomes plots/expert_load.png; with
the config and the environment they become report.html, which asks for nothing. Absolute paths are shortened to their
last part, so that the page shows no folders or user names of the machine. Letters: docs/notation.md.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_jax.observe.followed import FollowedRun, page_of
from moe_jax.observe.loads import LoadsTrace, read_loads
from moe_jax.observe.metrics_file import column, read_metrics
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
    from matplotlib.figure import Figure

DOTS_PER_INCH = 200
MOST_POINTS = 400  # of expert loads along the time axis

INK, GREY, FAINT = "#1f2328", "#656d76", "#d8dee4"
MOST_RECORDS = 10_000  # that a report reads

# A path from the root or a home folder: `/a/b`, `~/b`, not a division or the inside of a relative path or of a URL.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~\-])(?:~[\w.\-]*)?/(?:[^\s'\"/]+/)*([^\s'\"/]+)/?")


def write_report(run: RunFolder, picture: Path | None) -> Path:
    """Write report.html from whatever the run folder holds, and return its path.

    Args:
      picture: what `draw_loads` returned, which the page shows.
    """
    summary, environment, data = summarize_run(run), run.read_environment(), FollowedRun(run).refresh()
    # The folder's own name, also when it is given as "." or with a link.
    data["name"], date = run.path.resolve().name, environment.get("date")
    steps = "no steps" if summary["steps"] is None else f"{summary['steps']:,} steps"
    texts = {"Config": read_text(run.config), "All values used, defaults included": read_text(run.operative_config)}
    data["about"] = {
        "lead": f"moe_jax run, {steps}{f', {date}' if date else ''}",
        "numbers": model_facts(environment) + headline_numbers(summary),
        "expert_load": picture and base64.b64encode(picture.read_bytes()).decode(),
        "texts": {name: without_absolute_paths(text.strip()) for name, text in texts.items() if text is not None},
        "environment": {
            name.replace("_", " "): without_absolute_paths(_words(value))
            for name, value in environment.items()
            if name != "modelled"
        },
    }
    return write_atomically(run.report, page_of(data)[0])


def report_run(run: RunFolder) -> None:
    """Draw the loads, write the report, and print where both are and what a finished run has reached."""
    picture, summary = draw_loads(run), summarize_run(run)
    page, below = write_report(run, picture), summary["below_unigram_entropy"]
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
    lines += [("plot", str(picture))] * bool(picture) + [("report", str(page))]
    for label, text in lines:
        print(f"{label:<18}{text}")


def _side(below: float) -> str:
    """Return on which side of the unigram entropy a loss is that lies this share of it below."""
    return "below" if below >= 0 else "above"


def summarize_run(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Condense the records of a run folder; a number that no record states, or none finite, is None.

    Losses are in nats per token, bits_per_byte is the last held-out one by its text's bytes; medians leave out steps
    that compiled; device load is max over mean, 1 = balanced; below_unigram_entropy is how far the last held-out loss
    lies below the unigram entropy, as a fraction of it.
    """
    metrics, evaluations = (read_metrics(folder, file_name=name, most=MOST_RECORDS) for name in (METRICS, EVALUATIONS))
    steady = [record for record in metrics if not record.get("compile_seconds")] or metrics

    def number(records: list, name: str, reduce: Callable, take: slice = slice(None)) -> float | None:
        values = np.ravel(column(records, name)[1])[take]
        finite = values[np.isfinite(values)]
        return float(reduce(finite)) if finite.size else None

    def whole(name: str, reduce: Callable) -> int | None:
        value = number(metrics, name, reduce)
        return None if value is None else int(value)

    last = slice(-1, None)
    compilations = column(metrics, "compile_seconds")[1]
    held_out = number(evaluations, "held_out_loss", np.mean, last)
    entropy = number(evaluations, "unigram_entropy", np.mean, last)
    return {
        "steps": metrics[-1]["step"] if metrics else None,
        "loss_last": number(metrics, "loss", np.mean, last),
        "held_out_loss_first": number(evaluations, "held_out_loss", np.mean, slice(1)),
        "held_out_loss_last": held_out,
        "held_out_loss_ema": number(evaluations, "held_out_loss_ema", np.mean, last),
        "bits_per_byte": number(evaluations, "bits_per_byte", np.mean, last),
        "unigram_entropy": entropy,
        "below_unigram_entropy": None if held_out is None or not entropy else 1.0 - held_out / entropy,
        "tokens_per_second": number(steady, "tokens_per_second", np.median),
        "model_flops_per_second": number(steady, "model_flops_per_second", np.median),
        "step_seconds": number(steady, "step_seconds", np.median),
        "peak_device_bytes": number(metrics, "peak_device_bytes", np.max),
        "device_load_mean": number(metrics, "device_load_max_over_mean", np.mean),
        "device_load_worst": number(metrics, "device_load_max_over_mean", np.max),
        "dropped_fraction": number(metrics, "dropped_fraction", np.mean),
        # what happened in each record's step; the three below count from the start of the run
        "overflow_steps": whole("overflow_steps", np.sum),
        "skipped_steps": whole("skipped_steps", np.max),
        "overflowed_updates": whole("overflowed_updates", np.max),
        "steps_run_again": whole("steps_run_again", np.max),
        "compilations": int(np.count_nonzero(compilations)),
        "compile_seconds": float(np.nansum(compilations)),
        "rejit_stall_seconds": number(metrics, "rejit_stall_seconds", np.sum),
    }


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
    """Say whether a finished run's report is there, and the picture of its loads too, where one can be drawn."""
    missing = importlib.util.find_spec("matplotlib") is not None and run.loads.exists() and not run.picture.exists()
    return run.report.exists() and not missing


def draw_loads(run: RunFolder) -> Path | None:
    """Draw expert_load.png from recorded loads and return its path, None where there are none.

    The file has none of the metadata that would make equal pictures differ. Without matplotlib there is one line that
    says so, and no picture.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed; pip install matplotlib, then give the same command again")
        return None
    if not run.loads.exists():
        return None
    figure = expert_load_heat_maps(read_loads(run.loads))
    with disk_errors_named(run.picture):
        run.picture.parent.mkdir(exist_ok=True)
    with atomic_file(run.picture) as file:
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None})
    return run.picture


def expert_load_heat_maps(trace: LoadsTrace) -> Figure:
    """Draw a panel per layer: steps to the right, experts upwards, colour = load against an even share.

    The scale is logarithmic and the same in all panels; white is an even share, an expert without a token is black.
    With more experts than pixels their colours are averaged.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shares, first, last = load_grid(trace)
    L, E, _ = shares.shape
    # one or two wide panels, then 3, 4, 6 and 8 columns; taller for more experts, lower when many share the page
    across = min(L, next(columns for columns, most in ((1, 2), (2, 6), (3, 12), (4, 24), (6, 48), (8, L)) if L <= most))
    down = math.ceil(L / across)
    height = max(0.75, min(0.6 + 0.05 * E, 3.8, 9.0 / down))
    size = (7.2, 0.9 + down * (height + 0.26))  # inches
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
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
    title = "Expert load over time, against an even share (black: no token)"
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11, fontweight="bold")
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
