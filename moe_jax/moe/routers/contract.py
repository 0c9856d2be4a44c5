"""The contract of a router, and what every router starts from.

A router says which experts each token goes to, and with what weight. It is built once, from its configuration, and
called on the tokens of one drop group, inside `shard_map` or outside:

    router.choose(x [t, M], params, inputs) -> (Choice, GateStats)

It moves no tokens. The package imports every file in its folder, so a new file is a new router
(docs/adding_a_router.md). Letters: docs/notation.md.
"""

from __future__ import annotations

import abc
import dataclasses
import types
import typing
from collections.abc import Mapping

import jax

from moe_jax.errors import UserError
from moe_jax.moe.config import MoEConfig
from moe_jax.moe.routers.statistics import GateStats, balance_loss
from moe_jax.moe.routing import Choice
from moe_jax.parallel.mesh import Roles
from moe_jax.registry import ROUTERS, options_in

register = ROUTERS.register

# index of a token behind the last one of its row, or in a row that fills a batch up
PADDING = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class RouterPlace:
    """Where a router runs.

    Attributes:
      roles: the mesh.
      slots: G, experts that one device may compute in a layer, by which `Tables` count.
      splits_tokens: whether each device of an MP group gates its own part of the group's tokens.
      redirects: whether a token may go, after the gate, to a device that is neither its own nor where tables send it.
      length: Sq, tokens of a sequence; 0 where that is not known.
    """

    roles: Roles
    slots: int
    splits_tokens: bool = True
    redirects: bool = False
    length: int = 0

    def gated(self, tokens: int) -> int:
        """Return how many of an MP group's tokens this device gates."""
        return tokens // self.roles.size(self.roles.model) if self.splits_tokens else tokens


@dataclasses.dataclass(frozen=True)
class RouterInputs:
    """What a choice may depend on besides the tokens and the parameters.

    Attributes:
      noise_key: PRNG key of this step and layer; None in evaluation, where nothing is drawn.
      token_ids: int32 [t], global index of each token among those that are no padding, or `PADDING`; needed with a key,
        and by `forced_balance`.
      tables: this device's `Tables` of this layer, or None: where experts are, as planned ahead.
      replay: int32 [t, K], experts that were chosen before, to be taken again, or None.
      padded: whether some tokens may be padding.
    """

    noise_key: jax.Array | None = None
    token_ids: jax.Array | None = None
    tables: typing.Any = None
    replay: jax.Array | None = None
    padded: bool = False

    @property
    def real(self) -> jax.Array | None:
        """bool [t]: False for padding, which goes to no expert and is not counted; None where nothing is padding."""
        return self.token_ids != PADDING if self.padded else None


