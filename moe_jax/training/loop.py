"""The training loop: steps, checkpoints, evaluations, and a clean end.

Inputs: a `Stepper`, the run folder, and this process' place in the job. Outputs: files in the folder. The host reads a
step's metrics `lag` steps after it was dispatched, so the devices never wait for it; a checkpoint or an evaluation
first reads the metrics of all steps in flight.
"""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.data.stream import prefetch, unigram_entropy
from moe_jax.errors import NonFiniteError, UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.jobs.stop import StopSignal
from moe_jax.models.counts import device_bytes, flops_per_token
from moe_jax.models.language_model import flatten
from moe_jax.observe.dashboards import Dashboards
from moe_jax.observe.loads import LoadsOrigin, LoadsRecorder, device_load_max_over_mean, sample_every
from moe_jax.observe.metrics_file import MetricsWriter
from moe_jax.observe.progress import Progress, with_prefix
from moe_jax.replan.segments import sizes_of
from moe_jax.storage.checkpoint import Checkpointer
from moe_jax.storage.run_folder import EVALUATIONS, RunFolder, atomic_file
from moe_jax.training.program import Programs, Session
from moe_jax.training.stepper import NoCompleteProgramError, Stepper

_SLOW = 1.5  # times the median
_MOST_PICTURES = 40  # of loads, that the dashboards of a run get


