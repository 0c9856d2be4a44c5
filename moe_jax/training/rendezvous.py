"""Connects the processes of a job in a star around process 0, and checks their flags. No arrays, no jax.

Inputs: this process' place, the coordinator's host and port, and the job's token. Outputs: the connections, which
processes share a machine, and a text that process 0 offers to the others. It comes before anything of jax, whose
coordination service reacts to every mistake made here (a missing process, counts that differ, a process_id given twice)
by aborting the process or waiting for long.

    process 0                              process i
    challenge                       ->
                                    <-     hello: index, count, versions, machine; sealed for that challenge
    go or refused, sealed for the hello's challenge  ->

A connection that does not send a sealed hello is a stranger: it is dropped, its address logged once, and the job goes
on. One deadline holds for all of it: process 0 waits for all connections at once, so a stranger cannot delay it. A
sealed hello comes from the job itself, so a contradiction in it ends the job with its reason.

The token is never sent: each side seals its message with an HMAC of the token over the other's random challenge, so a
recorded message is not accepted on another connection. This authenticates the sender only; nothing is encrypted, and
after the rendezvous the connection is trusted. A token that was given is a secret. Without one, the launcher's job id
and the coordinator's address take its place: they keep other jobs, port scanners and health checks out, but not an
attacker who knows both.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import importlib.metadata
import ipaddress
import itertools
import json
import logging
import os
import random
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_jax.errors import HostLostError, UserError


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


TOKEN_VARIABLE = "MOE_JAX_JOB_TOKEN"
# launcher -> variables that all processes of one job share; the first that is set counts
_JOB_IDS = {
    "Slurm": ("SLURM_JOB_ID",),
    "Open MPI": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
}


def derive_token(given: str | None, coordinator: str, launcher: str | None, environment: Mapping[str, str]) -> bytes:
    """Return the token of a job, 32 bytes; equal on all its processes.

    Args:
      given: the secret from a flag; else the environment's MOE_JAX_JOB_TOKEN, if that is set.
      coordinator: host:port, the same text on all processes.
      launcher: that gave this process its index, None if flags did.
    """
    secret = given or environment.get(TOKEN_VARIABLE)
    if secret:
        parts = ["given", secret]
    else:
        names = _JOB_IDS.get(launcher or "", ())
        job = next((environment[name] for name in names if environment.get(name)), "")
        parts = ["derived", coordinator, job]
    return hashlib.sha256("\0".join(parts).encode()).digest()


def new_challenge() -> str:
    """Return a text that was never used before."""
    return secrets.token_hex(16)


def seal(token: bytes, kind: str, challenge: str, content: dict) -> dict:
    """Return a message that proves to the sender of `challenge` that its own sender holds the token."""
    text = json.dumps(content)
    return {"kind": kind, "content": text, "proof": _proof(token, kind, challenge, text)}


def unseal(token: bytes, challenge: str, message: dict) -> dict | None:
    """Return the content of a message, None if it does not prove the token or is not as `seal` makes them."""
    kind, text, proof = (message.get(name) for name in ("kind", "content", "proof"))
    if not (isinstance(kind, str) and isinstance(text, str) and isinstance(proof, str) and proof.isascii()):
        return None
    if not hmac.compare_digest(proof, _proof(token, kind, challenge, text)):
        return None
    content = json.loads(text)
    return content if isinstance(content, dict) else None


def _proof(token: bytes, kind: str, challenge: str, text: str) -> str:
    said = "\0".join((kind, challenge, text))
    return hmac.new(token, said.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


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


_LOG = logging.getLogger(__name__)
_BACKLOG = 1024
_SERVICE_PORTS = (20000, 30000)  # above them Kubernetes has its node ports, then come those of outgoing connections
_PORT_ATTEMPTS = 20
_NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)  # the last: link-local, without its interface


# A name may mean another address here than elsewhere (behind address translation, for a service of Kubernetes, or where
# /etc/hosts gives the machine's own name a loopback address); then only listening at all addresses reaches every
# process, logged once.
def listen(host: str, port: int, deadline: float) -> list[socket.socket]:
    """Return sockets that listen at the addresses of `host` on this machine, or at all addresses.

    Raises:
      UserError: the port is still taken at the deadline (time.monotonic()).
    """
    addresses, why = own_addresses(host)
    while True:
        try:
            if addresses:
                opened = _open_each(addresses, port)
                if opened:
                    return opened
                why = f"it means {', '.join(addresses)}, which is no address of this machine"
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            opened = [socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)]
            _LOG.warning("process 0 listens at all addresses: the coordinator's host is %r, and %s", host, why)
            return opened
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"process 0 cannot listen at the coordinator's port {port} ({error.strerror}); another job or a "
                    "second process 0 holds it: set --coordinator to a free port, and --process_id=0 only once"
                ) from None
            time.sleep(0.5)


@contextlib.contextmanager
def held_port() -> Iterator[str]:
    """Keep a free port for jax's service, which process 0 opens when all processes have joined, minutes later perhaps.

    It lies below the ports that systems give to outgoing connections (32768 on Linux, 49152 elsewhere) and is drawn at
    random, so that neither a connection nor another job on this machine takes it meanwhile. On Linux a socket that is
    bound and does not listen keeps it too: the service may share it (gRPC opens with SO_REUSEPORT), others may not.
    """
    ports = random.SystemRandom()
    dual = socket.has_dualstack_ipv6()
    for port in (*(ports.randrange(*_SERVICE_PORTS) for _ in range(_PORT_ATTEMPTS)), 0):
        holder = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
        try:
            socket.create_server(("", port)).close()  # raises where another job's holder is, which would share as well
            if dual:
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if sys.platform == "linux":
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("", port))
        except OSError:  # taken
            holder.close()
            continue
        with holder:
            found = str(holder.getsockname()[1])
            if sys.platform != "linux":
                holder.close()
            yield found
        return
    raise OSError("no port is free")


def own_addresses(host: str) -> tuple[list[str], str]:
    """Return the addresses that a name has, or none and why listening there would not reach every process."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return [], f"it is not known here ({error.strerror or error})"
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    looped = [address for address in addresses if ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if looped and not _means_loopback(host):
        return [], f"{looped[0]}, which it means here, is reached from this machine only"
    return addresses, ""


def _means_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _open_each(addresses: list[str], port: int) -> list[socket.socket]:
    """Return a listening socket for each address of this machine; raise OSError if the port is taken at one."""
    opened: list[socket.socket] = []
    try:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                opened.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
            except OSError as error:
                if error.errno not in _NOT_LOCAL:
                    raise
    except OSError:
        for listener in opened:
            listener.close()
        raise
    return opened


_PROTOCOL = 1  # of the messages here and after the start
_BIND_SECONDS = 10.0  # a predecessor on the same port may still be ending
_HELLO_SECONDS = 5.0  # a process of the job answers the challenge at once
_SEND_SECONDS = 5.0
_MAX_HELLO_BYTES = 8192
_MAX_GO_BYTES = 1 << 20
_MAX_LOGGED_ADDRESSES = 100
_RETRY_SECONDS = 0.2
_MENDED_SECONDS = 1.0  # between attempts that fail until a user corrects something


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process' index, and what it shares with the others.

    Attributes:
      index, count: of this process, and of processes.
      host, port: where process 0 listens.
      token: of the job.
      host_id: names this machine; equal on processes that share it.
    """

    index: int
    count: int
    host: str
    port: int
    token: bytes
    host_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A job whose processes are all there.

    Attributes:
      peers: process 0's connection to every other process, or another process' connection to process 0.
      host_ids: of all processes, by index.
      offer: process 0's text.
    """

    peers: list[Peer]
    host_ids: list[str]
    offer: str


def gather_peers(place: Place, *, offer: str, seconds: float) -> Joined:
    """Wait, as process 0, until all other processes have joined, and send them the offer.

    Raises:
      UserError: a process has other flags than this one, or the port is taken.
      HostLostError: some process did not join in time.
    """
    deadline = time.monotonic() + seconds
    admission = _Admission(place, seconds)
    try:
        admission.open(min(deadline, time.monotonic() + _BIND_SECONDS))
        peers = admission.admit_all(deadline)
    except (UserError, HostLostError) as error:
        admission.refuse_all({"lost": isinstance(error, HostLostError), "line": str(error)})
        raise
    finally:
        admission.close()
    host_ids = [place.host_id, *(peer.host_id for peer in peers)]
    go = {"name": socket.gethostname(), "offer": offer, "host_ids": host_ids}
    for peer in peers:
        peer.connection.settimeout(_SEND_SECONDS)
        peer.send(seal(place.token, "go", admission.challenges[peer.index], go))
    return Joined(peers=peers, host_ids=host_ids, offer=offer)


def connect(place: Place, *, seconds: float) -> Joined:
    """Join process 0 and wait until all others have.

    Raises:
      UserError: process 0 refuses this process' flags.
      HostLostError: process 0 does not answer, or another process did not join in time.
    """
    deadline = time.monotonic() + seconds
    name, reason, said = socket.gethostname(), "no answer", set()
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((place.host, place.port), timeout=min(left, 10.0))
        except OSError as error:  # not up yet, or its name not yet known
            reason = str(error)
            time.sleep(min(_RETRY_SECONDS, left))
            continue
        try:
            return _ask_to_join(connection, place, name, deadline)
        except _NotAdmitted as error:
            connection.close()
            reason = str(error)
            if error.worth_saying and reason not in said:
                said.add(reason)
                _LOG.warning("process %d (%s) tries again: %s", place.index, name, reason)
            pause = _MENDED_SECONDS if error.worth_saying else _RETRY_SECONDS
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        except BaseException:
            connection.close()
            raise
    raise HostLostError(
        f"process {place.index} ({name}) could not join process 0 at {place.host}:{place.port} within {seconds:g} s "
        f"({reason}); check that process 0 runs there, or set --coordinator to its host:port"
    )


class _NotAdmitted(Exception):
    """Why an attempt to join failed; `worth_saying` if a user could correct it meanwhile."""

    def __init__(self, reason: str, worth_saying: bool = False):
        super().__init__(reason)
        self.worth_saying = worth_saying


def _ask_to_join(connection: socket.socket, place: Place, name: str, deadline: float) -> Joined:
    patience = min(deadline, time.monotonic() + _HELLO_SECONDS)
    challenge = _read_message(connection, patience, _MAX_HELLO_BYTES).get("challenge")
    if not isinstance(challenge, str):
        raise _NotAdmitted("another program answers there")
    mine = new_challenge()
    hello = {
        "index": place.index,
        "count": place.count,
        "name": name,
        "versions": versions(),
        "host_id": place.host_id,
        "challenge": mine,
    }
    connection.settimeout(_SEND_SECONDS)
    try:
        connection.sendall(encode(seal(place.token, "hello", challenge, hello)))
    except OSError as error:
        raise _NotAdmitted(str(error)) from error
    # process 0 times out first, and names the missing processes
    message = _read_message(connection, deadline + _HELLO_SECONDS, _MAX_GO_BYTES)
    if message["kind"] == "stranger":
        raise _NotAdmitted(
            f"process 0 there holds another job token; give all processes the same --job_token or {TOKEN_VARIABLE}, "
            "and the same --coordinator",
            worth_saying=True,
        )
    content = unseal(place.token, mine, message)
    if content is None:
        raise _NotAdmitted("what answers there does not hold this job's token", worth_saying=True)
    if message["kind"] == "refused":
        raise (HostLostError if content["lost"] else UserError)(content["line"])
    hub = Peer(index=0, name=content["name"], connection=connection, host_id=content["host_ids"][0])
    return Joined(peers=[hub], host_ids=content["host_ids"], offer=content["offer"])


def _read_message(connection: socket.socket, deadline: float, most: int) -> dict:
    """Read exactly one message; raise _NotAdmitted if the other end closes, takes too long or sends too much."""
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(line) > most:
            raise _NotAdmitted("no answer" if left <= 0 else "another program answers there")
        connection.settimeout(left)
        try:
            data = connection.recv(4096)
        except TimeoutError:
            continue
        except OSError as error:
            raise _NotAdmitted(str(error)) from error
        if not data:
            raise _NotAdmitted("it closed the connection or is another program")
        line += data
    try:
        return decode(line[:-1])
    except MalformedMessage as error:
        raise _NotAdmitted("another program answers there") from error


@dataclass(eq=False)
class _UnverifiedPeer:
    """A connection that is not authenticated yet."""

    connection: socket.socket
    address: str
    challenge: str
    until: float
    received: bytes = b""


@dataclass(eq=False)
class _Admission:
    """Process 0's side: accepts connections, and admits those that send a sealed hello."""

    place: Place
    seconds: float
    listeners: list[socket.socket] = field(default_factory=list)
    unverified_peers: dict[socket.socket, _UnverifiedPeer] = field(default_factory=dict)
    peers: dict[int, Peer] = field(default_factory=dict)
    challenges: dict[int, str] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    strangers: dict[str, str] = field(default_factory=dict)
    refused: str = ""

    def __post_init__(self):
        self.name = socket.gethostname()
        # so that all processes of a job may connect at once; beyond it the oldest connection is dropped
        self.most_unverified = max(128, 2 * self.place.count)

    def open(self, deadline: float) -> None:
        """Listen at the coordinator's address; raise UserError if another program does."""
        self.listeners = listen(self.place.host, self.place.port, deadline)
        for listener in self.listeners:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close the port and the connections that have not joined."""
        for connection in (*self.listeners, *self.unverified_peers):
            connection.close()
        self.selector.close()

    def admit_all(self, deadline: float) -> list[Peer]:
        """Return the other processes in the order of their index, once all have joined."""
        while True:
            if len(self.peers) == self.place.count - 1:
                self._drop_closed()  # one that joined and died just now: its successor may connect
                if len(self.peers) == self.place.count - 1:
                    return [self.peers[index] for index in sorted(self.peers)]
            now = time.monotonic()
            for unverified in [unverified for unverified in self.unverified_peers.values() if unverified.until <= now]:
                self._drop(unverified, "said nothing in time")
            if now >= deadline:
                raise self._missing()
            until = min([deadline, *(unverified.until for unverified in self.unverified_peers.values())])
            for key, _ in self.selector.select(max(0.0, until - now)):
                if key.fileobj.fileno() >= 0:  # else dropped by an earlier turn of this loop
                    key.data(key.fileobj)

    def refuse_all(self, content: dict) -> None:
        """Send the processes that have joined the reason why the job does not start."""
        for index, peer in self.peers.items():
            peer.connection.settimeout(_SEND_SECONDS)
            peer.send(seal(self.place.token, "refused", self.challenges[index], content))
            peer.connection.close()

    # One event each.

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # gone before it was taken
            return
        if len(self.unverified_peers) >= self.most_unverified:
            self._drop(next(iter(self.unverified_peers.values())), "made way for others")
        connection.setblocking(False)
        unverified = _UnverifiedPeer(connection, str(address[0]), new_challenge(), time.monotonic() + _HELLO_SECONDS)
        try:
            connection.send(encode({"kind": "challenge", "challenge": unverified.challenge}))
        except OSError:
            connection.close()
            return
        self.unverified_peers[connection] = unverified
        self.selector.register(connection, selectors.EVENT_READ, self._receive_hello)

    def _receive_hello(self, connection: socket.socket) -> None:
        unverified = self.unverified_peers[connection]
        try:
            data = connection.recv(_MAX_HELLO_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        unverified.received += data
        line, end, _ = unverified.received.partition(b"\n")
        if not end:
            if not data:
                self._drop(unverified, "closed without a hello")
            elif len(unverified.received) > _MAX_HELLO_BYTES:
                self._drop(unverified, "a line without an end")
            return
        try:
            message = decode(line)
        except MalformedMessage:
            self._drop(unverified, "no hello of this program")
            return
        try:
            hello = unseal(self.place.token, unverified.challenge, message) if message["kind"] == "hello" else None
        except (ValueError, RecursionError):  # sealed, and no JSON: not by this program
            hello = None
        if hello is None:
            self._drop(unverified, "another job token or none", last_message={"kind": "stranger"})
            return
        self.selector.unregister(connection)
        del self.unverified_peers[connection]
        self._admit(connection, hello)

    def _receive_early(self, connection: socket.socket) -> None:
        """A process that has joined sends nothing before the start: either it died, or its bytes are left unread."""
        self.selector.unregister(connection)
        self._drop_closed()

    def _admit(self, connection: socket.socket, hello: dict) -> None:
        """Admit a process of this job; a contradiction that no retry can resolve raises UserError."""
        place, index, theirs = self.place, hello["index"], hello["versions"]  # in hellos of all versions to come
        peer = Peer(index=index, name=hello["name"], connection=connection, host_id=hello.get("host_id", ""))
        line = ""
        if theirs != versions():
            line = (
                f"{peer} runs {_shown(theirs)} but process 0 ({self.name}) runs {_shown(versions())}; install the same "
                "everywhere"
            )
        elif hello["count"] != place.count:
            line = (
                f"{peer} has num_processes={hello['count']} but process 0 ({self.name}) has "
                f"num_processes={place.count}; give all the same"
            )
        elif not 0 < index < place.count:
            line = (
                f"{peer} joined process 0 of {place.count}, but process_id must lie in 1..{place.count - 1}; give each "
                "its own"
            )
        self._drop_closed()  # a process that joined and died: this may be its successor
        twice = not line and index in self.peers
        if twice:
            line = f"{peer} joined although {self.peers[index]} has that process_id; give each process its own"
        if line:
            connection.settimeout(_SEND_SECONDS)
            peer.send(seal(place.token, "refused", hello["challenge"], {"lost": False, "line": line}))
            connection.close()
            if not twice:
                raise UserError(line)
            self.refused = f" (refused: {line})"
            return
        self.peers[index], self.challenges[index] = peer, hello["challenge"]
        self.selector.register(connection, selectors.EVENT_READ, self._receive_early)

    # Dropping connections.

    def _drop(self, unverified: _UnverifiedPeer, why: str, last_message: dict | None = None) -> None:
        if last_message is not None:
            try:
                unverified.connection.send(encode(last_message))
            except OSError:
                pass
        self.selector.unregister(unverified.connection)
        del self.unverified_peers[unverified.connection]
        unverified.connection.close()
        if unverified.address in self.strangers or len(self.strangers) >= _MAX_LOGGED_ADDRESSES:
            return
        self.strangers[unverified.address] = why
        _LOG.warning(
            "a stranger at the rendezvous port %d from %s was dropped (%s); later ones from there are not mentioned",
            self.place.port,
            unverified.address,
            why,
        )

    def _drop_closed(self) -> None:
        for index, peer in list(self.peers.items()):
            try:
                is_closed = peer.connection.recv(1, socket.MSG_PEEK) == b""
            except BlockingIOError:
                is_closed = False
            except OSError:
                is_closed = True
            if is_closed:
                del self.peers[index]
                if peer.connection in self.selector.get_map():
                    self.selector.unregister(peer.connection)
                peer.connection.close()

    def _missing(self) -> HostLostError:
        place = self.place
        missing = [index for index in range(1, place.count) if index not in self.peers]
        where = " and ".join(sorted({listener.getsockname()[0] for listener in self.listeners}))
        strangers = ""
        if self.strangers:
            shown = ", ".join(list(self.strangers)[:5])
            strangers = f"; strangers came from {shown}: if they belong to this job, give all the same --job_token"
        return HostLostError(
            f"processes {missing} of {place.count} have not joined process 0 ({self.name}) at port {place.port} of "
            f"{where} within {self.seconds:g} s{self.refused}; see their logs, and give each process "
            f"--num_processes={place.count} and a --process_id of its own{strangers}"
        )


def versions() -> dict[str, str]:
    """Return what must be equal on all processes."""
    return {"protocol": str(_PROTOCOL), "jax": importlib.metadata.version("jax")}


def _shown(versions: dict[str, str]) -> str:
    return " with ".join(f"{name} {version}" for name, version in versions.items())
