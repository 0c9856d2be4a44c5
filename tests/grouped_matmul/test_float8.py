"""Experts in float8: the emulation and our kernel against loops; the kernel is interpreted, and compiled for Hopper."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from moe_jax.analysis.compile_ahead import described_devices
from moe_jax.cluster.targets import parse_target
from moe_jax.errors import UserError
from moe_jax.kernels.float8 import quantise
from moe_jax.kernels.grouped import (
    GroupedWeights,
    choose_implementation,
    find_implementation,
    grouped_matmul,
    implementations,
)
from moe_jax.models.config import ModelConfig
from moe_jax.training.expert_check import compare_expert

# R is no multiple of 8; groups of one row, of none, across tiles, that end where a tile ends; unowned rows are NaN
ROWS, SIZES, CONTRACTED, RESULTING = 221, (70, 0, 1, 58, 64), 256, 128


def make_case(dtype):
    """Return lhs, dout, operands of homes and one replica; their banks hold more than the groups."""
    rng = np.random.default_rng(0)
    lhs, dout = (rng.normal(size=(ROWS, size)) for size in (CONTRACTED, RESULTING))
    lhs[sum(SIZES) :], dout[sum(SIZES) :] = np.nan, np.nan
    operands = []
    for count in (len(SIZES) - 1, 1):
        bank = jnp.asarray(rng.normal(size=(count + 2, CONTRACTED, RESULTING)), dtype)
        slots = jnp.asarray(rng.permutation(count + 2)[:count], jnp.int32)
        operands.append(GroupedWeights(bank=bank, slots=slots, grad_sink=jnp.zeros((count, *bank.shape[1:]))))
    return jnp.asarray(lhs, dtype), jnp.asarray(dout, dtype), tuple(operands)


def by_loops(lhs, dout, operands):
    """Return (out, dlhs, dweights) in float64: blocks of 128 multiplied as integers of e4m3 are, scaled, added up."""

    def multiply(rows, weights, row_scales, weight_scales):  # weights [K, N], scales [R, K / 128], [K / 128, N / 128]
        total = np.zeros((rows.shape[0], weights.shape[1]))
        for k in range(row_scales.shape[1]):
            cut = slice(128 * k, 128 * k + 128)
            scales = row_scales[:, k, None] * np.repeat(weight_scales[k], 128)[None]
            total += rows[:, cut] @ weights[cut] * scales
        return total

    as_float64 = lambda pair: [np.asarray(array, np.float64) for array in pair]  # noqa: E731
    weights = jnp.concatenate([operand.bank[operand.slots] for operand in operands])
    (rows, scales), (douts, dscales) = as_float64(quantise(lhs)), as_float64(quantise(dout))
    values, weight_scales = as_float64(quantise(weights))
    found = [np.zeros((ROWS, RESULTING)), np.zeros((ROWS, CONTRACTED)), np.zeros(values.shape)]
    start = 0
    for g, size in enumerate(SIZES):
        own = slice(start, start + size)
        found[0][own] = multiply(rows[own], values[g], scales[own], weight_scales[g])
        found[1][own] = multiply(douts[own], values[g].T, dscales[own], weight_scales[g].T)
        found[2][g] = np.asarray(lhs, np.float64)[own].T @ np.asarray(dout, np.float64)[own]
        start += size
    return found


@pytest.fixture
def interpreted(monkeypatch):
    interpreter = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    parameters = interpreter.InterpretGPUParams(out_of_bounds_reads="uninitialized_value")
    monkeypatch.setattr(find_implementation("mosaic"), "interpret", parameters)


@pytest.mark.parametrize(
    ("below", "dtype", "x64"),
    [
        ("fused", jnp.float64, True),
        ("ragged", jnp.float32, False),
        pytest.param("mosaic", jnp.bfloat16, False, marks=pytest.mark.slow),  # the test below always runs this kernel
    ],
)
def test_equals_loops(below, dtype, x64, interpreted):
    with jax.enable_x64(x64):
        lhs, dout, operands = make_case(dtype)
        sizes = jnp.asarray(SIZES, jnp.int32)

        def run(lhs, dout, operands):
            out, pull = jax.vjp(lambda lhs, ops: grouped_matmul(lhs, sizes, ops, implementation=f"float8:{below}"),
                                lhs, operands)  # fmt: skip
            return out, *pull(dout)

        run = run if below == "mosaic" else jax.jit(run)
        out, dlhs, dops = run(lhs, dout, operands)
        got = out, dlhs, jnp.concatenate([operand.grad_sink for operand in dops])
        assert out.dtype == dlhs.dtype == dtype
        error = {jnp.float64: 1e-12, jnp.float32: 1e-5, jnp.bfloat16: 0.004}[dtype]
        for array, want in zip(got, by_loops(lhs, dout, operands), strict=True):
            np.testing.assert_allclose(np.asarray(array, np.float64), want, atol=error * np.abs(want).max())


def test_kernel_adds_what_the_emulation_adds(interpreted):
    """Sums of few bits are exact in any order, so there the kernel and the emulation are bit-equal."""
    rng = np.random.default_rng(1)
    sizes = jnp.asarray((40, 90), jnp.int32)
    rows = jnp.asarray(rng.integers(-8, 9, size=(136, 256)) * np.exp2(rng.integers(-3, 4, size=(136, 1))), jnp.bfloat16)
    bank = jnp.asarray(rng.integers(-4, 5, size=(2, 256, 128)), jnp.bfloat16)
    operands = (GroupedWeights(bank=bank, slots=jnp.arange(2, dtype=jnp.int32)),)
    ours, emulated = (find_implementation(f"float8:{name}").multiply(rows, sizes, operands)
                      for name in ("mosaic", "reference"))  # fmt: skip
    np.testing.assert_array_equal(ours, emulated)


def test_what_nobody_names_and_what_is_refused():
    assert not any(":" in name for name in implementations())
    cpu = jax.devices()[0]
    assert choose_implementation("auto", cpu, jnp.dtype("bfloat16"), (128, 256), True) == "float8:fused"
    hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    for dims, name in (((768, 1536), "mosaic"), ((768, 64), "hopper")):
        assert choose_implementation("auto", hopper, jnp.dtype("bfloat16"), dims, True) == f"float8:{name}"
    assert choose_implementation("hopper", None, jnp.dtype("bfloat16"), (128, 128), True) == "float8:hopper"
    operands = (GroupedWeights(bank=jnp.zeros((1, 192, 64)), slots=jnp.zeros(1, jnp.int32)),)
    with pytest.raises(UserError, match=r"the contracted dim \(192\) of at most 128 or a multiple"):
        grouped_matmul(jnp.zeros((8, 192)), jnp.ones(1, jnp.int32), operands, implementation="float8:fused")
    operands = (GroupedWeights(bank=jnp.zeros((1, 64, 64)), slots=jnp.zeros(1, jnp.int32)),)
    with pytest.raises(UserError, match="the mosaic grouped matmul of float8 needs weights whose dims .* multiples of"):
        grouped_matmul(jnp.zeros((8, 64)), jnp.ones(1, jnp.int32), operands, implementation="float8:mosaic")


@pytest.mark.slow
def test_first_step_check_takes_rounding_to_float8_for_right():
    config = ModelConfig(model_dim=64, hidden_dim=128, dtype="bfloat16", activation="swiglu")
    size, limit, _ = compare_expert("float8:ragged", config, jax.devices()[0])
    assert size <= limit


@pytest.mark.gpu_compile
def test_kernel_compiles_down_to_machine_code(tmp_path, monkeypatch):
    """Tensor cores multiply e4m3, no register is spilled, no multiplication is serialized; forward and d-rows."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    for device in ("h100", "h200"):
        sharding = SingleDeviceSharding(described_devices(parse_target(f"{device}:1x1"))[0])
        array = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)  # noqa: E731, B023

        def step(lhs, dout, sizes, bank, slots):
            operands = (GroupedWeights(bank=bank, slots=slots),)
            ours = find_implementation("float8:mosaic")
            return ours.multiply(lhs, sizes, operands), ours.gradients(lhs, dout, sizes, operands)[0]

        rows = array(32768, 768), array(32768, 1536)
        slots = array(64, dtype=jnp.int32)
        compiled = jax.jit(step).lower(*rows, slots, array(70, 768, 1536), slots).compile()
        assert compiled.as_text().count("custom-call(") >= 2
    said = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert said and all("0 bytes spill stores, 0 bytes spill loads" in t and "serialized" not in t for t in said)
    assert all("m64n128k32.f32.e4m3.e4m3" in path.read_text() for path in tmp_path.glob("*.ptx"))
