"""A connection to another process of the job: messages are JSON objects, one on a line, of bounded length."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, field

MAX_MESSAGE_BYTES = 64 << 20  # the texts of all processes on one topic, the longest message, at 16 KiB each of 4,096


class MalformedMessage(ValueError):
    """Something arrived that is no message."""


@dataclass(kw_only=True, eq=False)
class Peer:
    """One other process, as seen over its connection.

    Attributes:
      index: of the process.
      name: of its host.
      host_id: equal for processes that share a machine.
    """

    index: int
    name: str
    connection: socket.socket
    host_id: str = ""
    received: bytes = b""
    last_heard: float = field(default_factory=time.monotonic)
    has_left: bool = False

    def __str__(self) -> str:
        return f"process {self.index} ({self.name})"

    def send(self, message: dict) -> None:
        """Send one message; a broken connection is handled when it is read, not here."""
        try:
            self.connection.sendall(encode(message))
        except OSError:
            pass

    def receive(self) -> list[dict] | None:
        """Return the messages that have arrived, or None when the connection is closed.

        Raises:
          MalformedMessage: what arrived is not a message, or has no end.
        """
        try:
            data = self.connection.recv(65536)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self.last_heard = time.monotonic()
        *lines, self.received = (self.received + data).split(b"\n")
        if len(self.received) > MAX_MESSAGE_BYTES:
            raise MalformedMessage(f"a line of more than {MAX_MESSAGE_BYTES >> 20} MiB")
        return [decode(line) for line in lines]


def encode(message: dict) -> bytes:
    """Return the line that a message is sent as."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict:
    """Return the message of a line.

    Raises:
      MalformedMessage: it is none.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise MalformedMessage(f"{line[:40]!r} instead of a message")
    return message
