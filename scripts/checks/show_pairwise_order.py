"""The smallest program in which XLA keeps FasterMoE's pairwise exchange apart from the matmuls it should hide behind.

    python scripts/checks/show_pairwise_order.py

needs the CUDA wheels of this jax in the environment, and no GPU. Eight devices in four groups of two: in step s a
group sends rows to the group s places back (S_s), multiplies what it received (C_s) and returns the results (R_s): one
stream of transfers, kept in order by barriers, and matmuls that each wait for the rows of one step. A step of several
transfers has most of them beside nothing, which is why `moe_jax/moe/schedules/pairwise.py` makes it one. Printed is the
order in which the compiler launches them, as it schedules by itself and guided by modelled seconds
(`training/compiling.py`), with --permutes=1 too, where a step is one transfer, not one a member: '<' starts a transfer,
'>' waits for it, 'C' is a matmul, all of S_s and R_s by number.
"""

from __future__ import annotations

import re

from absl import app, flags

from moe_jax.analysis import compile_ahead
from moe_jax.cluster.hlo import parse_module
from moe_jax.cluster.targets import parse_target

GROUPS, DEVICES, ROWS, DIM = 4, 8, 2048, 1024
_PERMUTES = flags.DEFINE_multi_integer("permutes", [2, 1], "Transfers of a step, each of its share of the rows.")


def exchange(blocks, w_in, w_out, permutes: int):
    """Run the steps on blocks [Ng, permutes, rows, DIM] of one device."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def move(block, step, index, sign, scope):
        pairs = [(d, (d - sign * (2 * step + index)) % DEVICES) for d in range(DEVICES)]
        with jax.named_scope(f"{scope}{step}"):
            return lax.ppermute(block, "d", pairs)

    outgoing, received, home = list(blocks), [], []
    for s in range(GROUPS):
        if s:
            outgoing[s], received[-1] = lax.optimization_barrier((outgoing[s], received[-1]))
        received.append(jnp.stack([move(outgoing[s][i], s, i, 1, "S") for i in range(permutes)]))
    done = []
    for s in range(GROUPS):
        with jax.named_scope(f"C{s}"):
            done.append(jnp.tanh(received[s] @ w_in[s]) @ w_out[s])
    for s in range(GROUPS):
        before = home if s else received
        done[s], before[-1] = lax.optimization_barrier((done[s], before[-1]))
        home.append(jnp.stack([move(done[s][i], s, i, -1, "R") for i in range(permutes)]))
    return jnp.stack(home)


def order(text: str) -> str:
    """Return the launches of a scheduled program as words."""
    module, words = parse_module(text), []
    started: dict[str, str] = {}
    for instruction in module.entry.instructions:
        name = re.search(r"/([SRC]\d)/", instruction.op_name + "/")
        if instruction.opcode.endswith("-start") and name:
            started[instruction.name] = name.group(1)
            words.append("<" + name.group(1))
        elif instruction.opcode.endswith("-done") and instruction.operands[0] in started:
            words.append(">" + started[instruction.operands[0]])
        elif name and name.group(1)[0] == "C" and "dot" in instruction.op_name and instruction.opcode != "bitcast":
            words.append(name.group(1))
    return " ".join(words)


def main(argv: list[str]) -> None:
    import functools

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from moe_jax.training.compiling import compile_with_profile, profile_of

    target = parse_target("h200:4x2")
    mesh = Mesh(np.array(compile_ahead.described_devices(target)), ("d",), axis_types=(AxisType.Auto,))

    def shape(*dims, spec=()):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    for permutes in _PERMUTES.value:
        run = jax.shard_map(
            functools.partial(exchange, permutes=permutes),
            mesh=mesh, in_specs=(P(None, None, "d"), P(), P()), out_specs=P(None, None, "d"),
        )  # fmt: skip
        rows = shape(GROUPS, permutes, DEVICES * ROWS // permutes, DIM, spec=(None, None, "d"))
        lowered = jax.jit(run).lower(rows, shape(GROUPS, DIM, 2 * DIM), shape(GROUPS, 2 * DIM, DIM))
        options = {"xla_gpu_autotune_level": "0"}
        own = lowered.compile(compiler_options=options)
        guided = compile_with_profile(lowered, options, profile_of(own, target))
        for name, compiled in (("by itself", own), ("guided", guided)):
            print(f"{permutes} transfers a step, {name}: {order(compiled.as_text())}")


if __name__ == "__main__":
    compile_ahead.prepare_process()
    app.run(main)
