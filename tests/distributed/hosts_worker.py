"""One process of a job of two, for test_hosts.py: steps of a psum, until a mistake ends it as training would end."""

import argparse
import contextlib
import itertools
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.config.command_line import exit_code_of
from moe_jax.errors import NonFiniteError, UserError
from moe_jax.training.hosts import HostsConfig, start_hosts


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
    config = HostsConfig(
        coordinator=flags.coordinator,
        num_processes=flags.num_processes,
        process_id=flags.process_id,
        start_timeout_seconds=30,
        lost_after_seconds=flags.lost_after,
        stall_after_seconds=flags.stall_after,
    )
    try:
        hosts = start_hosts(config)
    except Exception as error:
        print(error, file=sys.stderr)
        sys.exit(exit_code_of(error))
    with hosts:
        if sys.platform == "linux":
            print("open ports", open_ports(), flush=True)
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
            make_mistake(kind, hosts)
        if step % 5 == 0:
            print(f"step {step}", flush=True)
        time.sleep(0.05)


def open_ports() -> list[tuple[str, int]]:
    """Return (address, port) of each TCP socket of this process that listens (Linux); an address is hexadecimal."""
    inodes, found = set(), []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    for table in ("tcp", "tcp6"):
        for row in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def make_mistake(kind: str, hosts) -> None:
    errors = {"user": UserError("learning_rate (-1) must be positive"), "bug": KeyError("a bug")}
    errors["nan"] = NonFiniteError("the loss of step 5 is nan")
    if kind in errors:
        raise errors[kind]
    if kind == "babble":
        hosts._peers[0].connection.sendall(b"GET / HTTP/1.1\n")
    time.sleep(1000)  # stuck


if __name__ == "__main__":
    main()
