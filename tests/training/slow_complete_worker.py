"""`python -m moe_jax.train` for test_optimistic_steps.py: compiling the complete program takes minutes on process 0."""

import time

from moe_jax.config.command_line import run_command
from moe_jax.train import command
from moe_jax.training.compiling import compile_for_all
from moe_jax.training.program import Program

SECONDS = 300


def compile_slowly(self, shape=None):
    """Return (executable, seconds) as `Program.compile_train_step`; other processes wait for process 0."""
    lowered = self.lower_train_step(shape)

    def first():
        time.sleep(SECONDS)
        return lowered.compile(), ""

    return compile_for_all(lowered, first, lambda text: lowered.compile(), list(self.roles.mesh.devices.flat)), 0.0


if __name__ == "__main__":
    Program.compile_train_step = compile_slowly
    run_command(command)
