"""Lines of choices and back: sums and gradients equal loops over the choices."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.dispatch import lines_of_tokens, tokens_of_lines

TOKENS, DIM = 6, 3
TOKEN_OF = np.array([4, 0, 4, 1, 4, 1, 4, 0, 5], np.int32)  # tokens 2 and 3 have no line, token 4 has four


def test_lines_and_sums_equal_loops():
    rng = np.random.default_rng(0)
    x, lines = rng.normal(size=(TOKENS, DIM)), rng.normal(size=(len(TOKEN_OF), DIM))
    with jax.enable_x64(True):
        got_lines, pull_lines = jax.vjp(lambda x: lines_of_tokens(x, TOKEN_OF), jnp.asarray(x))
        got_sums, pull_sums = jax.vjp(lambda lines: tokens_of_lines(lines, TOKEN_OF, TOKENS), jnp.asarray(lines))
        sums = np.zeros((TOKENS, DIM))
        for line, token in zip(lines, TOKEN_OF, strict=True):
            sums[token] += line
        np.testing.assert_array_equal(got_lines, [x[token] for token in TOKEN_OF])
        np.testing.assert_allclose(got_sums, sums, rtol=1e-14)
        np.testing.assert_allclose(pull_lines(jnp.asarray(lines))[0], sums, rtol=1e-14)
        np.testing.assert_array_equal(pull_sums(jnp.asarray(x))[0], [x[token] for token in TOKEN_OF])


def test_sums_of_bfloat16_are_summed_in_float32():
    lines = jnp.asarray([[1.0], [2.0**-8], [2.0**-8]], jnp.bfloat16)  # in bfloat16 1 + 2^-8 is 1
    total = tokens_of_lines(lines, jnp.zeros(3, jnp.int32), 1)
    assert total.dtype == jnp.bfloat16 and float(total[0, 0]) == 1 + 2.0**-7
