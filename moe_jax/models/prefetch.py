"""The layer stack in the order of a block-wise schedule: an interpreter of planning/block_schedule.py.

Inputs: `Stages`. Outputs: a function of the whole stack with a backward of its own (`custom_vjp`), so that the program
has the schedule's order in both directions.
Source: design after Hecate, section 3.2, and Pro-Prophet, section V-B.
"""

# Where a schedule has two halves, x comes as two, and all of a layer's stages run once for each. Live values are kept
# in a dictionary under (name, layer, half), half None where it is of the whole batch. As a scan, its loop carries
# exactly those that are alive between two iterations, with layers relative to the iteration; unrolled, layers are
# absolute. Names: x [b, Sq, M] enters a layer, a [b, Sq, M] its MoE half; rows [R, M] are packed, then received,
# computed (done) and returned; a leading d marks a cotangent; home is the gradient of home experts while it is summed.

# Every window with moves is fenced: they start no earlier than its stage, and the next stage waits for both. An
# exchange of one half and what the other computes in parallel start together, when what both read is there.

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.models.residuals import Residuals, residuals_of
from moe_jax.models.stages import Constants, LayerInputs, Stages, join_floats
from moe_jax.parallel.ordering import wait_for_tree
from moe_jax.parallel.sparse_all_gather import PARTS, empty_replicas, fetch, return_part
from moe_jax.parallel.varying import cast_varying, declare_equal, varying_axes
from moe_jax.planning.block_schedule import Loop, Move, Window

STAGES = {  # of a layer: what each reads of the live values, and what it makes
    "attention": ("x", "a"), "route": ("a", "packed"), "send": ("packed", "received"),
    "experts": ("received", "done"), "send_back": ("done", "returned"), "unpack": ("returned", "x"),
}  # fmt: skip
STEPS = {  # the stages of windows that have several of them, in the order of the forward
    "dispatch": ("route", "send"),
    "combine": ("send_back", "unpack"),
    "recompute": ("route_again", "send_again", "experts_again", "send_back_again", "unpack_again"),
}


def run_stack(how: Stages, x, units, grad_sink, constants: Constants):
    """Run a stack of layers.

    Args:
      x: a tuple of [b, Sq, M] or [t / N_MP, M], of all sequences or of either half.
      units: parameters of the units, leaves [L, ...].
      grad_sink: {name: [L, Hs, ...]}, whose cotangent is the gradient of home experts.

    Returns:
      (x as it came, (GateStats [L, ...], passes int32 [L], the most of both halves)).
    """

    @jax.custom_vjp
    def stack(x, params, grad_sink, constants):
        return Forward(how, params, grad_sink, constants, save_residuals=False).run(x)[0]

    def forward(x, params, grad_sink, constants):
        out, saved = Forward(how, params, grad_sink, constants, save_residuals=True).run(x)
        types = {name: leaf[:0] for name, leaf in grad_sink.items()}  # dtype and axes, no bytes
        return out, (params, types, constants, saved)

    def backward(residuals, cotangents):
        params, types, constants, saved = residuals
        dx, dparams, d_grad_sink = Backward(how, params, types, constants).run(cotangents, saved)
        return dx, dparams, d_grad_sink, None

    stack.defvjp(forward, backward)
    halves, params = how.block_schedule.halves, of_moe(units)
    # as rows vary: a cast inside a stage would be saved for its backward
    constants = dataclasses.replace(constants, bank=cast_varying(constants.bank, how.roles.all))
    if how.segment.config.stack == "scan" and halves:  # one sum over devices after the loop, not one in each turn
        params = cast_varying(params, varying_axes(constants.token_ids))
    x, stats, passes = stack(x, params, grad_sink, constants)
    if not halves:
        return x, (stats[0], passes[0])
    choices = [half.choices for half in stats]  # the first half's tokens come first
    sums = jax.tree.map(jnp.add, *(dataclasses.replace(half, choices=None) for half in stats))
    if choices[0] is not None:
        sums = dataclasses.replace(sums, choices=jnp.concatenate(choices, axis=1))
    return x, (sums, jnp.maximum(*passes))


def of_moe(units: dict) -> tuple[dict, dict]:
    """Return a unit's leaves by name: (of what precedes the MoE layer, of the layer: its gate and shared experts)."""
    inside = {name: leaf for name, leaf in units.items() if name in ("gate", "shared")}
    return {name: leaf for name, leaf in units.items() if name not in inside}, inside


