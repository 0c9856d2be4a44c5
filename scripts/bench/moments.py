"""What the dtype of Adam's moments does to a loss: four curves of one small model, and the size of the second moments.

The model predicts a byte of Python's statistics.py from the two before it (embedding 32, hidden 128), 64 a step, Adam
with b1 0.9, b2 0.999, no decay. With b2 = 0.999 a step changes a second moment by less than half a unit of bfloat16's
last place, so rounding to nearest leaves it unchanged; stochastic rounding is unbiased. Takes seconds on a CPU.

  python scripts/bench/moments.py
"""

from __future__ import annotations

import functools
import json
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STEPS, BATCH, RATE, WARMUP = 3000, 64, 3e-3, 50
# name: (dtype of the first moment, of the second, whether the second is rounded stochastically)
CASES = {
    "float32": ("float32", "float32", False),
    "first bfloat16": ("bfloat16", "float32", False),
    "both bfloat16, nearest": ("bfloat16", "bfloat16", False),
    "both bfloat16, stochastic": ("bfloat16", "bfloat16", True),
}


def init(key) -> dict:
    keys = jax.random.split(key, 3)
    shapes = {"embedding": (256, 32), "hidden": (64, 128), "out": (128, 256)}
    scales = (0.1, 64**-0.5, 128**-0.5)
    return {n: c * jax.random.normal(k, s) for (n, s), c, k in zip(shapes.items(), scales, keys, strict=True)}


def loss_of(params, rows):
    """Mean loss in nats of int32 rows [b, 3]."""
    hidden = jax.nn.gelu(params["embedding"][rows[:, :2]].reshape(len(rows), 64) @ params["hidden"])
    logits = hidden @ params["out"]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, rows[:, 2:], 1)[:, 0])


def narrowed(value, dtype: str, stochastic: bool, key):
    """Return float32 values in a dtype; stochastic adds 16 random bits below the last place and cuts."""
    if dtype == "float32" or not stochastic:
        return value.astype(dtype)
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) + (jax.random.bits(key, value.shape, jnp.uint32) & 0xFFFF)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def train(text, first: str, second: str, stochastic: bool):
    """Return (losses [STEPS], sums of the second moments by leaf)."""
    params = init(jax.random.key(0))

    def step(carry, index):
        params, mu, nu = carry
        key = jax.random.fold_in(jax.random.key(1), index)
        at = jax.random.randint(key, (BATCH, 1), 0, len(text) - 3)
        loss, grads = jax.value_and_grad(loss_of)(params, text[at + jnp.arange(3)[None]])
        count = index + 1.0
        rate = RATE * jnp.minimum(1, count / WARMUP) * (1 - 0.9 * count / STEPS)
        mu = jax.tree.map(lambda m, g: 0.9 * m.astype(jnp.float32) + 0.1 * g, mu, grads)
        nu = jax.tree.map(lambda v, g: 0.999 * v.astype(jnp.float32) + 0.001 * g * g, nu, grads)

        def moved(p, m, v):
            return p - rate * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)

        params = jax.tree.map(moved, params, mu, nu)
        keys = {name: jax.random.fold_in(key, place) for place, name in enumerate(nu)}
        nu = {name: narrowed(v, second, stochastic, keys[name]) for name, v in nu.items()}
        return (params, jax.tree.map(lambda m: m.astype(first), mu), nu), loss

    zeros: Any = lambda dtype: jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)  # noqa: E731
    (_, _, nu), losses = jax.lax.scan(step, (params, zeros(first), zeros(second)), jnp.arange(STEPS))
    return losses, jax.tree.map(lambda v: jnp.sum(v.astype(jnp.float32)), nu)


def main() -> None:
    """Print the table and one JSON line."""
    text = jnp.asarray(np.frombuffer(pathlib.Path(statistics.__file__).read_bytes(), np.uint8).astype(np.int32))
    table = {}
    print(
        f"{'moments':28}{'loss at 300':>12}{'1000':>9}{'3000':>9}{'sum of second moments':>24}   (means of 100 steps)"
    )
    for name, case in CASES.items():
        losses, sums = train(text, *case)
        means = [float(np.mean(losses[end - 100 : end])) for end in (300, 1000, 3000)]
        table[name] = {"loss": means, "second_moments": float(sum(sums.values()))}
        print(f"{name:28}{means[0]:12.4f}{means[1]:9.4f}{means[2]:9.4f}{table[name]['second_moments']:24.4f}")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
