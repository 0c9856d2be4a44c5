"""The parts of the Transformer, and the chunked cross-entropy, against plain formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.models import ModelConfig, reference
from moe_jax.models.attention import attend
from moe_jax.models.cross_entropy import chunked_cross_entropy, token_losses
from moe_jax.models.model_group import ModelGroup
from moe_jax.models.transformer import Attention, FeedForward, Norm, rotate

BATCH, LENGTH, DIM, HEADS = 2, 6, 8, 4


def config_of(**changes):
    given = {
        "model_dim": DIM,
        "heads": HEADS,
        "dtype": "float64",
        "dense_hidden_dim": 12,
        "attention": "xla",
        **changes,
    }
    return ModelConfig(**given)


def random_params(module, seed=0):
    """Return a module's parameters as a nested dict, drawn anew, so that no bias is zero and no scale one."""
    leaves, tree = jax.tree.flatten(nnx.to_pure_dict(nnx.state(module)))
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves])


def tokens(seed=1, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(BATCH, LENGTH, DIM)).astype(dtype)


def call(module, params, x, group=ModelGroup()):  # noqa: B008
    """Call a module on given parameters, as the model does inside its loop over layers."""
    return nnx.merge(nnx.split(module)[0], params)(x, group)


def assert_close(got, wanted):
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12 * np.max(np.abs(wanted)))  # sums of tens of terms


def test_layer_norm_by_hand():
    # mean 2, variance 1: (x - 2) / sqrt(1 + 1e-5), times 3, plus 1
    norm = Norm(ModelConfig(model_dim=2, heads=1))
    norm.scale[...], norm.bias[...] = jnp.float32([3, 3]), jnp.float32([1, 1])
    turned = 3 / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(norm(jnp.float32([[1, 3]])), [[1 - turned, 1 + turned]], rtol=1e-6)
    # bfloat16 in, bfloat16 out, but the mean of 256 and 257 needs more than its 8 bits
    plain = Norm(ModelConfig(model_dim=2, heads=1))(jnp.bfloat16([[256, 258]]))
    assert plain.dtype == jnp.bfloat16
    np.testing.assert_array_equal(plain, [[-1, 1]])


def test_layer_norm_equals_reference():
    with jax.enable_x64(True):
        norm = Norm(config_of())
        params = random_params(norm)
        got = nnx.merge(nnx.split(norm)[0], params)(tokens())
        assert_close(got, reference.normalize(tokens(), params, config_of()))


def test_rotate_by_hand():
    # head size 2 has one pair with frequency 1: position 0 stays, position 1 turns by one radian
    x = jnp.ones((1, 2, 1, 2))
    turned = [[1, 1], [np.cos(1) - np.sin(1), np.cos(1) + np.sin(1)]]
    np.testing.assert_allclose(rotate(x, jnp.arange(2))[0, :, 0], turned, rtol=1e-6)


def test_rotate_equals_reference_and_knows_distances_only():
    with jax.enable_x64(True):
        q, k = np.random.default_rng(0).normal(size=(2, 1, LENGTH, 3, 8))
        positions = jnp.arange(LENGTH, dtype=jnp.int32)
        assert_close(rotate(q, positions), reference.rotary(q, config_of()))

        def scores(shift):
            return jnp.einsum("bqhd,bkhd->bhqk", rotate(q, positions + shift), rotate(k, positions + shift))

        assert_close(scores(1000), scores(0))


