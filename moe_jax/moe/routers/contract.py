"""The contract of a router, and what every router starts from.

A router says which experts each token goes to, and with what weight. It is built once, from its configuration, and
called on the tokens of one drop group, inside `shard_map` or outside:

    router.choose(x [t, M], params, inputs) -> (Choice, GateStats)

It moves no tokens. What it needs beside the tokens is in `params`, the leaves of the model's gate that it asked for,
and in `RouterInputs`. Letters: docs/notation.md.
"""

from __future__ import annotations

import dataclasses
import typing

import jax

from moe_jax.errors import UserError
from moe_jax.moe.routers.options import RouterOptions
from moe_jax.moe.routers.statistics import GateStats, balance_loss
from moe_jax.moe.routing import Choice
from moe_jax.parallel.mesh import Roles


@dataclasses.dataclass(frozen=True)
class RouterPlace:
    """Where a router runs.

    Attributes:
      roles: the mesh.
      slots: G, experts that one device may compute in a layer, by which `Tables` count.
      splits_tokens: whether each device of an MP group gates its own part of the group's tokens.
      decides_late: whether a plan may send tokens elsewhere than the tables say, after the gate.
      length: Sq, tokens of a sequence; 0 where that is not known.
    """

    roles: Roles
    slots: int
    splits_tokens: bool = True
    decides_late: bool = False
    length: int = 0

    def gated(self, tokens: int) -> int:
        """Return how many of an MP group's tokens this device gates."""
        return tokens // self.roles.size(self.roles.model) if self.splits_tokens else tokens


@dataclasses.dataclass(frozen=True)
class RouterInputs:
    """What a choice may depend on beside the tokens and the parameters.

    Attributes:
      noise_key: PRNG key of this step and layer; None in evaluation, where nothing is drawn.
      token_ids: int32 [t], global index of each token; needed with a key, and by `forced_balance`.
      tables: this device's `Tables` of this layer, or None: where experts are, as planned ahead.
      replay: int32 [t, K], experts that were chosen before, to be taken again, or None.
    """

    noise_key: jax.Array | None = None
    token_ids: jax.Array | None = None
    tables: typing.Any = None
    replay: jax.Array | None = None


class Router(typing.Protocol):
    """See the docstring of this file."""

    config: typing.Any
    state: typing.ClassVar[tuple[str, ...]]
    """Leaves that are no parameters: they have no gradient, and `next_state` says what becomes of them."""
    draws: bool
    """Whether training takes a key."""
    replays: typing.ClassVar[bool]
    """Whether it can take choices that were made before."""
    by_token: typing.ClassVar[bool]
    """Whether a token's choices depend on that token alone, where no capacity drops them."""

    def leaves(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of what this router keeps in the model's gate beside w_gate; all start at zero."""
        ...

    def choose(self, x: jax.Array, params: dict, inputs: RouterInputs) -> tuple[Choice, GateStats]:
        """Return what the tokens x [t, M] of one drop group choose, and their statistics.

        Args:
          params: {'w_gate': [M, E]} and the router's leaves.
        """
        ...

    def check_tokens(self, tokens: int) -> None:
        """Raise a UserError for a number of tokens of an MP group that this router cannot gate."""
        ...

    def most_crossing(self, tokens: int) -> int | None:
        """Return a bound on the choices of an MP group's `tokens` tokens that leave the node; None without one.

        It holds where homes are even and plans add nothing.
        """
        ...

    def balance_loss(self, stats: GateStats, tokens: int) -> jax.Array:
        """Return the load-balancing loss [...] of statistics [..., E] that were summed over all `tokens` tokens.

        Under `MoEConfig.balance_over` = 'step' counts are float, of the step's tokens as if they were as many.
        """
        ...

    def next_state(self, state: dict, counts: jax.Array) -> dict:
        """Return the leaves of `state` after an optimizer step; counts: int32 [..., E], choices of all its tokens."""
        ...


class RouterBase:
    """Hold the configuration; balance by the loss of Switch Transformers; keep no state.

    Attributes:
      config: as bound, its knobs among it; place: where it runs, None without a mesh.
      in_groups: whether the router can choose inside groups of experts (group_limited.py).
      ignores: options that routers have in common and this one does not read; a model none of whose routers reads one
        that is bound is refused (`check_knobs`).
      replays: whether the router can take choices that were made before.
      by_token: whether a token's choices depend on that token alone, where no capacity drops them; generation needs it.
      balances: the values of `MoEConfig.balance_over` under which its balance loss can be formed.
    """

    state: typing.ClassVar[tuple[str, ...]] = ()
    in_groups: typing.ClassVar[bool] = False
    ignores: typing.ClassVar[tuple[str, ...]] = ()
    replays: typing.ClassVar[bool] = False
    by_token: typing.ClassVar[bool] = True
    balances: typing.ClassVar[tuple[str, ...]] = ("batch",)

    def __init__(self, config: typing.Any, place: RouterPlace | None = None):
        """Keep both.

        Raises:
          UserError: a place in which this router cannot work.
        """
        self.config, self.place = config, place
        if config.router_dtype == "float64" and not jax.config.jax_enable_x64:
            raise UserError(
                "MoEConfig.router_dtype ('float64') needs ModelConfig.dtype = 'float64', which turns on 64 bits; set "
                "that, or MoEConfig.router_dtype = 'float32'"
            )

    @classmethod
    def check(cls, config: RouterOptions) -> None:
        """Raise a UserError for a configuration that this router cannot serve."""
        if config.expert_groups and not cls.in_groups:
            raise UserError(
                f"MoEConfig.expert_groups ({config.expert_groups}) works with the routers topk, group_limited and "
                f"sigmoid_bias, not with {config.router!r}; set it to 0"
            )
        if config.balance_over not in cls.balances:
            raise UserError(
                f"MoEConfig.balance_over ({config.balance_over!r}) does not go with MoEConfig.router = "
                f"{config.router!r}, which has a balance loss of its own or none; set it to 'batch'"
            )
        if config.record_choices and not cls.replays:
            raise UserError(
                f"MoEConfig.record_choices (True) needs a router whose choices can be replayed, and {config.router!r} "
                "is none; set it to False"
            )

    @property
    def draws(self) -> bool:
        return self.config.gate_noise > 0

    def leaves(self, model_dim):
        return {}

    def check_tokens(self, tokens):
        return None

    def most_crossing(self, tokens):
        return None

    def balance_loss(self, stats, tokens):
        if stats.sequence_balance is not None:
            return stats.sequence_balance / tokens
        return balance_loss(stats.counts, stats.probability, tokens, self.config.top_k)

    def next_state(self, state, counts):
        return state


def need_top_k(config: RouterOptions, top_k: int, why: str) -> None:
    """Raise a UserError unless `MoEConfig.top_k` is what the router takes."""
    if config.top_k != top_k:
        raise UserError(
            f"MoEConfig.top_k ({config.top_k}) must be {top_k} with MoEConfig.router = {config.router!r}, {why}"
        )
