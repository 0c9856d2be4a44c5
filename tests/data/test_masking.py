"""Masks against a loop, in their shares, and the same however rows are divided among hosts."""

import types

import numpy as np

from moe_jax.data import ByteTokenizer, mask_tokens
from moe_jax.data.cache import hash64, uniform


def oracle(tokens, step, rows, seed, tokenizer, rate):
    """Hide tokens one by one."""
    inputs, weights = tokens.copy(), np.zeros(tokens.shape, np.float32)
    ordinary = [i for i in range(tokenizer.vocab_size) if i not in {tokenizer.mask_id, tokenizer.end_id}]
    for b in range(tokens.shape[0]):
        for s in range(tokens.shape[1]):
            address = (int(rows[b]), s)
            if tokens[b, s] not in ordinary or uniform(2, seed, step, 0, *address)[0] >= rate:
                continue
            weights[b, s] = 1
            fate = uniform(2, seed, step, 1, *address)[0]
            if fate < 0.8:
                inputs[b, s] = tokenizer.mask_id
            elif fate < 0.9:
                inputs[b, s] = ordinary[int(hash64(2, seed, step, 2, *address)[0]) % len(ordinary)]
    return inputs, tokens, weights


def test_mask_tokens_equals_loop():
    tokens = (np.arange(6 * 40).reshape(6, 40) * 7 % 12).astype(np.int32)
    tokenizer = types.SimpleNamespace(vocab_size=12, mask_id=11, end_id=7)
    settings = dict(step=3, rows=np.arange(10, 16), seed=5, tokenizer=tokenizer, rate=0.5)
    found = mask_tokens(tokens, **settings)
    for name, one, other in zip(("inputs", "targets", "weights"), found, oracle(tokens, **settings), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
        assert one.dtype == other.dtype
    assert (found[0] != tokens).sum() > 20


def test_mask_tokens_depends_on_the_row_and_not_on_the_rows_beside_it():
    tokens, rows, byte = np.full((6, 200), 5, np.int32), np.arange(6), ByteTokenizer()
    whole = mask_tokens(tokens, 4, rows, 1, byte, 0.15)
    odd = mask_tokens(tokens[1::2], 4, rows[1::2], 1, byte, 0.15)  # a host's rows need not follow one another
    for i in range(3):
        np.testing.assert_array_equal(odd[i], whole[i][1::2])
    others = [mask_tokens(tokens, step, rows, seed, byte, 0.15)[2] for step, seed in ((5, 1), (4, 0))]
    chosen = [row.tobytes() for weights in (whole[2], *others) for row in weights]
    assert len(set(chosen)) == 18
