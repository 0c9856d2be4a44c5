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
# context      h   of the gate, the floats that unpack needs          route                  unpack
# packing      h   of the packing, what the stages below read, with   route                  unpack; all between read it
#                  the rest of what unpack needs of the gate
# late         h   replicas that came after the gate {name: [m, ...]} route                  unpack; where it ran again,
#                  {} without any                                                            experts of the backward
# ahead        l   replicas that came ahead of it {name: [m, ...]}    Trans                  forward: the last unpack
#                                                                                            backward: the last experts
# top_replicas s   `ahead` of the last layer so far                   forward: last unpack   kept for the backward
#
# In the backward d and one of these names is its cotangent, which goes the other way: made by the stages that read the
# value, which add to each other, taken by the one that made it. dahead is of both halves. Further
# dmix, dgate  l   gradients of parameters, as `gathered` returned    attention, route       `close`, at the last half
#                  them
# dhome        l   gradient of home experts {name: [Hs, ...]}         unpack, experts,       `close`, after the stage in
#                                                                     late: route, Agg       `whole_after`
# travelled    l   the same as the bank has it, not in its sum yet    `write`                `add_home`
# gradients    s   of all layers: {'mix', 'gate'}, leaves [L, ...],   `write`                returned
#                  written out {layer: leaves [...]}; 'home', [Rb, ...]
# the name of  h   the residuals of a stage that ran again            `again`                that stage
# a stage
#
# Leaves the forward ("emitted") under the same keys, and is the backward's `saved`: the residuals of each stage under
# its name, ahead, late; where a layer's stages run again, of these attention's and ahead alone, and a. The results do,
# too: counted, (GateStats, passes).

# Every window with moves is fenced: they start no earlier than its stage, and the next stage waits for both. An
# exchange of one half and what the other computes in parallel start together, when what both read is there.

from __future__ import annotations

import abc
import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

from moe_jax.models.lora import adapters_of, base_of, gather_merged, joined
from moe_jax.models.residuals import residuals_of
from moe_jax.models.stages import StackConstants, Stages, join_floats
from moe_jax.moe.bank import add_rows
from moe_jax.parallel.ordering import wait_for
from moe_jax.parallel.sparse_all_gather import PARTS, empty_replicas, fetch, return_part
from moe_jax.parallel.varying import cast_varying, declare_equal, varying_axes
from moe_jax.planning.block_schedule import Window, WindowLoop

Key = tuple[str, int | None, int | None]  # (name, layer, half)
Live = dict[Key, Any]
# Of a layer, in the order of the forward: what a stage reads that has a cotangent (live values, of which it goes on
# from the first; parameters and grad_sinks of the layer) and what it makes that has one, the first for the next stage.
STAGES = {
    "attention": (("x",), ("mix",), ("a",)),
    "route": (("a",), ("gate", "home"), ("packed", "context", "stats", "late")),
    "send": (("packed",), (), ("received",)),
    "experts": (("received",), ("home", "ahead", "late"), ("done",)),
    "send_back": (("done",), (), ("returned",)),
    "unpack": (("returned", "a", "context"), ("home", "ahead", "late"), ("x",)),
}
GOES_ON_FROM = {reads[0] for reads, _, _ in STAGES.values()} | {"d" + makes[0] for _, _, makes in STAGES.values()}
SHARED = ("mix", "gate", "home", "ahead")  # by both halves
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
        return *Forward(how, params, sinks[0], constants).run(x, save_residuals=False)[0], sinks

    def forward(x, params, sinks, constants):
        out, saved = Forward(how, params, sinks[0], constants).run(x, save_residuals=True)
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
        constants = dataclasses.replace(constants, params={name: base_of(own) for name, own in params.items()})
        params = {name: adapters_of(own) for name, own in params.items()}
    x, (bank_sink, unit_sinks) = carry
    in_place = unit_sinks is not None
    if how.segment.config.stack == "scan" and halves and not in_place:
        # one sum over devices after the loop, not one in each turn
        params = cast_varying(params, varying_axes(constants.token_ids))
    sinks = bank_sink, of_moe(unit_sinks) if in_place else None
    x, counted, (bank_sink, unit_sinks) = stack(x, params, sinks, constants)
    carry = x, (bank_sink, {**unit_sinks["mix"], **unit_sinks["gate"]} if in_place else None)
    if not halves:
        return carry, counted[0]
    stats, passes = zip(*counted, strict=True)
    choices = jax.tree.map(lambda *own: jnp.concatenate(own, axis=1), *(half.choices for half in stats))
    sums = jax.tree.map(jnp.add, *(dataclasses.replace(half, choices=None) for half in stats))
    return carry, (dataclasses.replace(sums, choices=choices), jnp.maximum(*passes))