class Direction:
    """Code of both directions: look-ups by layer, stages of the forward, moves, fences, and the loop."""

    def __init__(self, how: Stages, params, grad_sink, constants: Constants):
        self.how, self.params, self.constants = how, params, constants
        self.scan, self.recompute = how.segment.config.stack == "scan", how.segment.config.recomputes
        self.layers, self.halves = how.block_schedule.layers, (0, 1) if how.block_schedule.halves else (None,)
        # in the backward: what the forward saved of windows outside the loop, and of the same turn of the loop
        self.alone, self.residuals = {}, {}
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

    def gathered(self, mix, gate):
        """Return one layer's parameters as its stages take them.

        Where two halves use them they vary over the data-parallel devices, so that their gradients are added before
        they are summed over devices.
        """
        whole = self.how.gathered(mix, gate)
        return cast_varying(whole, varying_axes(self.constants.token_ids)) if self.how.block_schedule.halves else whole

    def saved(self, key: tuple):
        """Return what the forward left under (name, layer, half), in this turn of the loop or outside it."""
        return self.residuals[key] if key in self.residuals else self.alone[key]

    def reads(self, stage: str) -> tuple[str, int]:
        """Return which live value a stage begins with: its name, and 1 if it is of the layer above, else 0."""
        if self.direction == "forward" or stage.endswith("_again"):
            return STAGES[stage.removesuffix("_again")][0], 0
        return "d" + STAGES[stage][1], int(stage == "unpack")

    def inputs(self, stage: str, at: tuple, env: dict) -> LayerInputs:
        """Return what a stage at (layer, half) reads; replicas only where it uses them.

        Those planned ahead stand before those that came after the gate; each are alive, fetched again, or saved.
        """
        layer, half = at
        replicas: list = []
        if stage.startswith(("experts", "unpack")):
            if self.how.transfer is not None:
                key = "held_replicas", layer, None
                replicas.append(env[key] if key in env else self.saved(key))
            if self.how.late is not None:
                key = "late", layer, half
                replicas += env[key] if key in env else self.saved(key)
        mix, gate = self.gathered(*self.of_layer(self.params, layer))
        key, token_ids, documents = self.constants.key, self.constants.token_ids, self.constants.documents
        if key is not None:
            first = self.how.segment.first_layer
            key = jax.random.fold_in(key, first + self.index(layer) if first else self.index(layer))
        if half is not None:
            token_ids = jnp.split(token_ids, 2)[half]
            documents = None if documents is None else jnp.split(documents, 2)[half]
        grad_sinks, tables = self.grad_sinks(), self.of_layer(self.constants.tables, layer)
        constants = Constants(self.constants.bank, tables, token_ids, key, documents)
        return LayerInputs(mix, gate, tuple(replicas), grad_sinks, constants)

    def grad_sinks(self):
        """Return zeros that nothing reads, through which gradients of one layer leave: of homes and of replicas."""
        bank, tables = self.constants.bank, self.constants.tables

        def zeros(slots: int, axes):
            shapes = {name: (slots, *leaf.shape[1:]) for name, leaf in bank.items()}
            return {n: cast_varying(jnp.zeros(shape, self.grad_sink_dtypes[n]), axes) for n, shape in shapes.items()}

        home, axes = zeros(tables.home_row.shape[-1], self.grad_sink_axes), varying_axes(bank, tables)
        return home, tuple(zeros(part.slots, axes) for part in (self.how.transfer, self.how.late) if part is not None)

    def run_stage(
        self, stage: str, window: Window, env: dict, value, inputs: LayerInputs, save: bool
    ) -> tuple[Any, Residuals | None]:
        """Run a stage of the forward on the value that it reads; returns (result, what its backward needs)."""
        how, at = self.how, (window.layer, window.half)
        if stage in ("attention", "route"):
            run, rest = getattr(how, stage)(inputs)
        elif stage == "experts":
            run, rest = how.experts(inputs, env["sent", *at])
        elif stage == "unpack":
            run, rest = how.unpack(inputs, env.pop(("sent", *at)), *env.pop(("context", *at)))
        else:  # an exchange
            run, rest = functools.partial(getattr(how.moe.schedule, stage), sent=env["sent", *at]), ()
        value, moves = self.start_moves(window, env, value)
        if not save:
            out, kept = run(value, *rest), None
        else:
            out, pull_back, *aux = jax.vjp(run, value, *rest, has_aux=stage == "route")
            out, kept = (out, *aux) if aux else out, residuals_of(pull_back, inputs)
        return self.end_moves(moves, env, out), kept

    def start_moves(self, window: Window, env: dict, chain):
        """Return the chain of values that a stage takes, and the window's moves, packed.

        What a move sends is fenced with what enters the stage: the move cannot start before it, and the stage not
        before everything is packed. With a fence of its table alone the compiler packs Agg after attention, and keeps
        the gradients of experts, and all that they are computed from, in memory until then.
        """
        moves, transfer, bank = [], self.how.transfer, self.constants.bank  # (key of what it fills, `ChunkTransfer`)
        for move in self.moves(window):
            tables = self.of_layer(self.constants.tables, move.layer)
            part = round(move.start * PARTS), round(move.stop * PARTS)
            if move.kind == "trans":
                steps = fetch(bank, tables.home_row, tables.transfer, transfer, part)
                moves.append((("held_replicas", move.layer, None), steps))
            else:
                wires = {name: leaf.dtype for name, leaf in bank.items()}
                gradients = env["dheld_replicas", move.layer, None]
                steps = return_part(gradients, tables.transfer, transfer, part, wires)
                moves.append((("home", move.layer, None), steps))
        if not moves:
            return chain, ()
        chain, packed = fence((chain, [steps.pack() for _, steps in moves]))
        packed = self.after(packed, chain)
        return chain, [(*move, one) for move, one in zip(moves, packed, strict=True)]

    def moves(self, window: Window) -> tuple[Move, ...]:
        return () if self.how.transfer is None else window.beside

    def end_moves(self, moves, env: dict, value):
        """Return what a stage made once the moves beside it have arrived; what they bring goes to `env`."""
        if not moves:
            return value
        arrived = {}
        for key, steps, packed in moves:
            into = env.pop(key, None)
            into = empty_replicas(self.constants.bank, self.how.transfer) if into is None else into
            arrived[key] = steps.unpack(steps.communicate(packed), into)
        value, arrived = fence((value, arrived))
        env.update(arrived)
        return value

    def pair(self, window: Window, env: dict, emit: dict):
        """Run a window and its `others`, of which the first reads what is there already and each the one before.

        Neither side starts before what both read is there. On XLA:CPU every window of a half, alone or not, waits for
        the results of the other half so far: branches that hold collectives would overtake others (`ordering.py`).
        """
        steps = [STEPS.get(one.stage, (one.stage,)) for one in window.pair]
        if self.direction == "backward":
            steps = [names if names == STEPS["recompute"] else names[::-1] for names in steps]
        keys = []  # of what the windows of a half read first
        for one, (first, *_) in zip(window.pair[:2], steps, strict=False):
            if one.half is not None:
                name, ahead = self.reads(first)
                keys.append((name, one.layer + ahead, one.half))
                if keys[-1] not in env:  # what is computed again starts from what was saved
                    env[keys[-1]] = self.saved(keys[-1])
        if window.others:  # no part of what a pair reads is used before all of it is there
            env.update(zip(keys, self.start(env, tuple(env[key] for key in keys)), strict=True))
        for i, one in enumerate(window.pair):
            if i < len(keys):
                # what the next windows of the other half will read, as far as it is there
                others = [v for (name, _, half), v in env.items() if half == 1 - one.half and name in self.chain]
                env[keys[i]] = self.after(env[keys[i]], *others)
            for step in steps[i]:
                self.step(step, one, env, emit)

    def run_loop(self, loop: Loop, env: dict, saved=None):
        """Run all windows; returns (env, emitted before and after {key: value}, emitted by the body, stacked).

        Args:
          saved: what the other direction's loop emitted, stacked, for the same turns.
        """
        if not self.scan:
            loop = Loop(loop.windows(self.layers), (), range(0), ())
        alone: dict = {}
        for window in loop.before:
            self.pair(window, env, alone)
        stacked = {}
        if len(loop.turns):
            step = loop.turns.step
            carry = _moved(env, -loop.turns[0])

            def body(carry, inputs):
                self.turn, self.residuals = inputs
                env, emitted = dict(carry), {}
                for window in loop.body:
                    self.pair(window, env, emitted)
                self.turn, self.residuals = None, {}
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
            self.pair(window, env, alone)
        return env, alone, stacked


