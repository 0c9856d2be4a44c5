"""Measures the bandwidth of a lab's links: times a ring of ppermutes over all devices, for a few sizes.

    sudo python scripts/lab/cluster.py --hosts=4 --rate=200mbit -- python scripts/lab/ring.py [--seconds=5]

Each device sends its array to the next one, so each host sends and receives the array of one device over its link: the
floor is bytes / rate. Prints a table from process 0. With --seconds it goes on for that long, for tests that interrupt
it.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.training.hosts import Hosts, start_hosts


def make_ring(elements: int) -> Callable[[], float]:
    """Return a function that makes one step, each device sending that many float32, and returns its seconds."""
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("ring",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("ring"))
    pairs = [(i, (i + 1) % devices) for i in range(devices)]

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("ring"), out_specs=P("ring"))
    def pass_on(x):
        return jax.lax.ppermute(x, "ring", pairs)

    shards = [jax.device_put(jnp.ones(elements), device) for device in mesh.local_devices]
    x = jax.make_array_from_single_device_arrays((devices * elements,), sharding, shards)
    jax.block_until_ready(pass_on(x))

    def step() -> float:
        start = time.perf_counter()
        jax.block_until_ready(pass_on(x))
        return time.perf_counter() - start

    return step


def main(hosts: Hosts) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.0)
    flags = parser.parse_args()
    if hosts.is_main:
        print(
            f"{hosts.process_count} processes, {jax.device_count()} devices; KiB sent by each device, median ms a step:"
        )
    for kib in (16, 64, 256, 1024):
        step = make_ring(kib * 256)
        seconds = statistics.median(step() for _ in range(9))
        if hosts.is_main:
            print(f"{kib:6d} KiB {seconds * 1e3:9.2f} ms", flush=True)
    step, pause = make_ring(256), 0.01
    for _ in range(int(flags.seconds / pause)):  # the same number of steps everywhere, whatever a process' clock says
        step()
        time.sleep(pause)


if __name__ == "__main__":
    with start_hosts() as this_process:
        main(this_process)
