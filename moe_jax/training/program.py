"""What a run computes: mesh, model, the training step as a program; and with its data, a session.

Inputs: a RunConfig and devices, which may be real ones or those of a described topology. Outputs: a `Program`, whose
training step can be lowered and compiled from shapes alone, with nothing read and nothing allocated on a device; or a
`Session`, which has the feed too, and the tables of the first plan on the devices.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe_jax.cluster.targets import Target
from moe_jax.config.command_line import COMPILING
from moe_jax.config.run_config import RunConfig
from moe_jax.data.cache import build_cache, check_vocabulary
from moe_jax.data.tokenizer import Tokenizer, build_tokenizer
from moe_jax.kernels.grouped import choose_implementation
from moe_jax.models import Batch, LanguageModel, make_loss
from moe_jax.models.attention import resolve_attention
from moe_jax.models.config import Segment
from moe_jax.models.language_model import has_later_passes
from moe_jax.models.lora import init_adapters, joined
from moe_jax.models.model_group import rows_of
from moe_jax.moe.build import check_router
from moe_jax.moe.routing import Tables
from moe_jax.parallel.mesh import Roles, build_mesh, to_devices
from moe_jax.planning.plan_shape import Shapes, table_shapes
from moe_jax.registry import ROUTERS
from moe_jax.replan.segments import build_model, group_tokens, stated_buckets
from moe_jax.training.compiling import compile_for_all, compiler_options, find_target
from moe_jax.training.feed import Feed, padded_vocabulary
from moe_jax.training.frozen_models import mesh_experts, teacher_model
from moe_jax.training.optimizer import build_optimizer
from moe_jax.training.step import StateShardings, abstract_state, build_state_shardings, first_state, make_train_step


@dataclasses.dataclass(frozen=True)
class Programs:
    """The executables of one step, for the plans of one shape."""

    common: Any  # (state, halted, *inputs) -> (state, metrics); None where steps are not optimistic
    complete: concurrent.futures.Future  # of (state, *inputs) -> (state, metrics), with the passes after an overflow
    seconds: float  # to compile what the step starts with: the common one, else the complete one


@dataclasses.dataclass(frozen=True)
class Program:
    """The parts of a run that its compiled step depends on."""

    config: RunConfig
    roles: Roles
    model: LanguageModel
    optimizer: optax.GradientTransformation
    state_shardings: StateShardings
    teacher: LanguageModel | None  # that the step learns from

    @property
    def devices(self) -> list:
        """The devices of the mesh, in order."""
        return list(self.roles.mesh.devices.flat)

    @property
    def rows(self) -> int:
        """Sequences of a microbatch, with those that only fill it up where devices cannot share it evenly."""
        group = rows_of(self.config.model, self.roles, self.config.train.microbatch_size)
        return group * self.roles.size(self.roles.dense)

    def resolved(self) -> dict[str, str | bool]:
        """Return what the bindings that depend on devices come to on these, under their names."""
        model = self.model.config
        multiplied = dict.fromkeys(map(self.grouped_matmul_of, self.model.expert_segments))
        return {
            "ModelConfig.attention": model.attention,
            "ModelConfig.overlap": model.overlap,
            "MoEConfig.grouped_matmul": ", ".join(multiplied),
            "train.optimistic": self.is_optimistic(),
            "train.guide_scheduler": self.guiding_target() is not None,
        }

    def grouped_matmul_of(self, segment: Segment) -> str:
        """Return the grouped matmul of a segment's experts on these devices; errors as of `choose_implementation`."""
        config, shards = segment.config, self.roles.size(self.roles.expert_shard)
        dims = config.model_dim, config.hidden_dim // shards
        return choose_implementation(segment.moe.grouped_matmul, self.devices[0], jnp.dtype(config.dtype), dims)

    def abstract_state(self) -> dict:
        """Return the training state as ShapeDtypeStructs with shardings."""
        return abstract_state(self.model, self.optimizer, self.state_shardings)

    def is_optimistic(self, shape: Shapes | None = None) -> bool:
        """Say whether steps with plans of this shape run the common program, and the complete one after an overflow."""
        if not self.config.train.optimistic:
            return False
        tokens = group_tokens(self.config, self.roles)
        taught = self.teacher is not None and has_later_passes(self.teacher, tokens)
        return taught or has_later_passes(self.model, tokens, shape)

    def trace_step(self, shape: Shapes | None = None, common: bool = False) -> jax.stages.Traced:
        """Return the equations of the training step, on any machine, for exactly these shapes and shardings.

        Args:
          shape: {segment: of the plans whose tables will come}; None is even homes for good, without a planner.
          common: those of the common program of optimistic steps, else of the complete one.
        """
        train, length = self.config.train, self.config.data.sequence_length
        step = make_train_step(self.model, train, self.state_shardings, length, shape, self.teacher, common)
        rows = (train.grad_accum_steps, self.rows, length)
        tokens, weights = (jax.ShapeDtypeStruct(rows, dtype) for dtype in (np.int32, self.config.model.param_dtype))
        documents = tokens if self.config.model.document_mask else None
        batch = Batch(tokens, tokens, weights, documents=documents, token_ids=tokens if self.model.padded else None)
        tables = self.model.even_tables() if shape is None else {name: table_shapes(own) for name, own in shape.items()}
        tables = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tables)
        signals = (self.roles.mesh.size,) if shape is None else (self.roles.mesh.size, 3)
        halted = (jax.ShapeDtypeStruct((), np.bool_),) if common else ()
        frozen = () if self.teacher is None else (self.teacher.placed_shapes(frozen=True),)
        host_signals = jax.ShapeDtypeStruct(signals, np.int32)
        return step.trace(self.abstract_state(), *halted, batch, tables, host_signals, *frozen)

    def compiler_options(self) -> dict[str, str]:
        """Return the options that the training step is compiled with on these devices."""
        train, (data, expert) = self.config.train, map(self.roles.size, (self.roles.data, self.roles.expert))
        at_once = train.expert_zero_stage > 1 and data > 1 and expert > 1
        state = () if self.devices[0].platform == "cpu" else jax.tree.leaves(self.abstract_state())
        held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in state)
        return compiler_options(self.devices[0], jax.process_count(), train.deterministic, at_once, held)

    def compared(self, function: Callable) -> Callable:
        """Return a jitted function as one that all processes compare, as `compile_for_all`, at its first call.

        Args:
          function: what jax.jit returned; all calls have the same shapes and shardings.
        """
        executable = None

        def call(*arguments):
            nonlocal executable
            if executable is None:
                executable = compile_for_all(function.lower(*arguments), self.compiler_options(), None)
            return executable(*arguments)

        return call if jax.process_count() > 1 else function

    def compile_step(self, shape: Shapes | None = None, common: bool = False):
        """Return (executable, seconds) of what `trace_step` traces."""
        started = time.monotonic()
        lowered = self.trace_step(shape, common).lower()
        guide = self.guiding_target()
        buckets = () if guide is None else stated_buckets(self.config, self.roles, shape)
        executable = compile_for_all(lowered, self.compiler_options(), guide, buckets)
        return executable, time.monotonic() - started

    def compile_programs(self, shape: Shapes | None = None) -> Programs:
        """Compile what a step with plans of this shape starts with.

        Of an optimistic step the complete program is compiled behind it, in a thread.
        """
        if not self.is_optimistic(shape):
            complete: concurrent.futures.Future = concurrent.futures.Future()
            executable, seconds = self.compile_step(shape)
            complete.set_result(executable)
            return Programs(None, complete, seconds)
        common, seconds = self.compile_step(shape, common=True)
        thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix=COMPILING)
        complete = thread.submit(lambda: self.compile_step(shape)[0])
        thread.shutdown(wait=False)
        return Programs(common, complete, seconds)

    def guiding_target(self) -> Target | None:
        """Return the target whose rates guide the compiler's scheduler, None where nothing does."""
        if not self.config.train.guide_scheduler:
            return None
        return find_target(self.devices, self.roles.config.devices_per_node)


