"""One run's whole configuration as one record, as text, and as a difference between two texts. Host side, no gin."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import fnmatch
import os
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_jax.config.train_config import DistillationConfig, TrainConfig
from moe_jax.data.corpus import DataConfig
from moe_jax.errors import UserError
from moe_jax.models.config import LoraConfig, ModelConfig
from moe_jax.moe.config import MoEConfig
from moe_jax.parallel.mesh import MeshConfig
from moe_jax.planning.config import PlannerConfig
from moe_jax.registry import OPTIONS, PLANNERS, options_in, replaced

CONFIG_CLASSES: dict[str, type] = {
    "train": TrainConfig,
    "DataConfig": DataConfig,
    "ModelConfig": ModelConfig,
    "MoEConfig": MoEConfig,
    "MeshConfig": MeshConfig,
    "PlannerConfig": PlannerConfig,
    "DistillationConfig": DistillationConfig,
    "LoraConfig": LoraConfig,
}

# Bindings under which a started run may go on: where and how it computes, how long, and what it writes down. That it is
# the same teacher, whatever its path, is checked besides (`training/frozen_models.py`).
MAY_DIFFER = [
    f"{name}.{field}"
    for name, fields in (
        ("MeshConfig", "*"),
        ("PlannerConfig", "*"),
        ("DataConfig", "cache_dir"),
        ("MoEConfig", "schedule transport pairwise_groups gather cluster grouped_matmul bucket_slack overflow_chance"),
        ("ModelConfig", "attention remat overlap prefetch refetch_replicas sequence_parallel stack loss_chunk"),
        ("DistillationConfig", "teacher teacher_step"),
        ("train", "steps decay_steps max_skipped_steps guide_scheduler optimistic deterministic zero_stage"),
        ("train", "expert_zero_stage checkpoint_every keep_checkpoints evaluate_every evaluate_windows loads_every"),
        ("train", "log_every profile_steps"),
    )
    for field in fields.split()
]
# Bindings that --override may change besides, at a resume: the optimizer's state goes on.
OVERRIDABLE = [
    f"{name}.{field}"
    for name, fields in (
        ("train", "learning_rate learning_rate_schedule warmup_steps final_learning_rate"),
        ("train", "batch_size grad_accum_steps weight_decay clip_norm"),
        ("DataConfig", "path field weights"),
    )
    for field in fields.split()
]
# What runs that were begun before a field was there did, where that is not its default.
BEFORE = {"DataConfig.add_special_tokens": "False"}
# Bindings that are gone: (the default that they had, what serves instead). Files that runs wrote down have them all.
REMOVED = {
    "train.copy_every": ("0", "set train.checkpoint_every lower: checkpoints are written beside the steps"),
    "MoEConfig.expert_dtype": ("'compute'", "experts multiply in ModelConfig.dtype; MoEConfig.dispatch_dtype stays"),
    "train.decay_shape": ("'linear'", "leave it out: 'wsd' decays in a line"),
    "ModelConfig.experts_per_layer": (
        "()",
        "set ModelConfig.segments, such as ('layers=4 num_experts=8', 'layers=4 num_experts=16')",
    ),
    "ModelConfig.mask_rate": ("0.15", "leave it out: 0.15 of the tokens are masked, as by BERT"),
    "ModelConfig.prefetch_case": ("'split'", "leave it out: 'pro_prophet' fills attention first, then the experts"),
    "MoEConfig.topology_release": ("False", "leave it out: only Topology.remote_fraction of the tokens leave a node"),
    "PlannerConfig.headroom": ("2.0", "leave it out: 'balanced' has two replicas a device after the gate"),
    "PlannerConfig.residual": ("True", "leave it out: 'fastermoe' counts the exchange that is left after shadowing"),
    "PlannerConfig.auto_steps": ("32", "leave it out: 'auto' judges after rounds of 32 steps"),
    "Auto.round_steps": ("32", "leave it out: 'auto' judges after rounds of 32 steps"),
    "PlannerConfig.auto_margin": ("0.01", "leave it out: 'auto' changes for a hundredth of a step"),
    "PlannerConfig.decay": ("0.5", "it was of 'exponential': take PlannerConfig.predictor = 'window'"),
    "PlannerConfig.swap_seconds": ("0.0", "leave it out: a new shape compiles beside the steps and costs none"),
    "PlannerConfig.bucket_limit": ("4.0", "leave it out: planned buckets have at most four times their mean rows"),
    "PlannerConfig.executables": ("4", "leave it out: four compiled steps are kept"),
    "PlannerConfig.horizon": ("100", "leave it out: under 'flexmoe' a gain must pay for moved state within 100 steps"),
    "train.min_dim_size_to_factor": ("128", "it was of 'adafactor': take train.optimizer = 'adamw' or 'muon'"),
}
# Bindings that have another name; files that runs wrote down are read as if they had it.
RENAMED = {
    f"{before}.{field}": f"{now}.{field}"
    for before, now, fields in (
        ("MoEConfig", "SigmoidBias", "bias_rate"),
        ("MoEConfig", "Topology", "remote_fraction"),
        ("PlannerConfig", "Eplb", "groups"),
        ("PlannerConfig", "Hecate", "overlap_degree materialize shard_every calibrate late_slots"),
        ("PlannerConfig", "Llep", "capacity least_chunk uneven_from"),
        ("PlannerConfig", "ProProphet", "skipped_devices balance_threshold scheduler"),
        ("PlannerConfig", "TopKAll", "top_k"),
    )
    for field in fields.split()
}
ABSENT = "(absent)"
BOUND = "  # set"  # behind a value that a gin file or a binding set; the others are defaults


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a command line chooses about a run; gin binds `train` so, the others by their class names."""

    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    moe: MoEConfig = dataclasses.field(default_factory=MoEConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    planner: PlannerConfig = dataclasses.field(default_factory=PlannerConfig)
    distillation: DistillationConfig = dataclasses.field(default_factory=DistillationConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)

    def __post_init__(self):
        if self.planner.name not in ("auto", "none"):  # the one reads all, and without planning nothing is read
            PLANNERS.check_read(self.planner.options, [self.planner.name])
        experts = self.moe.num_experts
        if (total := sum(run["layers"] * run.get("num_experts", experts) for run in self.model.runs)) > 2**24:
            raise UserError(
                f"ModelConfig.layers ({self.model.layers}) with MoEConfig.num_experts ({experts}), or as its segments "
                f"say, make {total} experts, which must be at most {2**24}; lower one of the two"
            )
        if self.lora.rank and self.train.ema_decay:
            raise UserError(
                f"train.ema_decay ({self.train.ema_decay}) keeps an average of a whole model, and LoraConfig.rank "
                f"({self.lora.rank}) trains adapters alone; set one of them to 0"
            )
        if self.moe.schedule == "auto" and self.planner.name != "auto":
            raise UserError(
                f"MoEConfig.schedule = 'auto' is chosen by PlannerConfig.name = 'auto', not {self.planner.name!r}; set "
                "that, or a schedule by name"
            )

    def by_name(self) -> dict[str, Any]:
        """Return the configs, and the options of every router, schedule and planner, by the names that gin binds."""
        parts = (getattr(self, field.name) for field in dataclasses.fields(self))
        found = dict(zip(CONFIG_CLASSES, parts, strict=True))
        return found | {name: options_in(found[holder], own) for name, (holder, own) in sorted(OPTIONS.items())}


def bindable() -> dict[str, dict[str, Any]]:
    """Return {name: {field: type}} of what can be bound, plugins' options among it."""
    classes = CONFIG_CLASSES | {name: type(own) for name, (_, own) in sorted(OPTIONS.items())}
    hints = {name: typing.get_type_hints(cls) for name, cls in classes.items()}
    return {
        name: {field.name: hints[name][field.name] for field in dataclasses.fields(cls) if field.name != "options"}
        for name, cls in classes.items()
    }


def with_bindings(config: RunConfig, setting: Mapping[str, Any]) -> RunConfig:
    """Return a run with these values, {'train.steps': 5, ...}; a UserError where they do not fit together."""
    now, fields = config.by_name(), [field.name for field in dataclasses.fields(config)]
    parts: dict[str, dict] = {name: {} for name in now}
    for binding, value in setting.items():
        name, field = binding.split(".")
        parts[name][field] = value
    for name, (holder, _) in OPTIONS.items():
        if parts[name]:
            options = parts[holder].get("options", now[holder].options)
            parts[holder]["options"] = replaced(options, dataclasses.replace(now[name], **parts[name]))
    changed = {
        field: dataclasses.replace(now[name], **parts[name])
        for field, name in zip(fields, CONFIG_CLASSES, strict=True)
        if parts[name]
    }
    return dataclasses.replace(config, **changed)


def config_text(run: RunConfig, bound: Collection[str] = ()) -> str:
    """Return every field of a run as sorted lines `Name.field = value`, which gin can read again.

    Args:
      bound: the bindings `Name.field` that the user set; their lines end in `BOUND`, the others are defaults.
    """
    lines = []
    configs = run.by_name()
    for name, fields in bindable().items():
        for field in fields:
            mark = BOUND if f"{name}.{field}" in bound else ""
            lines.append(f"{name}.{field} = {getattr(configs[name], field)!r}{mark}")
    return "\n".join(sorted(lines)) + "\n"


def bound_in(text: str) -> set[str]:
    """Return the bindings that a config text marks as set."""
    return {line.partition(" = ")[0] for line in text.splitlines() if line.endswith(BOUND)}


def config_differences(old_text: str, new_text: str) -> list[tuple[str, str, str]]:
    """Return (binding, old value, new value) for each binding in which two config texts differ, sorted.

    A field that one text lacks counts there at today's default, or as `BEFORE` says of a run's text, so that a run can
    be resumed after a field was added; a binding that no config has any more is `ABSENT` on the other side. Values are
    returned as written.

    Raises:
      UserError: a line that is not `Name.field = value`.
    """
    old, new, defaults = _values(old_text), _values(new_text), _values(config_text(RunConfig()))
    old = {binding: value for binding, value in old.items() if binding not in REMOVED}
    differences = []
    older = defaults | {binding: value for binding, value in BEFORE.items() if old and binding in new}
    for binding in sorted(old.keys() | new.keys()):
        before = old.get(binding, older.get(binding, ABSENT))
        after = new.get(binding, defaults.get(binding, ABSENT))
        if _meaning(before) != _meaning(after):
            differences.append((binding, before, after))
    return differences


def bindings_as_begun(workdir: str | Path) -> list[str]:
    """Return the bindings of `BEFORE` that the config of an older run's folder lacks; that has a run.json."""
    folder = Path(workdir).expanduser()
    config = folder / "config.gin"
    if not (workdir and (folder / "run.json").is_file() and os.access(config, os.R_OK) and config.is_file()):
        return []
    text = config.read_text(encoding="utf-8", errors="replace")
    return [f"{binding} = {value}" for binding, value in BEFORE.items() if binding not in text]


def overridden(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the bindings that lines of --override set; a UserError for one that a run cannot change."""
    names = tuple(line.partition("=")[0].strip() for line in lines)
    for line, name in zip(lines, names, strict=True):
        if name not in OVERRIDABLE:
            near = "".join(f"; did you mean {own}?" for own in difflib.get_close_matches(name, OVERRIDABLE, n=1))
            raise UserError(
                f"--override={line!r} cannot be{near}: a started run may change {', '.join(OVERRIDABLE)}, and by "
                "--gin_bindings train.steps, mesh, schedule, planner and what is written down"
            )
    return names


def check_resumable(old_text: str, new_text: str, workdir: str = "", changed: Collection[str] = ()) -> None:
    """Raise UserError where a started run may not go on; it names each binding that differs with both values.

    Args:
      old_text: config text of the folder or checkpoint.
      new_text: config text of this command.
      workdir: the run folder as the user named it, for the message.
      changed: bindings that were changed on purpose.
    """
    kept, planners = [], {f"{name}.*" for name, (holder, _) in OPTIONS.items() if holder == "PlannerConfig"}
    for name, old, new in config_differences(old_text, new_text):
        may_differ = any(fnmatch.fnmatchcase(name, pattern) for pattern in (*MAY_DIFFER, *planners))
        if not may_differ and name not in changed:
            kept.append(f"{name} was {old} and is {new} now")
    if not kept:
        return
    raise UserError(
        f"{workdir or 'the work folder'} holds a run with another config: {'; '.join(kept)}. To resume or evaluate it, "
        f"set these back (--gin_file={workdir or 'DIR'}/config.gin does); change rates, batch size or text on purpose "
        "with --override; else name another --workdir, or start a new run from its parameters with "
        f"--init_from={workdir or 'DIR'}. Mesh, schedule, planner, step count, how it is compiled and what is written "
        "down may differ"
    )


def _values(text: str) -> dict[str, str]:
    """Return {binding: value as written} of a config text."""
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        binding, equals, value = line.strip().removesuffix(BOUND).partition(" = ")
        if not line.strip() or line.strip().startswith("#"):
            continue
        if not equals or "." not in binding:
            raise UserError(
                f"config text, line {number}: {line.strip()!r} is not a line 'Name.field = value'; restore the file"
            )
        if binding in RENAMED and value == "None":
            continue  # left to the default, which is a value now
        values[RENAMED.get(binding, binding)] = value
    return values


def _meaning(value: str):
    """Return a value so that 1 and 1.0 are equal, 1 and True are not, and what is no literal stands for itself."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    return ("bool", read) if isinstance(read, bool) else read
