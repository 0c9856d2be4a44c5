"""The training loop: steps, checkpoints, evaluations, and a clean end.

Inputs: a `Session`, the run folder, and this process' place in the job. Outputs: files in the folder, and an `Outcome`.
The host reads a step's metrics `lag` steps after it was dispatched, so the devices never wait for it; a checkpoint or
an evaluation first reads the metrics of all steps in flight.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import jax
import numpy as np

from moe_jax.data import held_out_entropy
from moe_jax.data.stream import prefetch
from moe_jax.errors import UserError
from moe_jax.models.counts import forward_flops_per_token, training_flops_per_token
from moe_jax.observe import EVALUATIONS, LoadsRecorder, MetricsWriter, Progress, RunFolder, TensorBoardWriter
from moe_jax.observe.progress import with_prefix
from moe_jax.training.checkpoint import Checkpointer
from moe_jax.training.hosts import Hosts, StopSignal
from moe_jax.training.optimistic import Programs
from moe_jax.training.program import Session
from moe_jax.training.step import ema_params, leaf_names
from moe_jax.training.step_metrics import check_finite, loads_origin, step_record
from moe_jax.training.stepper import Stepper


@dataclasses.dataclass
class Memory:
    """What a checkpoint remembers of a run beside its state and its plan, for the run that goes on from it.

    Attributes:
      config_text: of the run.
      checkpoint: step of the last finished checkpoint, None before the first.
      skipped_steps: so far, as read from metrics.
      teacher: identity of the teacher, kept after it has left too; None without one.
    """

    config_text: str
    checkpoint: int | None = None
    skipped_steps: int = 0
    teacher: dict | None = None


class Writers:
    """All files that grow while training; only process 0 writes."""

    def __init__(self, folder: RunFolder, session: Session, resume_step: int | None):
        self.folder = folder
        self.metrics = MetricsWriter(folder, resume_step=resume_step)
        self.evaluations = MetricsWriter(folder, resume_step=resume_step, file_name=EVALUATIONS)
        self.loads = LoadsRecorder(
            folder, session.config.train.loads_every, resume_step=resume_step, origin=loads_origin(session)
        )
        self.tensorboard = TensorBoardWriter(folder, resume_step=resume_step)

    def step(self, step: int, record: dict, loads: np.ndarray):
        self.metrics.write(step, record)
        self.tensorboard.write(step, record)
        if self.loads.due(step):
            self.loads.record(step, loads)

    def evaluation(self, step: int, record: dict):
        if self.evaluations.last_step is None or self.evaluations.last_step < step:
            self.evaluations.write(step, record)
            self.tensorboard.write(step, record)

    def close(self):
        self.loads.merge()
        for writer in (self.metrics, self.evaluations, self.tensorboard):
            writer.close()


def evaluate(
    session: Session, step_function: Callable, params, tables=None, after_batch: Callable[[], None] | None = None
) -> float:
    """Return the mean loss per target token of the held-out windows, in nats.

    Args:
      tables: of the experts' homes; None takes the session's.
      after_batch: called when a batch is done.
    """
    tables = session.tables if tables is None else tables
    total, count = 0.0, 0
    for batch in session.feed.held_out():
        loss, targets = step_function(params, session.feed.to_devices(batch), tables)
        total, count = total + float(loss), count + int(targets)
        if after_batch is not None:
            after_batch()
    return total / max(count, 1)


def allocated_peak(devices) -> int | None:
    """Return the most bytes that were ever in use on one of these devices, None where they do not count (CPUs)."""
    peaks = [stats["peak_bytes_in_use"] for d in devices if "peak_bytes_in_use" in (stats := d.memory_stats() or {})]
    return int(max(peaks)) if peaks else None


def device_memory(devices) -> int | None:
    """Return the bytes that a program may take on each of these devices, None where they do not say (CPUs)."""
    limits = [stats["bytes_limit"] for d in devices if "bytes_limit" in (stats := d.memory_stats() or {})]
    return int(min(limits)) if limits else None


def compiled_peak(executable) -> int | None:
    """Return the most bytes that a program needs on one device, as the compiler counts them."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return None
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + outputs)


