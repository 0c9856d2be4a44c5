"""The layer stack in the order of a block-wise schedule: an interpreter of `moe_jax.overlap` that builds the step.

Inputs: a `BlockSchedule`, the stages of a layer, and how parameters move. Outputs: a function of the whole stack with a
backward of its own (`custom_vjp`), so that the program holds the schedule's windows in the schedule's order in both
directions. Every window with moves is fenced: they start no earlier than its stage, and the next stage waits for both.

Live values are kept in a dictionary under (name, layer, half), half None where it is of the whole batch. As a scan, its
loop carries exactly those that are alive between two iterations, with layers relative to the iteration; unrolled,
layers are absolute. What the backward needs of each turn leaves the forward loop as its stacked result and enters the
backward loop at the same turn. Names: x [b, Sq, M] enters a layer, a [b, Sq, M] its MoE half; rows [R, M] are packed,
then received, computed (done) and returned; a leading d marks a cotangent; home is the gradient of home experts while
it is summed.

Where a schedule has two halves, x is cut along its first dim, and all of a layer's stages run once for each half. An
exchange of one half and what the other computes beside it start together, when what both read is there. Gradients of
parameters are summed over the halves before they are summed over devices.
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
from moe_jax.routers import join_statistics

STEPS = {  # the stages of windows that have several of them, in the order of the forward
    "dispatch": ("route", "send"),
    "combine": ("send_back", "unpack"),
    "recompute": ("route_again", "send_again", "experts_again", "send_back_again", "unpack_again"),
}
MATRIX = 1 << 16  # values from which a gradient takes time worth hiding
AFTER = {"send": "experts", "experts": "send_back", "send_back": "unpack"}  # which stage reads a stage's rows
READ = {  # what a stage takes out of the live values: (name, of the next layer)
    "forward": {
        "attention": ("x", 0), "route": ("a", 0), "send": ("packed", 0), "experts": ("received", 0),
        "send_back": ("done", 0), "unpack": ("returned", 0),
    },
    "backward": {
        "route_again": ("a", 0), "send_again": ("packed", 0), "experts_again": ("received", 0),
        "send_back_again": ("done", 0), "unpack_again": ("returned", 0), "unpack": ("dx", 1),
        "send_back": ("dreturned", 0), "experts": ("ddone", 0), "send": ("dreceived", 0), "route": ("dpacked", 0),
        "attention": ("da", 0),
    },
}  # fmt: skip


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
      late: of replicas that come after the gate, inside the stage `route`; None for none.
      prepare: (mix, gate) of one layer -> the same, gathered; differentiated here.
      scan: loop over turns, else write all layers out.
      recompute: save the inputs of the two halves of a layer only.
      noisy: the gate takes a key.
      first_layer: MoE layers before this stack, by which the gates' noise is keyed.

    Where the schedule has halves, the stages are those of half as many tokens.
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
          x: [b, Sq, M], or [t / N_MP, M] with the tokens of the first half before those of the second.
          params: (mix, gate), leaves [L, ...].
          grad_sink: {name: [L, Hs, ...]}, whose cotangent is the gradient of home experts.
          constants: see `Constants`.

        Returns:
          (x [b, Sq, M], GateStats [L, ...], passes int32 [L], the most of both halves).
        """
        halves = tuple(jnp.split(x, 2)) if self.schedule.halves else (x,)
        if self.scan and self.schedule.halves:  # one sum over devices after the loop, not one in each of its turns
            params = cast_varying(params, varying_axes(constants.token_ids))
        out, stats, passes = self._stack()(halves, params, grad_sink, constants)
        if not self.schedule.halves:
            return out[0], stats[0], passes[0]
        return jnp.concatenate(out), join_statistics(*stats), jnp.maximum(*passes)

    def _stack(self):
        """Return stack(halves of x, params, grad_sink, constants) -> (halves of x, of GateStats, of passes)."""

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
        return stack

    @property
    def halves(self) -> tuple[int | None, ...]:
        """The halves that windows name."""
        return (0, 1) if self.schedule.halves else (None,)

    def loop(self, loop: Loop) -> Loop:
        """Return the loop as it is run: unrolled if asked for, without moves if nothing moves."""
        if not self.scan:
            loop = Loop(loop.windows(self.schedule.layers), (), range(0), ())
        if self.transfer is None:
            loop = Loop(_bare(loop.before), _bare(loop.body), loop.turns, _bare(loop.after))
        return loop


