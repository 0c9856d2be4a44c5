"""The layer stack as a block-wise schedule says: an interpreter of `moe_jax.overlap` that builds the real step.

Enters: a `BlockSchedule`, the stages of a layer, and how parameters move. Leaves: a function of the whole stack with a
backward of its own (`custom_vjp`), so that the program holds the schedule's windows in the schedule's order in both
directions. Every window with moves is fenced: they start no earlier than its stage, and what follows waits for both.

Live values stand in a dictionary under (name, layer). As a scan, its loop carries exactly those that are alive between
two turns, with layers relative to the turn; unrolled, layers are absolute. What the backward needs of each turn leaves
the forward loop as its stacked result and enters the backward loop at the same turn. Names: x [b, Sq, M] enters a
layer, a [b, Sq, M] its MoE half; rows, done [R, M]; a leading d marks a cotangent; home is the open gradient of home
experts.
Source: design after Hecate, section 3.2, and Pro-Prophet, section V-B.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.copies import declare_equal
from moe_jax.collectives.ordering import wait_for_tree
from moe_jax.collectives.sparse import cut, empty_guests, fetch_journey, return_journey
from moe_jax.collectives.transfer import TransferPlan
from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.models.stages import LayerInputs, Stages, doors, join_floats, known_arrays
from moe_jax.overlap.blocks import BlockSchedule, Loop, Window


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the stack reads and never differentiates: bank {name: [S, ...]}, tables [L, ...], token ids, PRNG key."""

    bank: dict
    tables: Any
    token_ids: jax.Array
    key: jax.Array


jax.tree_util.register_dataclass(Constants)


@dataclasses.dataclass(frozen=True)
class Prefetcher:
    """How one stack is built.

    Attributes:
      schedule: the windows.
      stages: the functions of a layer.
      transfer: how parameters move; None leaves the windows without moves.
      prepare: (mix, gate) of one layer -> the same, gathered; differentiated here.
      scan: loop over turns, else write all layers out.
      recompute: keep what enters the two halves of a layer only.
      noisy: the gate takes a key.
    """

    schedule: BlockSchedule
    stages: Stages
    transfer: TransferPlan | None
    prepare: Any
    scan: bool
    recompute: bool
    noisy: bool

    def __call__(self, x, params, sink, constants: Constants):
        """Run the stack.

        Args:
          x: [b, Sq, M].
          params: (mix, gate), leaves [L, ...].
          sink: {name: [L, Hs, ...]}, whose cotangent is the gradient of home experts.
          constants: see `Constants`.

        Returns:
          (x [b, Sq, M], GateStats [L, ...], passes int32 [L]).
        """

        @jax.custom_vjp
        def stack(x, params, sink, constants):
            return _Forward(self, params, sink, constants, keeping=False).run(x)[0]

        def forward(x, params, sink, constants):
            out, saved = _Forward(self, params, sink, constants, keeping=True).run(x)
            types = {name: leaf[:0] for name, leaf in sink.items()}  # dtype and axes, no bytes
            return out, (params, types, constants, saved)

        def backward(residuals, cotangents):
            params, types, constants, saved = residuals
            dx, dparams, dsink = _Backward(self, params, types, constants).run(cotangents, saved)
            return dx, dparams, dsink, None

        stack.defvjp(forward, backward)
        return stack(x, params, sink, constants)

    def loop(self, loop: Loop) -> Loop:
        """Return the loop as it is run: unrolled if asked for, without moves if nothing moves."""
        if not self.scan:
            loop = Loop(loop.windows(self.schedule.layers), (), range(0), ())
        if self.transfer is None:
            bare = lambda windows: tuple(dataclasses.replace(w, beside=()) for w in windows)  # noqa: E731
            loop = Loop(bare(loop.before), bare(loop.body), loop.turns, bare(loop.after))
        return loop


