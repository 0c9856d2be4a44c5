"""The time of a block-wise schedule, and the part of its transfers that is exposed.

A window lasts as long as its stage or its moves together; its moves run one after the other. A pair of an exchange and
what computes beside it lasts as long as the longer, and its moves follow the exchange on the links. Gating, packing and
unpacking count as nothing. Seconds are numbers or arrays of one shape [...].
Source: Pro-Prophet, equations 7 and 8; Hecate, section 3.2.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.planning.block_schedule import Prefetch, Window

EXCHANGES = ("dispatch", "combine", "send", "send_back")


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

    def window(self, window: Window, backward: bool):
        """Return the seconds of a window's own stage, of its half where it has one."""
        name, again, _ = window.stage.partition("_again")
        if name == "recompute":
            seconds = 2 * self.exchange + self.experts
        elif name in EXCHANGES:
            seconds = self.exchange
        elif name in ("route", "unpack"):
            seconds = 0.0
        else:
            seconds = (1 if again or not backward else 2) * getattr(self, name)
        return seconds * (1.0 if window.half is None else 0.5)

    def beside(self, window: Window, backward: bool):
        """Return the seconds of what computes beside a window's exchange."""
        return sum(self.window(other, backward) for other in window.others)


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
        again = 2 * times.exchange + times.experts if recompute else 0.0
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
            for move in [move for one in window.pair for move in one.beside]:
                seconds = (move.stop - move.start) * getattr(times, move.kind)
                out[move.kind] = out[move.kind] + np.maximum(0.0, seconds - left)
                left = np.maximum(0.0, left - seconds)
            late = {kind: late[kind] + out[kind] for kind in late}
    return late["trans"], late["agg"]
