"""The layer stack in the order of a block-wise schedule: an interpreter of planning/block_schedule.py.

Inputs: `Stages`, which hold what the stages of a layer compute and the schedule that orders them. Outputs: a function
of the whole stack with a backward of its own (`custom_vjp`), so that the program has the schedule's order in both
directions.
Source: design after Hecate, section 3.2, and Pro-Prophet, section V-B.
"""

# `Forward` and `Backward` run the schedule's windows one by one, and of each window its stages. A stage takes what it
# reads from the live values, a dictionary, and leaves there what it makes. Run as a scan, the loop carries exactly what
# is alive between two turns, and layers count from the turn; written out, they count from 0.
#
# Live values, under (name, layer, half). Halves are 0 and 1 where the schedule has two: x comes in two parts, and all
# stages of a layer run once for each; else the half is None. It is None, too, for what both halves share. In the
# columns: h has one value for each layer and half, l one for each layer, s one for the stack (its layer is None).
#
# name             what                                               made by                taken by
# x            h   what enters a layer [b, Sq, M]                     unpack of that below   attention
# a            h   what enters its MoE half [b, Sq, M]                attention              unpack; route reads it
# packed       h   own rows, in buckets [R, M], or a tree with them    route                  send
# received     h   rows that came for the experts here [R, M]         send                   experts
# done         h   the experts' results, in the same order [R, M]     experts                send_back
# returned     h   results of own rows [R, M]                         send_back              unpack
# sent         h   of the packing, what the stages below read         route                  unpack; all between read it
# context      h   of the gate, what unpack reads: (floats, the rest) route                  unpack
# late         h   replicas that came after the gate, a tuple of none route                  unpack; where it ran again,
#                  or one {name: [m, ...]}; left out if none                                 experts of the backward
# ahead        l   replicas that came ahead of it {name: [m, ...]}    Trans                  forward: the last unpack
#                                                                                            backward: the last experts
# top_replicas s   `ahead` of the last layer so far                   forward: last unpack   kept for the backward
#
# In the backward d and one of these names is its cotangent, which goes the other way: made by the stage that took the
# value, taken by the one that made it. da is made by unpack, and route adds its own. Further
# dreplicas    h   cotangent of what unpack used, (ahead, late)       unpack                 experts, with its own:
# dahead       l   of both halves, and so of `dlate`, a tuple         experts                the last part of Agg
# dmix, dgate  l   gradients of parameters, as `Stages.gathered`      attention, route       `close`, at the last half
#                  returned them
# dhome        l   gradient of home experts {name: [Hs, ...]}         unpack, experts,       `close`, after the stage in
#                                                                     late: route, Agg       `whole_after`
# gradients    s   of all layers: {'mix', 'gate'}, leaves [L, ...],   `write`                returned
#                  written out {layer: leaves [...]}; 'home', [Rb, ...]
# the name of  h   the `Residuals` of a stage that ran again          `again`                that stage
# a stage
#
# Leaves the forward ("emitted") under the same keys, and is the backward's `saved`: the `Residuals` of each stage under
# its name, ahead, late; where a layer's stages run again, of these attention's and ahead alone, and a. The results do,
# too: counted, (GateStats, passes).

# Every window with moves is fenced: they start no earlier than its stage, and the next stage waits for both. An
# exchange of one half and what the other computes in parallel start together, when what both read is there.

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.models.lora import adapters_of, base_of, joined
from moe_jax.models.residuals import Residuals, residuals_of
from moe_jax.models.stages import LayerInputs, StackConstants, Stages, join_floats
from moe_jax.moe.bank import add_rows
from moe_jax.parallel.ordering import wait_for_tree
from moe_jax.parallel.sparse_all_gather import PARTS, empty_replicas, fetch, return_part
from moe_jax.parallel.varying import cast_varying, declare_equal, varying_axes
from moe_jax.planning.block_schedule import Move, Window, WindowLoop

Key = tuple[str, int | None, int | None]  # (name, layer, half)
Live = dict[Key, Any]
STAGES = {  # of a layer, in the order of the forward: the live value that each goes on from, and the one that it makes
    "attention": ("x", "a"), "route": ("a", "packed"), "send": ("packed", "received"),
    "experts": ("received", "done"), "send_back": ("done", "returned"), "unpack": ("returned", "x"),
}  # fmt: skip
GOES_ON_FROM = {reads for reads, _ in STAGES.values()} | {"d" + makes for _, makes in STAGES.values()}
OF_WINDOW = {  # the stages of windows that have several of them, in the order of the forward
    "dispatch": ("route", "send"),
    "combine": ("send_back", "unpack"),
    "recompute": ("route_again", "send_again", "experts_again", "send_back_again", "unpack_again"),
}
TOP_REPLICAS, GRADIENTS = ("top_replicas", None, None), ("gradients", None, None)
MATRIX = 1 << 16  # values from which a gradient takes time worth hiding


