"""This process' part of a job on one or several hosts: its start, the watch over the others, its last step. No arrays.

Inputs: a HostsConfig (from flags) and the environment (Slurm, Open MPI, Kubernetes). Outputs: `Hosts`, with
jax.distributed started where there are several processes, after a rendezvous of them all (rendezvous.py); where one is
lost, a line on stderr that names it, and exit code 4.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import jax

from moe_jax.config.command_line import EXIT_CODES, exit_code_of, exit_now
from moe_jax.errors import HostLostError, NonFiniteError, UserError
from moe_jax.recovery.job_secret import derive_key, read_secret
from moe_jax.recovery.relay import Relay
from moe_jax.recovery.rendezvous import MalformedMessage, Peer, Place, connect, gather_peers, machine_id
from moe_jax.training.compiling import ALONE, trust_programs

_JAX_LATER_SECONDS = 30
_LONGEST_SECONDS = 10**6

_SHUTDOWN_SECONDS = 1800  # the end waits for the others, one of which may still draw plots; one that dies ends the wait


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """This process' place in its job; None is read from the environment, and without a job there it runs alone."""

    coordinator: str | None = None  # "host:port" of process 0, as every process reaches it
    num_processes: int | None = None  # of the job
    process_id: int | None = None  # this one's index, 0 to num_processes - 1
    start_timeout_seconds: int = 300  # to wait for the other processes
    lost_after_seconds: float = 30.0  # silence after which a process is lost; one that is killed is noticed at once
    # Time without a step after which a process ends the job (exit code 4); 0 = never. It runs while a step, a batch of
    # an evaluation or a checkpoint is under way, not while the first step is compiled, so it must be longer than the
    # longest of these. A re-jit that a step waits for counts as part of that step.
    stall_after_seconds: float = 1800.0

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
            if not 0 < getattr(self, name) <= _LONGEST_SECONDS:
                raise UserError(f"{name} ({getattr(self, name)}) must be positive and at most {_LONGEST_SECONDS}")
        if not self.stall_after_seconds >= 0:
            raise UserError(f"stall_after_seconds ({self.stall_after_seconds}) must be 0 (never) or positive")


def start_hosts(config: HostsConfig | None = None, environment: Mapping[str, str] = os.environ) -> Hosts:
    """Start jax.distributed if flags or environment name several processes; return this process' place.

    Raises:
      UserError: flags that are incomplete or contradict each other or those of another process, or no secret.
      HostLostError: another process did not come in time.
    """
    config = config or HostsConfig()
    config, local_device_ids = resolve_hosts(config, environment)
    count, index = config.num_processes, config.process_id
    if count == 1 or config.coordinator is None or count is None or index is None:
        return Hosts()
    if jax.distributed.is_initialized():
        raise RuntimeError("start_hosts must be called once, and instead of jax.distributed.initialize")
    host, port = _split_address(config.coordinator)
    place = Place(
        index=index, count=count, host=host, port=port, token=read_secret(environment), host_id=machine_id(environment)
    )
    listeners: list[socket.socket] = []
    if index == 0:
        peers, host_ids, epoch, listeners = gather_peers(place, seconds=config.start_timeout_seconds)
    else:
        hub, host_ids, epoch = connect(place, seconds=config.start_timeout_seconds)
        peers = [hub]
    relay = Relay(place, listeners)
    own = (peers[0].connection if index else listeners[0]).getsockname()[0]
    hosts = Hosts(
        config=config,
        peers=peers,
        host_ids=host_ids,
        relay=relay,
        addresses=(own, own if index else host),
        key=derive_key(place.token, f"this start, {epoch}"),
    )
    trust_programs(derive_key(place.token, f"programs of {epoch}"))
    # XLA reads its flags when a backend first starts. Without this one it shares the timing of kernels among processes:
    # one that finds a program in a cache would leave the others waiting, and one that compiles a program of its own
    # would wait for them. jax 0.10.2, 0.11.2 and 0.12.0.1 know the flag; an unknown name in XLA_FLAGS would end the
    # process.
    given = os.environ.get("XLA_FLAGS", "")
    for flag, value in ALONE.items():
        if flag not in given:
            os.environ["XLA_FLAGS"] = f"{given} --{flag}={value.lower()}".strip()
    if any(name.lower().endswith("_proxy") for name in os.environ):  # gRPC would ask a proxy for the loopback port
        direct = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""
        os.environ["no_grpc_proxy"] = f"{direct},127.0.0.1".strip(",")
    # jax's own handler of SIGTERM takes the signal from Python's handlers; StopSignal agrees on a step without it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            relay.address,
            count,
            index,
            local_device_ids,
            cluster_detection_method="deactivate",
            coordinator_bind_address=relay.service_address,
            initialization_timeout=config.start_timeout_seconds,
            # jax's client aborts its process from half of this on, without a name: the watch has to come before
            heartbeat_timeout_seconds=2 * (int(config.lost_after_seconds) + _JAX_LATER_SECONDS),
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except Exception as error:
        hosts.fail(error)
    return hosts


