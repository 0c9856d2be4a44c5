"""Make a value wait for others, where the order of collectives would otherwise be undefined.

XLA:CPU starts an operation as soon as its operands are there. It keeps collectives that stand side by side in order,
but a conditional or a loop that holds collectives counts as done once it has *started*: a collective after it that does
not read its result runs at the same time, devices start different ones first, and the program hangs or aborts (jax
0.10.2, at about one call in 300). XLA waits for a result that is read, so `wait_for` reads one element of each array.
On other platforms it is the identity and adds nothing to the program.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from moe_jax.parallel.varying import match_varying

_wait_for_p = core.Primitive("wait_for")


@_wait_for_p.def_abstract_eval
def _wait_for_type(x, count, *others):
    del count, others
    return x


def _read_others(x, count, *others):
    """Return x + 0, where the 0 is computed from one element of each of the others."""
    nothing = lax.min(count, jnp.int32(0))  # 0, which the compiler cannot fold
    read = jnp.int32(0)
    for other in others:
        first = lax.reshape(lax.slice(other, (0,) * other.ndim, (1,) * other.ndim), ())
        read = read | lax.select(first != lax.full_like(first, 0), nothing, jnp.int32(0))
    return x + lax.broadcast(read.astype(x.dtype), x.shape)


mlir.register_lowering(_wait_for_p, lambda ctx, x, count, *others: [x])
mlir.register_lowering(_wait_for_p, mlir.lower_fun(_read_others, multiple_results=False), platform="cpu")


def wait_for(x, count, *trees):
    """Return x, on XLA:CPU ordered after all arrays in `trees`.

    Its gradient is x's alone, and waits for nothing.

    Args:
      x: array of numbers.
      count: int32 [], at least 0, and not known to the compiler.
      trees: pytrees of arrays of numbers.
    """
    return _wait_for(x, count, [leaf for leaf in jax.tree.leaves(trees) if leaf.size])


def wait_for_tree(tree, count, *trees):
    """Return `tree` with every array as `wait_for` returns it."""
    return jax.tree.map(lambda leaf: wait_for(leaf, count, *trees), tree)


@jax.custom_vjp
def gradients_in_turn(first, others, count):
    """Return (first, others); on XLA:CPU the gradients of `first` wait for all those of `others`.

    Args:
      first, others: pytrees of floats.
      count: as in `wait_for`.
    """
    return first, others


gradients_in_turn.defvjp(
    lambda first, others, count: ((first, others), count),
    lambda count, d: (wait_for_tree(d[0], count, d[1]), d[1], None),
)


def both_ready(first, second):
    """Return (first, second), neither of which a compiler may use before both are ready; gradients are not ordered.

    Args:
      first, second: arrays of floats.
    """
    return _both_ready(*match_varying(first, second))


@jax.custom_vjp
def _both_ready(first, second):
    return lax.optimization_barrier((first, second))


_both_ready.defvjp(lambda first, second: (lax.optimization_barrier((first, second)), None), lambda _, d: d)


@jax.custom_jvp
def _wait_for(x, count, others):
    return _wait_for_p.bind(x, count, *others)


@_wait_for.defjvp
def _wait_for_jvp(primals, tangents):
    return _wait_for(*primals), tangents[0]
