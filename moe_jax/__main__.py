"""`moe-jax COMMAND ...`, or `python -m moe_jax COMMAND ...`: one of the commands below, with its own flags.

The command takes this process' place, so signals, exit codes and `--help` are its own.
"""

import ast
import os
import signal
import sys
from pathlib import Path

from moe_jax import __version__
from moe_jax.errors import UserError

COMMANDS = ("train", "supervise", "generate", "convert", "inspect", "replay", "calibrate", "tune", "reproduce", "watch")


def about(command: str) -> str:
    """Return the first line of a command's text, without importing it."""
    text = Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def main() -> None:
    """Start the command that the first argument names; list all without one."""
    match sys.argv[1:]:
        case [] | ["-h" | "--help" | "help"]:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads this, such as `head`, may leave
            print("usage: moe-jax COMMAND [flags]; moe-jax COMMAND --help lists its flags\n")
            print("\n".join(f"  {name:10} {about(name)}" for name in COMMANDS))
        case ["--version"]:
            print(f"moe_jax {__version__}")
        case [command, *rest] if command in COMMANDS:
            os.execv(sys.executable, [sys.executable, "-m", f"moe_jax.{command}", *rest])
        case [command, *_]:
            error = UserError(f"{command!r} is no command; there are {', '.join(COMMANDS)}")
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
