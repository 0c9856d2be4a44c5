"""The parts of the Transformer, and the chunked cross-entropy, against plain formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models.loss import chunked_cross_entropy

DIM = 8


def assert_close(got, wanted):
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12 * np.max(np.abs(wanted)))  # sums of tens of terms


VOCAB, TARGETS = 11, 7


def entropy_case():
    rng = np.random.default_rng(0)
    x, table = rng.normal(size=(TARGETS, DIM)), rng.normal(size=(VOCAB, DIM))
    return x, table, rng.integers(0, VOCAB, TARGETS).astype(np.int32), np.float64([1, 0, 1, 0.5, 0, 1, 1])


@pytest.mark.parametrize("chunk, ends", [(1, (1, 3)), (3, ()), (3, (4,)), (7, (1, 3)), (100, (4,))])
def test_chunked_cross_entropy(chunk, ends):
    """Any chunk and any parts give the loss and the gradients of the plain formula; 3 pads seven tokens to nine."""
    with jax.enable_x64(True):
        x, table, targets, weights = entropy_case()

        def plain(x, table, weights):
            log_probs = jax.nn.log_softmax(x @ table.T, axis=1)
            return -jnp.sum(log_probs[jnp.arange(TARGETS), targets] * weights)

        def chunked(x, table, weights):
            parts = [tuple(jnp.split(array, ends)) for array in (x, targets, weights)]
            return chunked_cross_entropy(parts[0], table, *parts[1:], chunk)[0]

        got = jax.jit(jax.value_and_grad(chunked, (0, 1)))(x, table, weights)
        wanted = jax.jit(jax.value_and_grad(plain, (0, 1)))(x, table, weights)
        jax.tree.map(assert_close, got, wanted)


def test_chunked_cross_entropy_never_holds_all_logits():
    """Neither forward nor backward has an array of [tokens, vocabulary]: only of [chunk, vocabulary]."""
    x, table, targets, weights = entropy_case()
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, table, weights)]

    def chunked(x, table, weights):
        return chunked_cross_entropy((x,), table, (targets,), (weights,), 3)[0]

    step = jax.grad(chunked, (0, 1))
    text = jax.jit(step).lower(*arrays).as_text()
    assert f"tensor<3x{VOCAB}xf32>" in text
    for tokens_alive in (TARGETS, 9):
        assert f"tensor<{tokens_alive}x{VOCAB}xf32>" not in text
    assert f"tensor<3x3x{VOCAB}xf32>" not in text  # nor stacked over the three chunks, as a loop's residual
