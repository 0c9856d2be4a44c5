"""Cases of a test of which a few run every time, and the others with `-m slow`."""

import pytest


def slow_but(cases, *always):
    """Return the cases, each a value or a tuple of them, as a test's parameters: those not named here are slow."""
    assert set(always) <= set(cases), set(always) - set(cases)
    values = {case: case if isinstance(case, tuple) else (case,) for case in cases}
    return [pytest.param(*values[case], marks=() if case in always else pytest.mark.slow) for case in cases]
