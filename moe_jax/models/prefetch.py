"""The layer stack in the order of a block-wise schedule: an interpreter of `moe_jax.overlap` that builds the step.

Inputs: a `BlockSchedule`, the stages of a layer, and how parameters move. Outputs: a function of the whole stack with a
backward of its own (`custom_vjp`), so that the program holds the schedule's windows in the schedule's order in both
directions. Every window with moves is fenced: they start no earlier than its stage, and the next stage waits for both.

Live values are kept in a dictionary under (name, layer). As a scan, its loop carries exactly those that are alive
between two iterations, with layers relative to the iteration; unrolled, layers are absolute. What the backward needs of
each turn leaves the forward loop as its stacked result and enters the backward loop at the same turn. Names: x
[b, Sq, M] enters a layer, a [b, Sq, M] its MoE half; rows, done [R, M]; a leading d marks a cotangent; home is the
gradient of home experts while it is summed.
Source: design after Hecate, section 3.2, and Pro-Prophet, section V-B.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.collectives.ordering import wait_for_tree
from moe_jax.collectives.replicated import declare_equal
from moe_jax.collectives.slices import PARTS
from moe_jax.collectives.sparse_all_gather import Transfer, empty_replicas, fetch_part, return_part
from moe_jax.collectives.transfer_shape import TransferShape
from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.models.stages import LayerInputs, Stages, join_floats, known_arrays, zero_grad_sink
from moe_jax.overlap.blocks import BlockSchedule, Loop, Window


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the stack reads and never differentiates: bank {name: [Rb, ...]}, tables [L, ...], token ids, PRNG key."""

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
      transfer: how parameters move; with None the windows have no moves.
      late: of replicas that come after the gate, inside the stage `dispatch`; None for none.
      prepare: (mix, gate) of one layer -> the same, gathered; differentiated here.
      scan: loop over turns, else write all layers out.
      recompute: save the inputs of the two halves of a layer only.
      noisy: the gate takes a key.
      first_layer: MoE layers before this stack, by which the gates' noise is keyed.
    """

    schedule: BlockSchedule
    stages: Stages
    transfer: Transfer | None
    late: TransferShape | None
    prepare: Any
    scan: bool
    recompute: bool
    noisy: bool
    first_layer: int = 0

    def __call__(self, x, params, grad_sink, constants: Constants):
        """Run the stack.

        Args:
          x: [b, Sq, M].
          params: (mix, gate), leaves [L, ...].
          grad_sink: {name: [L, Hs, ...]}, whose cotangent is the gradient of home experts.
          constants: see `Constants`.

        Returns:
          (x [b, Sq, M], GateStats [L, ...], passes int32 [L]).
        """

        @jax.custom_vjp
        def stack(x, params, grad_sink, constants):
            return _Forward(self, params, grad_sink, constants, save_residuals=False).run(x)[0]

        def forward(x, params, grad_sink, constants):
            out, saved = _Forward(self, params, grad_sink, constants, save_residuals=True).run(x)
            types = {name: leaf[:0] for name, leaf in grad_sink.items()}  # dtype and axes, no bytes
            return out, (params, types, constants, saved)

        def backward(residuals, cotangents):
            params, types, constants, saved = residuals
            dx, dparams, d_grad_sink = _Backward(self, params, types, constants).run(cotangents, saved)
            return dx, dparams, d_grad_sink, None

        stack.defvjp(forward, backward)
        return stack(x, params, grad_sink, constants)

    def loop(self, loop: Loop) -> Loop:
        """Return the loop as it is run: unrolled if asked for, without moves if nothing moves."""
        if not self.scan:
            loop = Loop(loop.windows(self.schedule.layers), (), range(0), ())
        if self.transfer is None:
            bare = lambda windows: tuple(dataclasses.replace(w, beside=()) for w in windows)  # noqa: E731
            loop = Loop(bare(loop.before), bare(loop.body), loop.turns, bare(loop.after))
        return loop


class _Direction:
    """Code of both directions: look-ups by layer, moves, fences, and the loop."""

    def __init__(self, how: Prefetcher, params, grad_sink, constants: Constants):
        self.how, self.params, self.constants = how, params, constants
        self.layers = how.schedule.layers
        self.grad_sink_dtypes = {name: leaf.dtype for name, leaf in grad_sink.items()}
        self.grad_sink_axes = varying_axes(grad_sink)
        self.turn = None

    def after(self, value, *others):
        """Return value; on XLA:CPU it waits for `others`, whose collectives may be in branches."""
        return wait_for_tree(value, self.constants.token_ids[0], others)

    def index(self, layer: int):
        """Return the absolute layer, an int while no loop runs; clipped to the layers that exist."""
        if self.turn is None:
            return min(max(layer, 0), self.layers - 1)
        return jnp.clip(self.turn + layer, 0, self.layers - 1)

    def of_layer(self, tree, layer: int):
        index = self.index(layer)
        if isinstance(index, int):
            return jax.tree.map(lambda leaf: leaf[index], tree)
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), tree)

    def inputs(self, layer: int, replicas) -> LayerInputs:
        mix, gate = self.how.prepare(*self.of_layer(self.params, layer))
        key = None
        if self.how.noisy:
            first = self.how.first_layer
            key = jax.random.fold_in(self.constants.key, first + self.index(layer) if first else self.index(layer))
        return LayerInputs(
            mix=mix,
            gate=gate,
            bank=self.constants.bank,
            replicas=replicas,
            grad_sinks=self.grad_sinks(),
            tables=self.of_layer(self.constants.tables, layer),
            token_ids=self.constants.token_ids,
            noise_key=key,
        )

    def grad_sinks(self):
        """Return the zeros through which gradients of one layer leave, of homes and of replicas."""
        bank, axes = self.constants.bank, self.grad_sink_axes
        slots = self.constants.tables.home_row.shape[-1]
        home = {n: zero_grad_sink({n: v}, slots, self.grad_sink_dtypes[n], axes)[n] for n, v in bank.items()}
        axes, dtypes = varying_axes(bank, self.constants.tables), self.grad_sink_dtypes
        slots = [part.slots for part in (self.how.transfer, self.how.late) if part is not None]
        return home, tuple({n: zero_grad_sink({n: v}, m, dtypes[n], axes)[n] for n, v in bank.items()} for m in slots)

    def moves(self, window: Window, env: dict):
        """Return [((name, layer) of what a move fills, its `ChunkTransfer`)] of the window's moves."""
        found, transfer = [], self.how.transfer
        for move in window.beside:
            tables = self.of_layer(self.constants.tables, move.layer)
            part = round(move.start * PARTS), round(move.stop * PARTS)
            if move.kind == "trans":
                steps = fetch_part(self.constants.bank, tables.home_row, tables.transfer, transfer, part)
                found.append((("held_replicas", move.layer), steps))
            else:
                wires = {name: leaf.dtype for name, leaf in self.constants.bank.items()}
                gradients = env["dheld_replicas", move.layer]
                found.append((("home", move.layer), return_part(gradients, tables.transfer, transfer, part, wires)))
        return found

    def beside(self, window: Window, env: dict, chain, compute):
        """Return compute(chain) with the window's moves in flight; their results go to `env`.

        What a move sends is packed and fenced with what enters the stage: the move cannot start before it, and the
        stage not before everything is packed. With a fence of its table alone the compiler packs Agg after attention,
        and keeps the gradients of experts, and all that they are computed from, in memory until then.
        """
        moves = self.moves(window, env)
        payload = [steps.pack() for _, steps in moves]
        if moves:
            chain, payload = fence((chain, payload))
            payload = self.after(payload, chain)
        (main, *others) = compute(chain)
        arrived = {}
        for (key, steps), one in zip(moves, payload, strict=True):
            into = env.pop(key, None)
            into = empty_replicas(self.constants.bank, self.how.transfer) if into is None else into
            arrived[key] = steps.unpack(steps.communicate(one), into)
        if moves:
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
                self.turn, residuals = inputs
                env, emitted = dict(carry), {}
                for window in loop.body:
                    self.window(window, env, emitted, residuals)
                self.turn = None
                env = {(n, at if at is None else at - step): value for (n, at), value in env.items()}
                assert env.keys() == carry.keys(), (sorted(map(str, env)), sorted(map(str, carry)))
                return env, emitted

            turns = jnp.asarray(list(loop.turns), jnp.int32)
            flipped = step < 0 and saved is not None
            if flipped:  # the other direction stacked its results in the reverse order of turns
                turns = turns[::-1]
            carry, stacked = lax.scan(body, carry, (turns, saved), reverse=flipped)
            end = loop.turns[-1] + step
            env = {(n, at if at is None else at + end): value for (n, at), value in carry.items()}
        for window in loop.after:
            self.window(window, env, alone, {})
        return env, alone, stacked