def run_stack(how: Stages, carry, units, constants: StackConstants):
    """Run a stack of layers.

    Args:
      carry: (x, sinks): x a tuple of [b, Sq, M] or [t / N_MP, M], of all sequences or of either half; the sinks of home
        experts {name: [Rb, ...]} and, or None, of units, to whose cotangents the backward adds gradients.
      units: parameters of the units, leaves [L, ...].

    Returns:
      (carry as it came, (GateStats [L, ...], passes int32 [L], the most of both halves)).
    """

    @jax.custom_vjp
    def stack(x, params, sinks, constants):
        return *Forward(how, params, sinks[0], constants, save_residuals=False).run(x)[0], sinks

    def forward(x, params, sinks, constants):
        out, saved = Forward(how, params, sinks[0], constants, save_residuals=True).run(x)
        return (*out, sinks), (params, constants, saved)

    def backward(residuals, cotangents):
        params, constants, saved = residuals
        dx, dcounted, sums = cotangents
        dstats = [of_half for of_half, _ in dcounted]
        dx, dparams, home = Backward(how, params, sums, constants, dstats).run(dx, saved)
        return (dx, dparams, (home, None), None) if sums[1] is None else (dx, None, (home, dparams), None)

    stack.defvjp(forward, backward)
    halves, params = how.block_schedule.halves, of_moe(units)
    # as rows vary: a cast inside a stage would be saved for its backward
    bank = how.whole_bank(constants.bank, constants.tables)
    constants = dataclasses.replace(constants, bank=cast_varying(bank, how.roles.all))
    if how.adapters:  # the others have no gradient
        constants = dataclasses.replace(constants, frozen=tuple(map(base_of, params)))
        params = tuple(map(adapters_of, params))
    (x, (bank, sinks)), in_place = carry, carry[1][1] is not None
    if how.segment.config.stack == "scan" and halves and not in_place:
        # one sum over devices after the loop, not one in each turn
        params = cast_varying(params, varying_axes(constants.token_ids))
    x, counted, (bank, sinks) = stack(x, params, (bank, of_moe(sinks) if in_place else None), constants)
    carry = x, (bank, {**sinks[0], **sinks[1]} if in_place else None)
    if not halves:
        return carry, counted[0]
    stats, passes = zip(*counted, strict=True)
    choices = [half.choices for half in stats]  # the first half's tokens come first
    sums = jax.tree.map(jnp.add, *(dataclasses.replace(half, choices=None) for half in stats))
    if choices[0] is not None:
        sums = dataclasses.replace(sums, choices=jnp.concatenate(choices, axis=1))
    return carry, (sums, jnp.maximum(*passes))


def of_moe(units: dict) -> tuple[dict, dict]:
    """Return a unit's leaves by name: (of what precedes the MoE layer, of the layer: its gate and shared experts)."""
    inside = {name: leaf for name, leaf in units.items() if name in ("gate", "shared")}
    return {name: leaf for name, leaf in units.items() if name not in inside}, inside


