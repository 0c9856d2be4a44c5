"""Connects the processes of a job in a star around process 0, and checks their flags. No arrays, no jax.

Inputs: this process' place, the coordinator's host and port, and the key of the job's secret. Outputs: the connections,
which processes share a machine, and the epoch: a text that process 0 draws at this start.
"""

# It comes before anything of jax, whose coordination service reacts to every mistake made here by aborting the process
# or waiting for long.
#
#     process 0                              process i
#     challenge                       ->
#                                     <-     hello: index, count, versions, machine; sealed for that challenge
#     go or refused, sealed for the hello's challenge  ->
#
# A connection that does not send a sealed hello is a stranger: it is dropped, its address logged once, and the job goes
# on. One deadline holds for all of it: process 0 waits for all connections at once, so a stranger cannot delay it. A
# sealed hello comes from the job itself, so a contradiction in it ends the job with its reason.
#
# The secret is never sent: each side seals its message with an HMAC of the secret over the other's random challenge, so
# a recorded message is not accepted on another connection. This authenticates the sender only; nothing is encrypted,
# and after the rendezvous the connection is trusted. The port stays open: jax's own connections come there (relay.py).

from __future__ import annotations

import errno
import importlib.metadata
import ipaddress
import json
import logging
import os
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moe_jax.errors import HostLostError, UserError
from moe_jax.recovery.job_secret import FILE_VARIABLE, VARIABLE, seal, unseal

_LOG = logging.getLogger(__name__)


# Processes share a node if their host name, boot and network namespace are equal, or NCCL_HOSTID, where that is set:
# nearly the rule of NCCL.
def machine_id(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that is equal on two processes exactly if they share a machine."""
    if environment.get("NCCL_HOSTID"):
        return f"NCCL_HOSTID {environment['NCCL_HOSTID']}"
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    except OSError:  # not Linux
        pass
    return " ".join(parts)


MAX_MESSAGE_BYTES = 64 << 20  # the texts of all processes on one topic, the longest message, at 16 KiB each of 4,096


class MalformedMessage(ValueError):
    """Something arrived that is no message."""


@dataclass(kw_only=True, eq=False)
class Peer:
    """One other process, as seen over its connection."""

    index: int  # of the process; -1 until it has said its hello
    name: str  # of its host; until its hello the address it connects from
    connection: socket.socket
    host_id: str = ""  # equal for processes that share a machine
    challenge: str = ""  # that its hello has to answer; afterwards the one that its hello gave
    received: bytes = b""
    last_heard: float = field(default_factory=time.monotonic)
    has_left: bool = False

    def __str__(self) -> str:
        return f"process {self.index} ({self.name})"

    def send(self, message: dict) -> None:
        """Send one message as a line of JSON; a broken connection is handled when it is read, not here."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def read(self) -> bool:
        """Take in the bytes that have arrived; False when the connection is closed."""
        try:
            data = self.connection.recv(65536)
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            return False
        self.received += data
        self.last_heard = time.monotonic()
        return bool(data)

    def next_message(self, most: int = MAX_MESSAGE_BYTES) -> dict | None:
        """Return the first message that was read and not returned yet, None where it is not whole.

        MalformedMessage: what arrived is not a message, or is a line of more than `most` bytes.
        """
        line, end, rest = self.received.partition(b"\n")
        if len(line) > most:
            raise MalformedMessage(f"a line of more than {most} bytes")
        if not end:
            return None
        self.received = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise MalformedMessage(f"{line[:40]!r} instead of a message")
        return message


_BACKLOG = 1024
_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)  # the last: link-local, without its interface


