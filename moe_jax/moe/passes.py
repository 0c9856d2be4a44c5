"""Dropless in bounded memory: the same buckets, as many passes as the fullest one needs.

Pass 0 is outside any branch, so that transfers still overlap it; the later ones run only when some device's bucket
overflowed, and save no residuals but their inputs. They are a conditional that holds collectives, and nothing may run
next to it (`parallel/ordering.py`): hence a `custom_vjp`, and values that wait for each other.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.moe.config import MoEConfig
from moe_jax.parallel.ordering import in_line, wait_for
from moe_jax.parallel.varying import cast_varying, varying_axes


class FirstPassOnly(MoEConfig):
    """Marks the config of a layer whose program has pass 0 alone, and says how many passes it should have taken.

    Whoever runs it must throw its results away where that is more than one. No binding makes one: `first_pass_model`
    does.
    """


def most_of_all(needed, axes: tuple[str, ...]):
    """Return the elementwise maximum over devices, equal on all; the array itself where it is so already."""
    axes = tuple(axis for axis in axes if axis in varying_axes(needed))
    # an integer that leaves a custom_vjp, as the prefetcher's does, has a tangent (of float0), and pmax has no rule
    needed = lax.stop_gradient(needed)
    return lax.pmax(needed, axes) if axes else needed


def add_later_passes(first, one_pass, needed, most: int, before=()):
    """Return first + one_pass(1) + ... + one_pass(needed - 1).

    Args:
      first: what pass 0 gave; one_pass: function of the pass index (int32 []) to an array; may hold collectives.
      needed: int32 [], at least 1, equal on all devices; most: its static bound; 1 leaves no branch in the program.
      before: pytree of results of other collectives, which the branch must not overtake.
    """
    if most == 1:
        return first
    closed = jax.make_jaxpr(one_pass)(jnp.int32(0))
    program, consts = closed.jaxpr, closed.consts
    # the constants of that function for which its result has a gradient
    floats = [i for i, leaf in enumerate(consts) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def run(chosen, own, others, index):  # own: the constants whose places are `chosen`
        own, others = iter(own), iter(others)
        values = [next(own if i in chosen else others) for i in range(len(program.constvars))]
        return jax.core.eval_jaxpr(program, values, index)[0]

    def split(chosen):
        return [consts[i] for i in chosen], [leaf for i, leaf in enumerate(consts) if i not in chosen]

    def gradients(own, others):
        out, pull = jax.vjp(lambda own: run(floats, own, others, jnp.int32(0)), own)
        return pull(out)[0]

    # A custom_vjp returns a gradient for every input, zeros where there is none: for the bank, whose gradient leaves
    # through its grad_sink, zeros of its size in every pass. So what a gradient reaches is found in its jaxpr.
    jaxpr = jax.make_jaxpr(gradients)(*split(floats)).jaxpr
    read = set(map(id, jaxpr.invars + jaxpr.constvars))
    for equation in jaxpr.eqns:
        if any(id(atom) in read for atom in equation.invars):
            read |= set(map(id, equation.outvars))
    trained = tuple(i for i, out in zip(floats, jaxpr.outvars, strict=True) if id(out) in read)
    leaves, fixed = split(trained)
    rest = _later_passes(functools.partial(run, trained), most)
    (first, _), later = in_line((first, before), lambda leaves, needed: rest(leaves, fixed, needed), leaves, needed)
    return first + later


def _later_passes(run, most: int):
    """Return function(leaves, fixed, needed): the sum of run(leaves, fixed, index) over the passes from 1 on.

    It has a gradient for `leaves`. A pass runs again and backward in one branch: nothing that it saves leaves the
    branch. The gradient of a loop over branches would copy what they save, the bank too, for every pass.
    """

    @jax.custom_vjp
    def rest(leaves, fixed, needed):
        return _sum_passes(functools.partial(run, leaves, fixed), needed, most)

    def forward(leaves, fixed, needed):
        total = rest(leaves, fixed, needed)
        return total, (leaves, fixed, wait_for(needed, total))

    def backward(residuals, d):
        leaves, fixed, needed = residuals

        def gradients(index):
            return jax.vjp(lambda leaves: run(leaves, fixed, index), leaves)[1](d)[0]

        return _sum_passes(gradients, wait_for(needed, d), most), None, None

    rest.defvjp(forward, backward)
    return rest


def _sum_passes(run, needed, most: int):
    """Return run(1) + ... + run(needed - 1), a pytree of floats each; run: function of an index, int32 []."""
    shapes = jax.eval_shape(run, jnp.int32(0))
    zeros = jax.tree.map(lambda of: cast_varying(jnp.zeros(of.shape, of.dtype), of.manual_axis_type.varying), shapes)

    def body(total, index):
        return lax.cond(index < needed, lambda: jax.tree.map(jnp.add, total, run(index)), lambda: total), None

    return lax.cond(needed > 1, lambda: lax.scan(body, zeros, jnp.arange(1, most, dtype=jnp.int32))[0], lambda: zeros)
