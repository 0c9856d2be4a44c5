"""Node boundaries: which processes share a machine, and so how many devices a node has. No arrays, no jax.

Inputs: what names this machine, from every process (the rendezvous exchanges it), and the devices. Outputs: devices of
a node. Processes share a node if their host name, boot and network namespace are equal, or NCCL_HOSTID, where that is
set: nearly the rule of NCCL.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_jax.errors import UserError


def machine_id(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that is equal on two processes exactly if they share a machine."""
    if environment.get("NCCL_HOSTID"):
        return f"NCCL_HOSTID {environment['NCCL_HOSTID']}"
    return " ".join([socket.gethostname(), _boot(), _network()])


def node_size(devices: Sequence, host_ids: Sequence[str]) -> int:
    """Return how many devices a node has: those of all processes on one machine.

    Args:
      devices: of the job, in the order of the device index; what counts is their `process_index`.
      host_ids: the machine of every process, by index; one process or none given is one machine.

    Raises:
      UserError: the machines have different numbers of devices, or a machine's devices do not follow one another.
    """
    if len(set(host_ids)) <= 1:
        return len(devices)
    runs = [(host, len(list(run))) for host, run in itertools.groupby(host_ids[d.process_index] for d in devices)]
    counts = [count for _, count in runs]
    remedy = f"or set MeshConfig.devices_per_node to a divisor of the {len(devices)} devices"
    if len(runs) > len({host for host, _ in runs}):
        raise UserError(
            f"the {len(host_ids)} processes are not numbered host by host (devices in a row on one host: {counts}), so "
            "devices that share a node are not neighbours in the mesh; give the processes of one host neighbouring "
            f"--process_id, as srun --distribution=block does, {remedy}"
        )
    if len(set(counts)) > 1:
        raise UserError(
            f"the {len(runs)} hosts of this job have different numbers of devices ({counts}), and the nodes of a mesh "
            f"must be alike; start as many devices on each host, {remedy}"
        )
    return counts[0]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def _network() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