def listen(host: str, port: int, deadline: float) -> list[socket.socket]:
    """Return sockets that listen at the addresses of `host` on this machine, or at all addresses.

    UserError: the port is still taken at the deadline (time.monotonic()).
    """
    # A name may mean another address here than elsewhere (behind address translation, for a service of Kubernetes, or
    # where /etc/hosts gives the machine's own name a loopback address); then only listening at all addresses reaches
    # every process, logged once.
    addresses, why = [], ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    except OSError as error:
        why = f"it is not known here ({error.strerror or error})"
    looped = [address for address in addresses if ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if looped and not (host in looped or host == "localhost" or host.endswith(".localhost")):
        addresses, why = [], f"{looped[0]}, which it means here, is reached from this machine only"
    while True:
        opened: list[socket.socket] = []
        try:
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                try:
                    opened.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
                except OSError as error:
                    if error.errno not in _NOT_LOCAL:
                        raise
            if opened:
                return opened
            if addresses:
                why = f"it means {', '.join(addresses)}, which is no address of this machine"
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            opened = [socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)]
            _LOG.warning("process 0 listens at all addresses: the coordinator's host is %r, and %s", host, why)
            return opened
        except OSError as error:
            for listener in opened:
                listener.close()
            if time.monotonic() > deadline:
                raise UserError(
                    f"process 0 cannot listen at the coordinator's port {port} ({error.strerror}); another job or a "
                    "second process 0 holds it: set --coordinator to a free port, and --process_id=0 only once"
                ) from None
            time.sleep(0.5)


# what must be equal on all processes
VERSIONS = {"protocol": "2", **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}}
_BIND_SECONDS = 10.0  # a predecessor on the same port may still be ending
HELLO_SECONDS = 5.0  # a process of the job answers the challenge at once
_SEND_SECONDS = 5.0
MAX_HELLO_BYTES = 8192
_MAX_GO_BYTES = 1 << 20
_MAX_LOGGED_ADDRESSES = 100
# What a message holds at least, in all versions to come. One that lacks it is not of this program, sealed or not.
_HELLO = {"index": int, "count": int, "name": str, "versions": dict, "host_id": str, "challenge": str}
_GO = {"name": str, "epoch": str, "host_ids": list}
_REFUSAL = {"lost": bool, "line": str}
_RETRY_SECONDS = 0.2
_MENDED_SECONDS = 1.0  # between attempts that fail until a user corrects something


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process' index, and what it shares with the others."""

    index: int
    count: int  # of processes
    host: str  # where process 0 listens
    port: int
    token: bytes  # the key of the job's secret
    host_id: str = ""  # names this machine; equal on processes that share it


def gather_peers(place: Place, *, seconds: float) -> tuple[list[Peer], list[str], str, list[socket.socket]]:
    """Wait, as process 0, until all others have joined.

    Returns:
      the connections to all others, the machines of all processes by index, the epoch, and the sockets that listen.

    Raises:
      UserError: a process has other flags than this one, or the port is taken.
      HostLostError: some process did not join in time.
    """
    admission = _Admission(place)
    try:
        admission.admit_all(seconds)
    except (UserError, HostLostError) as error:
        for peer in admission.joined.values():
            peer.connection.settimeout(_SEND_SECONDS)
            refusal = {"lost": isinstance(error, HostLostError), "line": str(error)}
            peer.send(seal(place.token, "refused", peer.challenge, refusal))
            peer.connection.close()
        for listener in admission.listeners:
            listener.close()
        raise
    finally:
        for peer in admission.unverified:
            peer.connection.close()
        admission.selector.close()
    peers = [admission.joined[index] for index in sorted(admission.joined)]
    host_ids = [place.host_id, *(peer.host_id for peer in peers)]
    epoch = secrets.token_hex(16)
    go = {"name": socket.gethostname(), "epoch": epoch, "host_ids": host_ids}
    for peer in peers:
        peer.connection.settimeout(_SEND_SECONDS)
        peer.send(seal(place.token, "go", peer.challenge, go))
    return peers, host_ids, epoch, admission.listeners


def most_strangers(count: int) -> int:
    """Return how many connections may wait at once, of a job of so many processes; the oldest makes way for more."""
    return max(128, 2 * count)  # so that all may connect at once


def note_stranger(known: list[str], name: str, port: int, why: str) -> None:
    """Log the address of a stranger, unless `known` holds it or is full."""
    if name in known or len(known) >= _MAX_LOGGED_ADDRESSES:
        return
    known.append(name)
    _LOG.warning(
        "a stranger at port %d from %s was dropped (%s); later ones from there are not mentioned",
        *(port, name, why),
    )


