"""Steps a training run without its files, for benchmarks: batches, plans, and metrics that are read one step late.

Enters: a run's config and devices. Leaves: what the re-jit engine says of each step. The work around a step is the
training loop's (`moe_jax.training.loop`), without writers, checkpoints and evaluations.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import jax

from moe_jax.mesh.global_arrays import to_devices
from moe_jax.replan.rejit import build_engine
from moe_jax.training.loop import Loop
from moe_jax.training.session import build_session


class Training:
    """One run that goes on step by step.

    Args:
      change_state: function (state, step) -> state, called before each step.
      past: loads from which the first step is planned.
    """

    def __init__(self, config, devices, change_state: Callable | None = None, past=()):
        self.session = build_session(config, devices)
        self.lag = Loop.lag_of(self.session)
        self.engine = build_engine(self.session, self.lag)
        if self.engine is not None and past:
            self.engine.foresee(list(past))
        compiled = self.session.compile_train_step() if self.engine is None else self.engine.start()
        self.executable, self.state, self.step = compiled[0], self.session.fresh_state(), 0
        self.change_state = change_state
        self.in_flight: collections.deque = collections.deque()

    def run(self, steps: int) -> list[dict]:
        """Run the next steps to their end; return the engine's record of each, and `loads` and `passes`."""
        records: list[dict] = []
        for _ in range(steps):
            while self.in_flight and self.in_flight[0][0] <= self.step - self.lag:
                records.append(self._read())
            batch = to_devices(self.session.feed.read(self.step), self.session.placing.batch)
            if self.change_state is not None:
                self.state = self.change_state(self.state, self.step)
            executable, tables = self.executable, self.session.tables
            if self.engine is None:
                wishes = self.session.wishes(0)
            else:
                executable, tables, wishes, self.state = self.engine.before_step(self.step, self.state, 0)
            self.state, metrics = executable(self.state, batch, tables, wishes)
            self.in_flight.append((self.step, metrics))
            if self.engine is not None:
                self.engine.after_dispatch(self.step)
            self.step += 1
        while self.in_flight:
            records.append(self._read())
        return records

    def _read(self) -> dict:
        step, arrays = self.in_flight.popleft()
        metrics = jax.device_get(arrays)
        record = {name: metrics[name] for name in ("loss", "loads", "passes", "dropped")}
        if self.engine is not None:
            self.engine.observe(step, metrics)
            record.update(self.engine.record(step, metrics["loads"]))
        return record
