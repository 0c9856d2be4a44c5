"""One run from its folder to its report: new, resumed, finished already, or evaluated only.

Inputs: a RunConfig with its text, a work folder, and this process' place in the job. Outputs: the folder, filled, and
lines that state the result. What may differ between a checkpoint and the command that resumes it is decided in
`moe_jax.config.run_config`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from moe_jax.config.run_config import RunConfig, check_resumable, config_differences
from moe_jax.config.train_config import DistillationConfig
from moe_jax.data.tokenizer import FILE, HuggingFaceTokenizer, Tokenizer, carry_files, find_tokenizer, with_kept_file
from moe_jax.errors import HostLostError, UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.jobs.lock import FolderLock
from moe_jax.models.counts import parameter_counts
from moe_jax.models.lora import joined
from moe_jax.observe.metrics_file import summarize_run
from moe_jax.observe.report import draw_all, has_report, write_report
from moe_jax.parallel.nodes import node_size
from moe_jax.replan.costs import modelled_layers
from moe_jax.replan.engine import RejitEngine, build_engine
from moe_jax.storage.checkpoint import Checkpointer, DamagedCheckpointError
from moe_jax.storage.run_folder import (
    RunFolder,
    atomic_file,
    disk_errors_named,
    environment_record,
    read_text,
    write_atomically,
)
from moe_jax.training.frozen_base import load_base, restore_params, settle_base
from moe_jax.training.loop import Loop, evaluate
from moe_jax.training.program import Session, build_session
from moe_jax.training.stepper import Stepper
from moe_jax.training.teacher import settle_teacher

FOLDER_SECONDS = 60.0  # until a network file system shows what another host has made
RESTORE_SECONDS = 1800.0  # from the first process that has read a checkpoint, or its text, to the last


def say(hosts: Hosts, text: str):
    """Print a line on the main process."""
    if hosts.is_main:
        print(text, flush=True)


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


def run(
    config: RunConfig, config_text: str, operative_text: str, hosts: Hosts, *, workdir: str, start: Start | None = None
) -> bool:
    """Train to the last step of the config; return False if a signal stopped the run before it, else True.

    Args:
      workdir: the run folder.
      start: where a new run starts from, what a started one changes; None: from nothing, and nothing.

    Raises:
      UserError: a folder of another config, a checkpoint of another model, data that cannot be read, and the like.
      NonFiniteError: a step whose loss or gradient is not finite.
    """
    start = start or Start()
    with open_run(config, config_text, hosts, workdir) as (folder, checkpoints):
        latest = state = None
        while state is None:  # until a checkpoint proves whole
            latest, past = newest_state(checkpoints, folder, config_text, latest, changed=start.changed)
            if latest is not None and latest >= config.train.steps:
                more = "; for more, raise train.steps by --gin_bindings" if start.changed else ""
                say(hosts, f"{folder.path}: finished already, at step {latest} of {config.train.steps}{more}")
                if hosts.is_main and not has_report(folder):
                    report(folder)
                return True
            if latest is None:
                check_converted(config, start, hosts)
            settled, identity = settle_teacher(config, latest or 0, past, hosts)
            base = settle_base(config, start.init_from, past, hosts)
            data = with_kept_file(config.data, folder.path)
            session = start_session(dataclasses.replace(settled, data=data), hosts)
            checkpoints.check_room(config.train.steps, session.saved(session.abstract_state()))
            engine = build_engine(session)
            # the stepper alone holds the state: a step donates it
            state = starting_state(session, checkpoints, latest, hosts, start, engine, base)
        say(hosts, banner(session, folder, latest))
        if latest is not None:
            checkpoints.set_aside(latest)
        stepper = Stepper(session, state, engine, overflows=past.get("overflows"))
        del state
        if hosts.is_main:
            write_atomically(folder.config, config_text)
            write_atomically(folder.begun, json.dumps({"add_special_tokens": config.data.add_special_tokens}))
            keep_tokenizer(session.feed.tokenizer, folder)
            write_atomically(folder.operative_config, operative_text)
            mesh, node = session.roles.mesh, session.roles.config.devices_per_node
            found = [{"platform": d.platform, "kind": d.device_kind} for d in mesh.devices.flat]
            record = environment_record(devices=found, mesh=dict(mesh.shape), processes=hosts.process_count)
            record["resolved"] = {"MeshConfig.devices_per_node": node, **session.resolved()}
            record |= described(session)
            write_atomically(folder.environment, json.dumps(record, indent=2, allow_nan=False))
        if session.teacher is not None:
            say(hosts, f"learning from {identity['folder']}, step {identity['step']}")
        host = {name: past.get(name, 0) for name in ("skipped_steps", "overflowed_updates")}
        host |= {"config": config_text, "teacher": identity, "base": base, "tokenizer": session.feed.tokenizer.name}
        host["changes"] = past.get("changes", []) + changes_since(past, config_text, start.changed, latest)
        for change in host["changes"]:
            say(hosts, "from step {step} on: {binding} is {is}, and was {was}".format(**change))
        finished = Loop(stepper, host, latest, folder, checkpoints, hosts).run()
        if not finished:
            say(hosts, f"stopped by a signal after step {stepper.step}; the same command goes on from there")
        elif hosts.is_main:
            report(folder)
        return finished


def described(session: Session) -> dict:
    """Return what a report says of a run besides its machine: parameters, planner, schedule, and a modelled layer."""
    config = dataclasses.replace(session.config, model=session.model.config)
    total, active, *_ = parameter_counts(config.model, config.moe, session.model.vocab_size)
    return {
        "parameters": {"total": total, "active": active},
        "planner": config.planner.name,
        "schedule": config.moe.schedule,
        "modelled": modelled_layers(config, session.roles),
    }


def banner(session: Session, folder: RunFolder, latest: int | None) -> str:
    """Return what a run is, before its first step compiles: text, model, devices, steps."""
    config, meta, axes = session.config, session.feed.cache.meta, session.roles.mesh.shape
    total, active, *_ = parameter_counts(config.model, config.moe, session.model.vocab_size)
    train, mesh = config.train, ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "one device"
    where = config.data.path or "the sources of Python's library"
    padding = session.rows - train.microbatch_size
    filled = f", {padding} of {session.rows} in a microbatch are padding" if padding else ""
    chats = f"\nchats   {meta.answers:,} tokens are answers; {session.feed.stream.told()}" if meta.answers else ""
    return (
        f"text    {where}: {meta.tokens:,} tokens in {meta.documents:,} documents, tokenizer "
        f"{config.data.tokenizer!r}{chats}\n"
        f"model   {total:,} parameters, {active:,} of them for a token; {config.model.layers} layers\n"
        f"train   {trained(session)}\n"
        f"mesh    {mesh}; schedule {config.moe.schedule}, planner {config.planner.name}\n"
        f"run     {folder.path}, step {latest or 0} of {train.steps}, {train.batch_size} sequences of "
        f"{config.data.sequence_length} tokens each{filled}; compiling the step"
    )


def changes_since(past: dict, config_text: str, changed: Collection[str], step: int | None) -> list[dict]:
    """Return a record of each binding of `changed` that differs from the checkpoint with host data `past`."""
    differences = config_differences(past["config"], config_text) if past else ()
    return [
        {"step": step, "binding": binding, "was": old, "is": new}
        for binding, old, new in differences
        if binding in changed
    ]


def keep_tokenizer(tokenizer: Tokenizer, folder: RunFolder) -> None:
    """Copy a tokenizer's file into a run folder, and those next to it that go with it."""
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.file.resolve() != (folder.path / FILE).resolve():
        with disk_errors_named(folder.path):
            carry_files(tokenizer.file.parent, folder.path)
        with atomic_file(folder.path / FILE) as file:  # last, and as it was read
            file.write(tokenizer.text)