class _Admission:
    """Process 0's side: accepts connections, and admits those that send a sealed hello."""

    def __init__(self, place: Place):
        self.place, self.name, self.selector = place, socket.gethostname(), selectors.DefaultSelector()
        self.listeners: list[socket.socket] = []
        self.unverified: dict[Peer, float] = {}  # connections without a hello, oldest first: when each is dropped
        self.joined: dict[int, Peer] = {}
        self.strangers: list[str] = []  # addresses that were logged
        self.refused = ""

    def admit_all(self, seconds: float) -> None:
        """Return once all other processes have joined."""
        place, deadline = self.place, time.monotonic() + seconds
        self.listeners = listen(place.host, place.port, min(deadline, time.monotonic() + _BIND_SECONDS))
        for listener in self.listeners:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ)
        while True:
            if len(self.joined) == place.count - 1:
                self.drop_closed()  # one that joined and died just now: its successor may connect
                if len(self.joined) == place.count - 1:
                    return
            now = time.monotonic()
            for peer in [peer for peer, until in self.unverified.items() if until <= now]:
                self.drop(peer, "said nothing in time")
            if now >= deadline:
                break
            until = min([deadline, *self.unverified.values()])
            for key, _ in self.selector.select(max(0.0, until - now)):
                if key.fileobj.fileno() < 0:  # dropped by an earlier turn of this loop
                    continue
                if key.data in self.unverified:
                    self.hear(key.data)
                elif key.data is not None:  # a process that has joined sends nothing before the start: it died
                    self.drop_closed()
                else:
                    try:
                        connection, address = key.fileobj.accept()
                    except OSError:  # gone before it was taken
                        continue
                    if len(self.unverified) >= most_strangers(place.count):
                        self.drop(next(iter(self.unverified)), "made way for others")
                    connection.setblocking(False)
                    peer = Peer(index=-1, name=str(address[0]), connection=connection, challenge=secrets.token_hex(16))
                    peer.send({"kind": "challenge", "challenge": peer.challenge})
                    self.unverified[peer] = time.monotonic() + HELLO_SECONDS
                    self.selector.register(connection, selectors.EVENT_READ, peer)
        missing = [index for index in range(1, place.count) if index not in self.joined]
        where = " and ".join(sorted({listener.getsockname()[0] for listener in self.listeners}))
        strangers = ""
        if self.strangers:
            shown = ", ".join(self.strangers[:5])
            strangers = f"; strangers came from {shown}: if they belong to this job, give all the same {VARIABLE}"
        raise HostLostError(
            f"processes {missing} of {place.count} have not joined process 0 ({self.name}) at port {place.port} of "
            f"{where} within {seconds:g} s{self.refused}; see their logs, and give each process "
            f"--num_processes={place.count} and a --process_id of its own{strangers}"
        )

    def hear(self, peer: Peer) -> None:
        """Admit a process of this job by its hello; a contradiction that no retry can resolve raises UserError."""
        place = self.place
        try:
            is_open = peer.read()
            message = peer.next_message(MAX_HELLO_BYTES)
        except MalformedMessage:
            self.drop(peer, "no hello of this program")
            return
        if message is None:
            if not is_open:
                self.drop(peer, "closed without a hello")
            return
        hello = unseal(place.token, peer.challenge, message) if message["kind"] == "hello" else None
        if hello is None:
            peer.send({"kind": "stranger"})
            self.drop(peer, "another secret or none")
            return
        if not _fits(hello, _HELLO):
            self.drop(peer, "no hello of this program")
            return
        del self.unverified[peer]
        peer.index, peer.name, peer.challenge = hello["index"], hello["name"], hello["challenge"]
        peer.host_id = hello["host_id"]
        self.drop_closed()  # a process that joined and died: this may be its successor
        line, theirs = "", hello["versions"]
        if theirs != VERSIONS:
            runs, here = (", ".join(f"{name} {own[name]}" for name in own) for own in (theirs, VERSIONS))
            line = f"{peer} runs {runs} but process 0 ({self.name}) runs {here}; install the same everywhere"
        elif hello["count"] != place.count:
            line = (
                f"{peer} has num_processes={hello['count']} but process 0 ({self.name}) has "
                f"num_processes={place.count}; give all the same"
            )
        elif not 0 < peer.index < place.count:
            line = (
                f"{peer} joined process 0 of {place.count}, but process_id must lie in 1..{place.count - 1}; give each "
                "its own"
            )
        elif peer.index not in self.joined:
            self.joined[peer.index] = peer
            return
        else:
            twice = f"{peer} joined although {self.joined[peer.index]} has that process_id; give each process its own"
            self.refused = f" (refused: {twice})"
        self.selector.unregister(peer.connection)
        peer.connection.settimeout(_SEND_SECONDS)
        peer.send(seal(place.token, "refused", peer.challenge, {"lost": False, "line": line or twice}))
        peer.connection.close()
        if line:
            raise UserError(line)

    def drop(self, peer: Peer, why: str) -> None:
        """Close the connection of a stranger, and log its address once."""
        self.selector.unregister(peer.connection)
        del self.unverified[peer]
        peer.connection.close()
        note_stranger(self.strangers, peer.name, self.place.port, why)

    def drop_closed(self) -> None:
        """Forget processes that joined and died; what others sent early stays to be read after the start."""
        for peer in list(self.joined.values()):
            if not peer.read():
                del self.joined[peer.index]
                self.selector.unregister(peer.connection)
                peer.connection.close()