def _bare(windows: tuple[Window, ...]) -> tuple[Window, ...]:
    """Return the windows without moves."""
    return tuple(dataclasses.replace(window, beside=(), others=_bare(window.others)) for window in windows)


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

    def prepare(self, mix, gate):
        """Return one layer's parameters as its stages take them.

        Where two halves use them they vary over the data-parallel devices, so that their gradients are added before
        they are summed over devices.
        """
        prepared = self.how.prepare(mix, gate)
        if not self.how.schedule.halves:
            return prepared
        return cast_varying(prepared, varying_axes(self.constants.token_ids))

    def inputs(self, layer: int, half: int | None, replicas) -> LayerInputs:
        mix, gate = self.prepare(*self.of_layer(self.params, layer))
        key, token_ids = None, self.constants.token_ids
        if self.how.noisy:
            first = self.how.first_layer
            key = jax.random.fold_in(self.constants.key, first + self.index(layer) if first else self.index(layer))
        if half is not None:
            token_ids = jnp.split(token_ids, 2)[half]
        return LayerInputs(
            mix=mix,
            gate=gate,
            bank=self.constants.bank,
            replicas=replicas,
            grad_sinks=self.grad_sinks(),
            tables=self.of_layer(self.constants.tables, layer),
            token_ids=token_ids,
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
        """Return [(key of what a move fills, its `ChunkTransfer`)] of the window's moves."""
        found, transfer = [], self.how.transfer
        for move in window.beside:
            tables = self.of_layer(self.constants.tables, move.layer)
            part = round(move.start * PARTS), round(move.stop * PARTS)
            if move.kind == "trans":
                steps = fetch_part(self.constants.bank, tables.home_row, tables.transfer, transfer, part)
                found.append((("held_replicas", move.layer, None), steps))
            else:
                wires = {name: leaf.dtype for name, leaf in self.constants.bank.items()}
                gradients = env["dheld_replicas", move.layer, None]
                found.append(
                    (("home", move.layer, None), return_part(gradients, tables.transfer, transfer, part, wires))
                )
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

    def pair(self, window: Window, env: dict, emit: dict, residuals: dict):
        """Run a window and its `others`: neither starts before what both read is there."""
        if window.others:
            keys = [self.read_by(one, env, residuals) for one in (window, window.others[0])]
            first, second = self.start(env, tuple(env[key] for key in keys))
            env.update(zip(keys, (self.after(first, second), self.after(second, first)), strict=True))
        for one in (window, *window.others):
            for step in self.steps(one):
                self.step(step, one, env, emit, residuals)

    def start(self, env: dict, chains: tuple) -> tuple:
        """Return what a pair of windows reads; no part of it is used before all of it is there."""
        return fence(chains)

    def read_by(self, window: Window, env: dict, residuals: dict) -> tuple:
        """Return the key of what a window reads first."""
        name, ahead = READ[self.direction][next(iter(self.steps(window)))]
        return name, window.layer + ahead, window.half

    def steps(self, window: Window):
        """Return the stages of a window in the order of the program."""
        return STEPS.get(window.stage, (window.stage,))

    def run_loop(self, loop: Loop, env: dict, saved=None):
        """Run all windows; returns (env, emitted before and after {key: value}, emitted by the body, stacked).

        Args:
          saved: what the other direction's loop emitted, stacked, for the same turns.
        """
        alone: dict = {}
        for window in loop.before:
            self.pair(window, env, alone, {})
        stacked = {}
        if len(loop.turns):
            step = loop.turns.step
            carry = _moved(env, -loop.turns[0])

            def body(carry, inputs):
                self.turn, residuals = inputs
                env, emitted = dict(carry), {}
                for window in loop.body:
                    self.pair(window, env, emitted, residuals)
                self.turn = None
                env = _moved(env, -step)
                assert env.keys() == carry.keys(), (sorted(map(str, env)), sorted(map(str, carry)))
                return env, emitted

            turns = jnp.asarray(list(loop.turns), jnp.int32)
            flipped = step < 0 and saved is not None
            if flipped:  # the other direction stacked its results in the reverse order of turns
                turns = turns[::-1]
            carry, stacked = lax.scan(body, carry, (turns, saved), reverse=flipped)
            env = _moved(carry, loop.turns[-1] + step)
        for window in loop.after:
            self.pair(window, env, alone, {})
        return env, alone, stacked


def _moved(env: dict, by: int) -> dict:
    """Return live values with layers counted from elsewhere; those of no layer as they are."""
    return {(name, at if at is None else at + by, half): value for (name, at, half), value in env.items()}


class _Forward(_Direction):
    """The forward direction."""

    direction = "forward"

    def __init__(self, how, params, grad_sink, constants, *, save_residuals: bool):
        super().__init__(how, params, grad_sink, constants)
        self.save_residuals = save_residuals

    def run(self, x: tuple):
        """Return ((x, stats [L, ...], passes [L]), saved), a tuple by half of each of the three."""
        how = self.how
        env = {("x", 0, half): part for half, part in zip(how.halves, x, strict=True)}
        last = how.transfer is not None and self.save_residuals and how.schedule.refetch_replicas
        if last:  # the last layer's replicas are needed again at once
            bank = self.constants.bank
            like = self.grad_sinks()[1][0]
            env["last", None, None] = {name: leaf.astype(bank[name].dtype) for name, leaf in like.items()}
        loop = how.loop(how.schedule.forward)
        env, alone, stacked = self.run_loop(loop, env)
        outputs = [{k: v for k, v in part.items() if k[0] in ("stats", "passes")} for part in (alone, stacked)]
        found = [[self._by_layer(loop, name, half, *outputs) for half in how.halves] for name in ("stats", "passes")]
        saved = [{k: v for k, v in part.items() if k[0] not in ("stats", "passes")} for part in (alone, stacked)]
        out = tuple(env["x", self.layers, half] for half in how.halves)
        return (out, *map(tuple, found)), (*saved, env.get(("last", None, None)))

    def _by_layer(self, loop: Loop, name: str, half: int | None, alone: dict, stacked: dict):
        pieces = {at: jax.tree.map(lambda v: v[None], v) for (n, at, h), v in alone.items() if (n, h) == (name, half)}
        for (n, offset, h), value in stacked.items():
            if (n, h) == (name, half):
                pieces[loop.turns[0] + offset] = value
        ordered = [pieces[layer] for layer in sorted(pieces)]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered)

    def step(self, stage: str, window: Window, env: dict, emit: dict, _):
        at, stages = (window.layer, window.half), self.how.stages
        save = self.save_residuals and (stage == "attention" or not self.how.recompute)
        inputs = self.inputs(*at, self.replicas(*at, env) if stage in ("experts", "unpack") else ())
        value = env[("a", *at)] if stage == "route" else env.pop(self.key_of(stage, at))
        if stage == "attention":
            env["a", *at], residuals = self.beside(window, env, value, lambda x: stages.attention(x, inputs, save))
        elif stage == "route":
            (found, (env["metadata", *at], whole, passes, env["late", *at])), residuals = stages.route(
                value, inputs, save
            )
            rows, context, stats, _ = found
            env["packed", *at], env["context", *at] = self.after(rows, stats), (context, whole[0])
            emit["stats", *at], emit["passes", *at] = join_floats(stats, whole[1]), passes
        elif stage == "unpack":
            residuals = self._unpack(window, env, emit, value, inputs, save)
        else:
            metadata, run = env["metadata", *at], getattr(stages, stage)
            key = READ["forward"][AFTER[stage]][0], *at
            env[key], residuals = self.beside(window, env, value, lambda rows: run(rows, metadata, inputs, save))
        if save:
            emit[stage, *at] = residuals

    @staticmethod
    def key_of(stage: str, at: tuple) -> tuple:
        """Return the key of what a stage reads."""
        return READ["forward"][stage][0], *at

    def _unpack(self, window: Window, env: dict, emit: dict, returned, inputs: LayerInputs, save: bool):
        at = window.layer, window.half
        late, metadata = env.pop(("late", *at)), env.pop(("metadata", *at))
        (context, whole), a = env.pop(("context", *at)), env.pop(("a", *at))
        y, residuals = self.how.stages.unpack(returned, metadata, context, whole, inputs, save)
        env["x", window.layer + 1, window.half] = a + y.reshape(a.shape)
        if save and late:
            emit["late", *at] = late
        elif self.save_residuals and not save:
            emit["a", *at] = a
        if window.half in (None, 1):  # the last to read this layer's replicas
            replicas = env.pop(("held_replicas", window.layer, None), None)
            if ("last", None, None) in env:
                env["last", None, None] = replicas
            elif self.save_residuals and replicas is not None:
                emit["held_replicas", window.layer, None] = replicas
        return residuals

    def replicas(self, layer: int, half: int | None, env: dict) -> tuple:
        """Return the layer's replicas, those planned ahead before those that came after the gate."""
        ahead = () if self.how.transfer is None else (env["held_replicas", layer, None],)
        return (*ahead, *env["late", layer, half])


