"""What a run writes down: what it is, records of steps and evaluations, loads, TensorBoard, a line on the screen.

Inputs: a `Session`; metrics of finished steps, as NumPy. Outputs: files of the run folder, on process 0; what was
deleted meanwhile is made again. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import numpy as np

from moe_jax.data.tokenizer import FILE, HuggingFaceTokenizer, carry_files
from moe_jax.errors import UserError
from moe_jax.models.counts import parameter_counts
from moe_jax.moe.routers.sigmoid_bias import SigmoidBias
from moe_jax.observe.loads import LoadsOrigin, LoadsRecorder, device_load_max_over_mean, sample_every
from moe_jax.observe.metrics_file import MetricsWriter, TensorBoard
from moe_jax.observe.progress import Progress
from moe_jax.registry import options_in
from moe_jax.replan.segments import modelled_layers
from moe_jax.storage.run_folder import (
    EVALUATIONS,
    RunFolder,
    atomic_file,
    disk_errors_named,
    environment_record,
    write_atomically,
)
from moe_jax.training.origin import OpenRun
from moe_jax.training.program import Session


def banner(session: Session, folder: RunFolder, latest: int | None) -> str:
    """Return text, model, devices and steps of a run, and in words what of the model is trained, and at which rate.

    Args:
      latest: step of the checkpoint that it goes on from.
    """
    config, meta, axes = session.config, session.feed.cache.meta, session.roles.mesh.shape
    total, active, *_ = parameter_counts(config.model, config.moe, session.model.vocab_size)
    train, moe, lora = config.train, config.moe, config.lora
    mesh = ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "one device"
    where = config.data.path or "the sources of Python's library"
    padding = session.rows - train.microbatch_size
    filled = f", {padding} of {session.rows} in a microbatch are padding" if padding else ""
    chats = f"\nchats   {meta.answers:,} tokens are answers; {session.feed.stream.told()}" if meta.answers else ""
    how = "constant" if train.learning_rate_schedule == "constant" else f"{train.learning_rate_schedule} to the end"
    warmup = min(train.warmup_steps, train.steps - 1)  # as `training/optimizer.py` takes it
    cut = f" (not {train.warmup_steps}: train.steps is {train.steps})" if warmup < train.warmup_steps else ""
    rate = options_in(moe, SigmoidBias()).bias_rate if moe.router == "sigmoid_bias" else 0.0
    bias = f"; biases of routers by {rate:g} a step" if rate else ""
    what, rises = "all parameters", f" from {train.learning_rate / warmup:g}" if warmup else ""
    if lora.rank:
        count = sum(leaf.size for leaf in jax.tree.leaves(session.model.trained(session.model.shapes())))
        what, bias = f"{count:,} parameters of adapters of rank {lora.rank} on {' and '.join(lora.targets)}", ""
    return (
        f"text    {where}: {meta.tokens:,} tokens in {meta.documents:,} documents, tokenizer "
        f"{config.data.tokenizer!r}{chats}\n"
        f"model   {total:,} parameters, {active:,} of them for a token; {config.model.layers} layers\n"
        f"train   {what} by {train.optimizer}, learning rate {train.learning_rate:g} after {warmup} steps{cut} of "
        f"warm-up{rises}, then {how}{bias}\n"
        f"mesh    {mesh}; schedule {config.moe.schedule}, planner {config.planner.name}\n"
        f"run     {folder.path}, step {latest or 0} of {train.steps}, {train.batch_size} sequences of "
        f"{config.data.sequence_length} tokens each{filled}; compiling the step"
    )


def write_beginning(opened: OpenRun, session: Session):
    """Write, on process 0, the files that say what a run is.

    A tokenizer's file is copied, with those next to it that go with it. environment.json holds machine, mesh, what
    'auto' came to, parameters, a modelled layer.
    """
    if not opened.hosts.is_main:
        return
    folder = opened.folder
    write_atomically(folder.config, opened.config_text)
    tokenizer = session.feed.tokenizer
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.file.resolve() != (folder.path / FILE).resolve():
        with disk_errors_named(folder.path):
            carry_files(tokenizer.file.parent, folder.path)
        with atomic_file(folder.path / FILE) as file:  # last, and as it was read
            file.write(tokenizer.text)
    config, mesh = dataclasses.replace(session.config, model=session.model.config), session.roles.mesh
    total, active, *_ = parameter_counts(config.model, config.moe, session.model.vocab_size)
    devices = [{"platform": device.platform, "kind": device.device_kind} for device in mesh.devices.flat]
    environment = {
        **environment_record(devices=devices, mesh=dict(mesh.shape), processes=opened.hosts.process_count),
        "resolved": {"MeshConfig.devices_per_node": session.roles.config.devices_per_node, **session.resolved()},
        "parameters": {"total": total, "active": active},
        "planner": config.planner.name,
        "schedule": config.moe.schedule,
        "modelled": modelled_layers(config, session.roles),
    }
    write_atomically(folder.environment, json.dumps(environment, indent=2, allow_nan=False))


class Recorder:
    """The files of one run, until `close`; process 0 has one."""

    def __init__(self, folder: RunFolder, session: Session, latest: int | None):
        """Open the files, without what they say of steps after `latest`, the checkpoint that the run goes on from."""
        config, train, self.folder = session.config, session.config.train, folder
        self.progress = Progress(train.steps, sys.stdout, start_step=latest or 0, every=train.log_every)
        self.metrics = MetricsWriter(folder, resume_step=latest)
        self.evaluations = MetricsWriter(folder, resume_step=latest, file_name=EVALUATIONS)
        segments = session.model.expert_segments
        sizes = tuple((s.config.moe_layers, s.moe.num_experts, s.config.hidden_dim, s.moe.top_k) for s in segments)
        preceding = tuple((segment.config.moe_every, segment.config.ffn_dim) for segment in segments)
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
            segments=() if alike else sizes,
            preceding=() if alike else preceding,
        )
        layers, experts = sum(s.config.moe_layers for s in segments), max(s.moe.num_experts for s in segments)
        every = sample_every(train.loads_every, train.steps, 4 * layers * origin.sources * experts)
        self.loads = LoadsRecorder(folder, every, resume_step=latest, origin=origin)
        self.tensorboard = TensorBoard(folder, resume_step=latest)
        written = [p for p in folder.path.iterdir() if p.suffix in (".gin", ".json", ".jinja") and p.is_file()]
        self.written_once = {path: path.read_bytes() for path in written}

    def close(self) -> None:
        """Merge the loads, and close what is open."""
        try:
            self.loads.merge()
        except UserError as error:
            print(f"loads.npz is not written: {error}", flush=True)
        self.tensorboard.close()
        self.progress.close()

    def note(self, step: int, text: str):
        """Show a line that begins with a number of finished steps."""
        self.progress.note(f"step {step}: {text}")

    def keep_folder(self, step: int):
        """Make the run folder again where somebody has deleted it, with the files that are written once."""
        if self.folder.retake():
            for path, content in self.written_once.items():
                with atomic_file(path) as file:
                    file.write(content)
            self.note(step, f"{self.folder.path} was deleted; it is made again, without what earlier steps wrote")

    def write_step(self, step: int, record: dict, loads: np.ndarray):
        """Write down and show step `step` (from 1).

        Args:
          record: of metrics.jsonl.
          loads: int [L, S, E] of the step.
        """
        self.keep_folder(step)
        self.metrics.write(step, record)
        self.tensorboard.write(step, record)
        self.loads.record(step, loads)
        self.progress.update(step, record)

    def write_evaluation(self, step: int, record: dict):
        """Write down an evaluation after `step` steps, unless an earlier start of the run has."""
        self.keep_folder(step)
        if self.evaluations.last_step is None or self.evaluations.last_step < step:
            self.evaluations.write(step, record)
            self.tensorboard.write(step, record)


def step_record(metrics: dict, loads: dict, homes: dict) -> dict:
    """Return one object of metrics.jsonl, without times and memory, which the loop adds.

    Args:
      metrics: of the step, as NumPy; see `make_update`.
      loads: {segment with experts, first layers first: int64 [L, D, E]}, of the metrics.
      homes: {segment: int [L, E]}: the device that computes each expert, of those of its expert-parallel group. Where a
        planner runs, its record counts replicas instead.
    """
    balance = [device_load_max_over_mean(part, homes[name], part.shape[1]) for name, part in loads.items()]
    dead = [np.count_nonzero(part.sum(axis=1) == 0, axis=1) for part in loads.values()]  # experts that got no token
    numbers = ("loss", "aux_loss", "z_loss", "learning_rate", "grad_norm", "kl")
    return {
        **{name: float(metrics[name]) for name in numbers if name in metrics},
        **{name: metrics[name] for name in ("passes", "gate_entropy", "completed") if name in metrics},
        "dropped_fraction": float(metrics["dropped"].sum() / sum(part.sum() for part in loads.values())),
        "overflow_steps": int(metrics["passes"].max() > 1),
        "device_load_max_over_mean": np.concatenate(balance),
        "dead_experts": np.concatenate(dead),
    }