class _Direction:
    """What both directions share: look-ups by layer, moves, fences, and the loop."""

    def __init__(self, how: Prefetcher, params, sink, constants: Constants):
        self.how, self.params, self.constants = how, params, constants
        self.layers = how.schedule.layers
        self.door_dtypes = {name: leaf.dtype for name, leaf in sink.items()}
        self.door_axes = varying_axes(sink)
        self.turn = None
        self.branches = how.scan and how.transfer is not None and how.transfer.branches  # of moves

    def after(self, value, *others):
        """Return value; XLA:CPU has it wait for `others`, whose collectives may stand in branches."""
        return wait_for_tree(value, self.constants.token_ids[0], others)

    def index(self, layer: int):
        """Return the absolute layer, an int while no loop runs; what lies outside becomes the nearest inside."""
        if self.turn is None:
            return min(max(layer, 0), self.layers - 1)
        return jnp.clip(self.turn + layer, 0, self.layers - 1)

    def of_layer(self, tree, layer: int):
        index = self.index(layer)
        if isinstance(index, int):
            return jax.tree.map(lambda leaf: leaf[index], tree)
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), tree)

    def inputs(self, layer: int, guests) -> LayerInputs:
        mix, gate = self.how.prepare(*self.of_layer(self.params, layer))
        key = jax.random.fold_in(self.constants.key, self.index(layer)) if self.how.noisy else None
        return LayerInputs(
            mix=mix,
            gate=gate,
            bank=self.constants.bank,
            guests=guests,
            sinks=self.sinks(),
            tables=self.of_layer(self.constants.tables, layer),
            token_ids=self.constants.token_ids,
            noise_key=key,
        )

    def sinks(self):
        """Return the doors of one layer, home and guests."""
        bank, axes = self.constants.bank, self.door_axes
        slots = self.constants.tables.home_row.shape[-1]
        home = {n: doors({n: v}, slots, self.door_dtypes[n], axes)[n] for n, v in bank.items()}
        if self.how.transfer is None:
            return home, None
        guest_axes = varying_axes(bank, self.constants.tables.transfer)
        slots, dtypes = self.how.transfer.guest_slots, self.door_dtypes
        guests = {n: doors({n: v}, slots, dtypes[n], guest_axes)[n] for n, v in bank.items()}
        return home, guests

    def cuts(self, window: Window):
        """Return [(move, plan, table)] of the window's moves that hold a round."""
        found = []
        for move in window.beside:
            layer = self.index(move.layer)
            tables = self.of_layer(self.constants.tables, move.layer)
            known = layer if isinstance(layer, int) else None
            piece = cut(self.how.transfer, tables.transfer, move.start, move.stop, known)
            if piece is not None:
                found.append((move, *piece, tables.home_row))
        return found

    def beside(self, window: Window, env: dict, chain, compute):
        """Return compute(chain) with the window's moves in flight; their results go to `env`.

        What a move sends is packed and fenced with what enters the stage: the move cannot start before it, and the
        stage not before everything is packed. Fenced by its table alone, Agg was packed wherever the compiler liked:
        behind attention, with the gradients of experts, and all that they are computed from, waiting there too. Moves
        in branches come first, and the stage waits for them, on XLA:CPU (see `collectives/ordering.py`).
        """
        journeys = []
        for move, plan, table, rows in self.cuts(window):
            if move.kind == "trans":
                journeys.append((("guests", move.layer), fetch_journey(self.constants.bank, rows, table, plan)))
            else:
                wires = {name: leaf.dtype for name, leaf in self.constants.bank.items()}
                journeys.append((("home", move.layer), return_journey(env["dguests", move.layer], table, plan, wires)))
        cargo = [journey.pack() for _, journey in journeys]
        if journeys:
            chain, cargo = fence((chain, cargo))
            cargo = self.after(cargo, chain)
        came: list = []
        if self.branches:
            for (_, journey), one in zip(journeys, cargo, strict=True):
                came.append(journey.carry(self.after(one, came)))
            chain = self.after(chain, came)
        (main, *others) = compute(chain)
        came = came or [journey.carry(one) for (_, journey), one in zip(journeys, cargo, strict=True)]
        arrived = {}
        for (key, journey), one in zip(journeys, came, strict=True):
            into = env.pop(key, None)
            into = empty_guests(self.constants.bank, self.how.transfer) if into is None else into
            arrived[key] = journey.unpack(one, into)
        if journeys:
            main, arrived = fence((main, arrived))
        env.update(arrived)
        return (main, *others)

    def run_loop(self, loop: Loop, env: dict, saved=None):
        """Run all windows; returns (env, emitted before and after {key: value}, emitted by the body, stacked).

        Args:
          saved: what the other direction's loop emitted, stacked, for the same turns.
        """
        alone: dict = {}
        for window in loop.before:
            self.window(window, env, alone, {})
        stacked = {}
        if len(loop.turns):
            step = loop.turns.step
            moving = [key for key in env if isinstance(key[1], int)]
            relative = {key: (key[0], key[1] - loop.turns[0]) for key in moving}
            carry = {relative.get(key, key): value for key, value in env.items()}

            def body(carry, inputs):
                self.turn, kept = inputs
                env, emitted = dict(carry), {}
                for window in loop.body:
                    self.window(window, env, emitted, kept)
                self.turn = None
                env = {(n, at if at is None else at - step): value for (n, at), value in env.items()}
                assert env.keys() == carry.keys(), (sorted(map(str, env)), sorted(map(str, carry)))
                return env, emitted

            turns = jnp.asarray(list(loop.turns), jnp.int32)
            flipped = step < 0 and saved is not None
            if flipped:  # the other direction stacked its turns the other way round
                turns = turns[::-1]
            carry, stacked = lax.scan(body, carry, (turns, saved), reverse=flipped)
            end = loop.turns[-1] + step
            env = {(n, at if at is None else at + end): value for (n, at), value in carry.items()}
        for window in loop.after:
            self.window(window, env, alone, {})
        return env, alone, stacked


