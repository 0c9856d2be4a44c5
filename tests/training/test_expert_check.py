"""The check of a grouped matmul on one expert FFN: rounding passes, and each error seen in kernels does not."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from moe_jax.kernels import grouped as contract
from moe_jax.kernels.blocked import RaggedMatmul, clear_unowned_rows, split_gradient
from moe_jax.kernels.grouped import register
from moe_jax.models.config import ModelConfig
from moe_jax.training import expert_check
from moe_jax.training.expert_check import CASES, compare_expert, draw_arrays, of_implementation, rounding_limit

SMALL = ModelConfig(model_dim=64, hidden_dim=128, dtype="bfloat16")
TILE = 64


def group_of_rows(group_sizes, rows):
    """Return [R], the group of each row, and [R], its place in the group."""
    stops = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(stops, jnp.arange(rows), side="right", method="compare_all")
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    return group, jnp.arange(rows) - (stops - group_sizes)[group]


def in_last_part_of_a_tile(group_sizes, rows):
    group, place = group_of_rows(group_sizes, rows)
    return (place >= group_sizes[group] // TILE * TILE)[:, None]


class DropsThePartTile(RaggedMatmul):
    """Rows after the last whole tile of a group stay zero."""

    def multiply(self, lhs, group_sizes, operands):
        out = super().multiply(lhs, group_sizes, operands)
        return jnp.where(in_last_part_of_a_tile(group_sizes, lhs.shape[0]), 0, out)


class LeaksUnownedRows(RaggedMatmul):
    """The gradient of the weights masks rows by multiplication, which keeps a NaN."""

    def gradients(self, lhs, dout, group_sizes, operands):
        dlhs, dweights = super().gradients(lhs, dout, group_sizes, operands)
        unowned = clear_unowned_rows(jnp.ones((lhs.shape[0], 1), lhs.dtype), group_sizes) == 0
        leak = jnp.sum(jnp.where(unowned, lhs, 0) * 0)
        return dlhs, tuple(dweight + leak.astype(dweight.dtype) for dweight in dweights)


class LeavesEmptyGroups(RaggedMatmul):
    """The gradient of an empty group's weights is what stood in memory."""

    def gradients(self, lhs, dout, group_sizes, operands):
        dlhs, dweights = super().gradients(lhs, dout, group_sizes, operands)
        stale = jnp.where(group_sizes == 0, 1e-3, 0)[:, None, None]
        parts = split_gradient(jnp.broadcast_to(stale, (*group_sizes.shape, *operands[0].bank.shape[1:])), operands)
        return dlhs, tuple(dweight + part for dweight, part in zip(dweights, parts, strict=True))


class UnalignedWeightGradient(RaggedMatmul):
    """The gradient of the weights reads whole tiles only: right for groups that a tile divides (marin #8339)."""

    def gradients(self, lhs, dout, group_sizes, operands):
        dlhs, _ = super().gradients(lhs, dout, group_sizes, operands)
        kept = jnp.where(in_last_part_of_a_tile(group_sizes, lhs.shape[0]), 0, dout)
        return dlhs, super().gradients(lhs, kept, group_sizes, operands)[1]


class LeavesUnownedRows(RaggedMatmul):
    """Rows that nobody owns are not zero on exit."""

    def multiply(self, lhs, group_sizes, operands):
        out = super().multiply(lhs, group_sizes, operands)
        return jnp.where(jnp.arange(out.shape[0])[:, None] < jnp.sum(group_sizes), out, jnp.array(1e-3, out.dtype))


SABOTEURS = (
    DropsThePartTile, LeaksUnownedRows, LeavesEmptyGroups, UnalignedWeightGradient, LeavesUnownedRows
)  # fmt: skip


@pytest.fixture
def registered(monkeypatch):
    """Return a function that registers an implementation for one test."""
    monkeypatch.setattr(contract, "_REGISTRY", dict(contract._REGISTRY))
    names = (f"saboteur {number}" for number in itertools.count())

    def add(implementation):
        name = next(names)
        register(name, implementation())
        return name

    return add


@pytest.mark.parametrize("saboteur", SABOTEURS, ids=lambda saboteur: saboteur.__name__)
def test_a_wrong_kernel_is_found(monkeypatch, registered, saboteur):
    monkeypatch.setattr(expert_check, "CASES", CASES[1:])  # one case tells, in half the time
    size, limit, where = compare_expert(registered(saboteur), SMALL, jax.devices()[0])
    assert size > 5 * limit and where.endswith(f"more than {limit:.2g}")
    if saboteur in (LeaksUnownedRows, LeavesEmptyGroups, UnalignedWeightGradient):
        assert where.startswith("gradient of w_")


@pytest.mark.parametrize("activation, dtype", [("gelu", "bfloat16"), ("swiglu", "bfloat16"), ("gelu", "float32")])
def test_rounding_passes(monkeypatch, activation, dtype):
    """The implementations that all other tests hold, at half of what rounding may explain."""
    monkeypatch.setattr(expert_check, "CASES", CASES[1:] if activation == "swiglu" else CASES[:1])
    config = dataclasses.replace(SMALL, dtype=dtype, activation=activation)
    for implementation in ("ragged", "blocked"):
        size, limit, where = compare_expert(implementation, config, jax.devices()[0])
        assert 0 < size < limit / 2, (implementation, where)


def test_the_limit_is_the_dtypes():
    wide = dataclasses.replace(SMALL, dtype="float32")
    assert rounding_limit(SMALL, "gpu") == pytest.approx(16 * 2**-8, rel=0.01)
    assert rounding_limit(wide, "gpu") == pytest.approx(16 * 2**-11, rel=0.01)  # TF32 rounds so
    assert rounding_limit(wide, "cpu") < 1e-4


@pytest.mark.parametrize("rows, sizes", CASES)
@pytest.mark.parametrize("kernels", ["hopper", "mosaic"])
def test_the_kernels_for_hopper_take_the_cases(kernels, rows, sizes):
    """No GPU here: what the check runs on one must lower for it."""
    arrays = jax.eval_shape(lambda: draw_arrays(SMALL, rows, sizes))
    counts = jax.ShapeDtypeStruct((len(sizes),), jnp.int32)
    traced = jax.jit(of_implementation, static_argnums=(0, 1)).trace(kernels, "gelu", counts, *arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 6  # two products forward, two gradients of each
