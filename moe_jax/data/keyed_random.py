"""Random numbers that are functions of their address: no generator, no state, nothing to save.

Inputs: integers that say where a number is wanted (purpose, seed, epoch, step, row, column). Outputs: the number there.
So any process computes any number alone, and a resumed run needs nothing but its step. The bits are defined here, not
by numpy.random, whose streams may change between versions.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6


def hash64(*words) -> np.ndarray:
    """Hash integers to 64 bits that look independent.

    Each word is mixed with the hash of the words before it by the finaliser of SplitMix64.

    Args:
      words: ints or integer arrays that broadcast together.

    Returns:
      uint64, at least 1-d, of the broadcast shape.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (2014), figure 13 (mix64variant13).
    """
    state = np.zeros(1, np.uint64)
    for word in words:
        word = np.array([word & 0xFFFFFFFFFFFFFFFF], np.uint64) if isinstance(word, int) else word.astype(np.uint64)
        state = state * np.uint64(3) + word + _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def uniform(*words) -> np.ndarray:
    """Return float64 numbers in [0, 1) at the addresses that the words give."""
    return (hash64(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(index: np.ndarray, count: int, *key) -> np.ndarray:
    """Return which item of `count` stands at each place of a shuffled order, without making the order.

    A Feistel network is a bijection of [0, 4^k); applying it again until the value is below `count` makes it one of
    [0, count). That takes at most four applications on average, and no memory whatever the size of the corpus.

    Args:
      index: int64 [n], places, each in [0, count).
      count: items.
      key: words of `hash64`; an array among them has the shape [n].

    Returns:
      int64 [n], each in [0, count); distinct for distinct places under the same key.

    Source: Black, Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), cycle walking and generalised Feistel.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)

    def permute(value, keys):
        left, right = value >> half, value & low
        for turn in range(_ROUNDS):
            left, right = right, left ^ (hash64(*keys, turn, right) & low)
        return (left << half) | right

    value = permute(index.astype(np.uint64), key)
    while (outside := np.flatnonzero(value >= np.uint64(count))).size:
        keys = [word if isinstance(word, int) else word[outside] for word in key]
        value[outside] = permute(value[outside], keys)
    return value.astype(np.int64)
