"""The training loop: steps, checkpoints, evaluations, and a clean end.

Inputs: a `Stepper`, an open run folder, and this process' place in the job. Outputs: files in the folder; or an error
that names the first leaf that is not finite, and where the run can go on. The host reads a step's metrics `lag` steps
after it was dispatched, so the devices never wait for it; a checkpoint or an evaluation first reads the metrics of all
steps in flight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.data.stream import prefetch, unigram_entropy
from moe_jax.errors import NonFiniteError
from moe_jax.jobs.hosts import Hosts
from moe_jax.jobs.stop import StopSignal
from moe_jax.models.counts import flops_per_token
from moe_jax.models.language_model import flatten
from moe_jax.storage.checkpoint import HostData
from moe_jax.training.compiling import compiled_peak, memory_counts
from moe_jax.training.origin import OpenRun
from moe_jax.training.program import Session
from moe_jax.training.recorder import Recorder, step_record
from moe_jax.training.stepper import NoCompleteProgramError, Stepper

SAVE_SECONDS = 1800.0  # that a process waits for the last checkpoint's other parts
REMEDY = "Lower train.learning_rate, or raise train.warmup_steps"
_SLOW = 1.5  # times the median


class Loop:
    """Steps of a run to its end."""

    def __init__(self, stepper: Stepper, host: HostData, latest: int | None, opened: OpenRun):
        """Open the files that grow while training.

        Args:
          host: for all checkpoints; counts go on from it.
          latest: step of the checkpoint that the run goes on from, None before the first.
        """
        self.stepper, self.host, self.checkpoint = stepper, host, latest
        self.folder, self.checkpoints, self.hosts = opened.folder, opened.checkpoints, opened.hosts
        self.engine, session = stepper.engine, stepper.session
        self.names = list(flatten(session.model.trained(stepper.state["params"])))
        self.local_finite = build_local_finite(stepper.state, session.roles.mesh)
        self.evaluation_step = session.evaluation_step() if self.engine is None else None
        self.compile_seconds: float | None = None  # of what the next step to finish ran first
        self.compiled_peak = 0  # bytes of the largest program that ran, on devices that count none
        self.profiling = False
        self.clock = time.monotonic()
        stepper.before_wait = self.before_wait
        is_main = opened.hosts.is_main
        self.recorder = Recorder(opened.folder, session, latest) if is_main else None

    def run(self) -> bool:
        """Train to the last step; return False if all agreed to stop before. The state is saved in either case."""
        with contextlib.ExitStack() as stack:
            stop = stack.enter_context(StopSignal(processes=self.hosts.process_count, lag=self.stepper.lag))
            if self.engine is not None:
                stack.callback(self.engine.close)
            if self.recorder is not None:
                stack.callback(self.recorder.close)
            try:
                return self.train(stop)
            except NoCompleteProgramError:
                self.read_metrics(stop)
                self.finish_save()
                raise

    def train(self, stop: StopSignal) -> bool:
        """Look at the first state, and take all steps that are left, as `run` says."""
        stepper, feed, train = self.stepper, self.stepper.session.feed, self.stepper.session.config.train
        self.hosts.touch(stepper.step)
        if stepper.step == 0:
            self.evaluate()
        else:
            check_state(stepper.step, stepper.state, self.local_finite, self.checkpoint)
        self.compile(stepper.compile)
        batches = prefetch(lambda step: feed.read(step, feed.local_rows), stepper.step, train.steps)
        stopped = False
        try:
            for step, batch in batches:
                self.read_metrics(stop, until=step - stepper.lag)
                if stopped := stop.should_stop(step):
                    break
                if stepper.teacher_leaves():  # the next step is another program, which is compiled now
                    self.read_metrics(stop)
                    self.compile(stepper.leave_teacher)
                    self.note(f"the teacher has left; {self.compile_seconds:.1f} s to compile")
                self.profile(train.profile_steps is not None and step in range(*train.profile_steps))
                stepper.dispatch(feed.to_devices(batch), int(stop.requested))
                for every, do in (train.checkpoint_every, self.save), (train.evaluate_every, self.evaluate):
                    if every and stepper.step % every == 0 and stepper.step < train.steps:
                        self.read_metrics(stop)
                        do()
        finally:
            batches.close()
            self.profile(False)
        self.read_metrics(stop)
        self.save()
        if not stopped:
            self.evaluate()
        self.finish_save()
        self.hosts.touch(None)  # the others may have to wait for process 0's pictures
        return not stopped

    def compile(self, work: Callable[[], float]):
        """Compile by `work`, which returns its seconds; it may take long, so no step is due meanwhile."""
        self.hosts.touch(None)
        self.compile_seconds = work()
        self.clock = time.monotonic()
        self.hosts.touch(self.stepper.step)

    def before_wait(self):
        """Say that the first overflow has come before the program for it is compiled."""
        self.hosts.touch(None)
        self.note("a bucket overflowed, and the complete program is still compiling")

    def note(self, text: str):
        """Show a line that begins with the number of finished steps."""
        if self.recorder is not None:
            self.recorder.note(self.stepper.step, text)

    def read_metrics(self, stop: StopSignal, until: int | None = None):
        """Take in the metrics of all steps up to `until` (from 0, as dispatched); None takes all in flight."""
        for step, metrics in self.stepper.finished(until):
            stop.observe(int(metrics["stop"]), step)
            self.hosts.touch(step)
            self.take_in(step + 1, metrics)

    def take_in(self, step: int, metrics: dict):
        """Check, count, time, record and show the finished step number `step` (from 1)."""
        now, session = time.monotonic(), self.stepper.session
        allowed = session.config.train.max_skipped_steps
        seconds, self.clock = now - self.clock, now
        skipped = self.host.skipped_steps + int(metrics.get("skipped", 0))
        self.host = dataclasses.replace(self.host, skipped_steps=skipped)
        check_finite(step, metrics, self.names, self.checkpoint, skipped=skipped, allowed=allowed)
        loads = session.model.loads_by_segment(metrics["loads"])
        record = step_record(metrics, loads, session.model.even_homes)
        config, length = session.config, session.config.data.sequence_length
        tokens = config.train.batch_size * length
        _, flops = flops_per_token(config.model, config.moe, session.model.vocab_size, length, config.lora)
        if "kl" in metrics:  # the teacher's forward
            teacher = session.teacher
            flops += flops_per_token(teacher.config, teacher.moe, teacher.vocab_size, length, teacher.lora)[0]
        # by now the step is done, and grows the peak no more
        if not (peaks := memory_counts(session.roles.mesh.local_devices, "peak_bytes_in_use")):
            self.compiled_peak = max(self.compiled_peak, compiled_peak(self.stepper.executable) or 0)
        record |= {
            "tokens_per_second": tokens / seconds,
            "model_flops_per_second": tokens * flops / seconds,
            "step_seconds": seconds,
            "peak_device_bytes": max(peaks, default=self.compiled_peak or None),
        }
        if self.compile_seconds is not None:
            record["compile_seconds"], self.compile_seconds = self.compile_seconds, None
        if allowed:
            record |= {"skipped": int(metrics["skipped"]), "skipped_steps": skipped}
        if "run_again" in metrics:
            record |= {"run_again": metrics["run_again"], "steps_run_again": self.stepper.run_again}
        if self.engine is not None:
            record |= self.engine.record(step - 1, metrics["loads"])
        if self.recorder is None:
            return
        if record.get("skipped"):
            self.recorder.note(step, f"not finite, skipped ({skipped} of at most {allowed})")
        self.recorder.write_step(step, record, metrics["loads"])

    def save(self):
        """Save the state, unless this very step is saved already; a NonFiniteError where it is not finite."""
        step, stepper, session = self.stepper.step, self.stepper, self.stepper.session
        if self.recorder is not None:
            self.recorder.keep_folder(step)
        if self.checkpoint == step:
            return
        check_state(step, stepper.state, self.local_finite, self.checkpoint)
        host = dataclasses.replace(
            self.host,
            tokenizer=session.feed.tokenizer.name,
            overflowed=stepper.overflowed,
            run_again=stepper.run_again,
            data=session.feed.stream.position(step),
            plan=None if self.engine is None else self.engine.state(),
        )
        home = session.model.even_homes if self.engine is None else self.engine.home
        self.checkpoints.save(step, session.saved(stepper.state), home, host.to_json())
        self.checkpoint = step
        if line := slow_processes(self.hosts, step):
            self.note(line)
        self.hosts.touch(step)

    def finish_save(self):
        """Save the state and wait for it, once more if somebody has deleted or renamed the checkpoints meanwhile."""
        self.save()
        if "False" in self.hosts.gather_text("last checkpoint", str(self.checkpoints.wait()), SAVE_SECONDS):
            self.checkpoint = None
            self.save()
            self.checkpoints.wait()

    def evaluate(self):
        """Evaluate on held-out text and write the result down."""
        session, stepper, step = self.stepper.session, self.stepper, self.stepper.step
        step_function, tables = (self.evaluation_step, None) if self.engine is None else self.engine.evaluation()

        touch = functools.partial(self.hosts.touch, step)  # a batch counts as a step: held-out text may be long
        held_out_loss = functools.partial(evaluate, session, step_function, tables=tables, after_batch=touch)
        loss = held_out_loss(stepper.state["params"])
        record, averaged = {"held_out_loss": loss}, ""
        if (bits := session.feed.bits_per_byte(loss)) is not None:
            record["bits_per_byte"] = bits
        if "ema" in stepper.state:
            average = loss
            if step:  # before the first step it is the parameters
                # under ZeRO the average is split, as moments are: it moves to where a step looks for parameters
                there = session.state_shardings.state["params"]
                average = held_out_loss(jax.jit(lambda ema: ema, out_shardings=there)(stepper.state["ema"]))
            record["held_out_loss_ema"], averaged = average, f", {average:.4f} with averaged parameters"
        if step == 0:
            record["unigram_entropy"] = unigram_entropy(session.feed.held_out_counts)
        if self.recorder is not None:
            self.recorder.write_evaluation(step, record)
            self.recorder.note(step, f"held-out loss {loss:.4f}{averaged}")
        self.clock = time.monotonic()
        self.hosts.touch(step)

    def profile(self, on: bool):
        """Let process 0 record a trace, or end it; the steps of `train.profile_steps` are (first, last - 1)."""
        if self.recorder is not None and on != self.profiling:
            self.profiling = on
            if on:
                jax.profiler.start_trace(os.fspath(self.folder.profile))
            else:
                jax.block_until_ready(self.stepper.state)
                jax.profiler.stop_trace()


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


def check_finite(
    step: int, metrics: dict, names: list[str], last_checkpoint: int | None, *, skipped: int = 0, allowed: int = 0
):
    """Raise NonFiniteError if the loss or gradient of step `step` (from 1) is not finite, and it may not be skipped.

    Args:
      metrics: of the step, as NumPy.
      names: of the gradient leaves, in the order of metrics['square_norms'].
      last_checkpoint: step of the last finished checkpoint, or None.
      skipped: steps that were not finite so far, this one among them, of at most `allowed`.
    """
    finite = np.isfinite(metrics["square_norms"])
    if allowed and skipped <= allowed:
        return
    if np.isfinite(metrics["loss"]) and finite.all() and not metrics.get("skipped", False):
        return
    gradient = "every gradient is finite"
    if not finite.all():
        gradient = f"gradient leaf {names[int(np.argmin(finite))]!r} is the first that is not finite"
    beyond = f"; {skipped} such steps are more than train.max_skipped_steps ({allowed})" if allowed else ""
    tolerate = "" if allowed else ", or let train.max_skipped_steps leave out a few such steps"
    raise NonFiniteError(
        f"step {step}: the loss is {float(metrics['loss'])}, and {gradient}{beyond}; "
        f"{last_finite(last_checkpoint)}. {REMEDY}{tolerate}"
    )


def build_local_finite(state: dict, mesh: jax.sharding.Mesh) -> Callable:
    """Return jitted (leaves of a state) -> bool [devices, leaves]: whether a device's part of a leaf is finite."""

    # no collective, so that it may be dispatched behind steps in flight
    def check(leaves):
        return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])[None]

    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(state)]
    rows = jax.sharding.PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(check, mesh=mesh, in_specs=(specs,), out_specs=rows))