class _Forward(_Direction):
    """The forward direction."""

    def __init__(self, how, params, grad_sink, constants, *, save_residuals: bool):
        super().__init__(how, params, grad_sink, constants)
        self.save_residuals = save_residuals

    def run(self, x):
        """Return ((x, stats [L, ...], passes [L]), saved)."""
        how, env = self.how, {("x", 0): x}
        last = how.transfer is not None and self.save_residuals and how.schedule.refetch_replicas
        if last:  # the last layer's replicas are needed again at once
            bank = self.constants.bank
            env["last", None] = {name: leaf.astype(bank[name].dtype) for name, leaf in self.grad_sinks()[1][0].items()}
        loop = how.loop(how.schedule.forward)
        env, alone, stacked = self.run_loop(loop, env)
        outputs = [{k: v for k, v in part.items() if k[0] in ("stats", "passes")} for part in (alone, stacked)]
        stats, passes = (self._by_layer(loop, name, *outputs) for name in ("stats", "passes"))
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
        layer, stages, save_residuals = window.layer, self.how.stages, self.save_residuals
        save = save_residuals and not self.how.recompute
        if window.stage == "attention":
            inputs = self.inputs(layer, ())
            x = env.pop(("x", layer))
            a, residuals = self.beside(window, env, x, lambda x: stages.attention(x, inputs, save_residuals))
            env["a", layer] = a
            if save_residuals:
                emit["attention", layer] = residuals
        elif window.stage == "dispatch":
            a = env["a", layer]
            ((rows, context, stats, _), (sizes, whole, passes, late)), residuals = stages.dispatch(
                a, self.inputs(layer, ()), save
            )
            rows = self.after(rows, stats)
            env["late", layer] = late
            env.update({("rows", layer): rows, ("sizes", layer): sizes, ("context", layer): (context, whole[0])})
            emit["stats", layer], emit["passes", layer] = join_floats(stats, whole[1]), passes
            if save:
                emit["dispatch", layer] = residuals
            elif save_residuals:
                emit["a", layer] = a
        elif window.stage == "experts":
            sizes = env.pop(("sizes", layer))
            inputs = self.inputs(layer, self.replicas(layer, env))
            rows = env.pop(("rows", layer))
            done, residuals = self.beside(window, env, rows, lambda rows: stages.experts(rows, sizes, inputs, save))
            env["done", layer] = done
            if save:
                emit["experts", layer] = residuals
        else:
            inputs = self.inputs(layer, self.replicas(layer, env))
            replicas, late = env.pop(("held_replicas", layer), None), env.pop(("late", layer))
            (context, whole), a = env.pop(("context", layer)), env.pop(("a", layer))
            y, residuals = stages.combine(env.pop(("done", layer)), context, whole, inputs, save)
            env["x", layer + 1] = a + y.reshape(a.shape)
            if save:
                emit["combine", layer] = residuals
            if save and late:
                emit["late", layer] = late
            if ("last", None) in env:
                env["last", None] = replicas
            elif save_residuals and replicas is not None:
                emit["held_replicas", layer] = replicas

    def replicas(self, layer: int, env: dict) -> tuple:
        """Return the layer's replicas, those planned ahead before those that came after the gate."""
        ahead = () if self.how.transfer is None else (env["held_replicas", layer],)
        return (*ahead, *env["late", layer])


