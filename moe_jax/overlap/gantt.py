"""The picture of a block-wise schedule: computation, exchanges and transfers over time.

Inputs: the schedule and its times, as numbers. Outputs: bars on three streams, and a PNG of them. matplotlib is
imported when a picture is drawn, never before.
"""

from __future__ import annotations

import dataclasses
import pathlib

from moe_jax.overlap.blocks import BlockSchedule, Move, Window
from moe_jax.overlap.times import EXCHANGES, Times

STREAMS = ("compute", "exchange", "transfer")
COLOURS = {
    "attention": "#56B4E9",
    "experts": "#0072B2",
    "recompute": "#CC79A7",
    "dispatch": "#d8dee4",
    "combine": "#d8dee4",
    "send": "#d8dee4",
    "send_back": "#d8dee4",
    "trans": "#009E73",
    "agg": "#D55E00",
}


@dataclasses.dataclass(frozen=True)
class Bar:
    """An interval `start` to `stop` (seconds) on one of `STREAMS`; `exposed`: the part of a transfer not overlapped.

    Attributes:
      kind: a stage, 'trans' or 'agg'; layer: absolute; backward: in the backward.
    """

    stream: str
    kind: str
    layer: int
    backward: bool
    start: float
    stop: float
    exposed: float = 0.0


def timeline(schedule: BlockSchedule, times: Times) -> list[Bar]:
    """Return the bars of one step, window after window."""
    bars, now = [], 0.0
    for direction, pair in schedule.windows():
        backward = direction == "backward"
        own, beside = float(times.window(pair, backward)), float(times.beside(pair, backward))
        _add_window(bars, pair, now, times, backward)
        start = now
        for window in pair.others:
            start = _add_window(bars, window, start, times, backward)
        end = now + own if pair.others else now  # moves follow the exchange of the other half
        hidden_until = now + max(own, beside)
        for move in [move for window in pair.pair for move in window.beside]:
            end = _add_move(bars, move, float(times.move(move)), end, hidden_until, backward)
        now = max(hidden_until, end)
    return bars


def _add_window(bars: list, window: Window, start: float, times: Times, backward: bool) -> float:
    """Add the bar of a window's stage, where it takes time, and return its end."""
    stop, stage = start + float(times.window(window, backward)), window.stage.removesuffix("_again")
    if stop > start:
        stream = "exchange" if stage in EXCHANGES else "compute"
        bars.append(Bar(stream, stage, window.layer, backward, start, stop))
    return stop


def _add_move(bars: list, move: Move, seconds: float, start: float, hidden_until: float, backward):
    stop = start + seconds
    late = max(0.0, stop - max(start, hidden_until))
    bars.append(Bar("transfer", move.kind, move.layer, backward, start, stop, late))
    return stop


def draw(schedule: BlockSchedule, times: Times, path: pathlib.Path | str) -> pathlib.Path:
    """Write the Gantt chart as a PNG; the exposed part of a transfer is hatched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars, seen = timeline(schedule, times), set()
    for bar in bars:
        row, length = len(STREAMS) - 1 - STREAMS.index(bar.stream), bar.stop - bar.start
        label = None if bar.kind in seen else bar.kind
        seen.add(bar.kind)
        axes.barh(row, 1e3 * length, left=1e3 * bar.start, height=0.8, color=COLOURS[bar.kind], edgecolor="white",
                  linewidth=0.5, label=label)  # fmt: skip
        if bar.exposed:
            axes.barh(row, 1e3 * bar.exposed, left=1e3 * (bar.stop - bar.exposed), height=0.8, color="none",
                      edgecolor="black", hatch="////", linewidth=0)  # fmt: skip
        if bar.stream != "exchange" and len(bars) <= 120:
            axes.text(1e3 * (bar.start + length / 2), row, str(bar.layer), ha="center", va="center", fontsize=6)
    late = 1e3 * sum(bar.exposed for bar in bars)
    moved = 1e3 * sum(bar.stop - bar.start for bar in bars if bar.stream == "transfer")
    again = ", replicas refetched" if schedule.refetch_replicas else ""
    axes.set(
        yticks=range(len(STREAMS)), yticklabels=STREAMS[::-1], xlabel="ms",
        title=f"{schedule.name}, {schedule.layers} layers{again}: {late:.3g} ms of {moved:.3g} ms of transfers exposed",
    )  # fmt: skip
    axes.legend(ncols=7, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    path = pathlib.Path(path)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path
