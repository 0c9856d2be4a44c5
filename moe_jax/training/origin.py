"""An open run folder, and where its run's state comes from: chosen by host data alone, before anything is built.

Inputs: a path, what a command asks for, and this process' place in the job. Outputs: a folder that all processes see,
with its lock where the job writes; the step to go on from, or the model to start from, with the config to train with
and the host data to go on with. What may differ between a checkpoint and the command that resumes it is decided in
`moe_jax.config.run_config`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from moe_jax.config.run_config import RunConfig, check_resumable, config_differences
from moe_jax.data.tokenizer import with_kept_file
from moe_jax.errors import HostLostError, UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.jobs.lock import FolderLock
from moe_jax.storage.checkpoint import Checkpointer, HostData
from moe_jax.storage.run_folder import RunFolder, environment_record, read_text
from moe_jax.training.frozen_models import settle_base, settle_teacher

FOLDER_SECONDS = 60.0  # until a network file system shows what another host has made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What a command line says of a run's beginning.

    Attributes:
      init_from: run folder whose parameters a new run starts from, or ''.
      init_from_ema: start from the moving average of that run's parameters instead.
      gin_files: the files that the config was read from.
      changed: bindings that a started run goes on with another value of, as --override asks.
    """

    init_from: str = ""
    init_from_ema: bool = False
    gin_files: Collection[str] = ()
    changed: Collection[str] = ()


@dataclasses.dataclass(frozen=True)
class OpenRun:
    """A run folder that is open, and what a command asks of it."""

    config: RunConfig
    config_text: str  # the same, with what the user bound marked
    start: Start
    folder: RunFolder
    checkpoints: Checkpointer
    hosts: Hosts


def say(hosts: Hosts, text: str) -> None:
    """Print a line, on the main process."""
    if hosts.is_main:
        print(text, flush=True)


@contextlib.contextmanager
def open_run(
    config: RunConfig, config_text: str, hosts: Hosts, workdir: str, start: Start | None = None
) -> Iterator[OpenRun]:
    """Yield a run folder that all processes see, with its checkpoints, once they agree on config and versions.

    Process 0 makes the folder before any other looks for it; at the end an empty one that it made goes.

    Args:
      start: of a run that trains, which holds the folder's lock; None: nothing is trained, and the folder must exist.

    Raises:
      UserError: the folder cannot be opened, another job has it, or the processes of this one were started with
        different configs or versions.
      HostLostError: a process does not see process 0's folder.
    """
    hosts.agree("config", config_text, differing_binding)
    versions = ", ".join(f"{name} {version}" for name, version in environment_record()["packages"].items())
    hosts.agree("versions", versions, lambda first, other: f"process {{index}} has {other}, and process 0 {first}")
    with contextlib.ExitStack() as stack:
        if hosts.is_main:
            folder = RunFolder(workdir, create=start is not None)
            stack.callback(folder.remove_if_unused)
            if start is not None:
                stack.enter_context(FolderLock(folder, hosts.fail))
        seen, *_ = hosts.gather_text("run folder", str(folder.seen()) if hosts.is_main else "")
        deadline = time.monotonic() + FOLDER_SECONDS
        while not hosts.is_main:
            with contextlib.suppress(UserError):
                if str((folder := RunFolder(workdir, create=False)).seen()) == seen:
                    break
            if time.monotonic() > deadline:
                raise HostLostError(
                    f"process {hosts.process_index} does not see process 0's run folder {workdir}; give a --workdir "
                    "that all hosts share"
                )
            time.sleep(0.5)
        checkpoints = Checkpointer(folder.checkpoints, keep=config.train.keep_checkpoints)
        stack.enter_context(contextlib.closing(checkpoints))
        yield OpenRun(config, config_text, start or Start(), folder, checkpoints, hosts)


def differing_binding(first: str, other: str) -> str:
    """Return in words the first binding in which process 0's config text and this process' differ."""
    for binding, old, new in config_differences(first, other):
        return f"{binding} is {old} on process 0 and {new} on process {{index}}; start all with the same flags"
    return ""


