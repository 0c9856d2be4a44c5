"""Connections between the supervisors of a job, each to every other, which has proved the job's secret. No arrays.

Inputs: the addresses of all hosts, the job's key, and what a supervisor says of itself. Outputs: who can be reached,
and messages.
"""

# A supervisor calls those of lower index, again and again, and is called by the others. Both sides do the same:
#
#     challenge  ->    <-  challenge
#     hello      ->    <-  hello: index, birth, versions, job; sealed for the other's challenge, by the side's own word
#
# A side that cannot unseal the other's hello says "stranger", and closes. After the hellos the connection is trusted,
# as that of the rendezvous is. Handshakes run in threads of their own: whoever says nothing delays nobody.

from __future__ import annotations

import contextlib
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from moe_jax.errors import UserError
from moe_jax.recovery.job_secret import seal, unseal
from moe_jax.recovery.rendezvous import (
    HELLO_SECONDS,
    MAX_HELLO_BYTES,
    MalformedMessage,
    Peer,
    listen,
    most_strangers,
    note_stranger,
    read_message,
)

_CALL_SECONDS = 3.0
_AGAIN_SECONDS = 0.3
_SEND_SECONDS = 2.0
_DUPLICATE_SECONDS = 3.0  # a connection that was heard of so lately lives: another of that index is a second one
_MAX_STATE_BYTES = 1 << 16
_CALLS, _ANSWERS = "supervisor calls", "supervisor answers"


class _OtherSecretError(ConnectionError):
    """The other side holds another secret."""


