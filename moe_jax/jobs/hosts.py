"""This process among the processes of its job: what they tell each other, who is lost, and its end. No arrays.

All goes through jax's key-value store, which is process 0's, as JSON of limited length. Each process counts there, and
process 0 looks whether the counts move, the others whether the store answers. A verdict that ends the job lies there.
"""

# jax's coordination service notices a lost process too, but aborts the others from C++, without a name. So its time
# limit is longer. Only where process 0's own process or machine is gone may its clients abort before the watch speaks.

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
from jax._src import distributed  # the client of the coordination service has no public name

from moe_jax.config.command_line import exit_code_of, exit_now, report
from moe_jax.errors import HostLostError, UserError
from moe_jax.parallel.mesh import machine_id

MOST_BYTES = 1 << 22  # of what is read from the key-value store at once
LOST, SHARED = 4, (2, 3)  # exit codes: of a lost process, and of what is the outcome of the job on all
_BEATS, _VERDICT = "moe_jax/beat/", "moe_jax/verdict"
# An error of a step that has one of these words is probably caused by a lost process, which the watch will name.
_COMMUNICATION = ("gloo", "nccl", "unavailable", "deadline", "socket", "connection", "coordination", "aborted")


class Hosts(contextlib.AbstractContextManager):
    """This process among the processes of its job; as a context manager it ends the process with the right exit code.

    Alone it does nothing, and exceptions pass through. With several processes, leaving the `with` block waits for all
    others, or, by an exception, prints it, tells them and exits, without the atexit hooks: jax's would wait for them.

    Attributes:
      process_index, process_count: of this process, and of the job; is_main: it writes what only one may write.
      names: the host of each process; machines: a text for each, equal for those that share a machine.
    """

    watch: Watch | None = None  # of several processes

    def __init__(self, process_count: int = 1, process_index: int = 0):
        self.process_count, self.process_index, self.is_main = process_count, process_index, process_index == 0
        self._turn = itertools.count()  # of texts, which all processes give and take in one order
        own = json.dumps([socket.gethostname(), machine_id(), process_count])
        self.names, self.machines, counts = zip(*map(json.loads, self.gather_text("the start", own)), strict=True)
        if len(set(counts)) > 1:
            raise UserError(f"the processes of this job have --num_processes = {counts}; give all the same")

    def gather_text(self, topic: str, text: str, seconds: float = 300.0) -> list[str]:
        """Return every process' text on a topic, in their order; a HostLostError where one does not come in time."""
        if self.process_count == 1:
            return [text]
        client, key = distributed.global_state.client, f"moe_jax/text/{next(self._turn)}"
        client.key_value_set(f"{key}/{self.process_index}", json.dumps(text))
        if not self.is_main:
            return self._read(f"{key}/all", topic, seconds + 5.0)
        texts = [self._read(f"{key}/{index}", topic, seconds) for index in range(self.process_count)]
        client.key_value_set(f"{key}/all", json.dumps(texts))
        return texts

    def _read(self, key: str, topic: str, seconds: float):
        try:
            value = distributed.global_state.client.blocking_key_value_get(key, int(1000 * seconds))
            if len(value) <= MOST_BYTES:
                return json.loads(value)
        except (jax.errors.JaxRuntimeError, ValueError, RecursionError) as error:
            if "DEADLINE_EXCEEDED" in str(error):
                who = key.rpartition("/")[2].replace("all", "0")
                raise HostLostError(f"process {who} did not reach {topic!r} within {seconds:g} s") from error
        raise HostLostError(f"what jax's key-value store holds on {topic!r} is no text of this job")

    def agree(self, topic: str, text: str, difference: Callable[[str, str], str], seconds: float = 300.0) -> None:
        """Raise a UserError, on all processes, where a process' text is not process 0's.

        Args:
          difference: (process 0's text, this process' text) -> what differs, in words, with {index} for this process;
            '' where it does not matter.
        """
        first = self.gather_text(topic, text if self.is_main else "", seconds)[0]
        told = self.gather_text(topic, "" if text == first else difference(first, text), seconds)
        for index, line in enumerate(told):
            if line:
                raise UserError(line.replace("{index}", str(index)))

    def touch(self, step: int | None) -> None:
        """Note that a step was made, or is due from now on, for `stall_after_seconds`; with None that none is due."""
        if self.watch is not None:
            self.watch.touched = None if step is None else (time.monotonic(), step)

    def close(self) -> None:
        """Leave the job together with all other processes; a second call does nothing."""
        if self.watch is not None and not self.watch.stopped.is_set():
            jax.distributed.shutdown()  # waits for all; the watch still runs, in case one of them dies now
            self.watch.stopped.set()

    def fail(self, error: BaseException) -> NoReturn:
        """End this process because of an exception; where a lost process caused it the watch does."""
        if self.watch is None:
            exit_now(report(error))
        code, line = exit_code_of(error), f"{type(error).__name__}: {error}"
        if code in (1, LOST):
            self.watch.await_verdict(code == 1 and any(word in line.lower() for word in _COMMUNICATION))
        if not isinstance(error, SystemExit):
            code = report(error)
        self.watch.stopped.set()
        who = f"process {self.process_index} ({self.names[self.process_index]})"
        self.watch.tell(f"{who} ended with exit code {code}: {line.splitlines()[0]}", code if code in SHARED else LOST)
        exit_now(code)

    def __exit__(self, _type, error: BaseException | None, _traceback) -> None:
        if error is None or (isinstance(error, SystemExit) and exit_code_of(error) == 0):
            self.close()
        elif self.watch is not None and not self.watch.stopped.is_set():
            self.fail(error)


