import pytest
from network import find_missing


@pytest.fixture(scope="session")
def lab_machine() -> None:
    """Skip where no lab can be built; the reason says what is missing."""
    if missing := find_missing(shaped=True):
        pytest.skip(missing)
