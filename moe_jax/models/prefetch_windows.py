"""The windows of a block-wise schedule, run one after the other: what both directions of a stack of layers share.

Inputs: `StackSettings` (the schedule, the stages of a layer, how parameters move), parameters with leaves [L, ...], and
`Constants`. Outputs: `Direction`, which runs windows on live values, and `Saved`, what the forward leaves for the
backward. Every window with moves is fenced: they start no earlier than its stage, and the next stage waits for both.

Live values are kept in a dictionary under (name, layer, half), half None where it is of the whole batch. As a scan, its
loop carries exactly those that are alive between two iterations, with layers relative to the iteration; unrolled,
layers are absolute. Names: x [b, Sq, M] enters a layer, a [b, Sq, M] its MoE half; rows [R, M] are packed, then
received, computed (done) and returned; a leading d marks a cotangent; home is the gradient of home experts while it is
summed.

An exchange of one half and what the other computes beside it start together, when what both read is there.
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
from moe_jax.models.stages import LayerInputs, Stages, zero_grad_sink
from moe_jax.overlap.blocks import BlockSchedule, Loop, Window

STEPS = {  # the stages of windows that have several of them, in the order of the forward
    "dispatch": ("route", "send"),
    "combine": ("send_back", "unpack"),
    "recompute": ("route_again", "send_again", "experts_again", "send_back_again", "unpack_again"),
}
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
    """What the stack reads and never differentiates: bank {name: [Rb, ...]}, tables [L, ...], token ids, PRNG key.

    And documents int32 [b, Sq], or None.
    """

    bank: dict
    tables: Any
    token_ids: jax.Array
    key: jax.Array
    documents: jax.Array | None = None


jax.tree_util.register_dataclass(Constants)


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward.

    Attributes:
      alone: {(name, layer, half): value} of windows outside the loop: the `Residuals` of each stage under its name;
        a [b, Sq, M] in their place where stages run again; held_replicas and late {name: [m, ...]} where those are not
        fetched again.
      stacked: the same of the loop's windows, layers relative to the turn, values [turns, ...].
      last: the last layer's replicas {name: [m, ...]}, which the backward needs at once; None where it fetches none.
    """

    alone: dict
    stacked: dict
    last: dict | None


jax.tree_util.register_dataclass(Saved)


@dataclasses.dataclass(frozen=True)
class StackSettings:
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


class Direction:
    """Code of both directions: look-ups by layer, moves, fences, and the loop."""

    def __init__(self, how: StackSettings, params, grad_sink, constants: Constants):
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
        key, token_ids, documents = None, self.constants.token_ids, self.constants.documents
        if self.how.noisy:
            first = self.how.first_layer
            key = jax.random.fold_in(self.constants.key, first + self.index(layer) if first else self.index(layer))
        if half is not None:
            token_ids = jnp.split(token_ids, 2)[half]
            documents = None if documents is None else jnp.split(documents, 2)[half]
        return LayerInputs(
            mix=mix,
            gate=gate,
            bank=self.constants.bank,
            replicas=replicas,
            grad_sinks=self.grad_sinks(),
            tables=self.of_layer(self.constants.tables, layer),
            token_ids=token_ids,
            noise_key=key,
            documents=documents,
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
        """Run a window and its `others`, of which the first reads what is there already and each the one before.

        Neither side starts before what both read is there. On XLA:CPU every window of a half, alone or not, waits for
        the results of the other half so far: branches that hold collectives would overtake others (`ordering.py`).
        """
        keys = [self.read_by(one, env, residuals) for one in window.pair[:2] if one.half is not None]
        if window.others:
            env.update(zip(keys, self.start(env, tuple(env[key] for key in keys)), strict=True))
        for i, one in enumerate(window.pair):
            if i < len(keys):
                env[keys[i]] = self.after(env[keys[i]], *self.of_half(1 - one.half, env))
            for step in self.steps(one):
                self.step(step, one, env, emit, residuals)

    def of_half(self, half: int, env: dict) -> list:
        """Return what the next windows of a half will read, as far as it is there."""
        chain = {name for name, _ in READ[self.direction].values()}
        return [value for (name, _, own), value in env.items() if own == half and name in chain]

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


def fence(tree):
    """Return the tree; nothing that uses one of its leaves starts before all of them are computed. Types are kept."""
    leaves, structure = jax.tree.flatten(tree)
    out = []
    for leaf, held in zip(leaves, lax.optimization_barrier(leaves), strict=True):
        extra = tuple(sorted(varying_axes(held) - varying_axes(leaf)))
        out.append(declare_equal(held, extra))
    return jax.tree.unflatten(structure, out)