class Loop:
    """Steps of a run to its end, with its files; only process 0 writes."""

    def __init__(
        self, stepper: Stepper, host: dict, latest: int | None, folder: RunFolder, checkpoints: Checkpointer,
        hosts: Hosts,
    ):  # fmt: skip
        """Open the files that grow while training.

        Args:
          host: JSON data for all checkpoints: 'config', its text; 'skipped_steps' and 'overflowed_updates' so far, as
            read from metrics; and 'teacher', its identity, kept after it has left too; None without one.
          latest: step of the last finished checkpoint, None before the first.
        """
        self.stepper, self.host, self.checkpoint, self.folder = stepper, host, latest, folder
        self.checkpoints, self.hosts = checkpoints, hosts
        self.engine, session = stepper.engine, stepper.session
        self.names = list(flatten(session.model.trained(stepper.state["params"])))
        self.local_finite = build_local_finite(stepper.state, session.roles.mesh)
        self.evaluation_step = session.evaluation_step() if self.engine is None else None
        self.compile_seconds: float | None = None
        self.profiling = False
        self.watched: Programs | None = None  # whose complete program was looked at, once it was compiled
        self.clock = time.monotonic()
        stepper.before_wait = self.before_wait
        config, train = session.config, session.config.train
        self.progress = Progress(train.steps, sys.stdout, start_step=stepper.step, every=train.log_every)
        self.is_main = hosts.is_main
        if self.is_main:
            resumed = stepper.step or latest
            self.metrics = MetricsWriter(folder, resume_step=resumed)
            self.evaluations = MetricsWriter(folder, resume_step=resumed, file_name=EVALUATIONS)
            layers = session.model.expert_segments
            sizes = [(s.config.moe_layers, s.moe.num_experts, s.config.hidden_dim, s.moe.top_k) for s in layers]
            preceding = [(segment.config.moe_every, segment.config.ffn_dim) for segment in layers]
            alike = len(sizes) == 1 and sizes[0][1] >= session.roles.size(session.roles.expert)
            origin = LoadsOrigin(
                model_dim=config.model.model_dim,
                hidden_dim=sizes[0][2],
                top_k=sizes[0][3],
                dtype=config.model.dtype,
                mesh=tuple(session.roles.mesh.shape.items()),
                devices_per_node=session.roles.members_per_node,
                cluster=config.planner.cluster or config.moe.cluster,
                activation=config.model.activation,
                moe_every=preceding[0][0],
                dense_hidden_dim=preceding[0][1],
                sequence_length=config.data.sequence_length,
                segments=() if alike else tuple(sizes),
                preceding=() if alike else tuple(preceding),
            )
            held = 4 * sum(layers for layers, *_ in sizes) * origin.sources * max(experts for _, experts, *_ in sizes)
            every = sample_every(train.loads_every, train.steps, held)
            self.loads = LoadsRecorder(folder, every, resume_step=resumed, origin=origin)
            self.pictured: int | None = None  # the last step whose loads the dashboards show as a picture
            self.dashboards = Dashboards(folder, resume_step=resumed, config=host["config"])
            small = [p for p in folder.path.iterdir() if p.suffix in (".gin", ".json", ".jinja") and p.is_file()]
            self.small = {path: path.read_bytes() for path in small}
            if (older := self.loads.describe_older()) is not None:
                print(older, flush=True)

    def run(self) -> bool:
        """Train to the last step; return False if all agreed to stop before. The state is saved in either case."""
        with StopSignal(processes=self.hosts.process_count, lag=self.stepper.lag) as stop, self.progress:
            try:
                return self.train(stop)
            except NoCompleteProgramError:
                self.read_metrics(stop)
                self.finish_save()
                raise
            finally:
                if self.is_main:
                    try:
                        self.loads.merge()
                    except UserError as error:
                        print(f"loads.npz is not written: {error}", flush=True)
                    self.dashboards.close()
                if self.engine is not None:
                    self.engine.close()

    def train(self, stop: StopSignal) -> bool:
        """Take all steps that are left, as `run` says."""
        stepper, session = self.stepper, self.stepper.session
        feed, train = session.feed, session.config.train
        self.hosts.touch(stepper.step)
        if stepper.step == 0:
            self.evaluate()
        else:
            self.what_to_save()  # for its error, where what was read is not finite
        self.hosts.touch(None)  # compiling may take long
        self.compile_seconds = stepper.compile()
        self.compiled_peak = compiled_peak(stepper.executable)
        if stepper.programs.common is not None and self.compiled_peak is not None:
            shape = None if self.engine is None else self.engine.shape
            sizes = sizes_of(session.config, session.roles, session.model.vocab_size)
            complete = self.compiled_peak + device_bytes(sizes, shape).overflow
            limits = memory_counts(session.roles.mesh.local_devices, "bytes_limit")
            self.note(
                f"optimistic steps take {with_prefix(self.compiled_peak)}B of a device's memory"
                f"{f' of {with_prefix(min(limits))}B' if limits else ''}, and where a bucket overflows about "
                f"{with_prefix(complete)}B, by a program that is being compiled"
            )
        batches = prefetch(lambda step: feed.read(step, feed.own), stepper.step, train.steps)
        self.clock = time.monotonic()
        self.hosts.touch(stepper.step)
        stopped = False
        try:
            for step, batch in batches:
                self.read_metrics(stop, until=step - stepper.lag)
                if stop.should_stop(step):
                    stopped = True
                    break
                if stepper.teacher_leaves():  # the next step is another program, which is compiled now
                    self.read_metrics(stop)
                    self.hosts.touch(None)
                    self.compile_seconds = stepper.leave_teacher()
                    self.note(f"the teacher has left; {self.compile_seconds:.1f} s to compile")
                    self.clock = time.monotonic()
                    self.hosts.touch(stepper.step)
                self.profile(train.profile_steps is not None and step in range(*train.profile_steps))
                running = stepper.executable
                stepper.dispatch(feed.to_devices(batch), int(stop.requested))
                if stepper.executable is not running and self.compiled_peak is not None:
                    self.compiled_peak = max(self.compiled_peak, compiled_peak(stepper.executable) or 0)
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

    def before_wait(self):
        """Say that the first overflow has come before the program for it is compiled."""
        self.hosts.touch(None)
        self.note("a bucket overflowed, and the complete program is still compiling")

    def note(self, text: str):
        """Show a line that begins with the number of finished steps."""
        if self.is_main:
            self.progress.note(f"step {self.stepper.step}: {text}")

    def read_metrics(self, stop: StopSignal, until: int | None = None):
        """Take in the metrics of all steps up to `until` (from 0, as dispatched); None takes all in flight."""
        programs = self.stepper.programs
        if programs is not self.watched and programs.common is not None and programs.complete.done():
            self.watched = programs
            self.judge_complete(programs.complete)
        for step, metrics in self.stepper.finished(until):
            stop.observe(int(metrics["stop"]), step)
            self.hosts.touch(step)
            self.take_in(step + 1, metrics)

    def judge_complete(self, complete: concurrent.futures.Future):
        """Say so if a step that overflows could not run the complete program, which is done compiling."""
        session = self.stepper.session
        limits = memory_counts(session.roles.mesh.local_devices, "bytes_limit")
        if (error := complete.exception()) is not None:
            why = f"could not be compiled ({(str(error).splitlines() or [type(error).__name__])[0]})"
        elif limits and (needed := compiled_peak(complete.result()) or 0) > min(limits):
            there = f"{with_prefix(min(limits))}B"
            why = f"needs {with_prefix(needed)}B of each device's memory, which has {there}"
        else:
            return
        self.note(f"the complete program {why}, so the first bucket that overflows ends the run")

    def take_in(self, step: int, metrics: dict):
        """Check, record and show the finished step number `step` (from 1)."""
        now = time.monotonic()
        seconds, self.clock = now - self.clock, now
        session, config = self.stepper.session, self.stepper.session.config
        allowed = config.train.max_skipped_steps
        skipped = self.host["skipped_steps"] = self.host["skipped_steps"] + int(metrics.get("skipped", 0))
        self.host["overflowed_updates"] += int(metrics.get("overflowed", 0))
        check_finite(step, metrics, self.names, self.checkpoint, skipped=skipped, allowed=allowed)
        # by now the step is done, and grows the peak no more
        peak = max(memory_counts(session.roles.mesh.local_devices, "peak_bytes_in_use"), default=self.compiled_peak)
        length = config.data.sequence_length
        tokens = config.train.batch_size * length
        _, flops = flops_per_token(config.model, config.moe, session.model.vocab_size, length, config.lora)
        if "kl" in metrics:  # the teacher's forward
            teacher = session.teacher.model
            flops += flops_per_token(teacher.config, teacher.moe, teacher.vocab_size, length, teacher.lora)[0]
        loads = session.model.loads_by_segment(metrics["loads"])
        record = step_record(metrics, loads, session.home)
        record |= {"tokens_per_second": tokens / seconds, "model_flops_per_second": tokens * flops / seconds}
        record |= {"step_seconds": seconds, "peak_device_bytes": peak}
        if self.compile_seconds is not None:
            record["compile_seconds"], self.compile_seconds = self.compile_seconds, None
        if allowed:
            record["skipped"], record["skipped_steps"] = int(metrics["skipped"]), skipped
        if "loss_scale" in metrics:
            record["loss_scale"] = float(metrics["loss_scale"])
            record["overflowed_updates"] = self.host["overflowed_updates"]
        if "run_again" in metrics:
            record["run_again"], record["steps_run_again"] = metrics["run_again"], self.stepper.overflows["run_again"]
        if self.engine is not None:
            record.update(self.engine.record(step - 1, metrics["loads"]))
        if not self.is_main:
            return
        self.keep_folder()
        self.metrics.write(step, record)
        self.dashboards.write(step, record)
        if self.loads.due(step):
            self.loads.record(step, metrics["loads"])
            if self.pictured is None or step - self.pictured >= config.train.steps / _MOST_PICTURES:
                self.pictured = step
                for name, own in loads.items():
                    self.dashboards.write_loads(step, name, own)
        if metrics.get("overflowed"):
            self.progress.note(f"step {step}: gradients overflowed, loss scale {record['loss_scale']:g} is halved")
        if record.get("skipped"):
            self.progress.note(f"step {step}: not finite, skipped ({skipped} of at most {allowed})")
        self.progress.update(
            step,
            loss=record["loss"],
            tokens_per_second=record["tokens_per_second"],
            device_load=float(np.mean(record["device_load_max_over_mean"])),
            skipped_steps=skipped,
            steps_run_again=record.get("steps_run_again", 0),
            plan=record.get("plan_remark"),
        )

    def save(self):
        """Save the state, unless this very step is saved already; a NonFiniteError where it is not finite."""
        step = self.stepper.step
        self.keep_folder()
        if self.checkpoint == step:
            return
        self.checkpoints.save(step, *self.what_to_save())
        self.checkpoint = step
        if self.hosts.process_count > 1:
            seconds = self.hosts.gather_text(f"speed at step {step}", str(probe_seconds()))
            if line := slow_processes(list(map(float, seconds)), self.hosts.names):
                self.note(line)
        self.hosts.touch(step)

    def finish_save(self):
        """Save the state and wait for it, once more if somebody has deleted or renamed the checkpoints meanwhile."""
        self.save()
        if "False" in self.hosts.gather_text("last checkpoint", str(self.checkpoints.wait()), 1800.0):
            self.checkpoint = None
            self.save()
            self.checkpoints.wait()

    def keep_folder(self):
        """Make the run folder again where somebody has deleted it, with the files that are written once; process 0."""
        if self.is_main and self.folder.retake():
            for path, content in self.small.items():
                with atomic_file(path) as file:
                    file.write(content)
            self.note(f"{self.folder.path} was deleted; it is made again, without what earlier steps wrote")

    def what_to_save(self) -> tuple[dict, dict, dict]:
        """Return (state, homes of its experts, host data); a NonFiniteError where the state is not finite."""
        # what no step can go on from would push out what one can
        step, held = self.stepper.step, self.local_finite(jax.tree.leaves(self.stepper.state)).addressable_shards
        finite = np.all([np.asarray(shard.data)[0] for shard in held], axis=0)
        if not finite.all():  # a process that raises ends the others' save too
            broken = list(flatten(self.stepper.state))[int(np.argmin(finite))]
            hint = f"{last_finite(self.checkpoint)}. Lower train.learning_rate, or raise train.warmup_steps"
            if self.checkpoint == step:  # from which it was read
                hint = "move the checkpoint of this step away, and the one before it is taken"
            raise NonFiniteError(
                f"step {step}: {broken!r} is the first leaf of the state that is not finite, so it is not saved; {hint}"
            )
        host = {name: value for name, value in self.host.items() if value}
        host["data"] = self.stepper.session.feed.stream.position(step)
        if self.stepper.overflows["steps"]:
            host["overflows"] = self.stepper.overflows
        if self.engine is not None:
            host["plan"] = self.engine.state()
        home = self.stepper.session.home if self.engine is None else self.engine.home
        return self.stepper.session.saved(self.stepper.state), home, host

    def evaluate(self):
        """Evaluate on held-out text and write the result down."""
        session, stepper, step = self.stepper.session, self.stepper, self.stepper.step
        step_function, tables = (self.evaluation_step, None) if self.engine is None else self.engine.evaluation()

        def held_out_loss(params) -> float:  # for the watchdog a batch counts as a step: held-out text may be long
            return evaluate(session, step_function, params, tables, lambda: self.hosts.touch(step))

        loss = held_out_loss(stepper.state["params"])
        record, averaged = {"held_out_loss": loss}, ""
        if (bits := session.feed.bits_per_byte(loss)) is not None:
            record["bits_per_byte"] = bits
        if "ema" in stepper.state:
            if step:  # before the first step it is the parameters
                # under ZeRO the average is split, as moments are: it moves to where a step looks for parameters
                there = session.state_shardings.state["params"]
                loss = held_out_loss(jax.jit(lambda ema: ema, out_shardings=there)(stepper.state["ema"]))
            record["held_out_loss_ema"] = loss
            averaged = f", {loss:.4f} with averaged parameters"
        if step == 0:
            record["unigram_entropy"] = unigram_entropy(session.feed.held_out_counts)
        if self.is_main:
            self.keep_folder()
            if self.evaluations.last_step is None or self.evaluations.last_step < step:
                self.evaluations.write(step, record)
                self.dashboards.write(step, record)
        self.note(f"held-out loss {record['held_out_loss']:.4f}{averaged}")
        self.clock = time.monotonic()
        self.hosts.touch(step)

    def profile(self, on: bool):
        """Let process 0 record a trace, or end it; the steps of `train.profile_steps` are (first, last - 1)."""
        if self.is_main and on != self.profiling:
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


