"""The start of a process of a job: its place, by flags or the environment of Slurm or Open MPI; jax.distributed."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

import jax

from moe_jax.config.command_line import exit_now
from moe_jax.errors import HostLostError, UserError
from moe_jax.jobs.hosts import LOST, Hosts, Watch

# XLA shares the timing of kernels among processes, each of which then waits for the others: one that compiles a program
# alone, or finds it in a cache, would wait for ever. It reads its flags when a backend first starts.
ALONE = {"xla_gpu_shard_autotuning": "False"}
Place = tuple[str | None, int | None, int | None]  # (host:port of process 0, processes of the job, index of this one)


def start_hosts(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None,
    lost_after_seconds: float = 30.0, stall_after_seconds: float = 0.0, start_timeout_seconds: float = 300.0,
) -> Hosts:  # fmt: skip
    """Start jax.distributed if arguments or environment name several processes; return this process' place.

    Where others do not come in time, a line is printed and the process ends: jax waits in C++, and would abort.

    Args:
      coordinator: host:port of process 0, as every process reaches it; num_processes, process_id: of the job, and this
        one's index. None is read from the environment, and without a job there the process runs alone.
      lost_after_seconds: silence after which a process is lost.
      stall_after_seconds: time without a step after which a process ends the job, 0 for never. It runs while a step, a
        batch of an evaluation or a checkpoint is under way, not while a program is compiled.

    Raises:
      UserError: arguments that are incomplete, or contradict those of another process.
    """
    if not (1 <= lost_after_seconds <= 10**6 and 0 <= stall_after_seconds <= 10**6):
        given = f"--lost_after_seconds ({lost_after_seconds}) and --stall_after_seconds ({stall_after_seconds})"
        raise UserError(f"{given} must lie between 1, or 0, and {10**6}")
    place, device_ids = find_place((coordinator, num_processes, process_id))
    address, count, index = place
    if count == 1:
        return Hosts()
    given = os.environ.get("XLA_FLAGS", "")
    if not any(flag in given for flag in ALONE):
        os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{flag}={value.lower()}" for flag, value in ALONE.items())])
    # jax's own handler of SIGTERM takes the signal from Python's handlers; StopSignal agrees on a step without it
    jax.config.update("jax_enable_preemption_service", False)

    def give_up(why=f"not all came to {address} within {start_timeout_seconds:g} s; give all its --num_processes"):
        print(f"error: {why}", file=sys.stderr)
        exit_now(LOST)

    late = threading.Timer(start_timeout_seconds, give_up)
    late.daemon = True
    late.start()
    bound = bind_address(address)
    try:
        if index == 0:  # on a port that is taken jax may crash in C++ before it can raise
            host, port = split_address(bound.replace("[::]", "0.0.0.0"))
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        jax.distributed.initialize(
            *place,
            device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=bound,
            initialization_timeout=int(start_timeout_seconds) + 60,
            # jax's client aborts its process, without a name, from half of this on: the watch has to come before
            heartbeat_timeout_seconds=2 * int(lost_after_seconds + 30),
            shutdown_timeout_seconds=1800,  # one may still draw plots; the watch goes on meanwhile
        )
    except Exception as error:
        raise HostLostError(f"nothing starts at {address} ({str(error).splitlines()[0]})") from error
    hosts = Hosts(count, index)
    late.cancel()
    hosts.watch = Watch(index, hosts.names, lost_after_seconds, stall_after_seconds)
    return hosts


def find_place(place: Place, environment: Mapping[str, str] = os.environ) -> tuple[Place, list[int] | None]:
    """Return (host:port of process 0, processes, index), 1 process if alone, and this one's device ids, None for all.

    What is given wins; then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID; then Open MPI's ranks, or what
    jax itself reads from a step of Slurm. A UserError where a part is missing, or cannot be read.
    """
    address = place[0] or environment.get("JAX_COORDINATOR_ADDRESS")
    count = _first_int(place[1], environment, "JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE")
    index = _first_int(place[2], environment, "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK")
    local = _first_int(None, environment, "OMPI_COMM_WORLD_LOCAL_RANK")
    devices = None if local is None else [local]
    if count != 1 and "SLURM_STEP_NODELIST" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        # what jax.distributed.initialize calls has no public name
        from jax._src.clusters import ClusterEnv

        try:
            found = ClusterEnv.auto_detect_unset_distributed_params(address, count, index, None, None, 60)
        except Exception as error:  # any error of Slurm's variables, or of another version of jax
            raise UserError(f"jax cannot read Slurm's variables ({error}); give --coordinator and others") from error
        address, count, index, devices = found
    parts = {"--coordinator": address, "--num_processes": count, "--process_id": index}
    missing = [name for name, value in parts.items() if value is None]
    if count == 1 or len(missing) == 3 and "JOB_COMPLETION_INDEX" not in environment:  # no pod of an indexed job
        return (None, 1, 0), None
    if missing:
        told = [f"{name}={value}" for name, value in parts.items() if value is not None] or ["a pod of an indexed Job"]
        raise UserError(f"{', '.join(told)} is given, but not {', '.join(missing)}: give all three, or one process")
    if count < 1 or not 0 <= index < count:
        raise UserError(f"--process_id ({index}) must lie in 0..num_processes - 1, and --num_processes is {count}")
    split_address(address)
    return (address, count, index), None if "JAX_LOCAL_DEVICE_IDS" in environment else devices  # jax reads those


def _first_int(value: int | None, environment: Mapping[str, str], *names: str) -> int | None:
    name = next((name for name in names if name in environment), None)
    if value is not None or name is None:
        return value
    if not environment[name].isdecimal():
        raise UserError(f"{name} ({environment[name]!r} in the environment) must be a whole number")
    return int(environment[name])


def split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of a coordinator's address; a UserError where it is none."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{address}")
        if parts.hostname and parts.port and "@" not in address and parts.hostname.encode("idna"):
            return parts.hostname, parts.port
    raise UserError(f"--coordinator ({address!r}) must be host:port, as in 10.0.0.1:8476 or [::1]:8476")


def bind_address(address: str) -> str:
    """Return where process 0 listens: at the coordinator's own address; at all where only others know that."""
    host, port = split_address(address)
    bound = "::"
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        if not found.startswith("127.") or host in ("localhost", found):  # else /etc/hosts has it for the own name
            bound = found
    return f"[{bound}]:{port}" if ":" in bound else f"{bound}:{port}"