def of_moe(units: dict) -> dict[str, dict]:
    """Return a unit's leaves in two parts: 'mix' precedes the MoE layer, 'gate' is its gate and shared experts."""
    inside = {name: leaf for name, leaf in units.items() if name in ("gate", "shared")}
    return {"mix": {name: leaf for name, leaf in units.items() if name not in inside}, "gate": inside}


class Direction(abc.ABC):
    """What both directions share: the loop, windows, moves, the inputs of a stage, and stages of the forward.

    Where a value waits for others, it does so on XLA:CPU alone: their collectives may be in branches (`ordering.py`).

    Attributes:
      params: {'mix', 'gate'}, leaves [L, ...] as each device holds them.
      turn: int32 [], the turn of the loop that is traced; None outside, where layers are absolute.
      saved: {key: value} that the forward left, of the same turn or, outside the loop, of windows outside; the forward
        itself has none.
      transfers: {'ahead', 'late': how many replicas come and how}, of those there are.
      last_half: which half of a layer this direction runs last; order: of the stages of a window, 1 or -1.
    """

    last_half: int
    order: int

    def __init__(self, how: Stages, params, grad_sink, constants: StackConstants):
        self.how, self.params, self.constants = how, params, constants
        self.scan, self.grad_sink = how.segment.config.stack == "scan", grad_sink
        self.layers, self.halves = how.block_schedule.layers, (0, 1) if how.block_schedule.halves else (None,)
        transfers = {"ahead": how.ahead, "late": how.late}
        self.transfers = {name: part for name, part in transfers.items() if part is not None}
        self.turn: jax.Array | None = None
        self.saved: Live = {}

    @abc.abstractmethod
    def run_stage(self, stage: str, window: Window, live: Live, emit: Live):
        """Run one stage of a window: it takes what it reads from `live`, puts there what it makes; `emit` is kept."""

    def stages_of(self, window: Window) -> tuple[str, ...]:
        """Return the stages of a window in the order in which they run."""
        return OF_WINDOW.get(window.stage, (window.stage,))[:: 1 if window.stage == "recompute" else self.order]

    def key_read(self, stage: str, window: Window) -> Key:
        """Return the key of the live value that a stage of a window goes on from, in the backward its cotangent."""
        name = stage.removesuffix("_again")
        reads, _, makes = STAGES[name]
        if self.order > 0 or name != stage:
            return reads[0], window.layer, window.half
        return "d" + makes[0], window.layer + (stage == "unpack"), window.half

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
                live[sides[one]] = wait_for(live[sides[one]], others)
                if self.how.segment.config.recomputes and not window.others:  # one that stands alone, on all platforms
                    live[sides[one]] = fence((live[sides[one]], others))[0]
            for stage in self.stages_of(one):
                self.run_stage(stage, one, live, emit)

    def start_moves(self, window: Window, live: Live, value):
        """Return the value that a stage goes on from, and the window's moves, packed.

        What a move sends is fenced with what enters the stage: the move cannot start before it, and the stage not
        before everything is packed. With a fence of its table alone the compiler packs Agg after attention, and keeps
        the gradients of experts, and all that they are computed from, in memory until then.
        """
        moves, bank = [], self.constants.bank  # (key of what it fills, `ChunkTransfer`)
        where = self.how.ahead, self.how.roles.expert
        for move in () if self.how.ahead is None else window.moves:  # only windows of one stage have some
            tables = self.of_layer(self.constants.tables, move.layer)
            part = round(move.start * PARTS), round(move.stop * PARTS)
            if move.kind == "trans":
                steps = fetch(bank, tables.home_row, tables.transfer, *where, part)
                moves.append((("ahead", move.layer, None), steps))
            else:
                wires = {name: leaf.dtype for name, leaf in bank.items()}
                steps = return_part(live["dahead", move.layer, None], tables.transfer, *where, part, wires)
                moves.append((("dhome", move.layer, None), steps))
        if not moves:
            return value, ()
        value, packed = fence((value, [steps.pack() for _, steps in moves]))
        packed = wait_for(packed, value)
        return value, [(*move, one) for move, one in zip(moves, packed, strict=True)]

    def end_moves(self, moves, live: Live, value):
        """Return what a stage made once the moves next to it have arrived; what they bring goes to `live`."""
        if not moves:
            return value
        arrived = {}
        for key, steps, packed in moves:
            into = live.pop(key) if key in live else empty_replicas(self.constants.bank, self.how.ahead)
            arrived[key] = steps.unpack(steps.communicate(packed), into)
        value, arrived = fence((value, arrived))
        live.update(arrived)
        return value

    def compute(self, stage: str, window: Window, live: Live, save: bool) -> Partial | None:
        """Run a stage of the forward on live values, the window's moves next to it; what it makes goes to `live`.

        Returns:
          what its backward needs, if that is to be saved.
        """
        (layer, half), (reads, _, makes) = (window.layer, window.half), STAGES[stage]
        constants, own = self.inputs(stage, window, live)
        take = live.pop if stage != "route" else live.get  # unpack takes a
        read = {name: take((name, layer, half)) for name in reads}
        packing = live.pop(("packing", layer, half)) if stage == "unpack" else live.get(("packing", layer, half))
        read[reads[0]], moves = self.start_moves(window, live, read[reads[0]])
        run, residuals = self.how.bind(stage, constants, packing), None
        if save:
            made, pull_back, rest = jax.vjp(run, {**read, **own}, has_aux=True)
            residuals = residuals_of(pull_back, (constants, own))
        else:
            made, rest = run({**read, **own})
        made = made | {makes[0]: self.end_moves(moves, live, made[makes[0]])} | rest
        live.update({(name, layer + (name == "x"), half): value for name, value in made.items()})
        return residuals

    def inputs(self, stage: str, window: Window, live: Live) -> tuple[StackConstants, dict]:
        """Return what a stage reads besides activations: (constants, of its layer what has a gradient, by name).

        The backward has the same arrays again. Replicas are there only where the stage uses them, alive or saved.
        """
        layer, half, known = window.layer, window.half, collections.ChainMap(live, self.saved)
        params = self.gathered(self.of_layer(self.params, layer), layer)
        with_gradient = params | self.grad_sinks()
        own = {name: with_gradient[name] for name in STAGES[stage][1] if name in with_gradient}
        if stage == "route" and self.how.late is None:
            del own["home"]
        replicas = {n: known[n, layer, None if n in SHARED else half] for n in self.transfers if n in own}
        key, token_ids, documents = self.constants.key, self.constants.token_ids, self.constants.documents
        if key is not None:
            key = jax.random.fold_in(key, self.how.segment.first_layer + self.index(layer))
        if half is not None:
            token_ids = jnp.split(token_ids, 2)[half]
            documents = None if documents is None else jnp.split(documents, 2)[half]
        bank, tables = self.constants.bank, self.of_layer(self.constants.tables, layer)
        if isinstance(bank, tuple):
            slots = jnp.arange(tables.home_row.shape[0], dtype=jnp.int32)
            bank, tables = bank[self.index(layer)], dataclasses.replace(tables, home_row=slots)
        return StackConstants(bank, tables, token_ids, key, documents, params=params, replicas=replicas), own

    def grad_sinks(self) -> dict[str, dict]:
        """Return zeros that nothing reads, through which gradients of one layer leave: of homes and of replicas."""
        bank, tables = self.constants.bank, self.constants.tables
        bank = bank[0] if isinstance(bank, tuple) else bank
        slots = {"home": tables.home_row.shape[-1]} | {name: part.slots for name, part in self.transfers.items()}
        found: dict[str, dict] = {name: {} for name in slots}
        for name, number in slots.items():
            for weight, leaf in self.grad_sink.items():
                axes = varying_axes(leaf) if name == "home" else varying_axes((bank, tables))
                zeros = jnp.zeros((number, *bank[weight].shape[1:]), leaf.dtype)
                found[name][weight] = cast_varying(zeros, axes)
        return found

    def gathered(self, params: dict, layer: int) -> dict:
        """Return one layer's parameters, {'mix', 'gate'} or one of the two, with whole leaves, as its stages take them.

        Where two halves use them they vary over the data-parallel devices, so that their gradients are added before
        they are summed over devices.
        """
        if self.constants.params is not None:
            frozen = self.of_layer(self.constants.params, layer)
            params = {name: joined(frozen[name], own) for name, own in params.items()}
        how, axes, parts = self.how, self.how.roles.dense, self.how.roles.size(self.how.roles.dense)
        whole = {n: gather_merged(own, how.dims[n], axes, parts, how.wires[n]) for n, own in params.items()}
        return cast_varying(whole, varying_axes(self.constants.token_ids)) if how.block_schedule.halves else whole

    def index(self, layer: int):
        """Return the absolute layer, clipped to the stack: turns of a loop also move layers beyond its ends."""
        if self.turn is None:
            return min(max(layer, 0), self.layers - 1)
        return jnp.clip(self.turn + layer, 0, self.layers - 1)

    def of_layer(self, tree, layer: int):
        """Return one layer's part of a tree with leaves [L, ...]."""
        index = self.index(layer)
        if isinstance(index, int):
            return jax.tree.map(lambda leaf: leaf[index], tree)
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), tree)