class _Backward(_Direction):
    """The backward direction: cotangents, gradients, and the replicas fetched a second time."""

    def run(self, cotangents, saved):
        """Return (dx, dparams, d_grad_sink)."""
        dx, self.dstats, _ = cotangents
        self.alone, stacked, last = saved
        env = {("dx", self.layers): dx}
        if last is not None:
            env["held_replicas", self.layers - 1] = last
        zeros = lambda leaf: cast_varying(jnp.zeros(leaf.shape, leaf.dtype), varying_axes(leaf))  # noqa: E731
        mix, gate = self.params
        env["mix", None], env["gate", None] = jax.tree.map(zeros, mix), jax.tree.map(zeros, gate)
        home, _ = self.grad_sinks()
        full = {n: jnp.zeros((self.layers, *leaf.shape), leaf.dtype) for n, leaf in home.items()}
        env["sums", None] = cast_varying(full, self.grad_sink_axes)
        env, _, _ = self.run_loop(self.how.loop(self.how.schedule.backward), env, stacked)
        return env["dx", 0], (env["mix", None], env["gate", None]), env["sums", None]

    def saved(self, name: str, layer: int, residuals: dict):
        return residuals[name, layer] if (name, layer) in residuals else self.alone.get((name, layer))

    def replicas(self, layer: int, env: dict, residuals: dict):
        """Return the layer's replicas, each fetched again or saved: those planned ahead before those that came late."""
        found = []
        for name, there in (("held_replicas", self.how.transfer), ("late", self.how.late)):
            if there is not None:
                value = env[name, layer] if (name, layer) in env else self.saved(name, layer, residuals)
                found += value if name == "late" else [value]
        return tuple(found)

    def write(self, name: str, layer: int, value, env: dict):
        index = self.index(layer)
        env[name, None] = jax.tree.map(lambda total, v: total.at[index].set(v), env[name, None], value)

    def window(self, window: Window, env: dict, emit: dict, residuals: dict):
        layer = window.layer
        if window.stage == "recompute":
            self._recompute(layer, env, residuals)
            return
        replicas = () if window.stage in ("attention", "dispatch") else self.replicas(layer, env, residuals)
        inputs = self.inputs(layer, replicas)
        residuals_of_stage = env.pop((window.stage, layer), None) or self.saved(window.stage, layer, residuals)
        pull_back = residuals_of_stage.restore(known_arrays(inputs))
        getattr(self, "_" + window.stage)(window, layer, env, pull_back)
        for move in window.beside if self.how.transfer is not None else ():
            if move.kind == "agg" and move.stop == 1.0:
                del env["dheld_replicas", move.layer]
                self.write("sums", move.layer, env.pop(("home", move.layer)), env)

    def _recompute(self, layer: int, env: dict, residuals: dict):
        stages, a = self.how.stages, self.after(self.saved("a", layer, residuals), env["dx", layer + 1])
        before = self.inputs(layer, ())
        ((rows, context, _, _), (sizes, whole, _, late)), env["dispatch", layer] = stages.dispatch(a, before, True)
        if late:
            env["late", layer] = late
        inputs = self.inputs(layer, self.replicas(layer, env, residuals))
        done, env["experts", layer] = stages.experts(rows, sizes, inputs, True)
        again, env["combine", layer] = stages.combine(done, context, whole[0], inputs, True)
        env["dx", layer + 1] = self.after(env["dx", layer + 1], again)

    def _attention(self, window, layer, env, pull_back):
        (dx, dmix) = self.beside(window, env, env.pop(("da", layer)), pull_back)
        if window.beside:  # else the sum of dmix over devices, and so all of attention, would run before the moves
            dx, dmix = fence((dx, dmix))
        dmix = self._unprepare(layer, mix=dmix)
        env["dx", layer] = self.after(dx, dmix)
        self.write("mix", layer, dmix, env)

    def _combine(self, window, layer, env, pull_back):
        dx = env.pop(("dx", layer + 1))
        ddone, dcontext, (env["home", layer], env["dreplicas", layer]) = pull_back(dx.reshape(-1, dx.shape[-1]))
        env["da", layer], env["ddone", layer], env["dcontext", layer] = dx, ddone, dcontext

    def _experts(self, window, layer, env, pull_back):
        before = env.pop(("home", layer)), env.pop(("dreplicas", layer))
        drows, after = self.beside(window, env, env.pop(("ddone", layer)), pull_back)
        env["home", layer], dreplicas = jax.tree.map(jnp.add, before, after)
        env["drows", layer] = drows
        env.pop(("held_replicas", layer), None)
        env.pop(("late", layer), None)
        if self.how.transfer is not None:
            env["dheld_replicas", layer] = dreplicas[0]
        if self.how.late is not None:
            env["dlate", layer] = dreplicas[-1:]
        elif self.how.transfer is None:
            self.write("sums", layer, env.pop(("home", layer)), env)

    def _dispatch(self, window, layer, env, pull_back):
        dstats = split_floats_of(self.dstats, lambda leaf: self.of_layer(leaf, layer))
        cotangents = env.pop(("drows", layer)), env.pop(("dcontext", layer)), dstats, env.pop(("dlate", layer), ())
        da, dgate, dhome = pull_back(cotangents)
        if self.how.late is not None:  # what the replicas that came late add
            home = jax.tree.map(jnp.add, env.pop(("home", layer)), dhome)
            if self.how.transfer is None:
                self.write("sums", layer, home, env)
            else:
                env["home", layer] = home
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
    """Return the tree; nothing that uses one of its leaves starts before all of them are computed. Types are kept."""
    leaves, structure = jax.tree.flatten(tree)
    out = []
    for leaf, held in zip(leaves, lax.optimization_barrier(leaves), strict=True):
        extra = tuple(sorted(varying_axes(held) - varying_axes(leaf)))
        out.append(declare_equal(held, extra))
    return jax.tree.unflatten(structure, out)


def split_floats_of(tree, function):
    """Return the tree with `function` of its floats and None for the rest (their cotangents have no dtype)."""
    return jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else function(leaf), tree)
