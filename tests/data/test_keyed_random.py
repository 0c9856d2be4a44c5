"""The numbers against an oracle in Python's own integers, and the shuffle as a bijection."""

import numpy as np
import pytest

from moe_jax.data.cache import hash64, shuffled, uniform

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


def test_uniform_fills_the_unit_interval_evenly():
    numbers = uniform(1, np.arange(100_000))
    assert 0 <= numbers.min() and numbers.max() < 1
    # 10 bins of 10,000 +- 95 (one standard deviation); 5 of them never happen by chance.
    assert np.abs(np.histogram(numbers, bins=10, range=(0, 1))[0] - 10_000).max() < 475


@pytest.mark.parametrize("count", [1, 2, 5, 17, 1025])
def test_shuffled_is_a_bijection(count):
    assert sorted(shuffled(np.arange(count), count, 9, 4).tolist()) == list(range(count))


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


def test_shuffled_differs_by_epoch_and_seed_and_leaves_nothing_in_place():
    orders = [shuffled(np.arange(1000), 1000, 1, seed, epoch) for seed in range(3) for epoch in range(3)]
    for i, one in enumerate(orders):
        # A random order keeps about 1 item of 1000 in its place, and 10 in fewer than one order in a million.
        assert (one == np.arange(1000)).sum() < 10
        assert all((one == other).sum() < 10 for other in orders[:i])
        assert abs(np.corrcoef(one, np.arange(1000))[0, 1]) < 0.15  # 0.032 is one standard deviation
