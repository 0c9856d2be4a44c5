"""Every grouped matmul against loops in NumPy, forward and backward, whatever the groups look like."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.grouped_cases import as_operands, loop_oracle, make_case

from moe_jax.errors import UserError
from moe_jax.kernels.grouped import MATMULS, GroupedWeights, choose_implementation, grouped_matmul

ON_CPU = ("fused", "ragged", "reference")

# rows, group sizes: balanced; empty ones, first, last and in between; one that owns all; a tail that nobody owns;
# nothing at all; groups beyond the highest block, so that full blocks and a tail share one group
SIZES = {
    "balanced": (24, [6, 6, 6, 6]),
    "empty": (24, [0, 13, 0, 11, 0]),
    "one_owns_all": (40, [0, 40, 0]),
    "lone_group": (20, [13]),
    "unowned_tail": (37, [5, 0, 9, 3]),
    "nothing": (16, [0, 0, 0]),
    "single_rows": (16, [1, 1, 0, 1, 13]),
    "beyond_a_block": (1300, [3, 1100, 0, 60, 130]),
}


def run(implementation, lhs, group_sizes, dout, weights, sink_dtype):
    """Return out, dlhs, dW of each operand (None without a grad_sink) and the banks' gradients of `implementation`."""

    @jax.jit
    def both(lhs, grad_sinks, banks, dout):
        def out_of(lhs, grad_sinks, banks):
            operands = as_operands([(b, s) for b, (_, s) in zip(banks, weights, strict=True)], grad_sinks)
            return grouped_matmul(lhs, jnp.asarray(group_sizes), operands, implementation=implementation)

        out, pull_back = jax.vjp(out_of, lhs, grad_sinks, banks)
        return out, *pull_back(dout)

    sinks = [sink_dtype and jnp.zeros((len(slots), *bank.shape[1:]), sink_dtype) for bank, slots in weights]
    return both(lhs, sinks, [jnp.asarray(bank) for bank, _ in weights], dout)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("implementation", ON_CPU)