def trained(session: Session) -> str:
    """Return in words what of a model is trained, and at which rate."""
    train, moe, lora = session.config.train, session.config.moe, session.config.lora
    how = "constant" if train.learning_rate_schedule == "constant" else f"{train.learning_rate_schedule} to the end"
    warmup = min(train.warmup_steps, train.steps - 1)  # as `training/optimizer.py` takes it
    cut = f" (not {train.warmup_steps}: train.steps is {train.steps})" if warmup < train.warmup_steps else ""
    bias = f"; biases of routers by {moe.bias_rate:g} a step" if moe.router == "sigmoid_bias" and moe.bias_rate else ""
    what, rises = "all parameters", f" from {train.learning_rate / warmup:g}" if warmup else ""
    if lora.rank:
        count = sum(leaf.size for leaf in jax.tree.leaves(session.model.trained(session.model.shapes())))
        what, bias = f"{count:,} parameters of adapters of rank {lora.rank} on {' and '.join(lora.targets)}", ""
    return (
        f"{what} by {train.optimizer}, learning rate {train.learning_rate:g} after {warmup} steps{cut} "
        f"of warm-up{rises}, then {how}{bias}"
    )


def check_converted(config: RunConfig, start: Start, hosts: Hosts):
    """Raise a UserError where a converted model would train random weights, or on Python's own sources: nobody asked.

    Windows that are longer than what it was trained on are told in a line: rotary positions take any.
    """
    init_from, folders, converted = start.init_from, [Path(file).parent for file in start.gin_files], False
    for folder in [RunFolder(init_from, create=False).path] if init_from else folders:
        with contextlib.closing(Checkpointer(folder / "checkpoints", keep=1)) as other:
            converted = other.steps() == [0] and other.read_host(0).get("parameters_only")
        if converted and not init_from:
            raise UserError(
                f"{folder}/config.gin is of a converted model, and without --init_from={folder} random weights would "
                f"learn at a rate of {config.train.learning_rate:g}; give that, or copy the file and set rate and text"
            )
    if converted and not config.data.path:
        raise UserError(
            f"--init_from={init_from} is a converted model, and DataConfig.path ('') would train it on the sources of "
            "Python's library; name your text, such as --gin_bindings='DataConfig.path = \"my_texts\"'"
        )
    length, known = config.data.sequence_length, config.model.max_length
    if converted and length > known:
        say(
            hosts,
            f"DataConfig.sequence_length ({length}) is above the {known} positions (ModelConfig.max_length) that "
            f"{init_from} has seen",
        )


