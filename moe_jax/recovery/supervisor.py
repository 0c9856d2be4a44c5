"""One host's supervisor: it restarts the job's processes on the hosts that are left, until the job is done. No arrays.

Inputs: the addresses of all hosts, the command that trains, the job's secret, the run folder. Outputs: the job's exit
code, and a line for every start of its processes, with the reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_jax.errors import HostLostError, UserError
from moe_jax.observe.lease import BEAT_SECONDS, EPOCH_VARIABLE, Lease
from moe_jax.observe.run_folder import RunFolder
from moe_jax.recovery.copies import folder_for, read_history
from moe_jax.recovery.job_secret import FILE_VARIABLE, VARIABLE, derive_key
from moe_jax.recovery.links import Links
from moe_jax.recovery.membership import (
    End,
    Form,
    Leave,
    Membership,
    Rules,
    State,
    Stop,
    first_start,
    leader_of,
    next_act,
)
from moe_jax.recovery.rendezvous import VERSIONS
from moe_jax.recovery.workers import STOPPED, Workers

_TURN_SECONDS = 0.25
_STATE_SECONDS = 1.0
_SETTLE_SECONDS = 0.3  # from the first sign of a loss to the next start: one loss shows in several ways
_CLOSED_SECONDS = 1.25 * BEAT_SECONDS  # without a beat, after which a leader whose connection closed has no lease
_ALIVE_MOVES = 2  # of the lease's count, which a leader that cannot be reached must still show


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """What a supervisor is started with."""

    hosts: Sequence[tuple[str, int]]  # (name or address, port) of all; process 0 of a start listens one port higher
    index: int  # of this host
    command: Sequence[str]  # of a process that trains
    workdir: str
    spares: int = 0
    min_hosts: int = 1
    workers_per_host: int = 1
    lost_after_seconds: float = 10.0
    start_timeout_seconds: float = 300.0

    def __post_init__(self):
        count = len(self.hosts)
        if not 0 <= self.index < count:
            raise UserError(f"--host_index ({self.index}) must lie in 0..{count - 1}, --hosts names {count}")
        if not 0 <= self.spares < count:
            raise UserError(f"--spares ({self.spares}) must lie in 0..{count - 1}, --hosts names {count}")
        if not 1 <= self.min_hosts <= count - self.spares:
            raise UserError(
                f"--min_hosts ({self.min_hosts}) must lie in 1..{count - self.spares}: {count} hosts, {self.spares} "
                "of them spares"
            )
        if self.workers_per_host < 1:
            raise UserError(f"--workers_per_host ({self.workers_per_host}) must be at least 1")
        for name in ("lost_after_seconds", "start_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name} ({getattr(self, name)}) must be positive")

    def job(self) -> str:
        """Return a text that is equal on two hosts only if their command lines are, but for the index."""
        same = dataclasses.asdict(self) | {"index": 0}
        return hashlib.sha256(json.dumps(same).encode()).hexdigest()


def code_version() -> str:
    """Return a text that is equal on two hosts only if they have the same moe_jax."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Supervisor:
    """One host of a job; `run` until that ends."""

    def __init__(self, config: SupervisorConfig, key: bytes):
        """Listen, and let this host's first processes import; `key`: of the job's secret.

        Raises:
          UserError: the port or the command cannot be used.
        """
        self.config, self._key = config, key
        self.own = State(birth=secrets.token_hex(8))
        self.membership = Membership()
        self.states: dict[int, State] = {}  # of the others that can be reached
        self._name = f"supervisor {config.index} ({socket.gethostname()})"
        self._rules = Rules(
            hosts=len(config.hosts),
            size=len(config.hosts) - config.spares,
            least=config.min_hosts,
            settle_seconds=config.lost_after_seconds,
            start_timeout_seconds=config.start_timeout_seconds,
        )
        self._selector = selectors.DefaultSelector()
        self._workers = Workers(config.command, config.workers_per_host, self._selector)
        self._versions = {**VERSIONS, "moe_jax": code_version()}
        hello = {"index": config.index, "birth": self.own.birth, "versions": self._versions, "job": config.job()}
        self._links = Links(hello, config.hosts, key, self._selector, self._on_event)
        self._folder: RunFolder | None = None
        self._lease: Lease | None = None
        self._lease_lost: list[Exception] = []
        self._unclear: set[int] = set(range(len(config.hosts))) - {config.index}  # hosts that may live unseen
        now = time.monotonic()
        self._began = self._joined = self._turned = now
        self._due = 0.0  # when the state is sent next
        self._first_sign: float | None = None  # that the processes have to be started anew
        self._short: float | None = None  # since when too few hosts are left
        self._led: tuple[float, int] | None = None  # since when this host would lead, and the lease's moves then
        self._failures, self._stopping, self._end = 0, 0, None
        self._told_step = self._is_leaving = False

    def run(self) -> int:
        """Return the job's exit code.

        Raises:
          UserError: another job has the run folder, or the hosts do not fit together.
          HostLostError: this host is cut off from those that hold the run folder, or the others did not come.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            try:
                self._workers.prepare()
            except OSError as error:
                command = self.config.command[0]
                raise UserError(
                    f"{command!r} cannot be started ({error.strerror or error}); give it after --"
                ) from None
            while self._end is None:
                for key, _ in self._selector.select(_TURN_SECONDS):
                    if key.fileobj.fileno() >= 0:  # not closed by an earlier turn of this loop
                        key.data()
                self._turn()
            self._say(self._end.line + f"; exit code {self._end.code}")
            if self._end.code == 3:  # what follows it in time would not be finite again
                run_id = read_history(RunFolder(self.config.workdir, create=False).history)["id"]
                shutil.rmtree(folder_for(run_id), ignore_errors=True)
            return self._end.code
        finally:
            self._workers.close()
            self._links.close()
            if self._lease is not None and self._folder is not None:
                self._lease.__exit__()
                self._folder.remove_if_unused()

    # What this host is, and what it hears.

    def _turn(self) -> None:
        """Look around once: at silence, at this host's processes, at the lease; then lead, if it is for this host."""
        before, self._turned = self._turned, time.monotonic()
        now = self._turned
        if self._lease_lost:
            raise HostLostError(f"{self._name} leads no more: {self._lease_lost[0]}")
        # who stood still, stopped or at a disk that did not answer, has heard nobody, and blames nobody for it
        stood_still = now - before if now - before > self.config.lost_after_seconds / 2 else 0.0
        for index, peer in list(self._links.peers.items()):
            peer.last_heard += stood_still
            if now - peer.last_heard > self.config.lost_after_seconds:
                self._links.drop(index)
                self._lose(index, silent=now - peer.last_heard)
        workers = self._workers
        found = {"code": workers.code, "step": workers.step, "ready": workers.is_ready, "leaving": self._is_leaving}
        state = dataclasses.replace(self.own, **found)
        if state.leaving:
            workers.ask_to_stop()
        if state.code is not None and self.own.code is None:
            self._say(f"epoch {state.epoch}: its processes ended with exit code {state.code}")
        if state != self.own or now >= self._due:
            self.own, self._due = state, now + _STATE_SECONDS
            self._send_state()
            if self.membership.epoch and not self._open_lease().epoch:
                self._open_lease().look()
        if state.step and not self._told_step:
            self._told_step = True
            workers.prepare()  # for the next start; earlier it would slow this one down
            self._say(f"epoch {state.epoch}: step {state.step} is finished")
        if state.leaving and not workers.is_running:
            self._end = End(STOPPED, "told to end, and saved" if state.epoch else "told to end")
            return
        living = self._living()
        leader = leader_of(self.membership, living)
        if leader == self.config.index:
            self._lead(living, now)
        else:
            self._led = self._first_sign = None
        if self.membership.epoch == 0 and not self._links.peers and self._links.refused:
            if now - self._began > self.config.lost_after_seconds:
                raise UserError(
                    f"{', '.join(sorted(self._links.refused))} holds another secret than this host; give all the same "
                    f"{VARIABLE} or {FILE_VARIABLE}"
                )

    def _living(self) -> dict[int, State]:
        return {**self.states, self.config.index: self.own}

    def _send_state(self, only: int | None = None) -> None:
        self._links.send({"kind": "state", "state": dataclasses.asdict(self.own)}, only)

    def _send_membership(self, only: int | None = None) -> None:
        self._links.send({"kind": "membership", **dataclasses.asdict(self.membership)}, only)

    def _on_event(self, index: int, message: dict | None) -> None:
        match message:
            case None:
                self._lose(index)
            case {"kind": "state", "state": state}:
                self.states[index] = State(**state)
            case {"kind": "membership"}:
                self._adopt(Membership.of_message(message))
            case {"kind": "stop", "epoch": epoch}:
                if epoch == self.own.epoch and self._stopping != epoch:
                    self._stopping = epoch
                    self._workers.ask_to_stop()
            case {"kind": "end", "code": code, "line": line}:
                self._end = End(int(code), str(line))
            case {"birth": birth}:
                self._greet(index, str(birth), message)

    def _greet(self, index: int, birth: str, hello: dict) -> None:
        """Take in another host, or end by what keeps this one and it apart, unless this one's job runs already."""
        line = ""
        versions = hello.get("versions") or {}
        if versions != self._versions:
            theirs, here = (", ".join(f"{name} {own[name]}" for name in own) for own in (versions, self._versions))
            line = f"host {index} runs {theirs} but host {self.config.index} runs {here}; install the same everywhere"
        elif index == self.config.index or not 0 <= index < len(self.config.hosts):
            line = f"two hosts have --host_index={index}, or it is too high; give each its own"
        elif hello.get("job") != self.config.job():
            line = (
                f"hosts {index} and {self.config.index} were started with other flags or another command; give the same"
            )
        if line and self.membership.epoch == 0:
            raise UserError(line)
        if line:
            self._say(f"host {index} is not admitted: {line}")
            self._links.drop(index)
            return
        self._unclear.discard(index)
        self.states[index] = State(birth=birth)
        self._joined = time.monotonic()
        self._say(f"host {index} is here")
        self._send_state(index)
        self._send_membership(index)

    def _lose(self, index: int, silent: float = 0.0) -> None:
        """Leave out a host that has closed its connection, or was silent for so many seconds."""
        if self.states.pop(index, None) is None:
            return
        if silent:
            self._unclear.add(index)
        self._joined = time.monotonic()
        self._say(f"host {index} {f'is silent for {silent:.0f} s' if silent else 'has closed its connection'}")

    def _adopt(self, membership: Membership) -> None:
        """Follow a later membership: start this host's processes in it, or end them."""
        if membership.epoch <= self.membership.epoch:
            return
        self.membership, self._told_step, self._stopping = membership, False, 0
        self._send_membership()  # before this host's own start; who does not reach the leader hears of it too
        order = [index for index, birth in membership.hosts]
        if (self.config.index, self.own.birth) in membership.hosts:
            each, place = self.config.workers_per_host, order.index(self.config.index)
            host, port = self.config.hosts[order[0]]
            coordinator = f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}"
            flags = [
                [
                    f"--coordinator={coordinator}",
                    f"--num_processes={each * len(order)}",
                    f"--process_id={each * place + slot}",
                    f"--preempt_exit_code={STOPPED}",
                ]
                for slot in range(each)
            ]
            secret = derive_key(self._key, f"processes of epoch {membership.epoch}").hex()
            self._workers.place(flags, {EPOCH_VARIABLE: str(membership.epoch), VARIABLE: secret})
            self.own = dataclasses.replace(self.own, epoch=membership.epoch, code=None, step=0)
        else:
            self._workers.stop()
            self._workers.prepare()
            self.own = dataclasses.replace(self.own, epoch=0, code=None, step=0)
        self._due = 0.0

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._is_leaving = True

    # What the leader does.

    def _lead(self, living: Mapping[int, State], now: float) -> None:
        """Form the next membership where one is due; this host holds the run folder's lease while it leads."""
        if self.membership.epoch == 0:
            act = first_start(self._rules, living, now - self._began, now - self._joined)
        else:
            act = next_act(self._rules, self.membership, living, self.config.index, self._failures)
        if act is None:
            self._first_sign = self._short = None
            return
        self._first_sign = self._first_sign or now
        if now - self._first_sign < _SETTLE_SECONDS:
            return
        match act:
            case End():
                self._finish(act)
            case Stop() if self._stopping != self.membership.epoch:
                self._stopping = self.membership.epoch
                self._say(f"epoch {self.membership.epoch}: {act.why}; the processes save and stop")
                self._links.send({"kind": "stop", "epoch": self.membership.epoch})
                self._workers.ask_to_stop()
            case Leave():
                for index in act.hosts:
                    if index == self.config.index:
                        self._end = End(2, act.line)
                    else:
                        self._links.send({"kind": "end", "code": 2, "line": act.line}, index)
            case Form() if len(act.hosts) < self.config.min_hosts:
                self._short = self._short or now
                if now - self._short > self.config.start_timeout_seconds:
                    self._finish(End(4, f"{act.why}, and {len(act.hosts)} hosts are fewer than --min_hosts"))
            case Form() if self._hold_lease(now):
                self._form(act, living)

    def _finish(self, end: End) -> None:
        self._links.send({"kind": "end", "code": end.code, "line": end.line})
        self._end = end

    def _form(self, act: Form, living: Mapping[int, State]) -> None:
        stepped = any(state.step for state in living.values() if state.epoch == self.membership.epoch)
        self._failures = self._failures + 1 if act.failed and not stepped else 0
        hosts = tuple((index, living[index].birth) for index in act.hosts)
        order = ", ".join(map(str, act.hosts))
        epoch = self._open_lease().epoch
        self._say(f"epoch {epoch}: {act.why}; hosts {order} train, host {self.config.index} leads")
        self._first_sign = self._short = None
        self._adopt(Membership(epoch, self.config.index, hosts))

    def _hold_lease(self, now: float) -> bool:
        """Take the next epoch of the run folder's lease, if nobody else holds it; say whether it is this host's.

        Raises:
          UserError: another job has the folder.
          HostLostError: hosts of this job that cannot be reached have it.
        """
        lease = self._open_lease()
        if lease.epoch:
            try:
                lease.take(lease.epoch)
            except UserError as error:
                raise HostLostError(f"{self._name} cannot lead on: {error}") from error
            return True
        lease.look()
        if self._led is None:
            self._led = now, lease.moves
        unseen = self._unclear - set(self.states)
        if lease.is_free(self.config.lost_after_seconds if unseen else _CLOSED_SECONDS):
            seen = lease.seen
            try:
                lease.take(max(seen[0], self.membership.epoch))
                return True
            except UserError:
                lease.look()
                if lease.seen == seen:  # not that another was faster, who is heard of soon or shows life
                    raise
                return False
        if lease.moves - self._led[1] >= _ALIVE_MOVES:
            if not lease.is_own():
                raise UserError(
                    f"run folder {self.config.workdir} is held by another job ({lease.holder()}); wait for its end, or "
                    "give another --workdir"
                )
            raise HostLostError(
                f"{self._name} is cut off: hosts {sorted(unseen)} cannot be reached, and the run folder is held by "
                f"{lease.holder()} of this job, which goes on"
            )
        return False

    def _open_lease(self) -> Lease:
        if self._lease is None:
            self._folder = RunFolder(self.config.workdir, create=not os.path.isdir(self.config.workdir))
            self._lease = Lease(self._folder, self._lease_lost.append, derive_key(self._key, "lease").hex()[:16])
        return self._lease

    def _say(self, line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self._name}: {line}", file=sys.stderr, flush=True)