class Router(abc.ABC):
    """Hold the configuration; balance by the loss of Switch Transformers; keep no state.

    Attributes:
      config: of the layer; place: where it runs, None without a mesh.
      options: what it alone reads, a frozen dataclass of its file: as configured, of the class their defaults.
      ignores: fields of `MoEConfig` that routers have in common and this one does not read.
      replays: whether the router can take choices that were made before.
      by_token: whether a token's choices depend on that token alone, where no capacity drops them; generation needs it.
      balances: the values of `MoEConfig.balance_over` under which its balance loss can be formed.
      takes_padding: whether it leaves out padding (`RouterInputs.real`) when it counts, draws and drops.
      takes: (the only `top_k` that it can have, why), or None.
      draws: whether training takes a key.
      keeps: {name: dims} of its leaves in the model's gate besides w_gate, such as {'w_noise': 'ME'}.
      state: leaves that are no parameters: they have no gradient, and `next_state` says what becomes of them.
    """

    options: typing.Any = None
    ignores: typing.ClassVar[tuple[str, ...]] = ()
    replays: typing.ClassVar[bool] = False
    by_token: typing.ClassVar[bool] = True
    balances: typing.ClassVar[tuple[str, ...]] = ("batch",)
    takes_padding: typing.ClassVar[bool] = False
    takes: typing.ClassVar[tuple[int, str] | None] = None
    keeps: typing.ClassVar[Mapping[str, str]] = types.MappingProxyType({})
    state: typing.ClassVar[tuple[str, ...]] = ()
    draws: bool = False

    def __init__(self, config: MoEConfig, place: RouterPlace | None = None):
        self.config, self.place, self.options = config, place, options_in(config, self.options)
        self.draws = self.draws or config.gate_noise > 0
        if config.router_dtype == "float64" and not jax.config.jax_enable_x64:
            raise UserError(
                "MoEConfig.router_dtype ('float64') needs ModelConfig.dtype = 'float64', which turns on 64 bits; set "
                "that, or MoEConfig.router_dtype = 'float32'"
            )

    @classmethod
    def check(cls, config: MoEConfig) -> None:
        """Raise a UserError for a configuration that this router cannot serve."""
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
        if cls.takes and config.top_k != cls.takes[0]:
            raise UserError(
                f"MoEConfig.top_k ({config.top_k}) must be {cls.takes[0]} with MoEConfig.router = {config.router!r}, "
                f"which {cls.takes[1]}"
            )

    @abc.abstractmethod
    def choose(self, x: jax.Array, params: dict, inputs: RouterInputs) -> tuple[Choice, GateStats]:
        """Return what the tokens x [t, M] of one drop group choose, and their statistics.

        Args:
          params: {'w_gate': [M, E]} and the router's leaves.
        """

    def leaves(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        """Return {name: shape} of what this router keeps in the model's gate besides w_gate; all start at zero."""
        sizes = {"M": model_dim, "E": self.config.num_experts}
        return {name: tuple(sizes[letter] for letter in dims) for name, dims in self.keeps.items()}

    def check_tokens(self, tokens: int) -> None:
        """Raise a UserError for a number of tokens of an MP group that this router cannot gate."""
        return None

    def most_crossing(self, tokens: int) -> int | None:
        """Return a bound on the choices of an MP group's `tokens` tokens that leave the node; None without one.

        It holds where homes are even and plans add nothing.
        """
        return None

    def balance_loss(self, stats: GateStats, tokens: int | jax.Array) -> jax.Array:
        """Return the load-balancing loss [...] of statistics [..., E] that were summed over all `tokens` tokens.

        Under `MoEConfig.balance_over` = 'step' counts are float, of the step's tokens as if they were as many.
        """
        if stats.sequence_balance is not None:
            return stats.sequence_balance / tokens
        return balance_loss(stats.counts, stats.probability, tokens, self.config.top_k)

    def next_state(self, state: dict, counts: jax.Array) -> dict:
        """Return the leaves of `state` after an optimizer step; counts: int32 [..., E], choices of all its tokens."""
        return state


def build_router(config: MoEConfig, place: RouterPlace | None = None) -> Router:
    """Return the router that `MoEConfig.router` names, or raise a UserError for a place in which it cannot work."""
    return ROUTERS.find(config.router)(config, place)


def check_read(config: MoEConfig, used: set[str]) -> None:
    """Raise a UserError for what is bound of routing and none of the model's routers `used` reads."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default and all(field.name in ROUTERS[name].ignores for name in used):
            raise UserError(
                f"MoEConfig.{field.name} ({value!r}) is not read by MoEConfig.router = "
                f"{' or '.join(map(repr, sorted(used)))}; leave it at {field.default!r}, or choose another router"
            )
    ROUTERS.check_read(config.options, used)


def choose_experts(x, w_gate, config: MoEConfig, *, noise_key=None, token_ids=None):
    """Score all experts and choose those of each token, by a router that needs no more than a gate weight.

    Args:
      x: [t, M] tokens, one drop group; w_gate: [M, E].
      noise_key: PRNG key of this step and layer, or None for no noise (evaluation).
      token_ids: int32 [t], global index of each token; needed with a key.

    Returns:
      Choice and GateStats of these tokens, computed in promote(x.dtype, float32).
    """
    return build_router(config).choose(x, {"w_gate": w_gate}, RouterInputs(noise_key, token_ids))
