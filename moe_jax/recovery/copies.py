"""Copies of a run's state in the memory of its hosts, which outlive a killed process. No arrays, no jax.

Inputs: a folder of a RAM disk, pieces of bytes with a header that says what they are, and the job's key. Outputs: the
pieces again, checked, from this host's memory or over TCP from another's; and which copies the run's history knows.
"""

# A copy is what one process keeps of the state after a step. Each process has two files in its own host's memory and,
# where the pieces lie on one host only, two in its partner's; the one that does not hold the newest step is written to.
#
#     12.0         pieces of process 12, one after the other; those that the partner has too come first
#     12.0.json    its header, with a CRC of each piece and one of itself; there only while all of 12.0 is valid
#
# A copy may be gone on from if it is of the history that the run folder tells (run.json): each start of the run notes
# its epoch and the step that it went on from, and what earlier epochs did after that step is no part of the run any
# more. So a host that comes back late, with copies of steps that the others made anew, does not win.
#
# A start that goes on from a copy makes that step's copy anew, on its own hosts, before its first step. Until that is
# made by all, the files that it went on from stay, and of one step there may be copies of two layouts: of two meshes.
#
# Connections between processes begin with a handshake, both ways, whose key belongs to this start of the job: a process
# of an earlier start is a stranger. After it bytes pass as they are, neither encrypted nor signed.

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import mmap
import os
import re
import secrets
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from moe_jax.errors import UserError
from moe_jax.observe.run_folder import read_text, write_atomically
from moe_jax.recovery.job_secret import seal, unseal
from moe_jax.recovery.rendezvous import HELLO_SECONDS, MAX_HELLO_BYTES, machine_id, note_stranger

VARIABLE, RAM_DISK = "MOE_JAX_COPIES", "/dev/shm"
_FORMAT = "moe_jax copy 2"
_SECONDS = 60.0  # for the other end of a connection to take or send something
_MOST_HEADER_BYTES = 64 << 20
_MOST_CONNECTIONS = 256
_MOST_STARTS = 100  # that a run folder remembers; copies of older ones are not used
_NAME = re.compile(r"[0-9]+\.[01]")
_log = logging.getLogger(__name__)
Region = tuple[str, list, int, int, int]  # leaf, [[start, stop] of each dim], offset and bytes in the file, CRC
Kept = Sequence[int] | None  # [step, layout] of a copy that stays, as its headers have them


# The history of a run.


def read_history(path: Path) -> dict:
    """Return {'id': of the run, 'starts': [[epoch, step, base], ...]} (see `note_start`); a new one where none is."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        held = json.loads(read_text(path) or "")
        starts = [[int(epoch), int(step), int(base)] for epoch, step, base in held["starts"]]
        if re.fullmatch("[0-9a-f]{16}", held["id"]):
            return {"id": held["id"], "starts": starts}
    return {"id": secrets.token_hex(8), "starts": []}


def next_epoch(history: Mapping) -> int:
    """Return the number of the start that comes after those of a history."""
    return 1 + max((epoch for epoch, *_ in history["starts"]), default=0)


def note_start(path: Path, history: Mapping, step: int, base: int) -> None:
    """Write down from which step the next epoch goes on, and the newest checkpoint then, -1 without any.

    It comes before that epoch changes any other file of the run.
    """
    starts = [*history["starts"], [next_epoch(history), step, base]][-_MOST_STARTS:]
    write_atomically(path, json.dumps({**history, "starts": starts}))


def why_not_current(header: Mapping, history: Mapping, newest: int) -> str:
    """Return why a copy is no part of the run's history, '' where it is; newest: checkpoint, -1 without any."""
    epoch, step = header["epoch"], header["step"]
    known = {began: (start, base) for began, start, base in history["starts"]}
    start, base = known.get(epoch, (step + 1, -1))
    if step < start:
        return f"the run folder knows no epoch {epoch} that made this step"
    if newest < base:
        return f"the checkpoint of step {base}, or a later one, is gone from the run folder"
    for later, (start, _) in known.items():
        if later > epoch and start < step:
            return f"epoch {later} of the run went on from step {start} without it"
    return ""


# Files.