def resolve_hosts(
    config: HostsConfig, environment: Mapping[str, str] = os.environ
) -> tuple[HostsConfig, Sequence[int] | None]:
    """Return the config (num_processes = 1 for a process alone), and the device ids of this process, None for all.

    The flags win; then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; then what jax's own cluster
    detection reads from Slurm, Open MPI or Kubernetes.
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


EXIT_HOST_LOST = EXIT_CODES[HostLostError]
# Outcomes of the whole job rather than of one machine: every process ends with the same code, so that a cluster's
# scheduler sees the same code on all of them.
_SHARED_EXIT_CODES = (EXIT_CODES[UserError], EXIT_CODES[NonFiniteError])
_ABORT_WAIT_SECONDS = 5.0
_FAREWELL_SECONDS = 2.0
_GRACE_SECONDS = 3.0
# An exception of a step that contains one of these words is probably caused by a lost process; then the watchdog gets
# time to name that process.
_COMMUNICATION_WORDS = ("gloo", "nccl", "unavailable", "deadline", "socket", "connection", "coordination", "aborted")


# A thread watches the other processes: process 0 all, the others process 0. A killed process is noticed when the kernel
# closes its connection, a machine that vanished by a timeout.
#
# The coordination service of jax.distributed notices a death too, but then aborts the process from C++ (exit code 134
# and a stack trace), and the Python callback that could replace this cannot take its own argument. So its time limit is
# longer, the relay holds its connection for a while when process 0 dies, and a handler of SIGABRT prints the verdict
# found here first.
#
# A verdict says why this process has to end: the line to print, the exit code, and for how many seconds it may still
# end by itself.
class Hosts:
    """This process among the processes of its job; as a context manager it ends the process with the right exit code.

    In a job of one process everything here does nothing, and exceptions pass through. With several processes, leaving
    the `with` block
      - normally, or after `close`: waits for all others to do the same;
      - by an exception: prints it, tells the others and exits (2 user's error, 3 not finite, 4 lost process, else 1).
        No atexit hook runs then: jax's is a barrier with processes that will not come.
    """

    def __init__(
        self,
        *,
        config: HostsConfig | None = None,  # with this process' place filled in; None: a process alone
        peers: Sequence[Peer] = (),  # process 0's connections to all others, or another's to process 0; none: no watch
        host_ids: Sequence[str] = ("",),  # the machine of every process, by index
        relay: Relay | None = None,  # of jax's connections
        addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),  # to listen at, and where others reach that
        key: bytes = b"",  # that the processes of this start share, and no earlier one
    ):
        config = config or HostsConfig()
        self.process_index, self.process_count = config.process_id or 0, config.num_processes or 1
        self.is_main = self.process_index == 0  # whether it writes what only one may write
        self._peers, self.host_ids, self.addresses, self.key = tuple(peers), tuple(host_ids), addresses, key
        self._lost_seconds, self._stall_seconds = config.lost_after_seconds, config.stall_after_seconds
        self._relay = relay
        self._self = f"process {self.process_index} ({socket.gethostname()})"
        self._send_lock, self._end_lock = threading.Lock(), threading.Lock()
        self._verdict: dict | None = None
        self._verdict_reached, self._stopped = threading.Event(), threading.Event()
        self._heard = threading.Condition()
        self._received_texts: dict[str, dict[int, str]] = {}  # process 0: the texts received on a topic so far
        self._texts: dict[str, list[str]] = {}  # topics on which all texts have arrived
        self._touched: tuple[float, int] | None = None
        for peer in self._peers:
            peer.connection.settimeout(self._lost_seconds)  # bounds sending; reading waits for the selector
            peer.last_heard = time.monotonic()
        if self._peers:
            # The signal module cannot do this: its handlers run in the main thread, which may be blocked; this one runs
            # in the thread that aborts.
            self._abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)  # kept: C holds no reference
            _set_abort_handler(self._abort_handler)
            threading.Thread(target=self._watch, name="moe_jax watchdog", daemon=True).start()

    def node_size(self, devices: Sequence) -> int:
        """Return how many of the job's devices, in the order of their index, a node has: those on one machine.

        Raises:
          UserError: the machines have different numbers of devices, or a machine's devices do not follow one another.
        """
        hosts = self.host_ids
        if len(set(hosts)) <= 1:
            return len(devices)
        runs = [(host, len(list(run))) for host, run in itertools.groupby(hosts[d.process_index] for d in devices)]
        counts = [count for _, count in runs]
        remedy = f"or set MeshConfig.devices_per_node to a divisor of the {len(devices)} devices"
        if len(runs) > len({host for host, _ in runs}):
            raise UserError(
                f"the {len(hosts)} processes are not numbered host by host (devices in a row on one host: {counts}), "
                "so devices that share a node are not neighbours in the mesh; give the processes of one host "
                f"neighbouring --process_id, as srun --distribution=block does, {remedy}"
            )
        if len(set(counts)) > 1:
            raise UserError(
                f"the {len(runs)} hosts of this job have different numbers of devices ({counts}), and the nodes of a "
                f"mesh must be alike; start as many devices on each host, {remedy}"
            )
        return counts[0]

    def touch(self, step: int) -> None:
        """Note that a step was made, or is due from now on, for `stall_seconds`."""
        self._touched = (time.monotonic(), step)

    def rest(self) -> None:
        """Note that no step is due until the next `touch`: `stall_seconds` does not run."""
        self._touched = None

    def gather_text(self, topic: str, text: str, timeout_seconds: float = 300.0) -> list[str]:
        """Return every process' text on a topic, in the order of the processes: a barrier with a time limit.

        All processes use the name of the topic, each once.

        Raises:
          HostLostError: some texts did not arrive in time; process 0 names their processes.
        """
        if self.process_index == 0:
            self._take_text(topic, 0, text)
        else:
            self._broadcast({"kind": "say", "topic": topic, "text": text})
        with self._heard:
            if not self._heard.wait_for(lambda: topic in self._texts, timeout=timeout_seconds):
                said, missing = self._received_texts.get(topic, {}), "(process 0 knows)"
                if self.is_main:
                    missing = [index for index in range(self.process_count) if index not in said]
                raise HostLostError(
                    f"processes {missing} of {self.process_count} did not reach {topic!r} within {timeout_seconds:g} s"
                )
            return self._texts.pop(topic)

    def close(self) -> None:
        """Leave the job together with all other processes; a second call does nothing."""
        if not self._peers or self._stopped.is_set():
            return
        jax.distributed.shutdown()  # waits for all; the watch still runs, in case one of them dies now
        self._stopped.set()
        self._broadcast({"kind": "bye"})
        if self._relay is not None:
            self._relay.close()
        _set_abort_handler(ctypes.c_void_p(0))  # SIG_DFL

    def fail(self, error: BaseException) -> NoReturn:
        """End this process because of an exception and send the others the reason, unless another process caused it.

        Several processes only. When a process dies, the step of the others may raise before the watch has noticed;
        the watch then ends this process, naming the one that died.
        """
        code, line = exit_code_of(error), f"{type(error).__name__}: {error}"
        if code in (1, EXIT_HOST_LOST):
            communication = code == 1 and any(word in line.lower() for word in _COMMUNICATION_WORDS)
            if self._verdict_reached.wait(self._lost_seconds + 5.0 if communication else 1.0):
                threading.Event().wait()  # until the watch ends this process
        if code == 1:
            if not isinstance(error, SystemExit):
                traceback.print_exception(error)
        elif not isinstance(error, SystemExit):
            print(error, file=sys.stderr)
        self._stopped.set()
        what = f"{self._self} ended with exit code {code}: {line.splitlines()[0]}"
        shared = code if code in _SHARED_EXIT_CODES else EXIT_HOST_LOST
        self._send_verdict({"line": what, "exit_code": shared, "grace_seconds": _GRACE_SECONDS})
        self._exit(code)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, _type, error: BaseException | None, _traceback) -> None:
        if error is None or (isinstance(error, SystemExit) and exit_code_of(error) == 0):
            self.close()
        elif self._peers and not self._stopped.is_set():
            self.fail(error)

    # The watch.

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        beat_seconds = min(2.0, self._lost_seconds / 5)
        try:
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            next_beat = time.monotonic()
            while not self._stopped.is_set():
                if time.monotonic() >= next_beat:
                    self._broadcast({"kind": "beat"})
                    next_beat = time.monotonic() + beat_seconds
                for key, _ in selector.select(timeout=max(0.0, next_beat - time.monotonic())):
                    peer = key.data
                    is_open = peer.read()
                    try:
                        while (message := peer.next_message()) is not None:
                            match message["kind"]:
                                case "bye":
                                    peer.has_left = True
                                case "end":
                                    self._end(**message["verdict"])
                                case "say":
                                    self._take_text(message["topic"], peer.index, message["text"])
                                case "texts":
                                    with self._heard:
                                        self._texts[message["topic"]] = message["texts"]
                                        self._heard.notify_all()
                    except (MalformedMessage, KeyError, TypeError) as error:
                        # Only a process that was admitted can have sent it, and all may be waiting for its message.
                        what = f"the message lacks {error}" if isinstance(error, KeyError) else str(error)
                        self._end(f"{peer} is lost: it sent a malformed message ({what})")
                    if not is_open:
                        if not peer.has_left and not self._stopped.is_set():
                            self._end(f"{peer} died: its connection closed")
                        selector.unregister(key.fileobj)
                self._judge_silence()
        except Exception as error:  # if the watch ended silently, the job could hang again
            self._end(f"the watch of {self._self} failed: {error!r}")

    def _judge_silence(self) -> None:
        now = time.monotonic()
        for peer in self._peers:
            if not peer.has_left and now - peer.last_heard > self._lost_seconds:
                self._end(f"{peer} is lost: silent for {now - peer.last_heard:.0f} s")
        touched = self._touched  # another thread may set it
        if self._stall_seconds and touched and now - touched[0] > self._stall_seconds:
            self._end(
                f"{self._self}, or one that it waits for, is stuck: no step for {now - touched[0]:.0f} s after step "
                f"{touched[1]}"
            )

    def _take_text(self, topic: str, index: int, text: str) -> None:
        """Store, as process 0, one process' text; when the last one is there, send all texts to all processes."""
        with self._heard:
            said = self._received_texts.setdefault(topic, {})
            said[index] = text
            if len(said) < self.process_count:
                return
            texts = self._texts[topic] = [said[i] for i in range(self.process_count)]
            del self._received_texts[topic]
            self._heard.notify_all()
        self._broadcast({"kind": "texts", "topic": topic, "texts": texts})

    def _broadcast(self, message: dict) -> None:
        with self._send_lock:
            for peer in self._peers:
                peer.send(message)

    # The end.

    def _end(self, line: str, exit_code: int = EXIT_HOST_LOST, grace_seconds: float = 0.0) -> NoReturn:
        """Send the others the verdict and end this process; the first verdict counts."""
        if self._verdict is None:
            self._verdict = {"line": line, "exit_code": exit_code, "grace_seconds": grace_seconds}
            self._verdict_reached.set()
            self._send_verdict(self._verdict)
        time.sleep(self._verdict["grace_seconds"])
        with self._end_lock:  # never released, so that only one thread prints its line
            code = self._verdict["exit_code"]
            print(f"moe_jax: {self._verdict['line']}; {self._self} ends with exit code {code}", file=sys.stderr)
            self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        if self._relay is not None:
            self._relay.remove_folder()
        exit_now(code)

    def _send_verdict(self, verdict: dict) -> None:
        self._broadcast({"kind": "end", "verdict": verdict})
        if not self.is_main:
            return
        # The coordination service ends with process 0, and the others would abort by it: so process 0 waits until all
        # other ends are closed, whatever lies unread before that.
        hung_up = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
        deadline = time.monotonic() + verdict["grace_seconds"] + _FAREWELL_SECONDS
        still_open = {peer.connection.fileno() for peer in self._peers}
        while still_open and (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            for descriptor in still_open:
                poller.register(descriptor, hung_up)
            still_open -= {descriptor for descriptor, _ in poller.poll(left * 1000)}

    def _on_abort(self, _signal: int) -> None:
        if self._verdict_reached.wait(_ABORT_WAIT_SECONDS) and self._verdict is not None:
            self._end(**self._verdict)


def _set_abort_handler(handler) -> None:
    """Set what C runs at abort(), in the thread that aborts."""
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), handler)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# The agreement on the last step costs no extra communication. Every step takes this process' flag and returns the
# maximum over all processes among its metrics; the host reads a step's metrics a fixed number of steps later (`lag`).
# All processes read the same flags before the same steps, so they stop at the same one (`Loop.train`).
class StopSignal:
    """Handle SIGTERM, SIGINT and SIGHUP (not under nohup) from creation, in the main thread, to the end of `with`.

    Args:
      processes: of the job. With one, `should_stop` follows the own flag and `observe` is idle.
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
        listened = _SIGNALS[: 2 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 3]
        self._previous = {number: signal.signal(number, lambda _number, _frame: None) for number in listened}
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
                if not is_first and data[0] != signal.SIGHUP:  # a closed terminal and its shell send one each
                    os.write(2, b"\nmoe_jax: told to end once more, and ends without saving\n")
                    os._exit(128 + data[0])
                is_first, self.requested = False, True
        os.close(self._read_end)
