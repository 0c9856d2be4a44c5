"""Block-wise schedules as data: which transfer of parameters or gradients runs beside which computation.

A `BlockSchedule` is lists of windows in the order of the program. The model builds its step from it, block_times.py its
overlap and its picture. Nothing here runs or takes time.

A layer is four stages: attention (everything before the gate), dispatch, experts, combine. Dispatch is route (gate and
pack) and send, the exchange; combine is send_back, the other exchange, and unpack. *Trans* brings parameters to
the replicas, *Agg* sums the replicas' gradients at home. Trans runs once per layer, with `refetch_replicas` (Hecate's
re-materialisation) a second time in the backward.

A device's sequences may be cut into two halves, a and b, that do not depend on each other: while one waits for its
exchange the other computes. A window then names its half, and an exchange the windows of the other half beside it.
Letters: docs/notation.md; i a turn of a loop.
Source: Hecate, section 3.2; Pro-Prophet, section V-B, algorithm 2 and figure 9; halves: design, after DualPipe
(DeepSeek-V3, section 3.2.1), within one device and one step.
"""

from __future__ import annotations

import dataclasses

from moe_jax.errors import UserError

SCHEDULES = ("none", "hecate", "pro_prophet")
CASES = ("split", "attention", "expert")  # figure 9 c, b, a


@dataclasses.dataclass(frozen=True)
class Move:
    """A part of one layer's transfer.

    Attributes:
      kind: 'trans' or 'agg'.
      layer: absolute, or relative to the turn inside a loop's body.
      start, stop: which part, as shares of the whole between 0 and 1.
    """

    kind: str
    layer: int
    start: float = 0.0
    stop: float = 1.0


