"""Few cases in which every two values of any two factors meet."""

import itertools

import numpy as np


def covering_cases(factors: dict[str, tuple], is_valid=lambda case: True, never: tuple[dict, ...] = ()) -> list[dict]:
    """Return cases {factor: value}, found by taking the best of some random ones until nothing is left to meet.

    Args:
      factors: {factor: its values}.
      is_valid: which cases there may be.
      never: pairs {factor: value, factor: value} that no valid case has.
    """
    rng, cases = np.random.default_rng(0), []
    wanted = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(factors[a], factors[b])
    }
    wanted -= {frozenset(pair.items()) for pair in never}
    while wanted:
        drawn = [{f: values[rng.integers(len(values))] for f, values in factors.items()} for _ in range(300)]
        drawn = list(filter(is_valid, drawn))
        meetings = [{frozenset(two) for two in itertools.combinations(case.items(), 2)} for case in drawn]
        best = max(range(len(drawn)), key=lambda i: len(meetings[i] & wanted))
        wanted -= meetings[best]
        cases.append(drawn[best])
    return cases