def check_state(step: int, state: dict, local_finite: Callable, last_checkpoint: int | None):
    """Raise NonFiniteError where this process' part of a state is not finite; one that raises ends the others too.

    What no step can go on from would push out, as a checkpoint, what one can.

    Args:
      step: of the state; local_finite: of `build_local_finite`; last_checkpoint: its step, or None.
    """
    shards = local_finite(jax.tree.leaves(state)).addressable_shards
    finite = np.all([np.asarray(shard.data)[0] for shard in shards], axis=0)
    if finite.all():
        return
    name, hint = list(flatten(state))[int(np.argmin(finite))], f"{last_finite(last_checkpoint)}. {REMEDY}"
    if last_checkpoint == step:  # from which it was read
        hint = "move the checkpoint of this step away, and the one before it is taken"
    raise NonFiniteError(
        f"step {step}: {name!r} is the first leaf of the state that is not finite, so it is not saved; {hint}"
    )


def last_finite(checkpoint: int | None) -> str:
    """Return in words where a run that ends now can go on; only finite states are saved."""
    if checkpoint is None:
        return "there is no checkpoint yet"
    return f"the checkpoint of step {checkpoint} is the last finite one"


def slow_processes(hosts: Hosts, step: int) -> str:
    """Return in words which processes of a job are slow, '' where none is; all of them call it, after the same `step`.

    Each times the same work on its first device, at best of three runs after one that compiles. A step tells nothing:
    in it all wait for the slowest.
    """
    if hosts.process_count == 1:
        return ""
    device, taken = jax.local_devices()[0], []
    side = 512 if device.platform == "cpu" else 4096  # 64 MiB: a training run leaves little memory
    matrix = jax.device_put(np.ones((side, side), np.float32), device)
    for _ in range(4):
        began = time.monotonic()
        jax.block_until_ready(jnp.matmul(matrix, matrix))
        taken.append(time.monotonic() - began)
    seconds = list(map(float, hosts.gather_text(f"speed at step {step}", str(min(taken)))))
    median = statistics.median_low(seconds)  # of two the faster one
    slow = [
        f"process {index} ({name}) takes {own / median:.1f} times as long as the median"
        for index, (own, name) in enumerate(zip(seconds, hosts.names, strict=True))
        if own > _SLOW * median
    ]
    return f"{', '.join(slow)} for the same work on its device: all wait for it" if slow else ""
