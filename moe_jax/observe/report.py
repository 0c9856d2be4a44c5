"""What a run has reached, while it is written or after: a page that draws it, numbers, a picture of its experts' loads.

metrics.jsonl and evaluations.jsonl of a run folder go in. A page gets as few numbers as a picture needs: each byte is
read once; lowest, highest and mean value of equal ranges of steps come out, at most `MOST_POINTS` a line, and the last
changes of the plan. So memory and answers stay small however long a run is. The page is one file: `moe_jax.watch`
serves it, and report.html is the same page with its run's data in it: those numbers, a few more of the whole run,
loads.npz as plots/expert_load.png, the config and the environment. It asks for nothing, and absolute paths are
shortened to their last part, so that it shows no folders or user names of the machine. Letters: docs/notation.md.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_jax.errors import UserError
from moe_jax.observe.loads import LoadsTrace, read_loads
from moe_jax.observe.metrics_file import column, parse_line, read_metrics, reading
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

_TEMPLATE = Path(__file__).with_name("watch.html")
MOST_POINTS = 1000  # even: when they are used up, two neighbours become one
MOST_PLANS = 100
BATCH = 4096  # records that are held at a time
LINES = ("loss", "held_out_loss", "tokens_per_second", "grad_norm", "learning_rate", "replicas")
LOAD = "device_load_max_over_mean"
STALLS = ("compile_seconds", "rejit_stall_seconds", "reshard_seconds")

DOTS_PER_INCH = 200
MOST_COLUMNS = 400  # of expert loads along the time axis

INK, GREY, FAINT = "#1f2328", "#656d76", "#d8dee4"
MOST_RECORDS = 10_000  # that a report reads

# A path from the root or a home folder: `/a/b`, `~/b`, not a division or the inside of a relative path or of a URL.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~\-])(?:~[\w.\-]*)?/(?:[^\s'\"/]+/)*([^\s'\"/]+)/?")

# what is known of each range of steps: how two become one, and what stands where there is none
_PARTS = {"low": (np.fmin, np.nan), "high": (np.fmax, np.nan), "total": (np.add, 0.0), "count": (np.add, 0.0)}


class Decimated:
    """Lowest, highest and mean value of equal ranges of steps, which become twice as wide when there are too many."""

    def __init__(self) -> None:
        self.width, self.last = 1, 0
        self.parts: dict[str, np.ndarray] = {}  # by the names of _PARTS, [MOST_POINTS, layers]; empty at first

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Take in values [n] or [n, layers] of rising steps [n]; NaN is absent. Rows of another length are left out."""
        if not len(steps):
            return
        rows = values.reshape(len(steps), -1)
        if not self.parts:
            self.parts = {name: np.full((MOST_POINTS, rows.shape[1]), empty) for name, (_, empty) in _PARTS.items()}
        if rows.shape[1] != self.parts["low"].shape[1]:
            return
        while steps[-1] // self.width >= MOST_POINTS:
            self.width *= 2
            for name, (merge, empty) in _PARTS.items():
                part = self.parts[name]
                self.parts[name] = np.full_like(part, empty)
                self.parts[name][: MOST_POINTS // 2] = merge(part[::2], part[1::2])
        self.last, places = int(steps[-1]), steps // self.width
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        at, present = places[starts], np.isfinite(rows)
        new = {"low": rows, "high": rows, "total": np.where(present, rows, 0.0), "count": present.astype(np.float64)}
        for name, (merge, _) in _PARTS.items():
            self.parts[name][at] = merge(self.parts[name][at], merge.reduceat(new[name], starts))

    def data(self, *names: str) -> dict[str, Any]:
        """Return {"width", "last": the last step, "steps": first of each range [n], name: [n] or [n, layers]}.

        Args:
          names: some of "low", "high" and "mean"; None stands where no value is finite.
        """
        count = self.parts["count"]
        filled = np.flatnonzero(count.any(axis=1))
        data = {"width": self.width, "last": self.last, "steps": (filled * self.width).tolist()}
        for name in names:
            with np.errstate(invalid="ignore"):
                rows = (self.parts["total"] / count if name == "mean" else self.parts[name])[filled]
            short = [[float(f"{x:.5g}") if x == x else None for x in row] for row in rows.tolist()]
            data[name] = short if rows.shape[1:] != (1,) else [value for (value,) in short]
        return data


class FollowedFile:
    """A jsonl file that grows: each call of `batches` reads what came since the last."""

    def __init__(self, path: Path):
        self.path, self.at, self.last_line, self.last_step = path, 0, b"", -1

    def was_replaced(self) -> bool:
        """Say whether what was read last is not there any more: a run that resumes cuts the lines behind its step."""
        with reading(self.path):
            try:
                with open(self.path, "rb") as file:
                    file.seek(self.at - len(self.last_line))
                    return file.read(len(self.last_line)) != self.last_line
            except FileNotFoundError:
                return self.at > 0

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the new records, at most `BATCH` at a time; a line without its end is left for the next call."""
        with contextlib.suppress(FileNotFoundError), reading(self.path), open(self.path, "rb") as file:
            while True:
                file.seek(self.at)
                lines = [line for line in itertools.islice(file, BATCH) if line.endswith(b"\n")]
                if not lines:
                    return
                records = []
                for line in lines:
                    record = parse_line(line)
                    if record is not None and self.last_step < record["step"]:
                        records.append(record)
                        self.last_step = record["step"]
                self.at, self.last_line = self.at + sum(map(len, lines)), lines[-1]
                yield records


class FollowedRun:
    """What a page shows of one run, brought up to date by `refresh`; threads take turns."""

    def __init__(self, folder: str | os.PathLike[str]):
        """Open a run folder; a UserError where there is none."""
        run = RunFolder(folder, create=False)
        if not run.metrics.exists() and not run.config.exists():
            raise UserError(f"{run.path} is no run folder: it has no metrics.jsonl; give the --workdir of a run")
        self.name, self._run, self._paths = os.fspath(folder), run, (run.metrics, run.evaluations)
        self._lock, self._starts = threading.Lock(), 0
        self._start_over()

    def _start_over(self) -> None:
        self._files, self._starts = [FollowedFile(path) for path in self._paths], self._starts + 1
        self._lines = {name: Decimated() for name in (*LINES, LOAD)}
        self._layers = Decimated()
        self._plans: collections.deque[dict] = collections.deque(maxlen=MOST_PLANS)
        self._changes, self._before = 0, {}

    def refresh(self, seen: str = "") -> dict[str, Any] | None:
        """Read what came, and return what a page draws as plain data; None where its version is `seen`.

        {"version", "name", "written": seconds since 1970 or None, "lines": {name: low, high and mean}, "layers": mean
        load of the fullest device of each layer, over the mean of all, "changes": of the plan, "plans": the last,
        "modelled": what environment.json says of a layer, or None}.
        """
        with self._lock:
            if any(file.was_replaced() for file in self._files):
                self._start_over()
            for file in self._files:
                for records in file.batches():
                    self._take(records)
            version = "-".join(str(number) for number in (self._starts, *(file.at for file in self._files)))
            if version == seen:
                return None
            path = self._paths[0]
            return {
                "version": version,
                "name": self.name,
                "written": path.stat().st_mtime if path.exists() else None,
                "lines": {name: line.data("low", "high", "mean") for name, line in self._lines.items() if line.parts},
                "layers": self._layers.data("mean") if self._layers.parts else None,
                "changes": self._changes,
                "plans": list(self._plans),
                "modelled": self._run.read_environment().get("modelled"),
            }

    def _take(self, records: list[dict[str, Any]]) -> None:
        """Add records to the lines, and to the changes of the plan: {"step", "before", "now", "seconds" waited}.

        Before and now are {"replicas", "load": of the fullest device, over the mean of all}.
        """
        for name in LINES:
            steps, values = column(records, name)
            if values.ndim == 1:
                self._lines[name].add(steps, values)
        steps, loads = column(records, LOAD)
        if loads.ndim == 2 and loads.size:
            self._layers.add(steps, loads)
            self._lines[LOAD].add(steps, np.fmax.reduce(loads, axis=1))
        for record in records:
            if "plan_id" not in record:
                continue
            before, self._before = self._before, record
            if not before or all(before.get(name) == record.get(name) for name in ("plan_id", "replicas")):
                continue
            change = {"step": record["step"], "seconds": {name: record[name] for name in STALLS if record.get(name)}}
            for when, side in (("before", before), ("now", record)):
                fullest = np.fmax.reduce(column([side], LOAD)[1], axis=None, initial=np.nan)
                load = float(fullest) if np.isfinite(fullest) else None
                change[when] = {"replicas": side.get("replicas"), "load": load}
            self._changes += 1
            self._plans.append(change)


def page_of(data: dict[str, Any] | None = None) -> tuple[str, str]:
    """Return the page and its Content-Security-Policy, which the page also states itself.

    Args:
      data: of one run, as `FollowedRun.refresh` returns it, with "about" as `write_report` adds it; None: the page asks
        its server.
    """
    text = _TEMPLATE.read_text(encoding="utf-8")
    hashes = []
    for name in ("script", "style"):
        inline = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)[1].encode("utf-8")
        hashes.append(f"{name}-src 'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'")
    policy = f"default-src 'none'; {'; '.join(hashes)}; connect-src 'self'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'"
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # no text ends the element
    return text.replace("POLICY", policy, 1).replace("EMBEDDED", embedded, 1), policy


def write_report(run: RunFolder, picture: Path | None) -> Path:
    """Write report.html from whatever the run folder holds, and return its path.

    Args:
      picture: what `draw_loads` returned, which the page shows.
    """
    summary, environment, data = summarize_run(run), run.read_environment(), FollowedRun(run).refresh()
    # The folder's own name, also when it is given as "." or with a link.
    data["name"], date = run.path.resolve().name, environment.get("date")
    steps = "no steps" if summary["steps"] is None else f"{summary['steps']:,} steps"
    config = read_text(run.config)
    data["about"] = {
        "lead": f"moe_jax run, {steps}{f', {date}' if date else ''}",
        "numbers": headline_numbers(summary, environment),
        "expert_load": picture and base64.b64encode(picture.read_bytes()).decode(),
        "texts": {} if config is None else {"Config, defaults included": without_absolute_paths(config.strip())},
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
    against = ""
    if below is not None:
        against = f"; the held-out loss ends {100 * abs(below):.1f}% {'below' if below >= 0 else 'above'} it"
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
        # what happened in each record's step; the two below count from the start of the run
        "overflow_steps": whole("overflow_steps", np.sum),
        "skipped_steps": whole("skipped_steps", np.max),
        "steps_run_again": whole("steps_run_again", np.max),
        "compilations": int(np.count_nonzero(compilations)),
        "compile_seconds": float(np.nansum(compilations)),
        "rejit_stall_seconds": number(metrics, "rejit_stall_seconds", np.sum),
    }


def headline_numbers(summary: dict, environment: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (label, value, remark) of what environment.json states of the model and for each number of the records."""
    numbers = []
    if counts := environment.get("parameters"):
        total, active = with_prefix(counts["total"]), with_prefix(counts["active"])
        numbers.append(("parameters", total, f"{active} of them for a token"))
    if "planner" in environment:
        numbers.append(("planner", str(environment["planner"]), f"schedule {environment['schedule']}"))
    below, against = summary["below_unigram_entropy"], ""
    if below is not None:
        against = f"loss ends {abs(below):.0%} {'below' if below >= 0 else 'above'} it"
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

    Several samples in one of at most MOST_COLUMNS columns are averaged, a gap repeats the sample before it.

    Returns:
      (shares float64 [L, E, n], first, last): 1 is an even share; the steps at the left and right edge.
    """
    tokens = trace.loads.sum(axis=2, dtype=np.int64).astype(np.float64)
    even = tokens.mean(axis=2, keepdims=True)
    shares = tokens / np.where(even > 0, even, 1.0)
    steps = trace.iterations.astype(np.int64)
    apart = int(np.diff(steps).min()) if len(steps) > 1 else 1
    columns = min(MOST_COLUMNS, int(steps[-1] - steps[0]) // apart + 1)
    edges = steps[0] + (steps[-1] - steps[0] + apart) * np.arange(columns + 1) / columns
    # Column j holds the samples from edge j to edge j + 1, or else the newest one before it.
    stops = np.searchsorted(steps, edges[1:] - 1e-6)
    starts = np.minimum(np.concatenate([[0], stops[:-1]]), stops - 1)
    sums = np.concatenate([np.zeros((1, *shares.shape[1:])), np.cumsum(shares, axis=0)])
    means = (sums[stops] - sums[starts]) / (stops - starts)[:, None, None]
    return means.transpose(1, 2, 0), float(edges[0]), float(edges[-1])