def build_program(config: RunConfig, devices, tokenizer: Tokenizer | None = None) -> Program:
    """Build a run's program for the given devices.

    Args:
      tokenizer: of the run, if it has been built already.

    Raises:
      UserError: whatever in the config does not fit together, or fit the devices.
    """
    roles = build_mesh(config.mesh, devices, mesh_experts(config, len(devices)))
    tokenizer = tokenizer or build_tokenizer(config.data)
    vocab_size = padded_vocabulary(tokenizer, config.model)
    resolved = dataclasses.replace(config, model=resolve_attention(config.model, roles.mesh.devices.flat[0]))
    model = build_model(resolved, roles, vocab_size)
    optimizer = build_optimizer(config.train)
    state_shardings = build_state_shardings(model, optimizer, ema=config.train.ema_decay > 0)
    teacher = teacher_model(config, roles, tokenizer, vocab_size, roles.mesh.devices.flat[0])
    # the step is built once here for its checks
    length = config.data.sequence_length
    make_train_step(model, config.train, state_shardings, length, teacher=teacher)
    program = Program(config, roles, model, optimizer, state_shardings, teacher)
    tokens = group_tokens(config, roles)
    for segment in model.expert_segments:
        check_router(segment.moe, segment.roles(model.roles), tokens, length, config.planner)
        program.grouped_matmul_of(segment)  # for its check
    return program


