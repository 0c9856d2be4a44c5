"""Item 5: a scan of 12 turns of small kernels, with and without a conditional in each turn.

Both as XLA launches them by default and with no command buffer. What a turn takes longer with a conditional that is
never taken is the constant `conditional` of inspect's model.
"""

from __future__ import annotations

from gpu_day_items.context import seconds_of, shown

TURNS = 12


def measure(context):
    """Record seconds of the four programs and the cost of one conditional."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def turn(carry, with_conditional):
        for _ in range(4):
            carry = jnp.tanh(carry @ carry)
        if with_conditional:  # its predicate is data, and never true
            carry = lax.cond(carry[0, 0] > 2.0, lambda c: jnp.tanh(c @ c) @ c, lambda c: c, carry)
        return carry

    def program(with_conditional):
        return lambda x: lax.scan(lambda c, _: (turn(c, with_conditional), None), x, None, length=TURNS)[0]

    x = jax.random.normal(jax.random.key(0), (context.of_size(128, 16),) * 2) * 0.1
    cases = {}
    for buffers, options in (("default", {}), ("none", {"xla_gpu_enable_command_buffer": ""})):
        for what in (False, True):
            name = f"{'with' if what else 'without'}, command buffers {buffers}"
            cases[name] = (jax.jit(program(what)).lower(x).compile(compiler_options=options), (x,))
    seconds = seconds_of(cases, rounds=context.of_size(15, 3), calls=context.of_size(20, 2))
    cost = {
        buffers: (seconds[f"with, command buffers {buffers}"] - seconds[f"without, command buffers {buffers}"]) / TURNS
        for buffers in ("default", "none")
    }
    context.record(times=seconds, conditional_seconds=cost, constants={"conditional": max(cost["default"], 0.0)})
    for name, took in seconds.items():
        context.row(f"{TURNS} turns {name}", shown(took))
    for buffers, took in cost.items():
        context.row(f"one conditional, command buffers {buffers}", f"{took * 1e6:.1f} us")
