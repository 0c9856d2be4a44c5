"""Block-wise schedules as data: which transfer runs next to which computation, how long that takes, what is exposed.

A layer is four stages: attention (everything before the gate), dispatch (route, and send, the exchange), experts,
combine (send_back, the other exchange, and unpack). *Trans* brings parameters to the replicas, *Agg* sums the replicas'
gradients at home. Of two halves of a device's sequences, a and b, one computes while the other waits for its exchange.
Letters: docs/notation.md; i a turn of a loop.
Source: Hecate, section 3.2; Pro-Prophet, section V-B, algorithm 2 and figure 9; halves after DualPipe (DeepSeek-V3,
section 3.2.1), within one device and one step.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

SCHEDULES = ("none", "hecate", "pro_prophet")
STAGES = {
    "A": "attention", "D": "dispatch", "E": "experts", "C": "combine", "R": "recompute", "G": "route", "S": "send",
    "B": "send_back", "U": "unpack",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Move:
    """A part of one layer's transfer."""

    kind: str  # 'trans' or 'agg'
    layer: int  # absolute, or relative to the turn inside a loop's body
    start: float = 0.0  # which part, as shares of the whole between 0 and 1
    stop: float = 1.0


@dataclasses.dataclass(frozen=True)
class Window:
    """One stage of one layer, and what is in flight while it computes."""

    stage: str
    layer: int
    moves: tuple[Move, ...] = ()
    half: int | None = None  # 0 (a) or 1 (b) of a device's sequences, None for all of them
    # of an exchange, the windows of the other half that run at the same time, one after the other; both sides start
    # when what both read is there
    others: tuple[Window, ...] = ()

    @property
    def pair(self) -> tuple[Window, ...]:
        """The window and its `others`."""
        return (self, *self.others)


