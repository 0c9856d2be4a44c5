"""This process among the processes of its job, and the watch that ends it when another one has died. No arrays.

Inputs: the connections that the rendezvous made, a star around process 0. Outputs: one line on stderr that names the
lost process, and exit code 4; and texts gathered from all processes with a time limit.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Sequence
from typing import NoReturn

import jax

from moe_jax.errors import HostLostError, NonFiniteError, UserError
from moe_jax.training.rendezvous import MalformedMessage, Peer

EXIT_HOST_LOST = 4
# Outcomes of the whole job (a user's mistake, a loss that is not finite) rather than of one machine: every process ends
# with the same code, so that a cluster's scheduler sees the same code on all of them.
_SHARED_EXIT_CODES = (2, 3)
_ABORT_WAIT_SECONDS = 5.0
_FAREWELL_SECONDS = 2.0
_GRACE_SECONDS = 3.0
# An exception of a step that contains one of these words is probably caused by a lost process; then the watchdog gets
# time to name that process.
_COMMUNICATION_WORDS = ("gloo", "nccl", "unavailable", "deadline", "socket", "connection", "coordination", "aborted")


def exit_code_of(error: BaseException) -> int:
    """Return the exit code that a command ends with after an exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    for kind, code in ((UserError, 2), (NonFiniteError, 3), (HostLostError, EXIT_HOST_LOST), (KeyboardInterrupt, 130)):
        if isinstance(error, kind):
            return code
    return 1


# A thread watches the other processes: process 0 all, the others process 0. A killed process is noticed when the kernel
# closes its connection, a machine that vanished by a timeout.
#
# The coordination service of jax.distributed notices a death too, but then aborts the process from C++ (exit code 134
# and a stack trace), and the Python callback that could replace this cannot take its own argument. When process 0 dies
# that abort comes within milliseconds: a handler of SIGABRT prints the verdict found here first.
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

    Args:
      process_index, process_count: this process and the number of processes.
      peers: process 0's connection to every other process, or another process' connection to process 0; none: no watch.
      host_ids: the machine of every process, by index.
      lost_seconds: silence after which a process counts as lost.
      stall_seconds: time since the last `touch` after which this process reports itself as stuck; 0 = never.
    """

    def __init__(
        self,
        *,
        process_index: int = 0,
        process_count: int = 1,
        peers: Sequence[Peer] = (),
        host_ids: Sequence[str] = ("",),
        lost_seconds: float = 30.0,
        stall_seconds: float = 0.0,
    ):
        self.process_index, self.process_count = process_index, process_count
        self.is_main = process_index == 0  # whether it writes what only one may write
        self._peers, self.host_ids = tuple(peers), tuple(host_ids)
        self._lost_seconds, self._stall_seconds = lost_seconds, stall_seconds
        self._self = f"process {process_index} ({socket.gethostname()})"
        self._send_lock, self._end_lock = threading.Lock(), threading.Lock()
        self._verdict: dict | None = None
        self._verdict_reached, self._stopped = threading.Event(), threading.Event()
        self._heard = threading.Condition()
        self._received_texts: dict[str, dict[int, str]] = {}  # process 0: the texts received on a topic so far
        self._texts: dict[str, list[str]] = {}  # topics on which all texts have arrived
        self._touched: tuple[float, int] | None = None
        for peer in self._peers:
            peer.connection.settimeout(lost_seconds)  # bounds sending; reading waits for the selector
            peer.last_heard = time.monotonic()
        if self._peers:
            # The signal module cannot do this: its handlers run in the main thread, which may be blocked; this one runs
            # in the thread that aborts.
            self._abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)  # kept: C holds no reference
            _set_abort_handler(self._abort_handler)
            threading.Thread(target=self._watch, name="moe_jax watchdog", daemon=True).start()

    def node_size(self, devices: Sequence) -> int:
        """Return how many devices a node has: those of all processes on one machine.

        Args:
          devices: of the job, in the order of the device index; what counts is their `process_index`.

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

        Args:
          topic: a name that all processes use, each once.

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
        _set_abort_handler(ctypes.c_void_p(0))  # SIG_DFL

    def fail(self, error: BaseException) -> NoReturn:
        """End this process because of an exception and send the others the reason, unless another process caused it.

        Several processes only. When a process dies, the step of the others may raise before the watch has noticed;
        the watch then ends this process, naming the one that died.
        """
        code, line = exit_code_of(error), f"{type(error).__name__}: {error}"
        if code == 1:
            communication = any(word in line.lower() for word in _COMMUNICATION_WORDS)
            if self._verdict_reached.wait(self._lost_seconds + 5.0 if communication else 1.0):
                threading.Event().wait()  # until the watch ends this process
            if not isinstance(error, SystemExit):
                traceback.print_exception(error)
        elif not isinstance(error, SystemExit):
            print(error, file=sys.stderr)
        self._stopped.set()
        what = f"{self._self} ended with exit code {code}: {line.splitlines()[0]}"
        shared = code if code in _SHARED_EXIT_CODES else EXIT_HOST_LOST
        self._send_verdict({"line": what, "exit_code": shared, "grace_seconds": _GRACE_SECONDS})
        _exit_now(code)

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
            _exit_now(code)

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


def _exit_now(exit_code: int) -> NoReturn:
    """Leave without the atexit hooks, one of which is a barrier among processes that may be gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(exit_code)
