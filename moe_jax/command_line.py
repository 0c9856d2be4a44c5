"""Flags of a command: a mistake in them is one line that a user can act on.

Enters: the words of a command line. Leaves: absl's flags, filled. Nothing else is imported, so that a command can still
choose its devices afterwards.
"""

from __future__ import annotations

from absl import flags

from moe_jax.errors import UserError


def parse_flags(argv: list[str], command: str, flag: str) -> None:
    """Parse a command line that consists of flags alone.

    Args:
      argv: the program's name and its words.
      command: the module that was started, such as 'moe_jax.train'.
      flag: the flag that a stray word was most likely meant for.

    Raises:
      UserError: for an unknown flag, a wrong value, or words that are no flags.
    """
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise UserError(f"{str(error).splitlines()[0]}; python -m {command} --helpfull lists all flags") from None
    if len(rest) > 1:
        raise UserError(f"{rest[1]!r} is no flag; did you mean --{flag}={rest[1]}?")
