"""Ends this process when another one of its job has died, so that none waits for ever. No arrays, no jax.

Inputs: the connections that the rendezvous made, a star around process 0. Outputs: one line on stderr that names the
lost process, and exit code 4; and texts gathered from all processes with a time limit. A killed process is noticed when
the kernel closes its connection, a machine that vanished by a timeout.

The coordination service of jax.distributed notices a death too, but then aborts the process from C++ (exit code 134 and
a stack trace), and the Python callback that could replace this cannot take its own argument. When process 0 dies that
abort comes within milliseconds: a handler of SIGABRT prints the verdict found here first.
"""

import ctypes
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from moe_jax.errors import HostLostError
from moe_jax.training.rendezvous import MalformedMessage, Peer

EXIT_HOST_LOST = 4
# Outcomes of the whole job (a user's mistake, a loss that is not finite) rather than of one machine: every process ends
# with the same code, so that a cluster's scheduler sees the same code on all of them.
_SHARED_EXIT_CODES = (2, 3)
_ABORT_WAIT_SECONDS = 5.0
_FAREWELL_SECONDS = 2.0
_GRACE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why this process has to end: the line to print, the exit code, and how long it may still end by itself."""

    line: str
    exit_code: int = EXIT_HOST_LOST
    grace_seconds: float = 0.0


class Watchdog:
    """Watch the other processes from a thread; process 0 watches all, the others watch process 0.

    Args:
      index, count: this process and the number of processes.
      peers: process 0's connection to every other process, or another process' connection to process 0.
      lost_seconds: silence after which a process counts as lost.
      stall_seconds: time since the last `touch` after which this process reports itself as stuck; 0 = never.
    """

    def __init__(
        self, *, index: int, count: int, peers: Sequence[Peer], lost_seconds: float = 30.0, stall_seconds: float = 0.0
    ):
        self._index, self._count, self._peers = index, count, tuple(peers)
        self._lost_seconds, self._stall_seconds = lost_seconds, stall_seconds
        self._self = f"process {index} ({socket.gethostname()})"
        self._send_lock, self._end_lock = threading.Lock(), threading.Lock()
        self._verdict: Verdict | None = None
        self._verdict_reached, self._stopped = threading.Event(), threading.Event()
        self._heard = threading.Condition()
        self._received_texts: dict[str, dict[int, str]] = {}  # process 0: the texts received on a topic so far
        self._texts: dict[str, list[str]] = {}  # topics on which all texts have arrived
        self._touched: tuple[float, int] | None = None
        for peer in self._peers:
            peer.connection.settimeout(lost_seconds)  # bounds sending; reading waits for the selector
            peer.last_heard = time.monotonic()
        self._abort_handler = _handle_abort(self._on_abort)  # kept: C holds no reference
        threading.Thread(target=self._watch, name="moe_jax watchdog", daemon=True).start()

    # Called by this process.

    def touch(self, step: int) -> None:
        """Note that this process made a step, or that one is due now."""
        self._touched = (time.monotonic(), step)

    def rest(self) -> None:
        """Note that no step is due until the next `touch`."""
        self._touched = None

    def await_verdict(self, seconds: float) -> None:
        """Return after some seconds, unless a verdict comes by then, in which case the watchdog ends this process."""
        if self._verdict_reached.wait(seconds):
            threading.Event().wait()

    def gather_text(self, topic: str, text: str, seconds: float) -> list[str]:
        """Return every process' text on a topic, in the order of the processes: a barrier with a time limit.

        Args:
          topic: a name that all processes use, each once.

        Raises:
          HostLostError: some texts did not arrive in time; process 0 names their processes.
        """
        if self._index == 0:
            self._take_text(topic, 0, text)
        else:
            self._broadcast({"kind": "say", "topic": topic, "text": text})
        with self._heard:
            if not self._heard.wait_for(lambda: topic in self._texts, timeout=seconds):
                said = self._received_texts.get(topic, {})
                missing = [i for i in range(self._count) if i not in said] if self._index == 0 else "(process 0 knows)"
                raise HostLostError(
                    f"processes {missing} of {self._count} did not reach {topic!r} within {seconds:g} s"
                )
            return self._texts.pop(topic)

    def fail(self, exit_code: int, line: str) -> NoReturn:
        """End this process and send the others the reason; does not return."""
        what = f"{self._self} ended with exit code {exit_code}" + (f": {line}" if line else "")
        shared = exit_code if exit_code in _SHARED_EXIT_CODES else EXIT_HOST_LOST
        self._stopped.set()
        self._send_verdict(Verdict(line=what, exit_code=shared, grace_seconds=_GRACE_SECONDS))
        _exit_now(exit_code)

    def leave(self) -> None:
        """End the watch, at an end that all processes have agreed on."""
        self._stopped.set()
        self._broadcast({"kind": "bye"})
        _restore_abort()

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
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                self._judge_silence()
        except Exception as error:  # if the watchdog ended silently, the job could hang again
            self._end(Verdict(line=f"the watch of {self._self} failed: {error!r}"))

    def _read(self, peer: Peer) -> bool:
        """Handle what one peer sent; False once its connection is closed."""
        try:
            messages = peer.receive()
            for message in messages or []:
                self._take(peer, message)
        except (MalformedMessage, KeyError, TypeError) as error:
            # Only a process that was admitted can have sent it, and all may be waiting for its message.
            what = f"the message lacks {error}" if isinstance(error, KeyError) else str(error)
            self._end(Verdict(line=f"{peer} is lost: it sent a malformed message ({what})"))
        if messages is None:
            if not peer.has_left and not self._stopped.is_set():
                self._end(Verdict(line=f"{peer} died: its connection closed"))
            return False
        return True

    def _take(self, peer: Peer, message: dict) -> None:
        match message["kind"]:
            case "bye":
                peer.has_left = True
            case "end":
                self._end(Verdict(**message["verdict"]))
            case "say":
                self._take_text(message["topic"], peer.index, message["text"])
            case "texts":
                with self._heard:
                    self._texts[message["topic"]] = message["texts"]
                    self._heard.notify_all()

    def _judge_silence(self) -> None:
        now = time.monotonic()
        for peer in self._peers:
            if not peer.has_left and now - peer.last_heard > self._lost_seconds:
                self._end(Verdict(line=f"{peer} is lost: silent for {now - peer.last_heard:.0f} s"))
        touched = self._touched  # another thread may set it
        if self._stall_seconds and touched:
            since, step = now - touched[0], touched[1]
            if since > self._stall_seconds:
                line = f"{self._self}, or one that it waits for, is stuck: no step for {since:.0f} s after step {step}"
                self._end(Verdict(line=line))

    def _take_text(self, topic: str, index: int, text: str) -> None:
        """Store, as process 0, one process' text; when the last one is there, send all texts to all processes."""
        with self._heard:
            said = self._received_texts.setdefault(topic, {})
            said[index] = text
            if len(said) < self._count:
                return
            texts = self._texts[topic] = [said[i] for i in range(self._count)]
            del self._received_texts[topic]
            self._heard.notify_all()
        self._broadcast({"kind": "texts", "topic": topic, "texts": texts})

    def _broadcast(self, message: dict) -> None:
        with self._send_lock:
            for peer in self._peers:
                peer.send(message)

    # The end.

    def _end(self, verdict: Verdict) -> NoReturn:
        """Send the others the verdict and end this process; the first verdict counts."""
        if self._verdict is None:
            self._verdict = verdict
            self._verdict_reached.set()
            self._send_verdict(verdict)
        time.sleep(self._verdict.grace_seconds)
        with self._end_lock:  # never released, so that only one thread prints its line
            print(
                f"moe_jax: {self._verdict.line}; {self._self} ends with exit code {self._verdict.exit_code}",
                file=sys.stderr,
            )
            _exit_now(self._verdict.exit_code)

    def _send_verdict(self, verdict: Verdict) -> None:
        self._broadcast({"kind": "end", "verdict": vars(verdict)})
        if self._index == 0:  # the coordination service ends with process 0, and the others would abort by it
            _await_closed(self._peers, verdict.grace_seconds + _FAREWELL_SECONDS)

    def _on_abort(self, _signal: int) -> None:
        if self._verdict_reached.wait(_ABORT_WAIT_SECONDS) and self._verdict is not None:
            self._end(self._verdict)


def _handle_abort(function: Callable[[int], None]):
    """Run a Python function at abort(), in the thread that aborts; return what must be kept alive.

    The signal module cannot do this: its handlers run in the main thread, which may be blocked.
    """
    callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(function)
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), callback)
    return callback


def _restore_abort() -> None:
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.c_void_p(0))  # SIG_DFL


def _await_closed(peers: Sequence[Peer], seconds: float) -> None:
    """Wait until all other ends are closed, whatever lies unread before that."""
    hung_up = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
    deadline = time.monotonic() + seconds
    still_open = {peer.connection.fileno() for peer in peers}
    while still_open and (left := deadline - time.monotonic()) > 0:
        poller = select.poll()
        for descriptor in still_open:
            poller.register(descriptor, hung_up)
        still_open -= {descriptor for descriptor, _ in poller.poll(left * 1000)}


def _exit_now(exit_code: int) -> NoReturn:
    """Leave without the atexit hooks, one of which is a barrier among processes that may be gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(exit_code)
