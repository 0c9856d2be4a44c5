"""Compare a grouped matmul with plain float32 matmuls on one expert FFN: some hundred rows, forward and backward.

Inputs: the FFN's shape and the implementation's name. Outputs: the entry that is furthest off, and by how much. Whole
models cannot be compared so: there a rounding that flips a choice of the gate sends a token to another expert, and two
right kernels come out 3 to 7% apart at 12 layers. Here rows are given, so only rounding is left.

The cases hold what kernels often get wrong: groups that are empty (first, between, last), of one row, longer than two
tiles with a part of a tile at the end, and a multiple of a tile; a number of rows that no tile divides; NaN in the rows
of no group; and weights both as the home experts' param_dtype bank and as replicas of the compute dtype. The taller
case has 128 rows and more a group on average, where kernels take their tall tiles, the other has fewer.

Letters: docs/notation.md; F of this device.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.kernels.float8_ffn import PREFIX
from moe_jax.kernels.grouped import GroupedWeights
from moe_jax.moe.experts import apply_activation, expert_ffn, weight_names

Array = jax.Array

# rows R, group sizes [G]; the last two groups are replicas
CASES = (
    (1000, (0, 517, 1, 0, 260, 128, 0)),
    (328, (0, 150, 1, 0, 70, 64, 0)),
)
REPLICAS = 2
ROUNDINGS = 16
# A product that two right kernels round to neighbours in bfloat16 may become neighbours in float8, 2^-3 apart: one in
# 2^4 of the hidden rows' entries, so a sum of them is 0.03 of its size off in root mean square, 0.2 at 6 deviations.
FLOAT8_LIMIT = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """What decides which kernel an expert FFN runs.

    Attributes:
      model_dim: M. hidden_dim: F, this device's part.
      dtype: of the rows; param_dtype: of the home experts' weights and gradients.
      activation: 'gelu' or 'swiglu'.
    """

    model_dim: int
    hidden_dim: int
    dtype: str
    param_dtype: str
    activation: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The entry that is furthest off.

    Attributes:
      what: 'output', 'gradient of the rows', or 'gradient of' a weight; index: its row, or its group.
      size: |got - want| / (|want| + root mean square of that row or that group's gradient); inf for what is not a
        number, or not zero where it must be.
      limit: the most that rounding explains.
    """

    what: str
    index: int
    size: float
    limit: float

    @property
    def explained(self) -> bool:
        return self.size <= self.limit

    def __str__(self) -> str:
        part = "row" if self.what in ("output", "gradient of the rows") else "group"
        return f"{self.what}, {part} {self.index}, is {self.size:.2g} of its size off, more than {self.limit:.2g}"


def rounding_limit(shape: ExpertShape, platform: str) -> float:
    """Return the largest `Difference.size` that rounding explains: 16 u + 16 sqrt(n) u32.

    u is half the distance from 1 to the next number of the dtype (2^-8 in bfloat16, 2^-11 in float16; float32 counts
    as TF32, 2^-11, on GPUs, whose matmuls round their operands so). On the longest path, to the gradient of `w_in`,
    values are rounded four times before the last matmul (pre-activation, hidden row or its gradient, gradient of the
    pre-activation) and once after it. A rounding is off by u / sqrt(3) at most in root mean square and not correlated
    from entry to entry, so four of them through matmuls give an error of 1.2 u of a row's size in root mean square,
    and 7 u at the 6 standard deviations that one in 10^9 entries passes; the last rounding adds u of the entry itself.
    16 u leaves a factor of two, and what a kernel gets wrong is off by about 1. A sum of n products in float32 (u32 =
    2^-24; float64 sums in its own) adds sqrt(n) u32 in root mean square.
    """
    dtype = jnp.dtype(shape.dtype)
    unit = float(jnp.finfo(dtype).eps) / 2
    if dtype == jnp.float32 and platform != "cpu":
        unit = 2.0**-11
    acc_unit = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps) / 2
    longest = max(shape.model_dim, shape.hidden_dim, CASES[0][0])
    return ROUNDINGS * (unit + longest**0.5 * acc_unit)


def compare_expert(implementation: str, shape: ExpertShape, device, compiler_options: dict | None = None) -> Difference:
    """Return how far an implementation is from plain matmuls, in the case and at the entry where it is furthest.

    Args:
      implementation: of the grouped matmul.
      device: that runs both.
      compiler_options: for both programs.

    Raises:
      whatever lowering, compiling or running the implementation raises.
    """
    limit = FLOAT8_LIMIT if implementation.startswith(PREFIX) else rounding_limit(shape, device.platform)
    found = []
    for rows, sizes in CASES:
        compute, plain, compare = programs(implementation, shape, rows, sizes, compiler_options or {})
        with jax.default_device(device):
            arrays = make_arrays(shape, rows, sizes)
            got = compute(jnp.array(sizes, jnp.int32), *arrays)
            off = jax.device_get(compare(got, plain(*arrays)))
        for name, per_index in off.items():
            index = int(np.argmax(per_index))
            found.append(Difference(what=name, index=index, size=float(per_index[index]), limit=limit))
    return max(found, key=lambda difference: difference.size)


