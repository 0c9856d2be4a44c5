"""One run from its folder to its report: new, resumed, finished already, or evaluated only.

Inputs: a RunConfig with its text, a work folder, and this process' place in the job. Outputs: the folder, filled, and
lines that state the result.
"""

from __future__ import annotations

import dataclasses

import jax

from moe_jax.config.run_config import RunConfig
from moe_jax.config.train_config import DistillationConfig
from moe_jax.data.tokenizer import find_tokenizer, with_kept_file
from moe_jax.errors import UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.models.lora import joined
from moe_jax.observe.report import has_report, report_run
from moe_jax.parallel.mesh import node_size
from moe_jax.replan.engine import RejitEngine, build_engine
from moe_jax.storage.checkpoint import Checkpointer, DamagedCheckpointError, HostData
from moe_jax.storage.run_folder import RunFolder
from moe_jax.training.frozen_models import load_base, restore_params
from moe_jax.training.loop import Loop, evaluate
from moe_jax.training.origin import OpenRun, Start, choose_origin, newest_checkpoint, open_run, say
from moe_jax.training.program import Session, build_session
from moe_jax.training.recorder import banner, write_beginning
from moe_jax.training.stepper import Stepper

RESTORE_SECONDS = 1800.0  # from the first process that has read a checkpoint, or its text, to the last


def run(config: RunConfig, config_text: str, hosts: Hosts, *, workdir: str, start: Start | None = None) -> bool:
    """Train to the last step of the config; return False if a signal stopped the run before it, else True.

    Args:
      workdir: the run folder.
      start: where a new run starts from, what a started one changes; None: from nothing, and nothing.

    Raises:
      UserError: a folder of another config, a checkpoint of another model, data that cannot be read, and the like.
      NonFiniteError: a step whose loss or gradient is not finite.
    """
    with open_run(config, config_text, hosts, workdir, start or Start()) as opened:
        step, host = newest_checkpoint(opened)
        if step is not None and step >= config.train.steps:  # nothing is left but a report that is not there
            more = "; for more, raise train.steps by --gin_bindings" if opened.start.changed else ""
            say(hosts, f"{opened.folder.path}: finished already, at step {step} of {config.train.steps}{more}")
            if hosts.is_main and not has_report(opened.folder):
                report_run(opened.folder)
            return True
        stepper, step, host = begin(opened, step, host)
        write_beginning(opened, stepper.session)
        if stepper.session.teacher is not None:
            say(hosts, f"learning from {host.teacher.folder}, step {host.teacher.step}")
        for change in host.changes:
            say(hosts, "from step {step} on: {binding} is {is}, and was {was}".format(**change))
        finished = Loop(stepper, host, step, opened).run()
        if not finished:
            say(hosts, f"stopped by a signal after step {stepper.step}; the same command goes on from there")
        elif hosts.is_main:
            report_run(opened.folder)
        return finished


def evaluate_run(config: RunConfig, config_text: str, hosts: Hosts, workdir: str) -> None:
    """Print the held-out loss of the last checkpoint of a run folder, also of parameters alone; errors as of `run`."""
    moe = dataclasses.replace(config.moe, balance_over="batch")  # any mesh forms that, and nobody reads it
    config = dataclasses.replace(config, distillation=DistillationConfig(), moe=moe)  # needs no teacher
    with open_run(config, config_text, hosts, workdir) as opened:
        folder, checkpoints = opened.folder.path, opened.checkpoints
        step, host = newest_checkpoint(opened, evaluates=True)
        find_tokenizer(config.data, folder, host.tokenizer)  # for its error
        session = start_session(dataclasses.replace(config, data=with_kept_file(config.data, folder)), hosts)
        if step is None:
            raise UserError(f"--eval_only needs a checkpoint, and {folder} has none; train first")
        step_function, losses = session.evaluation_step(), []
        for part in ("params", "ema") if checkpoints.has_ema(step) else ("params",):
            abstract = session.abstract_state()["params"]
            params = restore_params(checkpoints, step, session.model, abstract, session.model.even_homes, part)
            losses.append(evaluate(session, step_function, params))
            del params
        averaged = f", {losses[1]:.4f} with averaged parameters" if len(losses) > 1 else ""
        bits = session.feed.bits_per_byte(losses[0])
        by_bytes = "" if bits is None else f"; {bits:.4f} bits per byte"
        say(hosts, f"step {step}: held-out loss {losses[0]:.4f}{averaged}{by_bytes}")


