"""The time of a block-wise schedule, the part of its transfers that is exposed, and a picture of both.

A window lasts as long as its stage or its moves together, whichever is longer; its moves run one after the other, in
their order in `Window.beside`. Of two halves each stage takes half as long; a pair of an exchange and what computes
beside it lasts as long as the longer, and its moves follow the exchange on the links. Gating, packing and unpacking
count as nothing. Seconds are numbers or arrays of one shape [...].
Source: Pro-Prophet, equations 7 and 8; Hecate, section 3.2.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from moe_jax.planning.block_schedule import BlockSchedule, Move, Prefetch, Window

EXCHANGES = ("dispatch", "combine", "send", "send_back")
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one layer's parts, [...] each.

    Attributes:
      attention: forward of what precedes the MoE layer (T_FNEC); its backward takes twice that.
      experts: forward of the experts (T_FEC); their backward takes twice that.
      exchange: one all-to-all: dispatch and combine are one each, forward and backward.
      trans, agg: one layer's Trans and Agg.
    """

    attention: float | np.ndarray
    experts: float | np.ndarray
    exchange: float | np.ndarray = 0.0
    trans: float | np.ndarray = 0.0
    agg: float | np.ndarray = 0.0

    def stage(self, name: str, backward: bool):
        """Return the seconds of a stage, of all sequences of the device."""
        if name == "recompute":
            return 2 * self.exchange + self.experts
        name, again, _ = name.partition("_again")
        if name in EXCHANGES:
            return self.exchange
        if name in ("route", "unpack"):
            return 0.0
        return (1 if again or not backward else 2) * getattr(self, name)

    def window(self, window: Window, backward: bool):
        """Return the seconds of a window's own stage, of its half where it has one."""
        return self.stage(window.stage, backward) * (1.0 if window.half is None else 0.5)

    def beside(self, window: Window, backward: bool):
        """Return the seconds of what computes beside a window's exchange."""
        return sum(self.window(other, backward) for other in window.others)

    def move(self, move: Move):
        """Return the seconds of a part of a transfer."""
        return (move.stop - move.start) * getattr(self, move.kind)


def shares(times: Times, refetch_replicas: bool = False) -> tuple[float, float]:
    """Return how much of Trans and of Agg is to run beside attention, for numbers: as much as fits in its time.

    Attention's time does not change from step to step, so it is filled first; the rest runs beside the experts. In the
    backward attention takes twice as long, and Trans, if it runs there a second time, is counted before Agg.
    Source: Pro-Prophet, section V-B.
    """
    trans = 1.0 if times.trans <= 0 else float(min(1.0, times.attention / times.trans))
    left = 2 * times.attention - (trans * times.trans if refetch_replicas else 0.0)
    agg = 1.0 if times.agg <= 0 else float(min(1.0, max(0.0, left) / times.agg))
    return trans, agg


def stage_seconds(prefetch: Prefetch, times: Times, recompute: bool = False) -> np.ndarray | float:
    """Return the seconds of all stages of one layer in the middle of the model, forward and backward, without moves.

    Args:
      recompute: the backward computes the MoE layer again.
    """
    if not prefetch.halves:
        again = times.stage("recompute", backward=True) if recompute else 0.0
        return 4 * times.exchange + 3 * (times.attention + times.experts) + again
    total, schedule = 0.0, prefetch.build(layers=3, recompute=recompute)
    for loop, backward in ((schedule.forward, False), (schedule.backward, True)):
        for window in loop.body:
            total = total + np.maximum(times.window(window, backward), times.beside(window, backward))
    return total


def exposed(prefetch: Prefetch, times: Times) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Return the seconds of Trans and of Agg that one layer in the middle of the model waits for.

    'none' hides nothing. Without halves Pro-Prophet's split follows the times, element by element, which gives
    max(0, T_Trans - T_FEC - T_FNEC) and max(0, T_Agg - T_BEC - T_BNEC).
    """
    if not prefetch.is_block_wise:
        return times.trans, times.agg
    if prefetch.schedule == "pro_prophet" and prefetch.case == "split" and not prefetch.halves:
        free = times.attention + times.experts  # used in full
        trans, agg = np.maximum(0.0, times.trans - free), np.maximum(0.0, times.agg - 2 * free)
        if prefetch.refetch_replicas:
            agg = np.maximum(0.0, times.agg - np.maximum(0.0, 2 * free - times.trans))
            trans = trans + np.maximum(0.0, times.trans - 2 * free)
        return trans, agg
    schedule, late = prefetch.build(layers=3), {"trans": 0.0, "agg": 0.0}
    for loop, backward in ((schedule.forward, False), (schedule.backward, True)):
        for window in loop.body:
            left, out = times.window(window, backward), {"trans": 0.0, "agg": 0.0}
            if window.others:  # the links are free from the end of the exchange to that of the computation
                left = np.maximum(0.0, times.beside(window, backward) - left)
            for move in window.moves:
                seconds = times.move(move)
                out[move.kind] = out[move.kind] + np.maximum(0.0, seconds - left)
                left = np.maximum(0.0, left - seconds)
            late = {kind: late[kind] + out[kind] for kind in late}
    return late["trans"], late["agg"]


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
    """Return the bars of one step, window after window; stages that take no time have none."""
    bars, now = [], 0.0
    for direction, pair in schedule.windows():
        backward = direction == "backward"
        own, beside = float(times.window(pair, backward)), float(times.beside(pair, backward))
        start = now
        for window in pair.pair:
            stop, stage = start + float(times.window(window, backward)), window.stage.removesuffix("_again")
            if stop > start:
                stream = "exchange" if stage in EXCHANGES else "compute"
                bars.append(Bar(stream, stage, window.layer, backward, start, stop))
            start = now if window is pair else stop  # the others run while the first does, one after the other
        end = now + own if pair.others else now  # moves follow the exchange of the other half
        hidden_until = now + max(own, beside)
        for move in pair.moves:
            start, end = end, end + float(times.move(move))
            late = max(0.0, end - max(start, hidden_until))
            bars.append(Bar("transfer", move.kind, move.layer, backward, start, end, late))
        now = max(hidden_until, end)
    return bars


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
    path = pathlib.Path(path)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path
