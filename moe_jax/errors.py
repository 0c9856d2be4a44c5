"""The three ways in which a run ends on purpose; an entry point turns each into one line and an exit code."""


class UserError(ValueError):
    """Report a user's mistake: one line with every value by name, the rule and the remedy. Exit code 2."""


class NonFiniteError(RuntimeError):
    """Stop a run whose loss is not finite; the last good checkpoint stays. Exit code 3."""


class HostLostError(RuntimeError):
    """End the job on every host because one of them is gone. Exit code 4."""