def evaluate_run(config: RunConfig, config_text: str, hosts: Hosts, workdir: str) -> None:
    """Print the held-out loss of the last checkpoint of a run folder, also of parameters alone; errors as of `run`."""
    moe = dataclasses.replace(config.moe, balance_over="batch")  # any mesh forms that, and nobody reads it
    config = dataclasses.replace(config, distillation=DistillationConfig(), moe=moe)  # needs no teacher
    with open_run(config, config_text, hosts, workdir, evaluates=True) as (folder, checkpoints):
        latest, past = newest_state(checkpoints, folder, config_text, evaluates=True)
        find_tokenizer(config.data, folder.path, past.get("tokenizer"))  # for its error
        data = with_kept_file(config.data, folder.path)
        session = start_session(dataclasses.replace(config, data=data), hosts)
        if latest is None:
            raise UserError(f"--eval_only needs a checkpoint, and {folder.path} has none; train first")
        step_function, losses = session.evaluation_step(), []
        for part in ("params", "ema") if checkpoints.has_ema(latest) else ("params",):
            abstract = session.abstract_state()["params"]
            params = restore_params(checkpoints, latest, session.model, abstract, session.home, part)
            losses.append(evaluate(session, step_function, params))
            del params
        averaged = f", {losses[1]:.4f} with averaged parameters" if len(losses) > 1 else ""
        bits = session.feed.bits_per_byte(losses[0])
        by_bytes = "" if bits is None else f"; {bits:.4f} bits per byte"
        say(hosts, f"step {latest}: held-out loss {losses[0]:.4f}{averaged}{by_bytes}")


@contextlib.contextmanager
def open_run(
    config: RunConfig, config_text: str, hosts: Hosts, workdir: str, evaluates: bool = False
) -> Iterator[tuple[RunFolder, Checkpointer]]:
    """Yield a run folder and its checkpoints; a run that trains holds the folder's lock.

    Process 0 makes the folder before any other looks for it; at the end an empty one that it made goes.

    Args:
      evaluates: nothing is trained: the folder must exist, and may hold parameters alone.

    Raises:
      UserError: the folder cannot be opened, another job has it, or the processes of this one were started with
        different configs or versions.
      HostLostError: a process does not see process 0's folder.
    """
    hosts.agree("config", config_text, differing_binding)
    versions = ", ".join(f"{name} {version}" for name, version in environment_record()["packages"].items())
    hosts.agree("versions", versions, lambda first, own: f"process {{index}} has {own}, and process 0 {first}")
    folder = RunFolder(workdir, create=not evaluates) if hosts.is_main else None
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.callback(folder.remove_if_unused)
            if not evaluates:
                stack.enter_context(FolderLock(folder, hosts.fail))
        seen = hosts.gather_text("run folder", "" if folder is None else str(folder.seen()))[0]
        folder = folder or find_folder(workdir, seen)
        checkpoints = Checkpointer(folder.checkpoints, keep=config.train.keep_checkpoints)
        yield folder, stack.enter_context(contextlib.closing(checkpoints))


