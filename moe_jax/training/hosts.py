"""Starts this process' part of a job on one or several hosts, and agrees on its last step. No arrays.

Inputs: a HostsConfig (from flags) and the environment (Slurm, Open MPI, Kubernetes). Outputs: `Hosts` (watchdog.py),
with jax.distributed started where there are several processes, after a rendezvous of them all (rendezvous.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from moe_jax.errors import UserError
from moe_jax.training.rendezvous import Place, connect, derive_token, gather_peers, held_port, machine_id
from moe_jax.training.watchdog import Hosts, exit_code_of

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


# The agreement on the last step costs no extra communication. Every step takes this process' flag and returns the
# maximum over all processes among its metrics; the host reads a step's metrics a fixed number of steps later (`lag`).
# All processes read the same flags before the same steps, so they stop at the same one:
#
#     stop = StopSignal(processes=hosts.process_count)
#     for step in range(first, last):
#         if step - stop.lag >= first:
#             stop.observe(int(metrics[step - stop.lag].stop_wanted), step - stop.lag)
#         if stop.should_stop(step):
#             break                                     # save; `step` is the first step that was not made
#         state, metrics[step] = train_step(state, batch, int(stop.requested))
class StopSignal:
    """Handle SIGTERM and SIGINT from creation to the end of its `with` block; create it in the main thread.

    Args:
      processes: number of processes of the job. With one, `should_stop` follows the own flag and `observe` is idle.
      lag: a step's flag is observed before this many steps later; 1 = before the next step.

    Attributes:
      requested: whether this process was asked to stop, as an int the step's input; set it to ask as a signal does.
        The first signal after that does not end the process yet.
    """

    def __init__(self, *, processes: int = 1, lag: int = 1):
        if lag < 1:
            raise ValueError(f"lag ({lag}) must be at least 1: a step's flag is known after the step")
        self.lag = lag
        self._processes = processes
        self.requested = False
        self._stop_step: int | None = None
        self._last_allowed: int | None = None
        # Python runs a handler in the main thread only, and that may wait in a collective for ever. The wakeup pipe is
        # written by the C handler itself, so a thread sees every signal at once.
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # a function in place of the default action, which ends the process
        self._previous = {number: signal.signal(number, lambda _number, _frame: None) for number in _SIGNALS}
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="moe_jax stop signal", daemon=True).start()

    def observe(self, global_flag: int, step: int) -> None:
        """Note the maximum of all processes' flags that step `step` returned; call it for every step, in order."""
        if self._processes == 1 or not global_flag or self._stop_step is not None:
            return
        self._stop_step = step + self.lag
        if self._last_allowed is not None and self._last_allowed >= self._stop_step:
            raise RuntimeError(
                f"the flag of step {step} must be observed before step {self._stop_step} is allowed, but step "
                f"{self._last_allowed} already was: other processes may have stopped there"
            )

    def should_stop(self, step: int) -> bool:
        """Say, before step `step` is dispatched, whether the run ends instead."""
        if self._processes == 1:
            return self.requested
        if self._stop_step is not None and step >= self._stop_step:
            return True
        self._last_allowed = step
        return False

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, *_error) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write_end)

    def _listen(self) -> None:
        is_first = True
        while data := os.read(self._read_end, 1):
            if data[0] in _SIGNALS:
                if not is_first:
                    os._exit(128 + data[0])
                is_first, self.requested = False, True
        os.close(self._read_end)


__all__ = ["Hosts", "HostsConfig", "StopSignal", "exit_code_of", "start_hosts"]

_JAX_HEARTBEAT_MARGIN_SECONDS = 10
_SHARD_AUTOTUNING = "xla_gpu_shard_autotuning"
_SERVICE_SECONDS = 5.0  # jax tries for itself, for as long as `start_timeout_seconds`, if this was too short