class Direction(abc.ABC):
    """What both directions share: the loop, windows, moves, the inputs of a stage, and stages of the forward.

    Attributes:
      params: (mix, gate), leaves [L, ...] as each device holds them.
      turn: int32 [], the turn of the loop that is traced; None outside, where layers are absolute.
      saved: {key: value} that the forward left, of the same turn or, outside the loop, of windows outside; the forward
        itself has none.
      last_half: which half of a layer this direction runs last.
    """

    last_half: int

    def __init__(self, how: Stages, params, grad_sink, constants: StackConstants):
        self.how, self.params, self.constants = how, params, constants
        self.scan, self.grad_sink = how.segment.config.stack == "scan", grad_sink
        self.layers, self.halves = how.block_schedule.layers, (0, 1) if how.block_schedule.halves else (None,)
        self.grad_sink_dtypes = {name: leaf.dtype for name, leaf in grad_sink.items()}
        self.grad_sink_axes = {name: varying_axes(leaf) for name, leaf in grad_sink.items()}
        self.turn: jax.Array | None = None
        self.saved: Live = {}

    @abc.abstractmethod
    def run_stage(self, stage: str, window: Window, live: Live, emit: Live):
        """Run one stage of a window: it takes what it reads from `live`, puts there what it makes; `emit` is kept."""

    def stages_of(self, window: Window) -> tuple[str, ...]:
        """Return the stages of a window in the order in which they run."""
        return OF_WINDOW.get(window.stage, (window.stage,))

    def key_read(self, stage: str, window: Window) -> Key:
        """Return the key of the live value that a stage of a window goes on from."""
        return STAGES[stage][0], window.layer, window.half

    def fence_pair(self, live: Live, values: tuple) -> tuple:
        """Fence what the two sides of a pair of windows read."""
        return fence(values)

    def closes_layer(self, window: Window) -> bool:
        """Return whether the layer's other half, if there is one, has run its window of this kind before."""
        return window.half in (None, self.last_half)

    def run_loop(self, loop: WindowLoop, live: Live, saved: Live) -> tuple[Live, Live, Live]:
        """Run all windows; returns (live, emitted by windows outside the loop, emitted by its body, stacked by turn).

        Args:
          saved: what the forward's loop emitted, [turns, ...], for the same turns; {} in the forward.
        """
        if not self.scan:
            loop = WindowLoop(loop.windows(self.layers), (), range(0), ())
        outside: Live = {}
        for window in loop.before:
            self.run_window(window, live, outside)
        stacked: Live = {}
        if len(loop.turns):
            live, stacked = self.run_turns(loop, live, saved)
        for window in loop.after:
            self.run_window(window, live, outside)
        return live, outside, stacked

    def run_turns(self, loop: WindowLoop, live: Live, saved: Live) -> tuple[Live, Live]:
        """Run a loop's body as a scan; returns (live, emitted, [turns, ...])."""
        step, outside = loop.turns.step, self.saved
        carry = shift_layers(live, -loop.turns[0])

        def body(carry, inputs):
            self.turn, self.saved = inputs
            live, emit = dict(carry), {}
            for window in loop.body:
                self.run_window(window, live, emit)
            self.turn, self.saved = None, outside
            live = shift_layers(live, -step)
            assert live.keys() == carry.keys(), (sorted(map(str, live)), sorted(map(str, carry)))
            return live, emit

        turns = jnp.asarray(sorted(loop.turns), jnp.int32)  # as the forward stacked what is saved
        carry, stacked = lax.scan(body, carry, (turns, saved), reverse=step < 0)
        return shift_layers(carry, loop.turns[-1] + step), stacked

    def run_window(self, window: Window, live: Live, emit: Live):
        """Run a window and the `others` next to it, of which the first reads what is there and each the one before.

        Neither side starts before what both read is there. On XLA:CPU every window of a half, alone or not, waits for
        the results of the other half so far: branches that hold collectives would overtake others (`ordering.py`).
        """
        sides = {}  # the first window of either half: key of what it reads
        for one in window.pair[:2]:
            if one.half is not None:
                key = self.key_read(self.stages_of(one)[0], one)
                if key not in live:  # what is computed again starts from what was saved
                    live[key] = self.saved[key]
                sides[one] = key
        if window.others:  # no part of what a pair reads is used before all of it is there
            fenced = self.fence_pair(live, tuple(live[key] for key in sides.values()))
            live.update(zip(sides.values(), fenced, strict=True))
        for one in window.pair:
            if one in sides:
                # what the next windows of the other half will read, as far as it is there
                others = [v for (name, _, half), v in live.items() if half == 1 - one.half and name in GOES_ON_FROM]
                live[sides[one]] = self.after(live[sides[one]], *others)
                if self.how.segment.config.recomputes and not window.others:  # one that stands alone, on all platforms
                    live[sides[one]] = fence((live[sides[one]], others))[0]
            for stage in self.stages_of(one):
                self.run_stage(stage, one, live, emit)

    def moves_of(self, window: Window) -> tuple[Move, ...]:
        """Return the parts of transfers that run next to a window; only windows of one stage have some."""
        return () if self.how.transfer is None else window.moves

    def start_moves(self, window: Window, live: Live, value):
        """Return the value that a stage goes on from, and the window's moves, packed.

        What a move sends is fenced with what enters the stage: the move cannot start before it, and the stage not
        before everything is packed. With a fence of its table alone the compiler packs Agg after attention, and keeps
        the gradients of experts, and all that they are computed from, in memory until then.
        """
        moves, transfer, bank = [], self.how.transfer, self.constants.bank  # (key of what it fills, `ChunkTransfer`)
        for move in self.moves_of(window):
            tables = self.of_layer(self.constants.tables, move.layer)
            part = round(move.start * PARTS), round(move.stop * PARTS)
            if move.kind == "trans":
                steps = fetch(bank, tables.home_row, tables.transfer, transfer, part)
                moves.append((("ahead", move.layer, None), steps))
            else:
                wires = {name: leaf.dtype for name, leaf in bank.items()}
                steps = return_part(live["dahead", move.layer, None], tables.transfer, transfer, part, wires)
                moves.append((("dhome", move.layer, None), steps))
        if not moves:
            return value, ()
        value, packed = fence((value, [steps.pack() for _, steps in moves]))
        packed = self.after(packed, value)
        return value, [(*move, one) for move, one in zip(moves, packed, strict=True)]

    def end_moves(self, moves, live: Live, value):
        """Return what a stage made once the moves next to it have arrived; what they bring goes to `live`."""
        if not moves:
            return value
        arrived = {}
        for key, steps, packed in moves:
            into = live.pop(key, None)
            into = empty_replicas(self.constants.bank, self.how.transfer) if into is None else into
            arrived[key] = steps.unpack(steps.communicate(packed), into)
        value, arrived = fence((value, arrived))
        live.update(arrived)
        return value

    def compute(self, stage: str, window: Window, live: Live, value, save: bool) -> tuple[Any, Residuals | None]:
        """Run a stage of the forward on the value that it goes on from, the window's moves next to it.

        Returns:
          (what it makes, as in `Stages`; what its backward needs, if that is to be saved).
        """
        how, at, inputs = self.how, (window.layer, window.half), self.inputs(stage, window, live)
        if stage in ("attention", "route"):
            run, further = getattr(how, stage)(inputs)
        elif stage == "experts":
            run, further = how.experts(inputs, live["sent", *at])
        elif stage == "unpack":
            run, further = how.unpack(inputs, live.pop(("sent", *at)), *live.pop(("context", *at)))
        else:  # an exchange
            run, further = functools.partial(getattr(how.moe.schedule, stage), sent=live["sent", *at]), ()
        value, moves = self.start_moves(window, live, value)
        if save:
            made, pull_back, *aux = jax.vjp(run, value, *further, has_aux=stage == "route")
            made, residuals = (made, *aux) if aux else made, residuals_of(pull_back, inputs)
        else:
            made, residuals = run(value, *further), None
        return self.end_moves(moves, live, made), residuals

    def put_routed(self, window: Window, live: Live, made):
        """Put what `route` made to `live`; returns the rest, (stats' floats, stats' other leaves, passes)."""
        at = window.layer, window.half
        (rows, context, stats, _), (sent, (context_rest, stats_rest), passes, late) = made
        live["sent", *at], live["context", *at], live["packed", *at] = sent, (context, context_rest), rows
        if late:
            live["late", *at] = late
        return stats, stats_rest, passes

    def inputs(self, stage: str, window: Window, live: Live) -> LayerInputs:
        """Return what a stage reads besides activations; replicas only where it uses them, alive or saved."""
        layer, half, known = window.layer, window.half, collections.ChainMap(live, self.saved)
        replicas: tuple = ()
        if stage in ("experts", "unpack"):
            if self.how.transfer is not None:
                replicas += (known["ahead", layer, None],)
            if self.how.late is not None:
                replicas += known["late", layer, half]
        mix, gate = self.gathered(*self.of_layer(self.params, layer), layer)
        key, token_ids, documents = self.constants.key, self.constants.token_ids, self.constants.documents
        if key is not None:
            first = self.how.segment.first_layer
            key = jax.random.fold_in(key, first + self.index(layer) if first else self.index(layer))
        if half is not None:
            token_ids = jnp.split(token_ids, 2)[half]
            documents = None if documents is None else jnp.split(documents, 2)[half]
        bank, tables = self.constants.bank, self.of_layer(self.constants.tables, layer)
        if isinstance(bank, tuple):
            slots = jnp.arange(tables.home_row.shape[0], dtype=jnp.int32)
            bank, tables = bank[self.index(layer)], dataclasses.replace(tables, home_row=slots)
        constants = StackConstants(bank, tables, token_ids, key, documents)
        return LayerInputs(mix, gate, replicas, self.grad_sinks(), constants)

    def grad_sinks(self):
        """Return zeros that nothing reads, through which gradients of one layer leave: of homes and of replicas."""
        bank, tables = self.constants.bank, self.constants.tables
        bank = bank[0] if isinstance(bank, tuple) else bank

        def zeros(slots: int, axes):
            shapes = {name: (slots, *bank[name].shape[1:]) for name in self.grad_sink_dtypes}
            return {n: cast_varying(jnp.zeros(shape, self.grad_sink_dtypes[n]), axes[n]) for n, shape in shapes.items()}

        home = zeros(tables.home_row.shape[-1], self.grad_sink_axes)
        axes = dict.fromkeys(self.grad_sink, varying_axes(bank, tables))
        return home, tuple(zeros(part.slots, axes) for part in (self.how.transfer, self.how.late) if part is not None)

    def gathered(self, mix, gate, layer: int):
        """Return one layer's parameters as its stages take them.

        Where two halves use them they vary over the data-parallel devices, so that their gradients are added before
        they are summed over devices.
        """
        if self.constants.frozen is not None:
            mix, gate = map(joined, self.of_layer(self.constants.frozen, layer), (mix, gate))
        whole = self.how.gathered(mix, gate)
        return cast_varying(whole, varying_axes(self.constants.token_ids)) if self.how.block_schedule.halves else whole

    def index(self, layer: int):
        """Return the absolute layer, an int outside the loop; clipped, as all turns send moves of layers beyond."""
        if self.turn is None:
            return min(max(layer, 0), self.layers - 1)
        return jnp.clip(self.turn + layer, 0, self.layers - 1)

    def of_layer(self, tree, layer: int):
        """Return one layer's part of a tree with leaves [L, ...]."""
        index = self.index(layer)
        if isinstance(index, int):
            return jax.tree.map(lambda leaf: leaf[index], tree)
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), tree)

    def after(self, value, *others):
        """Return value; on XLA:CPU it waits for `others`, whose collectives may be in branches."""
        return wait_for_tree(value, self.constants.token_ids[0], others) if jax.tree.leaves(others) else value