@dataclasses.dataclass(frozen=True)
class WindowLoop:
    """One direction of a step.

    A move of a layer outside 0 .. L-1 has no effect: a loop whose turns must all be equal sends it for nothing,
    `windows` leaves it out.
    """

    before: tuple[Window, ...]  # with absolute layers
    body: tuple[Window, ...]  # turn i runs layer i + window.layer
    turns: range  # values of i, in order
    after: tuple[Window, ...]  # with absolute layers

    def windows(self, layers: int) -> tuple[Window, ...]:
        """Return all windows with absolute layers, in the order of the program."""
        turned = [(window, turn) for turn in self.turns for window in self.body]
        found = []
        for pair, turn in [*((one, 0) for one in self.before), *turned, *((one, 0) for one in self.after)]:
            placed = []
            for window in pair.pair:
                moves = [dataclasses.replace(move, layer=move.layer + turn) for move in window.moves]
                moves = tuple(move for move in moves if 0 <= move.layer < layers)
                placed.append(Window(window.stage, window.layer + turn, moves, window.half))
            found.append(dataclasses.replace(placed[0], others=tuple(placed[1:])))
        return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSchedule:
    """A step's windows, forward and backward."""

    layers: int
    refetch_replicas: bool
    forward: WindowLoop
    backward: WindowLoop
    halves: bool = False

    def windows(self) -> tuple[tuple[str, Window], ...]:
        """Return ('forward' or 'backward', window) of the whole step, in order; `others` are inside theirs."""
        loops = {"forward": self.forward, "backward": self.backward}
        return tuple((name, window) for name, loop in loops.items() for window in loop.windows(self.layers))

    def layers_alive(self) -> int:
        """Return the most layers whose replicas are in memory at the end of any window, those in flight included."""
        alive, most = set(), 0
        for direction, both in self.windows():
            alive |= {move.layer for window in both.pair for move in window.moves if move.kind == "trans"}
            most = max(most, len(alive))
            ends, half = (("combine", "unpack"), 1) if direction == "forward" else (("experts",), 0)
            for window in both.pair:
                keeps = direction == "forward" and (not self.refetch_replicas or window.layer == self.layers - 1)
                if window.stage in ends and window.half in (None, half) and not keeps:
                    alive.discard(window.layer)
        return most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Choose a block-wise schedule."""

    schedule: str = "none"  # of SCHEDULES; 'pro_prophet' splits Trans and Agg over attention and experts (figure 9 c)
    refetch_replicas: bool = False  # drop replicas after the forward, fetch them again in the backward (Hecate-RM)
    # two halves of a device's sequences, one computing while the other's rows travel; replicas that no schedule places
    # travel as under 'hecate'
    halves: bool = False

    @property
    def is_block_wise(self) -> bool:
        """Whether there is a schedule to build."""
        return self.schedule != "none" or self.halves

    def build(
        self, layers: int, *, trans_share: float = 0.5, agg_share: float = 0.5, recompute: bool = False,
        results_again: bool = True,
    ) -> BlockSchedule:  # fmt: skip
        """Return the schedule of L MoE layers.

        Args:
          trans_share, agg_share: of 'pro_prophet', how much of each runs next to attention (`shares`): 1 is its figure
            9 b, 0 is 9 a.
          recompute: the backward computes each MoE layer again before it differentiates it.
          results_again: where it does, it brings the experts' results home again too.
        """
        if not self.is_block_wise or layers < 1:
            raise ValueError(f"no block-wise schedule {self.schedule!r} of {layers} layers can be built")
        trans, agg = (trans_share, agg_share) if self.schedule == "pro_prophet" else (1.0, 1.0)
        cut, last = 1 - trans, layers - 1
        # Of two shares of Trans the first runs next to the experts; `fetched` is Trans of the last layer but one.
        fetched = f"|F{last - 1}[0:{cut}]" if last else ""
        turns = (range(layers), range(last, -1, -1))  # one layer each
        before, after = ("", ""), ("", "")
        if self.halves and recompute:
            # What a stage keeps for its backward cannot leave the turn of a loop that computed it: a turn is one layer.
            # G has a small exchange of its own and stands alone: next to S one of the two would wait for the other.
            forward = "Aa0|T0 Ga0 Sa0+Ab0 Gb0 Sb0+Ea0 Ba0+Eb0 Bb0+Ua0 Ub0"
            again = "S*a0+E*b0 B*b0+E*a0 B*a0+U*b0,Ub0 Bb0+U*a0,Ua0"
            if not results_again:  # what B* leaves for the backward depends on no exchange
                again = "S*a0+E*b0,B*b0,U*b0,Ub0 Bb0+E*a0,B*a0,U*a0,Ua0"
            backward = f"G*b0 S*b0+G*a0 {again} Ba0+Eb0 Sb0+Ea0 Gb0 Sa0+Ab0|F-1 Ga0 Aa0|M0"
        elif self.halves:
            # In the forward turn i begins when b's rows of layer i leave next to a's experts, and ends when a's rows of
            # layer i + 1 leave next to b's attention. In the backward it begins with the way back of the latter. The
            # last exchange of the forward and the first of the backward have no window next to them that computes for
            # long: the loss of half a, which waits for neither, can stand there.
            turns = (range(last), range(last - 1, -1, -1))
            before = (
                "Aa0|T0 Ga0 Sa0+Ab0,Gb0",
                f"Ub{last} Bb{last} Ua{last} Ba{last}+Eb{last}{fetched} Sb{last}+Ea{last}",
            )
            forward = f"Sb0+Ea0 Ba0+Eb0|T1[0:{cut}] Bb0+Ua0,Aa1|T1[{cut}:1],Ga1 Sa1+Ub0,Ab1,Gb1"
            backward = (
                f"Sa1+Gb1,Ab1|F0[{cut}:1],Ub0 Bb0+Ga1,Aa1|M1[0:{agg}],Ua0 Ba0+Eb0|M1[{agg}:1]|F-1[0:{cut}] Sb0+Ea0"
            )
            after = (f"Sb{last}+Ea{last} Ba{last}+Eb{last} Bb{last}+Ua{last} Ub{last}", "Sa0+Gb0,Ab0 Ga0 Aa0|M0")
        elif self.schedule == "hecate":
            # Attention first in the backward, so that Agg had the next layer's experts next to it too, hid 1.7 ms of a
            # modelled 54 and exposed 3.2 ms more of the all-to-alls.
            forward, backward = "A0|T0 D0 E0 C0", "R0 C0 E0 D0 A0|M0|F-1"
        else:  # turn i is the block [MoE i, attention i + 1]; the first attention and the last MoE stand alone
            turns = (range(last), range(last - 1, -1, -1))
            before = ("A0|T0", f"R{last} C{last} E{last}{fetched} D{last}")
            forward = f"D0 E0|T1[0:{cut}] C0 A1|T1[{cut}:1]"
            backward = f"A1|M1[0:{agg}]|F0[{cut}:1] R0 C0 E0|M1[{agg}:1]|F-1[0:{cut}] D0"
            after = (f"D{last} E{last} C{last}", "A0|M0")
        loops = {}
        for at, (name, body) in enumerate((("forward", forward), ("backward", backward))):
            start, body, end = (self._parsed(text, recompute) for text in (before[at], body, after[at]))
            loops[name] = WindowLoop(start, body, turns[at], end)
        return BlockSchedule(layers=layers, refetch_replicas=self.refetch_replicas, halves=self.halves, **loops)

    def _parsed(self, text: str, recompute: bool) -> tuple[Window, ...]:
        """Return the windows of a text such as 'Sa1+Ub0,Ab1|T1[0.5:1]', in order.

        A window is the letter of its stage (`STAGES`, '*' where the backward computes it again), its half and its
        layer, then the moves next to it: T for Trans, F for Trans of `refetch_replicas`, M for Agg, with a layer and a
        part. After '+' stand the windows of the other half next to an exchange. Parts of no length are left out.
        """
        windows = []
        for pair in text.split():
            found = []
            for word in re.split(r"[+,]", pair):
                head, *moves = word.split("|")
                letter, again, half, layer = re.fullmatch(r"([A-Z])(\*?)([ab]?)(-?\d+)", head).groups()
                placed = []
                for move in moves:
                    kind, of_layer, start, stop = re.fullmatch(r"([TFM])(-?\d+)(?:\[(.+):(.+)\])?", move).groups()
                    start, stop = float(start or 0), float(stop or 1)
                    if stop > start and (kind != "F" or self.refetch_replicas):
                        placed.append(Move("agg" if kind == "M" else "trans", int(of_layer), start, stop))
                stage = STAGES[letter] + ("_again" if again else "")
                found.append(Window(stage, int(layer), tuple(placed), "ab".index(half) if half else None))
            if found[0].stage != "recompute" or recompute:
                windows.append(dataclasses.replace(found[0], others=tuple(found[1:])))
        return tuple(windows)


EXCHANGES = ("dispatch", "combine", "send", "send_back")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one layer's parts, [...] each; the backward of attention and experts takes twice their forward."""

    attention: float | np.ndarray  # forward of what precedes the MoE layer (T_FNEC)
    experts: float | np.ndarray  # forward (T_FEC)
    exchange: float | np.ndarray = 0.0  # one all-to-all: dispatch and combine are one each, forward and backward
    trans: float | np.ndarray = 0.0  # one layer's
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