class _Backward(_Direction):
    """The backward direction: cotangents, gradients, and the replicas fetched a second time."""

    direction = "backward"

    def run(self, cotangents, saved):
        """Return (halves of dx, dparams, d_grad_sink)."""
        dx, self.dstats, _ = cotangents
        self.alone, stacked, last = saved
        self.held: list[tuple] = []  # gradients that are not written yet, as `write` takes them
        env = {("dx", self.layers, half): part for half, part in zip(self.how.halves, dx, strict=True)}
        if last is not None:
            env["held_replicas", self.layers - 1, None] = last
        zeros = lambda leaf: cast_varying(jnp.zeros(leaf.shape, leaf.dtype), varying_axes(leaf))  # noqa: E731
        mix, gate = self.params
        home, _ = self.grad_sinks()
        full = {n: jnp.zeros((self.layers, *leaf.shape), leaf.dtype) for n, leaf in home.items()}
        full = {
            "mix": jax.tree.map(zeros, mix),
            "gate": jax.tree.map(zeros, gate),
            "sums": cast_varying(full, self.grad_sink_axes),
        }
        env.update({(name, None, None): value if self.how.scan else {} for name, value in full.items()})
        env, _, _ = self.run_loop(self.how.loop(self.how.schedule.backward), env, stacked)
        self._write_held(env)
        dx = tuple(env["dx", 0, half] for half in self.how.halves)
        mix, gate, sums = (self._of_all_layers(env[name, None, None], like) for name, like in full.items())
        return dx, (mix, gate), sums

    def _of_all_layers(self, written, like):
        """Return gradients [L, ...]: of a loop as they are, of layers that are written out put together once."""
        if self.how.scan:
            return written
        values = (written[layer] for layer in range(self.layers))
        return jax.tree.map(lambda leaf, *own: jnp.stack(own).astype(leaf.dtype), like, *values)

    def saved(self, name: str, layer: int, half: int | None, residuals: dict):
        key = name, layer, half
        return residuals[key] if key in residuals else self.alone.get(key)

    def replicas(self, layer: int, half: int | None, env: dict, residuals: dict):
        """Return the layer's replicas, each fetched again or saved: those planned ahead before those that came late."""
        found = []
        if self.how.transfer is not None:
            key = "held_replicas", layer, None
            found.append(env[key] if key in env else self.saved(*key, residuals))
        if self.how.late is not None:
            key = "late", layer, half
            found += env[key] if key in env else self.saved(*key, residuals)
        return tuple(found)

    def start(self, env: dict, chains: tuple) -> tuple:
        """Fence what the windows read; where layers are written out, with all gradients of parameters so far.

        Nothing reads those before the end of the step, and the compiler would compute most of them beside the last
        exchanges, and nothing beside the first. Small ones are left to it: fenced, each is a kernel of its own.
        """
        if self.how.scan:  # each turn of a loop computes its own
            return fence(chains)
        keys = [key for key in env if key[0] in ("home", "dmix", "dgate")]
        leaves, tree = jax.tree.flatten(([value for *_, value in self.held], [env[key] for key in keys]))
        large = [place for place, leaf in enumerate(leaves) if leaf.size >= MATRIX]
        chains, fenced = fence((chains, [leaves[place] for place in large]))
        for place, leaf in zip(large, fenced, strict=True):
            leaves[place] = leaf
        held, sums = jax.tree.unflatten(tree, leaves)
        env.update(zip(keys, sums, strict=True))
        self.held = [(name, layer, value) for (name, layer, _), value in zip(self.held, held, strict=True)]
        return self.after(chains, self._write_held(env))

    def _write_held(self, env: dict) -> list:
        """Write what is held, and return it as it was written."""
        held, self.held = self.held, []
        return [self._write(*one, env) for one in held]

    def write(self, name: str, layer: int, value, env: dict):
        """Put a layer's gradient at its place among those of all layers; written out, when the next pair starts.

        Returns:
          what was written, or () where it is held.
        """
        if self.how.schedule.halves and not self.how.scan:
            self.held.append((name, layer, value))
            return ()
        return self._write(name, layer, value, env)

    def _write(self, name: str, layer: int, value, env: dict):
        """Write a gradient: of `mix` and `gate`, cotangents of what `prepare` returned, the layer's own."""
        if name in ("mix", "gate"):
            value = self._unprepare(layer, **{name: value})
        index, total = self.index(layer), env[name, None, None]
        if self.how.scan:
            env[name, None, None] = jax.tree.map(lambda all, own: all.at[index].set(own), total, value)
        else:
            total[index] = value
        return value

    def steps(self, window: Window):
        steps = super().steps(window)
        return steps if window.stage == "recompute" else tuple(reversed(steps))

    def read_by(self, window: Window, env: dict, residuals: dict) -> tuple:
        key = super().read_by(window, env, residuals)
        if key[0] == "a":  # what is computed again starts from what was saved
            env[key] = self.saved(*key, residuals)
        return key

    def step(self, stage: str, window: Window, env: dict, emit: dict, residuals: dict):
        at = window.layer, window.half
        if stage.endswith("_again"):
            self._again(stage.removesuffix("_again"), at, env, residuals)
            return
        inputs = self.inputs(*at, self.replicas(*at, env, residuals) if stage in ("experts", "unpack") else ())
        residuals_of_stage = env.pop((stage, *at), None) or self.saved(stage, *at, residuals)
        pull_back = residuals_of_stage.restore(known_arrays(inputs))
        getattr(self, "_" + stage)(window, env, pull_back)
        for move in window.beside if self.how.transfer is not None and stage in ("attention", "experts") else ():
            if move.kind == "agg" and move.stop == 1.0:
                del env["dheld_replicas", move.layer, None]
                self.write("sums", move.layer, env.pop(("home", move.layer, None)), env)

    def _again(self, stage: str, at: tuple, env: dict, residuals: dict):
        """Run a stage of the forward again, and keep what its backward needs."""
        stages, cotangent = self.how.stages, ("dx", at[0] + 1, at[1])
        if stage == "route":
            a = env.pop(("a", *at), None)
            a = self.after(self.saved("a", *at, residuals) if a is None else a, env[cotangent])
            if at[1] is not None:
                a, env[cotangent] = fence((a, env[cotangent]))
            (found, (env["metadata", *at], whole, _, late)), env["route", *at] = stages.route(
                a, self.inputs(*at, ()), True
            )
            env["packed", *at], env["context", *at] = found[0], (found[1], whole[0])
            if late:
                env["late", *at] = late
            return
        inputs = self.inputs(*at, self.replicas(*at, env, residuals) if stage in ("experts", "unpack") else ())
        value = env.pop((READ["forward"][stage][0], *at))
        if stage == "unpack":
            (context, whole), metadata = env.pop(("context", *at)), env.pop(("metadata", *at))
            again, env["unpack", *at] = stages.unpack(value, metadata, context, whole, inputs, True)
            env[cotangent] = self.after(env[cotangent], again)
            return
        key = READ["forward"][AFTER[stage]][0], *at
        env[key], env[stage, *at] = getattr(stages, stage)(value, env["metadata", *at], inputs, True)

    def _attention(self, window, env, pull_back):
        at = window.layer, window.half
        (dx, dmix) = self.beside(window, env, env.pop(("da", *at)), pull_back)
        if window.beside:  # else the sum of dmix over devices, and so all of attention, would run before the moves
            dx, dmix = fence((dx, dmix))
        self._add(env, ("dmix", window.layer, None), dmix)
        if self._is_last(window):
            dx = self.after(dx, self.write("mix", window.layer, env.pop(("dmix", window.layer, None)), env))
        env["dx", *at] = dx

    def _unpack(self, window, env, pull_back):
        at = window.layer, window.half
        dx = env.pop(("dx", window.layer + 1, window.half))
        env["dreturned", *at], dcontext, (dhome, env["dreplicas", *at]) = pull_back(dx.reshape(-1, dx.shape[-1]))
        self._add(env, ("home", window.layer, None), dhome)
        env["da", *at], env["dcontext", *at] = dx, dcontext

    def _send_back(self, window, env, pull_back):
        at = window.layer, window.half
        (env["ddone", *at],) = pull_back(env.pop(("dreturned", *at)))

    def _send(self, window, env, pull_back):
        at = window.layer, window.half
        (env["dpacked", *at],) = pull_back(env.pop(("dreceived", *at)))

    def _experts(self, window, env, pull_back):
        at, how = (window.layer, window.half), self.how
        dreceived, (dhome, after) = self.beside(window, env, env.pop(("ddone", *at)), pull_back)
        self._add(env, ("home", window.layer, None), dhome)
        dreplicas = jax.tree.map(jnp.add, env.pop(("dreplicas", *at)), after)
        env["dreceived", *at] = dreceived
        env.pop(("late", *at), None)
        if how.transfer is not None:
            self._add(env, ("dheld_replicas", window.layer, None), dreplicas[0])
        if how.late is not None:
            env["dlate", *at] = dreplicas[-1:]
        if self._is_last(window):
            env.pop(("held_replicas", window.layer, None), None)
            if how.transfer is None and how.late is None:
                self.write("sums", window.layer, env.pop(("home", window.layer, None)), env)

    def _route(self, window, env, pull_back):
        at, layer = (window.layer, window.half), window.layer
        dstats = self.dstats[window.half or 0]
        dstats = split_floats_of(dstats, lambda leaf: self.of_layer(leaf, layer))
        cotangents = env.pop(("dpacked", *at)), env.pop(("dcontext", *at)), dstats, env.pop(("dlate", *at), ())
        da, dgate, dhome = pull_back(cotangents)
        if self.how.late is not None:  # what the replicas that came late add
            self._add(env, ("home", layer, None), dhome)
            if self.how.transfer is None and self._is_last(window):
                self.write("sums", layer, env.pop(("home", layer, None)), env)
        da = env["da", *at] + da
        self._add(env, ("dgate", layer, None), dgate)
        if self._is_last(window):
            da = self.after(da, self.write("gate", layer, env.pop(("dgate", layer, None)), env))
        env["da", *at] = da

    @staticmethod
    def _add(env: dict, key: tuple, value):
        """Add a value to a sum that may not have begun."""
        env[key] = jax.tree.map(jnp.add, env[key], value) if key in env else value

    @staticmethod
    def _is_last(window: Window) -> bool:
        """Whether no other half of this layer follows in the backward."""
        return window.half in (None, 0)

    def _unprepare(self, layer: int, *, mix=None, gate=None):
        """Return the cotangent of one layer's own (mix or gate) from that of the gathered one."""
        own = self.of_layer(self.params, layer)
        if mix is not None:
            return jax.vjp(lambda p: self.prepare(p, own[1])[0], own[0])[1](mix)[0]
        return jax.vjp(lambda p: self.prepare(own[0], p)[1], own[1])[1](gate)[0]


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