class Forward(Direction):
    """The forward direction."""

    last_half = 1

    def __init__(self, how: Stages, params, grad_sink, constants: StackConstants, *, save_residuals: bool):
        super().__init__(how, params, grad_sink, constants)
        self.save_residuals = save_residuals

    def run(self, x: tuple):
        """Return ((x, counted), saved): x by half, and by half (stats [L, ...], passes [L]).

        Saved is what the backward takes, (emitted outside the loop, emitted by its turns, values [turns, ...], the top
        layer's replicas {name: [m, ...]}, None where the backward fetches none again).
        """
        schedule = self.how.block_schedule
        live = {("x", 0, half): part for half, part in zip(self.halves, x, strict=True)}
        if self.how.transfer is not None and self.save_residuals and schedule.refetch_replicas:
            # The backward needs the top layer's replicas at once. All turns of a loop are alike, so each leaves its
            # own here; before the first, zeros of the same type.
            live[TOP_REPLICAS] = empty_replicas(self.constants.bank, self.how.transfer)
        live, outside, stacked = self.run_loop(schedule.forward, live, {})
        counted = []
        for half in self.halves:
            pieces = {}  # by their first layer, leaves [1 or turns, ...]
            for layer, value in _pop_counted(outside, half):
                pieces[layer] = jax.tree.map(lambda leaf: leaf[None], value)
            for offset, value in _pop_counted(stacked, half):
                pieces[schedule.forward.turns[0] + offset] = value
            ordered = [pieces[layer] for layer in sorted(pieces)]
            counted.append(jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered))
        x = tuple(live["x", self.layers, half] for half in self.halves)
        return (x, tuple(counted)), (outside, stacked, live.get(TOP_REPLICAS))

    def run_stage(self, stage: str, window: Window, live: Live, emit: Live):
        at = window.layer, window.half
        # the rest of a layer runs again where `remat` is on
        save = self.save_residuals and (stage == "attention" or not self.how.segment.config.recomputes)
        key = self.key_read(stage, window)
        value = live[key] if stage == "route" else live.pop(key)  # unpack takes a
        made, residuals = self.compute(stage, window, live, value, save)
        if stage == "route":
            stats, stats_rest, passes = self.put_routed(window, live, made)
            live["packed", *at] = self.after(live["packed", *at], stats)
            emit["counted", *at] = join_floats(stats, stats_rest), passes
        elif stage == "unpack":
            late, a = live.pop(("late", *at), None), live.pop(("a", *at))
            live["x", window.layer + 1, window.half] = a + made.reshape(a.shape)
            if save and late:
                emit["late", *at] = late
            if self.save_residuals and not save:
                emit["a", *at] = a
            if self.closes_layer(window):
                replicas = live.pop(("ahead", window.layer, None), None)
                if TOP_REPLICAS in live:
                    live[TOP_REPLICAS] = replicas
                elif self.save_residuals and replicas is not None:
                    emit["ahead", window.layer, None] = replicas
        else:
            live[STAGES[stage][1], *at] = made
        if save:
            emit[stage, *at] = residuals