class _Forward(_Direction):
    """The way to the loss."""

    def __init__(self, how, params, sink, constants, *, keeping: bool):
        super().__init__(how, params, sink, constants)
        self.keeping = keeping

    def run(self, x):
        """Return ((x, stats [L, ...], passes [L]), saved)."""
        how, env = self.how, {("x", 0): x}
        last = how.transfer is not None and self.keeping and how.schedule.rematerialize
        if last:  # the last layer's guests are needed again at once
            bank = self.constants.bank
            env["last", None] = {name: door.astype(bank[name].dtype) for name, door in self.sinks()[1].items()}
        loop = how.loop(how.schedule.forward)
        env, alone, stacked = self.run_loop(loop, env)
        told = [{k: v for k, v in part.items() if k[0] in ("stats", "passes")} for part in (alone, stacked)]
        stats, passes = (self._by_layer(loop, name, *told) for name in ("stats", "passes"))
        saved = [{k: v for k, v in part.items() if k[0] not in ("stats", "passes")} for part in (alone, stacked)]
        return (env["x", self.layers], stats, passes), (*saved, env.get(("last", None)))

    def _by_layer(self, loop: Loop, name: str, alone: dict, stacked: dict):
        pieces = {layer: jax.tree.map(lambda v: v[None], v) for (n, layer), v in alone.items() if n == name}
        for (n, offset), value in stacked.items():
            if n == name:
                pieces[loop.turns[0] + offset] = value
        ordered = [pieces[layer] for layer in sorted(pieces)]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered)

    def window(self, window: Window, env: dict, emit: dict, _):
        layer, stages, keeping = window.layer, self.how.stages, self.keeping
        save = keeping and not self.how.recompute
        if window.stage == "attention":
            inputs = self.inputs(layer, None)
            x = env.pop(("x", layer))
            a, kept = self.beside(window, env, x, lambda x: stages.attention(x, inputs, keeping))
            env["a", layer] = a
            if keeping:
                emit["attention", layer] = kept
        elif window.stage == "dispatch":
            a = env["a", layer]
            ((rows, context, stats), (sizes, whole, passes)), kept = stages.dispatch(a, self.inputs(layer, None), save)
            rows = self.after(rows, stats)
            env.update({("rows", layer): rows, ("sizes", layer): sizes, ("context", layer): (context, whole[0])})
            emit["stats", layer], emit["passes", layer] = join_floats(stats, whole[1]), passes
            if save:
                emit["dispatch", layer] = kept
            elif keeping:
                emit["a", layer] = a
        elif window.stage == "experts":
            sizes = env.pop(("sizes", layer))
            inputs = self.inputs(layer, env.get(("guests", layer)))
            rows = env.pop(("rows", layer))
            done, kept = self.beside(window, env, rows, lambda rows: stages.experts(rows, sizes, inputs, save))
            env["done", layer] = done
            if save:
                emit["experts", layer] = kept
        else:
            guests = env.pop(("guests", layer), None)
            (context, whole), a = env.pop(("context", layer)), env.pop(("a", layer))
            y, kept = stages.combine(env.pop(("done", layer)), context, whole, self.inputs(layer, guests), save)
            env["x", layer + 1] = a + y.reshape(a.shape)
            if save:
                emit["combine", layer] = kept
            if ("last", None) in env:
                env["last", None] = guests
            elif keeping and guests is not None:
                emit["guests", layer] = guests


