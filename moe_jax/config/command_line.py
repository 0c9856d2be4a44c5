"""A command: its flags, `--help`, and its end: an error that users can fix is one line and an exit code.

Inputs: the arguments of a command line. Outputs: absl's flags, set, the plugins that they name, and the exit code.
Nothing else is imported, so that a command can still choose its devices afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from absl import flags

from moe_jax.errors import HostLostError, NonFiniteError, UserError
from moe_jax.registry import choose_plugins, plugin_mistake

BROKEN_PIPE = 141  # as shells say it of SIGPIPE
EXIT_CODES = {UserError: 2, NonFiniteError: 3, HostLostError: 4, KeyboardInterrupt: 130}
COMPILING = "moe_jax compiling"  # name of threads that write nothing, and that the end of a command does not wait for

# the command's own flags; those of every imported module too
HELP, HELP_FULL = ("--help", "-help", "-h", "--helpshort", "-helpshort"), ("--helpfull", "-helpfull")


# flags that are gone: what serves instead
REMOVED_FLAGS = {
    **dict.fromkeys(
        ("activation", "expert_shards", "moe_every", "dense_hidden_dim"), "a run folder as --trace says it"
    ),
    "install": "pip install 'jax[cuda13]', best in an environment of its own, whose Python then starts inspect",
    "attention_seconds": "it is modelled by the FLOP/s of --cluster; name a calibrated one",
    "bare": "give --compiler_option, and bind train.guide_scheduler = False",
}


flags.disclaim_key_flags()  # what is defined here is a flag of the command that asked for it


def define_config_flags() -> list[flags.FlagHolder]:
    """Define the flags of a run's config and of its devices: files, bindings, folders of files, CPU devices."""
    return [
        flags.DEFINE_multi_string("gin_file", [], "Config file; may repeat, later ones win."),
        flags.DEFINE_multi_string("gin_bindings", [], "Binding such as 'train.steps = 40'; may repeat."),
        flags.DEFINE_multi_string("gin_search_paths", [], "Folder in which config files are looked for; may repeat."),
        flags.DEFINE_integer("host_devices", None, "Run on the CPU, split into this many devices."),
    ]


def define_job_flags() -> list[flags.FlagHolder]:
    """Define the flags of a process' place in its job; each has the name of its field of `HostsConfig`."""
    return [
        flags.DEFINE_string("coordinator", None, "host:port where process 0 listens; for several processes."),
        flags.DEFINE_integer("num_processes", None, "Processes of the job."),
        flags.DEFINE_integer("process_id", None, "Index of this process, from 0; that one prints and writes."),
        flags.DEFINE_float("lost_after_seconds", 30.0, "Silence after which a process of the job counts as lost."),
    ]


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code that a command ends with after an exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def report(error: BaseException) -> int:
    """Print why a command ends, in one line where its user can mend that; return its exit code."""
    code, line = exit_code_of(error), str(error)
    if code == 1 and (blamed := plugin_mistake(error)) is not None:
        code, line = EXIT_CODES[UserError], blamed
    if code == 1:
        traceback.print_exception(error)
    else:
        print(f"error: {line}", file=sys.stderr)
    return code


def run_command(command: Callable[[list[str]], int | None]) -> None:
    """Run a command with the arguments of the process and exit, by its code, or by that of an error in EXIT_CODES.

    Args:
      command: takes the program's name and its arguments; returns the exit code, None for 0.
    """
    try:
        code = command(sys.argv)
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:  # who read stdout, such as `head`, has left; nothing more can be written there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except Exception as error:
        sys.exit(report(error))
    finally:
        if any(thread.name.startswith(COMPILING) for thread in threading.enumerate()):
            # A compilation cannot be stopped, and takes minutes. As a daemon thread it would abort the process instead,
            # because Python ends such a thread inside XLA, where C++ does not expect it. So the process ends here, as
            # it would after Python's wait for its threads.
            error = sys.exc_info()[1]
            if not isinstance(error, SystemExit):
                traceback.print_exception(error)
            exit_now(exit_code_of(error))


def exit_now(exit_code: int) -> NoReturn:
    """Leave without the atexit hooks and without waiting for threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def parse_flags(argv: list[str], command: str, flag: str | None) -> list[str]:
    """Parse flags and return the other words; `--help` and `--helpfull` print the flags and exit with code 0.

    Args:
      argv: the program's name and its arguments.
      command: the module that was started, such as 'moe_jax.train'.
      flag: the flag that a word without a flag was most likely meant for; None where the command takes such words.

    Raises:
      UserError: for an unknown flag, a wrong value, or arguments that are no flags.
    """
    if "plugin" not in flags.FLAGS:
        flags.DEFINE_multi_string("plugin", [], "Package with planners.py, routers.py or schedules.py; may repeat.")
    words = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if any(word in HELP + HELP_FULL for word in words):
        about = (sys.modules["__main__"].__doc__ or f"python -m {command}").strip()
        full = any(word in HELP_FULL for word in words)  # the flags of imported modules too, such as those of logging
        listed = flags.FLAGS.get_help() if full else flags.FLAGS.main_module_help()
        print(f"{about}\n\nFlags:\n{listed.rstrip()}", flush=True)
        sys.exit(0)
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        if (name := getattr(error, "flagname", None)) in REMOVED_FLAGS:
            raise UserError(f"--{name} is gone: {REMOVED_FLAGS[name]}") from None
        if command == "moe_jax.replay":  # planners' options were flags of it
            from moe_jax.config.run_config import RENAMED  # imports jax, which a command chooses devices for first

            if moved := RENAMED.get(f"PlannerConfig.{name}"):
                raise UserError(f"--{name} is --gin_bindings='{moved} = VALUE' now") from None
        raise UserError(f"{str(error).splitlines()[0]}; python -m {command} --help lists all flags") from None
    if len(rest) > 1 and flag is not None:
        raise UserError(f"{rest[1]!r} is no flag; did you mean --{flag}={rest[1]}?")
    for name in ("workdir", "out", "to_hf"):
        if name in flags.FLAGS and "://" in (value := flags.FLAGS[name].value or ""):
            raise UserError(f"--{name}={value} is a URL; give a path of this machine, where a bucket can be mounted")
    choose_plugins(flags.FLAGS["plugin"].value)
    return rest[1:]