def _pop_counted(emitted: Live, half: int | None) -> list:
    """Take one half's counts out of what was emitted: [(layer, (stats, passes))]."""
    keys = [key for key in emitted if key[0] == "counted" and key[2] == half]
    return [(key[1], emitted.pop(key)) for key in keys]


class Backward(Direction):
    """The backward direction: cotangents, gradients, and the replicas fetched a second time.

    A stage has a method of its name; both exchanges have one.

    Attributes:
      sums: what gradients are added to: of home experts {name: [Rb, ...]}, of params (mix, gate), None for zeros.
      in_place: whether those of params are added layer by layer.
      dstats: by half, cotangents of stats [L, ...].
      whole_after: {gradient: the stage of a layer's last half, or Agg, that adds the last part of it}.
      unwritten: whole gradients that `fence_pair` will write, (name, layer, value).
      travelled: gradients of home experts that were written, (layer, value), and not added to their sum yet. Those of
        experts that are split over `data` are fenced before: one layer's travel after the other's, on the same links.
    """

    last_half = 0

    def __init__(self, how: Stages, params, sums, constants: StackConstants, dstats: list):
        super().__init__(how, params, sums[0], constants)
        self.sums, self.in_place = sums, self.scan or sums[1] is not None
        home = "agg" if how.transfer is not None else "route" if how.late is not None else "experts"
        self.whole_after = {"mix": "attention", "gate": "route", "home": home}
        self.dstats = dstats
        self.unwritten: list[tuple] = []
        self.travelled: list[tuple] = []

    def run(self, dx: tuple, saved: tuple):
        """Return (halves of dx, dparams, of home experts); dx: the cotangent, by half; saved: as `Forward.run` says."""
        self.saved, stacked, top_replicas = saved
        live: Live = {("dx", self.layers, half): part for half, part in zip(self.halves, dx, strict=True)}
        if top_replicas is not None:
            live["ahead", self.layers - 1, None] = top_replicas
        zeros = lambda leaf: cast_varying(jnp.zeros(leaf.shape, leaf.dtype), varying_axes(leaf))  # noqa: E731
        home, params = self.sums
        mix, gate = jax.tree.map(zeros, self.params) if params is None else params
        whole = {"mix": mix, "gate": gate}
        live[GRADIENTS] = {**(whole if self.in_place else {name: {} for name in whole}), "home": home}
        live, _, _ = self.run_loop(self.how.block_schedule.backward, live, stacked)
        for gradient in self.unwritten:
            self.write(*gradient, live)
        self.add_travelled([value for _, value in self.travelled], live)
        dx = tuple(live["dx", 0, half] for half in self.halves)
        dx = tuple(self.after(part, *dx) for part in dx)
        gradients = live[GRADIENTS]
        if not self.in_place:  # layers that are written out are put together once
            for name, like in whole.items():
                values = (gradients[name][layer] for layer in range(self.layers))
                gradients[name] = jax.tree.map(lambda leaf, *own: jnp.stack(own).astype(leaf.dtype), like, *values)
        return dx, (gradients["mix"], gradients["gate"]), gradients["home"]

    def stages_of(self, window: Window) -> tuple[str, ...]:
        stages = super().stages_of(window)
        return stages if window.stage == "recompute" else stages[::-1]

    def key_read(self, stage: str, window: Window) -> Key:
        if stage.endswith("_again"):
            return super().key_read(stage.removesuffix("_again"), window)
        return "d" + STAGES[stage][1], window.layer + (stage == "unpack"), window.half

    def run_stage(self, stage: str, window: Window, live: Live, emit: Live):
        if stage.endswith("_again"):
            self.again(stage.removesuffix("_again"), window, live)
        elif stage in ("send", "send_back"):
            self.exchange(stage, window, live)
        else:
            getattr(self, stage)(window, live)
        for move in self.moves_of(window):
            if move.kind == "agg" and move.stop == 1.0:
                del live["dahead", move.layer, None]
                self.close("home", move.layer, live)

    def unpack(self, window: Window, live: Live):
        """From dx: dreturned, dcontext, dreplicas, and da, the residual connection's."""
        at = window.layer, window.half
        # what is made again of the number of passes: the branch of later passes
        dx, pull_back = self.begin("unpack", window, live, waits=lambda leaf: leaf.ndim == 0)
        dreturned, dcontext, (dhome, dreplicas) = pull_back(dx.reshape(-1, dx.shape[-1]))
        live["dreturned", *at], live["dcontext", *at], live["dreplicas", *at] = dreturned, dcontext, dreplicas
        self.add_gradient("home", "unpack", window, dhome, live)
        live["da", *at] = dx

    def exchange(self, stage: str, window: Window, live: Live):
        """From ddone the rows that go back again: dreturned -> ddone, or dreceived -> dpacked."""
        d, pull_back = self.begin(stage, window, live)
        (live["d" + STAGES[stage][0], window.layer, window.half],) = pull_back(d)

    def experts(self, window: Window, live: Live):
        """From ddone and dreplicas: dreceived, dahead and dlate. The replicas are used no more."""
        at, layer = (window.layer, window.half), window.layer
        ddone, pull_back = self.begin("experts", window, live)
        live["dreceived", *at], (dhome, dreplicas) = pull_back(ddone)
        self.add_gradient("home", "experts", window, dhome, live)
        dreplicas = jax.tree.map(jnp.add, live.pop(("dreplicas", *at)), dreplicas)
        live.pop(("late", *at), None)
        if self.how.transfer is not None:
            add(live, ("dahead", layer, None), dreplicas[0])
        if self.how.late is not None:
            live["dlate", *at] = dreplicas[-1:]
        if self.closes_layer(window):
            live.pop(("ahead", layer, None), None)

    def route(self, window: Window, live: Live):
        """From dpacked, dcontext, dlate and the cotangents of stats: the rest of da."""
        at, layer = (window.layer, window.half), window.layer
        dpacked, pull_back = self.begin("route", window, live)
        # cotangents of integers have no dtype
        own = lambda leaf: None if leaf.dtype == jax.dtypes.float0 else self.of_layer(leaf, layer)  # noqa: E731
        dstats = jax.tree.map(own, self.dstats[window.half or 0])
        da, dgate, dhome = pull_back((dpacked, live.pop(("dcontext", *at)), dstats, live.pop(("dlate", *at), ())))
        if self.how.late is not None:  # what the replicas that came late add
            self.add_gradient("home", "route", window, dhome, live)
        da = live["da", *at] + da
        written = self.add_gradient("gate", "route", window, dgate, live)
        live["da", *at] = self.after(da, written)

    def attention(self, window: Window, live: Live):
        """From da: dx."""
        # what is made again of activations: the tokens that an MP group gathers
        floats = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
        da, pull_back = self.begin("attention", window, live, waits=floats)
        dx, dmix = pull_back(da)
        if self.moves_of(window):  # else the sum of dmix over devices, and so all of attention, would run before them
            dx, dmix = fence((dx, dmix))
        written = self.add_gradient("mix", "attention", window, dmix, live)
        live["dx", window.layer, window.half] = self.after(dx, written)

    def begin(self, stage: str, window: Window, live: Live, waits: Callable | None = None):
        """Return the cotangent that a stage goes on from, and its pull-back, next to which the window's moves run.

        Args:
          waits: whether a leaf of the residuals waits for the cotangent on XLA:CPU. What is made again of those could
            hold collectives, and would run as soon as they are there, next to anything.
        """
        inputs = self.inputs(stage, window, live)
        residuals = self.take(live, (stage, window.layer, window.half))
        d = live.pop(self.key_read(stage, window))
        if waits is not None:
            residuals = jax.tree.map(lambda leaf: self.after(leaf, d) if waits(leaf) else leaf, residuals)
        restored = residuals.restore(inputs)
        d, moves = self.start_moves(window, live, d)

        def pull_back(cotangents):
            dread, *others = restored(cotangents)
            return self.end_moves(moves, live, dread), *others

        return d, pull_back

    def take(self, live: Live, key: Key):
        """Return a value that is alive, which it is no longer, or was saved."""
        return live.pop(key) if key in live else self.saved[key]

    def again(self, stage: str, window: Window, live: Live):
        """Run a stage of the forward again, and keep what its backward needs."""
        at = layer, half = window.layer, window.half
        dx = "dx", layer + 1, half
        if stage == "route":  # nothing is computed again before its cotangent is there
            value = self.after(self.take(live, ("a", *at)), live[dx])
            if half is not None:
                value, live[dx] = fence((value, live[dx]))
        else:
            value = live.pop(self.key_read(stage + "_again", window))
        made, live[stage, *at] = self.compute(stage, window, live, value, save=True)
        if stage in ("experts", "send_back") and not self.how.moe.reads_results:
            # no backward reads the results: with zeros in their place the last product and the way home are not made
            made = self.after(cast_varying(jnp.zeros_like(made), varying_axes(made)), made)
            if stage == "experts":  # what is kept is there before the backward of the layer begins
                live[dx] = fence((live[stage, *at].arrays, live[dx]))[1]
        if stage == "route":
            self.put_routed(window, live, made)
        elif stage == "unpack":  # what was computed again ends before the backward of the layer begins
            live[dx] = self.after(live[dx], made)
        else:
            live[STAGES[stage][1], *at] = made

    def add_gradient(self, name: str, stage: str, window: Window, value, live: Live):
        """Add what a stage gives to its layer's gradient `name`, and close that if nothing more will come.

        Returns:
          what was written, () if nothing.
        """
        add(live, ("d" + name, window.layer, None), value)
        whole = stage == self.whole_after[name] and self.closes_layer(window)
        return self.close(name, window.layer, live) if whole else ()

    def close(self, name: str, layer: int, live: Live):
        """Take a layer's whole gradient and write it; written out with halves, when the next pair starts.

        Returns:
          what was written, () if that is put off.
        """
        value = live.pop(("d" + name, layer, None))
        if self.how.block_schedule.halves and not self.scan:
            self.unwritten.append((name, layer, value))
            return ()
        return self.write(name, layer, value, live)

    def write(self, name: str, layer: int, value, live: Live):
        """Put a layer's gradient among those of all; mix and gate come as cotangents of what `gathered` returned."""
        if name == "home":
            slots, dims = self.constants.tables.home_row.shape[-1], self.how.split_gradients
            own = {name: jnp.zeros((slots, *leaf.shape[1:]), leaf.dtype) for name, leaf in self.grad_sink.items()}
            own = {name: cast_varying(leaf, self.grad_sink_axes[name]) for name, leaf in own.items()}
            value = jax.vjp(lambda own: self.how.whole_experts(own, dims), own)[1](value)[0]
        else:
            mix, gate = self.of_layer(self.params, layer)
            if name == "mix":
                value = jax.vjp(lambda p: self.gathered(p, gate, layer)[0], mix)[1](value)[0]
            else:
                value = jax.vjp(lambda p: self.gathered(mix, p, layer)[1], gate)[1](value)[0]
        index, gradients = self.index(layer), live[GRADIENTS]
        if name == "home":
            self.travelled.append((layer, value))
            if self.scan or max(self.how.split_gradients.values(), default=-1) < 0:
                self.add_travelled([value], live)
        elif self.in_place:
            live[GRADIENTS] = {**gradients, name: add_rows(gradients[name], index, value)}
        else:
            gradients[name][index] = value
        return value

    def add_travelled(self, values: list, live: Live):
        """Add the gradients of home experts that have been written, as `values`, to the sum."""
        for (layer, _), value in zip(self.travelled, values, strict=True):
            home, rows = live[GRADIENTS]["home"], self.of_layer(self.constants.tables.home_row, layer)
            rows_of = {name: cast_varying(rows, axes) for name, axes in self.grad_sink_axes.items()}
            home = {name: add_rows(leaf, rows_of[name], value[name]) for name, leaf in home.items()}
            live[GRADIENTS] = {**live[GRADIENTS], "home": home}
        self.travelled = []

    def fence_pair(self, live: Live, values: tuple) -> tuple:
        """Fence what the windows read; where layers are written out, with all gradients of parameters so far.

        Nothing reads those before the end of the step, and the compiler would compute most of them next to the last
        exchanges, and nothing next to the first. Small ones are left to it: fenced, each is a kernel of its own.
        """
        if self.scan:  # each turn of a loop computes its own
            return fence(values)
        keys = [key for key in live if key[0] in ("dhome", "dmix", "dgate")]
        leaves, tree = jax.tree.flatten(([value for *_, value in self.unwritten], [live[key] for key in keys]))
        large = [place for place, leaf in enumerate(leaves) if leaf.size >= MATRIX]
        follows = any(name == "home" for name, *_ in self.unwritten)  # the gradient of the next layer travels then
        above = [value for _, value in self.travelled] if follows else []
        values, fenced, above = fence((values, [leaves[place] for place in large], above))
        if follows:
            self.add_travelled(above, live)
        for place, leaf in zip(large, fenced, strict=True):
            leaves[place] = leaf
        whole, sums = jax.tree.unflatten(tree, leaves)
        live.update(zip(keys, sums, strict=True))
        waiting, self.unwritten = self.unwritten, []
        written = [self.write(name, layer, value, live) for (name, layer, _), value in zip(waiting, whole, strict=True)]
        return self.after(values, written)


def add(live: Live, key: Key, value):
    """Add a value to a sum that may not have begun."""
    live[key] = jax.tree.map(jnp.add, live[key], value) if key in live else value


def fence(tree):
    """Return the tree; nothing that uses one of its leaves starts before all of them are computed. Types are kept."""
    leaves, structure = jax.tree.flatten(tree)
    out = []
    for leaf, held in zip(leaves, lax.optimization_barrier(leaves), strict=True):
        extra = tuple(sorted(varying_axes(held) - varying_axes(leaf)))
        out.append(declare_equal(held, extra))
    return jax.tree.unflatten(structure, out)


def shift_layers(live: Live, by: int) -> Live:
    """Return live values with layers counted from elsewhere; those of no layer as they are."""
    return {(name, at if at is None else at + by, half): value for (name, at, half), value in live.items()}