def differing_binding(first: str, own: str) -> str:
    """Return in words the first binding in which process 0's config text and this process' differ."""
    for binding, value, other in config_differences(first, own):
        return f"{binding} is {value} on process 0 and {other} on process {{index}}; start all with the same flags"
    return ""


def find_folder(workdir: str, seen: str) -> RunFolder:
    """Return process 0's run folder, as another process sees it, once it does; seen: as of `RunFolder.seen`."""
    deadline = time.monotonic() + FOLDER_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(UserError):
            if str((folder := RunFolder(workdir, create=False)).seen()) == seen:
                return folder
        time.sleep(0.5)
    raise HostLostError(
        f"process {jax.process_index()} does not see process 0's run folder {workdir}; give a --workdir that all hosts "
        "share"
    )


def newest_state(
    checkpoints: Checkpointer, folder: RunFolder, config_text: str, below: int | None = None,
    evaluates: bool = False, changed: Collection[str] = (),
) -> tuple[int | None, dict]:  # fmt: skip
    """Return the step of the newest checkpoint, None before the first, and its host data, which fits the config.

    Args:
      below: only steps before this one count.
      evaluates: as for `open_run`.

    Raises:
      UserError: the folder belongs to a run that this config may not go on with, or no checkpoint will do.
    """
    latest = checkpoints.latest(below)
    past = {} if latest is None else checkpoints.read_host(latest)
    held = past["config"] if past else read_text(folder.config)
    # Parameters alone, as a conversion writes them, are evaluated on any text, and no run goes on from them.
    if past.get("parameters_only"):
        if not evaluates:
            raise UserError(
                f"{folder.path} holds parameters alone, as moe_jax.convert makes it; start a run of its own from "
                f"them, with --init_from={folder.path} and another --workdir"
            )
        held, config_text = (
            "\n".join(line for line in text.splitlines() if line.startswith(("ModelConfig.", "MoEConfig.")))
            for text in (held, config_text)
        )
    if held is not None:
        check_resumable(held, config_text, str(folder.path), changed)
    if latest is None and changed:
        raise UserError(
            f"--override is for a run that has started, and {folder.path} has no checkpoint; name its folder, or use "
            "--gin_bindings"
        )
    return latest, past


def start_session(config: RunConfig, hosts: Hosts) -> Session:
    """Return the session of a run on all devices.

    `MeshConfig.devices_per_node` is filled in from the processes' machines, unless it is bound.

    Raises:
      UserError: machines with different numbers of devices, or devices that are not in their order; processes that read
        different texts: each would train on batches that the others do not see; and as of `build_session`.
    """
    devices = jax.devices()
    if not config.mesh.devices_per_node:
        size = node_size(devices, hosts.machines)
        config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, devices_per_node=size))
        if hosts.process_count > 1:
            machines = len(set(hosts.machines))
            say(hosts, f"{size} devices a node ({hosts.process_count} processes on {machines} host(s))")
    session = build_session(config, devices)
    meta = session.feed.cache.meta
    named = f"DataConfig.tokenizer ({config.data.tokenizer!r}) is"
    hosts.agree("tokenizer", session.feed.tokenizer.name, lambda first, own: f"{named} {own} on process {{index}}, "
        f"and {first} on process 0; give every machine the same file")  # fmt: skip
    text = f"{meta.tokens} tokens in {meta.documents} documents, hash {meta.content}"
    holds = f"DataConfig.path ({config.data.path!r}) holds"
    hosts.agree("corpus", text, lambda first, own: f"{holds} {first} on process 0 and {own} on process {{index}}; give "
        "every machine the same files, and change none while a job starts", RESTORE_SECONDS)  # fmt: skip
    return session


