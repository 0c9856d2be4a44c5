"""`python -m moe_jax.train` for test_optimistic_steps.py: compiling the complete program takes minutes on process 0."""

import time

from moe_jax.config.command_line import run_command
from moe_jax.train import command
from moe_jax.training import compiling
from moe_jax.training.program import Program

SECONDS = 300


compile_step = Program.compile_step


def compile_slowly(self, shape=None, common=False):
    """Compile as `Program.compile_step`, but a complete program late; other processes wait for process 0."""
    if common:
        return compile_step(self, shape, common)
    lowered, compile_guided = self.trace_step(shape).lower(), compiling.compile_guided

    def later(*given):
        time.sleep(SECONDS)
        return compile_guided(*given)

    compiling.compile_guided = later
    options = {"xla_embed_ir_in_executable": "False"}  # any: without options each process compiles for itself
    return compiling.compile_for_all(lowered, options, None, self.devices), 0.0


if __name__ == "__main__":
    Program.compile_step = compile_slowly
    run_command(command)
