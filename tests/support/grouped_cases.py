"""Cases of grouped matmuls, their answers by loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.kernels.grouped import GroupedWeights


def make_case(rows, sizes, *, contracted=8, resulting=6, dtype=np.float64, counts=None, seed=0):
    """Return lhs, group_sizes, dout and per operand (bank, slots): slots permuted, banks larger than the groups.

    Args:
      counts: groups of each operand; None is one operand of all. Rows that no group owns are NaN.
    """
    rng = np.random.default_rng(seed)
    lhs, dout = rng.normal(size=(rows, contracted)), rng.normal(size=(rows, resulting))
    lhs[sum(sizes) :], dout[sum(sizes) :] = np.nan, np.nan
    weights = []
    for count in counts or [len(sizes)]:
        bank = rng.normal(size=(count + 3, contracted, resulting)).astype(dtype)
        weights.append((bank, rng.permutation(len(bank))[:count].astype(np.int32)))
    return lhs.astype(dtype), np.array(sizes, np.int32), dout.astype(dtype), weights


def as_operands(weights, grad_sinks):
    """Return the operands of (bank, slots) each, with a grad_sink, or the dtype of one without a value, or None."""
    operands = []
    for (bank, slots), sink in zip(weights, grad_sinks, strict=True):
        if sink is not None and not hasattr(sink, "shape"):
            sink = jax.ShapeDtypeStruct((len(slots), *bank.shape[1:]), sink)
        operands.append(GroupedWeights(bank=jnp.asarray(bank), slots=jnp.asarray(slots), grad_sink=sink))
    return tuple(operands)


def loop_oracle(lhs, group_sizes, dout, weights):
    """Return out, dlhs and dW [G, K, N], group by group."""
    per_group = np.concatenate([bank[slots] for bank, slots in weights])
    out, dlhs = np.zeros(dout.shape, lhs.dtype), np.zeros_like(lhs)
    dweights = np.zeros((len(group_sizes), *per_group.shape[1:]), lhs.dtype)
    start = 0
    for group, size in enumerate(group_sizes):
        own = slice(start, start + size)
        out[own] = lhs[own] @ per_group[group]
        dlhs[own] = dout[own] @ per_group[group].T
        dweights[group] = lhs[own].T @ dout[own]
        start += size
    return out, dlhs, dweights
