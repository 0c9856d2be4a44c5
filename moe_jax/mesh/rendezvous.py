"""Connects the processes of a job in a star round process 0, or says what is wrong with their flags. No arrays, no jax.

In: this process' index, the number of processes, process 0's host and port. Out: the connections, and a text that
process 0 offers to the others. It comes before anything of jax, whose coordination service answers every mistake made
here (a missing process, counts that differ, a process_id given twice) with an abort of the process or a long silence.
"""

import json
import socket
import time
from dataclasses import dataclass, field

from moe_jax.errors import HostLostError, UserError

_BIND_SECONDS = 10.0  # a predecessor on the same port may still be ending
_HELLO_SECONDS = 5.0


@dataclass(kw_only=True, eq=False)
class Peer:
    """One other process, as seen over its connection."""

    index: int
    name: str
    connection: socket.socket
    received: bytes = b""
    last_heard: float = field(default_factory=time.monotonic)
    has_left: bool = False

    def __str__(self) -> str:
        return f"process {self.index} ({self.name})"

    def send(self, message: dict) -> None:
        """Send one message; a connection that cannot take it is judged when it is read, not here."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def receive(self) -> list[dict] | None:
        """Return the messages that have arrived, or None when the connection is closed."""
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
        return [json.loads(line) for line in lines]


def gather_peers(*, count: int, port: int, offer: str, seconds: float) -> list[Peer]:
    """Wait, as process 0, until all other processes have joined, and send them the offer.

    Raises:
      UserError: a process has other flags than this one, or the port is taken.
      HostLostError: some process did not join in time.
    """
    name = socket.gethostname()
    peers: dict[int, Peer] = {}
    try:
        with _listen(port) as listener:
            _accept_all(listener, count, name, peers, seconds)
    except (UserError, HostLostError) as error:
        refusal = {"kind": "refused", "lost": isinstance(error, HostLostError), "line": str(error)}
        for peer in peers.values():
            peer.send(refusal)
            peer.connection.close()
        raise
    for peer in peers.values():
        peer.send({"kind": "go", "name": name, "offer": offer})
    return list(peers.values())


def connect(*, index: int, count: int, host: str, port: int, seconds: float) -> tuple[Peer, str]:
    """Join process 0 and wait until all others have; return the connection to it and its offer.

    Raises:
      UserError: process 0 refuses this process' flags.
      HostLostError: process 0 does not answer, or another process did not join in time.
    """
    deadline = time.monotonic() + seconds
    name = socket.gethostname()
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=min(left, 10.0))
        except OSError as error:  # not up yet, or its name not yet known
            reason = str(error)
            time.sleep(min(0.2, left))
            continue
        hub = Peer(index=0, name=host, connection=connection)
        connection.settimeout(left + _HELLO_SECONDS)  # process 0 gives up first, and says for whom it waited
        hub.send({"kind": "hello", "index": index, "count": count, "name": name})
        message = _read_message(connection)
        if message is None:
            reason = "it closed the connection or is another program"
            connection.close()
            time.sleep(0.2)
            continue
        if message["kind"] == "refused":
            connection.close()
            raise (HostLostError if message["lost"] else UserError)(message["line"])
        hub.name = message["name"]
        return hub, message["offer"]
    raise HostLostError(
        f"process {index} ({name}) could not join process 0 at {host}:{port} within {seconds:g} s ({reason}); "
        f"check that process 0 runs there, or set --coordinator to its host:port"
    )


def _accept_all(listener: socket.socket, count: int, name: str, peers: dict[int, Peer], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    refused = ""
    while len(peers) < count - 1:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = [i for i in range(1, count) if i not in peers]
            raise HostLostError(
                f"processes {missing} of {count} have not joined process 0 ({name}) at port "
                f"{listener.getsockname()[1]} within {seconds:g} s{refused}; see their logs, and give each process "
                f"--num_processes={count} and a --process_id of its own"
            ) from None
        _drop_closed(peers)  # a process that joined and died: its successor may come
        refused = _admit(connection, count, name, peers) or refused
        _drop_closed(peers)


def _admit(connection: socket.socket, count: int, name: str, peers: dict[int, Peer]) -> str:
    """Take in one process; return why not, or nothing. A contradiction that no retry can heal raises UserError."""
    connection.settimeout(_HELLO_SECONDS)
    hello = _read_message(connection) or {}
    index, its_count, its_name = hello.get("index"), hello.get("count"), hello.get("name")
    if hello.get("kind") != "hello" or not isinstance(index, int):  # a port scanner or a health check
        connection.close()
        return ""
    peer = Peer(index=index, name=str(its_name), connection=connection)
    line = ""
    if its_count != count:
        line = (
            f"{peer} has num_processes={its_count} but process 0 ({name}) has num_processes={count}; give all the same"
        )
    elif not 0 < index < count:
        line = f"{peer} joined process 0 of {count}, but process_id must lie in 1..{count - 1}; give each its own"
    if line:
        peer.send({"kind": "refused", "lost": False, "line": line})
        connection.close()
        raise UserError(line)
    if index in peers:
        line = f"{peer} joined although {peers[index]} has that process_id; give each process its own"
        peer.send({"kind": "refused", "lost": False, "line": line})
        connection.close()
        return f" (refused: {line})"
    peers[index] = peer
    return ""


def _listen(port: int) -> socket.socket:
    deadline = time.monotonic() + _BIND_SECONDS
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"process 0 cannot listen at the coordinator's port {port} ({error.strerror}); another job or a "
                    f"second process 0 holds it: set --coordinator to a free port, and --process_id=0 only once"
                ) from None
            time.sleep(0.5)


def _read_message(connection: socket.socket) -> dict | None:
    """Read exactly one message, or nothing if the other end closes, takes too long or babbles."""
    line = b""
    try:
        while not line.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte or len(line) > 65536:
                return None
            line += byte
        message = json.loads(line)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _drop_closed(peers: dict[int, Peer]) -> None:
    for peer in list(peers.values()):
        peer.connection.setblocking(False)
        try:
            is_closed = peer.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            is_closed = False
        except OSError:
            is_closed = True
        peer.connection.settimeout(_HELLO_SECONDS)
        if is_closed:
            peers.pop(peer.index).connection.close()
