"""The steps of a run, one dispatched after the other, with metrics that are read some steps later.

Inputs: a `Session`, a state, batches on the devices. Outputs: the next state, and the metrics of each finished step.
This is what `loop.py` and benchmarks share; files, checkpoints and evaluations are the loop's.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from moe_jax.config.run_config import RunConfig
from moe_jax.errors import UserError
from moe_jax.parallel.mesh import to_devices
from moe_jax.replan.engine import RejitEngine, build_engine
from moe_jax.training.frozen_models import load_teacher
from moe_jax.training.program import Programs, Session, build_session

# An optimistic step runs a common program, which has pass 0 of the exchanges alone and no conditional for an overflow;
# where a bucket overflows it leaves the state as it was and says so. The same batch then goes through the complete
# program, which has all passes, once the host has read that; until then the steps in flight change nothing either.
#
#     common 7 | common 8 | common 9     8 overflows: it and 9 leave the state of 7
#              | complete 8 | common 9   once the host has read that
# A step that overflows costs a common one, those in flight behind it, and a complete one. So it must be rare, and where
# it is not (more than MOST of the last WINDOW steps) steps go through the complete program at once, until overflow is
# rare again. Which program a step runs depends on the passes of earlier steps only: all processes, and a resumed run,
# do the same.
WINDOW, MOST = 8, 1


class NoCompleteProgramError(UserError):
    """A step overflowed, and there is no complete program to run it."""


@dataclasses.dataclass
class StepInFlight:
    """A step that was dispatched and whose metrics nobody has asked for yet."""

    step: int  # from 0
    programs: Programs  # that it may run
    inputs: tuple  # batch, tables, host signals, and the teacher's parameters
    metrics: dict = dataclasses.field(default_factory=dict)  # on the devices, as NumPy once `is_read`
    again: bool = False  # whether the complete program followed the common one
    is_read: bool = False


class Stepper:
    """One run that goes on step by step."""

    def __init__(
        self,
        session: Session,
        state: dict,
        engine: RejitEngine | None = None,
        overflowed: Sequence[int] = (),
        run_again: int = 0,
    ):
        """Start from `state`, and load the teacher where the session has one."""
        self.session, self.engine, self.lag = session, engine, session.lag
        self.state = state  # donated to each step
        self.step = int(state["step"])  # how many were dispatched, which is the next one's number from 0
        self.teacher_params: dict | None = None  # of the teacher that the next step learns from
        if session.teacher is not None:
            self.teacher_params = load_teacher(session.teacher, session.config.distillation)
        # called before a step waits until its complete program is compiled
        self.before_wait: Callable[[], None] = lambda: None
        self.change_state: Callable | None = None  # `run` calls change_state(state, step) -> state before each step
        self.programs: Programs | None = None  # of the newest step
        self.executable: Any = None  # the one of them that ran last
        self.overflowed, self.run_again = tuple(overflowed), run_again  # as `HostData` says
        self.not_halted = to_devices(np.zeros((), np.bool_), session.state_shardings.replicated)
        self.halted = self.not_halted
        self.in_flight: collections.deque[StepInFlight] = collections.deque()

    def compile(self) -> float:
        """Compile what the next step runs with; return the seconds that it took."""
        self.programs = programs = self.session.compile_programs() if self.engine is None else self.engine.start()
        self.executable = programs.complete.result() if programs.common is None else programs.common
        return programs.seconds

    def teacher_leaves(self) -> bool:
        """Say whether the next step is the first without the teacher; then `leave_teacher` comes before it."""
        return self.teacher_params is not None and not self.session.config.distillation.applies(self.step)

    def leave_teacher(self) -> float:
        """Compile the step without the teacher and free its memory; return the seconds that this took.

        No step is in flight: each holds the teacher until it is done.
        """
        self.teacher_params = None
        self.session = dataclasses.replace(self.session, teacher=None)
        if self.engine is not None:
            self.engine.leave_teacher(self.session)
        return self.compile()

    def dispatch(self, batch, flag: int = 0) -> None:
        """Dispatch the next step on a batch that is on the devices; `flag` is 1 where this process asks to stop."""
        if self.engine is None:
            tables, host_signals = self.session.tables, self.session.host_signals(flag)
        else:
            self.programs, tables, host_signals, self.state = self.engine.before_step(
                self.step, self.state, flag, self._settle
            )
        frozen = () if self.teacher_params is None else (self.teacher_params,)
        sent = StepInFlight(self.step, self.programs, (batch, tables, host_signals, *frozen))
        known = self.step - self.lag  # the last step whose metrics are read by now
        overflowed = sum(known - WINDOW < step <= known for step in self.overflowed)
        common = self.programs.common is not None and overflowed <= MOST
        if not common:
            self._settle()
        self._run(sent, common)
        self.in_flight.append(sent)
        self.step += 1
        if self.engine is not None:
            self.engine.after_dispatch(self.step - 1)

    def finished(self, until: int | None = None) -> Iterator[tuple[int, dict]]:
        """Yield (step, metrics as NumPy) of the steps up to `until` (from 0), waiting for each; None: all in flight.

        Where steps are optimistic, metrics have `run_again`, 1 of a step that overflowed and took the complete program
        after the common one.
        """
        while self.in_flight and (until is None or self.in_flight[0].step <= until):
            self._read(0)
            sent = self.in_flight.popleft()
            step, metrics = sent.step, sent.metrics
            if sent.programs.common is not None:
                metrics = {**metrics, "run_again": int(sent.again)}
                self.run_again += sent.again
                if int(metrics["most_passes"]) > 1:
                    self.overflowed = (*(known for known in self.overflowed if known > step - 2 * WINDOW), step)
            if self.engine is not None:
                self.engine.observe(step, metrics)
            yield step, metrics

    def _run(self, sent: StepInFlight, common: bool) -> None:
        """Run the common program of a step, or the complete one, waiting until that is compiled.

        Raises:
          NoCompleteProgramError: it could not be compiled; the stepper is back at that step.
        """
        if common:
            self.executable, state = sent.programs.common, (self.state, self.halted)
        else:
            if not sent.programs.complete.done():
                self.before_wait()
            try:
                self.executable, state = sent.programs.complete.result(), (self.state,)
            except Exception as error:
                while self.in_flight and self.in_flight[-1].step >= sent.step:  # they changed nothing
                    self.in_flight.pop()
                self.step = sent.step
                moe, (line, *_) = self.session.config.moe, [*str(error).splitlines(), type(error).__name__]
                raise NoCompleteProgramError(
                    f"step {sent.step}: a bucket overflowed, and the complete program could not be compiled ({line}); "
                    f"saved and stopped; larger buckets overflow less often: MoEConfig.bucket_slack "
                    f"({moe.bucket_slack}), MoEConfig.overflow_chance ({moe.overflow_chance})"
                ) from error
        self.state, sent.metrics = self.executable(*state, *sent.inputs)
        self.halted = sent.metrics.get("halted", self.halted)

    def _read(self, index: int) -> None:
        """Wait for a step in flight before which none is unread; where it overflowed, run it and what follows again."""
        sent = self.in_flight[index]
        if sent.is_read:
            return
        sent.metrics = jax.device_get(sent.metrics)
        if sent.metrics.get("halted", False):
            sent.again, self.halted = True, self.not_halted
            self._run(sent, common=False)
            for later in itertools.islice(self.in_flight, index + 1, None):  # they changed nothing
                self._run(later, common=True)
            sent.metrics = jax.device_get(sent.metrics)
        sent.is_read = True

    def _settle(self) -> dict:
        """Return the state after all steps in flight; none of them can overflow any more."""
        if any("halted" in sent.metrics for sent in self.in_flight):
            for index in range(len(self.in_flight)):
                self._read(index)
        return self.state

    def run(self, steps: int) -> list[dict]:
        """Run the next steps to their end; return a record of each: loss, loads, passes, dropped, run_again where
        steps are optimistic, and the engine's.
        """
        records, last = [], self.step + steps
        while True:
            all_in_flight = self.step == last or self.teacher_leaves()
            for step, metrics in self.finished(None if all_in_flight else self.step - self.lag):
                kept = ("loss", "loads", "passes", "dropped", "run_again")
                records.append({name: metrics[name] for name in kept if name in metrics})
                if self.engine is not None:
                    records[-1].update(self.engine.record(step, metrics["loads"]))
            if self.step == last:
                return records
            if self.teacher_leaves():
                self.leave_teacher()
            batch = to_devices(self.session.feed.read(self.step), self.session.state_shardings.batch)
            if self.change_state is not None:
                self.state = self.change_state(self._settle(), self.step)
            self.dispatch(batch)


def build_stepper(
    config: RunConfig, devices, change_state: Callable | None = None, past: Iterable[np.ndarray] = ()
) -> Stepper:
    """Return a run at its first step, compiled, without files; past: loads that it is planned from, oldest first."""
    session = build_session(config, devices)
    engine = build_engine(session)
    past = list(past)
    if engine is not None and past:
        engine.warm_start(past)
    stepper = Stepper(session, session.fresh_state(), engine)
    stepper.change_state = change_state
    stepper.compile()
    return stepper
