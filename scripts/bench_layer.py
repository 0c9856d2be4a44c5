"""Time one MoE layer, forward and backward, against a dense feed-forward layer of equal FLOPs.

What it says: how much a dropless layer (gate, sort, dispatch, grouped matmuls, combine, all gradients) costs over the
matmuls alone. The dense layer multiplies K x tokens rows by two matrices with a GELU between, in the same run,
interleaved; the ratio is that of the medians. Its ceiling is the machine's matmul rate, printed next to it; with few
rows per expert the weights' own traffic is what is left. Routing is uniform at random, as a fresh gate makes it.

    python scripts/bench_layer.py --experts=64 --top_k=2 --tokens=2048 --model_dim=512 --hidden_dim=1024

Runs on one device: a CPU, or a GPU where jax finds one. It needs no gin.
"""

from __future__ import annotations

import functools
import json
import statistics
import time

from absl import app, flags

_EXPERTS = flags.DEFINE_integer("experts", 64, "E.")
_TOP_K = flags.DEFINE_integer("top_k", 2, "K.")
_TOKENS = flags.DEFINE_integer("tokens", 2048, "Tokens.")
_MODEL_DIM = flags.DEFINE_integer("model_dim", 512, "M.")
_HIDDEN_DIM = flags.DEFINE_integer("hidden_dim", 1024, "F.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Compute dtype.")
_IMPLEMENTATION = flags.DEFINE_string("implementation", "auto", "Grouped matmul; see moe_jax.moe.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Interleaved rounds.", lower_bound=2)  # quartiles need two


def moe_case(dtype):
    """Return (jitted gradient, arguments, choices per expert) of the layer on one device."""
    import jax
    import jax.numpy as jnp

    from moe_jax.moe import MoEConfig, make_moe
    from moe_jax.moe.bank import init_bank, init_expert, open_grad_sink, with_grad_sink
    from moe_jax.moe.routers import RouterInputs
    from moe_jax.moe.routing import even_tables, local
    from moe_jax.parallel.mesh import MeshConfig, build_mesh

    experts, tokens, dim, hidden = _EXPERTS.value, _TOKENS.value, _MODEL_DIM.value, _HIDDEN_DIM.value
    roles = build_mesh(MeshConfig(), jax.devices()[:1])
    config = MoEConfig(num_experts=experts, top_k=_TOP_K.value, grouped_matmul=_IMPLEMENTATION.value)
    sizes = {"model_dim": dim, "hidden_dim": hidden, "activation": "gelu", "dtype": jnp.float32}
    make = functools.partial(init_expert, **sizes)
    bank = jax.jit(lambda key: init_bank(make, key, 1, experts, 1))(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (tokens, dim), dtype)
    w_gate = jax.random.normal(jax.random.key(2), (dim, experts)) * dim**-0.5
    tables = jax.tree.map(jnp.asarray, local(even_tables(1, experts, 1)))
    layer = jax.tree.map(lambda array: array[0], tables)

    def loss(x, w_gate, bank, cotangent):
        held, grad_sink = with_grad_sink(bank)
        held = {name: value.astype(dtype) for name, value in held.items()}
        grad_sink, _ = open_grad_sink(grad_sink, tables.home_row[0])
        ids = jnp.arange(tokens, dtype=jnp.int32)
        y, stats, _ = make_moe(config, roles, x, "gelu")(x, w_gate, RouterInputs(None, ids, layer), held, grad_sink)
        return jnp.sum((y * cotangent).astype(jnp.float32)), stats.counts

    gradient = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    arguments = (x, w_gate, bank, jnp.ones_like(x))
    return gradient, arguments, gradient(*arguments)[1]


