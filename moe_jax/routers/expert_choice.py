"""`expert_choice`: every expert takes its best tokens, so a token has none, one or several experts.

Inputs: as in `topk.py`. Outputs: a `Choice` of A = E C lines, expert by expert, each its best token first, ties to the
lowest token. Of the t tokens of a drop group each expert takes C = ceil(K f t / E), at most t: K experts per token on
average where f = MoEConfig.capacity_factor is 1 or None. The weight is the softmax over experts, not renormalised.
Loads are even by construction and there is no balance loss. Whether a token is taken depends on the others of its drop
group, later ones too: a causal model looks ahead while it trains, which is said once in the log.
Source: Zhou et al., Mixture-of-Experts with Expert Choice Routing (2022), section 3.
Letters: docs/notation.md.
"""

from __future__ import annotations

import functools
import logging
import math

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.dispatch.route import Choice
from moe_jax.errors import UserError
from moe_jax.routers.contract import Choices, RouterPlace, Unbalanced
from moe_jax.routers.registry import router
from moe_jax.routers.scores import gate_logits
from moe_jax.routers.statistics import statistics_of
from moe_jax.routers.topk import TopK

_LOG = logging.getLogger(__name__)


@router("expert_choice")
class ExpertChoice(Unbalanced, TopK):
    """Let experts choose tokens."""

    in_groups = False
    ignores = ("routed_scale", "renormalize", "drop", "min_capacity")
    replays = False
    by_token = False
    balances = ("batch",)

    def __init__(self, config, place: RouterPlace | None = None):
        super().__init__(config, place)
        if place is not None:
            say_once()

    def taken(self, tokens: int) -> int:
        """Return C, how many of so many tokens each expert takes."""
        return min(tokens, math.ceil(self.wanted * tokens / self.config.num_experts))

    @property
    def wanted(self) -> float:
        """K f, experts per token as they are asked for."""
        factor = self.config.capacity_factor
        return self.config.top_k * (1.0 if factor is None else factor)

    @property
    def experts_per_token(self) -> float:
        return min(self.wanted, self.config.num_experts)

    def check_tokens(self, tokens):
        self.choices(tokens)

    def choices(self, tokens):
        parts = 1 if self.place is None else self.place.roles.size(self.place.roles.model)
        uneven = parts * self.taken(tokens // parts) != self.taken(tokens)
        if tokens % parts == 0 and (uneven or self.config.num_experts * self.taken(tokens) % parts):
            config = self.config
            raise UserError(
                f"MoEConfig.top_k ({config.top_k}) x capacity_factor ({config.capacity_factor}) x {tokens} tokens of a "
                f"model-parallel group must be divisible by MoEConfig.num_experts ({config.num_experts}) x "
                f"MeshConfig.model ({parts}) with MoEConfig.router = 'expert_choice'; change one of them"
            )
        return Choices(lines=self.config.num_experts * self.taken(tokens), top_k=1, capacity=self.taken(tokens))

    def choose(self, x, params, inputs):
        logits = gate_logits(x, params["w_gate"], self.config.router_dtype)
        noisy = self.with_noise(logits, x, params, inputs)
        probs, each = jax.nn.softmax(noisy, axis=-1), self.taken(x.shape[0])
        weights, token_of = tuple(lax.top_k(probs.T, each))  # [E, C]
        expert_ids = jnp.repeat(jnp.arange(self.config.num_experts, dtype=jnp.int32), each)
        choice = Choice(
            expert_ids=expert_ids[:, None],
            weights=weights.reshape(-1, 1),
            keep_mask=jnp.ones((expert_ids.shape[0], 1), bool),
            token_of=token_of.reshape(-1),
        )
        log_z = jax.scipy.special.logsumexp(logits, axis=-1)
        return choice, statistics_of(choice, probs, jax.nn.log_softmax(noisy, axis=-1), log_z)


@functools.cache
def say_once() -> None:
    """Say in the log what a causal model does under this router."""
    _LOG.warning(
        "MoEConfig.router = 'expert_choice': whether an expert takes a token depends on later tokens too, so a causal "
        "model (ModelConfig.kind = 'gpt') looks ahead"
    )
