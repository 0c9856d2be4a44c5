"""Masks against a loop, in their shares, and the same however rows are divided among hosts."""

import numpy as np
import pytest

from moe_jax.data import mask_tokens
from moe_jax.data.cache import hash64, uniform


def oracle(tokens, step, rows, seed, vocab_size, mask_id, rate, special_ids):
    """Hide tokens one by one."""
    inputs, weights = tokens.copy(), np.zeros(tokens.shape, np.float32)
    ordinary = [i for i in range(vocab_size) if i not in {mask_id, *special_ids}]
    for b in range(tokens.shape[0]):
        for s in range(tokens.shape[1]):
            address = (rows + b, s)
            if tokens[b, s] not in ordinary or uniform(2, seed, step, 0, *address)[0] >= rate:
                continue
            weights[b, s] = 1
            fate = uniform(2, seed, step, 1, *address)[0]
            if fate < 0.8:
                inputs[b, s] = mask_id
            elif fate < 0.9:
                inputs[b, s] = ordinary[int(hash64(2, seed, step, 2, *address)[0]) % len(ordinary)]
    return inputs, tokens, weights


@pytest.mark.parametrize("special_ids", [(), (0, 7)])
def test_mask_tokens_equals_loop(special_ids):
    tokens = (np.arange(6 * 40).reshape(6, 40) * 7 % 12).astype(np.int32)
    settings = dict(step=3, rows=10, seed=5, vocab_size=12, mask_id=11, rate=0.5, special_ids=special_ids)
    found = mask_tokens(tokens, **settings)
    for name, one, other in zip(("inputs", "targets", "weights"), found, oracle(tokens, **settings), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
        assert one.dtype == other.dtype
    assert (found[0] != tokens).sum() > 20


def test_mask_tokens_hides_80_10_10_of_15_percent():
    tokens = np.full((400, 500), 5, np.int32)
    inputs, targets, weights = mask_tokens(tokens, 0, 0, 0, 258, 257, special_ids=[256])
    chosen = weights > 0
    # 200,000 tokens: 30,000 chosen, one standard deviation 160; of them 24,000, 3,000, 3,000 with 69, 52, 52.
    assert chosen.sum() == pytest.approx(30_000, abs=800)
    assert (inputs == 257).sum() == pytest.approx(0.8 * chosen.sum(), abs=350)
    drawn = inputs[chosen & (inputs != 257) & (inputs != 5)]
    assert drawn.size == pytest.approx(0.1 * chosen.sum() * 255 / 256, abs=260)  # 1 in 256 draws the same again
    assert np.unique(drawn).size == 255 and drawn.max() < 256  # every byte but 5; neither end nor mask
    assert (inputs[~chosen] == 5).all() and (targets == tokens).all()


@pytest.mark.parametrize("hosts", [2, 3, 6])
def test_mask_tokens_does_not_depend_on_the_number_of_hosts(hosts):
    tokens = (np.arange(6 * 30).reshape(6, 30) % 256).astype(np.int32)
    whole = mask_tokens(tokens, 4, 0, 1, 258, 257)
    share = 6 // hosts
    parts = [mask_tokens(tokens[i : i + share], 4, i, 1, 258, 257) for i in range(0, 6, share)]
    odd = mask_tokens(tokens[1::2], 4, np.arange(1, 6, 2), 1, 258, 257)  # a host's rows need not follow one another
    for i in range(3):
        np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), whole[i])
        np.testing.assert_array_equal(odd[i], whole[i][1::2])


def test_mask_tokens_differs_by_step_seed_and_row():
    tokens = np.full((2, 200), 5, np.int32)
    chosen = [mask_tokens(tokens, step, 0, seed, 258, 257)[2] for step, seed in ((0, 0), (1, 0), (0, 1))]
    rows = [row.tobytes() for weights in chosen for row in weights]
    assert len(set(rows)) == 6
