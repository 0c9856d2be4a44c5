"""Our kernels for Hopper on a CPU: the tile schedule against loops, the kernels themselves under Pallas' interpreter.

The interpreter runs the three warpgroups of a block as threads, one memory copy after the other, and fills memory that
nobody wrote, and reads past the end of an array, with NaN. What it does not show: whether copies that overlap on a GPU
would be in time. That is left to a GPU (scripts/gpu_day.py, training/expert_check.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from support.grouped_cases import as_operands, interpreted, loop_oracle, make_case

from moe_jax.analysis.compile_ahead import described_devices
from moe_jax.cluster.targets import parse_target
from moe_jax.kernels.grouped import GroupedWeights, find_implementation
from moe_jax.kernels.mosaic_kernels import parts_of, row_tiles, rows_by_rows

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


def test_few_large_gradients_are_cut_into_parts():
    """49,152 rows of 2 groups make 72 tiles for 132 cores; 64 groups make 2,304."""
    assert parts_of(24576, 2, 768, 1536, 132) > 1
    assert parts_of(512, 64, 768, 1536, 132) == 1
    assert parts_of(256, 128, 2048, 768, 132) == 1


# R is no multiple of 8; groups of one row, of none, across tiles, that end where a tile ends; unowned rows are NaN.
# K has an odd number of halves, so the last tile of a weight's gradient is half a tile. And nothing at all.
@pytest.mark.parametrize(
    "rows, sizes, contracted, resulting, implementation",
    [
        (221, (70, 0, 1, 58, 64), 192, 64, "mosaic"),
        pytest.param(9, (0, 0), 64, 64, "mosaic_sparing", marks=pytest.mark.slow),
    ],
)
def test_kernels_equal_loops(rows, sizes, contracted, resulting, implementation, monkeypatch):
    case = {"contracted": contracted, "resulting": resulting, "dtype": jnp.bfloat16, "counts": (len(sizes) - 1, 1)}
    lhs, group_sizes, dout, weights = make_case(rows, sizes, **case)
    operands, ours = as_operands(weights, (jnp.float32, jnp.bfloat16)), interpreted(implementation, monkeypatch)
    arguments = jnp.asarray(lhs), jnp.asarray(dout), jnp.asarray(group_sizes)
    out = ours.multiply(arguments[0], arguments[2], operands)
    dlhs, dweights = ours.gradients(*arguments, operands)
    assert out.dtype == dlhs.dtype == jnp.bfloat16 and [d.dtype for d in dweights] == [jnp.float32, jnp.bfloat16]

    wide = [(bank.astype(np.float64), slots) for bank, slots in weights]
    parts = loop_oracle(lhs.astype(np.float64), group_sizes, dout.astype(np.float64), wide)
    np.testing.assert_allclose(np.asarray(out, np.float64), parts[0], atol=0.004 * max(1, np.abs(parts[0]).max()))
    np.testing.assert_allclose(np.asarray(dlhs, np.float64), parts[1], atol=0.004 * max(1, np.abs(parts[1]).max()))
    np.testing.assert_allclose(dweights[0], parts[2][:-1], atol=1e-4)  # float32 sums of 70 products, never rounded
    np.testing.assert_allclose(np.asarray(dweights[1], np.float64), parts[2][-1:], rtol=0.004, atol=1e-4)


def test_parts_of_a_group_add_up(monkeypatch):
    """A group's rows, cut into three; a range of groups whose gradient nobody wants is left out."""
    rng = np.random.default_rng(1)
    sizes = (9, 200, 5)
    lhs, dout = (jnp.asarray(rng.normal(size=(216, 64)), jnp.bfloat16) for _ in range(2))
    (sums,) = rows_by_rows(
        lhs, dout, jnp.asarray(sizes, jnp.int32), [(1, 3, jnp.float32)], parts=3, cores=2,
        interpret=interpreted("mosaic", monkeypatch).interpret,
    )  # fmt: skip
    assert sums.shape == (2, 64, 64)
    lhs, dout = np.asarray(lhs, np.float32), np.asarray(dout, np.float32)
    for group, own in enumerate((slice(9, 209), slice(209, 214))):
        np.testing.assert_allclose(sums[group], lhs[own].T @ dout[own], atol=1e-4)


SHAPES = {
    "64 experts": ("mosaic", 32768, 768, 1536, (64,)),
    "2 experts": ("mosaic", 49152, 768, 1536, (2,)),
    "2 experts, 1 and 3 replicas": ("mosaic", 49152, 768, 1536, (2, 1, 3)),
    "Qwen3-30B's experts": ("mosaic", 32768, 2048, 768, (128,)),
    "odd halves, any rows": ("mosaic", 1003, 192, 320, (5,)),
    "64 experts in float8": ("float8:mosaic", 32768, 768, 1536, (64,)),  # forward and d-rows alone are in float8
}


@pytest.mark.gpu_compile
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compile_down_to_machine_code(shape, tmp_path, monkeypatch):
    """No register is spilled, and no multiplication waits for the one before it, as the assembler would say.

    h100 and h200 run the same machine code, and what is compiled for one the process keeps for the other.
    """
    for name, value in {"DUMP_PTXAS": "1", "DUMP_PTX": "1", "DUMP_TO": str(tmp_path)}.items():
        monkeypatch.setenv(f"MOSAIC_GPU_{name}", value)
    temporaries = [compile_for(device, *SHAPES[shape]).temp_size_in_bytes for device in ("h100", "h200")]
    said = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    for text in said:
        assert "0 bytes spill stores, 0 bytes spill loads" in text and "serialized" not in text
    implementation, rows, contracted, resulting, counts = SHAPES[shape]
    if implementation != "mosaic":
        assert said and all("m64n128k32.f32.e4m3.e4m3" in path.read_text() for path in tmp_path.glob("*.ptx"))
        return
    assert len(said) == 3
    if rows % 8 == 0:  # a bank is read where it lies: temporaries are tables, and sums over parts of a group's rows
        parts = 4 * parts_of(rows / sum(counts), sum(counts), contracted, resulting, 132)
        partial = parts * sum(counts) * contracted * resulting if parts > 4 else 0
        assert max(temporaries) < partial + 100_000


def compile_for(device, implementation, rows, contracted, resulting, counts):
    """Return the memory analysis of one matmul and its gradients, with operands that serve `counts` groups."""
    sharding = SingleDeviceSharding(described_devices(parse_target(f"{device}:1x1"))[0])

    def array(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def step(lhs, dout, group_sizes, banks, slots):
        operands = tuple(
            GroupedWeights(bank=b, slots=s, grad_sink=jax.ShapeDtypeStruct((len(s), *b.shape[1:]), jnp.float32))
            for b, s in zip(banks, slots, strict=True)
        )
        ours = find_implementation(implementation)
        dlhs, dweights = ours.gradients(lhs, dout, group_sizes, operands)
        return ours.multiply(lhs, group_sizes, operands), dlhs, dweights if implementation == "mosaic" else ()

    banks = [array(count + 3, contracted, resulting) for count in counts]
    slots = [array(count, dtype=jnp.int32) for count in counts]
    sizes = array(sum(counts), dtype=jnp.int32)
    compiled = jax.jit(step).lower(array(rows, contracted), array(rows, resulting), sizes, banks, slots).compile()
    assert compiled.as_text().count("custom-call(") >= 2
    return compiled.memory_analysis()