def begin(opened: OpenRun, step: int | None, host: HostData) -> tuple[Stepper, int | None, HostData]:
    """Return a run at its next step, the step of the checkpoint that it goes on from, and its host data.

    Where the arrays of the newest checkpoint prove damaged an older one is taken. A new run starts from another run's
    parameters, under new adapters or not, or from random ones.

    Args:
      step, host: as `newest_checkpoint` returned them.
    """
    config, parent, host = choose_origin(opened, step, host)
    session, hosts, state = start_session(config, opened.hosts), opened.hosts, None
    opened.checkpoints.check_room(opened.config.train.steps, session.saved(session.abstract_state()))
    engine = build_engine(session)
    while step is not None and (state := resume(opened, step, host, session, engine)) is None:
        step, older = newest_checkpoint(opened, step)
        before, (config, parent, host) = config, choose_origin(opened, step, older)
        if config != before:  # the teacher has left between the two
            session = start_session(config, hosts)
        engine = build_engine(session)
    if step is None:
        abstract, homes, params = session.abstract_state()["params"], session.model.even_homes, None
        if host.base is not None:
            params = load_base(session.model, abstract, host.base, homes)
            say(hosts, f"adapting the parameters of {host.base.folder}, step {host.base.step}")
        elif init_from := opened.start.init_from:
            part, word = ("ema", "averaged parameters") if opened.start.init_from_ema else ("params", "parameters")
            other = Checkpointer(RunFolder(init_from, create=False).checkpoints)
            params = other.restore(parent, abstract, homes, part)
            say(hosts, f"starting from the {word} of {init_from}, step {parent}")
        state = session.fresh_state(params)
    say(hosts, banner(session, opened.folder, step))
    if step is not None:
        opened.checkpoints.set_aside(step)
    # the stepper alone holds the state: a step donates it
    return Stepper(session, state, engine, host.overflowed, host.run_again), step, host


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
    hosts.agree("tokenizer", session.feed.tokenizer.name, lambda first, other: f"{named} {other} on process {{index}}, "
        f"and {first} on process 0; give every machine the same file")  # fmt: skip
    text = f"{meta.tokens} tokens in {meta.documents} documents, hash {meta.content}"
    holds = f"DataConfig.path ({config.data.path!r}) holds"
    hosts.agree("corpus", text, lambda first, other: f"{holds} {first} on process 0 and {other} on process {{index}}; "
        "give every machine the same files, and change none while a job starts", RESTORE_SECONDS)  # fmt: skip
    return session


def resume(
    opened: OpenRun, step: int, host: HostData, session: Session, engine: RejitEngine | None = None
) -> dict | None:
    """Return the state of the checkpoint that a run goes on from; the engine goes on with its plan.

    None on every process where what is read proves damaged on one, which is named.
    """
    hosts, home, damage = opened.hosts, session.model.even_homes, ""
    if engine is not None:
        left_out = engine.restore(host.plan)
        if left_out is not None:
            say(hosts, left_out)
        home = engine.home
    try:
        state = opened.checkpoints.restore(step, session.saved(session.abstract_state()), home)
    except DamagedCheckpointError as error:
        damage = error.args[0]
    if damaged := [text for text in hosts.gather_text("damage", damage, RESTORE_SECONDS) if text]:
        say(hosts, f"{damaged[0]}; the one before it is taken")
        return None
    session.feed.stream.resume(host.data, opened.start.changed)
    if host.base is not None:
        under = load_base(session.model, session.abstract_state()["params"], host.base, home)
        state["params"] = joined(under, state["params"])
    say(hosts, f"resuming at step {step}")
    return state