def shares(times: Times, refetch_replicas: bool = False) -> tuple[float, float]:
    """Return how much of Trans and of Agg is to run next to attention, for numbers: as much as fits in its time.

    Attention's time does not change from step to step, so it is filled first; the rest runs next to the experts. In the
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
    return sum(  # of an exchange, or of what computes next to it
        np.maximum(times.window(window, backward), sum(times.window(other, backward) for other in window.others))
        for window, backward in _middle_windows(prefetch, recompute)
    )


def _middle_windows(prefetch: Prefetch, recompute: bool = False) -> Iterator[tuple[Window, bool]]:
    """Yield the windows of one layer in the middle of the model in order, and whether each is of the backward."""
    schedule = prefetch.build(layers=3, recompute=recompute)
    for loop, backward in ((schedule.forward, False), (schedule.backward, True)):
        for window in loop.body:
            yield window, backward


def layer_bars(prefetch: Prefetch, times: Times, recompute: bool = False) -> list[tuple[str, str, float, float]]:
    """Return when what runs in one layer in the middle of the model, forward and backward, without moves.

    Times are numbers; recompute as for `stage_seconds`, to whose sum the bars extend.

    Returns:
      (row: 'compute' or 'links', name, begin, seconds) of each stage that takes time.
    """
    prefetch = prefetch if prefetch.is_block_wise else Prefetch(schedule="hecate")
    bars, now = [], 0.0
    for window, backward in _middle_windows(prefetch, recompute):
        way, ends = "backward" if backward else "forward", []
        for side in ((window,), window.others):
            end = now
            for one in side:
                stage, again, _ = one.stage.partition("_again")
                half = "" if one.half is None else f" of half {'ab'[one.half]}"
                parts = [(stage, f"{again.replace('_', ' ')}{half}, {way}", times.window(one, backward))]
                if stage == "recompute":
                    seconds = {"dispatch": times.exchange, "experts": times.experts, "combine": times.exchange}
                    parts = [(name, " again", own) for name, own in seconds.items()]
                for name, what, seconds in parts:
                    row = "links" if name in EXCHANGES else "compute"
                    bars.append((row, name.replace("_", " ") + what, end, float(seconds)))
                    end += float(seconds)
            ends.append(end)
        now = max(ends)
    return [bar for bar in bars if bar[-1] > 0]


def exposed(prefetch: Prefetch, times: Times) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Return the seconds of Trans and of Agg that one layer in the middle of the model waits for.

    A window lasts as long as its stage or its moves, which run one after the other; an exchange with computation of the
    other half next to it as long as the longer, and its moves follow the exchange on the links. 'none' hides nothing.
    Without halves Pro-Prophet's split follows the times, element by element, which gives its equation 8:
    max(0, T_Trans - T_FEC - T_FNEC) and max(0, T_Agg - T_BEC - T_BNEC).
    """
    if not prefetch.is_block_wise:
        return times.trans, times.agg
    if prefetch.schedule == "pro_prophet" and not prefetch.halves:
        free = times.attention + times.experts  # used in full
        trans, agg = np.maximum(0.0, times.trans - free), np.maximum(0.0, times.agg - 2 * free)
        if prefetch.refetch_replicas:
            agg = np.maximum(0.0, times.agg - np.maximum(0.0, 2 * free - times.trans))
            trans = trans + np.maximum(0.0, times.trans - 2 * free)
        return trans, agg
    late = {"trans": 0.0, "agg": 0.0}
    for window, backward in _middle_windows(prefetch):
        left, out = times.window(window, backward), {"trans": 0.0, "agg": 0.0}
        if window.others:  # the links are free from the end of the exchange to that of the computation
            left = np.maximum(0.0, sum(times.window(other, backward) for other in window.others) - left)
        for move in [move for one in window.pair for move in one.moves]:
            seconds = (move.stop - move.start) * getattr(times, move.kind)
            out[move.kind] = out[move.kind] + np.maximum(0.0, seconds - left)
            left = np.maximum(0.0, left - seconds)
        late = {kind: late[kind] + out[kind] for kind in late}
    return late["trans"], late["agg"]
