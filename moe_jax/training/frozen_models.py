"""The frozen models of a run: the teacher of a student, and the base under adapters.

Inputs: a `RunConfig` whose `DistillationConfig.teacher` names a run folder, or which has a `LoraConfig.rank`, whose
base --init_from names, or a checkpoint remembers. Outputs: the model that teaches; a frozen model's parameters, checked
and put on the run's mesh; and its identity, which the run's checkpoints hold instead of its weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import jax

from moe_jax.config.run_config import RunConfig
from moe_jax.config.train_config import DistillationConfig
from moe_jax.data.tokenizer import Tokenizer, build_tokenizer
from moe_jax.errors import UserError
from moe_jax.jobs.hosts import Hosts
from moe_jax.models import LanguageModel
from moe_jax.models.attention import resolve_attention
from moe_jax.models.config import expert_counts
from moe_jax.models.lora import base_of, joined
from moe_jax.models.model_group import make_model_group
from moe_jax.moe.build import make_schedule
from moe_jax.parallel.mesh import Roles, mesh_axes, replace_leaf
from moe_jax.replan.segments import build_model
from moe_jax.storage.bank_order import Homes
from moe_jax.storage.checkpoint import Checkpointer, HostData, ModelIdentity, run_config
from moe_jax.storage.run_folder import RunFolder
from moe_jax.training.feed import padded_vocabulary

_OF_ADAPTERS = ("the model that these adapters are for", "put it back, or give its folder with --init_from")
_HASHING_SECONDS = 1800.0  # that the others wait while process 0 reads a model: about a GB a second


@contextlib.contextmanager
def _named(what: DistillationConfig | str) -> Iterator[None]:
    """Let an error say that it is the teacher's, or of another model that is named."""
    try:
        yield
    except UserError as error:
        name = what if isinstance(what, str) else f"DistillationConfig.teacher ({what.teacher!r})"
        raise UserError(f"{name}: {error}") from error


def open_teacher(config: DistillationConfig) -> tuple[RunConfig, Checkpointer, int]:
    """Return a teacher's config, its checkpoints, and the step of the one that teaches; UserError without one."""
    with _named(config):
        run = run_config(config.teacher)
        checkpoints = Checkpointer(RunFolder(config.teacher, create=False).checkpoints)
        return run, checkpoints, checkpoints.choose(config.teacher_step, "set DistillationConfig.teacher_step to one")


def mesh_experts(config: RunConfig, devices: int) -> tuple[int, ...]:
    """Return E of each segment with experts that the mesh of so many devices is to hold, a teacher's among them.

    Raises:
      UserError: a mesh of another size, or groups of the teacher that cut across the student's.
    """
    mesh, counts = config.mesh.resolve(devices), expert_counts(config.model, config.moe)
    if not config.distillation.teacher:
        return counts
    mesh_axes(mesh, devices, counts)  # what does not fit without the teacher is not the teacher's error
    run, *_ = open_teacher(config.distillation)
    with _named(config.distillation):
        counts += expert_counts(run.model, run.moe)
        mesh_axes(mesh, devices, counts)
    return counts


def teacher_model(
    config: RunConfig, roles: Roles, tokenizer: Tokenizer, vocab_size: int, device
) -> LanguageModel | None:
    """Return the teacher on the student's mesh, None where `config` names none; no array is made.

    Args:
      config, roles, tokenizer, vocab_size: of the student; its mesh may be an abstract one.
      device: one of the mesh, or of those that a described topology has; None for CPU devices.

    Raises:
      UserError: no such teacher, or one that this student cannot learn from.
    """
    if not config.distillation.teacher:
        return None
    run, *_ = open_teacher(config.distillation)
    if config.planner.replica_slots == "memory":
        raise UserError(
            f"PlannerConfig.replica_slots ('memory') does not count DistillationConfig.teacher "
            f"({config.distillation.teacher!r}), which needs memory too; set it to a number"
        )
    with _named(config.distillation):
        if run.lora.rank:
            raise UserError("it holds adapters alone; name a whole model, such as moe_jax.convert makes of both")
        _check_pair(config, run, tokenizer, vocab_size)
        # It computes as its own config says (dtype, schedule, ZeRO stages, ...), on the student's mesh, with the
        # student's transport and its grouped matmul, which may be compared before the first step; always without a
        # planner, noise, or anything saved for a backward.
        model = dataclasses.replace(run.model, remat="none", prefetch="none", overlap="none", refetch_replicas=False)
        moe = dataclasses.replace(run.moe, transport=config.moe.transport, grouped_matmul=config.moe.grouped_matmul)
        run = dataclasses.replace(run, model=resolve_attention(model, device), moe=moe)
        built = dataclasses.replace(build_model(run, roles, vocab_size), alpha=config.distillation.alpha)
        rows, length = config.train.microbatch_size, config.data.sequence_length
        tokens = make_model_group(model, roles, rows, length).rows * length
        for segment in built.expert_segments:
            x = jax.ShapeDtypeStruct((tokens, model.model_dim), model.dtype)
            make_schedule(segment.moe, segment.roles(built.roles), x, split_tokens=model.sequence_parallel)
        return built