class Forward(Direction):
    """The forward direction; `save_residuals` says whether a backward follows."""

    last_half, order = 1, 1
    save_residuals = False

    def run(self, x: tuple, save_residuals: bool):
        """Return ((x, counted), saved): x by half, and by half (stats [L, ...], passes [L]).

        Saved is what the backward takes, (emitted outside the loop, emitted by its turns, values [turns, ...], the top
        layer's replicas {name: [m, ...]}, None where the backward fetches none again).
        """
        schedule, self.save_residuals = self.how.block_schedule, save_residuals
        live = {("x", 0, half): part for half, part in zip(self.halves, x, strict=True)}
        if self.how.ahead is not None and self.save_residuals and schedule.refetch_replicas:
            # The backward needs the top layer's replicas at once. All turns of a loop are alike, so each leaves its
            # own here; before the first, zeros of the same type.
            live[TOP_REPLICAS] = empty_replicas(self.constants.bank, self.how.ahead)
        live, outside, stacked = self.run_loop(schedule.forward, live, {})
        counted = []
        for half in self.halves:
            pieces = {}  # by their first layer, leaves [1 or turns, ...]
            for key in [key for key in outside if key[::2] == ("counted", half)]:
                pieces[key[1]] = jax.tree.map(lambda leaf: leaf[None], outside.pop(key))
            for key in [key for key in stacked if key[::2] == ("counted", half)]:
                pieces[schedule.forward.turns[0] + key[1]] = stacked.pop(key)
            ordered = [pieces[layer] for layer in sorted(pieces)]
            counted.append(jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered))
        x = tuple(live["x", self.layers, half] for half in self.halves)
        return (x, tuple(counted)), (outside, stacked, live.get(TOP_REPLICAS))

    def run_stage(self, stage: str, window: Window, live: Live, emit: Live):
        at, recomputes = (window.layer, window.half), self.how.segment.config.recomputes
        if stage == "route" and self.save_residuals and recomputes:  # the rest of the layer runs again
            emit["a", *at] = live["a", *at]
        save = self.save_residuals and (stage == "attention" or not recomputes)
        residuals = self.compute(stage, window, live, save)
        if save:
            emit[stage, *at] = residuals
        if stage == "route":
            stats, (counts, passes) = live.pop(("stats", *at)), live.pop(("counted", *at))
            live["packed", *at] = wait_for(live["packed", *at], stats)
            emit["counted", *at] = join_floats(stats, counts), passes
        elif stage == "unpack":
            late = live.pop(("late", *at))
            if save and late:
                emit["late", *at] = late
            if self.closes_layer(window):
                replicas = live.pop(("ahead", window.layer, None), None)
                if TOP_REPLICAS in live:
                    live[TOP_REPLICAS] = replicas
                elif self.save_residuals and replicas is not None:
                    emit["ahead", window.layer, None] = replicas


