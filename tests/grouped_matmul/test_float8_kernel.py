"""Our kernel of e4m3 numbers for Hopper on a CPU: its tiles against loops, itself under Pallas' interpreter.

The interpreter runs the three warpgroups of a block as threads, one memory copy after the other, and fills memory that
nobody wrote, and reads past the end of an array, with NaN. What it does not show: whether copies that overlap on a GPU
would be in time. That is left to a GPU (scripts/gpu_day.py, training/expert_check.py).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from moe_jax.analysis.compile_ahead import described_devices
from moe_jax.cluster.targets import parse_target
from moe_jax.kernels.float8_kernel import row_tiles
from moe_jax.kernels.grouped import GroupedWeights, find_implementation

SCHEDULES = {
    "uneven": (1000, [3, 480, 60, 130, 5, 200, 40, 30]),
    "empty": (24, [0, 13, 0, 11, 0]),
    "one_owns_all": (640, [0, 640, 0]),
    "one_row_each": (72, [1] * 9),
    "nothing": (136, [0, 0]),
    "aligned": (512, [128, 256, 64]),
    "most_tiles": (8 * 130 + 8, [129] * 8),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_row_is_in_one_tile_of_its_owner(name, height=128):
    rows, sizes = SCHEDULES[name]
    owner = np.repeat(np.arange(len(sizes) + 1), [*sizes, rows - sum(sizes)])
    table = np.asarray(jax.jit(row_tiles, static_argnums=(1, 2))(jnp.asarray(sizes, jnp.int32), rows, height))
    assert table.shape[0] == 4 and table.dtype == np.int32
    seen = np.zeros(rows, int)
    for group, start, first, stop in table.T:
        if first == stop:
            continue
        assert start % 8 == 0 and start <= first < stop <= start + height and first - start < 8
        assert np.all(owner[first:stop] == group)
        seen[first:stop] += 1
    assert np.all(seen == 1)
    used = int(np.sum(table[2] < table[3]))
    assert used <= sum(-(-(size + 7) // height) for size in [*sizes, rows - sum(sizes)] if size)


# R is no multiple of 8; groups of one row, of none, across tiles, that end where a tile ends; unowned rows are NaN
@pytest.mark.parametrize("transposed", [False, True])
def test_kernel_adds_what_the_emulation_adds(transposed, monkeypatch, rows=221, sizes=(70, 0, 1, 58, 64)):
    """Sums of few bits are exact in any order, so the kernel and the emulation are bit-equal."""
    interpreter = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    parameters = interpreter.InterpretGPUParams(out_of_bounds_reads="uninitialized_value")
    monkeypatch.setattr(find_implementation("hopper"), "interpret", parameters)
    rng = np.random.default_rng(1)
    lhs = rng.integers(-8, 9, size=(rows, 256)) * np.exp2(rng.integers(-3, 4, size=(rows, 1)))
    lhs[sum(sizes) :] = np.nan
    bank = rng.integers(-4, 5, size=(6, 128, 256) if transposed else (6, 256, 128))
    operands = (GroupedWeights(bank=jnp.asarray(bank, jnp.bfloat16), slots=jnp.asarray((5, 0, 2, 1, 4), jnp.int32)),)
    arguments = jnp.asarray(lhs, jnp.bfloat16), jnp.asarray(sizes, jnp.int32), operands, transposed
    ours = find_implementation("float8:hopper").multiply(*arguments)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours, find_implementation("float8:reference").multiply(*arguments))


SHAPES = {"64 experts": (32768, 768, 1536, 64), "2 experts": (49152, 768, 1536, 2), "any rows": (1003, 256, 384, 5)}


@pytest.mark.gpu_compile
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_compiles_down_to_machine_code(shape, tmp_path, monkeypatch):
    """No register is spilled, and no multiplication waits for the one before it, as the assembler would say."""
    for name, value in {"DUMP_PTXAS": "1", "DUMP_PTX": "1", "DUMP_TO": str(tmp_path)}.items():
        monkeypatch.setenv(f"MOSAIC_GPU_{name}", value)
    rows, contracted, resulting, groups = SHAPES[shape]
    sharding = SingleDeviceSharding(described_devices(parse_target("h100:1x1"))[0])

    def array(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def step(lhs, dout, group_sizes, bank, slots):
        operands = (GroupedWeights(bank=bank, slots=slots),)
        ours = find_implementation("float8:hopper")
        return ours.multiply(lhs, group_sizes, operands), ours.gradients(lhs, dout, group_sizes, operands)[0]

    index = functools.partial(array, groups, dtype=jnp.int32)
    arguments = array(rows, contracted), array(rows, resulting), index(), array(groups + 3, contracted, resulting)
    compiled = jax.jit(step).lower(*arguments, index()).compile()
    assert compiled.as_text().count("custom-call(") >= 2
    said = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert said and all("m64n128k32.f32.e4m3.e4m3" in path.read_text() for path in tmp_path.glob("*.ptx"))
    assert all("0 bytes spill stores, 0 bytes spill loads" in text and "serialized" not in text for text in said)