def folder_for(run_id: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this machine for the copies of a run: in MOE_JAX_COPIES, or in /dev/shm."""
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE]) / run_id
    machine = hashlib.sha256(machine_id(environment).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return Path(RAM_DISK) / f"moe_jax-{os.geteuid()}" / machine / run_id


class CopyFolder:
    """The copies in one host's memory; several processes of the host share them."""

    def __init__(self, path: Path, run_id: str):
        """Make the folder, for this user alone; a UserError where that cannot be."""
        self.path, self._run = path, run_id
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (path, path.parent):
                found = os.lstat(folder)
                if found.st_uid != os.geteuid():
                    raise PermissionError(0, f"{folder} is another user's")
            os.chmod(path, 0o700)
        except OSError as error:
            raise UserError(
                f"no copies can be kept in {path} ({error.strerror or error}); name a folder of a RAM disk in "
                f"{VARIABLE}, or set train.copy_every = 0"
            ) from error

    def check_room(self, needed: int) -> None:
        """Refuse copies of so many bytes on this host where they take more than half of its RAM or of the RAM disk.

        UserError: which of them is too small.
        """
        disk = os.statvfs(self.path)
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        held = sum(file.stat().st_size for file in self.path.iterdir())
        limits = {
            "half of this host's RAM": ram // 2,
            f"half of the RAM disk at {self.path} (64 MB in Kubernetes, unless a volume is mounted there)": (
                disk.f_frsize * disk.f_blocks // 2
            ),
            f"what is free at {self.path} (see {self.path.parent} for copies of runs that ended)": (
                disk.f_frsize * disk.f_bavail + held
            ),
        }
        for what, limit in limits.items():
            if needed > limit:
                raise UserError(
                    f"copies of the state need {needed:,} bytes on this host, more than {what}: {limit:,}; give it "
                    "more, take more hosts, or set train.copy_every = 0"
                )

    def headers(self, names: Sequence[str] | None = None) -> dict[str, dict]:
        """Return {name: header} of the copies that are whole, as far as headers tell; pieces are checked on reading."""
        found = {}
        for name in names or sorted(os.listdir(self.path)):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                if _NAME.fullmatch(name):
                    header = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
                    size = (self.path / name).stat().st_size
                    if _is_whole(header) and header["run"] == self._run and size >= _size(header):
                        found[name] = header
        return found

    def write(self, header: dict, pieces: Sequence, keep: Kept) -> str:
        """Write a copy and return its name; an OSError where the memory is full.

        Args:
          header: as `headers` returns it, but for the CRCs, which are filled in.
          pieces: buffers, in the order of header['regions'].
          keep: step and layout of the copy that stays.
        """
        with self._generation(header, keep) as (name, descriptor):
            for region, piece in zip(header["regions"], pieces, strict=True):
                piece = memoryview(piece).cast("B")
                region[4], done = zlib.crc32(piece), 0
                while done < len(piece):
                    done += os.pwrite(descriptor, piece[done:], region[2] + done)
        return name

    def receive(self, header: dict, stream: BinaryIO, keep: Kept) -> None:
        """Take a copy in from a connection; a ConnectionError where it ends, or a piece is not what the header says."""
        with self._generation(header, keep) as (_, descriptor):
            _say(stream, {"refused": ""})  # there is room for it
            if not (size := _size(header)):
                return
            with mmap.mmap(descriptor, size) as memory:
                for name, _, offset, count, crc in header["regions"]:
                    with memoryview(memory)[offset : offset + count] as piece:
                        if stream.readinto(piece) != count:
                            raise ConnectionError("the connection ended within a piece")
                        if zlib.crc32(piece) != crc:
                            raise ConnectionError(f"the CRC of {name} differs")

    @contextlib.contextmanager
    def _generation(self, header: dict, keep: Kept) -> Iterator[tuple[str, int]]:
        """Yield (name, open file) of the generation to write; it is valid when the block ends without an error."""
        names = [f"{header['process']}.{generation}" for generation in (0, 1)]
        found = self.headers(names)
        if any(other["epoch"] > header["epoch"] for other in found.values()):  # this process slept meanwhile
            raise OSError(errno.EBUSY, "a later start of the run has copies there")
        step, layout = keep or (-1, 0)

        def worth(name: str) -> tuple:  # of what a new copy would overwrite
            held = found.get(name)
            if held is None:
                return ()
            return held["step"] == step, held["step"] == step and held["layout"] == layout, held["step"], held["epoch"]

        name = min(names, key=worth)
        path, said = self.path / name, self.path / f"{name}.json"
        said.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = _size(header)
            if size:
                os.posix_fallocate(descriptor, 0, size)  # a full disk is an error here, and no signal later
            os.truncate(descriptor, size)
            yield name, descriptor
        except BaseException:
            path.unlink(missing_ok=True)  # frees what a full disk holds of it
            raise
        finally:
            os.close(descriptor)
        sealed = {**header, "format": _FORMAT, "run": self._run}
        part = said.with_suffix(".tmp")
        part.write_text(json.dumps({**sealed, "crc32": _crc(sealed)}), encoding="utf-8")
        os.replace(part, said)

    def read(self, name: str, region: Region) -> memoryview:
        """Return a piece; a ValueError or OSError where it is not what was written."""
        _, _, offset, count, crc = region
        if not count:
            return memoryview(b"")
        with open(self.path / name, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        piece = memoryview(memory)[offset : offset + count]
        if len(piece) != count or zlib.crc32(piece) != crc:
            raise ValueError("its CRC differs")
        return piece

    def forget(self, epoch: int, keep: Kept) -> None:
        """Remove the copies of other epochs, but the one to keep."""
        for name, header in self.headers().items():
            if header["epoch"] != epoch and [header["step"], header["layout"]] != keep:
                for file in (f"{name}.json", name):
                    (self.path / file).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder, of a run that needs its copies no more."""
        shutil.rmtree(self.path, ignore_errors=True)


def _size(header: Mapping) -> int:
    return sum(count for *_, count, _ in header["regions"])


def _crc(header: Mapping) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True).encode())


def _is_whole(header: dict) -> bool:
    return header.get("format") == _FORMAT and header.pop("crc32") == _crc(header)


# Between hosts.


class Link:
    """A connection to the copies of another host, after the handshake; a context manager."""

    def __init__(self, address: tuple[str, int], key: bytes):
        """Connect; a ConnectionError where what answers does not hold the key."""
        self._socket = socket.create_connection(address, timeout=_SECONDS)
        self._stream = self._socket.makefile("rwb")
        try:
            own, challenge = secrets.token_hex(16), str(_hear(self._stream).get("challenge"))
            _say(self._stream, seal(key, "copies", challenge, {"challenge": own}))
            if unseal(key, own, _hear(self._stream)) is None:
                raise ConnectionError("it does not hold the secret of this start of the job")
        except BaseException:
            self.close()
            raise

    def push(self, header: dict, file: Path, keep: Kept) -> None:
        """Send a copy, which lies at the beginning of a file; a ConnectionError where it is refused.

        keep: step and layout of the copy that stays there.
        """
        _say(self._stream, {"kind": "push", "header": header, "keep": keep})
        if (why := _hear(self._stream)["refused"]) == "" and (size := _size(header)):
            with open(file, "rb") as source:
                self._socket.sendfile(source, 0, size)
        if why := why or _hear(self._stream)["refused"]:
            raise ConnectionError(why)

    def read(self, name: str, region: Region) -> memoryview:
        """Return a piece of the other host's copy `name`; errors as of `CopyFolder.read`."""
        _, _, offset, count, crc = region
        _say(self._stream, {"kind": "read", "name": name, "offset": offset, "bytes": count})
        if _hear(self._stream).get("bytes") != count:
            raise ValueError("it is not there any more")
        piece = memoryview(bytearray(count))
        if self._stream.readinto(piece) != count:
            raise ConnectionError("the connection ended within a piece")
        if zlib.crc32(piece) != crc:
            raise ValueError("its CRC differs")
        return piece

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_error) -> None:
        self.close()


class CopyServer:
    """Threads that take copies in from other hosts, and hand out those of this one.

    Attributes:
      port: where it listens.
      cpu_seconds: that taking copies in has cost so far.
    """

    def __init__(self, folder: CopyFolder, key: bytes, address: str, admit: Callable[[dict], str]):
        """Listen at an address; admit: header of a copy that comes -> why it is refused, ''."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, dualstack_ipv6=address == "::")
        self.port, self.cpu_seconds = self._listener.getsockname()[1], 0.0
        self._folder, self._key, self._admit = folder, key, admit
        self._strangers: list[str] = []
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        threading.Thread(target=self._accept, name="moe_jax copies", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # too many open files
                continue
            if self._free.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection, str(address[0])), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket, name: str) -> None:
        challenge = secrets.token_hex(16)
        try:
            with connection, connection.makefile("rwb") as stream:
                hello = None
                try:
                    connection.settimeout(HELLO_SECONDS)
                    _say(stream, {"kind": "challenge", "challenge": challenge})
                    hello = unseal(self._key, challenge, _hear(stream))
                finally:
                    if hello is None:
                        note_stranger(self._strangers, name, self.port, "no process of this start of the job")
                if hello is None:
                    return
                connection.settimeout(_SECONDS)
                _say(stream, seal(self._key, "copies", str(hello.get("challenge")), {}))
                connection.settimeout(None)  # a process that restores may read long from elsewhere
                while request := _hear(stream, _MOST_HEADER_BYTES):
                    connection.settimeout(_SECONDS)
                    self._answer(request, connection, stream)
                    connection.settimeout(None)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass  # it went away, or is none of ours
        finally:
            self._free.release()

    def _answer(self, request: dict, connection: socket.socket, stream: BinaryIO) -> None:
        """Carry out one request."""
        if request["kind"] == "push":
            began, header = time.thread_time(), request["header"]
            refused = self._admit(header)
            try:
                if not refused:
                    self._folder.receive(header, stream, request["keep"])
            except OSError as error:
                refused = error.strerror or str(error)
            self.cpu_seconds += time.thread_time() - began
            _say(stream, {"refused": refused})
            if refused:
                raise ConnectionError(refused)  # what follows may be the rest of the copy
            return
        name, offset, count = request["name"], int(request["offset"]), int(request["bytes"])
        size = 0
        if _NAME.fullmatch(name) and min(offset, count) >= 0:
            with contextlib.suppress(FileNotFoundError), open(self._folder.path / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                _say(stream, {"bytes": count if offset + count <= size else -1})
                if count and offset + count <= size:
                    connection.sendfile(file, offset, count)
                return
        _say(stream, {"bytes": -1})


def _say(stream: BinaryIO, message: dict) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _hear(stream: BinaryIO, most: int = MAX_HELLO_BYTES) -> dict[str, Any]:
    """Return the next message; a ConnectionError where there is none."""
    line = stream.readline(most + 1)
    message = json.loads(line) if line.endswith(b"\n") else None
    if not isinstance(message, dict):
        raise ConnectionError("the connection ended, or is of another program")
    return message
