"""`balanced` after the gate on a GPU: all its rounds in one kernel.

Inputs: tokens of each expert, who holds it, its home. Outputs: quotas [E, D], those of `level_quotas` but for
rounding. The rule is a loop over experts inside a loop over rounds, each turn on a few numbers: as XLA's loops that is
thousands of launches a layer. Here one block of threads keeps the quotas in registers. Nothing is sorted: water fills a
set of holders to level (amount + sum of their grounds) / number, and the least such level over the sets "all holders
whose ground is no higher than holder i's" is the level at which the water stands.
Letters: docs/notation.md; quota [E, D] tokens of e on d.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.parallel.varying import match_varying

MOST_VALUES = 1 << 13  # of padded [E, D] or [D, D]: a block of threads keeps several such arrays in its registers


def fits_one_kernel(experts: int, devices: int) -> bool:
    """Say whether a block's registers hold the arrays of so many experts and devices."""
    rows, columns = _padded((experts, devices))
    return max(rows, columns) * columns <= MOST_VALUES


def level_in_one_kernel(totals, held, home, sweeps: int, interpret: bool = False):
    """Return quotas [E, D].

    Args:
      totals: float [E]; held, home: bool [E, D].
      sweeps: rounds, at most.
      interpret: run on any device, step by step; for tests.
    """
    from jax.experimental import pallas as pl

    totals, held, home = match_varying(totals, held, home)
    experts, devices = held.shape
    rows, columns = _padded((experts, devices))
    more = (0, rows - experts), (0, columns - devices)
    flags = jnp.pad(held.astype(jnp.int32) + 2 * home.astype(jnp.int32), more)
    out = jax.ShapeDtypeStruct(flags.shape, totals.dtype, manual_axis_type=jax.typeof(totals).manual_axis_type)
    options = {}
    if not interpret:
        from jax.experimental.pallas import triton

        options = {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=1)}
    kernel = functools.partial(_kernel, experts=experts, devices=devices, sweeps=sweeps)
    quota = pl.pallas_call(kernel, out_shape=out, interpret=interpret, name="level", **options)(
        jnp.pad(totals, more[0]), flags
    )
    # whatever a GPU made of it, tokens go to holders alone
    return jnp.where(held, quota[:experts, :devices], jnp.zeros((), quota.dtype))


def _padded(sizes):
    """Return the powers of two that hold the sizes, as Triton's arrays must be."""
    return tuple(1 << (size - 1).bit_length() for size in sizes)


def _kernel(totals_ref, flags_ref, quota_ref, *, experts: int, devices: int, sweeps: int):
    totals, flags = totals_ref[...], flags_ref[...]
    held, home = flags % 2 == 1, flags >= 2
    zero = jnp.zeros((), totals.dtype)
    row = lax.broadcasted_iota(jnp.int32, flags.shape, 0)
    place = lax.broadcasted_iota(jnp.int32, totals.shape, 0)

    def pour(expert, carry):
        quota, load = carry
        here = row == expert
        holds = jnp.sum(jnp.where(here & held, 1, 0), axis=0) > 0
        mine = jnp.sum(jnp.where(here, quota, zero), axis=0)
        amount = jnp.sum(jnp.where(place == expert, totals, zero))
        base = load - mine
        # the level to which `amount` fills the grounds of the holders
        inside = (base[None, :] <= base[:, None]) & holds[None, :]  # [D, D], the set of each holder
        number = jnp.sum(inside.astype(base.dtype), axis=1)
        ground = jnp.sum(jnp.where(inside, base[None, :], zero), axis=1)
        level = (amount + ground) / jnp.maximum(number, jnp.ones((), base.dtype))
        level = jnp.min(jnp.where(holds, level, jnp.full((), jnp.inf, base.dtype)))
        new = jnp.where(holds, jnp.maximum(level - base, zero), zero)
        replicated = jnp.sum(holds.astype(jnp.int32)) > 1
        quota = jnp.where(here & replicated, new[None, :], quota)
        return quota, jnp.where(replicated, base + new, load)

    def sweep(carry):
        turn, quota, load, _ = carry
        quota, after = lax.fori_loop(0, experts, pour, (quota, load))
        change, mean = jnp.max(jnp.abs(after - load)), jnp.sum(after) / devices
        return turn + 1, quota, after, (change > 1e-3 * mean).astype(jnp.int32)

    quota = jnp.where(home, totals[:, None], zero)
    start = jnp.int32(0), quota, jnp.sum(quota, axis=0), jnp.int32(1)
    quota_ref[...] = lax.while_loop(lambda carry: (carry[0] < sweeps) & (carry[3] > 0), sweep, start)[1]