# How long the end may wait for other processes, one of which may still draw plots; one that dies ends the wait.
SHUTDOWN_TIMEOUT_SECONDS = 1800


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """This process' place in its job; None is read from the environment, and without a job there it runs alone.

    Attributes:
      coordinator: "host:port" of process 0, as every process reaches it.
      num_processes: processes of the job.
      process_id: this one's index, 0 to num_processes - 1.
      start_timeout_seconds: how long to wait for the other processes.
      lost_after_seconds: silence after which a process counts as lost; one that is killed is noticed at once.
      stall_after_seconds: time without a step after which a process ends the job (exit code 4); 0 = never. It runs
        while a step, a batch of an evaluation or a checkpoint is under way, not while the first step is compiled, so it
        must be longer than the longest of these. A re-jit that a step waits for counts as part of that step.
      job_token: a secret that all processes of the job were given; None takes MOE_JAX_JOB_TOKEN from the environment,
        and without that a hash of the launcher's job id and the coordinator's address (see `derive_token`).
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    start_timeout_seconds: int = 300
    lost_after_seconds: float = 30.0
    stall_after_seconds: float = 1800.0
    job_token: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        if self.coordinator is not None:
            _split_address(self.coordinator)
        if self.num_processes is not None and self.num_processes < 1:
            raise UserError(f"num_processes ({self.num_processes}) must be at least 1")
        if self.process_id is not None and not 0 <= self.process_id < (self.num_processes or self.process_id + 1):
            raise UserError(
                f"process_id ({self.process_id}) must lie in 0..num_processes - 1 (num_processes = "
                f"{self.num_processes}); number the processes from 0"
            )
        for name in ("start_timeout_seconds", "lost_after_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} ({getattr(self, name)}) must be positive")
        if not self.stall_after_seconds >= 0:
            raise UserError(f"stall_after_seconds ({self.stall_after_seconds}) must be 0 (never) or positive")
        if self.job_token == "":
            raise UserError("job_token ('') must not be empty; give a secret that all processes share, or none at all")


def start_hosts(config: HostsConfig | None = None, environment: Mapping[str, str] = os.environ) -> Hosts:
    """Start jax.distributed if flags or environment name several processes; return this process' place.

    Raises:
      UserError: flags that are incomplete or contradict each other or those of another process.
      HostLostError: another process did not come in time.
    """
    config = config or HostsConfig()
    by_flags = None not in (config.coordinator, config.num_processes, config.process_id)
    config, local_device_ids = resolve_hosts(config, environment)
    count, index = config.num_processes, config.process_id
    if count == 1 or config.coordinator is None or count is None or index is None:
        return Hosts()
    if jax.distributed.is_initialized():
        raise RuntimeError("start_hosts must be called once, and instead of jax.distributed.initialize")
    host, port = _split_address(config.coordinator)
    launcher = None if by_flags else find_launcher(environment)
    token = derive_token(config.job_token, config.coordinator, launcher, environment)
    place = Place(index=index, count=count, host=host, port=port, token=token, host_id=machine_id(environment))
    # `--coordinator` is where process 0 listens for the rendezvous; the port of jax's own service is free to choose, so
    # process 0 picks it and offers it to the others.
    with held_port() if index == 0 else contextlib.nullcontext("") as offer:
        if index == 0:
            peers, host_ids = gather_peers(place, offer=offer, seconds=config.start_timeout_seconds)
        else:
            hub, host_ids, offer = connect(place, seconds=config.start_timeout_seconds)
            peers = [hub]
            deadline = time.monotonic() + _SERVICE_SECONDS
            while time.monotonic() < deadline:  # after a failed attempt jax would wait a second
                try:
                    socket.create_connection((host, int(offer)), timeout=_SERVICE_SECONDS).close()
                    break
                except OSError:
                    time.sleep(0.01)
        hosts = Hosts(
            process_index=index,
            process_count=count,
            peers=peers,
            host_ids=host_ids,
            lost_seconds=config.lost_after_seconds,
            stall_seconds=config.stall_after_seconds,
        )
        # XLA reads its flags when a backend first starts. Without this one it shares the timing of kernels among
        # processes: one that finds a program in a cache would leave the others waiting, and one that compiles a program
        # of its own would wait for them. jax 0.10.2, 0.11.2 and 0.12.0.1 know the flag; an unknown name in XLA_FLAGS
        # would end the process.
        given = os.environ.get("XLA_FLAGS", "")
        if _SHARD_AUTOTUNING not in given:
            os.environ["XLA_FLAGS"] = f"{given} --{_SHARD_AUTOTUNING}=false".strip()
        # jax's own handler of SIGTERM takes the signal from Python's handlers; StopSignal agrees on a step without it.
        jax.config.update("jax_enable_preemption_service", False)
        try:
            jax.distributed.initialize(
                f"[{host}]:{offer}" if ":" in host else f"{host}:{offer}",
                count,
                index,
                local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=config.start_timeout_seconds,
                heartbeat_timeout_seconds=int(config.lost_after_seconds) + _JAX_HEARTBEAT_MARGIN_SECONDS,
                shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_SECONDS,
            )
        except Exception as error:
            hosts.fail(error)
    return hosts


def resolve_hosts(
    config: HostsConfig, environment: Mapping[str, str] = os.environ
) -> tuple[HostsConfig, Sequence[int] | None]:
    """Fill in from the environment what the flags leave open.

    The flags win; then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; then what jax's own cluster
    detection reads from Slurm, Open MPI or Kubernetes.

    Returns: the completed config (num_processes = 1 for a process alone) and the device ids of this process on its
      host, or None for all of them.
    """
    coordinator = config.coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    count = _first_int(config.num_processes, environment, "JAX_NUM_PROCESSES")
    index = _first_int(config.process_id, environment, "JAX_PROCESS_ID")
    local_device_ids = None
    launcher = find_launcher(environment)
    if launcher == "Open MPI":  # version 5 gives each process its rank, but no address of process 0
        count = _first_int(count, environment, "OMPI_COMM_WORLD_SIZE")
        index = _first_int(index, environment, "OMPI_COMM_WORLD_RANK")
        local_rank = _first_int(None, environment, "OMPI_COMM_WORLD_LOCAL_RANK")
        local_device_ids = None if local_rank is None else [local_rank]
    if count != 1 and (launcher == "Slurm" or (launcher and None in (coordinator, count, index))):
        seconds = config.start_timeout_seconds
        try:
            from jax._src.clusters import ClusterEnv  # the only private name of jax in this file

            found = ClusterEnv.auto_detect_unset_distributed_params(coordinator, count, index, None, None, seconds)
        except Exception as error:  # any error of a launcher's variables, an API server or another version of jax
            raise UserError(
                f"this looks like a job of {launcher}, but jax could not read it ({type(error).__name__}: {error}); "
                "give --coordinator, --num_processes and --process_id"
            ) from error
        if None in found[:3]:
            raise UserError(
                f"this looks like a job of {launcher}, but jax does not find coordinator, number and index of the "
                "processes in it; give --coordinator, --num_processes and --process_id, or install what jax misses "
                "(the package `kubernetes` there, `mpi4py` under Open MPI 5)"
            )
        coordinator, count, index, local_device_ids = found
    if "JAX_LOCAL_DEVICE_IDS" in environment:
        local_device_ids = None  # jax reads it
    given = {"coordinator": coordinator, "num_processes": count, "process_id": index}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == 3 or count == 1:
        return dataclasses.replace(config, coordinator=None, num_processes=1, process_id=0), None
    if missing:
        shown = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise UserError(
            f"{shown} given, but not {', '.join(missing)}, and the environment does not tell (no Slurm, Open MPI or "
            "Kubernetes job): give all three, or none for a process alone"
        )
    return dataclasses.replace(config, **given), local_device_ids


def find_launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return which launcher started this process as one of several, if one did."""
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if (_first_int(None, environment, "OMPI_COMM_WORLD_SIZE") or 1) > 1:
        return "Open MPI"
    if all(name in environment for name in slurm) and (_first_int(None, environment, "SLURM_NTASKS") or 1) > 1:
        return "Slurm"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return None


def _first_int(value: int | None, environment: Mapping[str, str], name: str) -> int | None:
    if value is not None or name not in environment:
        return value
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"{name} ({environment[name]!r} in the environment) must be a whole number") from None


def _split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    try:
        is_name = bool(host.encode("idna"))  # as the resolver reads it
    except UnicodeError:
        is_name = False
    if not colon or not is_name or not is_port:
        raise UserError(
            f"coordinator ({address!r}) must be host:port with a port in 1..65535, as in 10.0.0.1:8476 or [::1]:8476"
        )
    return host.strip("[]"), int(port)
