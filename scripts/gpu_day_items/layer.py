"""Item 9: one MoE layer over a dense FFN of equal FLOPs (scripts/bench_layer.py), and what TF32 rounds away."""

from __future__ import annotations

from gpu_day_items.context import seconds_of, shown

# (experts, top_k, tokens, model_dim, hidden_dim): the rows of the README, then the layer of GPT-MoE-S
ROWS = ((8, 2, 2048, 512, 1024), (64, 2, 2048, 512, 1024), (64, 8, 2048, 512, 1024), (64, 2, 16384, 768, 1536))
TINY_ROWS = ((4, 2, 64, 64, 64),)


def measure(context, dtype: str):
    """Record the layer's ratio over the dense one at each size."""
    import bench_layer
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["gpu_day"])
    found = []
    for experts, top_k, tokens, model_dim, hidden_dim in context.of_size(ROWS, TINY_ROWS):
        sizes = {"experts": experts, "top_k": top_k, "tokens": tokens, "model_dim": model_dim, "hidden_dim": hidden_dim}
        for name, value in {**sizes, "dtype": dtype, "rounds": context.of_size(9, 2)}.items():
            setattr(flags.FLAGS, name, value)
        result = bench_layer.measure()
        found.append(result)
        context.record(layers=found)
        context.row(
            f"{dtype}, E = {experts}, K = {top_k}, {tokens} x {model_dim} x {hidden_dim}, {result['implementation']}",
            f"{shown(result['moe_seconds'])} over {shown(result['dense_seconds'])} dense: "
            f"{result['ratio_over_dense']:.2f} ({result['useful_flops'] / result['moe_seconds'] / 1e12:.3g} TFLOP/s)",
        )


def tf32_error(context):
    """Record time and error of float32 matmuls as they run by default and at HIGHEST, against float64."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    rows, contracted, resulting = context.of_size((4096, 768, 1536), (64, 32, 48))
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(rows, contracted)), rng.normal(size=(contracted, resulting))
    wanted = a @ b
    arguments = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    cases = {
        name: (jax.jit(lambda a, b, precision=precision: jnp.dot(a, b, precision=precision)), arguments)
        for name, precision in (("default", lax.Precision.DEFAULT), ("HIGHEST", lax.Precision.HIGHEST))
    }
    seconds = seconds_of(cases, rounds=context.of_size(7, 2), calls=context.of_size(20, 1))
    for name, (function, _) in cases.items():
        error = float(np.linalg.norm(np.asarray(function(*arguments), np.float64) - wanted) / np.linalg.norm(wanted))
        context.record(**{name: {"seconds": seconds[name], "relative_error": error}})
        context.row(
            f"float32 matmul {rows} x {contracted} x {resulting}, {name}",
            f"{shown(seconds[name])}, error {error:.2g} of the norm",
        )
