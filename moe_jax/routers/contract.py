"""The contract of a router, and what every router starts from.

A router says which experts each token goes to, and with what weight. It is built once, from its configuration, and
called on the tokens of one drop group, inside `shard_map` or outside:

    router.choose(x [t, M], params, inputs) -> (Choice, GateStats)

It moves no tokens. What it needs beside the tokens is in `params`, the leaves of the model's gate that it asked for,
and in `RouterInputs`. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from moe_jax.dispatch.route import Choice
from moe_jax.routers.config import RouterConfig
from moe_jax.routers.statistics import GateStats, balance_loss


@dataclasses.dataclass(frozen=True)
class RouterInputs:
    """What a choice may depend on beside the tokens and the parameters.

    Attributes:
      noise_key: PRNG key of this step and layer; None in evaluation, where nothing is drawn.
      token_ids: int32 [t], global index of each token; needed with a key.
      tables: this device's `Tables` of this layer, or None: where experts are, as planned ahead.
    """

    noise_key: jax.Array | None = None
    token_ids: jax.Array | None = None
    tables: Any = None


class Router(Protocol):
    """See the docstring of this file."""

    config: RouterConfig
    draws: bool
    """Whether training takes a key."""

    def choose(self, x: jax.Array, params: dict, inputs: RouterInputs) -> tuple[Choice, GateStats]:
        """Return what the tokens x [t, M] of one drop group choose, and their statistics.

        Args:
          params: {'w_gate': [M, E]} and what else the router asked for.
        """
        ...

    def balance_loss(self, stats: GateStats, tokens: int) -> jax.Array:
        """Return the load-balancing loss [...] of statistics [..., E] that were summed over all `tokens` tokens."""
        ...


class RouterBase:
    """Hold the configuration; balance by the loss of Switch Transformers.

    Attributes:
      config: as bound.
    """

    def __init__(self, config: RouterConfig):
        """Keep the configuration.

        Raises:
          UserError: a configuration that this router cannot serve.
        """
        self.config = config

    @property
    def draws(self) -> bool:
        return self.config.gate_noise > 0

    def balance_loss(self, stats, tokens):
        return balance_loss(stats.counts, stats.probability, tokens, self.config.top_k)