class Watch:
    """Two threads that name a process that is lost or stuck, and end this one where the job cannot go on.

    Attributes:
      touched: (when, number) of the last step, None while none is due; stopped: set once the job is left.
    """

    def __init__(self, index: int, names: Sequence[str], lost_after_seconds: float, stall_after_seconds: float):
        self.touched: tuple[float, int] | None = None
        self.stopped, self._ending = threading.Event(), threading.Event()
        self._client, self._index = distributed.global_state.client, index
        self._names = [f"process {at} ({name})" for at, name in enumerate(names)]
        self._lost_seconds, self._stall_seconds = lost_after_seconds, stall_after_seconds
        self._beat_seconds = min(2.0, lost_after_seconds / 5)
        self._heard = dict.fromkeys(range(len(names)), (time.monotonic(), ""))  # when a count was new, and the count
        for work in (self._talk, self._judge):
            threading.Thread(target=work, name="moe_jax watch", daemon=True).start()

    def await_verdict(self, probably_lost: bool) -> None:
        """Let the watch end this process, whose step has failed, if it finds that another one is lost."""
        if self._ending.wait(self._lost_seconds + 5.0 if probably_lost else 1.0):
            threading.Event().wait()

    def tell(self, line: str, code: int) -> None:
        """Put a verdict where all find it, and wait until they have, if it is the first or this is process 0."""
        if time.monotonic() - self._heard[0][0] > 3 * self._beat_seconds:
            return  # process 0 does not answer, and would keep this one waiting
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(_VERDICT, json.dumps({"line": line, "code": code}), self._index == 0)
            time.sleep(2.5 * self._beat_seconds)

    def _talk(self) -> None:
        count = 0
        while not self.stopped.wait(self._beat_seconds):
            count += 1
            # no answer, which `_judge` looks for, or no verdict
            with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError, KeyError, TypeError, RecursionError):
                self._client.key_value_set(f"{_BEATS}{self._index}", str(count), allow_overwrite=True)
                self._heard[0] = time.monotonic(), str(count)  # process 0 answers
                for key, value in self._client.key_value_dir_get(_BEATS) if self._index == 0 else ():
                    if value != self._heard[index := int(key.rpartition("/")[2])][1]:
                        self._heard[index] = time.monotonic(), value
                text = self._client.key_value_try_get(_VERDICT)
                verdict = json.loads(text) if len(text) <= MOST_BYTES else {}
                self._end(str(verdict["line"]), int(verdict["code"]))

    def _judge(self) -> None:
        while not self.stopped.wait(self._beat_seconds / 2):
            now, touched = time.monotonic(), self.touched
            for index in range(len(self._names)) if self._index == 0 else (0,):
                if (silent := now - self._heard[index][0]) > self._lost_seconds:
                    self._end(f"{self._names[index]} is lost: silent for {silent:.0f} s")
            if self._stall_seconds and touched and now - touched[0] > self._stall_seconds:
                why = f"no step for {now - touched[0]:.0f} s after step {touched[1]}"
                self._end(f"{self._names[self._index]}, or one that it waits for, is stuck: {why}")

    def _end(self, line: str, code: int = LOST) -> NoReturn:
        """Print a verdict, tell it and end this process; the first one counts."""
        if self.stopped.is_set() or self._ending.is_set():
            threading.Event().wait()
        self._ending.set()
        print(f"moe_jax: {line}; {self._names[self._index]} ends with exit code {code}", file=sys.stderr, flush=True)
        self.tell(line, code)
        exit_now(code)
