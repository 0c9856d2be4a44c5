"""The errors that a command turns into one line and an exit code, and checks of a config's fields that raise them.

Every other error is a bug and shows its traceback.
"""

from collections.abc import Collection, Mapping
from typing import Any


class UserError(ValueError):
    """A user's mistake: the message carries every value by name, the rule and the remedy. Exit code 2."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or state that is not finite; names the step and the first leaf. Exit code 3."""


class HostLostError(RuntimeError):
    """A process of a multi-host run that died or no longer answers; names it. Exit code 4."""


def check_bounds(
    config: Any, least: Mapping[str, float], above: Mapping[str, float] | None = None, name: str = ""
) -> None:
    """Raise a UserError for a number of a config that is too small; None and text are none.

    Args:
      least: smallest value by field; above: what must be exceeded, by field.
      name: by which gin binds the config; '' takes that of its class.
    """
    for field, bound in (dict(least) | dict(above or {})).items():
        value = getattr(config, field)
        if value is None or isinstance(value, str) or (value > bound if field not in least else value >= bound):
            continue
        rule = "be at least" if field in least else "be above"
        default = getattr(type(config), field)
        raise UserError(
            f"{name or type(config).__name__}.{field} ({value}) must {rule} {bound:g}; {default!r} is the default"
        )


def check_choices(config: Any, choices: Mapping[str, Collection[Any]], name: str = "") -> None:
    """Raise a UserError for a field of a config that is none of its choices; `name` as in `check_bounds`."""
    for field, known in choices.items():
        if (value := getattr(config, field)) not in known:
            raise UserError(
                f"{name or type(config).__name__}.{field} ({value!r}) must be one of {', '.join(map(repr, known))}"
            )
