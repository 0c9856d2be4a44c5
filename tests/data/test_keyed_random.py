"""The numbers against an oracle in Python's own integers, and the shuffle as a bijection."""

import numpy as np

from moe_jax.data.cache import hash64, shuffled

LOW64 = (1 << 64) - 1


def oracle_hash64(*words):
    state = 0
    for word in words:
        state = (state * 3 + word + 0x9E3779B97F4A7C15) & LOW64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & LOW64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & LOW64
        state ^= state >> 31
    return state


def test_hash64_first_word_zero_is_splitmix64():
    # The first output of SplitMix64 from state 0, as published with java.util.SplittableRandom.
    assert int(hash64(0)[0]) == 0xE220A8397B1DCDAF


def test_hash64_equals_oracle():
    rows, columns = np.arange(3)[:, None], np.arange(4)[None, :]
    found = hash64(5, -1, rows, columns)
    expected = [[oracle_hash64(5, -1 & LOW64, r, c) for c in range(4)] for r in range(3)]
    assert found.tolist() == expected


def test_shuffled_equals_oracle():
    # 5 items: 3 bits, so halves of 2 bits; walk on while the value is 5 or more.
    def oracle(place, *key):
        while True:
            left, right = place >> 2, place & 3
            for turn in range(6):
                left, right = right, left ^ (oracle_hash64(*key, turn, right) & 3)
            place = left << 2 | right
            if place < 5:
                return place

    for epoch in range(20):
        expected = [oracle(place, 1, 7, epoch) for place in range(5)]
        assert shuffled(np.arange(5), 5, 1, 7, np.full(5, epoch)).tolist() == expected
