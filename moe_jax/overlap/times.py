"""The time of a block-wise schedule, and the part of its transfers that is exposed.

Inputs: the schedule as data, and seconds of stages and transfers, numbers or arrays of one shape [...]. Outputs:
seconds of the same shape. A window lasts as long as its stage or its moves together, whichever is longer; its moves run
one after the other, in their order in `Window.beside`.
Source: Pro-Prophet, equations 7 and 8; Hecate, section 3.2.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.overlap.blocks import Move, Prefetch, Window


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
        """Return the seconds of a stage."""
        if name == "recompute":
            return 2 * self.exchange + self.experts
        if name in ("dispatch", "combine"):
            return self.exchange
        return (2 if backward else 1) * getattr(self, name)

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


def window_exposes(window: Window, times: Times, backward: bool) -> dict[str, np.ndarray | float]:
    """Return {'trans', 'agg'}: seconds by which the window's moves outlast its stage."""
    left, out = times.stage(window.stage, backward), {"trans": 0.0, "agg": 0.0}
    for move in window.beside:
        seconds = times.move(move)
        out[move.kind] = out[move.kind] + np.maximum(0.0, seconds - left)
        left = np.maximum(0.0, left - seconds)
    return out


def exposed(prefetch: Prefetch, times: Times) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Return the seconds of Trans and of Agg that one layer in the middle of the model waits for.

    'none' hides nothing. Pro-Prophet's split follows the times, element by element, which gives
    max(0, T_Trans - T_FEC - T_FNEC) and max(0, T_Agg - T_BEC - T_BNEC).
    """
    if prefetch.schedule == "none":
        return times.trans, times.agg
    if prefetch.schedule == "pro_prophet" and prefetch.case == "split":
        return _split_exposes(times, prefetch.refetch_replicas)
    schedule = prefetch.build(layers=3)
    trans, agg = 0.0, 0.0
    for loop, backward in ((schedule.forward, False), (schedule.backward, True)):
        for window in loop.body:
            part = window_exposes(window, times, backward)
            trans, agg = trans + part["trans"], agg + part["agg"]
    return trans, agg


def _split_exposes(times: Times, refetch_replicas: bool):
    """Return the result of `exposed` for a split that uses the time of attention and of the experts in full."""
    free = times.attention + times.experts
    trans, agg = np.maximum(0.0, times.trans - free), np.maximum(0.0, times.agg - 2 * free)
    if refetch_replicas:
        agg = np.maximum(0.0, times.agg - np.maximum(0.0, 2 * free - times.trans))
        trans = trans + np.maximum(0.0, times.trans - 2 * free)
    return trans, agg
