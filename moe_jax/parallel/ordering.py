"""Make a value wait for others, where the order of collectives would otherwise be undefined.

XLA:CPU starts an operation as soon as its operands are there. It keeps collectives that stand side by side in order,
but a conditional or a loop that holds collectives counts as done once it has *started*: a collective after it that does
not read its result runs at the same time, devices start different ones first, and the program hangs or aborts (jax
0.10.2, at about one call in 300). XLA waits for a result that is read, so `wait_for` reads one element of each array,
and `in_line` puts a branch where all collectives before and after it wait. On other platforms both are identities and
add nothing to the program.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, mlir

from moe_jax.parallel.varying import with_gradient

_wait_for_p = core.Primitive("wait_for")
_wait_for_p.def_abstract_eval(lambda x, *others: x)


def _read_others(x, *others):
    """Return x + 0, where the 0 is computed from one element of each of the others, as the compiler cannot see."""
    read = jnp.int32(0)
    for other in others:
        first = lax.reshape(lax.slice(other, (0,) * other.ndim, (1,) * other.ndim), ())
        read = read | (first != lax.full_like(first, 0)).astype(jnp.int32)
    nothing = lax.broadcast(lax.shift_right_logical(read, jnp.int32(1)), x.shape)
    return x | (nothing != 0) if x.dtype == bool else x + nothing.astype(x.dtype)


ad.primitive_jvps[_wait_for_p] = lambda primals, tangents: (_wait_for_p.bind(*primals), tangents[0])
mlir.register_lowering(_wait_for_p, lambda ctx, x, *others: [x])
mlir.register_lowering(_wait_for_p, mlir.lower_fun(_read_others, multiple_results=False), platform="cpu")


def wait_for(tree, others):
    """Return `tree`, every array of it on XLA:CPU ordered after all arrays of the pytree `others`.

    Its gradient is that of `tree` alone, and waits for nothing.
    """
    none = jax.dtypes.float0  # of cotangents of integers
    read = [leaf for leaf in jax.tree.leaves(others) if leaf.size and leaf.dtype != none]
    return jax.tree.map(lambda leaf: _wait_for_p.bind(leaf, *read) if read and leaf.dtype != none else leaf, tree)


def in_line(x, run: Callable, operands, turn=()):
    """Return (x, run(operands, turn)), with the collectives of `run` in line with those that make and read x.

    On XLA:CPU they start when x is there, and what reads the returned x starts when they are done. In the backward
    those of `run` start when the gradient of the returned x is there, and what reads the gradient of x starts when they
    are done.

    Args:
      x: pytree of what collectives before made, and of all that those after, and those of the backward before, read.
      run: function whose collectives, in branches or not, read `turn`, or `operands` where there is none.
      operands: pytree through which all gradients of the result leave.
      turn: pytree of numbers without gradients.
    """
    x, operands = _gradients_in_turn((x, operands))
    operands, turn = (operands, wait_for(turn, x)) if jax.tree.leaves(turn) else (wait_for(operands, x), turn)
    result = run(operands, turn)
    result, x = _gradients_in_turn((result, wait_for(x, result)))
    return x, result


@with_gradient(lambda d: (wait_for(*d), d[1]))
def _gradients_in_turn(both: tuple):
    """Return (first, others); on XLA:CPU the gradients of `first` wait for all those of `others`."""
    return both
