"""`moe-jax COMMAND ...`, or `python -m moe_jax COMMAND ...`: one of the commands below, with its own flags.

The command takes this process' place, so signals, exit codes and `--help` are its own.
"""

import ast
import os
import sys
from pathlib import Path

from moe_jax import __version__
from moe_jax.config.command_line import run_command
from moe_jax.errors import UserError

COMMANDS = ("train", "generate", "convert", "inspect", "replay", "calibrate", "tune", "reproduce", "watch")


def about(command: str) -> str:
    """Return the first line of a command's text, without importing it."""
    text = Path(__file__).with_name(f"{command}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def start(argv: list[str]) -> None:
    """Start the command that the first argument names; list all without one."""
    match argv[1:]:
        case [] | ["-h" | "--help" | "help"]:
            print("usage: moe-jax COMMAND [flags]; moe-jax COMMAND --help lists its flags\n")
            print("\n".join(f"  {name:10} {about(name)}" for name in COMMANDS))
        case ["--version"]:
            print(f"moe_jax {__version__}")
        case [command, *rest] if command in COMMANDS:
            os.execv(sys.executable, [sys.executable, "-m", f"moe_jax.{command}", *rest])
        case [command, *_]:
            raise UserError(f"{command!r} is no command; there are {', '.join(COMMANDS)}")


def main() -> None:
    """Do it with the arguments of this process."""
    run_command(start)


if __name__ == "__main__":
    main()