def _moved(env: dict, by: int) -> dict:
    """Return live values with layers counted from elsewhere; those of no layer as they are."""
    return {(name, at if at is None else at + by, half): value for (name, at, half), value in env.items()}


def fence(tree):
    """Return the tree; nothing that uses one of its leaves starts before all of them are computed. Types are kept."""
    leaves, structure = jax.tree.flatten(tree)
    out = []
    for leaf, held in zip(leaves, lax.optimization_barrier(leaves), strict=True):
        extra = tuple(sorted(varying_axes(held) - varying_axes(leaf)))
        out.append(declare_equal(held, extra))
    return jax.tree.unflatten(structure, out)


class Forward(Direction):
    """The forward direction."""

    direction, chain = "forward", {reads for reads, _ in STAGES.values()}
    start = staticmethod(lambda env, chains: fence(chains))

    def __init__(self, how, params, grad_sink, constants, *, save_residuals: bool):
        super().__init__(how, params, grad_sink, constants)
        self.save_residuals = save_residuals

    def run(self, x: tuple):
        """Return ((x, stats [L, ...], passes [L]), saved), a tuple by half of each of the three.

        Saved is what the backward takes, (alone, stacked, last). Alone, {(name, layer, half): value}, is of windows
        outside the loop: the `Residuals` of each stage under its name; a [b, Sq, M] in their place where stages run
        again; held_replicas and late {name: [m, ...]} where those are not fetched again. Stacked is the same of the
        loop's windows, layers relative to the turn, values [turns, ...]. Last are the last layer's replicas
        {name: [m, ...]}, which the backward needs at once; None where it fetches none.
        """
        how = self.how
        env = {("x", 0, half): part for half, part in zip(self.halves, x, strict=True)}
        last = how.transfer is not None and self.save_residuals and how.block_schedule.refetch_replicas
        if last:  # the last layer's replicas are needed again at once
            bank = self.constants.bank
            like = self.grad_sinks()[1][0]
            env["last", None, None] = {name: leaf.astype(bank[name].dtype) for name, leaf in like.items()}
        env, alone, stacked = self.run_loop(how.block_schedule.forward, env)
        found = []
        for wanted in itertools.product(("stats", "passes"), self.halves):
            pieces = {}  # by layer, [1 or turns, ...]
            for (name, at, half), value in alone.items():
                if (name, half) == wanted:
                    pieces[at] = jax.tree.map(lambda v: v[None], value)
            for (name, offset, half), value in stacked.items():
                if (name, half) == wanted:
                    pieces[how.block_schedule.forward.turns[0] + offset] = value
            ordered = [pieces[layer] for layer in sorted(pieces)]
            found.append(jax.tree.map(lambda *parts: jnp.concatenate(parts), *ordered))
        halves = len(self.halves)
        kept = ({k: v for k, v in part.items() if k[0] not in ("stats", "passes")} for part in (alone, stacked))
        out = tuple(env["x", self.layers, half] for half in self.halves)
        return (out, tuple(found[:halves]), tuple(found[halves:])), (*kept, env.get(("last", None, None)))

    def step(self, stage: str, window: Window, env: dict, emit: dict):
        at = window.layer, window.half
        save = self.save_residuals and (stage == "attention" or not self.recompute)
        inputs = self.inputs(stage, at, env)
        reads, makes = STAGES[stage]
        value = env[("a", *at)] if stage == "route" else env.pop((reads, *at))
        out, kept = self.run_stage(stage, window, env, value, inputs, save)
        if stage == "route":
            (rows, context, stats, _), (env["sent", *at], whole, passes, env["late", *at]) = out
            env["packed", *at], env["context", *at] = self.after(rows, stats), (context, whole[0])
            emit["stats", *at], emit["passes", *at] = join_floats(stats, whole[1]), passes
        elif stage == "unpack":
            late, a = env.pop(("late", *at)), env.pop(("a", *at))
            env["x", window.layer + 1, window.half] = a + out.reshape(a.shape)
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
        else:
            env[makes, *at] = out
        if save:
            emit[stage, *at] = kept


