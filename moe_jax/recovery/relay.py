"""Carries jax's connections to its coordination service, which is open to nobody else. No arrays, no jax.

Inputs: this process' place, and in process 0 the sockets of the rendezvous. Outputs: an address for jax's client, and
in process 0 one for its service.
"""

# jax's service believes whoever reaches it: a stranger can register as a process, end the job, or put a program into
# the key-value store. So it listens at a Unix socket in a folder of this user, and each process' client talks to a
# loopback port of its own process, which takes connections of that process alone (on Linux; elsewhere of its machine).
#
#     client of process 0 -> its loopback port ----------------------------------------------------------> service
#     client of process i -> its loopback port -> the rendezvous' port of process 0, after a handshake --> service
#
# The handshake is the rendezvous', both ways; after it bytes pass as they are, neither encrypted nor signed.

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence

from moe_jax.errors import UserError
from moe_jax.recovery.job_secret import seal, unseal
from moe_jax.recovery.rendezvous import HELLO_SECONDS, MAX_HELLO_BYTES, Place, most_strangers, note_stranger

# When process 0 dies, jax would abort this process within milliseconds: so long the watchdog has to name it first.
_HOLD_SECONDS = 5.0
_CONNECT_SECONDS = 10.0
_SERVICE_ATTEMPTS, _ATTEMPT_SECONDS = 6000, 0.01  # process 0's service opens after the others were told to connect
_CHUNK_BYTES = 1 << 18
_PREFIX = "moe_jax_relay_"
_BROKEN = (OSError, EOFError, ValueError, RecursionError)  # a connection that ends, or that says no line of JSON
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """A thread that passes bytes on, to the end of this process.

    Attributes:
      address: where this process' client of jax's service connects.
      service_address: where the service has to listen; None where it is not this process'.
    """

    def __init__(self, place: Place, listeners: Sequence[socket.socket] = ()):
        """Open the ports; `listeners`: of process 0's rendezvous, which go on listening.

        UserError: there is no folder for the service's socket.
        """
        self._place, self._folder = place, ""
        self._strangers: list[str] = []
        self._unverified: dict[asyncio.StreamWriter, None] = {}  # connections without a handshake, oldest first
        if place.index == 0:
            try:
                usual = tempfile.gettempdir()  # gRPC reads a % in a path, and the kernel takes 107 bytes
                usual = usual if re.fullmatch(r"[\w/.-]{1,80}", usual) else "/tmp"
                _sweep(usual)
                self._folder = tempfile.mkdtemp(prefix=_PREFIX, dir=usual)
            except OSError as error:
                raise UserError(
                    f"process 0 needs a folder for jax's socket and has none ({error.strerror or error}); set TMPDIR "
                    "to a short path that can be written"
                ) from error
        self._path = f"{self._folder}/service"
        self.service_address = f"unix:{self._path}" if self._folder else None
        local = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*local.getsockname())
        ports = [(self._serve_client, local), *((self._admit, listener) for listener in listeners)]
        self._loop, self._closed = asyncio.new_event_loop(), asyncio.Event()
        threading.Thread(target=self._run, args=(ports,), name="moe_jax relay", daemon=True).start()

    def close(self) -> None:
        """Listen no more, end all connections and remove the folder of the service's socket."""
        with contextlib.suppress(RuntimeError):  # a second call
            self._loop.call_soon_threadsafe(self._closed.set)
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the folder alone, of a process that exits now: jax would abort it as soon as a connection ends."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, ports: list) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(ports))

    async def _serve(self, ports: list) -> None:
        self._loop.set_exception_handler(lambda _loop, _context: None)  # of a connection that broke
        servers = [await asyncio.start_server(answer, sock=port, limit=_CHUNK_BYTES) for answer, port in ports]
        await self._closed.wait()
        for server in servers:
            server.close()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on a connection of this process' own client."""
        with contextlib.closing(writer):
            if not is_own(writer.get_extra_info("socket")):
                return
            with contextlib.suppress(*_BROKEN):
                await _splice((reader, writer), await (self._open_service() if self._folder else self._open_remote()))
            await asyncio.sleep(_HOLD_SECONDS)

    async def _open_service(self) -> Ends:
        for _ in range(_SERVICE_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return await asyncio.open_unix_connection(self._path)
            await asyncio.sleep(_ATTEMPT_SECONDS)
        raise ConnectionError("jax's service did not open")

    async def _open_remote(self) -> Ends:
        """Return a connection to process 0's service; a ConnectionError where what answers lacks the secret."""
        place, own = self._place, secrets.token_hex(16)
        connecting = asyncio.open_connection(place.host, place.port)
        reader, writer = await asyncio.wait_for(connecting, _CONNECT_SECONDS)
        try:
            challenge = str((await _read_line(reader)).get("challenge"))
            _write_line(writer, seal(place.token, "relay", challenge, {"challenge": own}))
            answer = await _read_line(reader)
            if answer.get("kind") != "relayed" or unseal(place.token, own, answer) is None:
                raise ConnectionError("what answers there does not hold this job's secret")
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on a connection from another process, once it has proved the job's secret."""
        token, challenge, hello = self._place.token, secrets.token_hex(16), None
        name = str((writer.get_extra_info("peername") or ("?",))[0])
        if len(self._unverified) >= most_strangers(self._place.count):
            oldest = next(iter(self._unverified))
            del self._unverified[oldest]
            oldest.transport.abort()
        self._unverified[writer] = None
        with contextlib.closing(writer), contextlib.suppress(*_BROKEN):
            try:
                _write_line(writer, {"kind": "challenge", "challenge": challenge})
                message = await _read_line(reader)
                hello = unseal(token, challenge, message) if message.get("kind") == "relay" else None
            finally:
                self._unverified.pop(writer, None)
                if hello is None:
                    note_stranger(self._strangers, name, self._place.port, "no process of this job, which runs already")
            if hello is not None:
                _write_line(writer, seal(token, "relayed", str(hello.get("challenge")), {}))
                await _splice((reader, writer), await self._open_service())


def _sweep(folder: str) -> None:
    """Remove what processes left there that were killed: sockets that nobody listens at."""
    for left in glob.glob(f"{folder}/{_PREFIX}*/service"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a full queue would be waited for, and others can leave sockets there
            try:
                probe.connect(left)
            except ConnectionRefusedError:
                if os.lstat(os.path.dirname(left)).st_uid == os.geteuid():
                    shutil.rmtree(os.path.dirname(left), ignore_errors=True)


async def _read_line(reader: asyncio.StreamReader) -> dict:
    line = await asyncio.wait_for(reader.readline(), HELLO_SECONDS)
    message = json.loads(line) if len(line) <= MAX_HELLO_BYTES else None
    if not isinstance(message, dict):
        raise ValueError("no message of this program")
    return message


def _write_line(writer: asyncio.StreamWriter, message: dict) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _splice(one: Ends, other: Ends) -> None:
    """Pass bytes both ways until either end closes; close `other`."""
    with contextlib.closing(other[1]):
        pumps = [asyncio.create_task(_pump(one[0], other[1])), asyncio.create_task(_pump(other[0], one[1]))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()


def is_own(connection: socket.socket) -> bool:
    """Say whether the other end of a loopback connection is a socket of this process; True where no /proc tells."""
    if sys.platform != "linux":
        return True
    ends = []
    for address, port in (connection.getpeername(), connection.getsockname()):
        number = int.from_bytes(socket.inet_aton(address), sys.byteorder)
        ends.append(f"{number:08X}:{port:04X}")
    inodes = set()
    for table in ("tcp", "tcp6"):  # in the latter as ::ffff:127.0.0.1
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}", encoding="ascii") as rows:
            for row in map(str.split, rows):
                if row[1].endswith(ends[0]) and row[2].endswith(ends[1]):
                    inodes.add(f"socket:[{row[9]}]")
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") in inodes:
                return True
    return False
