"""Files that come with the package but stand beside it in a checkout: configs, recorded loads, committed results.

Input: a path from the top of a checkout, as 'configs/run/demo.gin'. Output: where it lies: in the wheel's own copy,
which setup.py makes, or in the checkout.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
IN_WHEEL = _PACKAGE / "shipped"  # a checkout has none
ROOT = IN_WHEEL if IN_WHEEL.is_dir() else _PACKAGE.parent


def shipped(path: str) -> Path:
    """Return where a path of a checkout lies."""
    return ROOT / path


def here_or_shipped(path: str | Path) -> Path:
    """Return a user's path, or the same one among the shipped files where only that is there."""
    given, copy = Path(path).expanduser(), shipped(str(path))
    return copy if copy.exists() and not given.exists() else given
