"""Which processes share a machine, and so how many devices a node of the mesh has. No arrays."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_jax.errors import UserError


# Processes share a node if their host name, boot and network namespace are equal, or NCCL_HOSTID, where that is set:
# nearly the rule of NCCL.
def machine_id(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that is equal on two processes exactly if they share a machine."""
    if environment.get("NCCL_HOSTID"):
        return f"NCCL_HOSTID {environment['NCCL_HOSTID']}"
    parts = [os.uname().nodename]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    except OSError:  # not Linux
        pass
    return " ".join(parts)


def node_size(devices: Sequence, machines: Sequence[str]) -> int:
    """Return how many of a job's devices, in the order of their index, a node has: those on one machine.

    Args:
      machines: by the index of a process, what `machine_id` returns there.

    Raises:
      UserError: the machines have different numbers of devices, or a machine's devices do not follow one another.
    """
    if len(set(machines)) <= 1:
        return len(devices)
    runs = [(name, len(list(run))) for name, run in itertools.groupby(machines[d.process_index] for d in devices)]
    counts = [count for _, count in runs]
    remedy = f"or set MeshConfig.devices_per_node to a divisor of the {len(devices)} devices"
    if len(runs) > len({name for name, _ in runs}):
        raise UserError(
            f"the {len(machines)} processes are not numbered host by host (devices in a row on one host: {counts}), "
            "so devices that share a node are not neighbours in the mesh; give the processes of one host "
            f"neighbouring --process_id, as srun --distribution=block does, {remedy}"
        )
    if len(set(counts)) > 1:
        raise UserError(
            f"the {len(runs)} hosts of this job have different numbers of devices ({counts}), and the nodes of a "
            f"mesh must be alike; start as many devices on each host, {remedy}"
        )
    return counts[0]
