"""One process of a job of several, for test_hosts.py: steps of a psum until a signal stops it.

Each process prints `step N` now and then, and `stopped at N` when all have agreed on it. Mistakes end it as
moe_jax.training.hosts ends any process.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.errors import NonFiniteError, UserError
from moe_jax.training.hosts import HostsConfig, StopSignal, start_hosts
from moe_jax.training.watchdog import exit_code_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    parser.add_argument("--start_timeout", type=int, default=30)
    parser.add_argument("--lost_after", type=float, default=3.0)
    parser.add_argument("--stall_after", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--exit_code", type=int, default=0)
    parser.add_argument("--mistake", default="", help="process_id:kind of an exception, at step 5")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    config = HostsConfig(
        coordinator=flags.coordinator,
        num_processes=flags.num_processes,
        process_id=flags.process_id,
        start_timeout_seconds=flags.start_timeout,
        lost_after_seconds=flags.lost_after,
        stall_after_seconds=flags.stall_after,
    )
    try:
        hosts = start_hosts(config)
    except Exception as error:
        print(error, file=sys.stderr)
        sys.exit(exit_code_of(error))
    with hosts, StopSignal(processes=hosts.process_count) as stop:
        run_steps(flags, hosts, stop)
        hosts.close()
        sys.exit(flags.exit_code)


def run_steps(flags, hosts, stop: StopSignal) -> None:
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, P("d"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("d"), P("d")), out_specs=(P(), P()))
    def train_step(x_d, flag_d):
        return jax.lax.psum(x_d, "d"), jax.lax.pmax(flag_d, "d")

    texts = hosts.gather_text("devices", f"{hosts.process_index} of {hosts.process_count}")
    print(f"start with {devices} devices, {texts}, nodes of {hosts.node_size(jax.devices())}", flush=True)
    x_D = jax.make_array_from_callback((devices,), everywhere, lambda index: jnp.ones(devices)[index])
    flags_returned = {}
    for step in range(flags.steps):
        if step >= stop.lag:
            stop.observe(int(flags_returned.pop(step - stop.lag)[0]), step - stop.lag)
        if stop.should_stop(step):
            print(f"stopped at {step}", flush=True)
            return
        local = [int(stop.requested)] * devices
        flag_D = jax.make_array_from_callback((devices,), everywhere, lambda index, f=local: jnp.array(f)[index])
        total, flags_returned[step] = train_step(x_D, flag_D)
        assert int(total[0]) == devices
        hosts.touch(step)
        make_mistake(flags, hosts, step)
        if step % 5 == 0:
            print(f"step {step}", flush=True)
        time.sleep(0.05)


def make_mistake(flags, hosts, step: int) -> None:
    process, _, kind = flags.mistake.partition(":")
    if step != 5 or process not in ("all", str(hosts.process_index)):
        return
    if kind == "user":
        raise UserError("learning_rate (-1) must be positive")
    if kind == "nan":
        raise NonFiniteError("the loss of step 5 is nan")
    if kind == "bug":
        raise KeyError("a bug")
    if kind == "babble":
        hosts._peers[0].connection.sendall(b"GET / HTTP/1.1\n")
        time.sleep(1000)
    if kind == "stuck":
        time.sleep(1000)


if __name__ == "__main__":
    main()
