"""Everything a run is built from, before its first step: mesh, model, layout, data, compiled steps.

Enters: a RunConfig and the devices. Leaves: a `Session`. Building it allocates nothing on the devices; `start` does.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np
import optax

from moe_jax.after_gate import Rule
from moe_jax.data import build_cache, build_tokenizer
from moe_jax.dispatch import Tables, even_tables
from moe_jax.mesh import Roles, build_mesh
from moe_jax.models import LanguageModel, Layout
from moe_jax.placement import Skeleton
from moe_jax.run_config import RunConfig
from moe_jax.training.feed import Feed, padded_vocabulary, to_devices
from moe_jax.training.optimizer import build_optimizer
from moe_jax.training.plan import layer_plan, table_shapes
from moe_jax.training.step import (
    Placing,
    abstract_state,
    init_state,
    make_evaluation_step,
    make_train_step,
    place,
    state_of_params,
)


@dataclasses.dataclass(frozen=True)
class Session:
    """The parts of a run that do not change while it trains.

    Attributes:
      config: as bound.
      roles, model, layout, optimizer, placing: see their classes.
      feed: batches.
      home: int32 [L, E], home device of every expert.
      tables: the plan's tables, on the devices.
    """

    config: RunConfig
    roles: Roles
    model: LanguageModel
    layout: Layout
    optimizer: optax.GradientTransformation
    placing: Placing
    feed: Feed
    home: np.ndarray
    tables: Tables

    @property
    def devices(self) -> int:
        """D, devices of one expert-parallel group."""
        return self.roles.size(self.roles.expert)

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.data.sequence_length

    def abstract_state(self) -> dict:
        """Return the training state as ShapeDtypeStructs with shardings."""
        return abstract_state(self.model, self.optimizer, self.placing)

    def fresh_state(self) -> dict:
        """Return the state of step 0."""
        return init_state(self.model, self.optimizer, self.placing, self.config.train.seed)

    def state_from(self, params) -> dict:
        """Return the state of step 0 that starts from given parameters."""
        return state_of_params(params, self.optimizer, self.placing)

    def compile_train_step(self, skeleton: Skeleton | None = None, rule: Rule | None = None):
        """Return (executable, seconds): the training step for exactly these shapes and shardings.

        Args:
          skeleton: of the plans whose tables will come; None is even homes for good, without a planner.
          rule: what the step decides after the gate.
        """
        started = time.monotonic()
        step = make_train_step(
            self.model, self.layout, self.config.train, self.placing, self.config.data.sequence_length,
            None if skeleton is None else layer_plan(skeleton, self.roles.expert, rule),
        )  # fmt: skip
        tables, wishes = self.tables, (self.roles.num_devices,)
        if skeleton is not None:
            tables = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.placing.tables), table_shapes(skeleton)
            )
            wishes += (3,)
        batch = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), self.feed.read(0), self.placing.batch
        )
        wishes = jax.ShapeDtypeStruct(wishes, np.int32, sharding=self.placing.wishes)
        executable = step.lower(self.abstract_state(), batch, tables, wishes).compile()
        return executable, time.monotonic() - started

    def evaluation_step(self, skeleton: Skeleton | None = None):
        """Return the evaluation step; it compiles when first called."""
        return make_evaluation_step(
            self.model, self.layout, self.config.train, self.placing, self.config.data.sequence_length,
            None if skeleton is None else layer_plan(skeleton, self.roles.expert),
        )  # fmt: skip

    def wishes(self, flag: int):
        """Return this process' wish to stop, as the step's input."""
        return to_devices(np.full((self.roles.num_devices,), flag, np.int32), self.placing.wishes)


def build_session(config: RunConfig, devices) -> Session:
    """Build a run on the given devices.

    Raises:
      UserError: whatever in the config does not fit together, fit the devices, or fit the data.
    """
    roles = build_mesh(config.mesh, devices)
    tokenizer = build_tokenizer(config.data)
    vocab_size = padded_vocabulary(tokenizer, config.model)
    model = LanguageModel(
        config=config.model,
        moe=config.moe,
        vocab_size=vocab_size,
        roles=roles,
        zero_stage=config.train.zero_stage,
        expert_zero_stage=config.train.expert_zero_stage,
    )
    layout = model.layout()
    optimizer = build_optimizer(config.train)
    placing = place(model, layout, optimizer)
    # the step is built once here for its checks, before any data is read
    make_train_step(model, layout, config.train, placing, config.data.sequence_length)
    cache = build_cache(config.data, tokenizer, vocab_size=vocab_size)
    feed = Feed(cache, tokenizer, config.train, config.model, config.data.sequence_length)
    layers, experts, group = config.model.moe_layers, config.moe.num_experts, roles.size(roles.expert)
    tables = even_tables(layers, experts, group)
    return Session(
        config=config,
        roles=roles,
        model=model,
        layout=layout,
        optimizer=optimizer,
        placing=placing,
        feed=feed,
        home=np.repeat(np.arange(group, dtype=np.int32), experts // group)[None].repeat(layers, axis=0),
        tables=to_devices(tables, placing.tables),
    )