def _fits(content: dict, kinds: dict[str, type]) -> bool:
    """Say whether the content of a sealed message has these entries, each of its type."""
    return all(type(content.get(name)) is kind for name, kind in kinds.items())


class _OtherTokenError(ConnectionError):
    """Two secrets differ: a user may correct it while attempts to join go on."""


def connect(place: Place, *, seconds: float) -> tuple[Peer, list[str], str]:
    """Join process 0 and wait until all others have.

    Returns:
      the connection to process 0, the machines of all processes by index, and the epoch.

    Raises:
      UserError: process 0 refuses this process' flags.
      HostLostError: process 0 does not answer, or another process did not join in time.
    """
    deadline = time.monotonic() + seconds
    name, reason, said = socket.gethostname(), "no answer", set()
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((place.host, place.port), timeout=min(left, 10.0))
            hub = Peer(index=0, name="", connection=connection)
            try:
                answered_by = min(deadline, time.monotonic() + HELLO_SECONDS)
                challenge = read_message(hub, answered_by, MAX_HELLO_BYTES).get("challenge")
                if not isinstance(challenge, str):
                    raise ConnectionError("another program answers there")
                hub.challenge = secrets.token_hex(16)
                hello = {"index": place.index, "count": place.count, "name": name, "versions": VERSIONS}
                hello |= {"host_id": place.host_id, "challenge": hub.challenge}
                hub.connection.settimeout(_SEND_SECONDS)
                hub.send(seal(place.token, "hello", challenge, hello))
                # process 0 times out first, and names the missing processes
                message = read_message(hub, deadline + HELLO_SECONDS, _MAX_GO_BYTES)
                if message["kind"] == "stranger":
                    raise _OtherTokenError(
                        f"process 0 there holds another secret; give all processes the same {VARIABLE} or "
                        f"{FILE_VARIABLE}, and the same --coordinator"
                    )
                content = unseal(place.token, hub.challenge, message)
                if content is None:
                    raise _OtherTokenError("what answers there does not hold this job's secret")
                if not _fits(content, _REFUSAL if message["kind"] == "refused" else _GO):
                    raise MalformedMessage("another protocol")
                if message["kind"] == "refused":
                    raise (HostLostError if content["lost"] else UserError)(content["line"])
                hub.name = content["name"]
                return hub, content["host_ids"], content["epoch"]
            except BaseException:
                connection.close()
                raise
        except (OSError, MalformedMessage) as error:  # not up yet, its name not yet known, or another program
            reason = "another program answers there" if isinstance(error, MalformedMessage) else str(error)
            pause = _RETRY_SECONDS
            if isinstance(error, _OtherTokenError):
                pause = _MENDED_SECONDS
                if reason not in said:
                    _LOG.warning("process %d (%s) tries again: %s", place.index, name, reason)
                said.add(reason)
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
    raise HostLostError(
        f"process {place.index} ({name}) could not join process 0 at {place.host}:{place.port} within {seconds:g} s "
        f"({reason}); check that process 0 runs there, or set --coordinator to its host:port"
    )


def read_message(hub: Peer, deadline: float, most: int) -> dict:
    """Return process 0's next message; what follows it stays to be read by the watchdog."""
    while (message := hub.next_message(most)) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ConnectionError("no answer")
        hub.connection.settimeout(left)
        if not hub.read():
            raise ConnectionError("it closed the connection or is another program")
    return message
