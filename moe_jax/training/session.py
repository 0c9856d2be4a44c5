"""Everything a run is built from, before its first step: its program, data and the first tables.

Inputs: a RunConfig and the devices. Outputs: a `Session`. Building it allocates nothing on the devices but the tables
of the first plan; `fresh_state` does.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_jax.config.run_config import RunConfig
from moe_jax.data import build_cache, build_tokenizer
from moe_jax.dispatch import Tables
from moe_jax.mesh.global_arrays import to_devices
from moe_jax.placement import PlanShape
from moe_jax.training.feed import Feed
from moe_jax.training.program import Program, build_program
from moe_jax.training.shared_program import SharedFunction
from moe_jax.training.step import init_state, make_evaluation_step, of_each_table, state_of_params


@dataclasses.dataclass(frozen=True)
class Session(Program):
    """The parts of a run that do not change while it trains.

    Attributes:
      feed: batches.
      tables: the plan's tables, on the devices; of several segments with experts {segment: that}.
    """

    feed: Feed
    tables: Tables | dict[str, Tables]

    def fresh_state(self) -> dict:
        """Return the state of step 0."""
        return init_state(self.model, self.optimizer, self.state_shardings, self.config.train.seed)

    def state_from(self, params) -> dict:
        """Return the state of step 0 that starts from given parameters."""
        return state_of_params(params, self.optimizer, self.state_shardings)

    def evaluation_step(self, shape: PlanShape | dict[str, PlanShape] | None = None):
        """Return the evaluation step; it compiles when first called."""
        step = make_evaluation_step(
            self.model, self.layout, self.config.train, self.state_shardings, self.config.data.sequence_length,
            shape,
        )  # fmt: skip
        options, devices = self.compiler_options(), list(self.roles.mesh.devices.flat)
        return SharedFunction(step, options, devices) if options else step

    def host_signals(self, flag: int):
        """Return this process' request to stop, 1 or 0, as the step's input."""
        return to_devices(np.full((self.roles.num_devices,), flag, np.int32), self.state_shardings.host_signals)


def build_session(config: RunConfig, devices) -> Session:
    """Build a run on the given devices.

    Raises:
      UserError: whatever in the config does not fit together, fit the devices, or fit the data.
    """
    tokenizer = build_tokenizer(config.data)
    program = build_program(config, devices, tokenizer)
    tables = program.even_tables()
    cache = build_cache(config.data, tokenizer, vocab_size=program.model.vocab_size)
    parts = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
    return Session(
        **parts,
        feed=Feed(
            cache, tokenizer, config.train, config.model, config.data.sequence_length, program.state_shardings.batch
        ),
        tables=to_devices(tables, of_each_table(program.state_shardings.tables, tables)),
    )