def dense_case(dtype):
    """Return (jitted gradient, arguments) of a dense FFN on K x tokens rows."""
    import jax
    import jax.numpy as jnp

    rows, dim, hidden = _TOP_K.value * _TOKENS.value, _MODEL_DIM.value, _HIDDEN_DIM.value
    x = jax.random.normal(jax.random.key(1), (rows, dim), dtype)
    weights = [
        jax.random.normal(jax.random.key(2), (dim, hidden)) * dim**-0.5,
        jax.random.normal(jax.random.key(3), (hidden, dim)) * hidden**-0.5,
    ]

    def loss(x, weights, cotangent):
        w_in, w_out = (w.astype(dtype) for w in weights)
        return jnp.sum((jax.nn.gelu(x @ w_in) @ w_out * cotangent).astype(jnp.float32))

    return jax.jit(jax.grad(loss, (0, 1))), (x, weights, jnp.ones_like(x))


def measure() -> dict:
    """Return what was measured at the sizes of the flags."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from moe_jax.kernels.blocked import choose_heights, rows_computed
    from moe_jax.kernels.grouped import choose_implementation

    dtype = jnp.dtype(_DTYPE.value)
    moe, moe_arguments, counts = moe_case(dtype)
    dense, dense_arguments = dense_case(dtype)
    cases = {"moe": (moe, moe_arguments), "dense": (dense, dense_arguments)}
    times, temporaries = {name: [] for name in cases}, {}
    for name, (function, arguments) in cases.items():
        analysis = function.lower(*arguments).compile().memory_analysis()
        temporaries[name] = None if analysis is None else int(analysis.temp_size_in_bytes)
        jax.block_until_ready(function(*arguments))
    for _ in range(_ROUNDS.value):
        for name, (function, arguments) in cases.items():
            started = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    device, rows, sizes = jax.devices()[0], _TOP_K.value * _TOKENS.value, (_MODEL_DIM.value, _HIDDEN_DIM.value)
    name, executed = choose_implementation(_IMPLEMENTATION.value, device, dtype, sizes), None
    if name == "fused":  # it tells what it computes besides the rows that there are
        heights = choose_heights(rows, _EXPERTS.value, sizes[0] * sizes[1])
        executed = float(rows_computed(np.asarray(counts), heights) / rows)
    return {
        "ratio_over_dense": medians["moe"] / medians["dense"],
        "moe_seconds": medians["moe"],
        "dense_seconds": medians["dense"],
        "moe_quartiles": statistics.quantiles(times["moe"], n=4),
        "dense_quartiles": statistics.quantiles(times["dense"], n=4),
        "useful_flops": 3 * 2 * 2 * rows * sizes[0] * sizes[1],
        "flops_over_useful": executed,
        "dense_flops_over_useful": 1.0,
        "moe_temp_bytes": temporaries["moe"],
        "dense_temp_bytes": temporaries["dense"],
        "most_choices_of_one_expert": int(counts.max()),
        "implementation": name,
        "experts": _EXPERTS.value,
        "top_k": _TOP_K.value,
        "tokens": _TOKENS.value,
        "model_dim": _MODEL_DIM.value,
        "hidden_dim": _HIDDEN_DIM.value,
        "dtype": _DTYPE.value,
        "device": f"{device.platform} {device.device_kind}",
        "jax": jax.__version__,
        "rounds": _ROUNDS.value,
    }


def main(_):
    result = measure()
    flops, medians = result["useful_flops"], {case: result[f"{case}_seconds"] for case in ("moe", "dense")}
    print(f"{'':8s} {'seconds':>10s} {'GFLOP/s':>10s} {'temp MB':>10s} {'FLOPs/useful':>13s}")
    for case in ("moe", "dense"):
        rate = flops / medians[case] / 1e9
        temp = (result[f"{case}_temp_bytes"] or 0) / 1e6
        executed = result["flops_over_useful"] if case == "moe" else 1.0
        shown = "-" if executed is None else f"{executed:.2f}"
        print(f"{case:8s} {medians[case]:10.4f} {rate:10.1f} {temp:10.1f} {shown:>13s}")
    print(f"ratio over dense {result['ratio_over_dense']:.2f}, forward and backward, medians of {_ROUNDS.value} rounds")
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