def test_grouped_matmul_float64(implementation, name):
    groups = len(SIZES[name][1])
    with jax.enable_x64(True):
        case = make_case(*SIZES[name], counts=[groups - groups // 2, groups // 2] if groups > 1 else [1])
        out, dlhs, dweights, dbanks = run(implementation, *case, jnp.float64)
        for mine, wanted in zip((out, dlhs, jnp.concatenate(dweights)), loop_oracle(*case), strict=True):
            assert mine.dtype == jnp.float64
            np.testing.assert_allclose(mine, wanted, rtol=1e-12, atol=1e-12)  # sums of at most 1100 products
        assert not any(dbank.any() for dbank in dbanks)


F32, BF16 = "float32", "bfloat16"


@pytest.mark.parametrize("rows, bank, sink", [(F32, F32, F32), (BF16, BF16, BF16), (BF16, F32, F32), (F32, F32, None)])
@pytest.mark.parametrize("implementation", ON_CPU)
def test_grouped_matmul_dtypes(implementation, rows, bank, sink):
    """A bank is cast as it is read; the gradient of weights is as wide as the grad_sink, and not formed without one."""
    lhs, group_sizes, dout, weights = make_case(*SIZES["unowned_tail"], contracted=32, resulting=16, dtype=bank)
    lhs, dout = lhs.astype(rows), dout.astype(rows)
    *got, (dweight,), _ = run(implementation, lhs, group_sizes, dout, weights, sink)
    wide = [array.astype(rows).astype(np.float64) for array in (lhs, dout, weights[0][0])]
    exact = loop_oracle(wide[0], group_sizes, wide[1], [(wide[2], weights[0][1])])
    got = [(mine, rows) for mine in got] + ([] if sink is None else [(dweight, sink)])
    for (mine, dtype), wanted in zip(got, exact[: len(got)], strict=True):
        assert mine.dtype == dtype
        tolerance = {F32: 1e-5, BF16: 2e-2}[dtype]
        np.testing.assert_allclose(np.asarray(mine, np.float64), wanted, atol=tolerance * np.abs(wanted).max())


def test_kernels_lower_for_cuda(rows=8 * 1003):
    """No GPU here: both gradients must lower inside `shard_map` with typed outputs; banks are copied over `data`."""

    def body(lhs, dout, group_sizes, bank, slots, grad_sink):
        def loss(lhs, grad_sink):
            operands = (GroupedWeights(bank=bank, slots=slots, grad_sink=grad_sink),)
            return jnp.sum(grouped_matmul(lhs, group_sizes, operands, implementation="hopper") * dout)

        return jax.grad(loss, (0, 1))(lhs, grad_sink)

    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    everywhere, by_expert = P(("data", "expert")), P("expert")
    specs = {"in_specs": (everywhere,) * 3 + (by_expert,) * 3, "out_specs": (everywhere, by_expert)}
    step = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
    shapes = ((rows, 128), BF16), ((rows, 256), BF16), ((16,), "int32"), ((20, 128, 256), BF16), ((8,), "int32")
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in (*shapes, ((8, 128, 256), F32))]
    text = step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2  # the loss needs no forward product: its two gradients
    assert text.count("stablehlo.all_reduce") == 1


def test_registry():
    names = ("fused", "hopper", "ragged", "reference")
    assert tuple(sorted(MATMULS)) == names
    cpu, tpu = (types.SimpleNamespace(platform=name) for name in ("cpu", "tpu"))
    hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    fits = jnp.bfloat16, (128, 256)
    cases = [(cpu, *fits, "fused"), (tpu, *fits, "ragged"), (hopper, *fits, "hopper")]
    cases += [(hopper, jnp.float32, (128, 256), "fused"), (hopper, jnp.bfloat16, (128, 100), "fused")]
    for capability in ("7.5", "8.9", "10.0", "12.0"):  # Turing, Ada, Blackwell
        cases.append((types.SimpleNamespace(platform="gpu", compute_capability=capability), *fits, "fused"))
    for *device, wanted in cases:
        assert choose_implementation("auto", *device) == wanted
    assert choose_implementation("fused", hopper, *fits) == "fused"
    assert [choose_implementation("hopper", device, *fits) for device in (hopper, None)] == ["hopper", "hopper"]
    with pytest.raises(UserError, match=r"\('hopper'\) needs a GPU of compute capability 9.0, not cpu; set MoEConfig"):
        choose_implementation("hopper", cpu, *fits)
    with pytest.raises(AssertionError, match="'ragged' is registered twice"):
        MATMULS.register("ragged")(object)


TILES = r"dims \(8, 6\) are multiples of 64; choose such sizes, or MoEConfig"


@pytest.mark.parametrize(
    ("implementation", "dims", "dtype", "groups", "sink", "message"),
    [
        ("fast", (8, 6), F32, 4, None, r"grouped_matmul \('fast'\) must be one of fused, hopper"),
        ("fused", (8, 6), F32, 3, None, "serve 4 groups and group_sizes has 3"),
        ("fused", (8, 6), F32, 4, (7, 8, 6), r"grad_sink \(7, 8, 6\) must be \(4, 8, 6\)"),
        ("hopper", (8, 6), BF16, 4, None, TILES),
        ("hopper", (128, 128), F32, 4, None, "or float16, not float32"),
    ],
)
def test_what_does_not_fit_is_refused(implementation, dims, dtype, groups, sink, message):
    lhs, group_sizes, _, weights = make_case(24, [6] * 4, contracted=dims[0], resulting=dims[1], dtype=dtype)
    operands = as_operands(weights, [None if sink is None else jnp.zeros(sink)])
    with pytest.raises(ValueError, match=message):
        grouped_matmul(lhs, group_sizes[:groups], operands, implementation=implementation)