@dataclasses.dataclass(frozen=True)
class Window:
    """One stage of one layer, and what is in flight while it computes.

    Attributes:
      beside: the moves.
      half: 0 (a) or 1 (b) of a device's sequences, None for all of them.
      others: of an exchange, the windows of the other half that run at the same time, one after the other; both sides
        start when what both read is there.
    """

    stage: str
    layer: int
    beside: tuple[Move, ...] = ()
    half: int | None = None
    others: tuple[Window, ...] = ()

    @property
    def pair(self) -> tuple[Window, ...]:
        """The window and its `others`."""
        return (self, *self.others)

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves of the pair, in order."""
        return tuple(move for window in self.pair for move in window.beside)


@dataclasses.dataclass(frozen=True)
class Loop:
    """One direction of a step.

    Attributes:
      before, after: windows with absolute layers.
      body: windows with layers relative to the turn; turn i runs layer i + window.layer.
      turns: values of i, in order. A move of a layer outside 0 .. L-1 has no effect: a loop whose turns must all be
        equal sends it for nothing, `windows` leaves it out.
    """

    before: tuple[Window, ...]
    body: tuple[Window, ...]
    turns: range
    after: tuple[Window, ...]

    def windows(self, layers: int) -> tuple[Window, ...]:
        """Return all windows with absolute layers, in the order of the program."""
        turned = [(window, turn) for turn in self.turns for window in self.body]
        every = [*((window, 0) for window in self.before), *turned, *((window, 0) for window in self.after)]
        return tuple(_placed(window, turn, layers) for window, turn in every)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSchedule:
    """A step's windows, forward and backward."""

    name: str
    layers: int
    refetch_replicas: bool
    forward: Loop
    backward: Loop
    halves: bool = False

    def windows(self) -> tuple[tuple[str, Window], ...]:
        """Return ('forward' or 'backward', window) of the whole step, in order; `others` are inside theirs."""
        return tuple(
            (name, window) for name in ("forward", "backward") for window in getattr(self, name).windows(self.layers)
        )

    def layers_alive(self) -> int:
        """Return the most layers whose replicas are in memory at the end of any window, those in flight included."""
        alive, most = set(), 0
        for direction, both in self.windows():
            alive |= {move.layer for move in both.moves if move.kind == "trans"}
            most = max(most, len(alive))
            ends, half = (("combine", "unpack"), 1) if direction == "forward" else (("experts",), 0)
            for window in both.pair:
                keeps = direction == "forward" and (not self.refetch_replicas or window.layer == self.layers - 1)
                if window.stage in ends and window.half in (None, half) and not keeps:
                    alive.discard(window.layer)
        return most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Choose a block-wise schedule.

    Attributes:
      schedule: 'none', 'hecate' or 'pro_prophet'.
      case: of `pro_prophet`, where Trans and Agg go: 'attention', 'expert', or 'split' over both (its figure 9).
      refetch_replicas: drop replicas after the forward, fetch them again in the backward (Hecate-RM).
      halves: two halves of a device's sequences, one computing while the other's rows travel; replicas that no schedule
        places travel as under 'hecate'.
    """

    schedule: str = "none"
    case: str = "split"
    refetch_replicas: bool = False
    halves: bool = False

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise UserError(f"prefetch ({self.schedule!r}) must be one of {', '.join(SCHEDULES)}")
        if self.case not in CASES:
            raise UserError(f"prefetch_case ({self.case!r}) must be one of {', '.join(CASES)}")

    def build(
        self, layers: int, *, trans_share: float = 0.5, agg_share: float = 0.5, recompute: bool = False
    ) -> BlockSchedule:
        """Return the schedule.

        Args:
          layers: L, MoE layers.
          trans_share, agg_share: 'split': how much of Trans and of Agg runs beside attention (`times.shares`).
          recompute: the backward computes each MoE layer again before it differentiates it.

        Raises:
          ValueError: for 'none', which is no schedule, or a share outside 0 .. 1.
        """
        if not self.is_block_wise or layers < 1:
            raise ValueError(f"no block-wise schedule {self.schedule!r} of {layers} layers can be built")
        shares = {"attention": (1.0, 1.0), "expert": (0.0, 0.0), "split": (trans_share, agg_share)}[self.case]
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"shares of Trans and Agg beside attention {shares} must lie between 0 and 1")
        if self.schedule != "pro_prophet":
            shares = (1.0, 1.0)
        again = self.refetch_replicas
        if self.halves and recompute:
            forward, backward = _halves_again(layers, again)
        elif self.halves:
            forward, backward = _halves(layers, *shares, again)
        elif self.schedule == "hecate":
            forward, backward = _hecate(layers, again, recompute)
        else:
            forward, backward = _pro_prophet(layers, *shares, again, recompute)
        return BlockSchedule(
            name=self.schedule,
            layers=layers,
            refetch_replicas=self.refetch_replicas,
            forward=forward,
            backward=backward,
            halves=self.halves,
        )

    @property
    def is_block_wise(self) -> bool:
        """Whether there is a schedule to build."""
        return self.schedule != "none" or self.halves


def _hecate(layers: int, refetch_replicas: bool, recompute: bool) -> tuple[Loop, Loop]:
    """Trans of layer l beside attention l; in the backward Agg of layer l and Trans of layer l - 1 beside it."""
    forward = (Window("attention", 0, (Move("trans", 0),)), *_moe(0))
    again = (Move("trans", -1),) if refetch_replicas else ()
    # Attention first, so that Agg had the next layer's experts beside it too, hid 1.7 ms of a modelled 54 and exposed
    # 3.2 ms more of the all-to-alls.
    backward = (*_moe_back(0, recompute), Window("attention", 0, (Move("agg", 0), *again)))
    return Loop((), forward, range(layers), ()), Loop((), backward, range(layers - 1, -1, -1), ())


def _pro_prophet(
    layers: int, trans_share: float, agg_share: float, refetch_replicas: bool, recompute: bool
) -> tuple[Loop, Loop]:
    """Turn i is the block [MoE i, attention i + 1]; the first attention and the last MoE stand alone."""
    cut, again = 1 - trans_share, refetch_replicas
    forward = Loop(
        before=(Window("attention", 0, (Move("trans", 0),)),),
        body=(*_moe(0, _part("trans", 1, 0.0, cut)), Window("attention", 1, _part("trans", 1, cut, 1.0))),
        turns=range(layers - 1),
        after=_moe(layers - 1),
    )
    first, second = _part("agg", 1, 0.0, agg_share), _part("agg", 1, agg_share, 1.0)
    backward = Loop(
        before=_moe_back(layers - 1, recompute, _part("trans", layers - 2, 0.0, cut, again and layers > 1)),
        body=(
            Window("attention", 1, (*first, *_part("trans", 0, cut, 1.0, again))),
            *_moe_back(0, recompute, (*second, *_part("trans", -1, 0.0, cut, again))),
        ),
        turns=range(layers - 2, -1, -1),
        after=(Window("attention", 0, (Move("agg", 0),)),),
    )
    return forward, backward


def _halves(layers: int, trans_share: float, agg_share: float, refetch_replicas: bool) -> tuple[Loop, Loop]:
    """Two halves, a and b: while the rows of one travel, the other computes.

    In the forward turn i begins when b's rows of layer i leave beside a's experts, and ends when a's rows of layer
    i + 1 leave beside b's attention. In the backward it begins with the way back of the latter. The last exchange
    of the forward and the first of the backward have no window beside them that computes for long: the loss of half a,
    which waits for neither, can stand there.
    """
    last, cut, again = layers - 1, 1 - trans_share, refetch_replicas
    forward = Loop(
        before=(*_to_route(0, 0, (Move("trans", 0),)), _beside("send", 0, 0, *_to_route(0, 1))),
        body=(
            *_halves_experts(0, _part("trans", 1, 0.0, cut)),
            _beside("send_back", 0, 1, Window("unpack", 0, (), 0), *_to_route(1, 0, _part("trans", 1, cut, 1.0))),
            _beside("send", 1, 0, Window("unpack", 0, (), 1), *_to_route(1, 1)),
        ),
        turns=range(last),
        after=(
            *_halves_experts(last),
            _beside("send_back", last, 1, Window("unpack", last, (), 0)),
            Window("unpack", last, (), 1),
        ),
    )
    first, second = _part("agg", 1, 0.0, agg_share), _part("agg", 1, agg_share, 1.0)
    leave_b = Window("route", 1, (), 1), Window("attention", 1, _part("trans", 0, cut, 1.0, again), 1)
    leave_a = Window("route", 1, (), 0), Window("attention", 1, first, 0)
    backward = Loop(
        before=(
            Window("unpack", last, (), 1),
            Window("send_back", last, (), 1),
            Window("unpack", last, (), 0),
            *_halves_back(last, _part("trans", last - 1, 0.0, cut, again and last > 0)),
        ),
        body=(
            _beside("send", 1, 0, *leave_b, Window("unpack", 0, (), 1)),
            _beside("send_back", 0, 1, *leave_a, Window("unpack", 0, (), 0)),
            *_halves_back(0, (*second, *_part("trans", -1, 0.0, cut, again))),
        ),
        turns=range(last - 1, -1, -1),
        after=(
            _beside("send", 0, 0, Window("route", 0, (), 1), Window("attention", 0, (), 1)),
            Window("route", 0, (), 0),
            Window("attention", 0, (Move("agg", 0),), 0),
        ),
    )
    return forward, backward


def _halves_again(layers: int, refetch_replicas: bool) -> tuple[Loop, Loop]:
    """Two halves where the backward computes each layer again: a turn is one layer, and nothing stands across two.

    What a stage keeps for its backward cannot leave the turn of a loop that computed it.
    """
    forward = (
        *_to_route(0, 0, (Move("trans", 0),)),
        _beside("send", 0, 0, *_to_route(0, 1)),
        *_halves_experts(0),
        _beside("send_back", 0, 1, Window("unpack", 0, (), 0)),
        Window("unpack", 0, (), 1),
    )
    again = (Move("trans", -1),) if refetch_replicas else ()
    backward = (
        Window("route_again", 0, (), 1),
        _beside("send_again", 0, 1, Window("route_again", 0, (), 0)),
        _beside("send_again", 0, 0, Window("experts_again", 0, (), 1)),
        _beside("send_back_again", 0, 1, Window("experts_again", 0, (), 0)),
        _beside("send_back_again", 0, 0, Window("unpack_again", 0, (), 1), Window("unpack", 0, (), 1)),
        _beside("send_back", 0, 1, Window("unpack_again", 0, (), 0), Window("unpack", 0, (), 0)),
        *_halves_back(0, ()),
        _beside("send", 0, 0, Window("route", 0, (), 1), Window("attention", 0, again, 1)),
        Window("route", 0, (), 0),
        Window("attention", 0, (Move("agg", 0),), 0),
    )
    return Loop((), forward, range(layers), ()), Loop((), backward, range(layers - 1, -1, -1), ())


def _beside(stage: str, layer: int, half: int, *others: Window) -> Window:
    """Return the exchange of one half and the windows of the other half beside it."""
    return Window(stage, layer, (), half, others)


def _to_route(layer: int, half: int, beside: tuple[Move, ...] = ()) -> tuple[Window, ...]:
    return Window("attention", layer, beside, half), Window("route", layer, (), half)


def _halves_experts(layer: int, beside: tuple[Move, ...] = ()) -> tuple[Window, ...]:
    """Return the windows of the forward in which experts compute."""
    return (
        _beside("send", layer, 1, Window("experts", layer, (), 0)),
        _beside("send_back", layer, 0, Window("experts", layer, beside, 1)),
    )


def _halves_back(layer: int, beside: tuple[Move, ...]) -> tuple[Window, ...]:
    """Return the windows of the backward in which experts compute."""
    return (
        _beside("send_back", layer, 0, Window("experts", layer, beside, 1)),
        _beside("send", layer, 1, Window("experts", layer, (), 0)),
    )


def _part(kind: str, layer: int, start: float, stop: float, wanted: bool = True) -> tuple[Move, ...]:
    return (Move(kind, layer, start, stop),) if wanted and stop > start else ()


def _moe(layer: int, beside: tuple[Move, ...] = ()) -> tuple[Window, ...]:
    return Window("dispatch", layer), Window("experts", layer, beside), Window("combine", layer)


def _moe_back(layer: int, recompute: bool, beside: tuple[Move, ...] = ()) -> tuple[Window, ...]:
    again = (Window("recompute", layer),) if recompute else ()
    return (*again, Window("combine", layer), Window("experts", layer, beside), Window("dispatch", layer))


def _placed(window: Window, turn: int, layers: int) -> Window:
    """Return a window of a turn with absolute layers, without moves of layers that there are not."""
    moves = (dataclasses.replace(move, layer=move.layer + turn) for move in window.beside)
    beside = tuple(move for move in moves if 0 <= move.layer < layers)
    others = tuple(_placed(other, turn, layers) for other in window.others)
    return dataclasses.replace(window, layer=window.layer + turn, beside=beside, others=others)
