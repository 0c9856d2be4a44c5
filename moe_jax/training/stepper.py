"""The steps of a run, one dispatched after the other, with metrics that are read some steps later.

Inputs: a `Session`, a state, batches on the devices. Outputs: the next state, and the metrics of each finished step.
This is what `loop.py` and benchmarks share; files, checkpoints and evaluations are the loop's.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from moe_jax.config.run_config import RunConfig
from moe_jax.mesh.global_arrays import to_devices
from moe_jax.replan.rejit import RejitEngine, build_engine
from moe_jax.training.session import Session, build_session
from moe_jax.training.teacher import load_teacher


def lag_of(session: Session) -> int:
    """Return how many steps after its dispatch a step's metrics are read; so many hide the host's work."""
    return 1 if session.roles.mesh.devices.flat[0].platform == "cpu" else 2


class Stepper:
    """One run that goes on step by step.

    Attributes:
      state: of the run, donated to each step; step: how many were dispatched, which is the next one's number from 0.
      executable: of the newest step.
      teacher_params: of the teacher that the next step learns from, None where it has none.
      in_flight: (step, metrics on the devices) of steps that are not read yet.
    """

    def __init__(
        self,
        session: Session,
        state: dict,
        engine: RejitEngine | None = None,
        change_state: Callable | None = None,
        teacher_params: dict | None = None,
    ):
        """Start from `state`.

        Args:
          engine: plans for the next steps, None without a planner.
          change_state: function (state, step) -> state, called by `run` before each step.
          teacher_params: on the devices, if the session has a teacher; see `load_teacher`.
        """
        self.session, self.state, self.engine, self.change_state = session, state, engine, change_state
        self.teacher_params = teacher_params
        self.step = int(state["step"])
        self.lag = lag_of(session)
        self.executable: Any = None
        self.in_flight: collections.deque = collections.deque()

    def compile(self) -> float:
        """Compile what the next step runs with; return the seconds that it took."""
        compiled = self.session.compile_train_step() if self.engine is None else self.engine.start()
        self.executable, seconds = compiled
        return seconds

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
            self.engine.change_step(self.session)
        return self.compile()

    def dispatch(self, batch, flag: int = 0) -> None:
        """Dispatch the next step on a batch that is on the devices; `flag` is 1 where this process asks to stop."""
        if self.engine is None:
            tables, host_signals = self.session.tables, self.session.host_signals(flag)
        else:
            self.executable, tables, host_signals, self.state = self.engine.before_step(self.step, self.state, flag)
        frozen = () if self.teacher_params is None else (self.teacher_params,)
        self.state, metrics = self.executable(self.state, batch, tables, host_signals, *frozen)
        self.in_flight.append((self.step, metrics))
        self.step += 1
        if self.engine is not None:
            self.engine.after_dispatch(self.step - 1)

    def finished(self, until: int | None = None) -> Iterator[tuple[int, dict]]:
        """Yield (step, metrics as NumPy) of the steps up to `until` (from 0), waiting for each; None: all in flight."""
        while self.in_flight and (until is None or self.in_flight[0][0] <= until):
            step, arrays = self.in_flight.popleft()
            metrics = jax.device_get(arrays)
            if self.engine is not None:
                self.engine.observe(step, metrics)
            yield step, metrics

    def run(self, steps: int) -> list[dict]:
        """Run the next steps to their end; return a record of each: loss, loads, passes, dropped, and the engine's."""
        records = []
        for _ in range(steps):
            records += map(self._record, self.finished(self.step - self.lag))
            if self.teacher_leaves():
                records += map(self._record, self.finished())
                self.leave_teacher()
            batch = to_devices(self.session.feed.read(self.step), self.session.state_shardings.batch)
            if self.change_state is not None:
                self.state = self.change_state(self.state, self.step)
            self.dispatch(batch)
        return records + [self._record(done) for done in self.finished()]

    def _record(self, done: tuple[int, dict]) -> dict:
        step, metrics = done
        record = {name: metrics[name] for name in ("loss", "loads", "passes", "dropped")}
        if self.engine is not None:
            record.update(self.engine.record(step, metrics["loads"]))
        return record


def build_stepper(
    config: RunConfig, devices, change_state: Callable | None = None, past: Iterable[np.ndarray] = ()
) -> Stepper:
    """Return a run at its first step, compiled, without any files.

    Args:
      change_state: see `Stepper`.
      past: loads from which the first step is planned, oldest first.
    """
    session = build_session(config, devices)
    engine = build_engine(session, lag_of(session))
    past = list(past)
    if engine is not None and past:
        engine.warm_start(past)
    taught = None if session.teacher is None else load_teacher(session.teacher, config.distillation)
    stepper = Stepper(session, session.fresh_state(), engine, change_state, taught)
    stepper.compile()
    return stepper