@dataclasses.dataclass(frozen=True)
class Session(Program):
    """The parts of a run that do not change while it trains."""

    feed: Feed
    tables: dict[str, Tables]  # {segment: of even homes}, on the devices

    @property
    def lag(self) -> int:
        """How many steps after its dispatch a step's metrics are read; so many hide the host's work."""
        return 1 if self.devices[0].platform == "cpu" else 2

    def saved(self, state: dict) -> dict:
        """Return what a checkpoint holds of a state or of its description: all but what is frozen."""
        return {**state, "params": self.model.trained(state["params"])}

    def fresh_state(self, params=None) -> dict:
        """Return the state of step 0, from given parameters or from new ones; adapters are new ones always."""
        key = jax.random.key(self.config.train.seed)

        def make(start):  # traced: each device makes its own part
            made = self.model.init(start) if params is None else start
            if params is not None and self.model.lora.rank:
                made = joined(
                    start, init_adapters(self.model.lora, jax.random.fold_in(key, 1), start, self.model.even_placements)
                )
            return first_state(made, self.model, self.optimizer, self.state_shardings)

        # parameters that were read become the state's own: a base that fills half of a device is not there twice
        donated = () if params is None else 0
        maker = jax.jit(make, out_shardings=self.state_shardings.state, donate_argnums=donated)
        return maker(key if params is None else params)

    def evaluation_step(self, shape: Shapes | None = None):
        """Return evaluate(params, batch, tables) -> (float [], int32 []) for a batch [1, `rows`, Sq], jitted.

        The first is the sum of the losses of the targets that count, the second how many count: a process that holds
        only some of the rows cannot count them. Weights are 0 or 1.
        """
        model, length = self.model, self.config.data.sequence_length
        takes = all(ROUTERS[segment.moe.router].takes_padding for segment in model.expert_segments)
        model = dataclasses.replace(model, padded=self.feed.pads_held_out and takes)
        loss = make_loss(model, model.layout(), self.rows, length, plan=shape)

        def evaluate(params, batch, tables):
            _, stats = loss(params, jax.tree.map(lambda a: a[0], batch), tables, None, jnp.int32(0), jnp.float32(1))
            return stats.cross_entropy, jnp.sum(batch.weights.astype(jnp.int32))

        given = self.state_shardings
        shardings = (given.state["params"], given.batch, given.tables)
        evaluate = jax.jit(evaluate, in_shardings=shardings, out_shardings=given.replicated)
        return self.compared(evaluate)

    def host_signals(self, flag: int):
        """Return this process' request to stop, 1 or 0, as the step's input."""
        return to_devices(np.full((self.roles.mesh.size,), flag, np.int32), self.state_shardings.host_signals)


def build_session(config: RunConfig, devices) -> Session:
    """Build a run on the given devices.

    Raises:
      UserError: whatever in the config does not fit together, fit the devices, or fit the data.
    """
    tokenizer = build_tokenizer(config.data)
    program = build_program(config, devices, tokenizer)
    needed = tokenizer.vocab_size if config.model.kind == "bert" else tokenizer.least_size
    check_vocabulary(config.data, tokenizer, program.model.vocab_size, needed)
    cache = build_cache(config.data, tokenizer, vocab_size=program.model.vocab_size)
    shardings = program.state_shardings
    return Session(
        **{field.name: getattr(program, field.name) for field in dataclasses.fields(program)},
        feed=Feed(cache, tokenizer, config.train, config.model, config.data, program.rows, shardings.batch),
        tables=to_devices(program.model.even_tables(), shardings.tables),
    )
