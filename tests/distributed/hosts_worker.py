"""One process of a job of two, for test_hosts.py: steps of a psum, until a mistake ends it as training would end."""

import argparse
import itertools
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.config.command_line import exit_code_of
from moe_jax.errors import NonFiniteError, UserError
from moe_jax.jobs.start import start_hosts
from moe_jax.training import compiling


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    parser.add_argument("--lost_after", type=float, default=3.0)
    parser.add_argument("--stall_after", type=float, default=0.0)
    parser.add_argument("--mistake", default="", help="process_id:kind of an exception, at step 5")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    mistaken = flags.mistake.partition(":")[0] == str(flags.process_id)
    kind = flags.mistake.partition(":")[2]
    if kind == "absent" and mistaken:
        flags.coordinator = "127.0.0.1:1"
    if kind == "counts" and mistaken:
        flags.num_processes += 1
    try:
        hosts = start_hosts(
            flags.coordinator, flags.num_processes, flags.process_id,
            lost_after_seconds=flags.lost_after, stall_after_seconds=flags.stall_after, start_timeout_seconds=8,
        )  # fmt: skip
    except Exception as error:
        print(error, file=sys.stderr)
        sys.exit(exit_code_of(error))
    with hosts:
        if kind == "differs":
            own = "ab"[mistaken]
            hosts.agree(
                "text", own, lambda first, own: f"the text is {own} on process {{index}}, and {first} on process 0"
            )
        if kind == "late":
            time.sleep(10 * mistaken)
            hosts.gather_text("the text", "", 2.0)
        if kind == "program":
            compile_twice(mistaken)
        run_steps(flags, hosts)


def run_steps(flags, hosts) -> None:
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,))
    train_step = jax.jit(jax.shard_map(lambda x_d: jax.lax.psum(x_d, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()))
    x_D = jax.make_array_from_callback((devices,), NamedSharding(mesh, P("d")), lambda index: jnp.ones(devices)[index])
    for step in itertools.count():
        assert int(train_step(x_D)[0]) == devices
        hosts.touch(step)
        process, _, kind = flags.mistake.partition(":")
        if step == 5 and process in ("all", str(hosts.process_index)):
            make_mistake(kind)
        if step % 5 == 0:
            print(f"step {step}", flush=True)
        time.sleep(0.05)


def compile_twice(mistaken: bool) -> None:
    """Two programs, the first with process 0's profile; a process that is mistaken compiles the second otherwise."""

    def compiled(lowered, options, target, buckets, profile="process 0's seconds"):
        if jax.process_index():
            print(profile)
        return lowered.compile(options), profile

    compiling.compile_guided = compiled
    lowered = jax.jit(lambda x: jnp.tanh(x + 1) * 2 - x.sum()).lower(jnp.ones(5))
    for options in ({}, {"xla_disable_all_hlo_passes": "True"} if mistaken else {}):
        print("result", compiling.compile_for_all(lowered, options, None)(jnp.ones(5))[0], flush=True)


def make_mistake(kind: str) -> None:
    errors = {"user": UserError("learning_rate (-1) must be positive"), "bug": KeyError("a bug")}
    errors["nan"] = NonFiniteError("the loss of step 5 is nan")
    if kind in errors:
        raise errors[kind]
    time.sleep(1000)  # stuck


if __name__ == "__main__":
    main()