def _check_pair(config: RunConfig, teacher: RunConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise a UserError where a student, of a tokenizer and V, cannot learn from a teacher, whatever the mesh."""
    other = build_tokenizer(teacher.data)
    size = padded_vocabulary(other, teacher.model)
    if (other.name, size) != (tokenizer.name, vocab_size):
        raise UserError(
            f"its vocabulary has {size} entries of the tokenizer {other.name!r}, and this run's {vocab_size} of "
            f"{tokenizer.name!r}; set DataConfig.tokenizer ({config.data.tokenizer!r}) and ModelConfig.vocab_size "
            f"({config.model.vocab_size}) as the teacher has them"
        )
    for field in ("kind", "param_dtype", "document_mask"):
        mine, its = getattr(config.model, field), getattr(teacher.model, field)
        if mine != its:
            binding = "dtype" if field == "param_dtype" else field
            raise UserError(
                f"its ModelConfig.{binding} is {getattr(teacher.model, binding)!r}, and this run's "
                f"{getattr(config.model, binding)!r}, with which it cannot be compared; set them alike"
            )
    length = config.data.sequence_length
    if teacher.model.positions == "learned" and length > teacher.model.max_length:
        raise UserError(
            f"it has learned {teacher.model.max_length} positions, and DataConfig.sequence_length is {length}; lower "
            "that, or train a teacher with ModelConfig.positions = 'rotary'"
        )


def settle_teacher(
    config: RunConfig, step: int | None, before: ModelIdentity | None, hosts: Hosts
) -> tuple[RunConfig, ModelIdentity | None]:
    """Return the config to train with from a step on, and the teacher's identity for the checkpoints.

    Past `DistillationConfig.until` the config names no teacher any more, and its folder need not be there.

    Args:
      step: how many steps are finished, None for a new run.
      before: the teacher as the checkpoint of that step names it.

    Raises:
      UserError: the run would go on with another teacher, without the one it had, or with one that it did not have.
    """
    named, bare = config.distillation, dataclasses.replace(config, distillation=DistillationConfig())
    if not named.teacher:
        if before is not None:
            raise UserError(
                f"DistillationConfig.teacher ('') was {before.folder!r} at step {step}; set it back, or start a new "
                "run from this one's parameters with --init_from"
            )
        return config, None
    if step is not None and before is None:
        raise UserError(
            f"DistillationConfig.teacher ({named.teacher!r}) was '' when this run wrote step {step}; set it to '', or "
            "start a new run from this one's parameters with --init_from"
        )
    taught = config if named.applies(step or 0) else bare
    if before is not None and taught is bare and before.folder == named.teacher:
        return bare, before
    _, checkpoints, at = open_teacher(named)
    with _named(named):
        identity = _identify("teacher", named.teacher, checkpoints, at, hosts)
    if before is not None:
        remedy = "set DistillationConfig.teacher and DistillationConfig.teacher_step back"
        _check_same(before, identity, "the teacher of this run so far", remedy)
    return taught, identity


def _identify(what: str, folder: str, checkpoints: Checkpointer, step: int, hosts: Hosts) -> ModelIdentity:
    """Return the identity of a frozen model, which all processes must find in one folder; process 0 hashes for all."""
    hosts.agree(what, f"{folder}, step {step}", lambda *_: f"{folder} is not the same run on all processes; name one "
        "folder that all machines share")  # fmt: skip
    parameters = checkpoints.digest(step) if hosts.is_main else ""
    parameters, *_ = hosts.gather_text(f"hash of {what}", parameters, _HASHING_SECONDS)
    return ModelIdentity(folder=folder, step=step, parameters=parameters)


def _check_same(before: ModelIdentity, now: ModelIdentity, what: str, remedy: str) -> None:
    """Raise a UserError where a frozen model is not that of the run so far; its folder may have moved."""
    if (now.step, now.parameters) != (before.step, before.parameters):
        shown = "step {0.step}, parameters {0.parameters:.8}"
        raise UserError(
            f"{now.folder} is not {what}: {shown.format(now)} now, {shown.format(before)} of {before.folder!r} before; "
            f"{remedy}"
        )


def load_teacher(teacher: LanguageModel, config: DistillationConfig) -> dict:
    """Return the teacher's parameters as a step takes them, on the devices; each holds its own part."""
    _, checkpoints, step = open_teacher(config)
    with _named(config):
        params = checkpoints.restore(step, teacher.placed_shapes(), teacher.even_homes, "params")

    def cast(leaf):
        if leaf.dtype == teacher.config.dtype:
            return leaf
        return replace_leaf(lambda leaf: leaf.astype(teacher.config.dtype), leaf, leaf.sharding)

    return {**params, "bank": jax.tree.map(cast, params["bank"])}


def settle_base(config: RunConfig, init_from: str, before: ModelIdentity | None, hosts: Hosts) -> ModelIdentity | None:
    """Return the identity of the model that a run adapts; None without LoRA.

    Args:
      init_from: run folder that the command names, or ''; it wins over the one that the checkpoint remembers.
      before: the base as the checkpoint names it that the run goes on from, None for a new run.

    Raises:
      UserError: no such folder, or not the model that the run adapted so far.
    """
    if not config.lora.rank:
        return None
    folder = os.path.abspath(os.path.expanduser(init_from)) if init_from else before.folder if before else ""
    if not folder:
        raise UserError(
            f"LoraConfig.rank ({config.lora.rank}) adapts a model that is there already; name its run folder with "
            "--init_from=DIR, or set LoraConfig.rank = 0"
        )
    checkpoints, step = _open_base(folder, before.step if before else None)
    identity = _identify("base", folder, checkpoints, step, hosts)
    if before is not None:
        _check_same(before, identity, *_OF_ADAPTERS)
    return identity


def _open_base(folder: str, step: int | None) -> tuple[Checkpointer, int]:
    """Return the checkpoints of a base and the step of the one that is meant, the newest for None.

    Raises:
      UserError: one of them is gone; it says what they are needed for.
    """
    with _named("the model under the adapters"):
        checkpoints = Checkpointer(RunFolder(folder, create=False).checkpoints)
        return checkpoints, checkpoints.choose(step, "put that one back, or resume the run with --init_from=DIR")


def checked_base(base: ModelIdentity) -> tuple[Checkpointer, int]:
    """Return the checkpoints of a base and its step; a UserError where it is not what adapters were trained on."""
    checkpoints, step = _open_base(base.folder, base.step)
    _check_same(base, dataclasses.replace(base, parameters=checkpoints.digest(step)), *_OF_ADAPTERS)
    return checkpoints, step


def load_base(model: LanguageModel, abstract_params: dict, base: ModelIdentity, home: Homes) -> dict:
    """Return the frozen parameters {'dense', 'bank'} on the devices, in the dtypes in which a run keeps them.

    Args:
      model: with adapters; abstract_params: its parameters as ShapeDtypeStructs with shardings.
      home: where the experts are to be stored.
    """
    checkpoints, step = _open_base(base.folder, base.step)
    stored = model.config.param_dtype
    return checkpoints.restore(step, base_of(abstract_params), home, "params", stored)


def restore_params(
    checkpoints: Checkpointer, step: int, model: LanguageModel, abstract_params: dict, home: Homes, part: str = "params"
) -> dict:
    """Return the parameters of a checkpoint; where it holds adapters, with the model under them, which is checked."""
    if not model.lora.rank:
        return checkpoints.restore(step, abstract_params, home, part)
    adapters = checkpoints.restore(step, model.trained(abstract_params), home, part)
    base = HostData.from_json(checkpoints.read_host(step)).base
    checked_base(base)
    return joined(load_base(model, abstract_params, base, home), adapters)