MATRIX = 1 << 16  # values from which a gradient takes time worth hiding


class Backward(Direction):
    """The backward direction: cotangents, gradients, and the replicas fetched a second time."""

    direction = "backward"
    chain = {reads for reads, _ in STAGES.values()} - {"x"} | {"d" + makes for _, makes in STAGES.values()}

    def run(self, cotangents, saved: tuple):
        """Return (halves of dx, dparams, d_grad_sink)."""
        dx, self.dstats, _ = cotangents
        self.alone, stacked, last = saved
        self.held: list[tuple] = []  # gradients that are not written yet: (name, layer, value)
        env = {("dx", self.layers, half): part for half, part in zip(self.halves, dx, strict=True)}
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
        env.update({(name, None, None): value if self.scan else {} for name, value in full.items()})
        env, _, _ = self.run_loop(self.how.block_schedule.backward, env, stacked)
        for one in self.held:
            self.write(*one, env)
        dx = tuple(env["dx", 0, half] for half in self.halves)
        dx = tuple(self.after(part, *dx) for part in dx)
        grads = {name: env[name, None, None] for name in full}
        if not self.scan:  # layers that are written out are put together once
            for name, like in full.items():
                values = (grads[name][layer] for layer in range(self.layers))
                grads[name] = jax.tree.map(lambda leaf, *own: jnp.stack(own).astype(leaf.dtype), like, *values)
        return dx, (grads["mix"], grads["gate"]), grads["sums"]

    def start(self, env: dict, chains: tuple) -> tuple:
        """Fence what the windows read; where layers are written out, with all gradients of parameters so far.

        Nothing reads those before the end of the step, and the compiler would compute most of them beside the last
        exchanges, and nothing beside the first. Small ones are left to it: fenced, each is a kernel of its own.
        """
        if self.scan:  # each turn of a loop computes its own
            return fence(chains)
        keys = [key for key in env if key[0] in ("home", "dmix", "dgate")]
        leaves, tree = jax.tree.flatten(([value for *_, value in self.held], [env[key] for key in keys]))
        large = [place for place, leaf in enumerate(leaves) if leaf.size >= MATRIX]
        chains, fenced = fence((chains, [leaves[place] for place in large]))
        for place, leaf in zip(large, fenced, strict=True):
            leaves[place] = leaf
        values, sums = jax.tree.unflatten(tree, leaves)
        env.update(zip(keys, sums, strict=True))
        held, self.held = self.held, []
        written = [self.write(name, layer, value, env) for (name, layer, _), value in zip(held, values, strict=True)]
        return self.after(chains, written)

    def finish(self, name: str, layer: int, value, env: dict):
        """Put a layer's gradient at its place; written out with halves, when the next pair starts.

        Returns:
          what was written, or () where it is held.
        """
        if self.how.block_schedule.halves and not self.scan:
            self.held.append((name, layer, value))
            return ()
        return self.write(name, layer, value, env)

    def write(self, name: str, layer: int, value, env: dict):
        """Write a gradient: of `mix` and `gate`, cotangents of what `gathered` returned, the layer's own."""
        mix, gate = self.of_layer(self.params, layer) if name != "sums" else (None, None)
        if name == "mix":
            value = jax.vjp(lambda p: self.gathered(p, gate)[0], mix)[1](value)[0]
        elif name == "gate":
            value = jax.vjp(lambda p: self.gathered(mix, p)[1], gate)[1](value)[0]
        index, total = self.index(layer), env[name, None, None]
        if self.scan:
            env[name, None, None] = jax.tree.map(lambda all, own: all.at[index].set(own), total, value)
        else:
            total[index] = value
        return value

    def step(self, stage: str, window: Window, env: dict, emit: dict):
        at, layer, how = (window.layer, window.half), window.layer, self.how
        if stage.endswith("_again"):
            self.again(stage.removesuffix("_again"), window, env)
            return
        moves = how.transfer is not None
        last = window.half in (None, 0)  # no other half of this layer follows in the backward
        inputs = self.inputs(stage, at, env)
        kept = env.pop((stage, *at), None) or self.saved((stage, *at))
        name, ahead = self.reads(stage)
        d = env.pop((name, layer + ahead, window.half))
        # On XLA:CPU what a stage's backward makes again of what was saved waits for the cotangent: the branch of later
        # passes, whose number is a scalar, and the tokens that an MP group gathers again.
        if stage == "unpack":
            kept = jax.tree.map(lambda leaf: self.after(leaf, d) if leaf.ndim == 0 else leaf, kept)
        elif stage == "attention":
            floats = jnp.floating
            kept = jax.tree.map(lambda v: self.after(v, d) if jnp.issubdtype(v.dtype, floats) else v, kept)
        pull_back = kept.restore(inputs)

        d, flight = self.start_moves(window, env, d)
        given, of_read = d, ("d" + STAGES[stage][0], *at)
        if stage == "unpack":
            given = d.reshape(-1, d.shape[-1])
        elif stage == "route":
            # cotangents of integers have no dtype
            own = lambda leaf: None if leaf.dtype == jax.dtypes.float0 else self.of_layer(leaf, layer)  # noqa: E731
            dstats = jax.tree.map(own, self.dstats[window.half or 0])
            given = d, env.pop(("dcontext", *at)), dstats, env.pop(("dlate", *at), ())
        dread, *others = pull_back(given)
        dread = self.end_moves(flight, env, dread)
        if stage == "attention":
            (dmix,) = others
            if flight:  # else the sum of dmix over devices, and so all of attention, would run before the moves
                dread, dmix = fence((dread, dmix))
            add(env, ("dmix", layer, None), dmix)
            if last:
                dread = self.after(dread, self.finish("mix", layer, env.pop(("dmix", layer, None)), env))
        if stage != "route":
            env[of_read] = dread
        if stage == "unpack":
            env["dcontext", *at], (dhome, env["dreplicas", *at]) = others
            add(env, ("home", layer, None), dhome)
            env["da", *at] = d
        elif stage == "experts":
            ((dhome, dreplicas),) = others
            add(env, ("home", layer, None), dhome)
            dreplicas = jax.tree.map(jnp.add, env.pop(("dreplicas", *at)), dreplicas)
            env.pop(("late", *at), None)
            if moves:
                add(env, ("dheld_replicas", layer, None), dreplicas[0])
            if how.late is not None:
                env["dlate", *at] = dreplicas[-1:]
            if last:
                env.pop(("held_replicas", layer, None), None)
                if not moves and how.late is None:
                    self.finish("sums", layer, env.pop(("home", layer, None)), env)
        elif stage == "route":
            dgate, dhome = others
            if how.late is not None:  # what the replicas that came late add
                add(env, ("home", layer, None), dhome)
                if not moves and last:
                    self.finish("sums", layer, env.pop(("home", layer, None)), env)
            dread = env[of_read] + dread
            add(env, ("dgate", layer, None), dgate)
            if last:
                dread = self.after(dread, self.finish("gate", layer, env.pop(("dgate", layer, None)), env))
            env[of_read] = dread
        for move in self.moves(window) if flight else ():
            if move.kind == "agg" and move.stop == 1.0:
                del env["dheld_replicas", move.layer, None]
                self.finish("sums", move.layer, env.pop(("home", move.layer, None)), env)

    def again(self, stage: str, window: Window, env: dict):
        """Run a stage of the forward again, and keep what its backward needs."""
        at = layer, half = window.layer, window.half
        cotangent, (reads, makes) = ("dx", layer + 1, half), STAGES[stage]
        if stage == "route":
            value = env.pop(("a", *at), None)
            value = self.after(self.saved(("a", *at)) if value is None else value, env[cotangent])
            if half is not None:
                value, env[cotangent] = fence((value, env[cotangent]))
        inputs = self.inputs(stage, at, env)
        value = value if stage == "route" else env.pop((reads, *at))
        out, env[stage, *at] = self.run_stage(stage, window, env, value, inputs, True)
        if stage == "route":
            (rows, context, *_), (env["sent", *at], whole, _, late) = out
            env["packed", *at], env["context", *at] = rows, (context, whole[0])
            if late:
                env["late", *at] = late
        elif stage == "unpack":
            env[cotangent] = self.after(env[cotangent], out)
        else:
            env[makes, *at] = out


def add(env: dict, key: tuple, value):
    """Add a value to a sum that may not have begun."""
    env[key] = jax.tree.map(jnp.add, env[key], value) if key in env else value