def starting_state(
    session: Session, checkpoints: Checkpointer, latest: int | None, hosts: Hosts, start: Start | None = None,
    engine: RejitEngine | None = None, base: dict | None = None,
) -> dict | None:  # fmt: skip
    """Return the state to go on from: that of step `latest`, another run's parameters, or a fresh one.

    None on every process where what is read proves damaged on one, which is named. `base` is the model under adapters,
    as `settle_base` returned it.
    """
    start = start or Start()
    if latest is not None:
        home = session.home
        if engine is not None:
            left_out = engine.restore(checkpoints.read_host(latest).get("plan"))
            if left_out is not None:
                say(hosts, left_out)
            home = engine.home
        damage = ""
        try:
            state, host = checkpoints.restore(latest, session.saved(session.abstract_state()), home)
        except DamagedCheckpointError as error:
            damage = error.args[0]
        if found := next(filter(None, hosts.gather_text("damage", damage, RESTORE_SECONDS)), ""):
            say(hosts, f"{found}; the one before it is taken")
            return None
        session.feed.stream.resume(host["data"], start.changed)
        if base is not None:
            under = load_base(session.model, session.abstract_state()["params"], base, home)
            state["params"] = joined(under, state["params"])
        decay = session.config.train.ema_decay
        if decay and "ema" not in state:
            start = jax.jit(lambda p: jax.tree.map(jnp.copy, p), out_shardings=session.state_shardings.state["ema"])
            state["ema"] = start(state["params"])  # in buffers of its own
            say(hosts, f"train.ema_decay ({decay}): the average starts from the parameters of step {latest}")
        elif not decay and checkpoints.has_ema(latest):
            say(hosts, f"train.ema_decay ({decay}): the average that the checkpoint of step {latest} holds is dropped")
        say(hosts, f"resuming at step {latest}")
        return state
    if base is not None:
        if start.init_from_ema:
            raise UserError("--init_from_ema cannot be with LoraConfig.rank: adapters are for a run's own parameters")
        params = load_base(session.model, session.abstract_state()["params"], base, session.home)
        say(hosts, f"adapting the parameters of {base['folder']}, step {base['step']}")
        return session.fresh_state(params)
    if start.init_from:
        other = Checkpointer(RunFolder(start.init_from, create=False).checkpoints, keep=1)
        step = other.latest()
        if step is None:
            raise UserError(f"--init_from={start.init_from} has no finished checkpoint; give the folder of a run")
        part, word = ("ema", "averaged parameters") if start.init_from_ema else ("params", "parameters")
        params = other.restore_params(step, session.abstract_state()["params"], session.home, part)
        other.close()
        say(hosts, f"starting from the {word} of {start.init_from}, step {step}")
        return session.fresh_state(params)
    if start.init_from_ema:
        raise UserError("--init_from_ema needs --init_from=DIR, the run whose averaged parameters are meant")
    return session.fresh_state()


def report(folder: RunFolder):
    """Draw the plots and the report, and print the headline."""
    pictures = draw_all(folder)
    page = write_report(folder, pictures)
    summary = summarize_run(folder)
    print(f"run folder        {folder.path}")
    if summary["held_out_loss_first"] is not None and summary["held_out_loss_last"] is not None:
        first, last = summary["held_out_loss_first"], summary["held_out_loss_last"]
        print(f"held-out loss     {first:.4f} before, {last:.4f} after training")
    if summary["held_out_loss_ema"] is not None:
        print(f"                  {summary['held_out_loss_ema']:.4f} after training, with averaged parameters")
    if summary["bits_per_byte"] is not None:
        print(f"bits per byte     {summary['bits_per_byte']:.4f} of the held-out text, after training")
    if summary["unigram_entropy"] is not None:
        below = summary["below_unigram_entropy"]
        side = "below" if (below or 0) >= 0 else "above"
        share = "" if below is None else f"; the held-out loss ends {100 * abs(below):.1f}% {side} it"
        print(f"unigram entropy   {summary['unigram_entropy']:.4f} of the held-out text{share}")
    if summary["skipped_steps"]:
        print(f"skipped steps     {summary['skipped_steps']}, whose loss or gradient was not finite")
    if summary["steps_run_again"]:
        print(f"steps run again   {summary['steps_run_again']}, because a bucket overflowed")
    for picture in pictures:
        print(f"plot              {picture}")
    print(f"report            {page}")