def probe_seconds() -> float:
    """Return how long this process' first device takes for a product of matrices, at best; other devices do not count.

    A step tells nothing: in it all wait for the slowest.
    """
    device, seconds = jax.local_devices()[0], []
    side = 512 if device.platform == "cpu" else 4096  # 64 MiB: a training run leaves little memory
    matrix = jax.device_put(np.ones((side, side), np.float32), device)
    for _ in range(4):  # the first one compiles
        began = time.monotonic()
        jax.block_until_ready(_product(matrix))
        seconds.append(time.monotonic() - began)
    return min(seconds)


@jax.jit
def _product(matrix):
    return matrix @ matrix


def slow_processes(seconds: Sequence[float], names: Sequence[str]) -> str:
    """Return in words which processes take more than _SLOW times the median for the same work, '' where none does."""
    median = statistics.median_low(seconds)  # of two the faster one
    slow = [
        f"process {index} ({name}) takes {own / median:.1f} times as long as the median"
        for index, (own, name) in enumerate(zip(seconds, names, strict=True))
        if own > _SLOW * median
    ]
    return f"{', '.join(slow)} for the same work on its device: all wait for it" if slow else ""


def build_local_finite(state: dict, mesh: jax.sharding.Mesh) -> Callable:
    """Return jitted (leaves of a state) -> bool [devices, leaves]: whether a device's part of a leaf is finite."""

    # no collective, so that it may be dispatched behind steps in flight
    def check(leaves):
        return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])[None]

    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(state)]
    rows = jax.sharding.PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(check, mesh=mesh, in_specs=(specs,), out_specs=rows))