class Links:
    """The connections of one supervisor, read by the caller's thread through its selector.

    Attributes:
      peers: {index: Peer} of all that can be reached.
      refused: addresses of listed hosts where a supervisor holds another secret.
    """

    def __init__(
        self, own: dict, hosts: Sequence[tuple[str, int]], key: bytes, selector: selectors.BaseSelector,
        on_event: Callable[[int, dict | None], None],
    ):  # fmt: skip
        """Listen and call.

        Args:
          own: the hello of this host, with its 'index'.
          hosts: (name or address, port) of all.
          on_event: called, while the selector's functions are, with the index of a host and its message: its hello
            when it joins, None when its connection is closed.

        Raises:
          UserError: the port is taken.
        """
        self.peers: dict[int, Peer] = {}
        self.refused: set[str] = set()
        self._own, self._hosts, self._key, self._selector, self._on_event = own, hosts, key, selector, on_event
        self._greeted: queue.SimpleQueue[tuple[Peer, dict]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._admit)
        self._strangers: list[str] = []
        self._unverified = threading.BoundedSemaphore(most_strangers(len(hosts)))
        host, self._port = hosts[own["index"]]
        self._listeners = listen(host, self._port, time.monotonic() + HELLO_SECONDS)
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, lambda at=listener: self._answer(at))
        for index in range(own["index"]):
            threading.Thread(target=self._call, args=(index,), daemon=True, name=f"moe_jax call {index}").start()

    def send(self, message: dict, only: int | None = None) -> None:
        """Send a message to one host, or to all that can be reached."""
        for index, peer in self.peers.items():
            if only in (None, index):
                peer.send(message)

    def drop(self, index: int) -> None:
        """Close the connection to a host."""
        if (peer := self.peers.pop(index, None)) is not None:
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def close(self) -> None:
        """Listen no more, and close all connections."""
        for index in list(self.peers):
            self.drop(index)
        for listener in self._listeners:
            listener.close()

    def _answer(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # gone before it was taken
            connection, address = listener.accept()
            if not self._unverified.acquire(blocking=False):
                connection.close()
                return
            threading.Thread(target=self._greet_caller, args=(connection, str(address[0])), daemon=True).start()

    def _greet_caller(self, connection: socket.socket, address: str) -> None:
        try:
            self._greet(connection, address, _ANSWERS, _CALLS)
        except (OSError, MalformedMessage, KeyError, TypeError) as error:
            connection.close()
            why = "no supervisor of this job"
            if isinstance(error, _OtherSecretError):
                why = str(error)
                with contextlib.suppress(OSError):
                    if address in {entry[4][0] for host in self._hosts for entry in socket.getaddrinfo(*host)}:
                        self.refused.add(address)
            note_stranger(self._strangers, address, self._port, why)
        finally:
            self._unverified.release()

    def _call(self, index: int) -> None:
        while True:
            if index not in self.peers:
                with contextlib.suppress(OSError, MalformedMessage, KeyError, TypeError):
                    connection = socket.create_connection(self._hosts[index], timeout=_CALL_SECONDS)
                    address = "{}:{}".format(*self._hosts[index])
                    try:
                        self._greet(connection, address, _CALLS, _ANSWERS)
                    except BaseException as error:
                        connection.close()
                        if isinstance(error, _OtherSecretError):
                            self.refused.add(address)
                        raise
            time.sleep(_AGAIN_SECONDS)

    def _greet(self, connection: socket.socket, address: str, word: str, their_word: str) -> None:
        """Exchange hellos and hand the connection to the caller's thread; an error where the other is no supervisor."""
        peer, challenge = Peer(index=-1, name=address, connection=connection), secrets.token_hex(16)
        connection.settimeout(_SEND_SECONDS)
        deadline = time.monotonic() + HELLO_SECONDS
        peer.send({"kind": "challenge", "challenge": challenge})
        theirs = str(read_message(peer, deadline, MAX_HELLO_BYTES)["challenge"])
        peer.send(seal(self._key, word, theirs, self._own))
        message = read_message(peer, deadline, MAX_HELLO_BYTES)
        hello = unseal(self._key, challenge, message) if message["kind"] == their_word else None
        if hello is None:
            peer.send({"kind": "stranger"})
            is_supervisor = message["kind"] in (their_word, "stranger")
            raise (_OtherSecretError if is_supervisor else MalformedMessage)("another secret or none")
        peer.index = int(hello["index"])
        connection.settimeout(_SEND_SECONDS)
        self._greeted.put((peer, hello))
        self._wake_write.send(b"\0")

    def _admit(self) -> None:
        """Take in the connections that were greeted."""
        self._wake_read.recv(4096)
        while not self._greeted.empty():
            peer, hello = self._greeted.get()
            held = self.peers.get(peer.index)
            if held is not None and time.monotonic() - held.last_heard < _DUPLICATE_SECONDS and _is_open(held):
                note_stranger(self._strangers, peer.name, self._port, f"there is a supervisor {peer.index} already")
                peer.connection.close()
                continue
            if held is not None:
                self._lose(peer.index)
            self.peers[peer.index] = peer
            self._selector.register(peer.connection, selectors.EVENT_READ, lambda own=peer: self._hear(own))
            self._on_event(peer.index, hello)
            if peer.received:
                self._take_in(peer)

    def _hear(self, peer: Peer) -> None:
        if self.peers.get(peer.index) is peer:
            is_open = peer.read()
            self._take_in(peer)
            if not is_open and self.peers.get(peer.index) is peer:
                self._lose(peer.index)

    def _take_in(self, peer: Peer) -> None:
        try:
            while self.peers.get(peer.index) is peer and (message := peer.next_message(_MAX_STATE_BYTES)) is not None:
                self._on_event(peer.index, message)
        except UserError:
            raise
        except (LookupError, TypeError, ValueError):  # it was greeted, so another program than this one
            self._lose(peer.index)

    def _lose(self, index: int) -> None:
        self.drop(index)
        self._on_event(index, None)


def _is_open(peer: Peer) -> bool:
    """Say whether the other side has not closed a connection, whatever lies unread in it."""
    try:
        return bool(peer.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Return (host, port) of each of 'a:port,b:port'; a UserError where it is not that."""
    found = []
    for address in filter(None, (part.strip() for part in text.split(","))):
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65535):
            raise UserError(f"--hosts: {address!r} must be host:port with a port in 1..65534, as in node0:8475")
        found.append((host.strip("[]"), int(port)))
    if len(set(found)) < max(1, len(found)):
        raise UserError(f"--hosts ({text!r}) must name every host once")
    return found