def programs(implementation: str, shape: ExpertShape, rows: int, sizes: tuple[int, ...], options: dict):
    """Return (the implementation, plain matmuls, their comparison) of one case as compiled functions."""

    def compute(group_sizes, x, dout, homes, replicas):
        return _of_implementation(implementation, shape.activation, group_sizes, x, dout, homes, replicas)

    if implementation.startswith(PREFIX):  # rounding to float8 is no error of the kernel: it is emulated
        emulate = functools.partial(_of_implementation, PREFIX + "reference", shape.activation)
        plain = jax.jit(lambda *arrays: emulate(jnp.array(sizes, jnp.int32), *arrays), compiler_options=options)
    else:
        plain = _plain_program(shape, sizes, tuple(options.items()))
    return jax.jit(compute, compiler_options=options), plain, jax.jit(_compare)


@functools.cache
def _plain_program(shape: ExpertShape, sizes: tuple[int, ...], options: tuple):
    return jax.jit(functools.partial(_of_plain_matmuls, shape, sizes), compiler_options=dict(options))


def make_arrays(shape: ExpertShape, rows: int, sizes: tuple[int, ...]):
    """Return x [R, M], dout [R, M], and the weights [G, ...] of homes and replicas; entries are uniform, so bounded."""
    return _draw_program(shape, rows, sizes)(jax.random.key(0))


@functools.cache
def _draw_program(shape: ExpertShape, rows: int, sizes: tuple[int, ...]):
    def draw(key):
        keys = iter(jax.random.split(key, 10))

        def uniform(*dims, dtype, scale=1.0):
            bound = scale * 3.0**0.5
            return jax.random.uniform(next(keys), dims, jnp.float32, -bound, bound).astype(dtype)

        unowned = jnp.arange(rows)[:, None] >= sum(sizes)
        x, dout = (
            jnp.where(unowned, jnp.nan, uniform(rows, shape.model_dim, dtype=shape.dtype)).astype(shape.dtype)
            for _ in range(2)
        )
        homes, replicas = {}, {}
        for name in weight_names(shape.activation):
            dims = (shape.model_dim, shape.hidden_dim)
            dims = dims[::-1] if name == "w_out" else dims
            scale = dims[0] ** -0.5
            homes[name] = uniform(len(sizes) - REPLICAS, *dims, dtype=shape.param_dtype, scale=scale)
            replicas[name] = uniform(REPLICAS, *dims, dtype=shape.dtype, scale=scale)
        return x, dout, homes, replicas

    return jax.jit(draw)


def _of_implementation(implementation, activation, group_sizes, x, dout, homes, replicas):
    def operands(grad_sinks):
        served = {}
        for name in homes:
            count = homes[name].shape[0]
            backwards = jnp.arange(count - 1, -1, -1, dtype=jnp.int32)  # a bank's order is not the groups'
            served[name] = (
                GroupedWeights(bank=homes[name][::-1], slots=backwards, grad_sink=grad_sinks[0][name]),
                GroupedWeights(
                    bank=replicas[name], slots=jnp.arange(REPLICAS, dtype=jnp.int32), grad_sink=grad_sinks[1][name]
                ),
            )  # fmt: skip
        return served

    def ffn(x, grad_sinks):
        return expert_ffn(x, group_sizes, operands(grad_sinks), activation=activation, implementation=implementation)

    out, pull_back = jax.vjp(ffn, x, jax.tree.map(jnp.zeros_like, (homes, replicas)))
    dx, (dhomes, dreplicas) = pull_back(dout)
    return _named(out, dx, {name: (dhomes[name], dreplicas[name]) for name in homes})


def _of_plain_matmuls(shape, sizes, x, dout, homes, replicas):
    """Return the same by one matmul of float32 (or wider) for each group, without rounding in between."""
    dtype, acc_dtype = shape.dtype, jnp.promote_types(shape.dtype, jnp.float32)
    owned = sum(sizes)
    served = {
        name: jnp.concatenate([w.astype(dtype).astype(acc_dtype) for w in (homes[name], replicas[name])])
        for name in homes
    }

    def ffn(x, served):
        parts, start = [], 0
        for group, size in enumerate(sizes):
            own = x[start : start + size]
            pre = [own @ served[name][group] for name in weight_names(shape.activation)[:-1]]
            parts.append(apply_activation(shape.activation, *pre) @ served["w_out"][group])
            start += size
        return jnp.concatenate(parts)

    with jax.default_matmul_precision("highest"):
        out, pull_back = jax.vjp(ffn, x[:owned].astype(acc_dtype), served)
        dx, dserved = pull_back(dout[:owned].astype(acc_dtype))
    filled = lambda array: jnp.pad(array, ((0, x.shape[0] - owned), (0, 0)))  # noqa: E731
    return _named(filled(out), filled(dx), {name: (dserved[name],) for name in served})


def _named(out, dx, dweights):
    named = {"output": (out,), "gradient of the rows": (dx,)}
    return named | {f"gradient of {name}": parts for name, parts in dweights.items()}


def _compare(got, want):
    """Return {name: [R] or [G]}, the largest `Difference.size` of each row or group."""

    def join(parts, acc_dtype):
        return jnp.concatenate([part.astype(acc_dtype) for part in parts])

    def sizes(got, want):
        acc_dtype = want[0].dtype
        got, want = join(got, acc_dtype), join(want, acc_dtype)
        trailing = tuple(range(1, want.ndim))
        scale = jnp.abs(want) + jnp.sqrt(jnp.mean(jnp.square(want), axis=trailing, keepdims=True))
        off = jnp.where(got == want, 0, jnp.abs(got - want) / scale)
        return jnp.max(jnp.where(jnp.isnan(off), jnp.inf, off), axis=trailing)

    return {name: sizes(got[name], want[name]) for name in want}
