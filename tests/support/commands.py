"""Commands of the package in the test's own process, where a mistake costs no start of Python."""

import importlib
import sys

from absl import flags


def run_command_here(name: str, *arguments: str):
    """Carry out `python -m moe_jax.NAME ARGUMENTS` up to the exception that `run_command` would turn into one line.

    Flags are global: those of the commands that were run before are taken out first.
    """
    for module in [module for module in flags.FLAGS.flags_by_module_dict() if module.startswith("moe_jax.")]:
        for flag in flags.FLAGS.get_flags_for_module(module):
            delattr(flags.FLAGS, flag.name)
        sys.modules.pop(module, None)
    importlib.import_module(f"moe_jax.{name}").command([name, *arguments])