def memory_counts(devices, name: str) -> list[int]:
    """Return a count of bytes of each of these devices, 'peak_bytes_in_use' or 'bytes_limit'; none of CPUs."""
    return [int(stats[name]) for device in devices if name in (stats := device.memory_stats() or {})]


def compiled_peak(executable) -> int | None:
    """Return the most bytes that a program needs on one device, as the compiler counts them."""
    analysis = executable.memory_analysis()
    if analysis is None:
        return None
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + outputs)


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
    if metrics.get("overflowed", False):
        return  # of a scaled loss, whose scale is lowered
    if np.isfinite(metrics["loss"]) and finite.all() and not metrics.get("skipped", False):
        return
    gradient = "every gradient is finite"
    if not finite.all():
        gradient = f"gradient leaf {names[int(np.argmin(finite))]!r} is the first that is not finite"
    beyond = f"; {skipped} such steps are more than train.max_skipped_steps ({allowed})" if allowed else ""
    tolerate = "" if allowed else ", or let train.max_skipped_steps leave out a few such steps"
    raise NonFiniteError(
        f"step {step}: the loss is {float(metrics['loss'])}, and {gradient}{beyond}; "
        f"{last_finite(last_checkpoint)}. Lower train.learning_rate, or raise train.warmup_steps{tolerate}"
    )


