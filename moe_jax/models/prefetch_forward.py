"""The forward of a stack in the order of a block-wise schedule.

Inputs: what `Direction` takes, and x, a tuple of [b, Sq, M] by half. Outputs: x, the gates' statistics [L, ...] and the
passes int32 [L], each a tuple by half, and `Saved`: what the backward needs of each turn leaves the loop as its stacked
result.
Names of live values: `prefetch_windows.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax.models.prefetch_windows import AFTER, READ, Direction, Saved
from moe_jax.models.stages import LayerInputs, join_floats
from moe_jax.overlap.blocks import Loop, Window


class Forward(Direction):
    """The forward direction."""

    direction = "forward"

    def __init__(self, how, params, grad_sink, constants, *, save_residuals: bool):
        super().__init__(how, params, grad_sink, constants)
        self.save_residuals = save_residuals

    def run(self, x: tuple):
        """Return ((x, stats [L, ...], passes [L]), `Saved`), a tuple by half of each of the three."""
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
        return (out, *map(tuple, found)), Saved(*saved, env.get(("last", None, None)))

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
