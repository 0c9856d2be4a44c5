"""The training state in the memory of hosts: copied while training goes on, and read on whatever mesh comes next.

Inputs: the state and host data of a checkpoint (checkpoint.py), this process among the others, and the run's history.
Outputs: copies in this host's and a partner's memory (recovery/copies.py); the state of the newest of them again.
"""

# Every leaf is cut as the devices hold it, and a piece that several devices hold is kept once on each host that has it.
# A piece that one host alone has goes to a partner besides: to the process with the same place on the next host. So
# each piece has two hosts, where there are two. All processes make the copy of a step, and tell each other when it is
# done: only then is the one before it given up. The step loop waits while the state is copied from the devices, and for
# the copy before, should that still be under way; the rest goes on in a thread.
#
# In a job of several processes every method is called by all of them, in the same order.

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
import math
import socket
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.models.language_model import flatten
from moe_jax.observe.progress import with_prefix
from moe_jax.recovery.copies import CopyFolder, CopyServer, Kept, Link, Region, folder_for, next_epoch, why_not_current
from moe_jax.training.bank_order import Homes, copied, described_for_file, in_host_memory, shapes_in_file
from moe_jax.training.checkpoint import DamagedCheckpointError, read_leaves, without_ema
from moe_jax.training.hosts import Hosts