@pytest.mark.parametrize("kind", ["gpt", "bert"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_attention_equals_reference(kind, positions):
    with jax.enable_x64(True):
        config = config_of(kind=kind, positions=positions)
        attention = Attention(config, nnx.Rngs(0))
        params, cotangent = random_params(attention), tokens(2)

        def both(function):
            def loss(params, x):
                y = function(params, x)
                return jnp.sum(y * cotangent), y

            return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, tokens())

        ours = both(lambda params, x: call(attention, params, x))
        theirs = both(lambda params, x: reference.attention(x, params, config))
        jax.tree.map(assert_close, ours, theirs)


def test_attention_is_causal():
    """A later token changes nothing before it in a GPT, and something in a BERT."""
    for kind in ("gpt", "bert"):
        attention = Attention(config_of(kind=kind, dtype="float32", positions="rotary"), nnx.Rngs(0))
        x = tokens(dtype=np.float32)
        other = x.copy()
        other[:, 4, 0] += 1
        params = random_params(attention)
        first, second = (np.asarray(call(attention, params, given)) for given in (x, other))
        assert np.array_equal(first[:, :4], second[:, :4]) == (kind == "gpt")
        assert not np.any(first[:, 4:] == second[:, 4:])


def test_attend_float32_equals_float64():
    """In float64 our own formula stands in for JAX's function, which rounds; in float32 the two agree."""
    q, k, v = np.random.default_rng(0).normal(size=(3, BATCH, LENGTH, HEADS, 2)).astype(np.float32)
    for causal in (True, False):
        narrow = attend(q, k, v, causal, "xla")
        with jax.enable_x64(True):
            exact = attend(*(jnp.asarray(a, jnp.float64) for a in (q, k, v)), causal, "xla")
        assert (narrow.dtype, exact.dtype) == (jnp.float32, jnp.float64)
        np.testing.assert_allclose(narrow, exact, atol=1e-6)  # float32 sums of six


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_feed_forward_equals_reference(activation):
    with jax.enable_x64(True):
        config = config_of(activation=activation)
        feed_forward = FeedForward(config, nnx.Rngs(0))
        params = random_params(feed_forward)
        got = jax.jit(functools.partial(call, feed_forward))(params, tokens())
        assert_close(got, reference.feed_forward(tokens(), params, config))


@pytest.mark.parametrize("module_class", [Attention, FeedForward])
def test_parts_of_an_mp_group_sum_to_the_whole(module_class):
    """Two devices with half of the heads or of the hidden dim each; the bias after the sum is added once."""
    with jax.enable_x64(True):
        module = module_class(config_of(activation="swiglu"), nnx.Rngs(0))
        params = random_params(module)
        model_dims = {
            path: variable.get_metadata().get("model_dim", -1)
            for path, variable in nnx.to_flat_state(nnx.state(module))
        }
        assert sum(dim >= 0 for dim in model_dims.values()) >= 3

        def halves(path, leaf):
            """Return [2, ...]: the parts of a leaf that is split, two copies of one that is not."""
            dim = model_dims[tuple(entry.key for entry in path)]
            return jnp.stack([leaf, leaf] if dim < 0 else jnp.split(leaf, 2, axis=dim))

        parts = jax.tree_util.tree_map_with_path(halves, params)
        on_device = functools.partial(call, module, group=ModelGroup(("model",)))
        got = jax.jit(jax.vmap(on_device, in_axes=(0, None), axis_name="model"))(parts, tokens())
        whole = call(module, params, tokens())
        for device in range(2):
            assert_close(got[device], whole)


VOCAB, TARGETS = 11, 7


def entropy_case():
    rng = np.random.default_rng(0)
    x, table = rng.normal(size=(TARGETS, DIM)), rng.normal(size=(VOCAB, DIM))
    return x, table, rng.integers(0, VOCAB, TARGETS).astype(np.int32), np.float64([1, 0, 1, 0.5, 0, 1, 1])


def test_token_losses_by_hand():
    # logits 0 and log 3: probabilities 1/4 and 3/4
    losses, log_z = token_losses(jnp.log(jnp.float32([[1, 3], [1, 3]])), jnp.int32([0, 1]))
    np.testing.assert_allclose(losses, [np.log(4), np.log(4 / 3)], rtol=1e-6)
    np.testing.assert_allclose(log_z, [np.log(4), np.log(4)], rtol=1e-6)


@pytest.mark.parametrize("ends", [(), (4,), (1, 3)])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_cross_entropy(chunk, ends):
    """Any chunk and any parts give the loss and the gradients of the plain formula; 3 pads seven tokens to nine."""
    with jax.enable_x64(True):
        x, table, targets, weights = entropy_case()

        def plain(x, table, weights):
            log_probs = jax.nn.log_softmax(x @ table.T, axis=1)
            return -jnp.sum(log_probs[jnp.arange(TARGETS), targets] * weights)

        def chunked(x, table, weights):
            parts = [tuple(jnp.split(array, ends)) for array in (x, targets, weights)]
            return chunked_cross_entropy(parts[0], table, *parts[1:], chunk)

        got = jax.jit(jax.value_and_grad(chunked, (0, 1, 2)))(x, table, weights)
        wanted = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(x, table, weights)
        jax.tree.map(assert_close, got, wanted)


def test_chunked_cross_entropy_never_holds_all_logits():
    """Neither forward nor backward has an array of [tokens, vocabulary]: only of [chunk, vocabulary]."""
    x, table, targets, weights = entropy_case()
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, table, weights)]
    step = jax.grad(lambda x, table, weights: chunked_cross_entropy((x,), table, (targets,), (weights,), 3), (0, 1))
    text = jax.jit(step).lower(*arrays).as_text()
    assert f"tensor<3x{VOCAB}xf32>" in text
    for tokens_alive in (TARGETS, 9):
        assert f"tensor<{tokens_alive}x{VOCAB}xf32>" not in text
    assert f"tensor<3x3x{VOCAB}xf32>" not in text  # nor stacked over the three chunks, as a loop's residual