def newest_checkpoint(
    opened: OpenRun, below: int | None = None, evaluates: bool = False
) -> tuple[int | None, HostData]:
    """Return the step of the newest checkpoint, None before the first, and its host data, which fits the config.

    Args:
      below: only steps before this one count.
      evaluates: nothing is trained: the checkpoint may hold parameters alone.

    Raises:
      UserError: the folder belongs to a run that this config may not go on with, or no checkpoint will do.
    """
    folder, changed = opened.folder, opened.start.changed
    step = _latest(opened.checkpoints, opened.hosts, below)
    host = HostData() if step is None else HostData.from_json(opened.checkpoints.read_host(step))
    texts = [host.config or read_text(folder.config), opened.config_text]
    if host.parameters_only:
        if not evaluates:
            raise UserError(
                f"{folder.path} holds parameters alone, as moe_jax.convert makes it; start a run of its own from "
                f"them, with --init_from={folder.path} and another --workdir"
            )
        parts = ("ModelConfig.", "MoEConfig.")  # any text serves to evaluate them
        texts = ["\n".join(line for line in text.splitlines() if line.startswith(parts)) for text in texts]
    if texts[0] is not None:
        check_resumable(*texts, str(folder.path), changed)
    if step is None and changed:
        raise UserError(
            f"--override is for a run that has started, and {folder.path} has no checkpoint; name its folder, or use "
            "--gin_bindings"
        )
    return step, host


def _latest(checkpoints: Checkpointer, hosts: Hosts, below: int | None = None) -> int | None:
    """Return the step of the newest finished checkpoint as process 0 sees the folder, None without any."""
    step, *_ = hosts.gather_text("a checkpoint", str(checkpoints.latest(below)) if hosts.is_main else "")
    return int(step) if step.isdecimal() else None


def choose_origin(opened: OpenRun, step: int | None, host: HostData) -> tuple[RunConfig, int | None, HostData]:
    """Return where a run's state comes from, by its newest checkpoint, if there is one; errors tell what to set.

    Args:
      step, host: as `newest_checkpoint` returned them; step None starts a new run.

    Returns:
      The config to train with: with the tokenizer that the folder keeps, without a teacher that has left. The step of
      the checkpoint in `Start.init_from` from whose parameters a new run starts. The host data with what this command
      changes.
    """
    start, text = opened.start, opened.config_text
    parent = _choose_parent(opened) if step is None else None
    config, teacher = settle_teacher(opened.config, step, host.teacher, opened.hosts)
    base = settle_base(config, start.init_from, host.base, opened.hosts)
    changes = [
        {"step": step, "binding": binding, "was": old, "is": new}
        for binding, old, new in (() if step is None else config_differences(host.config, text))
        if binding in start.changed
    ]
    config = dataclasses.replace(config, data=with_kept_file(config.data, opened.folder.path))
    host = dataclasses.replace(host, config=text, teacher=teacher, base=base, changes=(*host.changes, *changes))
    return config, parent, host


def _choose_parent(opened: OpenRun) -> int | None:
    """Return the step of the checkpoint whose parameters a new run starts from, None where it draws its own.

    Raises:
      UserError: no such checkpoint; or a converted model would train on Python's own sources, or random weights by its
        config: nobody asked.
    """
    config, start, init_from = opened.config, opened.start, opened.start.init_from
    if not init_from:
        for folder in (Path(file).parent for file in start.gin_files):
            made = Checkpointer(folder / "checkpoints")
            if made.steps() == [0] and HostData.from_json(made.read_host(0)).parameters_only:
                raise UserError(
                    f"{folder}/config.gin is of a converted model, and without --init_from={folder} random weights "
                    f"would learn at a rate of {config.train.learning_rate:g}; give that, or copy the file and set "
                    "rate and text"
                )
        if start.init_from_ema:
            raise UserError("--init_from_ema needs --init_from=DIR, the run whose averaged parameters are meant")
        return None
    other = Checkpointer(RunFolder(init_from, create=False).checkpoints)
    step = _latest(other, opened.hosts)
    if step is None:
        raise UserError(f"--init_from={init_from} has no finished checkpoint; give the folder of a run")
    host = HostData.from_json(other.read_host(step))
    if host.base is not None:
        raise UserError(
            f"--init_from={init_from} holds adapters of {host.base.folder} and no model; make one of both with "
            "moe_jax.convert --to_hf, which --from_hf turns into a run folder"
        )
    if config.lora.rank and start.init_from_ema:
        raise UserError("--init_from_ema cannot be with LoraConfig.rank: adapters are for a run's own parameters")
    if host.parameters_only and not config.data.path:
        raise UserError(
            f"--init_from={init_from} is a converted model, and DataConfig.path ('') would train it on the sources of "
            "Python's library; name your text, such as --gin_bindings='DataConfig.path = \"my_texts\"'"
        )
    length, known = config.data.sequence_length, config.model.max_length
    if host.parameters_only and length > known:  # rotary positions take any
        say(
            opened.hosts,
            f"DataConfig.sequence_length ({length}) is above the {known} positions (ModelConfig.max_length) that "
            f"{init_from} has seen",
        )
    return step