_START_SECONDS = 300.0
OWN = "own RAM"
_log = logging.getLogger(__name__)
Bounds = tuple[tuple[int, int], ...]  # [start, stop) of each dim


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a leaf that one process keeps."""

    name: str  # of the leaf
    bounds: Bounds
    device: int  # that has it, of the mesh's devices in order
    nbytes: int
    sent: bool  # whether a partner on another host keeps it too


def layout(
    leaves: dict[str, jax.ShapeDtypeStruct], shapes: dict[str, tuple[int, ...]],
    place: Callable[[int], tuple[int, str]], processes: int,
) -> list[list[Piece]]:  # fmt: skip
    """Return the pieces that each process keeps, those that its partner keeps too first.

    Args:
      leaves: in a file's order, with NamedShardings of one mesh, also an abstract one.
      shapes: what of them a file holds; pieces behind that are not kept.
      place: number of a device of the mesh -> (its process, that process' host).
    """
    kept: list[list[Piece]] = [[] for _ in range(processes)]
    hosts = {host for _, host in map(place, range(next(iter(leaves.values())).sharding.mesh.size))}
    for name, leaf in leaves.items():
        sizes, nbytes = leaf.sharding.mesh.shape, math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        holders: dict[Bounds, dict[str, dict[int, int]]] = {}  # {bounds: {host: {process: device}}}
        for device, at in enumerate(np.ndindex(*sizes.values())):
            bounds = _bounds(leaf, dict(zip(sizes, at, strict=True)))
            process, host = place(device)
            if all(start < size for (start, _), size in zip(bounds, shapes[name], strict=True)):
                holders.setdefault(bounds, {}).setdefault(host, {}).setdefault(process, device)
        for bounds, by_host in holders.items():
            for held in by_host.values():  # one process of each host, another for each piece
                process = sorted(held)[zlib.crc32(f"{name} {bounds}".encode()) % len(held)]
                kept[process].append(Piece(name, bounds, held[process], nbytes, len(by_host) == 1 < len(hosts)))
    return [sorted(pieces, key=lambda piece: not piece.sent) for pieces in kept]


def _bounds(leaf, coordinates: dict[str, int]) -> Bounds:
    """Return which part of a leaf the device at these coordinates of the mesh holds."""
    spec, sizes, bounds = leaf.sharding.spec, leaf.sharding.mesh.shape, []
    for dim, size in enumerate(leaf.shape):
        entry = spec[dim] if dim < len(spec) else None
        part, parts = 0, 1
        for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
            part, parts = part * sizes[axis] + coordinates[axis], parts * sizes[axis]
        bounds.append((part * size // parts, (part + 1) * size // parts))
    return tuple(bounds)


def partners(host_ids: Sequence[str]) -> list[int | None]:
    """Return the partner of each process: that at its place on the next host, None where there is one host alone."""
    members: dict[str, list[int]] = {}
    for process, host in enumerate(host_ids):
        members.setdefault(host, []).append(process)
    names, found = list(members), []
    for process, host in enumerate(host_ids):
        following = members[names[(names.index(host) + 1) % len(names)]]
        found.append(following[members[host].index(process) % len(following)] if len(names) > 1 else None)
    return found


def bytes_of_hosts(kept: list[list[Piece]], host_ids: Sequence[str]) -> Counter:
    """Return {host: bytes of its memory} that copies take: two generations, of its own processes and of partners."""
    needed: Counter = Counter()
    for process, (pieces, partner) in enumerate(zip(kept, partners(host_ids), strict=True)):
        needed[host_ids[process]] += 2 * sum(piece.nbytes for piece in pieces)
        if partner is not None:
            needed[host_ids[partner]] += 2 * sum(piece.nbytes for piece in pieces if piece.sent)
    return needed


class RamCopies:
    """The copies of one run; read as a `Checkpointer` is."""

    def __init__(self, history: dict, newest: int, hosts: Hosts):
        """Find out what all hosts hold.

        Args:
          history: of the run, as `recovery.copies.read_history` returns it, equal on all processes.
          newest: step of a checkpoint on the disk, -1 without any; process 0's counts.
        """
        self._hosts, self._me, self.epoch = hosts, hosts.process_index, next_epoch(history)
        self._folder = CopyFolder(folder_for(history["id"]), history["id"])
        self._server = None
        if hosts.process_count > 1:
            self._server = CopyServer(self._folder, hosts.key, hosts.addresses[0], self._why_refused)
        told = {"address": (hosts.addresses[1], self._server and self._server.port), "name": socket.gethostname()}
        told |= {"newest": newest, "copies": {}}
        if hosts.host_ids.index(hosts.host_ids[self._me]) == self._me:  # the first of this host speaks for all of it
            for name, header in self._folder.headers().items():
                told["copies"][name] = {key: value for key, value in header.items() if key != "host"}
        packed = base64.b64encode(zlib.compress(json.dumps(told).encode())).decode()
        texts = hosts.gather_text("copies", packed, _START_SECONDS)
        self._peers = [json.loads(zlib.decompress(base64.b64decode(text))) for text in texts]
        self.newest_on_disk = self._peers[0]["newest"]
        found, unknown = defaultdict(list), {}
        for process, peer in enumerate(self._peers):
            for name, header in peer["copies"].items():
                if why := why_not_current(header, history, self.newest_on_disk):
                    unknown.setdefault((header["epoch"], header["step"]), f"{self._named(process)} is not used: {why}")
                else:
                    found[header["step"], header["layout"]].append((process, name, header))
        for (_, step), line in unknown.items() if hosts.is_main else ():
            _log.warning("the copy of step %d in %s", step, line)
        self._copies: dict[int, list[tuple[int, str, dict]]] = {}  # {step: (process, file, header), the latest first}
        for held in found.values():
            held.sort(key=lambda copy: -copy[2]["epoch"])
        for (step, _), held in sorted(found.items(), key=lambda item: item[1][0][2]["epoch"]):
            if self._is_complete(held):
                self._copies[step] = held
        self._host_data: dict[int, dict] = {}
        self._bytes_read: Counter = Counter()
        self._kept: list[list[Piece]] = []
        self._devices: list = []
        self._thread: threading.Thread | None = None
        self._failure, self._off = "", False
        self.keep: Kept = None  # the newest copy that all processes have
        self.made, self.nbytes, self.seconds, self.cpu_seconds, self.waited = 0, 0, 0.0, 0.0, 0.0

    def _named(self, process: int) -> str:
        """Return in words where the copies of a process' host are."""
        return f"RAM of process {process} ({self._peers[process]['name']})"

    # Reading.

    def latest(self, below: int | None = None) -> int | None:
        """Return the newest step of which some host has each piece, None without any; below: only earlier ones."""
        return max((step for step in self._copies if below is None or step < below), default=None)

    def _is_complete(self, copies: list[tuple[int, str, dict]]) -> bool:
        elements: Counter = Counter()
        for name, bounds in self._holders(copies):
            elements[name] += math.prod(stop - start for start, stop in bounds)
        return all(elements[name] == math.prod(shape) for name, (_, shape) in copies[0][2]["leaves"].items())

    def _holders(self, copies: list[tuple[int, str, dict]]) -> dict[tuple[str, Bounds], list[tuple[int, str, Region]]]:
        """Return {(leaf, bounds): (process, file, region) of who has it, this host first}; copies: of one layout."""
        host_ids, found = self._hosts.host_ids, defaultdict(list)
        for process, name, header in copies:
            for region in header["regions"]:
                found[region[0], tuple(map(tuple, region[1]))].append((process, name, region))
        for holders in found.values():
            holders.sort(key=lambda holder: (host_ids[holder[0]] != host_ids[self._me], (holder[0] - self._me) % 4096))
        return found

    def read_host(self, step: int) -> dict:
        """Return the host data of a copy."""
        if step not in self._host_data:
            process, name, _ = self._copies[step][0]
            held = self._folder.headers([name])[name]["host"] if process == self._me else None
            texts = self._hosts.gather_text(f"host data of step {step}", json.dumps(held), _START_SECONDS)
            self._host_data[step] = json.loads(texts[process])
        return self._host_data[step]

    def has_ema(self, step: int) -> bool:
        """Say whether a copy holds a moving average of the parameters."""
        return any(name.startswith("ema/") for name in self._copies[step][0][2]["leaves"])

    def restore(self, step: int, abstract_state, home: Homes) -> tuple[Any, dict]:
        """Return (state, host data) of a copy, as `Checkpointer.restore` does."""
        host, self.keep = self.read_host(step), [step, self._copies[step][0][2]["layout"]]
        self._bytes_read.clear()
        with contextlib.closing(_Reader(self, step)) as reader:
            leaves = self._copies[step][0][2]["leaves"]
            stored = {
                name: _Leaf(reader, name, jnp.dtype(dtype), tuple(shape)) for name, (dtype, shape) in leaves.items()
            }
            stored, abstract_state = without_ema(stored, abstract_state)
            what = f"the copy of step {step} in RAM", contextlib.nullcontext
            return read_leaves(stored, flatten(abstract_state), abstract_state, home, what), host

    def origin(self) -> str:
        """Return in words where the state that was restored came from, in all processes together."""
        read: Counter = Counter()
        for text in self._hosts.gather_text("bytes read", json.dumps(self._bytes_read), _START_SECONDS):
            read.update(json.loads(text))
        own_first = sorted(read.items(), key=lambda item: item[0] != OWN)
        return ", ".join(f"{where} ({with_prefix(count)}B)" for where, count in own_first)

    # Writing.

    def prepare(self, abstract_state, home: Homes) -> None:
        """Settle who keeps what; a UserError where this host has no room for its part."""
        leaves, host_ids = described_for_file(flatten(abstract_state), home), self._hosts.host_ids
        self._devices = list(next(iter(leaves.values())).sharding.mesh.devices.flat)
        owner = [device.process_index for device in self._devices]
        shapes = shapes_in_file(leaves, home)
        self._kept = layout(leaves, shapes, lambda device: (owner[device], host_ids[owner[device]]), len(host_ids))
        self._leaves = {name: (leaf.dtype.name, shapes[name]) for name, leaf in leaves.items()}
        boxes = {(piece.name, piece.bounds) for pieces in self._kept for piece in pieces}
        self._layout = zlib.crc32(json.dumps([self._leaves, sorted(boxes)]).encode())  # pieces of one fit together
        self._folder.check_room(bytes_of_hosts(self._kept, host_ids)[host_ids[self._me]])

    def _why_refused(self, header: dict) -> str:
        """Return why a copy that another process sends is not taken in, '' where it is."""
        sender = header["process"]
        if header["epoch"] != self.epoch:
            return f"it is of epoch {header['epoch']}, and this is epoch {self.epoch}"
        if type(sender) is not int or dict(enumerate(partners(self._hosts.host_ids))).get(sender) != self._me:
            return f"process {self._me} is not the partner of process {sender}"
        want = [(piece.name, piece.bounds, piece.nbytes) for piece in self._kept[sender] if piece.sent]
        if [(name, tuple(map(tuple, bounds)), count) for name, bounds, _, count, _ in header["regions"]] != want:
            return f"it has other pieces than those of process {sender}"
        return ""

    def save(self, step: int, state, home: Homes, host: dict) -> str:
        """Start to copy a state; when this returns, it may be donated or changed. Arguments as of `Checkpointer.save`.

        Returns what went wrong with the copy before, in one line, or ''.
        """
        began = time.monotonic()
        failure = self.wait()
        if self._off:
            return failure
        regions, offset = [], 0
        for piece in self._kept[self._me]:
            regions.append([piece.name, piece.bounds, offset, piece.nbytes, 0])
            offset += piece.nbytes
        header = {"epoch": self.epoch, "step": step, "process": self._me, "layout": self._layout}
        header |= {"leaves": self._leaves, "regions": regions, "host": json.loads(json.dumps(host))}  # what it is now
        devices = defaultdict(list)
        for piece in self._kept[self._me]:
            devices[piece.name].append(self._devices[piece.device])

        def copy_own(name: str, leaf: jax.Array) -> list[jax.Array]:
            shards = {shard.device: shard.data for shard in leaf.addressable_shards}
            return [in_host_memory(shards[device]) for device in devices[name]]

        held = copied(state, home, copy_own)
        self._thread = threading.Thread(target=self._copy, args=(header, held), name="moe_jax copy", daemon=True)
        self._thread.start()
        self.waited += time.monotonic() - began
        return failure

    def _copy(self, header: dict, held: dict[str, list]) -> None:
        """Write a copy and send it to the partner, then agree with all processes that it is made."""
        began, cpu, failure, step = time.monotonic(), time.thread_time(), {}, header["step"]
        try:
            pieces = (held[piece.name].pop(0) for piece in self._kept[self._me])
            pieces = (np.asarray(piece).reshape(-1).view(np.uint8) for piece in pieces)
            name = self._folder.write(header, pieces, self.keep)
            partner = partners(self._hosts.host_ids)[self._me]
            if partner is not None:
                to, where = self._named(partner), self._peers[partner]["address"]
                regions = header["regions"][: sum(piece.sent for piece in self._kept[self._me])]
                with _said(f"it did not reach {to}"), Link(tuple(where), self._hosts.key) as link:
                    link.push({**header, "regions": regions}, self._folder.path / name, self.keep)
        except _NotSent as error:
            failure = {"why": str(error)}
        except Exception as error:  # the others wait for this one's word
            why = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
            failure = {"why": f"{self._named(self._me)} takes no copy ({why})", "off": True}
        self.seconds += time.monotonic() - began
        self.cpu_seconds += time.thread_time() - cpu
        try:
            texts = self._hosts.gather_text(f"copy of step {step}", json.dumps(failure))
        except Exception as error:  # the watch over the processes ends the job
            self._failure, self._off = str(error), True
            return
        failed = [said for said in map(json.loads, texts) if said]
        if failed:
            self._off = any(said.get("off") for said in failed)
            what = "copies go off, and the run goes on with checkpoints alone" if self._off else "the next may"
            self._failure = f"no copy of step {step} in RAM: {failed[0]['why']}; {what}"
            return
        self._folder.forget(self.epoch, None if self.keep and self.keep[0] == step else self.keep)
        self.keep = [step, self._layout]
        self.made, self.nbytes = self.made + 1, sum(region[3] for region in header["regions"])

    def wait(self) -> str:
        """Wait for the copy that is under way; return what went wrong with it, in one line, or ''."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, ""
        return failure

    def close(self) -> str:
        """Remove all copies, of a run whose last state is on the disk; return in words what they cost this process."""
        self.wait()
        self._hosts.gather_text("copies are needed no more", "")
        if self._server is not None:
            self._server.close()
        self._folder.remove()
        cpu = self.cpu_seconds + (self._server.cpu_seconds if self._server else 0.0)
        rate = self.made * self.nbytes / max(self.seconds, 1e-9)
        return (
            f"{self.made} copies in RAM of {with_prefix(self.nbytes)}B each: {with_prefix(rate)}B/s, {cpu:.2f} CPU "
            f"seconds beside the steps, which waited {self.waited:.2f} s"
        )


class _NotSent(Exception):
    pass


@contextlib.contextmanager
def _said(what: str):
    """Turn errors of a connection into a _NotSent."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _NotSent(f"{what} ({getattr(error, 'strerror', None) or error})") from error


class _Reader:
    """Fetches pieces of the copy of one step, from this host first; those of the leaf that is being read stay."""

    def __init__(self, copies: RamCopies, step: int):
        self._copies, self._step, self._links = copies, step, {}
        self._failed: set[tuple[int, str]] = set()  # what was said
        self._leaf, self._fetched = "", {}
        self.holders: dict[str, dict[Bounds, list]] = defaultdict(dict)
        for (name, bounds), held in copies._holders(copies._copies[step]).items():
            self.holders[name][bounds] = held

    def fetch(self, name: str, bounds: Bounds) -> memoryview:
        """Return a piece; a DamagedCheckpointError where no host has it as it was written."""
        if name != self._leaf:
            self._leaf, self._fetched = name, {}
        if bounds not in self._fetched:
            self._fetched[bounds] = self._read(name, bounds)
        return self._fetched[bounds]

    def _read(self, name: str, bounds: Bounds) -> memoryview:
        copies, why = self._copies, ""
        for process, file, region in self.holders[name][bounds]:
            own = copies._hosts.host_ids[process] == copies._hosts.host_ids[copies._me]
            where = OWN if own else copies._named(process)
            try:
                piece = copies._folder.read(file, region) if own else self._link(process).read(file, region)
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = f"{name} in {where}: {getattr(error, 'strerror', None) or error}"
                if (process, file) not in self._failed:
                    self._failed.add((process, file))
                    _log.warning("the copy of step %d cannot be read (%s); looking elsewhere", self._step, why)
                if not own and (link := self._links.pop(process, None)) is not None:
                    link.close()  # it may be within a message
                continue
            copies._bytes_read[where] += len(piece)
            return piece
        raise DamagedCheckpointError(f"the copy of step {self._step} in RAM is damaged ({why})")

    def _link(self, process: int) -> Link:
        if process not in self._links:
            self._links[process] = Link(tuple(self._copies._peers[process]["address"]), self._copies._hosts.key)
        return self._links[process]

    def close(self) -> None:
        for link in self._links.values():
            link.close()


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A leaf of a copy, read as tensorstore's arrays are."""

    reader: _Reader
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[slice, ...]) -> _Read:
        want = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        # in memory of its own: jax may keep the array, and copies are overwritten
        found = np.empty([stop - start for start, stop in want], self.dtype)
        for bounds in self.reader.holders[self.name]:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(want, bounds, strict=True)]
            if all(start < stop for start, stop in both):
                piece = np.frombuffer(self.reader.fetch(self.name, bounds), self.dtype)
                piece = piece.reshape([stop - start for start, stop in bounds])
                there, here = (
                    tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(both, box, strict=True))
                    for box in (want, bounds)
                )
                found[there] = piece[here]
        return _Read(found)


@dataclasses.dataclass(frozen=True)
class _Read:
    array: np.ndarray

    def read(self) -> _Read:
        return self

    def result(self) -> np.ndarray:
        return self.array
