"""The backward of a stack in the order of a block-wise schedule.

Inputs: what `Direction` takes, the cotangents of what `Forward` returns, and its `Saved`, which enters the loop at the
turn that it left. Outputs: the gradients of x, a tuple of [b, Sq, M] by half, of parameters [L, ...], and of home
experts {name: [L, Hs, ...]}. Gradients of parameters are summed over the halves before they are summed over devices.
Names of live values: `prefetch_windows.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moe_jax.collectives.varying import cast_varying, varying_axes
from moe_jax.models.prefetch_windows import AFTER, READ, Direction, Saved, fence
from moe_jax.models.residuals import Residuals
from moe_jax.models.stages import known_arrays
from moe_jax.overlap.blocks import Window

MATRIX = 1 << 16  # values from which a gradient takes time worth hiding


class Backward(Direction):
    """The backward direction: cotangents, gradients, and the replicas fetched a second time."""

    direction = "backward"

    def run(self, cotangents, saved: Saved):
        """Return (halves of dx, dparams, d_grad_sink)."""
        dx, self.dstats, _ = cotangents
        self.alone = saved.alone
        self.held: list[tuple] = []  # gradients that are not written yet, as `write` takes them
        env = {("dx", self.layers, half): part for half, part in zip(self.how.halves, dx, strict=True)}
        if saved.last is not None:
            env["held_replicas", self.layers - 1, None] = saved.last
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
        env, _, _ = self.run_loop(self.how.loop(self.how.schedule.backward), env, saved.stacked)
        self._write_held(env)
        dx = tuple(env["dx", 0, half] for half in self.how.halves)
        dx = tuple(self.after(part, *dx) for part in dx)
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
        pull_back = self._in_turn(stage, at, residuals_of_stage, env).restore(known_arrays(inputs))
        getattr(self, "_" + stage)(window, env, pull_back)
        for move in window.beside if self.how.transfer is not None and stage in ("attention", "experts") else ():
            if move.kind == "agg" and move.stop == 1.0:
                del env["dheld_replicas", move.layer, None]
                self.write("sums", move.layer, env.pop(("home", move.layer, None)), env)

    def _in_turn(self, stage: str, at: tuple, residuals: Residuals, env: dict) -> Residuals:
        """Return what a stage saved; on XLA:CPU what its backward makes again of it waits for the stage's cotangent.

        That is the branch of later passes, whose number is a scalar, and the tokens that an MP group gathers again.
        """
        waits = {
            "unpack": lambda leaf: leaf.ndim == 0,
            "attention": lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating),
        }
        if stage not in waits:
            return residuals
        name, ahead = READ["backward"][stage]
        d = env[name, at[0] + ahead, at[1]]
        return jax.tree.map(lambda leaf: self.after(leaf, d) if waits[stage](leaf) else leaf, residuals)

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


def split_floats_of(tree, function):
    """Return the tree with `function` of its floats and None for the rest (their cotangents have no dtype)."""
    return jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else function(leaf), tree)