class Loop:
    """One call of `train`: holds the state, and what is in flight."""

    def __init__(
        self,
        stepper: Stepper,
        memory: Memory,
        checkpoints: Checkpointer,
        writers: Writers | None,
        progress: Progress,
        hosts: Hosts,
    ):
        self.stepper, self.memory, self.checkpoints, self.writers = stepper, memory, checkpoints, writers
        self.progress, self.hosts = progress, hosts
        self.session, self.engine = stepper.session, stepper.engine
        self.names = leaf_names(stepper.state["params"])
        self.evaluation_step = self.session.evaluation_step() if self.engine is None else None
        self.compile_seconds: float | None = None
        self.profiling = False
        self.watched: Programs | None = None  # whose complete program was looked at, once it was compiled
        self.ends_at_overflow = ""  # why, if the run stops because of it
        self.clock = time.monotonic()
        stepper.before_wait = self.before_wait

    @property
    def step(self) -> int:
        """How many steps were dispatched, of the whole run."""
        return self.stepper.step

    def run(self, stop: StopSignal) -> bool:
        """Train to the last step; return False if all agreed to stop before. The state is saved in either case."""
        train = self.session.config.train
        self.hosts.touch(self.step)
        if self.step == 0:
            self.evaluate()
        self.hosts.rest()  # compiling may take long
        self.compile_seconds = self.stepper.compile()
        self.compiled_peak = compiled_peak(self.stepper.executable)
        self.show_programs()
        feed = self.session.feed
        batches = prefetch(lambda step: feed.read(step, feed.own), self.step, train.steps)
        self.clock = time.monotonic()
        self.hosts.touch(self.step)
        stopped = False
        try:
            for step, batch in batches:
                self.read_metrics(stop, until=step - self.stepper.lag)
                if stop.should_stop(step):
                    stopped = True
                    break
                if self.stepper.teacher_leaves():
                    self.leave_teacher(stop)
                self.profile(step)
                running = self.stepper.executable
                self.stepper.dispatch(feed.to_devices(batch), stop.local_flag())
                if self.stepper.executable is not running and self.compiled_peak is not None:
                    self.compiled_peak = max(self.compiled_peak, compiled_peak(self.stepper.executable) or 0)
                if train.checkpoint_every and self.step % train.checkpoint_every == 0 and self.step < train.steps:
                    self.read_metrics(stop)
                    self.save()
                if train.evaluate_every and self.step % train.evaluate_every == 0 and self.step < train.steps:
                    self.read_metrics(stop)
                    self.evaluate()
        finally:
            batches.close()
            self.stop_profile()
        self.read_metrics(stop)
        self.save()
        if not stopped:
            self.evaluate()
        self.checkpoints.wait()
        if stopped and self.ends_at_overflow:
            raise UserError(self.ends_at_overflow)
        self.hosts.rest()  # the others may have to wait for process 0's pictures
        return not stopped

    def before_wait(self):
        """Say that the first overflow has come before the program for it is compiled."""
        self.hosts.rest()
        if self.writers:
            self.progress.note(f"step {self.step}: a bucket overflowed, and the complete program is still compiling")

    def show_programs(self):
        """Say before the first step what the programs of optimistic steps take of the devices' memory."""
        if not self.writers or self.stepper.programs.common is None or self.compiled_peak is None:
            return
        shape = None if self.engine is None else self.engine.shape
        complete = self.compiled_peak + self.session.overflow_bytes(shape)
        memory = device_memory(self.session.roles.mesh.local_devices)
        self.progress.note(
            f"step {self.step}: optimistic steps take {with_prefix(self.compiled_peak)}B of a device's memory"
            f"{'' if memory is None else f' of {with_prefix(memory)}B'}, and where a bucket overflows about "
            f"{with_prefix(complete)}B, by a program that is being compiled"
        )

    def watch_complete(self, stop: StopSignal):
        """Once the complete program of optimistic steps is compiled, see that a step which overflows could run it.

        Where it could not, a run whose `train.optimistic` is None saves and stops; one with True goes on.
        """
        programs = self.stepper.programs
        if programs is self.watched or programs.common is None or not programs.future.done():
            return
        self.watched, error = programs, programs.future.exception()
        if error is not None:
            why = f"could not be compiled ({(str(error).splitlines() or [type(error).__name__])[0]})"
        else:
            needed, memory = compiled_peak(programs.complete()), device_memory(self.session.roles.mesh.local_devices)
            if needed is None or memory is None or needed <= memory:
                return
            why = f"needs {with_prefix(needed)}B of each device's memory, which has {with_prefix(memory)}B"
        line = f"step {self.step}: the complete program {why}, so the first bucket that overflows ends the run"
        if self.session.config.train.optimistic is None:
            self.ends_at_overflow = f"{line}; saved and stopped; with train.optimistic = True it goes on until then"
            stop.request()
        elif self.writers:
            self.progress.note(f"{line}; it goes on until then (train.optimistic = True)")

    def leave_teacher(self, stop: StopSignal):
        """Go on without the teacher: the next step is another program, which is compiled now."""
        self.read_metrics(stop)
        self.hosts.rest()  # compiling may take long
        self.compile_seconds = self.stepper.leave_teacher()
        if self.writers:
            self.progress.note(f"step {self.step}: the teacher has left; {self.compile_seconds:.1f} s to compile")
        self.clock = time.monotonic()
        self.hosts.touch(self.step)

    def read_metrics(self, stop: StopSignal, until: int | None = None):
        """Take in the metrics of all steps up to `until` (from 0, as dispatched); None takes all in flight."""
        self.watch_complete(stop)
        for step, metrics in self.stepper.finished(until):
            stop.observe(int(metrics["stop"]), step)
            self.hosts.touch(step)
            self.take_in(step + 1, metrics)

    def take_in(self, step: int, metrics: dict):
        """Check, record and show the finished step number `step` (from 1)."""
        now = time.monotonic()
        seconds, self.clock = now - self.clock, now
        session, memory, train = self.session, self.memory, self.session.config.train
        allowed = train.max_skipped_steps
        memory.skipped_steps += int(metrics.get("skipped", 0))
        check_finite(step, metrics, self.names, memory.checkpoint, skipped=memory.skipped_steps, allowed=allowed)
        peak = allocated_peak(session.roles.mesh.local_devices)  # by now the step is done, and grows it no more
        tokens = session.tokens_per_step
        length = session.config.data.sequence_length
        model, moe = session.config.model, session.config.moe
        flops = training_flops_per_token(model, moe, session.model.vocab_size, length)
        if "kl" in metrics:  # the teacher's forward
            teacher = session.teacher.model
            flops += forward_flops_per_token(teacher.config, teacher.moe, teacher.vocab_size, length)
        choices = sum(part.moe.top_k * part.config.moe_layers for part in session.model.expert_segments)
        record = step_record(metrics, tokens * choices, session.homes.values())
        record["tokens_per_second"] = tokens / seconds
        record["model_flops_per_second"] = tokens * flops / seconds
        record["step_seconds"] = seconds
        record["peak_device_bytes"] = self.compiled_peak if peak is None else peak
        if self.compile_seconds is not None:
            record["compile_seconds"], self.compile_seconds = self.compile_seconds, None
        if allowed:
            record["skipped"], record["skipped_steps"] = int(metrics["skipped"]), memory.skipped_steps
        if "run_again" in metrics:
            record["run_again"], record["steps_run_again"] = metrics["run_again"], self.stepper.overflows.run_again
        if self.engine is not None:
            record.update(self.engine.record(step - 1, metrics["loads"]))
        if self.writers:
            self.writers.step(step, record, metrics["loads"])
            if record.get("skipped"):
                self.progress.note(f"step {step}: not finite, skipped ({memory.skipped_steps} of at most {allowed})")
            self.progress.update(
                step,
                loss=record["loss"],
                tokens_per_second=record["tokens_per_second"],
                device_load=float(np.mean(record["device_load_max_over_mean"])),
                skipped_steps=memory.skipped_steps,
                steps_run_again=record.get("steps_run_again", 0),
                plan=record.get("plan_remark"),
            )

    def save(self):
        """Save the state, unless this very step is saved already."""
        memory = self.memory
        if memory.checkpoint == self.step:
            return
        host = {"config": memory.config_text, "data": self.session.feed.stream.position(self.step)}
        if memory.skipped_steps:
            host["skipped_steps"] = memory.skipped_steps
        if self.stepper.overflows.steps:
            host["overflows"] = self.stepper.overflows.state()
        if memory.teacher is not None:
            host["teacher"] = memory.teacher
        if self.engine is not None:
            host["plan"] = self.engine.state()
        home = self.session.home if self.engine is None else self.engine.home
        self.checkpoints.save(self.step, self.stepper.state, home, host)
        memory.checkpoint = self.step
        self.hosts.touch(self.step)

    def evaluate(self):
        """Evaluate on held-out text and write the result down."""
        session = self.session
        step_function, tables = (self.evaluation_step, None) if self.engine is None else self.engine.evaluation()

        def held_out_loss(params) -> float:  # for the watchdog a batch counts as a step: held-out text may be long
            return evaluate(session, step_function, params, tables, lambda: self.hosts.touch(self.step))

        loss = held_out_loss(self.stepper.state["params"])
        record = {"held_out_loss": loss}
        averaged = ""
        if "ema" in self.stepper.state:
            if self.step:  # before the first step it is the parameters
                loss = held_out_loss(ema_params(self.stepper.state["ema"], session.state_shardings))
            record["held_out_loss_ema"] = loss
            averaged = f", {loss:.4f} with averaged parameters"
        if self.step == 0:
            record["unigram_entropy"] = held_out_entropy(
                session.feed.cache,
                sequence_length=session.config.data.sequence_length,
                vocab_size=session.model.vocab_size,
                limit=session.config.train.evaluate_windows,
                boundary_id=session.feed.boundary_id,
            )
        if self.writers:
            self.writers.evaluation(self.step, record)
            self.progress.note(f"step {self.step}: held-out loss {record['held_out_loss']:.4f}{averaged}")
        self.clock = time.monotonic()
        self.hosts.touch(self.step)

    def profile(self, step: int):
        """Record a trace of the steps first to last - 1 of `train.profile_steps`, on process 0."""
        steps = self.session.config.train.profile_steps
        if steps is None or self.writers is None:
            return
        if not self.profiling and steps[0] <= step < steps[1]:
            jax.profiler.start_trace(os.fspath(self.writers.folder.profile))
            self.profiling = True
        elif self.profiling and step >= steps[1]:
            self.stop_profile()

    def stop_profile(self):
        if self.profiling:
            jax.block_until_ready(self.stepper.state)
            jax.profiler.stop_trace()
            self.profiling = False