class _Backward(_Direction):
    """The way back: cotangents, gradients, and the copies once more."""

    def run(self, cotangents, saved):
        """Return (dx, dparams, dsink)."""
        dx, self.dstats, _ = cotangents
        self.alone, stacked, last = saved
        env = {("dx", self.layers): dx}
        if last is not None:
            env["guests", self.layers - 1] = last
        zeros = lambda leaf: cast_varying(jnp.zeros(leaf.shape, leaf.dtype), varying_axes(leaf))  # noqa: E731
        mix, gate = self.params
        env["mix", None], env["gate", None] = jax.tree.map(zeros, mix), jax.tree.map(zeros, gate)
        home, _ = self.sinks()
        full = {n: jnp.zeros((self.layers, *leaf.shape), leaf.dtype) for n, leaf in home.items()}
        env["sink", None] = cast_varying(full, self.door_axes)
        env, _, _ = self.run_loop(self.how.loop(self.how.schedule.backward), env, stacked)
        return env["dx", 0], (env["mix", None], env["gate", None]), env["sink", None]

    def saved(self, name: str, layer: int, kept: dict):
        return kept[name, layer] if (name, layer) in kept else self.alone.get((name, layer))

    def guests(self, layer: int, env: dict, kept: dict):
        """Return the layer's guests, brought again or kept; None where there are none."""
        if self.how.transfer is None:
            return None
        return env["guests", layer] if ("guests", layer) in env else self.saved("guests", layer, kept)

    def write(self, name: str, layer: int, value, env: dict):
        index = self.index(layer)
        env[name, None] = jax.tree.map(lambda total, v: total.at[index].set(v), env[name, None], value)

    def window(self, window: Window, env: dict, emit: dict, kept: dict):
        layer = window.layer
        if window.stage == "recompute":
            self._recompute(layer, env, kept)
            return
        guests = None if window.stage in ("attention", "dispatch") else self.guests(layer, env, kept)
        inputs = self.inputs(layer, guests)
        piece = env.pop((window.stage, layer), None) or self.saved(window.stage, layer, kept)
        pull_back = piece.restore(known_arrays(inputs))
        getattr(self, "_" + window.stage)(window, layer, env, pull_back)
        for move in window.beside if self.how.transfer is not None else ():
            if move.kind == "agg" and move.stop == 1.0:
                del env["dguests", move.layer]
                self.write("sink", move.layer, env.pop(("home", move.layer)), env)

    def _recompute(self, layer: int, env: dict, kept: dict):
        stages, a = self.how.stages, self.after(self.saved("a", layer, kept), env["dx", layer + 1])
        before, inputs = self.inputs(layer, None), self.inputs(layer, self.guests(layer, env, kept))
        ((rows, context, _), (sizes, whole, _)), env["dispatch", layer] = stages.dispatch(a, before, True)
        done, env["experts", layer] = stages.experts(rows, sizes, inputs, True)
        again, env["combine", layer] = stages.combine(done, context, whole[0], inputs, True)
        env["dx", layer + 1] = self.after(env["dx", layer + 1], again)

    def _attention(self, window, layer, env, pull_back):
        (dx, dmix) = self.beside(window, env, env.pop(("da", layer)), pull_back)
        if window.beside:  # the devices' sum of dmix would stand before the moves, and attention's kernels before it
            dx, dmix = fence((dx, dmix))
        dmix = self._unprepare(layer, mix=dmix)
        env["dx", layer] = self.after(dx, dmix)
        self.write("mix", layer, dmix, env)

    def _combine(self, window, layer, env, pull_back):
        dx = env.pop(("dx", layer + 1))
        ddone, dcontext, (dhome, dguests) = pull_back(dx.reshape(-1, dx.shape[-1]))
        env["da", layer], env["ddone", layer], env["dcontext", layer] = dx, ddone, dcontext
        env["home", layer] = dhome
        if dguests is not None:
            env["dguests", layer] = dguests

    def _experts(self, window, layer, env, pull_back):
        before = env.pop(("home", layer)), env.pop(("dguests", layer), None)
        drows, after = self.beside(window, env, env.pop(("ddone", layer)), pull_back)
        home, dguests = jax.tree.map(jnp.add, before, after)
        env["drows", layer] = drows
        env.pop(("guests", layer), None)
        if dguests is None:
            self.write("sink", layer, home, env)
        else:
            env["home", layer], env["dguests", layer] = home, dguests

    def _dispatch(self, window, layer, env, pull_back):
        dstats = split_floats_of(self.dstats, lambda leaf: self.of_layer(leaf, layer))
        da, dgate = pull_back((env.pop(("drows", layer)), env.pop(("dcontext", layer)), dstats))
        dgate = self._unprepare(layer, gate=dgate)
        env["da", layer] = self.after(env["da", layer] + da, dgate)
        self.write("gate", layer, dgate, env)

    def _unprepare(self, layer: int, *, mix=None, gate=None):
        """Return the cotangent of one layer's own (mix or gate) from that of the gathered one."""
        own = self.of_layer(self.params, layer)
        if mix is not None:
            return jax.vjp(lambda p: self.how.prepare(p, own[1])[0], own[0])[1](mix)[0]
        return jax.vjp(lambda p: self.how.prepare(own[0], p)[1], own[1])[1](gate)[0]


def fence(tree):
    """Return the tree; nothing that uses one of its leaves starts before all of them are there. Types are kept."""
    leaves, structure = jax.tree.flatten(tree)
    out = []
    for leaf, held in zip(leaves, lax.optimization_barrier(leaves), strict=True):
        extra = tuple(sorted(varying_axes(held) - varying_axes(leaf)))
        out.append(declare_equal(held, extra))
    return jax.tree.unflatten(structure, out)


def split_floats_of(tree, function):
    """Return the tree with `function` of its floats and None for the rest (their cotangents have no dtype)."""
    return jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else function(leaf), tree)