def last_finite(checkpoint: int | None) -> str:
    """Return in words where a run that ends now can go on; only finite states are saved."""
    if checkpoint is None:
        return "there is no checkpoint yet"
    return f"the checkpoint of step {checkpoint} is the last finite one"


def step_record(metrics: dict, loads: dict, homes: dict) -> dict:
    """Return one object of metrics.jsonl, without times and memory, which the loop adds.

    Args:
      metrics: of the step, as NumPy; see `make_update`.
      loads: {segment with experts, first layers first: int64 [L, D, E]}, of the metrics.
      homes: {segment: int [L, E]}: the device that computes each expert, of those of its expert-parallel group. Where a
        planner runs, its record counts replicas instead.
    """
    balance, dead = [], []
    for name, own in loads.items():
        balance.append(device_load_max_over_mean(own, homes[name], own.shape[1]))
        dead.append(np.count_nonzero(own.sum(axis=1) == 0, axis=1))  # got no token
    record = {
        "loss": float(metrics["loss"]),
        "aux_loss": float(metrics["aux_loss"]),
        "z_loss": float(metrics["z_loss"]),
        "learning_rate": float(metrics["learning_rate"]),
        "grad_norm": float(metrics["grad_norm"]),
        "dropped_fraction": float(metrics["dropped"].sum() / sum(own.sum() for own in loads.values())),
        "overflow_steps": int(metrics["passes"].max() > 1),
        "passes": metrics["passes"],
        "device_load_max_over_mean": np.concatenate(balance),
        "dead_experts": np.concatenate(dead),
        "gate_entropy": metrics["gate_entropy"],
    }
    if "kl" in metrics:
        record["kl"] = float(metrics["kl"])
    if "completed" in metrics:
        record["completed"] = metrics["completed"]
    return record
