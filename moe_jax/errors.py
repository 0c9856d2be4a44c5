"""The errors that a command turns into one line and an exit code. Everything else is a bug and shows its traceback."""


class UserError(ValueError):
    """A user's mistake: the message carries every value by name, the rule and the remedy. Exit code 2."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or state that is not finite; names the step and the first leaf. Exit code 3."""


class HostLostError(RuntimeError):
    """A process of a multi-host run that died or no longer answers; names it. Exit code 4."""