class Backward(Direction):
    """The backward direction: cotangents, gradients, and the replicas fetched a second time.

    Attributes:
      sums: what gradients are added to: of home experts {name: [Rb, ...]}, of params {'mix', 'gate'}, None for zeros.
      in_place: whether those of params are added layer by layer.
      dstats: by half, cotangents of stats [L, ...].
      whole_after: {gradient: the stage of a layer's last half, or Agg, that adds the last part of it}.
      unwritten: keys of whole gradients that `fence_pair` will write.
    """

    last_half, order = 0, -1

    def __init__(self, how: Stages, params, sums, constants: StackConstants, dstats: list):
        super().__init__(how, params, sums[0], constants)
        self.sums, self.in_place = sums, self.scan or sums[1] is not None
        home = "agg" if how.ahead is not None else "route" if how.late is not None else "experts"
        self.whole_after = {"mix": "attention", "gate": "route", "home": home}
        self.dstats = dstats
        self.unwritten: list[Key] = []

    def run(self, dx: tuple, saved: tuple):
        """Return (halves of dx, dparams, of home experts); dx: the cotangent, by half; saved: as `Forward.run` says."""
        self.saved, stacked, top_replicas = saved
        live: Live = {("dx", self.layers, half): part for half, part in zip(self.halves, dx, strict=True)}
        if top_replicas is not None:
            live["ahead", self.layers - 1, None] = top_replicas
        home, whole = self.sums
        if whole is None:
            zeros = lambda leaf: cast_varying(jnp.zeros(leaf.shape, leaf.dtype), varying_axes(leaf))  # noqa: E731
            whole = jax.tree.map(zeros, self.params)
        live[GRADIENTS] = {**(whole if self.in_place else {name: {} for name in whole}), "home": home}
        live, _, _ = self.run_loop(self.how.block_schedule.backward, live, stacked)
        for key in self.unwritten:
            self.write(key, live)
        self.add_home(live)
        dx = tuple(live["dx", 0, half] for half in self.halves)
        dx = tuple(wait_for(part, dx) for part in dx)
        gradients = live[GRADIENTS]
        if not self.in_place:  # layers that are written out are put together once
            for name, like in whole.items():
                values = (gradients[name][layer] for layer in range(self.layers))
                gradients[name] = jax.tree.map(lambda leaf, *own: jnp.stack(own).astype(leaf.dtype), like, *values)
        return dx, {name: gradients[name] for name in whole}, gradients["home"]

    def run_stage(self, stage: str, window: Window, live: Live, emit: Live):
        if stage.endswith("_again"):
            self.again(stage.removesuffix("_again"), window, live)
        else:
            self.pull_back(stage, window, live)
        for move in window.moves:
            if self.how.ahead is not None and move.kind == "agg" and move.stop == 1.0:
                del live["dahead", move.layer, None]
                self.close("home", move.layer, live)

    def pull_back(self, stage: str, window: Window, live: Live):
        """Run a stage the other way, the window's moves next to it: cotangents of what it made -> of what it read."""
        (layer, half), (reads, _, makes) = (window.layer, window.half), STAGES[stage]
        constants, own = self.inputs(stage, window, live)
        residuals = self.take(live, (stage, layer, half))
        d = {name: live.pop(("d" + name, layer + (name == "x"), half), {}) for name in makes}
        if stage == "route":  # cotangents of integers have no dtype
            d["stats"] = jax.tree.map(
                lambda leaf: None if leaf.dtype == jax.dtypes.float0 else self.of_layer(leaf, layer),
                self.dstats[half or 0],
            )
        # What is made again of residuals could hold collectives, and would run as soon as they are there, next to
        # anything: the branch of later passes, of their number; the tokens that an MP group gathers, of activations.
        if stage in ("unpack", "attention"):
            leaves, tree = jax.tree.flatten(residuals)
            for place, leaf in enumerate(leaves):
                if leaf.ndim == 0 if stage == "unpack" else jnp.issubdtype(leaf.dtype, jnp.floating):
                    leaves[place] = wait_for(leaf, d[makes[0]])
            residuals = jax.tree.unflatten(tree, leaves)
        d[makes[0]], moves = self.start_moves(window, live, d[makes[0]])
        (read,) = residuals((constants, own))(d)
        # else the sum of dmix over devices, and so all of attention, would run before the moves
        fenced = (reads[0], "mix") if stage == "attention" else reads[:1]
        read |= self.end_moves(moves, live, {name: read[name] for name in fenced})
        for name, value in read.items():  # added to what other stages and the other half gave
            key = "d" + name, layer, None if name in SHARED else half
            live[key] = jax.tree.map(jnp.add, live[key], value) if key in live else value
        if stage == "experts":  # the replicas are used no more
            live.pop(("late", layer, half), None)
            if self.closes_layer(window):
                live.pop(("ahead", layer, None), None)
        whole = [name for name, last in self.whole_after.items() if last == stage and self.closes_layer(window)]
        written = [self.close(name, layer, live) for name in whole]
        key = "d" + reads[0], layer, half
        live[key] = wait_for(live[key], written)

    def take(self, live: Live, key: Key):
        """Return a value that is alive, which it is no longer, or was saved."""
        return live.pop(key) if key in live else self.saved[key]

    def again(self, stage: str, window: Window, live: Live):
        """Run a stage of the forward again, and keep what its backward needs."""
        at, dx = (window.layer, window.half), ("dx", window.layer + 1, window.half)
        if stage == "route":  # nothing is computed again before its cotangent is there
            live["a", *at] = wait_for(self.take(live, ("a", *at)), live[dx])
            if window.half is not None:
                live["a", *at], live[dx] = fence((live["a", *at], live[dx]))
        live[stage, *at] = self.compute(stage, window, live, save=True)
        if stage in ("experts", "send_back") and not self.how.moe.reads_results:
            # no backward reads the results: with zeros in their place the last product and the way home are not made
            key = STAGES[stage][2][0], *at
            live[key] = wait_for(cast_varying(jnp.zeros_like(live[key]), varying_axes(live[key])), live[key])
            if stage == "experts":  # what is kept is there before the backward of the layer begins
                live[dx] = fence((live[stage, *at].args, live[dx]))[1]
        if stage == "route":
            del live["stats", *at], live["counted", *at]
        elif stage == "unpack":  # what was computed again ends before the backward of the layer begins
            live[dx] = wait_for(live[dx], live.pop(("x", window.layer + 1, window.half)))

    def close(self, name: str, layer: int, live: Live):
        """Write a layer's whole gradient; written out with halves, when the next pair starts.

        Returns:
          what was written, () if that is put off.
        """
        key = "d" + name, layer, None
        if self.how.block_schedule.halves and not self.scan:
            self.unwritten.append(key)
            return ()
        return self.write(key, live)

    def write(self, key: Key, live: Live):
        """Put a layer's gradient among those of all; mix and gate come as cotangents of what `gathered` returned."""
        value, (name, layer, _), gradients = live.pop(key), key, live[GRADIENTS]
        name = name.removeprefix("d")
        if name == "home":
            slots, dims = self.constants.tables.home_row.shape[-1], self.how.split_gradients
            zeros = {n: jnp.zeros((slots, *leaf.shape[1:]), leaf.dtype) for n, leaf in self.grad_sink.items()}
            own = {n: cast_varying(leaf, varying_axes(self.grad_sink[n])) for n, leaf in zeros.items()}
            value = jax.vjp(lambda own: self.how.whole_experts(own, dims), own)[1](value)[0]
            live["travelled", layer, None] = value
            if self.scan or max(dims.values(), default=-1) < 0:
                self.add_home(live)
            return value
        own = self.of_layer(self.params[name], layer)
        value = jax.vjp(lambda own: self.gathered({name: own}, layer)[name], own)[1](value)[0]
        if self.in_place:
            live[GRADIENTS] = {**gradients, name: add_rows(gradients[name], self.index(layer), value)}
        else:
            gradients[name][self.index(layer)] = value
        return value

    def add_home(self, live: Live):
        """Add the gradients of home experts that have been written to their sum."""
        for key in [key for key in live if key[0] == "travelled"]:
            value, rows = live.pop(key), self.of_layer(self.constants.tables.home_row, key[1])
            home = {
                name: add_rows(leaf, cast_varying(rows, varying_axes(self.grad_sink[name])), value[name])
                for name, leaf in live[GRADIENTS]["home"].items()
            }
            live[GRADIENTS] = {**live[GRADIENTS], "home": home}

    def fence_pair(self, live: Live, values: tuple) -> tuple:
        """Fence what the windows read; where layers are written out, with all gradients of parameters so far.

        Nothing reads those before the end of the step, and the compiler would compute most of them next to the last
        exchanges, and nothing next to the first. Small ones are left to it: fenced, each is a kernel of its own. Of
        experts that are split over `data`, one layer's gradient travels after the other's, on the same links.
        """
        if self.scan:  # each turn of a loop computes its own
            return fence(values)
        names, follows = {"dhome", "dmix", "dgate"}, any(name == "dhome" for name, _, _ in self.unwritten)
        names |= {"travelled"} if follows else set()
        keys = [key for key in live if key[0] in names]
        leaves, tree = jax.tree.flatten([live[key] for key in keys])
        large = [place for place, leaf in enumerate(leaves) if leaf.size >= MATRIX]
        values, fenced = fence((values, [leaves[place] for place in large]))
        for place, leaf in zip(large, fenced, strict=True):
            leaves[place] = leaf
        live.update(zip(keys, jax.tree.unflatten(tree, leaves), strict=True))
        if follows:
            self.add_home(live)
        waiting, self.unwritten = self.unwritten, []
        return wait_for(values, [self.write(key, live) for key in waiting])


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
