"""Attention to a cache equals attention to the whole sequence, for ragged positions, shared heads and each dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.inference.forward import Entry, attend_cached, store_prompts, store_tokens
from moe_jax.models.attention import attend


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_attend_cached_equals_attend(dtype, tolerance):
    """Six tokens of one sequence and four of the other; three query heads read each head of keys."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 6, heads, 8)), dtype) for heads in (6, 2, 2))
    lengths = np.array([5, 3])  # tokens before the new one
    new = jnp.asarray(lengths)[:, None, None, None]
    (entry,) = store_prompts({"attention": (k[None], v[None])}, 9).values()  # what follows a prompt must not be seen
    own = [jnp.take_along_axis(array, new, axis=1) for array in (q, k, v)]
    got = attend_cached(Entry(entry.keys[0], entry.values[0]), *own, jnp.asarray(lengths))[:, 0]
    want = jnp.take_along_axis(attend(q, k, v, True, "xla"), new, axis=1)[:, 0]
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance)


def test_store_tokens_writes_each_sequence_at_its_position():
    k = jnp.arange(2 * 2 * 3 * 1 * 1.0).reshape(2, 2, 3, 1, 1) + 1  # [U, b, Sq, Hkv, Dh]
    cache = store_prompts({"attention": (k, -k)}, 5)
    token = jnp.asarray([100.0, 200.0]).reshape(1, 2, 1, 1, 1) * jnp.asarray([1.0, 10.0]).reshape(2, 1, 1, 1, 1)
    entry = store_tokens(cache, {"attention": (token, -token)}, jnp.asarray([3, 1]))["attention"]
    want = np.array([[[1, 2, 3, 100, 0], [4, 200, 6, 0, 0]], [[7, 8, 9, 1000, 0], [10, 2000, 12, 0, 0]]])
    np.testing.assert_array_equal(np.asarray(entry.keys)[:, :, 0, :, 0], want)
    np.testing.assert_array_equal(entry.values, -entry.keys)
